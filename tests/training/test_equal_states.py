"""Step counters that many parameters share are stored once: those with the same bits, and no others."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.format.document_tree import encode
from cnr_store.format.documents import canonical_json
from cnr_store.training.document import KeptDocument, equal_states
from cnr_store.training.tensors import leaf_of

NUMBERS = st.sampled_from([0, 1, 2, 2**60, 0.0, -0.0, 1.0, float("nan"), float("inf"), True, False, None, "1"])


@st.composite
def values(draw: st.DrawFn) -> Any:
    """Numbers as they are, and as tensors of every kind that an optimizer counts steps in."""
    number = draw(NUMBERS)
    if number is None or isinstance(number, str) or draw(st.booleans()):
        return number
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]))
    if not dtype.is_floating_point and not isinstance(number, int):
        number = 1
    return torch.full(draw(st.sampled_from([(), (1,), (1, 1), (2,)])), number, dtype=dtype)


STEPS = st.builds(
    lambda step, dtype: {"step": torch.tensor(step, dtype=dtype)},
    st.sampled_from([0.0, 0.0, 0.0, 0.0, -0.0, float("nan")]),
    st.sampled_from([torch.float32, torch.float32, torch.float32, torch.float64]),
)
"""As torch's optimizers count steps: mostly the same of all parameters."""


@given(
    states=st.lists(st.dictionaries(st.sampled_from(["step", "beta", "mu"]), values(), max_size=3), max_size=8)
    | st.lists(STEPS, max_size=4)
)
def test_parameters_share_a_state_if_they_are_stored_alike(states: list[dict[str, Any]]) -> None:
    names = [f"p{number}" for number in range(len(states))]

    found = equal_states(dict(zip(names, states, strict=True)), names)

    stored = [canonical_json(encode(state, leaf_of)) if state else None for state in states]
    of_name = {
        index: canonical_json(encode(one["value"], leaf_of))
        for one in found
        for start, stop in one["parameters"]
        for index in range(start, stop)
    }
    assert [of_name.get(index) for index in range(len(states))] == stored
    assert len(found) == len({one for one in stored if one is not None})


PLAIN = st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from([1, 2, "1"]), max_size=3), max_size=3)


@given(documents=st.lists(PLAIN, max_size=6))
def test_a_kept_document_is_encoded_as_it_is_now(documents: list[dict[str, Any]]) -> None:
    kept = KeptDocument()

    found = [encode(kept.encoded(document)) for document in documents]

    assert found == [encode(document) for document in documents]
