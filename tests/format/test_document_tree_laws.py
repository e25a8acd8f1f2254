"""Encoding a tree and decoding it is identity, types and order included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cnr_store.format.document_tree import decode, encode
from cnr_store.format.documents import canonical_json, decode_document

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["$tuple", "$", "$dict"])
hashables = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary(max_size=6)
arrays = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
)
leaves = hashables | st.floats() | arrays | arrays.map(lambda array: array.dtype.type(3))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables | st.tuples(hashables, hashables), inner, max_size=4)
        | st.dictionaries(texts, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equality that also compares types, order, dtypes, the sign of zero and NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) for pair in zip(left.items(), right.items(), strict=True) for a, b in zip(*pair, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (np.ndarray, np.generic)):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or (left, math.copysign(1, left)) == (
            right,
            math.copysign(1, right),
        )
    return bool(left == right)


@settings(max_examples=150)
@given(trees)
def test_stored_tree_is_the_tree(tree: Any) -> None:
    data = canonical_json({"tree": encode(tree)})

    restored = decode(decode_document(data, dict, "test")["tree"])

    assert same(tree, restored)
    assert canonical_json({"tree": encode(restored)}) == data
