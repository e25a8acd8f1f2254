"""What each command says, as plain JSON values: the same document is printed by ``--json`` and drawn as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cnr_store import (
    CnrStoreError,
    CompactionReport,
    CorruptStore,
    ExportReport,
    GcReport,
    ImportReport,
    MaintenanceReport,
    Problem,
    RepairReport,
    Snapshot,
    StageReport,
    Store,
    VerifyReport,
    fp32_bytes,
    read_status,
    segment_sizes,
    total_sizes,
)
from cnr_store_tools.demo.records import DemoReport
from cnr_store_tools.serve_demo.records import ServeReport
from cnr_store_tools.text import time_text

if TYPE_CHECKING:  # with pyarrow, which is slow to import
    from cnr_store.changes import RecordedVersion

Document = dict[str, Any]

_TRAINER = "trainer/0"


def log_document(store: Store, limit: int | None) -> Document:
    """Return the newest records of the log, newest first, each with the tags and channels that name it now."""
    head = store.head().record
    records = []
    for record in store.log(limit=limit):
        item: Document = {
            "version": record.v, "kind": record.kind, "step": record.step, "logical": record.logical,
            "time": time_text(record.ts_ms), "time_ms": record.ts_ms, "epoch": record.epoch,
            "chain_length": len(record.chain), "writer": record.writer.host,
        }  # fmt: skip
        if record.kind in ("full", "delta") and record.chain:
            last = record.chain[-1]
            item |= {"segment": last.seg, "size_bytes": last.bytes, "rows": last.rows}
        if record.name is not None:
            pin = head.pins.get(record.name) if record.kind == "fork" else None
            item["name"] = record.name if pin is None else pin.name
        if record.target is not None:
            item["target"] = record.target
        if record.user:
            item["user"] = record.user
        item |= _names(head.tags, head.channels, record.v)
        records.append(item)
    return {"url": store.url, "branch": store.branch, "records": records}


def show_document(store: Store, snapshot: Snapshot) -> Document:
    """Return a version's tables, chain and sizes; reads the manifests of its chain, and the document of a trainer."""
    record = snapshot.record
    manifests = snapshot.manifests
    chain: list[Document] = []
    all_sizes = [
        segment_sizes(manifest, segment_bytes=entry.bytes)
        for manifest, entry in zip(manifests, record.chain, strict=True)
    ]
    for manifest, entry, sizes in zip(manifests, record.chain, all_sizes, strict=True):
        full = fp32_bytes(manifest)
        chain.append(
            {
                "segment": entry.seg, "kind": entry.kind, "step": manifest.step, "l0": entry.l0, "l1": entry.l1,
                "rows": entry.rows, "sizes": sizes.as_dict(), "fp32_bytes": full,
                "ratio": _ratio(full, sizes.total),
            }
        )  # fmt: skip
    total = total_sizes(all_sizes)
    head = store.head().record
    return {
        "url": store.url, "branch": store.branch, "store_uuid": store.uuid, "profile": store.identity.profile,
        "format": f"{store.identity.major}.{store.identity.minor}",
        "version": record.v, "kind": record.kind, "step": snapshot.step, "logical": record.logical,
        "time": time_text(record.ts_ms), **_names(head.tags, head.channels, record.v),
        "tables": {name: _table(snapshot, name) for name in sorted(snapshot.tables)}, "rate": _rate(snapshot),
        "dense": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape)} for name, entry in sorted(snapshot.dense.items())
        },
        "scalars": snapshot.scalars, "documents": snapshot.documents, "chain": chain,
        "sizes": total.as_dict(),
        "fp32_bytes": sum(item["fp32_bytes"] for item in chain),
        "ratio": _ratio(sum(item["fp32_bytes"] for item in chain), total.total),
    }  # fmt: skip


def _names(tags: Mapping[str, int], channels: Mapping[str, int], version: int) -> Document:
    """The tags and channels that name a version."""
    return {
        kind: sorted(name for name, target in named.items() if target == version)
        for kind, named in (("tags", tags), ("channels", channels))
    }


def fork_document(store: Store, branch: Store) -> Document:
    """Return what a fork made; ``store`` is the store's own log."""
    assert branch.branch is not None  # a fork gives a store on a branch
    pin = store.branches()[branch.branch]
    until = "" if pin.expires_ms is None else f", until {time_text(pin.expires_ms)}"
    return {
        "url": store.url, "branch": branch.branch, "version": pin.version, "expires_ms": pin.expires_ms,
        "message": f"branch {branch.branch} begins with version {pin.version}{until}",
    }  # fmt: skip


def cursors_document(store: Store) -> Document:
    """Return the registered cursors by name; ``branch`` is null on the store's own log, a uuid if the branch ended."""
    heads = {head.branch: head.version for head in read_status(store).heads}
    names = {key: pin.name for key, pin in store.head().record.pins.items()}
    listed = []
    for name, cursor in sorted(store.cursors().items()):
        branch = names.get(cursor.branch, cursor.branch) or None
        listed.append(
            {
                "cursor": name, "branch": branch, "version": cursor.version, "head": heads.get(branch),
                "moved_ms": cursor.moved_ms, "expires_ms": cursor.expires_ms, "holder": cursor.holder,
            }
        )  # fmt: skip
    return {"url": store.url, "cursors": listed}


def change_document(version: int, step: int, table: str, upserts: int, deletes: int) -> Document:
    """Return how many rows of one table one version changes."""
    return {"version": version, "step": step, "table": table, "upserts": upserts, "deletes": deletes}


def recorded_documents(recorded: RecordedVersion) -> list[Document]:
    """Return the same for each table of a version that was written as files."""
    return [
        change_document(
            recorded.version, recorded.step, table, recorded.upserts.get(table, 0), recorded.deletes.get(table, 0)
        )
        for table in sorted({*recorded.upserts, *recorded.deletes})
    ]


def plain_floats(value: Any) -> Any:
    """Return a row as JSON can hold it: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: plain_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_floats(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compaction_document(store: Store, reports: Sequence[CompactionReport], *, is_dry_run: bool) -> Document:
    """Return the folds of one chain; the last one says why there are no more."""
    return {
        "url": store.url, "branch": store.branch, "is_dry_run": is_dry_run, "outcome": reports[-1].outcome,
        "folds": [_fold(report) for report in reports],
        "bytes_in": sum(report.bytes_in for report in reports if report.outcome == "committed"),
        "bytes_out": sum(report.bytes_out for report in reports),
    }  # fmt: skip


def _fold(report: CompactionReport) -> Document:
    document = asdict(report) | {"run": list(report.run)}
    del document["url"]  # said once, for all of them
    return document


def gc_document(report: GcReport) -> Document:
    """Return what becomes of every live version and every segment, and what was deleted."""
    document = asdict(report)
    lists = {name: list(document[name]) for name in ("versions", "segments", "failures", "side_objects")}
    return {
        **document, **lists,
        "expired": report.expired, "named": report.named, "doomed_bytes": report.doomed_bytes,
        "staying": sum(segment.state == "stays" for segment in report.segments),
    }  # fmt: skip


def maintenance_document(report: MaintenanceReport) -> Document:
    """Return a run part by part."""
    return {
        "url": report.url, "is_dry_run": report.is_dry_run, "outcome": report.outcome,
        "duration_s": report.duration_s, "budget_s": report.budget_s,
        "rewritten_bytes": report.rewritten_bytes, "deleted_bytes": report.deleted_bytes,
        "stages": [_stage(stage) for stage in report.stages],
    }  # fmt: skip


def _stage(report: StageReport) -> Document:
    """One part; of a collection what changes, since a cron job's log need not repeat all that stays."""
    error = report.error
    collection = None if report.collection is None else gc_document(report.collection)
    if collection is not None:
        del collection["versions"]
        collection["segments"] = [item for item in collection["segments"] if item["state"] != "stays"]
    return {
        "stage": report.stage.kind, "branch": report.stage.branch, "outcome": report.outcome,
        "duration_s": report.duration_s, "folds": [_fold(fold) for fold in report.compactions],
        "collection": collection,
        "error": None if error is None else error_document(error),
    }  # fmt: skip


def error_document(error: CnrStoreError) -> Document:
    """Return an error that did not end the command."""
    details = {name: _json_value(value) for name, value in error.details().items()}
    return {"kind": error.kind, "message": error.message, "details": details}


def _json_value(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def branches_document(store: Store) -> Document:
    """Return the branches by name, and how far each has come; ``head`` is null where a branch's time is over."""
    pins = store.branches()
    heads = {head.branch: head for head in read_status(store).heads}
    listed = []
    for name, pin in sorted(pins.items()):
        head = heads.get(name)
        listed.append(
            {
                "branch": name, "version": pin.version, "expires_ms": pin.expires_ms,
                "head": None if head is None else {"version": head.version, "step": head.step},
            }
        )  # fmt: skip
    return {"url": store.url, "branches": listed}


def _rate(snapshot: Snapshot) -> Document | None:
    """What a trainer says of how exact it stores: restores so far, and its target of bytes; None if no trainer saved.

    Read as plain data, since the words of a trainer need torch; what is damaged in it is for ``verify`` to say.
    """
    try:
        said = snapshot.read_document(_TRAINER) if _TRAINER in snapshot.documents else None
    except CorruptStore:
        return None
    rate = said.get("rate") if isinstance(said, dict) else None
    if not isinstance(rate, dict):
        return None
    target = rate.get("target_bytes")
    return {
        "restores": rate.get("restores", 0), "calibrated": sorted(rate.get("calibrated", {})),
        "target": None if target is None else {
            "bytes": target, "state": rate.get("target_state", ""), "share": rate.get("share", 1.0),
            "doublings": rate.get("doublings", {}),
        },
    }  # fmt: skip


def _table(snapshot: Snapshot, name: str) -> Document:
    schema = snapshot.tables[name]
    encoding = msgspec.to_builtins(schema.encoding)
    return {
        "rows": schema.num_rows if schema.keys == "dense" else None, "dim": schema.dim, "dtype": schema.dtype,
        "keys": schema.keys, "encoding": encoding, "generation": schema.generation,
        "shift": schema.shift, "fill": schema.fill,
        "scale": encoding["scale"] * 0.5**schema.shift if encoding["encoding"] == "lattice" else None,
        "waiting": msgspec.to_builtins(snapshot.waiting.get(name)),
        "slots": {
            slot: {"kind": kind.kind, "dtype": kind.dtype, "encoding": msgspec.to_builtins(kind.encoding)}
            for slot, kind in sorted(schema.slots.items())
        },
    }  # fmt: skip


def verify_document(report: VerifyReport) -> Document:
    """Return what a check found."""
    document = asdict(report)
    document |= {name: list(getattr(report, name)) for name in ("versions", "restorable", "superseded")}
    document["problems"] = [_problem(problem) for problem in report.problems]
    document["others"] = [
        asdict(other) | {name: list(getattr(other, name)) for name in ("versions", "restorable", "superseded")}
        for other in report.others
    ]
    return {"is_sound": report.is_sound, **document}


def repair_document(report: RepairReport) -> Document:
    """Return what a repair did, or would do, and what stays wrong."""
    document = asdict(report)
    document["torn"] = list(report.torn)
    document["remaining"] = [_problem(problem) for problem in report.remaining]
    return document


def _problem(problem: Problem) -> Document:
    return asdict(problem) | {"versions": list(problem.versions)}


def export_document(report: ExportReport, url: str) -> Document:
    """Return what an export wrote."""
    tensors = [asdict(tensor) | {"shape": list(tensor.shape)} for tensor in report.tensors]
    return {"url": url, **asdict(report), "files": list(report.files), "tensors": tensors}


def import_document(report: ImportReport, url: str, ignored: tuple[str, ...]) -> Document:
    """Return what an import committed."""
    lists = {"tables": list(report.tables), "dense": list(report.dense), "dropped": list(report.dropped)}
    return {"url": url, **asdict(report), **lists, "ignored": list(ignored)}


def demo_document(report: DemoReport) -> Document:
    """Return what a demonstration found; a quality that is not a number is null."""
    document = _plain(asdict(report))
    assert isinstance(document, dict)  # asdict of a record
    return document


def serve_demo_document(report: ServeReport) -> Document:
    """Return what a serving demonstration found; a spread of no values has nulls."""
    document = _plain(asdict(report))
    assert isinstance(document, dict)  # asdict of a record
    return {"is_sound": not report.problems, **document}


def _plain(value: Any) -> Any:
    """The value as JSON has it: paths as text, NaN and Inf as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _ratio(full_bytes: int, stored_bytes: int) -> float | None:
    return full_bytes / stored_bytes if full_bytes and stored_bytes else None
