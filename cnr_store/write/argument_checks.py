"""Checks of what a caller hands to a transaction, made before anything is encoded or written. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from cnr_store.encodings.widths import CODE_DTYPES, carrier
from cnr_store.errors import BadDtype, BadInput, BadShape
from cnr_store.format.documents import canonical_json
from cnr_store.format.limits import MAX_ELEMENTS, MAX_USER_NESTING
from cnr_store.format.nesting import nests_deeper
from cnr_store.segment.codes import ArraySpec
from cnr_store.types import JsonValue, Lattice
from cnr_store.write.table_options import TableOptions


def check_arrays(
    table: str,
    specs: Mapping[str, ArraySpec],
    rows: int,
    values: Any,
    slots: Mapping[str, Any],
) -> dict[str, Any]:
    """Check values and slots of ``rows`` rows of a table against its arrays; return array name to each.

    Values are floats in the table's dtype or, of a lattice, its codes as int16 or int32.

    Raises
    ------
    BadInput, BadShape, BadDtype
    """
    given = {"codes": values, **{f"slots/{name}": array for name, array in slots.items()}}
    if given.keys() != specs.keys():
        expected = sorted(name.removeprefix("slots/") for name in specs.keys() - {"codes"})
        raise BadInput(
            f"table {table!r} has slots {expected}, found {sorted(slots)}; give every slot with the rows",
            table=table, expected=expected, found=sorted(slots),
        )  # fmt: skip
    for name, array in given.items():
        spec = specs[name]
        shape = (rows,) if spec.is_vector else (rows, spec.width)
        if tuple(array.shape) != shape:
            raise BadShape(
                f"{name} of table {table!r} has shape {tuple(array.shape)}, expected {shape}",
                table=table, expected=shape, found=tuple(array.shape),
            )  # fmt: skip
        takes_codes = name == "codes" and isinstance(spec.encoding, Lattice)
        if np.dtype(array.dtype) != carrier(spec.dtype) and not (takes_codes and np.dtype(array.dtype) in CODE_DTYPES):
            expected_dtype = f"{carrier(spec.dtype)}{', or its codes as int16 or int32' if takes_codes else ''}"
            raise BadDtype(
                f"{name} of table {table!r} has dtype {array.dtype}, expected {expected_dtype}",
                table=table, expected=expected_dtype, found=str(array.dtype),
            )  # fmt: skip
    return given


def checked_size(table: str, what: str, size: Any, *, dim: int = 1, least: int = 0) -> int:
    """Return a number of rows, columns or halvings as an int; raises `BadShape` if it is none or out of range."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < least or size * dim > MAX_ELEMENTS:
        raise BadShape(f"table {table!r} cannot have {size!r} {what}", table=table, expected=least, found=size)
    return int(size)


def check_json(what: str, values: Mapping[str, JsonValue]) -> None:
    """Raise `BadInput` unless ``values`` can be stored as JSON, not nested too deep."""
    if nests_deeper(dict(values), MAX_USER_NESTING):
        raise BadInput(
            f"{what} nests deeper than {MAX_USER_NESTING} levels (or contains itself); flatten it, or save it as a "
            "document, which may nest 64",
            expected=MAX_USER_NESTING, found=what,
        )  # fmt: skip
    try:
        canonical_json(dict(values))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BadInput(f"{what} cannot be stored as JSON: {error}", found=what) from error


def needs_sample(options: TableOptions, dtype: str) -> bool:
    """Return whether these options choose a scale on a sample of rows."""
    name = options.encoding or ("lattice" if dtype == "float32" else "float_bits")
    return name == "lattice" and options.scale is None and options.max_error is None
