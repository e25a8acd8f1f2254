"""Read the other logs of a store, in addition to the opened one, because damage in any log is damage of the store."""

from __future__ import annotations

from dataclasses import dataclass

from cnr_store.errors import AccessDenied, CnrStoreError, CorruptRecord
from cnr_store.log import branches
from cnr_store.log.branches import Branch
from cnr_store.log.commit_log import CommitLog
from cnr_store.maintenance.verify.log import LogView, read_log
from cnr_store.maintenance.verify.report import Findings
from cnr_store.runtime.threads import Workers
from cnr_store.store import Store


@dataclass(frozen=True, slots=True)
class Log:
    """One log of a store during a check; ``branch`` is a name, None for the store's own log."""

    branch: str | None
    view: LogView
    findings: Findings
    log: CommitLog


def other_logs(store: Store, own: Log, workers: Workers, *, every: bool) -> list[Log]:
    """Read the store's own log and those of its branches, except ``own``.

    Blocks; about one GET per version. A relay has only one log. ``every``: as for `read_log`.

    Raises
    ------
    AccessDenied
    """
    if store.relay is not None:
        return []
    logs = []
    main = own
    if own.branch is not None:
        findings = Findings()
        view = read_log(store.storage, store.identity, workers, findings, every=every)
        main = Log(None, view, findings, store.internals.log.below(""))
        logs.append(main)
    pins = {} if main.view.head is None else main.view.head.record.pins
    for branch in sorted((Branch(uuid, pin) for uuid, pin in pins.items()), key=lambda branch: branch.name):
        if branch.name == own.branch:
            continue
        try:
            log = branches.log_of(store.internals.log, branch)
        except CorruptRecord as error:
            assert main.view.head is not None  # it has the pin
            main.findings.add_error(error, main.view.key(main.view.head.record.v), ())
            continue
        findings = Findings(branch.name)
        view = read_log(store.storage, store.identity, workers, findings, every=every, prefix=log.prefix)
        try:
            branches.has_first(log, branch)
        except AccessDenied:
            raise
        except CnrStoreError as error:
            findings.add_error(error, view.key(0), (0,))
        logs.append(Log(branch.name, view, findings, log))
    return logs
