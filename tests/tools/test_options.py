"""Times and sizes as people write them."""

from __future__ import annotations

import pytest

from cnr_store import BadInput
from cnr_store_tools.options import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("0s", 0), ("90s", 90), ("30m", 1800), ("12h", 43_200), ("1.5d", 129_600), ("2w", 1_209_600)],
)
def test_duration_is_a_number_and_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text, "--grace") == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1B", 1), ("1.5KiB", 1536), ("64MiB", 64 << 20), ("2TiB", 2 << 40)]
)
def test_size_is_a_number_and_its_unit(text: str, size: int) -> None:
    assert parse_size(text, "--bandwidth") == size


@pytest.mark.parametrize("text", ["", "30", "30 m", "-1s", "1y", "1e3s", "inf", "s", "3MB", "٣s", "1M"])
def test_amount_without_a_known_unit_is_refused_and_the_option_named(text: str) -> None:
    with pytest.raises(BadInput, match="--grace takes a time"):
        parse_duration(text, "--grace")
    with pytest.raises(BadInput, match="--bandwidth takes a size"):
        parse_size(text, "--bandwidth")
