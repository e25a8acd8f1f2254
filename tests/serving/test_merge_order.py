"""What readers see between the steps of a publication: views come before the board, and the board before the rows.

The steps are those of the real publisher; between any two of them readers of the newest view and of the one before look
up all rows, in this process and through the shared files as another process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store.serving.rows import merging
from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.board import Board
from cnr_store.serving.rows.lookups import ViewSource, lookup_in
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.shared_memory import SharedMemory
from cnr_store.serving.rows.views import Publisher, View
from tests.support.served_rows import SCALE, held_table, overlay_of, schema_of

ROWS = np.arange(40)
TABLES = ("t", "u")
STEPS = ("find_coded", "merge_target", "scatter_rows", "merge_into")


class World:
    """A publisher of two tables whose rows all are the number of their version, and its readers."""

    def __init__(self, publisher: Publisher, memory: Memory) -> None:
        self.publisher = publisher
        self.memory = memory
        self.sources: list[ViewSource] = [publisher]
        self.taken: list[tuple[View, Board]] = []
        self.looks = 0
        self.torn = 0

    def load(self) -> None:
        model = dict.fromkeys(range(40), 1)
        held = {name: held_table(model, schema_of(), name=name, memory=self.memory) for name in TABLES}
        assert held["t"].status is None, "it is merged by the call for many tables, the other by itself"
        held["u"] = held["u"].with_status(self.memory)
        self.publisher.publish(1, 1, dict(held))

    def publish(self, version: int) -> None:
        newest = self.publisher.newest_view()[0]
        changes: dict[int, int | None] = dict.fromkeys(range(40), version)
        self.publisher.publish(
            version, version, {name: overlay_of(changes, newest.tables[name].base, self.memory) for name in TABLES}
        )

    def take_views(self) -> None:
        """Some readers are slow: they continue with the present views."""
        self.taken += [source.newest_view() for source in self.sources]

    def look(self) -> None:
        """Every reader reads all rows, and one new reader starts."""
        self.looks += 1
        if isinstance(self.memory, SharedMemory):
            with AttachedTables(self.memory.folder) as fresh:
                assert is_right(fresh.newest_view()[0])
        for source in self.sources:
            view, board = source.newest_view()
            assert is_right(view)
            assert view.epoch >= board.shown, "the newest version can be taken"
            assert board.is_whole(view.epoch), "the newest view is never torn"
        for view, board in self.taken:
            if not is_right(view):
                self.torn += 1
                assert not board.is_whole(view.epoch), "a mixture of two versions counts as whole"


def is_right(view: View) -> bool:
    batch = lookup_in(view, dict.fromkeys(TABLES, ROWS))
    return all(bool((rows == view.version * SCALE).all()) for rows in batch.rows.values())


@pytest.fixture(params=["this process", "another process"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "this process":
        made = World(Publisher(min_view_s=0.0), ANONYMOUS)
        made.load()
        yield made
        return
    memory = SharedMemory(tmp_path / "shared")
    made = World(memory.publisher(min_view_s=0.0), memory)
    made.load()
    with AttachedTables(tmp_path / "shared") as attached:
        made.sources.append(attached)
        yield made
    made.publisher.close()
    memory.close()


def watched(world: World, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a lookup before and after it."""

    def act(*args: Any, **options: Any) -> Any:
        world.look()
        found = function(*args, **options)
        world.look()
        return found

    return act


def test_readers_between_the_steps_of_a_merge_read_one_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.take_views()
    world.publish(2)
    for name in STEPS:
        monkeypatch.setattr(merging, name, watched(world, getattr(merging, name)))
    for name in ("announce", "begin_merge"):
        monkeypatch.setattr(Board, name, watched(world, getattr(Board, name)))

    assert world.publisher.merge()

    assert world.looks >= 2 * (len(STEPS) + 2)
    assert world.torn >= len(TABLES), "slow readers met rows of both versions"


def test_readers_between_the_steps_of_a_publication_read_one_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.take_views()
    for name in ("announce", "begin_merge"):
        monkeypatch.setattr(Board, name, watched(world, getattr(Board, name)))
    for name in STEPS:
        monkeypatch.setattr(merging, name, watched(world, getattr(merging, name)))
    for name in ("put_view", "drop_views"):
        monkeypatch.setattr(SharedMemory, name, watched(world, getattr(SharedMemory, name)))

    for version in (2, 3, 4):
        world.publish(version)
        world.take_views()

    assert world.looks > 0
    assert world.torn > 0
    assert all(source.newest_view()[0].version == 4 for source in world.sources)
