"""Loaders beside the lives of `test_maintained_store_machine`: what they serve is what the training saved, always.

The oracle is the training's own values by version, never what the store reads. Saves, merges, expiries, collections
without grace, rollbacks, channels that come and go, branches that end and storage faults meet loaders between polls and
in the middle of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cnr_store import NotFound
from cnr_store.errors import BranchNotFound, ChannelNotFound
from cnr_store.serving import Loader, LoaderOptions
from tests.maintenance.maintained_lines import Line
from tests.maintenance.test_maintained_store_machine import MaintainedStoreMachine
from tests.store.test_store_machine import Flaky, State, beginning, run
from tests.support.faulty import Fault, FaultKind, SimulatedCrash
from tests.support.store_oracle import KINDS, same_bits

MOST_LOADERS = 3
SOAK_LIVES = 600
FAULTS = [FaultKind.FAIL_BEFORE, FaultKind.SHORT_READ, FaultKind.CRASH]


class ReadOnly(Flaky):
    """A view of a process that may not write: no leases, which would keep what collections are checked to delete."""

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        raise PermissionError(path)

    def rm_file(self, path: str) -> None:
        raise PermissionError(path)


@dataclass(eq=False)
class Follower:
    """A loader, and the target that it follows."""

    loader: Loader
    line: Line
    fs: ReadOnly
    channel: str | None
    publish: Any
    floor: int = 0
    """The version served must not fall below this one without a rollback."""

    pinned: int | None = None

    @property
    def may_go_back(self) -> bool:
        return self.channel is not None or self.pinned is not None


class LoaderMachine(MaintainedStoreMachine):
    """The rules of a maintained training, and those of who serves it."""

    @beginning
    def create(self, mirror: Any, seed: int) -> None:
        self.followers: list[Follower] = []
        super().create(mirror, seed)
        self.open_loader("poll", "auto", False)

    def teardown(self) -> None:
        for follower in getattr(self, "followers", []):
            follower.loader.close()
            follower.loader.store.close()
        super().teardown()

    @precondition(lambda self: len(self.followers) < MOST_LOADERS)
    @rule(
        publish=st.sampled_from(["poll", "apply"]),
        kept_as=st.sampled_from(["auto", "codes"]),
        of_channel=st.booleans(),
    )
    def open_loader(self, publish: Any, kept_as: Any, of_channel: bool) -> None:
        channels = sorted(self.line.log.channels)
        channel = channels[0] if of_channel and channels else None
        codes = dict.fromkeys((f"t_{kind}" for kind in KINDS if kind not in ("raw", "affine")), "codes")
        self.serve(self.line, channel, publish, codes if kept_as == "codes" else "auto")

    def serve(self, line: Line, channel: str | None, publish: Any, kept_as: Any) -> None:
        fs = ReadOnly(self.inner)
        store = self.open_line(line, fs)
        loader = Loader(store, channel=channel, publish=publish, options=LoaderOptions(kept_as=kept_as))
        self.followers.append(Follower(loader, line, fs, channel, publish, loader.version))

    def drop(self, follower: Follower) -> None:
        self.followers.remove(follower)
        follower.fs.arm(None)
        follower.fs.is_crashed = False
        follower.loader.close()
        follower.loader.store.close()

    def chosen(self, data: Any) -> Follower:
        return self.followers[data.draw(st.integers(0, len(self.followers) - 1))]

    # What happens to a loader.

    @precondition(lambda self: bool(self.followers))
    @rule(data=st.data())
    def calm_poll(self, data: Any) -> None:
        self.catches_up(self.chosen(data))

    def catches_up(self, follower: Follower) -> None:
        """Without a fault one poll is enough; a version that cannot be served is reported."""
        loader = follower.loader
        poll = loader.poll()
        loader.apply()
        if follower.line not in self.lines:
            assert poll.error is None or isinstance(poll.error, NotFound | BranchNotFound)
            return
        wanted = self.wanted(follower)
        if wanted is None:
            assert isinstance(poll.error, ChannelNotFound)
        else:
            assert poll.error is None
            assert loader.metrics().is_expired is not follower.line.log.is_live(loader.version)
            assert loader.version == wanted
            assert loader.staleness_s == 0
        assert poll.is_updated or (poll.rows, poll.size_bytes) == (0, 0)
        assert 1 in (self.idle_requests(follower), self.idle_requests(follower))  # one in 60 looks back

    def idle_requests(self, follower: Follower) -> int:
        """What a poll without news asks for; 1 if it ends with an error."""
        before = len(follower.fs.calls)
        again = follower.loader.poll()
        assert not again.is_updated
        return 1 if again.error is not None else len(follower.fs.calls) - before

    def wanted(self, follower: Follower) -> int | None:
        self.follow(follower.line)
        if follower.pinned is not None:
            return follower.pinned
        if follower.channel is not None:
            return follower.line.log.channels.get(follower.channel)
        return follower.line.log.head

    @precondition(lambda self: bool(self.followers))
    @rule(
        data=st.data(),
        kind=st.sampled_from(FAULTS),
        at=st.integers(0, 25),
        calls=st.sampled_from([1, 1, 2, 40]),
    )
    def poll_with_a_fault(self, data: Any, kind: FaultKind, at: int, calls: int) -> None:
        """What was served stays, or a newer version comes, whole; the next poll heals. After a crash, a new process."""
        follower = self.chosen(data)
        loader, before = follower.loader, follower.loader.version
        follower.fs.arm(Fault(kind, len(follower.fs.calls) + at, calls=calls))
        try:
            poll = loader.poll()
        except SimulatedCrash:
            self.drop(follower)
            if follower.line in self.lines and self.wanted(follower) is not None:
                self.serve(follower.line, follower.channel, follower.publish, "auto")
            return
        finally:
            follower.fs.arm(None)
        assert poll.version == loader.version
        assert loader.version == before or poll.is_updated
        self.check_follower(follower)
        self.catches_up(follower)

    @precondition(lambda self: bool(self.followers) and self.writer.is_synced)
    @rule(
        data=st.data(),
        at=st.integers(0, 30),
        what=st.lists(st.sampled_from(["save", "merge", "merge all", "collect"]), min_size=1, max_size=4),
    )
    def poll_during_maintenance(self, data: Any, at: int, what: list[str]) -> None:
        """What a poll reads may be merged and deleted under its hands."""
        follower = self.chosen(data)
        if follower.line is not self.line:
            return

        def happen() -> None:
            for one in what:
                if one == "save":
                    self.delta()
                else:
                    self.maintain([one])

        with self.meeting(follower.fs, at, happen):
            follower.loader.poll()
        follower.loader.apply()
        self.check_follower(follower)
        self.catches_up(follower)

    @precondition(lambda self: bool(self.followers))
    @rule(data=st.data())
    def roll_back(self, data: Any) -> None:
        follower = self.chosen(data)
        if follower.line not in self.lines:
            return
        self.follow(follower.line)
        follower.loader.poll()
        older = [version for version in sorted(follower.line.log.live()) if version < follower.loader.version]
        if not older:
            return
        version = data.draw(st.sampled_from(older))
        follower.loader.rollback(version)
        follower.loader.apply()
        assert follower.loader.version == version
        follower.pinned = version

    @precondition(lambda self: any(follower.pinned is not None for follower in self.followers))
    @rule(data=st.data(), newest=st.booleans())
    def unpin(self, data: Any, newest: bool) -> None:
        follower = self.chosen(data)
        follower.loader.unpin()
        follower.pinned, follower.floor = None, 0
        if newest:
            self.catches_up(follower)

    @precondition(lambda self: bool(self.followers))
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        follower = self.chosen(data)
        follower.loader.pin()
        follower.pinned = follower.loader.version

    @precondition(lambda self: bool(self.followers))
    @rule(data=st.data())
    def close_loader(self, data: Any) -> None:
        self.drop(self.chosen(data))

    # What must hold.

    def check_follower(self, follower: Follower) -> None:
        loader = follower.loader
        if follower.line in self.lines:
            self.follow(follower.line)
        check_is_state(loader, follower.line.states[loader.version])
        if not follower.may_go_back:
            assert loader.version >= follower.floor
            follower.floor = loader.version

    @invariant()
    def loaders_serve_what_was_saved(self) -> None:
        for follower in getattr(self, "followers", []):
            self.check_follower(follower)


def check_is_state(loader: Loader, state: State) -> None:
    """Every row and tensor is what the training had at that version, by the definitions of the format."""
    assert set(loader.tables) == set(state.tables) | set(state.hashed)
    assert loader.step == state.step, (loader.metrics(), state.step)
    ids: dict[str, Any] = {name: np.arange(table.num_rows) for name, table in state.tables.items()}
    ids |= {name: [*sorted(table.rows), 424_242] for name, table in state.hashed.items()}
    batch = loader.lookup_many(ids, dense=sorted(state.dense))
    assert (batch.version, batch.step) == (loader.version, loader.step)
    for name, table in state.tables.items():
        expected = table.expected()["values"]
        assert same_bits(batch.rows[name], expected), (name, loader.metrics(), batch.rows[name], expected)
    for name, hashed in state.hashed.items():
        missing = batch.missing[name]
        assert missing is not None
        assert missing.tolist() == [False] * len(hashed.rows) + [True]
        for at, key in enumerate(sorted(hashed.rows)):
            assert same_bits(batch.rows[name][at], hashed.rows[key][0] + np.float32(0))
    assert set(loader.dense) == set(state.dense)
    for name, tensor in state.dense.items():
        assert same_bits(batch.dense[name], tensor), name


def test_loaders_serve_what_the_training_saved() -> None:
    run(examples=10, steps=22, machine=LoaderMachine)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_loaders_serve_what_the_training_saved_over_long_lives(capsys: pytest.CaptureFixture[str]) -> None:
    run(examples=SOAK_LIVES, steps=40, machine=LoaderMachine)
    with capsys.disabled():
        sys.stdout.write(f"{SOAK_LIVES} lives with loaders, 0 failures\n")
