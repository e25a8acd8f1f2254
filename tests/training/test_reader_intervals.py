"""Behind queues that fetch ahead, a killed training goes on with the very next sample, over the ends of epochs."""

from __future__ import annotations

import functools
import gc
import queue
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from cnr_store import BadInput
from cnr_store.training.carrying_reader import CarriedBatch, CarryingReader
from cnr_store.training.granted_reader import GrantedReader
from cnr_store.training.reader import IntervalReader
from tests.training.runs import Training, manager_of

SAMPLES, BATCH, EPOCHS, DEPTH = 210, 24, 3, 3
PER_EPOCH = 9
TOTAL = EPOCHS * PER_EPOCH

Batches = list[list[int]]
Pipeline = Callable[[Iterable[Any]], Generator[Any, None, None]]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(workers: int) -> StatefulDataLoader:
    """Shuffled. The sampler has a generator of its own: the loader draws from its generator when it is iterated."""
    sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))
    return StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=sampler, num_workers=workers)


@functools.cache
def uninterrupted(workers: int) -> Batches:
    """The batches of a run that nobody interrupts or saves; workers draw another order of the same samples."""
    loader = loader_of(workers)
    return [batch.tolist() for _ in range(EPOCHS) for batch in loader]


# ---- what lies between a loader and the training


def direct(batches: Iterable[Any]) -> Generator[Any, None, None]:
    yield from batches


def threaded(batches: Iterable[Any]) -> Generator[Any, None, None]:
    """A thread that fetches into a queue of three."""
    fetched: queue.Queue[Any] = queue.Queue(DEPTH)
    is_ended, end = threading.Event(), object()

    def put(item: Any) -> None:
        while not is_ended.is_set():
            try:
                fetched.put(item, timeout=0.05)
                return
            except queue.Full:
                continue

    def fetch() -> None:
        try:
            for batch in batches:
                put(batch)
                if is_ended.is_set():
                    return
            put(end)
        except Exception as error:  # noqa: BLE001 - handed on to the training
            put(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        while (item := fetched.get()) is not end:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        is_ended.set()
        thread.join()


class ThreeStages:
    """Fetches in the training thread, as a training pipeline does whose stages hold three batches at a time.

    A source that has ended is asked no more; another source may follow it.
    """

    def __init__(self) -> None:
        self.held: deque[Any] = deque()
        self.source: Iterator[Any] | None = None
        self.has_ended = False

    def progress(self, source: Iterator[Any]) -> Any:
        if source is not self.source:
            self.source, self.has_ended = source, False
        while len(self.held) < DEPTH and not self.has_ended:
            try:
                self.held.append(next(source))
            except StopIteration:
                self.has_ended = True
        if not self.held:
            raise StopIteration
        return self.held.popleft()


def staged(batches: Iterable[Any]) -> Generator[Any, None, None]:
    pipeline, source = ThreeStages(), iter(batches)
    while True:
        try:
            batch = pipeline.progress(source)
        except StopIteration:
            return
        yield batch


PIPELINES: list[Pipeline] = [direct, threaded, staged]


# ---- a training that can be killed


class Run:
    """One process of a training: its loader and queues are lost with it, its store is not."""

    def __init__(self, url: str, reader: Any, **options: Any) -> None:
        self.reader, self.training = reader, Training()
        self.seen: Batches = []
        self.manager = manager_of(url, self.training, reader=reader, **options)
        restored = self.manager.restore()
        self.start = 0 if restored is None else restored.step

    def step(self, batch: Any) -> bool:
        carries = isinstance(batch, CarriedBatch)
        self.seen.append((batch.batch if carries else batch).tolist())
        self.training.train(self.manager.current_step)
        return self.manager.step(reader_state=batch.state if carries else None)

    def until(self, stop: int, pipeline: Pipeline) -> Run:
        """Train up to step ``stop``, then lose loader, workers, and whatever the pipeline holds."""
        self._train(stop, pipeline)
        self.manager.close()
        self.saves = [report.step for report in self.manager.history]
        del self.manager, self.reader
        return self

    def _train(self, stop: int, pipeline: Pipeline) -> None:
        while True:
            sources: Iterable[Any] = self.reader if isinstance(self.reader, GrantedReader) else [self.reader]
            for source in sources:
                with closing(pipeline(source)) as batches:
                    for batch in batches:
                        self.step(batch)
                        if self.manager.current_step == stop:
                            return


def granted(workers: int, every: int) -> GrantedReader[Any]:
    return GrantedReader(loader_of(workers), grant=every)


def carrying(workers: int, every: int) -> CarryingReader[Any]:
    return CarryingReader(loader_of(workers), every=every)


WAYS: list[Callable[[int, int], Any]] = [granted, carrying]


def url_of() -> str:
    return f"memory://reader-{uuid.uuid4().hex}"


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_every_sample_once_per_epoch_and_in_order(
    way: Callable[[int, int], Any], workers: int, pipeline: Pipeline
) -> None:
    """Killed twice: before the end of the first epoch, and behind a save that its end cuts through."""
    url, every = url_of(), 5
    first = Run(url, way(workers, every), every_steps=every).until(8, pipeline)
    second = Run(url, way(workers, every), every_steps=every).until(17, pipeline)
    third = Run(url, way(workers, every), every_steps=every).until(TOTAL, pipeline)

    assert (second.start, third.start) == (5, 15)
    trained = first.seen[:5] + second.seen[:10] + third.seen
    assert trained == uninterrupted(workers)
    for epoch in range(EPOCHS):
        batches = trained[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH]
        assert sorted(number for batch in batches for number in batch) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_save_at_the_last_batch_of_an_epoch(way: Callable[[int, int], Any], workers: int) -> None:
    url = url_of()
    Run(url, way(workers, PER_EPOCH), every_steps=PER_EPOCH).until(PER_EPOCH, threaded)

    second = Run(url, way(workers, PER_EPOCH), every_steps=PER_EPOCH).until(PER_EPOCH + 5, threaded)

    assert second.start == PER_EPOCH
    assert second.seen == uninterrupted(workers)[PER_EPOCH : PER_EPOCH + 5]


@settings(max_examples=12)
@given(
    way=st.sampled_from(WAYS), pipeline=st.sampled_from(PIPELINES), every=st.integers(1, 9),
    every_steps=st.integers(2, 9), stops=st.lists(st.integers(1, TOTAL - 1), max_size=3),
)  # fmt: skip
def test_any_save_points_and_any_kills(
    way: Callable[[int, int], Any], pipeline: Pipeline, every: int, every_steps: int, stops: list[int]
) -> None:  # fmt: skip
    """Grants that do not fit the saves delay them; they never let a sample through twice or not at all."""
    url = url_of()
    for stop in [*sorted(stops), TOTAL]:
        run = Run(url, way(0, every), every_steps=every_steps)
        if run.start < stop:
            run.until(stop, pipeline)
        assert run.seen == uninterrupted(0)[run.start : run.start + len(run.seen)]
        assert run.start + len(run.seen) == max(stop, run.start)


def test_a_reader_unaware_of_the_training_skips_what_was_fetched() -> None:
    """Why the other two exist."""
    url, lost = url_of(), DEPTH - 1
    Run(url, loader_of(0), every_steps=5).until(5, staged)

    second = Run(url, loader_of(0), every_steps=5).until(PER_EPOCH - lost, staged)

    assert second.seen == uninterrupted(0)[5 + lost : PER_EPOCH]


# ---- saves that no grant was made for


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("way", WAYS)
def test_a_save_due_at_another_batch_comes_as_soon_as_it_is_exact(
    way: Callable[[int, int], Any], pipeline: Pipeline
) -> None:
    """As one that is due by the clock; at most a queue of batches later, with one at either end of it."""
    url = url_of()
    run = Run(url, way(0, 10), every_steps=4).until(22, pipeline)
    saves = run.saves
    again = Run(url, way(0, 10), every_steps=4).until(TOTAL, pipeline)

    assert len(saves) >= 2
    assert max(late - early for early, late in pairwise([0, *saves])) <= 4 + DEPTH + 2
    assert again.seen == uninterrupted(0)[saves[-1] :]


@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_is_told_to_end_saves_what_it_trained(way: Callable[[int, int], Any]) -> None:
    url = url_of()
    run = Run(url, way(0, 10), save_on_sigterm="flag")
    sources: Iterable[Any] = run.reader if isinstance(run.reader, GrantedReader) else [run.reader]
    has_ended = False
    for batch in staged(next(iter(sources))):
        run.manager.should_stop = len(run.seen) >= 2
        has_ended = run.step(batch)
        if has_ended:
            break
    run.manager.close()

    again = Run(url, way(0, 10)).until(PER_EPOCH, direct)

    assert has_ended
    assert again.start == len(run.seen) <= 3 + DEPTH
    assert run.seen + again.seen == uninterrupted(0)[:PER_EPOCH]


# ---- a grant


def test_state_is_refused_while_batches_are_in_flight() -> None:
    reader = granted(0, 5)
    interval = next(iter(reader))
    for _ in range(3):
        next(interval)
    reader.trained()

    with pytest.raises(BadInput, match=r"skip 2 batches in flight.* 2 more"):
        reader.state_dict()
    assert (reader.in_flight, reader.is_ready) == (2, False)


def test_an_interval_is_not_ready_in_its_middle_where_all_is_trained() -> None:
    """A thread may fetch the next batch between the question and the save, whose state would count it as trained."""
    reader = granted(0, 5)
    interval = next(iter(reader))
    for _ in range(2):
        next(interval)
        reader.trained()

    assert (reader.in_flight, reader.is_ready) == (0, False)
    with pytest.raises(BadInput, match=r"skip 0 batches in flight.* 3 more"):
        reader.state_dict()
    reader.prepare()
    assert reader.is_ready
    assert list(interval) == []


def test_the_last_batch_of_an_interval_is_in_flight_until_it_is_trained() -> None:
    reader = granted(0, 2)
    interval = next(iter(reader))
    for _ in range(2):
        next(interval)
    assert not reader.is_ready
    reader.trained()
    assert not reader.is_ready

    reader.trained()

    assert reader.is_ready


def test_a_drained_state_is_that_of_the_loader() -> None:
    reader, loader = granted(0, 5), loader_of(0)
    for _, _ in zip(next(iter(reader)), iter(loader), strict=False):
        reader.trained()

    assert repr(reader.state_dict()) == repr(loader.state_dict())


def test_an_interval_cut_by_the_end_of_an_epoch_goes_on_in_the_next() -> None:
    reader, sizes = granted(0, 5), []
    for _ in range(2):
        for interval in reader:
            sizes.append(0)
            for _ in interval:
                reader.trained()
                sizes[-1] += 1

    assert sizes == [5, 4, 1, 5, 3]


def test_an_interval_begins_only_when_the_last_one_was_trained() -> None:
    reader = granted(0, 2)
    intervals = iter(reader)
    for _ in next(intervals):
        pass

    with pytest.raises(BadInput, match="2 batches of the last one in flight"):
        next(intervals)


def test_an_interval_that_nobody_reads_is_refused() -> None:
    with pytest.raises(BadInput, match="iterate each one"):
        list(granted(0, 2))


def test_an_interval_handed_out_before_a_restore_yields_nothing_more() -> None:
    reader = granted(0, 5)
    state = reader.state_dict()
    old = next(iter(reader))
    next(old)

    reader.load_state_dict(state)

    assert list(old) == []
    assert reader.in_flight == 0


def test_more_trained_than_handed_out_is_refused() -> None:
    with pytest.raises(BadInput, match="once per batch"):
        granted(0, 5).trained()


def test_an_interval_ended_early_ends_with_the_optimizer_step() -> None:
    reader = GrantedReader(loader_of(0), grant=12, micro_batches=4)
    interval = next(iter(reader))
    for _ in range(6):
        next(interval)

    reader.prepare()

    assert len(list(interval)) == 2
    reader.trained(8)
    assert reader.is_ready


@pytest.mark.parametrize("options", [{"grant": 0}, {"grant": 6, "micro_batches": 4}, {"grant": 6, "micro_batches": 0}])
def test_a_grant_that_is_no_number_of_steps_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"grant|micro_batches"):
        GrantedReader(loader_of(0), **options)


def test_a_reader_that_is_dropped_lets_go_of_its_loader_at_once() -> None:
    """Else a collector, in whatever thread it runs, waits there for worker processes to end."""
    reader = granted(0, 5)
    loader = weakref.ref(reader._loader)
    gc.disable()
    try:
        next(next(iter(reader)))
        del reader
        assert loader() is None
    finally:
        gc.enable()


class Failing:
    """A loader whose third batch fails once."""

    def __init__(self) -> None:
        self.next = 0
        self.has_failed = False

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> int:
        if self.next == 2 and not self.has_failed:
            self.has_failed = True
            raise OSError("the disk is away")
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_batch_that_could_not_be_fetched_is_not_in_flight() -> None:
    reader = GrantedReader(Failing(), grant=4)
    interval = next(iter(reader))
    taken = [next(interval), next(interval)]
    with pytest.raises(OSError, match="away"):
        next(interval)
    taken += interval
    reader.trained(4)

    assert taken == [0, 1, 2, 3]
    assert reader.state_dict() == {"next": 4}


# ---- a state that is carried


class Growing(Failing):
    """A loader whose state is a live object."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = True
        self.read: list[int] = []

    def __next__(self) -> int:
        self.read.append(self.next)
        return super().__next__()

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}


def test_a_carried_state_does_not_change_with_the_batches_behind_it() -> None:
    batches = iter(CarryingReader(Growing()))

    carried = [next(batches) for _ in range(3)]

    assert [one.state["read"] for one in carried] == [[0], [0, 1], [0, 1, 2]]


def test_a_carrying_reader_gives_no_state_of_its_own() -> None:
    reader = carrying(0, 4)
    next(iter(reader))

    with pytest.raises(BadInput, match=r"every=4.*reader_state=carried\.state"):
        reader.state_dict()


def test_a_carried_batch_moves_as_its_batch_does() -> None:
    carried = CarriedBatch(torch.arange(3), {"next": 3})

    moved = carried.to(torch.float64)

    assert moved.batch.dtype == torch.float64
    assert moved.state == {"next": 3}


def test_a_state_is_carried_every_so_many_batches() -> None:
    with pytest.raises(BadInput, match="1 or more"):
        carrying(0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_both_follow_the_protocol(way: Callable[[int, int], Any]) -> None:
    assert isinstance(way(0, 1), IntervalReader)


@pytest.mark.parametrize("reader", [lambda: GrantedReader([1], grant=1), lambda: CarryingReader([1])])
def test_a_loader_without_a_state_is_refused(reader: Callable[[], Any]) -> None:
    with pytest.raises(BadInput, match="no state_dict"):
        reader()
