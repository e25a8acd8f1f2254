"""Tables that declare far more rows than they store: what is read costs what is stored, the rest must be asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import BadInput, Store, TableOptions, export_snapshot, verify_store
from cnr_store.changes import changes
from cnr_store.encodings import digest
from cnr_store.maintenance.compaction import compact_run
from cnr_store.segment.codes import array_specs, escape_bits
from cnr_store.serving import Loader
from cnr_store.types import Rectangle
from tests.tools.sample_store import forge_head

HUGE = 1 << 31


def rows_of(*ids: int) -> Any:
    return np.asarray(ids, np.int64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A table of 2^31 rows, 32 GiB as floats, of which five are stored; one of them exact, one deleted again."""
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=2)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("t", np.ones((4, 4), np.float32), options=TableOptions(scale=0.5, nonfinite="escape"))
    with store.writer(mirror="none") as writer:
        writer.restore()
        with writer.begin(step=2) as txn:
            txn.resize_table("t", HUGE)
            values = np.asarray([[2.0] * 4, [np.inf] * 4], np.float32)
            txn.write_rows("t", rows_of(1 << 20, HUGE - 1), values, nonfinite="escape")
        with writer.begin(step=3) as txn:
            txn.delete_rows("t", rows_of(3))
    return store


def stated(store: Store) -> None:
    """Writers without a mirror state no digest: let the head state that of its rows, which a check recomputes."""
    spec = array_specs(store.snapshot().tables["t"])["codes"]
    coded, codes = rows_of(0, 1, 2, 1 << 20), np.asarray([[2] * 4] * 3 + [[4] * 4], np.int32)
    exact = escape_bits(np.full((1, 4), np.inf, np.float32), "float32")
    total = digest.add_digests(
        digest.digest_of_rows(codes, coded, spec.multipliers, spec.presence()),
        digest.digest_of_rows(exact, rows_of(HUGE - 1), spec.multipliers, spec.presence(escape=True)),
    )

    def change(manifest: Any, _: Any) -> Any:
        parts = (msgspec.structs.replace(manifest.parts[0], state_digest=f"{total:016x}"),)
        return msgspec.structs.replace(manifest, parts=parts)

    forge_head(store, change)


READS: dict[str, Callable[[Store, Path], Any]] = {
    "read": lambda store, _: store.snapshot().table("t").read(),
    "read_range": lambda store, _: store.snapshot().table("t").read(0, HUGE // 2),
    "rectangle": lambda store, _: store.snapshot().table("t").read_rectangle(Rectangle((0, HUGE), (0, 2))),
    "restore": lambda store, _: store.writer().restore(),
    "load": lambda store, _: Loader(store),
    "changes": lambda store, _: list(changes(store)),
    "changes of a copy": lambda store, _: list(changes(store, mirror="memory")),
    "export": lambda store, folder: export_snapshot(store.snapshot(), folder / "out.safetensors"),
}


@pytest.mark.parametrize("name", sorted(READS))
def test_rows_that_are_not_stored_take_no_memory_unless_asked_for(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="the others are fill"):
        READS[name](store, tmp_path)


def test_rows_that_are_stored_are_read_by_their_ids(store: Store) -> None:
    view = store.snapshot().table("t")

    found = view.read_rows(rows_of(HUGE - 1, 0, 3, 1 << 20, 17))

    assert found[:, 0].tolist() == [np.inf, 1.0, 0.0, 2.0, 0.0]
    assert view.changed_rows().tolist() == [3, 1 << 20, HUGE - 1]
    assert view.read((1 << 20) - 1, (1 << 20) + 2)[:, 0].tolist() == [0.0, 2.0, 0.0]


def test_a_deep_check_costs_what_is_stored_and_finds_a_wrong_state(store: Store) -> None:
    assert verify_store(store, deep=True).is_sound
    stated(store)
    assert verify_store(store, deep=True).is_sound

    forge_head(store, wrong_digest)

    assert ["has state digest" in problem.message for problem in verify_store(store, deep=True).problems] == [True]


def wrong_digest(manifest: Any, _: Any) -> Any:
    parts = (msgspec.structs.replace(manifest.parts[0], state_digest="0" * 16),)
    return msgspec.structs.replace(manifest, parts=parts)


@pytest.mark.parametrize("run", [(0, 3), (1, 3)])
def test_compacting_costs_what_is_stored(store: Store, run: tuple[int, int]) -> None:
    before = store.snapshot().table("t").read_rows(rows_of(0, 1, 2, 3, 1 << 20, HUGE - 1))

    report = compact_run(store, run=run)

    assert (report.outcome, report.tasks) == ("committed", 1)
    assert store.snapshot().table("t").schema.num_rows == HUGE
    after = store.snapshot().table("t").read_rows(rows_of(0, 1, 2, 3, 1 << 20, HUGE - 1))
    assert np.array_equal(before, after)
    assert verify_store(store, deep=True).is_sound


def test_who_names_the_table_or_gives_the_memory_gets_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("read.plan", "read.table_view"):
        monkeypatch.setattr(f"cnr_store.{module}.UNCONFIRMED_BYTES", 1000)
    rows = 100_000
    with Store.create(str(tmp_path / "store"), fsync=False, threads=2) as store:
        with store.writer() as writer, writer.begin(step=1) as txn:
            txn.write_table("t", np.ones((4, 1), np.float32), options=TableOptions(scale=0.5))
        with store.writer(mirror="none") as writer:
            writer.restore()
            with writer.begin(step=2) as txn:
                txn.resize_table("t", rows)
        snapshot = store.snapshot()
        with pytest.raises(BadInput, match="name the table"):
            Loader(store)
        with Loader(store, tables=["t"]) as loader:
            assert loader.lookup("t", rows_of(3, rows - 1)).tolist() == [[1.0], [0.0]]

        out = np.full((rows, 1), 7, np.float32)
        assert snapshot.table("t").read(out=out) is out
        assert (out[:4] == 1).all()
        assert not out[4:].any()
