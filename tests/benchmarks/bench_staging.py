"""What staging costs: the stall against a bare ``index_select``, holding two saves, bytes that cross, the ring.

Run: ``python tests/benchmarks/bench_staging.py``. One process; what is compared alternates within one run. With a CUDA
device the tables are there too, and the copy to the host is held against a plain one into pinned memory.

``--model``: a tenth of the rows of each table of models instead of one table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch
from harness import MIB, Report, alternating, arguments, spread, timed
from models import BenchModel, add_model_option, chosen_models
from trainee import TablesState

from cnr_store_gpu import RowRequest, Staged, StagingBuffers
from cnr_store_gpu.pinned import PINNED_BYTES, TransitRing
from cnr_store_gpu.quantize import LatticeCodes
from cnr_store_gpu.transfer import transfer_for

DIM, TOUCHED_SHARE, SCALE = 64, 0.1, 1e-4


def request_of(rows: int, device: torch.device) -> dict[str, RowRequest]:
    """Return a tenth of a table's rows, with a row-wise slot."""
    generator = torch.Generator().manual_seed(0)
    ids = np.sort(np.random.default_rng(0).choice(rows, int(rows * TOUCHED_SHARE), replace=False))
    weight = (torch.randn(rows, DIM, generator=generator) * 0.1).to(device)
    slot = torch.rand(rows, generator=generator).to(device)
    return {"t": RowRequest(ids, {"weight": weight, "sum": slot})}


def request_of_model(model: BenchModel, device: torch.device) -> dict[str, RowRequest]:
    """Return a tenth of the rows of each table of a model, with the state of its optimizer."""
    state, random = TablesState(model), np.random.default_rng(0)
    found = {}
    for number, bag in enumerate(state.tables):
        rows = bag.num_embeddings
        ids = np.sort(random.choice(rows, max(1, int(rows * TOUCHED_SHARE)), replace=False))
        tensors = {"weight": bag.weight.detach()}
        tensors |= {f"slot{at}": slot for at, slot in enumerate(state.slots(bag.weight))}
        found[f"t{number}"] = RowRequest(ids, {name: tensor.to(device) for name, tensor in tensors.items()})
    return found


def device_of(request: dict[str, RowRequest]) -> torch.device:
    return next(iter(request.values())).tensors["weight"].device


def rows_of(request: dict[str, RowRequest]) -> int:
    return sum(len(one.row_ids) for one in request.values())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench_stall(report: Report, request: dict[str, RowRequest], repeats: int) -> None:
    """The gather alone, until the tables may be written again."""
    device = device_of(request)
    buffers = StagingBuffers()
    pairs = [
        (tensor, torch.as_tensor(one.row_ids).to(device)) for one in request.values() for tensor in one.tensors.values()
    ]
    kept = [tensor[: len(index)].clone() for tensor, index in pairs]

    def waiting_for_device(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            work()
            synchronize(device)

        return run

    def gather() -> None:
        staged = buffers.gather(request)
        synchronize(device)
        held.append(staged)

    def release() -> None:
        while held:
            held.pop().wait().release()

    held: list[Staged] = []
    sides = {
        "staging": gather,
        "fresh": waiting_for_device(lambda: [torch.index_select(t, 0, index) for t, index in pairs]),
        "kept": waiting_for_device(
            lambda: [torch.index_select(t, 0, index, out=out) for (t, index), out in zip(pairs, kept, strict=True)]
        ),
    }
    for side in sides.values():
        side()
    release()
    times = alternating(sides, repeats, before_each=release)
    release()
    report.add_ratio(f"{device.type}: stall / index_select, fresh memory", times["staging"], times["fresh"])
    report.add_ratio(f"{device.type}: stall / index_select, kept memory", times["staging"], times["kept"], goal=1.5)
    buffers.free()


def bench_bytes(report: Report, request: dict[str, RowRequest]) -> None:
    """What crosses to the host, and how long until it is there."""
    kinds: dict[str, LatticeCodes | None] = {
        "raw fp32": None,
        "16-bit lattice": LatticeCodes(SCALE),
    }
    num_rows = rows_of(request)
    device = device_of(request)
    raw_bytes = 0
    for name, quantizer in kinds.items():
        buffers = StagingBuffers(quantize={} if quantizer is None else dict.fromkeys(request, quantizer))
        buffers.gather(request).wait().release()
        started = time.perf_counter()
        staged = buffers.gather(request).wait()
        seconds = time.perf_counter() - started
        raw_bytes = raw_bytes or staged.host_bytes
        is_coded = quantizer is None or staged.codes.keys() == request.keys()
        assert is_coded, "the rows fell back to floats, so this measures nothing"
        report.add(f"{device.type}: bytes of raw / bytes of {name}", raw_bytes / staged.host_bytes, sense="at least")
        report.note(f"      {staged.host_bytes / num_rows:.1f} bytes per row, in host memory after {seconds:.3g} s")
        staged.release()
        buffers.free()


def bench_ring(report: Report, size_bytes: int, device: torch.device, repeats: int) -> None:
    """The ring into ordinary memory against one plain copy, into pinned memory on a GPU."""
    source = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8).to(device)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    plain = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    transfer = transfer_for(device)
    ring = TransitRing(transfer, PINNED_BYTES)

    def through_ring() -> None:
        transfer.run(transfer.record(), lambda: ring.copy([(source, target)])).result()

    def directly() -> None:
        plain.copy_(source, non_blocking=True)
        synchronize(device)

    through_ring()
    assert torch.equal(target, source.cpu())
    sides = {"ring": through_ring, "plain": directly}
    if device.type == "cuda":
        ordinary = torch.zeros(size_bytes, dtype=torch.uint8)
        sides["ordinary"] = lambda: ordinary.copy_(source)
    times = alternating(sides, repeats)
    report.add_ratio(f"{device.type}: ring into ordinary memory / plain copy", times["ring"], times["plain"])
    if "ordinary" in times:
        report.add_ratio("cuda: ring / torch's copy into ordinary memory", times["ring"], times["ordinary"], goal=1.0)
    low, middle, high = spread([size_bytes / seconds / 1e9 for seconds in times["ring"].wall])
    report.note(f"      {middle:.1f} GB/s through the ring ({low:.1f} to {high:.1f}), {size_bytes / MIB:.0f} MiB")
    transfer.close()
    ring.close()


def bench_behind(report: Report, request: dict[str, RowRequest]) -> None:
    """A GPU's own work while a save is copied, against the same work alone."""
    device = device_of(request)
    matrix = torch.randn(4096, 4096, device=device)
    buffers = StagingBuffers()
    buffers.gather(request).wait().release()

    def work() -> None:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.current_stream(device).synchronize()

    work()
    alone = timed(work)
    staged = buffers.gather(request)
    torch.cuda.current_stream(device).synchronize()
    beside = timed(work)
    report.note(f"      copies were {'still' if not staged.is_ready else 'no longer'} under way behind the work")
    staged.wait().release()
    report.add("cuda: work while copying / alone", beside / alone, goal=1.1)
    buffers.free()


def main() -> None:
    """Run everything and print it."""
    parser = arguments(__doc__, rows=1_000_000, repeats=11)
    add_model_option(parser)
    options = parser.parse_args()
    report = Report("Staging of touched rows")
    report.start()
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    makers: dict[str, Callable[[torch.device], dict[str, RowRequest]]] = {
        model.name: partial(request_of_model, model) for model in chosen_models(options)
    }
    one_table = {f"{options.rows} rows of {DIM} fp32 and a row-wise slot": partial(request_of, options.rows)}
    for device, (name, make) in product(devices, (makers or one_table).items()):
        request = make(device)
        if device.type == "cuda":
            report.note(f"\n{torch.cuda.get_device_name(device)}")
        report.note(f"{rows_of(request)} rows of {name}")
        bench_stall(report, request, options.repeats)
        bench_bytes(report, request)
        bench_ring(report, 512 * MIB, device, min(5, options.repeats))
        if device.type == "cuda":
            bench_behind(report, request)
    if len(devices) == 1:
        report.note("no CUDA device: what crosses from a GPU was not measured")
    report.finish(options.json)


if __name__ == "__main__":
    main()
