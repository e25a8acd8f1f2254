"""What fresh rows are worth, and how few bytes keep them fresh: an online training that predicts before it learns.

``python tests/benchmarks/bench_online.py [--sections priority,staleness] [--quick]``. A model is trained in the order
of time. Each sample is predicted by what servers have at that moment, before anything is trained on it.

``priority``: published stores with a limit of bytes per update (`PriorityPublisher`), rows by their change or in random
order, coarser scales and rarer updates, against an update of every changed row. ``staleness``: snapshots of a certain
age. Generated clicks have no time stamps: they come at the rate of Criteo's Kaggle log, 45.8 million samples in 7 days.
MovieLens has its own.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import harness
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from real_sets import DATA_FOLDER, read_movielens, read_pairs
from run_config import RunConfig

from cnr_store import Store, TableOptions
from cnr_store.changes import PriorityPublisher
from cnr_store.format.records import TableSchema
from cnr_store.serving import Loader
from cnr_store.training import CheckpointManager, TrackingOptions
from cnr_store.types import AffineBits
from cnr_store_tools.demo import metrics
from cnr_store_tools.demo.batches import ClickBatch, TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks
from cnr_store_tools.demo.train import make_optimizers, train_step

SECTIONS = ("priority", "staleness")
SHARES = (1 / 4, 1 / 13)
COARSER: tuple[AffineBits, ...] = (4, 2)
RARER = (4, 13)
"""Updates of all changed rows are compared at these bits, and as every so many-th update."""
SAMPLES_PER_S = 45.8e6 / (7 * 86_400)
AGES = {"0.5 s": 0.5, "1 min": 60.0, "10 min": 600.0, "60 min": 3_600.0}
DAYS = {"1 day": 86_400.0, "7 days": 7 * 86_400.0}
LOADED = "10 min"
"""The age that a loader serves too, from real saves."""

FULL = "every changed row, 8 bits"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Log:
    """Samples in time order, and the time of each in seconds from the first."""

    name: str
    clicks: ClickLog
    times_s: Floats
    config: RunConfig
    warm_up: int
    """Batches that are trained before anything is predicted."""


def main() -> None:
    parser = harness.arguments(__doc__, rows=1_000_000, repeats=3)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    options = parser.parse_args()
    chosen = options.sections.split(",")
    if not set(chosen) <= set(SECTIONS):
        parser.error(f"sections are {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    samples, seeds = (60_000, 1) if options.quick else (options.rows, options.repeats)
    report = harness.Report(
        f"online training: generated clicks (of {samples:,} samples) and public data, {seeds} seeds"
    )
    report.start()
    for section in chosen:
        report.note(f"\n{section}")
        with harness.data_folder(options.folder) as folder:
            (measure_priority if section == "priority" else measure_staleness)(report, folder, samples, seeds)
    report.finish(options.json)


def generated(samples: int, batch_size: int, seed: int, tables: tuple[int, ...], dim: int, warm_up: float) -> Log:
    """Generated clicks whose popular ids drift, and the model that learns them."""
    traffic = TrafficConfig(table_rows=tables, num_samples=samples, drift_every=16_384, teacher_scale=2.5, seed=seed)
    config = RunConfig(
        traffic=traffic, steps=samples // batch_size, batch_size=batch_size, save_every=1, test_share=0.0, dim=dim,
        bottom_hidden=(16,), top_hidden=(32,), table_lr=0.1, seed=seed,
    )  # fmt: skip
    times = np.arange(samples) / SAMPLES_PER_S
    return Log("generated", generate_clicks(traffic), times, config, round(warm_up * config.steps))


def movielens(batch_size: int, seed: int) -> Log | None:
    """MovieLens-100k by its time stamps; None where the file is missing."""
    path = DATA_FOLDER / "ml-100k.inter"
    if not path.is_file():
        return None
    clicks = read_movielens(path)
    times = np.sort(np.loadtxt(path, skiprows=1, usecols=3))
    config = RunConfig(
        traffic=None, steps=len(clicks) // batch_size, batch_size=batch_size, save_every=1, test_share=0.0, dim=16,
        top_hidden=(32,), table_lr=0.1, seed=seed,
    )  # fmt: skip
    return Log("MovieLens", clicks, times - times[0], config, config.steps // 3)


def beauty(seed: int) -> Log | None:
    """Amazon Beauty, whose time is only an order; None where the file is missing."""
    path = DATA_FOLDER / "beauty_pairs.txt"
    if not path.is_file():
        return None
    clicks = read_pairs(path)
    config = RunConfig(
        traffic=None, steps=len(clicks) // 512, batch_size=512, save_every=1, test_share=0.0, dim=32,
        top_hidden=(32,), table_lr=0.1, seed=seed,
    )  # fmt: skip
    return Log("Amazon Beauty", clicks, np.arange(len(clicks), dtype=np.float64), config, config.steps // 2)


class Online:
    """The training: `steps` trains a batch, after the caller has predicted it."""

    def __init__(self, log: Log) -> None:
        self.model = SmallDLRM(log.config.model_config(log.clicks))
        self.optimizers = make_optimizers(self.model, table_lr=log.config.table_lr, dense_lr=log.config.dense_lr)
        self._log = log
        self._batches = TimeOrderedBatches(log.clicks, log.config.batch_size)

    def steps(self) -> Iterator[tuple[int, ClickBatch]]:
        """Yield each batch before it is trained, with its number."""
        for number in range(len(self._batches)):
            batch = self._batches.batch(number)
            yield number, batch
            train_step(self.model, self.optimizers, batch)


@torch.no_grad()
def predicted(model: SmallDLRM, batch: ClickBatch) -> npt.NDArray[np.float32]:
    """Click probabilities of a batch."""
    return np.asarray(torch.sigmoid(model(batch.ids, batch.dense)).numpy())


def bound(loader: Loader, model: SmallDLRM) -> SmallDLRM:
    """A copy of a model that shows what a loader serves."""
    served = copy.deepcopy(model)
    loader.bind(served)
    return served


# ---- bytes of an update


class RandomOrder(PriorityPublisher):
    """A publisher whose rows go in random order, within the same limit."""

    def _take(self, table: str, schema: TableSchema, batch: pa.RecordBatch) -> None:
        super()._take(table, schema, batch)
        waiting = self._waiting.get(table)
        if waiting is not None:
            order = np.random.default_rng(self._updates).random(len(waiting)) + 0.5
            self._waiting[table] = replace(waiting, change=np.where(waiting.change > 0, order, 0.0))


class Followed:
    """A store that servers read, a loader on it, and what the loader's model predicts."""

    def __init__(self, name: str, store: Store, model: SmallDLRM, publisher: PriorityPublisher | None = None) -> None:
        self.name, self.publisher = name, publisher
        self.loader = Loader(store, publish="apply")
        self._served = bound(self.loader, model)
        self._store = store
        self._seen = store.head().record.v
        self._updates = self._bytes = 0
        self.scores: list[npt.NDArray[np.float32]] = []

    @property
    def update_bytes(self) -> float:
        """Bytes of an update, the mean."""
        return self._bytes / max(self._updates, 1)

    def update(self) -> None:
        """Publish, load and show what was saved."""
        if self.publisher is not None:
            self.publisher.advance()
        self._updates += 1
        self.loader.poll()
        served, head = self.loader.apply(), self._store.head().record
        if served != head.v:
            raise SystemExit(f"{self.name}: the loader serves version {served} of {head.v}")
        if head.v != self._seen:
            self._bytes += head.chain[-1].size_bytes
            self._seen = head.v

    def predict(self, batch: ClickBatch) -> None:
        self.scores.append(predicted(self._served, batch))


def measure_priority(report: harness.Report, folder: Path, samples: int, seeds: int) -> None:
    """Quality of predictions against bytes per update, of updates of all, some and random rows."""
    every = 32
    for name in ("generated", "Amazon Beauty"):
        found: dict[str, list[tuple[float, float, float]]] = {}
        for seed in range(seeds):
            log = (
                generated(max(samples * 6 // 10, 120_000), 512, seed, (50_000, 20_000, 10_000), 32, 0.5)
                if name == "generated"
                else beauty(seed)
            )
            if log is None:
                report.note(f"      the file of {name} is not there")
                break
            for setting, values in _priority(folder / f"{name}{seed}", log, every).items():
                found.setdefault(setting, []).append(values)
        if not found:
            continue
        full = np.array(found[FULL])
        rows = []
        for setting, one in found.items():
            values = np.array(one)
            size = values[:, 0].mean()
            worse = 100 * (values[:, 1] / full[:, 1] - 1)
            rows.append(
                [
                    setting, f"{size / 1000:.1f}", f"{full[:, 0].mean() / size:.1f}" if size else "",
                    f"{values[:, 2].mean():.4f}", f"{values[:, 1].mean():.4f}",
                    f"{worse.mean():+.2f} ({worse.min():+.2f} to {worse.max():+.2f})",
                ]
            )  # fmt: skip
        columns = ["update", "kB", "fewer bytes", "AUC", "logloss", "logloss worse, %"]
        report.table(f"bytes of an update, {name}: an update every {every} batches", columns, rows)


def _priority(folder: Path, log: Log, every: int) -> dict[str, tuple[float, float, float]]:
    """Return by setting: bytes of an update, log loss and AUC of all predictions."""
    folder.mkdir()
    online = Online(log)
    with ExitStack() as stack:
        sources = {FULL: Saves(folder / "8", online.model, 8, 1)}
        sources |= {
            f"every changed row, {bits} bits": Saves(folder / f"{bits}", online.model, bits, 1) for bits in COARSER
        }
        sources |= {
            f"every changed row, every {often}th time": Saves(folder / f"each{often}", online.model, 8, often)
            for often in RARER
        }
        for one in sources.values():
            stack.callback(one.close)
        followed: list[Followed] = []
        labels: list[npt.NDArray[np.float32]] = []
        for number, batch in online.steps():
            since = number - log.warm_up
            if since == 0:
                for one in sources.values():
                    one.begin()
                followed = [Followed(name, one.store, online.model) for name, one in sources.items()]
            elif since > 0 and since % every == 0:
                for one in sources.values():
                    one.save()
                for each in followed:
                    each.update()
                if since == every:  # the first update says what one of all rows takes
                    stores = {
                        8: sources[FULL].store,
                        COARSER[-1]: sources[f"every changed row, {COARSER[-1]} bits"].store,
                    }
                    followed += _limited(stack, folder, stores, online.model, followed[0].update_bytes)
            for one in sources.values():
                one.touch(batch.ids)
            if since >= every:
                labels.append(batch.labels.numpy())
                for each in followed:
                    each.predict(batch)
        for each in followed:
            stack.callback(each.loader.close)
        clicked = np.concatenate(labels)
        return {
            one.name: (
                one.update_bytes,
                metrics.logloss(clicked, np.concatenate(one.scores)),
                metrics.auc(clicked, np.concatenate(one.scores)),
            )
            for one in followed
        }


def _limited(
    stack: ExitStack, folder: Path, sources: Mapping[int, Store], model: SmallDLRM, full_bytes: float
) -> list[Followed]:
    """Published stores with a limit, and one that no update follows, all from the same state on."""
    made = []
    for share in SHARES:
        for bits, how, kind in (
            *((bits, "rows by change", PriorityPublisher) for bits in sources), (8, "rows in random order", RandomOrder)
        ):  # fmt: skip
            name = f"1/{round(1 / share)} of the bytes, {bits} bits, {how}"
            target = Store.create(str(folder / name.replace("/", "-")))
            publisher = stack.enter_context(kind(sources[bits], target, bytes_per_update=round(full_bytes * share)))
            publisher.advance()
            made.append(Followed(name, target, model, publisher))
    made.append(Followed("never", sources[8], model))
    made[-1].update = lambda: None  # type: ignore[method-assign]  # it stays where it is
    return made


class Saves:
    """A store of weights alone, as a training saves them: a baseline, then the rows of some intervals."""

    def __init__(self, folder: Path, model: SmallDLRM, bits: AffineBits, often: int) -> None:
        self.store = Store.create(str(folder))
        self._model, self._bits, self._often = model, bits, often
        self._writer = self.store.writer()
        self._step = 0
        self._touched: list[torch.Tensor] = []

    def begin(self) -> None:
        """Save everything."""
        self._touched.clear()
        with self._writer.begin(0, "baseline") as txn:
            for name, weight in self._model.table_parameters():
                txn.write_table(name, weight.detach().numpy(), options=TableOptions(bits=self._bits))
            txn.put_dense(self._dense())

    def touch(self, ids: torch.Tensor) -> None:
        """Note the rows of samples (n, tables)."""
        self._touched.append(ids)

    def save(self) -> None:
        """Save the noted rows, if it is time to."""
        self._step += 1
        if self._step % self._often:
            return
        ids = torch.cat(self._touched).numpy()
        self._touched.clear()
        with self._writer.begin(self._step) as txn:
            for column, (name, weight) in enumerate(self._model.table_parameters()):
                rows = np.unique(ids[:, column])
                txn.write_rows(name, rows, weight.detach().numpy()[rows])
            txn.put_dense(self._dense())

    def close(self) -> None:
        self._writer.close()

    def _dense(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: one.detach().numpy().copy() for name, one in self._model.dense_parameters()}


# ---- age of a snapshot


class Aged(Protocol):
    """Snapshots that are served at a certain age."""

    def keep(self, now_s: float) -> None:
        """Take what the training has now."""

    def at(self, now_s: float) -> SmallDLRM:
        """The model that servers have."""


class AgedCopies:
    """Copies of a model, taken at least every eighth of their age; what is served is at least that old."""

    def __init__(self, model: SmallDLRM, age_s: float) -> None:
        self._age_s = age_s
        self._live = {name: one.detach() for name, one in model.named_parameters()}
        self._served = copy.deepcopy(model)
        self._shown = {name: one.detach() for name, one in self._served.named_parameters()}
        self._kept: deque[tuple[float, dict[str, torch.Tensor]]] = deque()
        self._last_s = -np.inf

    def keep(self, now_s: float) -> None:
        if now_s >= self._last_s + self._age_s / 8:
            self._last_s = now_s
            self._kept.append((now_s, {name: one.clone() for name, one in self._live.items()}))

    def at(self, now_s: float) -> SmallDLRM:
        shown = None
        while self._kept and self._kept[0][0] <= now_s - self._age_s:
            shown = self._kept.popleft()[1]
        for name, one in (shown or {}).items():
            self._shown[name].copy_(one)
        return self._served


class AgedLoads:
    """The same of a store that a manager saves, served by a loader that is held at an older version.

    `step` follows each step of the training.
    """

    def __init__(self, folder: Path, online: Online, age_s: float) -> None:
        self._age_s = age_s
        self._manager = CheckpointManager(
            str(folder), model=online.model, optimizer=online.optimizers, every_steps=1 << 40,
            tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
        )  # fmt: skip
        self._manager.restore()
        self._manager.save()
        self._manager.wait_until_finished()
        self._loader = Loader(str(folder), publish="apply", follow=False)
        self._served = bound(self._loader, online.model)
        self._kept: deque[tuple[float, int]] = deque()
        self._last_s = -np.inf
        self.saves = 0

    def step(self) -> None:
        self._manager.step()

    def keep(self, now_s: float) -> None:
        if now_s >= self._last_s + self._age_s / 8:
            self._last_s = now_s
            self._manager.save()
            self._manager.wait_until_finished()
            self._kept.append((now_s, self._manager.store.latest_version()))
            self.saves += 1

    def at(self, now_s: float) -> SmallDLRM:
        shown = None
        while self._kept and self._kept[0][0] <= now_s - self._age_s:
            shown = self._kept.popleft()[1]
        if shown is not None:
            self._loader.pin(shown)
            self._loader.apply()
        return self._served

    def close(self) -> None:
        self._loader.close()
        self._manager.close()


def measure_staleness(report: harness.Report, folder: Path, samples: int, seeds: int) -> None:
    """AUC and log loss of predictions by snapshots of several ages, in the order of time."""
    for name in ("generated", "MovieLens"):
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in range(seeds):
            log = (
                generated(samples, round(AGES["0.5 s"] * SAMPLES_PER_S), seed, (20_000, 10_000, 5_000), 16, 0.5)
                if name == "generated"
                else movielens(16, seed)
            )
            if log is None:
                report.note("      MovieLens is not there")
                break
            ages = AGES if name == "generated" else {**AGES, **DAYS}
            for age, values in _by_age(report, folder / f"{name}{seed}", log, ages).items():
                found.setdefault(age, []).append(values)
        if not found:
            continue
        fresh = np.array(found["at once"])
        rows = []
        for age, one in found.items():
            values = np.array(one)
            lost = 100 * (fresh - values)
            rows.append(
                [
                    age, f"{values[:, 0].mean():.4f}",
                    f"{-lost[:, 0].mean():+.2f} ({-lost[:, 0].max():+.2f} to {-lost[:, 0].min():+.2f})",
                    f"{values[:, 1].mean():.4f}",
                    f"{(100 * (values[:, 1] / fresh[:, 1] - 1)).mean():+.2f}",
                ]
            )  # fmt: skip
        columns = ["age", "AUC", "AUC against at once, points", "logloss", "logloss worse, %"]
        report.table(f"what freshness is worth, {name}", columns, rows)


def _by_age(
    report: harness.Report, folder: Path, log: Log, ages: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return AUC and log loss of all predictions by the age of what predicted."""
    online = Online(log)
    size = log.config.batch_size
    # Saves begin one age before the first prediction, so that each setting has what it should serve there.
    start_s = log.times_s[log.warm_up * size]
    aged: dict[str, Aged] = {}
    loads: AgedLoads | None = None
    scores: dict[str, list[npt.NDArray[np.float32]]] = {}
    labels: list[npt.NDArray[np.float32]] = []
    for number, batch in online.steps():
        # What is trained is all before this batch: its time is that of the last sample of the one before.
        trained_s = log.times_s[max(number * size - 1, 0)]
        now_s = log.times_s[number * size]
        if loads is not None and number:
            loads.step()
        for age, seconds in ages.items():
            if age not in aged and trained_s >= start_s - 1.25 * seconds:
                aged[age] = AgedCopies(online.model, seconds)
                if age == LOADED and log.name == "generated":
                    loads = aged[f"{age}, loaded"] = AgedLoads(folder, online, seconds)
        for one in aged.values():
            one.keep(trained_s)
        if number == log.warm_up:
            aged["never"] = AgedCopies(online.model, np.inf)
        if number >= log.warm_up:
            labels.append(batch.labels.numpy())
            scores.setdefault("at once", []).append(predicted(online.model, batch))
            for age, one in aged.items():
                scores.setdefault(age, []).append(predicted(one.at(now_s), batch))
    report.note(
        f"      {log.name}: {len(labels) * size:,} predictions over {(log.times_s[-1] - start_s) / 3600:.1f} h, "
        f"{loads.saves if loads else 0} saves by a manager"
    )
    if loads is not None:
        loads.close()
    clicked = np.concatenate(labels)
    order = ["at once", *(one for age in ages for one in (age, f"{age}, loaded") if one in scores), "never"]
    return {age: _quality(clicked, scores[age]) for age in order}


def _quality(clicked: npt.NDArray[np.float32], scores: Sequence[Any]) -> tuple[float, float]:
    together = np.concatenate(scores)
    return metrics.auc(clicked, together), metrics.logloss(clicked, together)


if __name__ == "__main__":
    main()
