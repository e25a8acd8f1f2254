"""Commands that create and show stores: init, log, show, version."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Annotated, Any

import typer

from cnr_store import CorruptStore, Snapshot, Store, compare_tables, fp32_bytes, segment_sizes, total_sizes
from cnr_store_tools.options import (
    Branch,
    Channel,
    Json,
    Step,
    StorageOptions,
    Tag,
    Url,
    Version,
    open_store,
    place_options,
)
from cnr_store_tools.output import Document, Part, emit, emit_message, table, to_document
from cnr_store_tools.render import SHORT_NAME, encoding_text, place_text, rate_lines
from cnr_store_tools.text import natural, size_text, time_text

KINDS = ("rows", "codes", "scales", "slots", "dense", "documents", "metadata", "total")
"""The kinds of bytes of a segment."""

PROGRESS, TRAINER = "progress/0", "trainer/0"
MAX_NAMES = 5
"""Names of one version that a line of the log has."""


def init(url: Url, storage_option: StorageOptions = None, json: Json = False) -> None:
    """Create an empty store."""
    with Store.create(url, **place_options(storage_option)) as store:
        document = {"url": store.url, "store_uuid": store.uuid}
    emit_message(f"created {store.url} (uuid {store.uuid})", document, as_json=json)


def log(
    url: Url,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Maximum number of records.")] = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """List the commit records, newest first."""
    with open_store(url, storage_option, branch) as store:
        records: list[Document] = []
        document: Document = {"url": store.url, "branch": store.branch, "records": records}
        try:
            records.extend(_records(store, limit))
        except CorruptStore:
            if not json:  # what is newer than the damage; a document has the error alone
                _emit_log(document, as_json=False)
            raise
    _emit_log(document, as_json=json)


def _emit_log(document: Document, *, as_json: bool) -> None:
    rows = [item | {"note": _note(item), "chain": item["chain_length"]} for item in document["records"]]
    columns = ("version", "kind", "step", "time_ms", "chain", "rows", "size_bytes", "note", "writer")
    emit(document, (table(place_text(document), rows, columns, ("writer", "chain")),), as_json=as_json)


def _note(item: Document) -> str:
    """Return whether a version has expired, the names that its record gives and that it has now, its save's notes."""
    target = None if item["target"] is None else f"-> {item['target']}"
    about = " ".join(part for part in (item["name"], target) if part)
    names = [about] * bool(about) + item["tags"] + item["channels"]
    if len(names) > MAX_NAMES:
        names[MAX_NAMES:] = [f"{len(names) - MAX_NAMES} more: `cnr tags`, `cnr channels`"]
    return ", ".join(["expired"] * item["expired"] + names + _notes_of(item["user"]))


def _notes_of(user: Mapping[str, Any]) -> list[str]:
    """Return the message and the metrics of a save."""
    message, metrics = user.get("message"), user.get("metrics")
    found = [message] if isinstance(message, str) else []
    if isinstance(metrics, dict):
        found += [f"{name} {value:.5g}" for name, value in sorted(metrics.items()) if isinstance(value, int | float)]
    return found


def _records(store: Store, limit: int | None) -> Iterator[Document]:
    """Yield the newest records, newest first, each with the tags and channels that name it now.

    ``expired``: the version can no longer be opened, only its record is left.
    """
    newest = store.head()
    head = newest.record
    for record in store.log(limit=limit):
        saved = record.chain[-1] if record.kind in ("baseline", "delta") and record.chain else None
        name = record.name
        if record.kind == "fork" and name is not None:  # the uuid of a branch; at position 0 its own
            pin = head.pins.get(name)
            name = store.branch if record.v == 0 else name if pin is None else pin.name
        yield {
            "version": record.v, "kind": record.kind, "step": record.step, "checkpoint": record.checkpoint,
            "time_ms": record.ts_ms, "epoch": record.epoch, "chain_length": len(record.chain),
            "writer": record.writer.host, "segment": None if saved is None else saved.seg,
            "size_bytes": None if saved is None else saved.size_bytes, "rows": None if saved is None else saved.rows,
            "name": name, "target": record.target, "user": record.user, "expired": not newest.is_live(record.v),
            **_names(head.tags, head.channels, record.v),
        }  # fmt: skip


def _names(tags: Mapping[str, int], channels: Mapping[str, int], version: int) -> Document:
    """Return the tags and channels that name a version."""
    return {
        kind: sorted((name for name, target in named.items() if target == version), key=natural)
        for kind, named in (("tags", tags), ("channels", channels))
    }


def show(
    url: Url,
    version: Version = None,
    step: Step = None,
    tag: Tag = None,
    channel: Channel = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Show a version: its tables, its chain, and its bytes by kind."""
    with open_store(url, storage_option, branch) as store:
        document = _version(store, store.snapshot(version, step=step, tag=tag, channel=channel))
    emit(document, _version_parts(document), as_json=json)


def _version(store: Store, snapshot: Snapshot) -> Document:
    """Return a version's tables, chain and sizes; reads the manifests of its chain and the trainer's document."""
    record, head = snapshot.record, store.internals.log.newest_readable()[0].record
    chain: list[Document] = []
    all_sizes = []
    for manifest, entry in zip(snapshot.manifests, record.chain, strict=True):
        sizes, full = segment_sizes(manifest, segment_bytes=entry.size_bytes), fp32_bytes(manifest)
        all_sizes.append(sizes)
        chain.append(
            {
                "segment": entry.seg, "kind": entry.kind, "step": manifest.step, "l0": entry.l0, "l1": entry.l1,
                "rows": entry.rows, "sizes": sizes.as_dict(), "fp32_bytes": full, "ratio": _ratio(full, sizes.total),
            }
        )  # fmt: skip
    total, full = total_sizes(all_sizes), sum(item["fp32_bytes"] for item in chain)
    return {
        "url": store.url, "branch": store.branch, "store_uuid": store.uuid,
        "format": f"{store.identity.major}.{store.identity.minor}", "version": record.v, "kind": record.kind,
        "step": snapshot.step, "checkpoint": record.checkpoint, "time_ms": record.ts_ms, "user": record.user,
        **_names(head.tags, head.channels, record.v),
        "tables": {name: _table(snapshot, name) for name in sorted(snapshot.tables, key=natural)},
        "rate": _rate(snapshot),
        "dense": {
            name: {"dtype": snapshot.dense[name].dtype, "shape": snapshot.dense[name].shape}
            for name in sorted(snapshot.dense, key=natural)
        },
        "scalars": snapshot.scalars, "documents": snapshot.documents, "chain": chain, "sizes": total.as_dict(),
        "fp32_bytes": full, "ratio": _ratio(full, total.total),
    }  # fmt: skip


def _table(snapshot: Snapshot, name: str) -> Document:
    schema = snapshot.tables[name]
    document: Document = to_document(schema)
    encoding = document["encoding"]
    scale = encoding["scale"] * 0.5**schema.shift if encoding["encoding"] == "lattice" else None
    rows = schema.num_rows if schema.keys == "dense" else None
    return document | {"rows": rows, "scale": scale}


def _rate(snapshot: Snapshot) -> Document | None:
    """Return the restores and the validated scales that a trainer recorded; None without a trainer.

    Read as plain data, because the trainer's classes need torch. ``verify`` reports damage of this document.
    """
    try:
        found = [snapshot.read_document(name) for name in (PROGRESS, TRAINER) if name in snapshot.documents]
    except CorruptStore:
        return None
    own = zip(found, ("rate", "rates"), strict=False)
    rates = [one[key] for one, key in own if isinstance(one, dict) and isinstance(one.get(key), dict)]
    if len(rates) < 2:
        return None
    run, tables = rates
    return {"restores": run.get("restores", 0), "calibrated": sorted(tables.get("calibrated", {}))}


def _ratio(full_bytes: int, stored_bytes: int) -> float | None:
    return full_bytes / stored_bytes if full_bytes and stored_bytes else None


def _version_parts(document: Document) -> Iterator[Part]:
    """Yield the version, its tables, and its chain with bytes by kind."""
    yield place_text(document)
    yield (
        f"version {document['version']} ({document['kind']}), step {document['step']}, "
        f"{time_text(document['time_ms'])}, format {document['format']}"
    )
    if notes := _notes_of(document["user"]):
        yield f"saved with: {', '.join(notes)}"
    if isinstance(document["user"].get("git"), str):
        yield f"git commit: {document['user']['git']}"
    for kind in ("tags", "channels"):
        if document[kind]:
            yield f"{kind}: {', '.join(document[kind])}"
    if not document["chain"]:
        yield "nothing has been saved yet"
        return
    tables = [
        item | {
            "table": name, "rows": "hashed" if item["rows"] is None else item["rows"],
            "encoding": encoding_text(item["encoding"], item["shift"]), "slots": sorted(item["slots"]),
        }
        for name, item in document["tables"].items()
    ]  # fmt: skip
    about = ("table", "rows", "dim", "dtype", "encoding", "slots", "generation", "shift")
    yield table("tables", tables, about, ("shift", "generation", "dtype", "slots"))
    stored = {
        f"{slot} ({encoding_text(kind['encoding'])})"
        for item in document["tables"].values()
        for slot, kind in item["slots"].items()
    }
    if stored:
        yield f"slots: {', '.join(sorted(stored))}"
    yield from rate_lines(document["rate"])
    kinds = ", ".join(sorted({name.split("/")[0] for name in document["documents"]}))  # each rank has some of each kind
    yield (
        f"dense tensors: {len(document['dense'])}, scalars: {len(document['scalars'])}, "
        f"documents: {len(document['documents'])}{f' ({kinds})' if kinds else ''}"
    )
    total = {
        **document, "segment": "", "kind": "all", "step": None, "rows": sum(item["rows"] for item in document["chain"])
    }  # fmt: skip
    rows = [
        item | {"segment": item["segment"][-SHORT_NAME:], "changed": item["rows"]}
        | {f"{kind}_bytes": item["sizes"][kind] or None for kind in KINDS}
        for item in (*document["chain"], total)
    ]  # fmt: skip
    columns = ("segment", "kind", "step", "changed", *(f"{kind}_bytes" for kind in KINDS), "ratio")
    spare = ("segment", "documents_bytes", "metadata_bytes", "scales_bytes", "rows_bytes", "dense_bytes", "slots_bytes")
    yield table("chain, baseline first", rows, columns, spare)


def diff(
    url: Url,
    before: Annotated[str, typer.Argument(metavar="A", help="The earlier version: its number, or a tag.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The later version: its number, or a tag.")],
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Compare the tables of two versions. Prints changed rows, norms, and the bytes that only the later one needs."""
    with open_store(url, storage_option, branch) as store:
        old, new = _numbered_or_tagged(store, before), _numbered_or_tagged(store, after)
        known = {entry.seg for entry in old.record.chain}
        document: Document = {
            "url": store.url, "branch": store.branch, "before": old.version, "after": new.version,
            "stored_bytes": sum(entry.size_bytes for entry in new.record.chain if entry.seg not in known),
        }  # fmt: skip
        compared = compare_tables(old, new)
        document["tables"] = to_document(compared)
    columns = (
        "table", "changed", "added", "removed", "norm_before", "norm_after", "norm_difference", "largest_difference"
    )  # fmt: skip
    short = {
        "norm_difference": "norm of change", "largest_difference": "largest", "norm_before": "norm A",
        "norm_after": "norm B",
    }  # fmt: skip
    drawn = table(
        f"{place_text(document)}, version {document['before']} to {document['after']}",
        [
            {short.get(name, name): getattr(item, name) for name in columns}  # NaN, which the document has as null
            for item in sorted(compared, key=lambda item: natural(item.table))
        ],
        [short.get(name, name) for name in columns], ("norm A", "removed", "added"),
    )  # fmt: skip
    needs = f"version {document['after']} needs {size_text(document['stored_bytes'])} more"
    emit(document, (drawn, needs), as_json=json)


def _numbered_or_tagged(store: Store, name: str) -> Snapshot:
    is_number = name.isascii() and name.isdigit()
    return store.snapshot(int(name)) if is_number else store.snapshot(tag=name)


def version(json: Json = False) -> None:
    """Print the versions of the program and of its packages."""
    packages: dict[str, str | None] = {}
    for name in ("cnr-store", "numpy", "numba", "zstandard", "zarr", "fsspec", "pyarrow", "torch"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    others = ", ".join(f"{name} {found}" for name, found in packages.items() if found and name != "cnr-store")
    document = {"version": packages["cnr-store"], "python": platform.python_version(), "packages": packages}
    message = f"cnr-store {packages['cnr-store']} (Python {platform.python_version()}); {others}"
    emit_message(message, document, as_json=json)
