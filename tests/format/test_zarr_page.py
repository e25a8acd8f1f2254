"""What docs/zarr.md shows is what a store holds: its lines run as they stand, with zarr-python and numpy alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from cnr_store import Store, TableOptions
from tests.support.zarr_values import SHOWN, weights_of


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A baseline of two tables that share arrays, with a slot."""
    values = np.random.default_rng(0).normal(0, 3, (3000, 6)).astype(np.float32)
    slots = np.random.default_rng(1).uniform(0, 9, 3000).astype(np.float32)
    with Store.create(str(tmp_path / "store"), fsync=False, threads=1) as store, store.writer() as writer:
        with writer.begin(step=1) as txn:
            for table, rows in (("s", 40), ("t", 3000)):
                given = {"momentum": slots[:rows]}
                txn.write_table(table, values[:rows], slots=given, options=TableOptions(scale=0.125))
        name = store.snapshot().record.chain[-1].seg
    return tmp_path / "store" / "data" / name


def test_the_page_gives_the_weights_that_a_snapshot_gives(segment: Path) -> None:
    with Store.open(str(segment.parents[1])) as store:
        expected = {table: store.snapshot().table(table).read() for table in ("s", "t")}

    for table, values in expected.items():
        assert np.array_equal(weights_of(segment, table), values)


def test_every_array_of_a_store_opens_without_a_warning(segment: Path) -> None:
    documents = [path for path in segment.rglob("zarr.json") if '"array"' in path.read_text()]

    shapes = [zarr.open_array(str(path.parent), mode="r")[:].shape for path in documents]  # warnings are errors here

    assert len(shapes) == 3


def test_the_tree_of_a_store_is_shown_without_a_warning(segment: Path) -> None:
    root = str(segment.parents[1])

    tree = str(SHOWN["tree_of"](root))

    assert tree.count(segment.name) == 1
    assert "set-0.codes" in tree
    with pytest.warns(zarr.errors.ZarrUserWarning) as warned:
        zarr.open_group(root, mode="r").tree()
    assert {str(one.message).split()[2] for one in warned} == {"cnr.json", "commits", "hint", "_segment.json.zst"}
