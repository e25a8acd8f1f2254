"""A small run of loaders behind a relay over a slow link: every loader serves every version that was committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import freshness
import pytest
from serving_stores import QUICK

pytest.importorskip("redis")
pytest.importorskip("watchdog")

pytestmark = [pytest.mark.servers, pytest.mark.slow]

SMALL = replace(QUICK, rows=2_000, published=2, fan_processes=1, fan_each=2)


def test_loaders_behind_a_relay_are_told_of_every_version(tmp_path: Path) -> None:
    found = freshness._fan_out(tmp_path, SMALL, is_told=True)

    assert found.loaders == 2
    assert len(found.latencies) == SMALL.published * found.loaders
    assert len(found.direct) == SMALL.published
    # Behind the link nobody is faster than the light in it.
    assert min(found.latencies + found.direct) > freshness.LINK_DELAY_S
    assert min(found.relay_bytes, found.direct_bytes) > 0
