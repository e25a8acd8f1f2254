"""Assemble a compaction's result: read the receipts of its tasks, check them, and write the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cnr_store.errors import CorruptStore, MissingObject
from cnr_store.format.layout import segment_key
from cnr_store.format.manifest import expand
from cnr_store.format.records import MAJOR, ChainEntry, Manifest, Receipt, SegmentDocument
from cnr_store.maintenance.compaction.engines import Bench, FinishedTask, Job
from cnr_store.maintenance.compaction.tasks import CompactionTask, check_pieces, check_states
from cnr_store.runtime.threads import Inline, Workers
from cnr_store.segment.packs import read_tensors
from cnr_store.segment.reader import read_receipt
from cnr_store.segment.writer import merge_receipts, write_manifest
from cnr_store.storage import Storage, read_verified
from cnr_store.types import JsonValue


def write_rest(job: Job, index: int, bench: Bench) -> FinishedTask:
    """Write the documents and dense tensors of the run's last state, and their receipt. Blocks.

    Of both, those that segments of the run hold. Memory: all of them.

    Raises
    ------
    CorruptStore, MissingObject
    """
    readers = bench.readers[job.run.start : job.run.stop]
    holders, last = {reader.name: reader for reader in readers}, readers[-1].manifest
    out = bench.writer(job, index)
    held = {name: entry for name, entry in sorted(last.dense.items()) if entry.segment in holders}
    tensors = read_tensors(readers, held, Inline())
    out.write_dense(tensors, {name: entry.dtype for name, entry in held.items()})
    for name, entry in sorted(last.documents.items()):
        if entry.segment in holders:
            out.write_document(name, holders[entry.segment].read_document(name))
        else:
            out.keep_document(name)
    receipt = out.finish(
        txn=job.txn, rank=index, world=job.world, attempt=job.attempt, base=job.base, l0=job.l0, parts=()
    )
    return FinishedTask(index, out.put_receipt(receipt))


def verified(storage: Storage, job: Job, done: FinishedTask, workers: Workers) -> Receipt | None:
    """Return the receipt of a task recorded as done if all its objects match it, else None. Blocks.

    Reads every object of the task. After None the task has to be repeated.

    Raises
    ------
    AccessDenied, StorageFailure
    """
    try:
        receipt = _receipt_of(storage, job, done)
        workers.run(
            partial(
                read_verified, storage, segment_key(job.segment, entry.path),
                size_bytes=entry.size, digest=entry.xxh3_128,
            )
            for entry in expand(receipt).objects
        )  # fmt: skip
    except (CorruptStore, MissingObject):
        return None
    return receipt


def put_manifest(
    storage: Storage,
    job: Job,
    tasks: Sequence[CompactionTask],
    done: Sequence[FinishedTask],
    manifests: Sequence[Manifest],
) -> ChainEntry:
    """Read and check the receipts, write the manifest, and return the segment's chain entry. Blocks.

    Parameters
    ----------
    done
        Every task, and last the one of dense tensors and documents.
    manifests
        The manifests of the chain, at least to the end of the run.

    Raises
    ------
    CorruptStore
        A task did not write what was planned, or the result's state differs from the run's last recorded digest.
    CorruptObject, MissingObject, StorageFailure
    """
    receipts = [_receipt_of(storage, job, one) for one in sorted(done, key=lambda one: one.index)]
    if [receipt.rank for receipt in receipts] != list(range(job.world)):
        raise CorruptStore(f"compaction {job.txn} has receipts of {[r.rank for r in receipts]}, expected {job.world}")
    for task, receipt in zip(tasks, receipts, strict=False):
        check_pieces(task, receipt.parts)
    run = job.run
    before, first, last = manifests[run.start - 1] if run.start else None, manifests[run.start], manifests[run.stop - 1]
    scalars: dict[str, JsonValue] = dict(last.scalars)
    document = SegmentDocument(
        format=MAJOR, txn=job.txn, base=job.base, kind=job.run.kind, l0=first.l0, l1=last.l1,
        step=last.step, scalars=scalars, **merge_receipts(receipts, before, last.tables, last.dense),
    )  # fmt: skip
    if job.run.kind == "baseline":
        check_states(document.parts, last)
    digest, size, manifest = write_manifest(storage, job.segment, document)
    return ChainEntry(
        seg=job.segment, sha256=digest, kind=job.run.kind, l0=first.l0, l1=last.l1,
        size_bytes=size + sum(entry.size for entry in manifest.objects), rows=manifest.changed_rows,
    )  # fmt: skip


def _receipt_of(storage: Storage, job: Job, done: FinishedTask) -> Receipt:
    receipt = read_receipt(storage, job.segment, job.writer(done.index), done.receipt)
    found = (receipt.txn, receipt.rank, receipt.world, receipt.attempt, receipt.base, receipt.l0)
    wanted = (job.txn, done.index, job.world, job.attempt, job.base, job.l0)
    if found != wanted:
        raise CorruptStore(
            f"the receipt of task {done.index} of compaction {job.txn} has the fields {found}, expected {wanted}",
            expected=wanted, found=found,
        )  # fmt: skip
    return receipt
