"""Read a whole log, newest first, past gaps and torn records; find which versions use which segment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from cnr_store.errors import (
    AccessDenied,
    CnrStoreError,
    CorruptObject,
    CorruptRecord,
    CorruptStore,
    MissingObject,
    StorageFailure,
    VersionNotFound,
    WrongClock,
)
from cnr_store.format import layout
from cnr_store.format.commit_record import (
    DATA_KINDS,
    Layer,
    LogEntry,
    Names,
    decode_record,
    is_live,
    named_versions,
    parent_of,
)
from cnr_store.format.documents import decode_document, sha256
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.format.records import CommitRecord, Hint, Identity
from cnr_store.log.beginning import check_begun
from cnr_store.log.clock import MAX_SKEW_MS, text_of, wall_ms
from cnr_store.log.log_reader import position_bytes
from cnr_store.log.side_objects import complete
from cnr_store.maintenance.verify.report import Findings, Problem
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.storage import Storage

_BATCH = 256
"""Number of positions read at once; it bounds the memory for records."""

_NAMED_IN_A_GAP = 256
"""Most versions that a problem lists; a stray record may be billions of positions after the log."""

Chain = tuple[str, ...]


@dataclass(slots=True)
class LogView:
    """The content of one log, as later steps of a check need it.

    Attributes
    ----------
    head
        The newest record that can be read.
    records
        Number of occupied positions.
    entries
        The records of the versions whose chains are to be read, by version.
    prefix
        Key prefix of the log: empty for the store's own, ``branches/<uuid>/`` for a branch's.
    superseded
        Positions that a later record superseded, newest first; they are no versions.
    users, enders
        Segment name to the live versions whose chain has it, and to those whose chain ends with it.
    """

    head: LogEntry | None = None
    records: int = 0
    prefix: str = ""
    superseded: list[int] = field(default_factory=list)
    entries: dict[int, LogEntry] = field(default_factory=dict)
    users: dict[str, list[int]] = field(default_factory=dict)
    enders: dict[str, list[int]] = field(default_factory=dict)

    @property
    def live(self) -> set[int]:
        """Live versions with a non-empty chain."""
        return {version for versions in self.enders.values() for version in versions}

    def key(self, version: int) -> str:
        """Return the key of a position of this log."""
        return layout.commit_key(version, self.prefix)

    def versions_of(self, segment: str) -> tuple[int, ...]:
        """Return the live versions that need a segment, ascending."""
        return tuple(sorted(self.users.get(segment, ())))


@dataclass(frozen=True, slots=True)
class Position:
    """One log position: its record, the digest of its bytes, and the error of reading it, or None.

    With both an entry and an error, a side object is lost, and the entry has only the record's own lists (`LogEntry`).
    """

    version: int
    entry: LogEntry | None
    digest: str | None
    error: CnrStoreError | None


def read_log(
    storage: Storage,
    identity: Identity,
    workers: Workers,
    findings: Findings,
    *,
    version: int | None = None,
    every: bool = False,
    prefix: str = "",
    first: int = 0,
) -> LogView:
    """Read every occupied position and check it against its neighbours. Blocks; about one GET per version.

    Adjacent empty positions are reported as one problem.

    Parameters
    ----------
    version, every
        Which entries to keep: this version; or all live ones; or (neither) the head and versions with a name.
    prefix
        Key prefix of the log; for a branch its `layout.branch_prefix`.
    first
        First position of the log; above 0 in a relay.

    Raises
    ------
    AccessDenied
    """
    view = LogView(prefix=prefix)
    listed = [number for number in list_positions(storage, prefix) if number >= first]
    newest = listed[-1] if listed else -1
    after: Position | None = None
    torn: dict[int, str] = {}
    lost: set[str] = set()
    foreign = readable = 0
    above = newest + 1
    for start, stop in blocks(len(listed), _BATCH):
        numbers = listed[len(listed) - stop : len(listed) - start][::-1]
        layers = {} if after is None or after.entry is None else {one.digest: one for one in after.entry.layers}
        reads = (partial(read_position, storage, number, prefix, layers) for number in numbers)
        for here in workers.run(reads):
            if here.version + 1 < above and _check_gap(view, here.version + 1, above, torn, findings):
                after = None
            above = here.version
            view.records += here.digest is not None
            if here.version in torn:
                view.superseded.append(here.version)
                _check_torn(view, here, torn[here.version], findings)
                continue
            readable += here.entry is not None
            foreign += here.entry is not None and here.entry.record.store_uuid != identity.store_uuid
            if here.error is not None:
                _add_error(view, here, here.error, lost, findings)
            if here.entry is not None:
                take(view, here.entry, version=version, every=every)
                torn |= superseded_by(here.entry.record)
            if after is not None:
                _check_neighbours(view, here, after, findings)
            after = here
    if listed and first < above:
        _check_gap(view, first, above, torn, findings)
    if foreign:
        findings.add(_foreign(identity, view, foreign, readable))
    if after is not None and after.version == 0 and not prefix:
        _check_identity(storage, after, findings)
    if view.head is not None and is_ahead(view.head.record, wall_ms()):
        message = (
            f"the newest record has the time {text_of(view.head.record.ts_ms)}, more than {MAX_SKEW_MS // 1000} s "
            "ahead of this machine's clock, and all later records will be later still: one of the clocks was wrong; "
            "run `cnr repair` to correct the time"
        )
        findings.add(Problem(WrongClock.kind, view.key(view.head.record.v), (), message))
    if not listed:
        _check_absent(storage, prefix, first, findings)
    else:
        _check_hint(storage, newest, prefix, findings)
    return view


def list_positions(storage: Storage, prefix: str = "") -> list[int]:
    """Return the occupied positions, ascending: a listing, which sees past gaps, then GETs after its last."""
    listed = (layout.commit_version(stat.key, prefix) for stat in storage.list_objects(prefix + layout.COMMITS))
    found = sorted(number for number in listed if number is not None)
    while storage.read(layout.commit_key(found[-1] + 1 if found else 0, prefix), stop=1) is not None:
        found.append(found[-1] + 1 if found else 0)
    return found


def read_position(storage: Storage, version: int, prefix: str = "", layers: dict[str, Layer] | None = None) -> Position:
    """Return the content of a position. One GET, and one per side object that is not in ``layers``.

    Raises
    ------
    AccessDenied
    """
    key = layout.commit_key(version, prefix)
    entry = digest = None
    try:
        data = position_bytes(storage, version, prefix)
        if data is None:
            raise MissingObject(f"log position {version} is empty: part of the log was deleted", path=key)
        digest = sha256(data)
        entry = decode_record(data, version)
        return Position(version, complete(storage, entry, {} if layers is None else layers), digest, None)
    except AccessDenied:
        raise
    except CnrStoreError as error:
        return Position(version, entry, digest, error)


def take(view: LogView, entry: LogEntry, *, version: int | None, every: bool) -> None:
    """Add an entry to the view. Entries have to arrive newest first, so the first one is the head."""
    record = entry.record
    if view.head is None:
        view.head = entry
    head = view.head.record
    if not record.chain or not is_live(head, record.v):
        if record.v == version:
            view.entries[record.v] = entry
        return
    wanted = record.v == version if version is not None else every or record.v == head.v
    if wanted or (version is None and record.v in named_versions(head).union(head.kept)):
        view.entries[record.v] = entry
    for item in record.chain:
        view.users.setdefault(item.seg, []).append(record.v)
    view.enders.setdefault(record.chain[-1].seg, []).append(record.v)


def superseded_by(record: CommitRecord) -> dict[int, str]:
    """Return the superseded positions, each with the digest of its bytes that the record names. Pure."""
    torn = () if record.supersedes is None else record.supersedes.torn
    return dict(enumerate(torn, start=record.v - len(torn)))


def _check_gap(view: LogView, start: int, stop: int, torn: dict[int, str], findings: Findings) -> bool:
    """Report that positions [start, stop) are empty; return whether one of them may have been a version."""
    for version in range(stop - 1, start - 1, -1):
        if version not in torn:
            break
        view.superseded.append(version)
        _check_torn(view, Position(version, None, None, None), torn[version], findings)
        stop = version
    if start == stop:
        return False
    what = f"log position {start} is" if stop == start + 1 else f"log positions {start} to {stop - 1} are"
    message = f"{what} empty, but later ones are not: part of the log was deleted"
    versions = tuple(range(start, stop)) if stop - start <= _NAMED_IN_A_GAP else ()
    findings.add(Problem(MissingObject.kind, view.key(start), versions, message))
    return True


def _add_error(view: LogView, here: Position, error: CnrStoreError, lost: set[str], findings: Findings) -> None:
    """Report the error of a position; that of a side object once for all records that name it (``lost``).

    Only the newest record needs its side objects. Those of older records may have been deleted (spec, CNR-LOG-62), and
    damage in them affects no version.
    """
    path = error.path or view.key(here.version)
    if here.entry is None or view.head is None:
        findings.add_error(error, path, (here.version,))
    elif path not in lost and not isinstance(error, MissingObject):
        findings.add_error(error, path, ())
    if here.entry is not None:
        lost.add(path)


def _check_torn(view: LogView, here: Position, digest: str, findings: Findings) -> None:
    if here.digest == digest:
        return
    key = view.key(here.version)
    found = "is missing" if here.digest is None else f"has sha256 {here.digest}"
    message = f"{key} {found}, but a later record superseded bytes of sha256 {digest}; no reader needs them"
    findings.add(Problem(CorruptRecord.kind, key, (), message))


def distinct_chains(entries: Iterable[LogEntry]) -> list[LogEntry]:
    """Return the entries whose chain is not a prefix of another entry's chain. Pure."""
    known: set[Chain] = set()
    kept = []
    for entry in sorted(entries, key=lambda item: (len(item.record.chain), item.record.v), reverse=True):
        names = tuple(item.seg for item in entry.record.chain)
        if names and names not in known:
            kept.append(entry)
            known.update(names[:stop] for stop in range(1, len(names) + 1))
    return kept


def _check_neighbours(view: LogView, before: Position, after: Position, findings: Findings) -> None:
    if after.entry is None or before.digest is None:
        return
    record = after.entry.record
    version, digest = parent_of(record)
    if before.digest != digest:
        findings.add(
            Problem(
                CorruptRecord.kind,
                view.key(version),
                (version,),
                f"commit record {version} has sha256 {before.digest}, but record {record.v} names "
                f"{digest or 'none'} as its parent's; one of the two was altered",
            )
        )
    elif before.entry is not None:
        for message in _contradictions(before.entry.record, record):
            findings.add(Problem(CorruptRecord.kind, view.key(record.v), (record.v,), message))


def is_ahead(newest: CommitRecord, now_ms: int) -> bool:
    """Return whether the newest record's time is in the future, by more than the allowed skew. Pure."""
    return newest.ts_ms > now_ms + MAX_SKEW_MS


def _sets_time_right(before: CommitRecord, after: CommitRecord) -> bool:
    """Return whether ``after`` is a repair that corrects a time far ahead (spec, section 7.10). Pure."""
    return after.kind == "rollback" and after.ts_ms + MAX_SKEW_MS < before.ts_ms


def _contradictions(before: CommitRecord, after: CommitRecord) -> Iterable[str]:
    """Yield what is inconsistent between a record and its parent. Pure."""
    if after.ts_ms <= before.ts_ms and not _sets_time_right(before, after):
        yield f"commit record {after.v} has time {after.ts_ms}, not after its parent's {before.ts_ms}"
    if after.epoch < before.epoch:
        yield f"commit record {after.v} has epoch {after.epoch}, its parent has {before.epoch}"
    if before.kind == "close":
        yield f"commit record {after.v} ({after.kind}) follows the record that closed its branch"
    if before.state is not None or after.state is not None:
        return  # The lists of one record were deleted, so they cannot be compared.
    if after.kind not in DATA_KINDS:
        for name in ("checkpoint", "step") if after.kind == "compact" else ("chain", "checkpoint", "step"):
            if getattr(after, name) != getattr(before, name):
                yield f"the {after.kind} record {after.v} has a different {name} than its parent"
    names = Names(before.tags, before.channels, before.pins).after(after)
    for word in ("tags", "channels", "pins"):
        found, expected = getattr(after, word), getattr(names, word)
        if found != expected:
            yield f"the {after.kind} record {after.v} has {word} {sorted(found)}, expected {sorted(expected)}"


def _check_identity(storage: Storage, first: Position, findings: Findings) -> None:
    """Compare the identity document with the digest that the first record names as its parent's."""
    try:
        digest = sha256(storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES) or b"")
    except CorruptObject as error:
        findings.add_error(error, layout.IDENTITY, ())
        return
    if first.entry is not None and first.entry.record.parent_digest != digest:
        message = f"{layout.IDENTITY} has sha256 {digest}, the first record expects {first.entry.record.parent_digest}"
        findings.add(Problem(CorruptStore.kind, layout.IDENTITY, (), message))


def _foreign(identity: Identity, view: LogView, count: int, readable: int) -> Problem:
    """Return the problem of foreign store uuids: of the identity if all records have one, else of the log."""
    if count == readable:
        message = f"{layout.IDENTITY} names store {identity.store_uuid}, but every commit record names another one"
        return Problem(CorruptStore.kind, layout.IDENTITY, tuple(sorted(view.entries)), message)
    message = f"{count} commit records belong to another store than {identity.store_uuid}: two stores were mixed"
    return Problem(CorruptStore.kind, view.prefix + layout.COMMITS, tuple(sorted(view.entries)), message)


def _check_absent(storage: Storage, prefix: str, first: int, findings: Findings) -> None:
    """Report a log without positions, unless nothing was ever saved to the store."""
    try:
        check_begun(storage, prefix, first)
    except VersionNotFound:
        pass
    except CorruptStore as error:
        findings.add_error(error, prefix + layout.COMMITS, ())


def _check_hint(storage: Storage, newest: int, prefix: str, findings: Findings) -> None:
    """Report a hint that is unreadable or above the newest version; it may be absent or lower."""
    key = layout.hint_key(prefix)
    try:
        data = storage.read_document(key, MAX_SMALL_BYTES)
        if data is None:
            return
        version = decode_document(data, Hint, key).version
    except AccessDenied:
        raise
    except StorageFailure as error:
        findings.add_error(error, key, ())
        return
    except CorruptStore as error:
        problem = error.message.removesuffix("; run `cnr verify`")
    else:
        if 0 <= version <= newest:
            return
        # The log was listed first: of a store that is written meanwhile the hint may name a later record.
        if version > newest and storage.read(layout.commit_key(version, prefix), stop=1) is not None:
            return
        problem = f"{key} names version {version}, the newest is {newest}"
    message = f"{problem}; readers find the newest version without it, and the next commit rewrites it"
    findings.add(Problem(CorruptStore.kind, key, (), message))
