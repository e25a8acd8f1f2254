"""Documents as tables for people. Every string that comes from a store passes `cell`, so no name acts on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cnr_store_tools.output import Document
from cnr_store_tools.text import one_line, ranges_text, ratio_text, size_text, time_text

SEGMENT_STATES = ("stays", "young", "named", "waiting", "due", "deleted", "failed")
KINDS = ("rows", "codes", "scales", "slots", "dense", "documents", "metadata", "total")


def cell(value: Any) -> Text:
    """Return a value as literal text."""
    return Text(one_line("" if value is None else str(value)))


def say(console: Console, text: str) -> None:
    """Print one line as it is, without markup or wrapping."""
    console.print(cell(text), soft_wrap=True)


def log(console: Console, document: Document) -> None:
    """Draw the log, newest record first."""
    columns = ("version", "kind", "step", "time", "chain", "rows", "size", "about", "named", "writer")
    table = _table(*columns, title=_place(document))
    for item in document["records"]:
        size = size_text(item["size_bytes"]) if "size_bytes" in item else ""
        about = " -> ".join(str(item[key]) for key in ("name", "target") if key in item)
        named = ", ".join((*item["tags"], *item["channels"]))
        table.add_row(
            *map(cell, (item["version"], item["kind"], item["step"], item["time"], item["chain_length"],
                        item.get("rows", ""), size, about, named, item["writer"]))
        )  # fmt: skip
    console.print(table)


def show(console: Console, document: Document) -> None:
    """Draw a version: what it is, its tables, its chain by kind of byte."""
    say(console, f"{_place(document)}  version {document['version']} ({document['kind']}), step {document['step']}, "
                 f"{document['time']}, profile {document['profile']}, format {document['format']}")  # fmt: skip
    for kind in ("tags", "channels"):
        if document[kind]:
            say(console, f"{kind}: {', '.join(document[kind])}")
    if not document["chain"]:
        say(console, "nothing has been saved yet")
        return
    tables = _table("table", "rows", "dim", "dtype", "encoding", "generation", "slots", title="tables")
    for name, item in document["tables"].items():
        rows = "hashed" if item["rows"] is None else item["rows"]
        slots = ", ".join(f"{slot} ({encoding_text(kind['encoding'])})" for slot, kind in item["slots"].items())
        tables.add_row(
            *map(cell, (name, rows, item["dim"], item["dtype"], encoding_text(item["encoding"], item["shift"]),
                        f"{item['generation']}" + (f" shift {item['shift']}" if item["shift"] else ""), slots))
        )  # fmt: skip
    console.print(tables)
    for name, item in document["tables"].items():
        if item["waiting"]:
            waiting = item["waiting"]
            say(console, f"{name}: {waiting['count']} rows wait for a later save, within {waiting['max_error']:.4g} of "
                         f"what is stored, for {waiting['oldest']} saves at most so far")  # fmt: skip
    _rate(console, document["rate"])
    say(console, f"dense tensors: {len(document['dense'])}, scalars: {len(document['scalars'])}, "
                 f"documents: {', '.join(document['documents']) or 'none'}")  # fmt: skip
    chain = _table("segment", "kind", "step", "rows", *KINDS, "fp32 full / size", title="chain, baseline first")
    for item in document["chain"]:
        sizes = [size_text(item["sizes"][kind]) for kind in KINDS]
        about = (f"..{item['segment'][-8:]}", item["kind"], item["step"], item["rows"])
        chain.add_row(*map(cell, (*about, *sizes, ratio_text(item["ratio"]))))
    chain.add_section()
    sizes = [size_text(document["sizes"][kind]) for kind in KINDS]
    changed = sum(item["rows"] for item in document["chain"])
    chain.add_row(*map(cell, ("all", "", "", changed, *sizes, ratio_text(document["ratio"]))))
    console.print(chain)


def _rate(console: Console, rate: Document | None) -> None:
    """Say what the training knew of its exactness, where there is something to say."""
    if rate is None:
        return
    if rate["restores"]:
        say(console, f"the training was restored {rate['restores']} times on its way here")
    if rate["calibrated"]:
        say(console, f"scales that a validation chose: {', '.join(rate['calibrated'])}")
    target = rate["target"]
    if target is not None:
        doubled = [f"{table} doubled {count} times" for table, count in sorted(target["doublings"].items()) if count]
        share = f"; {100 * target['share']:.0f} % of the rows that thresholds keep" if target["share"] < 1 else ""
        scales = f"; scales: {', '.join(doubled)}" if doubled else ""
        say(console, f"target of {size_text(target['bytes'])} per checkpoint: {target['state']}{share}{scales}")


def encoding_text(encoding: Document, shift: int = 0) -> str:
    """Return an encoding in a few words; of a lattice the scale that it has after so many halvings."""
    name = encoding["encoding"]
    if name == "lattice":
        return f"lattice, scale {encoding['scale'] * 0.5**shift:.4g}"
    if name == "float_bits":
        return f"float_bits {encoding['mantissa_bits']}"
    if name == "affine":
        return f"affine {encoding['bits']} bits, {encoding.get('search', 'grid')}"
    return str(name)


def verify(console: Console, document: Document) -> None:
    """Draw the problems, or say that there are none."""
    versions = ranges_text(document["versions"]) or "none"
    depth = ", states replayed" if document["is_deep"] else ""
    say(console, f"{document['url']}: read {document['records']} commit records, {document['segments']} segments, "
                 f"{document['objects']} objects, {size_text(document['size_bytes'])}; "
                 f"versions {versions}{depth}")  # fmt: skip
    if document["unreferenced"]:
        say(console, f"segments that no version needs: {document['unreferenced']} (`cnr gc` explains them)")
    if document["superseded"]:
        say(
            console,
            f"log positions without a version, superseded by a repair: {ranges_text(sorted(document['superseded']))}",
        )
    for other in document["others"]:
        read = f"versions {ranges_text(other['versions']) or 'none'}" if other["is_read"] else "its records alone"
        say(console, f"{_log_text(other['branch'])}: read {read}")
    if document["is_sound"]:
        say(console, "no problems found")
        return
    _problems(console, document["problems"], _count(document["problems"], "problem"))
    for log in (document, *(other for other in document["others"] if other["is_read"])):
        name = "" if log is document else f" of {_log_text(log['branch'])}"
        whole = ranges_text(sorted(log["restorable"])) or "none"
        say(console, f"whole, of the versions{name} that were read: {whole}")


def _log_text(branch: str | None) -> str:
    return "the store's own log" if branch is None else f"branch {branch!r}"


def repair(console: Console, document: Document) -> None:
    """Draw what was done, or would be, what is lost and what stays wrong."""
    is_dry_run = document["is_dry_run"]
    if not document["actions"] and document["has_log"]:
        say(console, f"{document['url']}: nothing to repair")
    for item in document["actions"]:
        done = "would" if is_dry_run else "done" if item["version"] is None else f"version {item['version']}"
        say(console, f"{done}: {item['kind']}: {item['message']}")
    if not document["has_log"]:
        say(console, f"{document['url']}: the commit log, or its beginning, is lost. A repair appends records behind "
                     "others and can make none up: segments do not say whether they were committed. Restore the log "
                     "from a backup, or save to a new store; what is left stays, and any Zarr reader opens its "
                     "arrays")  # fmt: skip
    elif document["target"] is None:
        say(console, "no version is whole; restore a copy of the store, or begin with a full save")
    for item in document["lost"]:
        say(console, f"lost: version {item['version']} (step {item['step']}) is newer and not whole")
    if document["remaining"]:
        _problems(console, document["remaining"], "stays wrong")
    if is_dry_run and document["actions"]:
        say(console, "nothing was changed; --apply does it")


def _problems(console: Console, problems: list[Document], title: str) -> None:
    table = _table("kind", "object", "hurts versions", "what is wrong", title=title)
    for item in problems:
        versions = ranges_text(item["versions"]) or "none"
        if item["branch"] is not None:
            versions = f"{versions} (branch {item['branch']!r})"
        table.add_row(*map(cell, (item["kind"], item["path"], versions, item["message"])))
    console.print(table)


def export(console: Console, document: Document) -> None:
    """Say what was written."""
    table = _table("tensor", "role", "dtype", "shape", title=f"step {document['step']}, version {document['version']}")
    for item in document["tensors"]:
        table.add_row(*map(cell, (item["name"], item["role"], item["dtype"], tuple(item["shape"]))))
    console.print(table)
    size, files = size_text(document["size_bytes"]), _count(document["files"], "file")
    say(console, f"wrote {size} in {files} to {document['path']}")


def imported(console: Console, document: Document) -> None:
    """Say what was committed."""
    say(console, f"{document['url']}: committed version {document['version']} (full, step {document['step']}), "
                 f"{size_text(document['size_bytes'])}")  # fmt: skip
    for key in ("tables", "dense", "dropped", "ignored"):
        names = document[key]
        if names:
            say(console, f"{key} ({len(names)}): {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}")


def compaction(console: Console, document: Document) -> None:
    """Say what was folded, one line per fold."""
    for fold in document["folds"]:
        say(console, f"{_place(document)}: {fold_text(fold)}")


def fold_text(fold: Document) -> str:
    """Return what became of one fold, in a sentence."""
    about = (
        f"{_count(fold['run'], 'segment')}, {size_text(fold['bytes_in'])}, into one {fold['kind']} ({fold['reason']})"
    )
    match fold["outcome"]:
        case "nothing":
            return f"nothing to fold; the chain has {_many(fold['chain_after'], 'segment')}"
        case "planned":
            return f"would fold {about}"
        case "committed":
            reused = f", {fold['reused_tasks']} of {fold['tasks']} tasks done before" if fold["reused_tasks"] else ""
            return (
                f"version {fold['version']}: folded {about}, {size_text(fold['bytes_out'])} in {fold['seconds']:.1f} s"
                f"{reused}; the chain has {_many(fold['chain_after'], 'segment')}"
            )
        case "unfinished":
            return f"the time was over; the next run goes on: {fold['reason']}"
        case outcome:
            return f"{outcome}: {fold['reason']}"


def collection(console: Console, document: Document) -> None:
    """Draw each decision: versions in runs of one reason, segments that go, and the bytes."""
    versions = _table("branch", "versions", "what", "why", title=f"{document['url']}: live versions")
    for branch, stays, reason, numbers in _alike(document["versions"]):
        versions.add_row(*map(cell, (branch, ranges_text(numbers), "stays" if stays else "goes", reason)))
    console.print(versions)
    going = [item for item in document["segments"] if item["state"] != "stays"]
    if going:
        segments = _table("segment", "state", "size", "from", "why", title="segments that do not stay")
        for item in going:
            size = "" if item["size_bytes"] is None else size_text(item["size_bytes"])
            due = "" if item["delete_after_ms"] is None else time_text(item["delete_after_ms"])
            segments.add_row(*map(cell, (item["name"], item["state"], size, due, item["reason"])))
        console.print(segments)
    if document["side_objects"]:
        lists = _table("side object", title="lists of names that no record needs any more")
        for key in document["side_objects"]:
            lists.add_row(cell(key))
        console.print(lists)
    say(console, collection_text(document))
    for failure in document["failures"]:
        say(console, f"not deleted: {failure}")
    if document["is_dry_run"] and document["outcome"] == "planned":
        say(console, "nothing was changed; --delete does it")


def collection_text(document: Document) -> str:
    """Return a collection in a sentence."""
    is_dry_run = document["is_dry_run"]
    held = {state: [item for item in document["segments"] if item["state"] == state] for state in SEGMENT_STATES}
    expire, give = ("would expire", "give") if is_dry_run else ("expired", "gave")
    count = len(document["side_objects"])
    lists = f" and {_many(count, 'side object')}" if count else ""
    if is_dry_run:
        size = f" ({size_text(document['side_object_bytes'])})" if count else ""
        gone = f"{_amount(held['due'])}{lists}{size} may be deleted now"
    else:
        segments = _many(document["deleted_segments"], "segment")
        gone = f"deleted {segments}{lists} ({size_text(document['deleted_bytes'])})"
    waiting = [*held["waiting"], *held["failed"], *([] if is_dry_run else [*held["named"], *held["due"]])]
    return (
        f"{document['outcome']}: {expire} {_many(document['expired'], 'version')} and {give} up "
        f"{_many(document['named'], 'segment')}; {gone}; staying: {_many(document['staying'], 'segment')}, "
        f"waiting to be deleted: {_amount(waiting)}"
    )


def _amount(segments: list[Document]) -> str:
    """How many, and their bytes where all of them are known."""
    sizes = [item["size_bytes"] for item in segments]
    count = _many(len(segments), "segment")
    return count if None in sizes or not sizes else f"{count} ({size_text(sum(sizes))})"


def _alike(versions: list[Document]) -> list[tuple[str, bool, str, list[int]]]:
    """Runs of neighbours of one branch, fate and reason."""
    runs: list[tuple[str, bool, str, list[int]]] = []
    for item in versions:
        key = (item["branch"] or "", item["stays"], item["reason"])
        if runs and runs[-1][:3] == key:
            runs[-1][3].append(item["version"])
        else:
            runs.append((*key, [item["version"]]))
    return runs


def maintenance(console: Console, document: Document) -> None:
    """Say how each part went, and what that comes to."""
    for stage in document["stages"]:
        where = "" if stage["branch"] is None else f" branch {stage['branch']}"
        say(console, f"{stage['stage']}{where}: {stage['outcome']} in {stage['duration_s']:.1f} s")
        for fold in stage["folds"]:
            say(console, f"  {fold_text(fold)}")
        if stage["collection"] is not None:
            say(console, f"  {collection_text(stage['collection'])}")
        if stage["outcome"] == "held":
            say(console, "  nothing is deleted while data contradicts itself; run `cnr verify`")
    say(console, f"{document['url']}: {document['outcome']} in {document['duration_s']:.1f} s, "
                 f"{size_text(document['rewritten_bytes'])} rewritten, "
                 f"{size_text(document['deleted_bytes'])} deleted")  # fmt: skip


def branches(console: Console, document: Document) -> None:
    """Draw the branches, by name."""
    if not document["branches"]:
        say(console, f"{document['url']} has no branches")
        return
    table = _table("branch", "from version", "head", "step", "ends", title=document["url"])
    for item in document["branches"]:
        head = item["head"] or {"version": "over", "step": ""}
        ends = "never" if item["expires_ms"] is None else time_text(item["expires_ms"])
        table.add_row(*map(cell, (item["branch"], item["version"], head["version"], head["step"], ends)))
    console.print(table)


def cursors(console: Console, document: Document) -> None:
    """Draw the cursors, by name."""
    if not document["cursors"]:
        say(console, f"{document['url']} has no cursors")
        return
    table = _table("cursor", "branch", "version", "head", "moved", "until", "holder", title=document["url"])
    for item in document["cursors"]:
        until = "dropped" if item["expires_ms"] is None else time_text(item["expires_ms"])
        moved = time_text(item["moved_ms"])
        table.add_row(*map(cell, (item["cursor"], item["branch"], item["version"], item["head"], moved, until,
                                  item["holder"])))  # fmt: skip
    console.print(table)


def changes(console: Console, document: Document) -> None:
    """Draw how many rows each version changes, and where that leads."""
    if document["changes"]:
        table = _table("version", "step", "table", "upserts", "deletes", title=_place(document))
        for item in document["changes"]:
            table.add_row(*map(cell, (item[key] for key in ("version", "step", "table", "upserts", "deletes"))))
        console.print(table)
    if "folder" in document:
        say(console, f"wrote {_many(document['files'], 'file')} ({size_text(document['size_bytes'])}) to "
                     f"{document['folder']}")  # fmt: skip
    end = "the store is empty" if document["cursor"] is None else f"this was all up to version {document['cursor']}"
    say(console, end)


def change(console: Console, item: Document) -> None:
    """Print how many rows of a table a version changes, as one line."""
    say(console, f"version {item['version']}, step {item['step']}: {item['table']}: "
                 f"{_many(item['upserts'], 'upsert')}, {_many(item['deletes'], 'delete')}")  # fmt: skip


def message(console: Console, document: Document) -> None:
    """Print the document's own sentence."""
    say(console, document["message"])


def _place(document: Document) -> str:
    """The URL, and the branch if it is one."""
    return document["url"] if document["branch"] is None else f"{document['url']}, branch {document['branch']}"


def _count(things: list[Any], noun: str) -> str:
    return _many(len(things), noun)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _table(*columns: str, title: str) -> Table:
    table = Table(title=cell(title), title_justify="left", header_style="bold")
    counts = {"rows", "upserts", "deletes", "size", "fp32 full / size", *KINDS}
    numbers = {"version", "step", "chain", "dim", "from version", "head", *counts}
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table
