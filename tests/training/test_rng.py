"""The generators of a process, as plain data and back: the same state, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cnr_store.training.reader import capture_rng, restore_rng


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 2000])
@pytest.mark.parametrize("normal", [False, True])
def test_the_generator_of_torch_is_restored_bit_for_bit(draws: int, normal: bool) -> None:
    torch.manual_seed(2**63 + 5)
    torch.rand(draws)
    if normal:
        torch.randn(3)  # half of a pair waits for the next call
    before, captured = torch.get_rng_state(), capture_rng()
    torch.manual_seed(1)

    restore_rng(captured)

    assert torch.equal(torch.get_rng_state(), before)
    assert captured["torch"]["words"].nbytes + captured["torch"]["rest"].nbytes == 624 * 4 + 64


def test_a_state_of_another_layout_is_kept_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.from_numpy(np.arange(5056, dtype=np.int64).astype(np.uint8))
    monkeypatch.setattr(torch, "get_rng_state", lambda: other)

    assert torch.equal(capture_rng()["torch"], other)
