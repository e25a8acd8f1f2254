"""Read the whole commit log, newest first, past holes and torn records, and find out who uses which segment."""

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
from cnr_store.format.commit_record import DATA_KINDS, Layer, LogEntry, Names, decode_record, is_live, parent_of
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
"""Positions read at once, so that memory does not grow with the records of a log."""

_NAMED_IN_A_GAP = 256
"""Versions that a problem names one by one; a stray record may stand billions of positions behind the log."""

Chain = tuple[str, ...]


@dataclass(slots=True)
class LogView:
    """What the rest of a check needs from the log.

    Attributes
    ----------
    head
        The newest record that can be read.
    records
        Occupied positions.
    entries
        The records of the versions whose chains are to be read, by version.
    prefix
        Where the log is: nothing for the store's own, ``branches/<uuid>/`` for a branch's.
    superseded
        Positions that hold no version any more because a later record says so, newest first.
    users, enders
        Segment name to the live versions whose chain holds it, and to those whose chain ends with it.
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
        """The versions with a state that readers may open."""
        return {version for versions in self.enders.values() for version in versions}

    def key(self, version: int) -> str:
        """Return the key of a position of this log."""
        return layout.commit_key(version, self.prefix)

    def versions_of(self, segment: str) -> tuple[int, ...]:
        """Return the live versions that need a segment, ascending."""
        return tuple(sorted(self.users.get(segment, ())))


@dataclass(frozen=True, slots=True)
class Position:
    """One log position: its record, the digest of its bytes if there are any, and what is wrong with it.

    With both an entry and an error a side object is lost, and the record has no lists but its own (`LogEntry`).
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
    """Read every position that is there and check it against its neighbours. Blocks; about one GET per version.

    Positions that are not are one problem for all that lie together.

    Parameters
    ----------
    version, every
        Which entries to keep: that version, or all live ones, or (neither) the head and what has a name.
    prefix
        Of the log's keys; of a branch its `layout.branch_prefix`.
    first
        Where the log begins; above 0 in a relay.

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
            f"the newest record is of {text_of(view.head.record.ts_ms)}, later than this machine's time by more than "
            f"{MAX_SKEW_MS // 1000} s, and so will be all that follow it: one of the clocks was wrong; `cnr repair` "
            "sets the time right"
        )
        findings.add(Problem(WrongClock.kind, view.key(view.head.record.v), (), message))
    if not listed:
        _check_absent(storage, prefix, first, findings)
    _check_hint(storage, newest, prefix, findings)
    return view


def list_positions(storage: Storage, prefix: str = "") -> list[int]:
    """Return the occupied positions, ascending: by listing, which sees beyond a hole, and by reading on from there."""
    listed = (layout.commit_version(stat.key, prefix) for stat in storage.list_objects(prefix + layout.COMMITS))
    found = sorted(number for number in listed if number is not None)
    while storage.read(layout.commit_key(found[-1] + 1 if found else 0, prefix), stop=1) is not None:
        found.append(found[-1] + 1 if found else 0)
    return found


def read_position(storage: Storage, version: int, prefix: str = "", layers: dict[str, Layer] | None = None) -> Position:
    """Return what stands at a position. One GET, and one for each side object that is not noted in ``layers``.

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
    """Keep what is asked for; positions arrive newest first, so the head's lists are known from the start."""
    record = entry.record
    if view.head is None:
        view.head = entry
    head = view.head.record
    if not record.chain or not is_live(head, record.v):
        if record.v == version:
            view.entries[record.v] = entry
        return
    wanted = record.v == version if version is not None else every or record.v == head.v
    if wanted or (version is None and record.v in named_versions(head)):
        view.entries[record.v] = entry
    for item in record.chain:
        view.users.setdefault(item.seg, []).append(record.v)
    view.enders.setdefault(record.chain[-1].seg, []).append(record.v)


def named_versions(head: CommitRecord) -> set[int]:
    """Return the versions that tags, channels, pins and the list of kept ones name. Pure."""
    pinned = (pin.version for pin in head.pins.values())
    return {*head.tags.values(), *head.channels.values(), *pinned, *head.kept}


def superseded_by(record: CommitRecord) -> dict[int, str]:
    """Return position to the digest of its bytes, as the record that superseded them saw them. Pure."""
    torn = () if record.supersedes is None else record.supersedes.torn
    return dict(enumerate(torn, start=record.v - len(torn)))


def _check_gap(view: LogView, start: int, stop: int, torn: dict[int, str], findings: Findings) -> bool:
    """Add that positions [start, stop) are empty; returns whether a version may have stood at one of them."""
    for version in range(stop - 1, start - 1, -1):
        if version not in torn:
            break
        view.superseded.append(version)
        _check_torn(view, Position(version, None, None, None), torn[version], findings)
        stop = version
    if start == stop:
        return False
    what = f"log position {start} is" if stop == start + 1 else f"log positions {start} to {stop - 1} are"
    message = f"{what} empty although later ones are not: part of the log was deleted"
    versions = tuple(range(start, stop)) if stop - start <= _NAMED_IN_A_GAP else ()
    findings.add(Problem(MissingObject.kind, view.key(start), versions, message))
    return True


def _add_error(view: LogView, here: Position, error: CnrStoreError, lost: set[str], findings: Findings) -> None:
    """Add what is wrong with a position; a side object once for all records that name it, in ``lost``.

    Only the newest record needs its own: of others one may have been collected (spec, CNR-LOG-62), or is altered, and
    hurts no version.
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
    message = f"{key} {found}, a later record superseded bytes of sha256 {digest}; nobody needs them"
    findings.add(Problem(CorruptRecord.kind, key, (), message))


def distinct_chains(entries: Iterable[LogEntry]) -> list[LogEntry]:
    """Return the entries without those whose chain is the beginning of another's. Pure."""
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
                f"commit record {version} is not the one that record {record.v} was written behind: its bytes "
                f"have sha256 {before.digest}, expected {digest or 'none'}; one of the two was altered",
            )
        )
    elif before.entry is not None:
        for message in _contradictions(before.entry.record, record):
            findings.add(Problem(CorruptRecord.kind, view.key(record.v), (record.v,), message))


def is_ahead(newest: CommitRecord, now_ms: int) -> bool:
    """Return whether the newest record is of a time to come, so that all that follow it would be. Pure."""
    return newest.ts_ms > now_ms + MAX_SKEW_MS


def _sets_time_right(before: CommitRecord, after: CommitRecord) -> bool:
    """Whether a repair has gone back from a time that was far ahead (spec, section 7.10). Pure."""
    return after.kind == "rollback" and after.ts_ms + MAX_SKEW_MS < before.ts_ms


def _contradictions(before: CommitRecord, after: CommitRecord) -> Iterable[str]:
    """What a record says that cannot follow from the one before it. Pure."""
    if after.ts_ms <= before.ts_ms and not _sets_time_right(before, after):
        yield f"commit record {after.v} has time {after.ts_ms}, not after its parent's {before.ts_ms}"
    if after.epoch < before.epoch:
        yield f"commit record {after.v} has epoch {after.epoch}, its parent has {before.epoch}"
    if before.kind == "close":
        yield f"commit record {after.v} ({after.kind}) stands behind the end of its branch"
    if before.state is not None or after.state is not None:
        return  # The lists of one of them were collected.
    if after.kind not in DATA_KINDS:
        for name in ("checkpoint", "step") if after.kind == "compact" else ("chain", "checkpoint", "step"):
            if getattr(after, name) != getattr(before, name):
                yield f"the {after.kind} record {after.v} has another {name} than the record before it"
    names = Names(before.tags, before.channels, before.pins).after(after)
    for word in ("tags", "channels", "pins"):
        found, expected = getattr(after, word), getattr(names, word)
        if found != expected:
            yield f"the {after.kind} record {after.v} has {word} {sorted(found)}, expected {sorted(expected)}"


def _check_identity(storage: Storage, first: Position, findings: Findings) -> None:
    """The first record was written behind the identity: whichever of the two was altered, they differ."""
    try:
        digest = sha256(storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES) or b"")
    except CorruptObject as error:
        findings.add_error(error, layout.IDENTITY, ())
        return
    if first.entry is not None and first.entry.record.parent_digest != digest:
        message = f"{layout.IDENTITY} has sha256 {digest}, the log began behind {first.entry.record.parent_digest}"
        findings.add(Problem(CorruptStore.kind, layout.IDENTITY, (), message))


def _foreign(identity: Identity, view: LogView, count: int, readable: int) -> Problem:
    """Records of another store: all of them point to the identity, some of them to themselves."""
    if count == readable:
        message = f"{layout.IDENTITY} names store {identity.store_uuid}, every commit record names another one"
        return Problem(CorruptStore.kind, layout.IDENTITY, tuple(sorted(view.entries)), message)
    message = f"{count} commit records belong to another store than {identity.store_uuid}: two stores were mixed"
    return Problem(CorruptStore.kind, view.prefix + layout.COMMITS, tuple(sorted(view.entries)), message)


def _check_absent(storage: Storage, prefix: str, first: int, findings: Findings) -> None:
    """A log without any position is damage, unless nothing was saved to the store yet."""
    try:
        check_begun(storage, prefix, first)
    except VersionNotFound:
        pass
    except CorruptStore as error:
        findings.add_error(error, prefix + layout.COMMITS, ())


def _check_hint(storage: Storage, newest: int, prefix: str, findings: Findings) -> None:
    """The hint may be absent or behind; unreadable or ahead means that something else wrote it."""
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
        problem = f"{key} names version {version}, the newest is {newest}"
    message = f"{problem}; readers find the newest version without it, and the next commit writes it anew"
    findings.add(Problem(CorruptStore.kind, key, (), message))
