"""Rows coded where they are: the store holds the same, and fewer bytes come to the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager, SavePolicy, TrackingOptions
from cnr_store.training.background import SaveJob, run_save
from cnr_store.training.live_training import Launches, launches_of
from cnr_store.training.save_staging import rows_as_codes
from cnr_store.training.shards import whole_shard
from cnr_store.training.tensors import leaf_of, tensor_of
from tests.support.accelerator import DEVICE, needs_accelerator
from tests.support.memory import store_in_memory
from tests.training import runs
from tests.training.runs import Training

LATTICE = TableOptions(encoding="lattice", scale=2.0**-12)


class Seen:
    """What saves were given: by save, the shards that came as codes, and the bytes that came to the host."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.codes: list[list[str]] = []
        self.host_bytes: list[int] = []
        manager._saver.background._run = self._run

    def _run(self, job: SaveJob) -> None:
        self.codes.append(sorted(job.staged.codes))
        self.host_bytes.append(job.staged.host_bytes)
        run_save(job)


manager_of = partial(runs.manager_of, options=LATTICE, rng=False)


def newest(store: Store) -> dict[str, Any]:
    """The newest version: objects of its segment by content, digests, and all that can be read."""
    head = store.snapshot()
    manifest = head.manifests[-1]
    found: dict[str, Any] = {
        "objects": sorted((one.path[len("r00000-01234567") :], one.size, one.xxh3_128) for one in manifest.objects),
        "parts": [(one.table, one.rows, one.base_digest, one.state_digest) for one in manifest.parts],
        "kind": manifest.kind,
        "schemas": head.tables,
    }
    for name, schema in head.tables.items():
        found[name] = head.table(name).read().tobytes()
        found |= {f"{name}/{slot}": head.table(name).read(slot=slot).tobytes() for slot in schema.slots}
    return found


def saved(steps: Any, *, quantize: bool, training: Training | None = None, **options: Any) -> tuple[Any, Seen]:
    """Save after each of the steps, functions of the training; returns what became of it."""
    store, training = store_in_memory(threads=2), training or Training()
    manager = manager_of(store, training, quantize_on_device=quantize, **options)
    seen, found = Seen(manager), []
    for number, change in enumerate(steps):
        training.train(number)
        with torch.no_grad():
            change(manager, training)
        manager.save()
        found.append(newest(store))
    manager.close()
    return found, seen


def nothing(manager: CheckpointManager, training: Training) -> None:
    pass


def far_out(manager: CheckpointManager, training: Training) -> None:
    training.model.user.weight[7] = 100.0  # 409,600 steps: beyond 16 bits
    manager.tracker.mark("user.weight", np.array([7]))


def back(manager: CheckpointManager, training: Training) -> None:
    training.model.user.weight[7] = 0.5
    manager.tracker.mark("user.weight", np.array([7]))


@pytest.mark.parametrize("policy", ["consecutive", "one_shot", "intermittent", "baseline"])
def test_the_store_holds_the_same_with_and_without(policy: Any) -> None:
    steps = [nothing, nothing, nothing, nothing]

    with_codes, seen = saved(steps, quantize=True, policy=policy)
    with_floats, unseen = saved(steps, quantize=False, policy=policy)

    assert with_codes == with_floats
    assert seen.codes == [[], *3 * [["item.weight", "user.weight"]]]
    assert unseen.codes == 4 * [[]]
    assert 0 < seen.host_bytes[-1] < 0.7 * unseen.host_bytes[-1]


@pytest.mark.parametrize("mirror", ["memory", "none"])
def test_rows_beyond_16_bits_come_as_floats_until_they_are_back_in_range(mirror: Any) -> None:
    steps = [nothing, nothing, far_out, nothing, back]

    with_codes, seen = saved(steps, quantize=True, mirror=mirror)

    assert with_codes == saved(steps, quantize=False, mirror=mirror)[0]
    both, item = ["item.weight", "user.weight"], ["item.weight"]
    assert seen.codes == [[], both, item, both, both]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_coded_too(dtype: torch.dtype) -> None:
    steps = [nothing, nothing, nothing]

    with_codes, seen = saved(steps, quantize=True, training=Training("sgd", dtype=dtype))

    assert with_codes == saved(steps, quantize=False, training=Training("sgd", dtype=dtype))[0]
    assert seen.codes[-1] == ["item.weight", "user.weight"]


def test_only_lattices_whose_rows_cannot_escape_are_coded() -> None:
    def bad_slot(manager: CheckpointManager, training: Training) -> None:
        slot = training.optimizers[0].state[training.model.user.weight]["momentum1"]
        slot[3] = np.nan
        manager.tracker.mark("user.weight", np.array([3]))

    escaping = TableOptions(scale=2.0**-12, nonfinite="escape")
    options = {"user.weight": escaping, "item.weight": TableOptions.exact()}
    steps = [nothing, nothing, bad_slot]

    with_codes, seen = saved(steps, quantize=True, options=options)

    assert with_codes == saved(steps, quantize=False, options=options)[0]
    assert seen.codes == [[], [], []]


def test_a_refined_scale_is_the_one_that_rows_are_coded_with() -> None:
    results = []
    for quantize in (True, False):
        store, training = store_in_memory(threads=2), Training()
        manager = manager_of(store, training, quantize_on_device=quantize)
        training.train(0)
        manager.save()
        manager.close()
        with store.writer() as writer:
            known = writer.restore()
            with writer.begin(1, "delta") as transaction:
                transaction.refine_scale("user.weight", 1)
                for name in known.documents:
                    transaction.put_document(name, known.read_document(name, tensor_of), leaf_of)
        manager = manager_of(store, training, quantize_on_device=quantize)
        seen = Seen(manager)
        manager.restore()
        training.train(1)
        manager.save()
        results.append(newest(store))
        coded = rows_as_codes(
            {"user.weight": whole_shard("user.weight", training.model.user.weight, training.optimizers)},
            store.snapshot().tables,
            {"user.weight": LATTICE},
        )
        assert coded["user.weight"].scale == 2.0**-13
        assert seen.codes == [["item.weight", "user.weight"] if quantize else []]
        manager.close()
    assert results[0] == results[1]


def test_codes_that_were_not_committed_are_made_again() -> None:
    store, training = store_in_memory(threads=2), Training()
    manager = manager_of(store, training, quantize_on_device=True, policy="consecutive")
    training.train(0)
    manager.save()
    training.train(1)

    def fail(job: SaveJob) -> None:
        job.transaction.abort()
        raise OSError("no")

    manager._saver.background._run = fail
    with pytest.raises(Exception, match="was not saved"):
        manager.save()
    manager._saver.background._run = run_save
    training.train(2)
    manager.save()
    manager.close()

    scale = np.float32(2.0**-12)
    live = training.model.user.weight.detach().cpu().numpy()
    np.testing.assert_array_equal(store.snapshot().table("user.weight").read(), np.rint(live / scale) * scale)


def test_kernels_are_compiled_for_the_shards_of_each_device() -> None:
    def shard(rows: int, dim: int, device: str, dtype: torch.dtype) -> Any:
        weight = nn.Parameter(torch.empty(rows, dim, device=device, dtype=dtype))
        return whole_shard(f"{device}/{dim}", weight, [])

    shards = [
        shard(4, 16, "meta", torch.float16), shard(4, 64, "meta", torch.float32), shard(9, 16, "meta", torch.float16),
        shard(4, 8, "cpu", torch.float32),
    ]  # fmt: skip

    assert launches_of(shards) == {
        torch.device("meta"): Launches((1, 16, 64), (torch.float16, torch.float32), 3),
        torch.device("cpu"): Launches((1, 8), (torch.float32,), 1),
    }


@pytest.mark.gpu
@needs_accelerator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_from_a_gpu_store_the_same_with_half_the_bytes_to_the_host(dtype: torch.dtype) -> None:
    results = []
    for quantize in (True, False):
        torch.manual_seed(0)
        model = nn.Embedding(5000, 32, sparse=True, dtype=dtype, device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        store = store_in_memory(threads=2)
        manager = CheckpointManager(
            store,
            model=model,
            optimizer=optimizer,
            options=LATTICE,
            save_policy=SavePolicy(rng=False),
            tracking=TrackingOptions(quantize_on_device=quantize),
        )
        seen, found = Seen(manager), []
        for step in range(4):
            ids = torch.arange(step, 5000, 3, device=DEVICE)
            optimizer.zero_grad()
            (model(ids).float() ** 2).sum().backward()
            optimizer.step()
            if step == 2:
                with torch.no_grad():
                    model.weight[step] = 100.0
                manager.tracker.mark("weight", np.array([step]))
            manager.save()
            found.append(newest(store))
        manager.close()
        results.append((found, seen))
    assert results[0][0] == results[1][0]
    assert [bool(codes) for codes in results[0][1].codes] == [False, True, False, True]
    factor = 2 if dtype == torch.float32 else 1
    assert factor * results[0][1].host_bytes[1] <= results[1][1].host_bytes[1] * 1.01
