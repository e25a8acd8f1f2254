"""What a loader must serve: a version's tables and dense tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from cnr_store import Snapshot, Store
from cnr_store.encodings.widths import carrier
from cnr_store.serving import Loader, LoaderOptions
from tests.support.store_oracle import same_bits

Array = np.ndarray[Any, Any]


def served(loader: Loader) -> dict[str, Array]:
    """Every row of every table that is held by position, as lookups give it, by name; one version."""
    wanted = {name: np.arange(schema.num_rows) for name, schema in loader.tables.items() if schema.keys == "dense"}
    return dict(loader.lookup_many(wanted).rows)


def check_is_snapshot(loader: Loader, snapshot: Snapshot) -> None:
    """What a loader of all rows serves, in the tables' own dtypes, is what the store says of its version."""
    assert loader.version == snapshot.version
    assert loader.step == snapshot.step
    assert loader.tables == snapshot.tables
    rows = served(loader)
    for name, schema in snapshot.tables.items():
        if schema.keys == "dense":
            assert same_bits(rows[name], snapshot.table(name).read()), name
            continue
        keys, arrays = snapshot.table(name).read_all()
        batch = loader.lookup_many({name: [*keys, 987_654_321]})
        assert same_bits(batch.rows[name][:-1], arrays["values"]), name
        missing = batch.missing[name]
        assert missing is not None
        assert missing.tolist() == [False] * len(keys) + [True]
        fill = np.full(schema.dim, schema.fill, carrier(schema.dtype))
        assert same_bits(batch.rows[name][-1], fill)
    assert set(loader.dense) == set(snapshot.dense)
    for name in snapshot.dense:
        assert same_bits(loader.dense[name], snapshot.read_dense(name)), name


def opened_loader(store: Store | str, tables: Sequence[str] | None = None, **given: Any) -> Loader:
    """A loader of arguments and options given side by side."""
    names = {one.name for one in fields(LoaderOptions)}
    options = LoaderOptions(**{name: given.pop(name) for name in names & given.keys()})
    return Loader(store, tables, options, **given)
