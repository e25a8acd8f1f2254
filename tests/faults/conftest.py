from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.launcher import Server


@pytest.fixture(scope="module")
def lives() -> Iterator[Server]:
    """The process that forks lives and racers, and kills them."""
    with closing(Server("tests.faults.life_program")) as started:
        yield started
