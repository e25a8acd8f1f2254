"""Trees of plain data as JSON: RNG states, reader states, limits, hostile documents."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store.errors import BadInput, CorruptStore
from cnr_store.format.document_tree import MAX_DEPTH, TensorLeaf, decode, encode
from cnr_store.format.documents import canonical_json, decode_document


def stored(value: Any) -> Any:
    """Through the very bytes that a manifest holds."""
    return decode(decode_document(canonical_json({"tree": encode(value)}), dict, "test")["tree"])


def test_python_random_state_continues_exactly() -> None:
    source = random.Random(7)
    source.gauss(0, 1)  # leaves a cached second value in the state
    restored = random.Random()

    restored.setstate(stored(source.getstate()))

    assert [restored.gauss(0, 1) for _ in range(50)] == [source.gauss(0, 1) for _ in range(50)]


def test_numpy_legacy_state_continues_exactly() -> None:
    source = np.random.RandomState(7)
    source.standard_normal()
    restored = np.random.RandomState()

    restored.set_state(stored(source.get_state()))

    assert np.array_equal(restored.standard_normal(50), source.standard_normal(50))


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generator_state_continues_exactly(name: str) -> None:
    source = np.random.Generator(getattr(np.random, name)(7))
    source.integers(0, 10, size=3, dtype=np.uint32)
    restored = np.random.Generator(getattr(np.random, name)(8))

    restored.bit_generator.state = stored(source.bit_generator.state)

    assert np.array_equal(restored.random(50), source.random(50))


def test_torch_state_continues_exactly() -> None:
    source = torch.Generator().manual_seed(7)
    torch.randn(3, generator=source)
    restored = torch.Generator()

    restored.set_state(torch.from_numpy(stored(source.get_state().numpy())))

    assert torch.equal(torch.randn(50, generator=restored), torch.randn(50, generator=source))


def tensor_leaf(value: Any) -> TensorLeaf | None:
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bfloat16:
        return TensorLeaf(value.view(torch.int16).numpy(), "bfloat16")
    return TensorLeaf(value.numpy())


def tensor_back(leaf: TensorLeaf) -> torch.Tensor:
    tensor = torch.from_numpy(leaf.array)
    return tensor.view(torch.bfloat16) if leaf.kind == "bfloat16" else tensor


def test_tensors_go_through_the_hooks() -> None:
    value: dict[str, Any] = {"a": [torch.arange(6).reshape(2, 3)], "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}

    restored = decode(encode(value, tensor_leaf), tensor_back)

    assert torch.equal(restored["a"][0], value["a"][0])
    assert restored["b"].dtype == torch.bfloat16
    assert torch.equal(restored["b"], value["b"])


def test_tensors_are_arrays_to_a_reader_without_hook() -> None:
    restored = decode(encode([torch.arange(3)], tensor_leaf))

    assert np.array_equal(restored[0], np.arange(3))


def test_order_of_a_dict_is_kept() -> None:
    value = {"z": 1, "a": 2, "m": {"b": 0, "a": 0}}

    assert list(stored(value)) == ["z", "a", "m"]
    assert list(stored(value)["m"]) == ["b", "a"]


def test_ordered_dict_comes_back_as_dict() -> None:
    assert stored(OrderedDict([("b", 1), ("a", 2)])) == {"b": 1, "a": 2}


def test_sorted_plain_data_stands_for_itself() -> None:
    value = {"a": [1, 2.5, None, True], "b": {"c": "text"}}

    assert encode(value) == value


@pytest.mark.parametrize(
    "value",
    [
        {"$tuple": [1]},
        {"$array": {"dtype": "<i8", "shape": [1], "data": ""}},
        {"a": {"$": 1, "$dict": 2}},
        {"$dict": [["x", 1]]},
        {1: "a", "1": "b", (2, 3): "c", None: "d", 1.5: "e", b"x": "f", True + 1: "g"},
    ],
)
def test_dicts_that_look_like_tags_or_have_other_keys_survive(value: Any) -> None:
    assert stored(value) == value


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.int64(-(2**63)),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2020-01-02T03:04:05", "s"),
        np.complex128(1 - 2j),
    ],
)
def test_numpy_scalars_keep_their_type(value: np.generic) -> None:
    restored = stored(value)

    assert type(restored) is type(value)
    assert restored.dtype == value.dtype
    assert restored == value


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float16),
        np.array(7, np.uint8),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-3],
        np.array([np.nan, -0.0, np.inf]),
        np.array(["a", "bcd"]),
        np.array([True, False]),
    ],
)
def test_arrays_keep_dtype_shape_and_bits(array: np.ndarray) -> None:
    restored = stored(array)

    assert (restored.dtype, restored.shape) == (array.dtype, array.shape)
    assert restored.tobytes() == array.tobytes()
    assert restored.flags.writeable


def test_float_and_int_stay_what_they_were() -> None:
    value = [1, 1.0, -0.0, 2**53 - 1, 2**53, -(2**2000), 1e300, 5e-324]

    restored = stored(value)

    assert [type(item) for item in restored] == [type(item) for item in value]
    assert [repr(item) for item in restored] == [repr(item) for item in value]


class Color(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "leaf", [object(), {1, 2}, Color.RED, Pair(1, 2), bytearray(b"x"), np.array([object()]), np.longdouble(1), len]
)
def test_leaf_that_is_no_plain_data_is_named(leaf: Any) -> None:
    with pytest.raises(BadInput) as refused:
        encode({"reader": [{"ok": 1}, {"workers": (leaf,)}]})

    assert refused.value.path == "$.reader[1].workers[0]"


def test_text_that_is_not_unicode_is_named() -> None:
    with pytest.raises(BadInput) as refused:
        encode({"a": ["\ud800"]})

    assert refused.value.path == "$.a[0]"


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(BadInput, match="contains itself"):
        encode(loop)


def test_depth_limit_is_the_same_in_both_directions() -> None:
    deepest: Any = 1
    for _ in range(MAX_DEPTH):
        deepest = [deepest]

    assert decode(encode(deepest)) == deepest
    with pytest.raises(BadInput):
        encode([deepest])
    with pytest.raises(CorruptStore):
        decode([encode(deepest)])


@pytest.mark.parametrize(
    "value", [np.zeros(1000), b"x" * 8000, "x" * 8000, [None] * 1000, [[]] * 1000, 2**60_000], ids=[*"abcdef"]
)
def test_tree_beyond_the_size_limit_is_refused(value: Any) -> None:
    encode({"a": value}, max_bytes=40_000)
    with pytest.raises(BadInput, match="dense tensors"):
        encode({"a": value}, max_bytes=7_000)


@pytest.mark.parametrize(
    "document",
    [
        {"$tuple": 3},
        {"$pickle": "gASV"},
        {"$tuple": [], "x": 1},
        {"$int": "12"},
        {"$int": "0x"},
        {"$float": "1e9"},
        {"$bytes": "%%%"},
        {"$bytes": "é"},
        {"$dict": [[1]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": {"a": 1}},
        {"$array": {"dtype": "|O8", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$array": {"dtype": "<i8", "shape": [2], "data": "AAAAAAAAAAA="}},
        {"$array": {"dtype": "<i8", "shape": [-1], "data": "AAAAAAAAAAA="}},
        {"$array": {"dtype": "<i8", "shape": [True], "data": "AAAAAAAAAAA="}},
        {"$array": {"dtype": "<i8", "shape": [0, 10**30], "data": ""}},
        {"$array": {"dtype": "<i8", "shape": [1 << 60], "data": "AAAAAAAAAAA="}},
        {"$array": {"dtype": "<i8", "shape": [1] * 100, "data": "AAAAAAAAAAA="}},
        {"$array": {"dtype": "<M8[nonsense]", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$array": {"shape": [1], "data": ""}},
        {"$array": {"dtype": "<i8", "data": ""}},
        {"$array": {"dtype": "<i8", "shape": [0]}},
        {"$scalar": {"dtype": "<i8", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$tensor": {"dtype": "<i8", "shape": [1], "data": "AAAAAAAAAAA="}},
        b"bytes",
    ],
)
def test_document_that_no_encoder_writes_is_refused(document: Any) -> None:
    with pytest.raises(CorruptStore) as refused:
        decode({"a": [document]})

    assert refused.value.path is not None
    assert "$.a[0]" in refused.value.path
