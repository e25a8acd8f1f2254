"""A damaged head does not end a training: `restore(fallback=True)` goes on from the newest version that is whole."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import BadInput, CorruptStore, StorageFailure, Store, TableOptions, verify_store
from cnr_store.errors import CorruptRecord
from cnr_store.format.layout import commit_key
from cnr_store.storage import storage_from_filesystem
from cnr_store.training import CheckpointManager, SavePolicy, StoreOptions, shards
from cnr_store.training.shards import LocalShard, ShardingLibrary, whole_shard
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.ranks import ThreadRank, on_ranks
from tests.training import runs
from tests.training.runs import Training, assert_same, uninterrupted

KIND = "rowwise_adagrad"
STEPS = 5


manager_of = partial(runs.manager_of, every_steps=1)


def trained(root: Path) -> None:
    training = Training(KIND)
    with manager_of(root, training) as manager:
        go_on(training, manager, 0, STEPS - 1)
        random.random()  # the state of this generator is an object of the last save
        go_on(training, manager, STEPS - 1, STEPS)


def go_on(training: Training, manager: CheckpointManager, start: int, stop: int) -> None:
    runs.go_on(training, manager, start, stop)
    manager.wait_until_finished()


def newest_segment(root: Path) -> Path:
    with Store.open(str(root)) as store:
        return root / "data" / store.head().record.chain[-1].seg


def damage_chunk(root: Path) -> str:
    path = next(newest_segment(root).glob("r*.add-0.codes/c.0.0"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    return path.relative_to(root).as_posix()


def remove_manifest(root: Path) -> str:
    path = newest_segment(root) / "_segment.json.zst"
    path.unlink()
    return path.relative_to(root).as_posix()


def damage_document(root: Path) -> str:
    path = next(newest_segment(root).glob("r*.document-0.json.zst"))
    path.write_bytes(path.read_bytes()[:-7])
    return path.relative_to(root).as_posix()


def tear_record(root: Path) -> str:
    with Store.open(str(root)) as store:
        version = store.latest_version() + 1
    (root / commit_key(version)).write_bytes(b'{"aborted":{},"ch')
    return f"commit record {version}"


@pytest.mark.parametrize(
    ("damage", "last_step"),
    [(damage_chunk, STEPS - 1), (remove_manifest, STEPS - 1), (damage_document, STEPS - 1), (tear_record, STEPS)],
)
def test_a_damaged_head_is_gone_back_from_and_training_goes_on_bit_for_bit(
    tmp_path: Path, damage: Callable[[Path], str], last_step: int
) -> None:
    trained(tmp_path)
    with Store.open(str(tmp_path)) as store:
        head = store.latest_version()
    broken = damage(tmp_path)
    training = Training(KIND)
    manager = manager_of(tmp_path, training)

    with pytest.warns(RuntimeWarning) as said:
        restored = manager.restore(fallback=True)

    assert restored is not None
    told = next(str(one.message) for one in said if "continuing from version" in str(one.message))
    assert broken in told
    damaged = head + 1 if damage is tear_record else head
    assert (restored.step, restored.fallback_from) == (last_step, damaged)
    assert broken in (restored.problem or "")
    assert f"from version {restored.version}, the newest" in told
    assert_same(training.state(), uninterrupted(KIND, last_step))

    go_on(training, manager, last_step, STEPS + 2)
    records = list(manager.store.log())
    assert [one.target for one in records if one.kind == "rollback"] == [restored.version]
    manager.close()

    assert_same(training.state(), uninterrupted(KIND, STEPS + 2))
    again = Training(KIND)
    with manager_of(tmp_path, again) as resumed:
        state = resumed.restore()
        assert state is not None
        assert (state.step, state.fallback_from, state.problem) == (STEPS + 2, None, None)
    assert_same(again.state(), uninterrupted(KIND, STEPS + 2))
    with Store.open(str(tmp_path)) as store:
        assert verify_store(store, deep=True).is_sound


def test_a_baseline_that_is_damaged_takes_its_deltas_along(tmp_path: Path) -> None:
    trained(tmp_path)
    training = Training(KIND)
    with manager_of(tmp_path, training) as manager:
        manager.restore()
        manager._saver.chain.whole_next = set(manager._training.tables)
        go_on(training, manager, STEPS, STEPS + 3)
        assert [report.kind for report in manager.history] == ["baseline", "delta", "delta"]
        baseline = manager.store.head().record.chain[0].seg
    path = next((tmp_path / "data" / baseline).glob("r*.set-0.codes/c.0.0"))
    path.write_bytes(path.read_bytes()[:-1])
    training = Training(KIND)
    with manager_of(tmp_path, training) as manager:
        with pytest.warns(RuntimeWarning, match="continuing from version"):
            restored = manager.restore(fallback=True)
        assert restored is not None
        assert restored.step == STEPS
        assert_same(training.state(), uninterrupted(KIND, STEPS))


def test_an_error_without_fallback_offers_one_and_rolls_nothing_back(tmp_path: Path) -> None:
    trained(tmp_path)
    damage_chunk(tmp_path)

    with manager_of(tmp_path, Training(KIND)) as manager:
        with pytest.raises(CorruptStore, match=r"restore\(fallback=True\)"):
            manager.restore()
        assert "rollback" not in {record.kind for record in manager.store.log()}


def test_a_torn_record_without_fallback_is_an_error(tmp_path: Path) -> None:
    trained(tmp_path)
    tear_record(tmp_path)

    with manager_of(tmp_path, Training(KIND)) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CorruptRecord, match=r"restore\(fallback=True\)"):
            manager.restore()


def test_a_sound_head_needs_no_fallback(tmp_path: Path) -> None:
    trained(tmp_path)
    training = Training(KIND)

    with manager_of(tmp_path, training) as manager:
        restored = manager.restore(fallback=True)
        kinds = [record.kind for record in manager.store.log()]

    assert restored is not None
    assert (restored.step, restored.fallback_from, restored.problem) == (STEPS, None, None)
    assert "rollback" not in kinds
    assert_same(training.state(), uninterrupted(KIND, STEPS))


def test_an_empty_store_is_restored_as_nothing(tmp_path: Path) -> None:
    with manager_of(tmp_path, Training(KIND)) as manager:
        assert manager.restore(fallback=True) is None


def test_damage_is_raised_and_nothing_written_if_no_version_is_whole(tmp_path: Path) -> None:
    trained(tmp_path)
    with Store.open(str(tmp_path)) as store:
        baseline = store.head().record.chain[0].seg
    path = next((tmp_path / "data" / baseline).glob("r*.set-0.codes/c.0.0"))
    path.write_bytes(b"")

    with manager_of(tmp_path, Training(KIND)) as manager:
        with pytest.raises(CorruptStore, match=r"set-0\.codes"):
            manager.restore(fallback=True)
        assert "rollback" not in {record.kind for record in manager.store.log()}


def test_fallback_is_for_the_head_alone(tmp_path: Path) -> None:
    trained(tmp_path)

    with manager_of(tmp_path, Training(KIND)) as manager, pytest.raises(BadInput, match="fallback="):
        manager.restore(step=2, fallback=True)


def test_a_backend_that_fails_is_no_reason_to_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)

    with Store.open(str(tmp_path)) as store, manager_of(store, Training(KIND)) as manager:
        before = store.latest_version()
        real = type(store.storage).read

        def flaky(self: Any, key: str, **options: Any) -> bytes | None:
            if key.startswith("data/"):
                raise StorageFailure("no answer")
            return real(self, key, **options)

        monkeypatch.setattr(type(store.storage), "read", flaky)
        with pytest.raises(StorageFailure):
            manager.restore(fallback=True)
        assert store.latest_version() == before


class Part(nn.Module):
    """A table that one rank has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).reshape(12, 2) * (rank + 1))


def find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[LocalShard]:
    parts = [(name, module) for name, module in model.named_modules() if isinstance(module, Part)]
    return [whole_shard(f"{name}.weight", module.weight, optimizers) for name, module in parts]


def value(rank: int, step: int) -> np.ndarray[Any, Any]:
    found = np.arange(24, dtype=np.float32).reshape(12, 2) * (rank + 1)
    found[3] += step
    return found


class Job:
    """Two ranks with a table each, on one memory file system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = ShardingLibrary(find=find, follow=lambda _model, _tracker: [], unwrap=lambda _: None)
        monkeypatch.setitem(shards._REGISTERED, "by hand", library)
        self.files = IsolatedMemoryFileSystem()
        Store.create_on(storage_from_filesystem(self.files, "/root"), threads=1).close()

    def open(self) -> Store:
        return Store.open_on(storage_from_filesystem(self.files, "/root"), threads=1)

    def run(self, act: Callable[[int, CheckpointManager, Part], Any]) -> list[Any]:
        def one(rank: ThreadRank) -> Any:
            part = Part(rank.rank)
            model = nn.ModuleDict({f"t{rank.rank}": part})
            with (
                self.open() as store,
                CheckpointManager(
                    store,
                    model=model,
                    options=TableOptions(scale=1.0),
                    save_policy=SavePolicy(rng=False),
                    store_options=StoreOptions(ranks=rank),
                ) as manager,
            ):
                return act(rank.rank, manager, part)

        return on_ranks(2, one)

    def train(self, manager: CheckpointManager, part: Part, steps: int) -> None:
        for _ in range(steps):
            (table,) = manager.tracker.weights
            with torch.no_grad():
                part.weight[3] += 1
            manager.tracker.mark(table, [3])
            manager.step()
            manager.save()

    def damage(self, pattern: str) -> str:
        with self.open() as store:
            segment = store.head().record.chain[-1].seg
            keys = [one.key for one in store.storage.list_objects(f"data/{segment}")]
        chosen = [key for key in keys if pattern in key and "add-0.codes/c." in key]
        key = next(key for key in [*chosen, *keys] if pattern in key)
        path = f"/root/{key}"
        if pattern.endswith("_segment.json.zst"):
            self.files.rm_file(path)
        else:
            data = bytearray(self.files.cat_file(path))
            data[len(data) // 2] ^= 1
            self.files.pipe_file(path, bytes(data))
        return key


@pytest.mark.parametrize("pattern", ["r00001", "r00000", "_segment.json.zst", "torn"])
def test_damage_that_one_rank_sees_takes_all_ranks_back_to_one_version(
    monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    job = Job(monkeypatch)

    def begin(rank: int, manager: CheckpointManager, part: Part) -> None:
        manager.save()
        job.train(manager, part, 3)

    job.run(begin)
    if pattern == "torn":
        with job.open() as store:
            key = commit_key(store.latest_version() + 1)
        job.files.pipe_file(f"/root/{key}", b"{")
        step = 3
    else:
        key, step = job.damage(pattern), 2

    def resume(rank: int, manager: CheckpointManager, part: Part) -> Any:
        restored = manager.restore(fallback=True)
        assert restored is not None
        held = part.weight.detach().cpu().numpy().copy()
        job.train(manager, part, 2)
        return restored, held

    with pytest.warns(RuntimeWarning) as said:
        (first, held), (second, other) = job.run(resume)

    assert sum("continuing from version" in str(one.message) for one in said) == 2
    assert (first.version, first.step, first.fallback_from) == (second.version, second.step, second.fallback_from)
    assert first.problem == second.problem
    assert (key if pattern != "torn" else "commit record") in (first.problem or "")
    assert first.step == step
    assert np.array_equal(held, value(0, step))
    assert np.array_equal(other, value(1, step))
    with job.open() as store:
        snapshot = store.snapshot()
        for rank in range(2):
            assert np.array_equal(snapshot.table(f"t{rank}.weight").read(), value(rank, step + 2))
        assert verify_store(store, deep=True).is_sound
        kinds = [record.kind for record in store.log()]
        behind = ["fence", "rollback"] if pattern == "torn" else ["rollback", "fence"]
        assert kinds[:4] == ["delta", "delta", *behind]
