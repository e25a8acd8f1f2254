"""Fixtures of all tests, and the device on which they make their tensors."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.launcher import Launcher

# Torch's threads spin while they wait for each other: 360 steps of a small model took 27 s of CPU time on busy cores,
# and take 1 s now. libgomp reads this when torch is imported; the processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The stores of tests are many small files, each of which is synced: in memory that costs nothing. A full run writes
# 1.4 GB. Tests of full disks make their own file system, and those of power loss do not need a disk.
_MEMORY, _ROOM_BYTES = "/dev/shm", 8 << 30


def _has_room() -> bool:
    try:
        found = os.statvfs(_MEMORY)
    except (AttributeError, OSError):
        return False
    return found.f_bavail * found.f_frsize >= _ROOM_BYTES and not found.f_flag & os.ST_NOEXEC


if _has_room():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)

# A shell without job control starts what it runs in the background deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does, and on which kernels are compiled already.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

# What is imported and collected stays until the end: the garbage collector need not look through it, now or later.
gc.disable()

pytest_plugins = ["tests.support.servers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "where tests make models and tensors: `--device cuda`, or another of torch"
    parser.addoption("--device", default="cpu", help=help_text)


_LOADERS = "its data loaders draw from generators of the CPU, which torch refuses on another default device"
_PROCESSES = "it trains in processes of its own, on the CPU whatever the device"
ON_THE_CPU = {
    "test_reader.py": _LOADERS, "test_reader_intervals.py": _LOADERS, "test_reader_shares.py": _LOADERS,
    "test_resume_generators.py": _LOADERS, "test_attach_docs.py": _PROCESSES, "test_recipes_docs.py": _LOADERS,
    "test_ranks.py": _PROCESSES, "test_ranks_killed.py": _PROCESSES, "test_ranks_recover.py": _PROCESSES,
    "test_partial_recovery.py": _PROCESSES, "test_killed.py": _PROCESSES, "test_sharded.py": _PROCESSES,
    "test_kinds.py": _PROCESSES, "test_walk.py": "it counts the files that rows of host memory pass",
    "test_dense_copies.py": "only tensors of host memory are copied later",
    "test_metadata_budget.py": "its budget has no generator of a device",
}  # fmt: skip
"""By file: why its tests do not follow `--device`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") != "cpu":
        for item in items:
            if item.path.name in ON_THE_CPU:
                item.add_marker(
                    pytest.mark.skip(reason=f"not on {config.getoption('--device')}: {ON_THE_CPU[item.path.name]}")
                )


SHARED_STARTS = {
    "tests/training/ranks/": "ranks of TorchRec", "tests/training/torchrec/": "ranks of TorchRec",
    "tests/training/test_partial_recovery.py": "four ranks", "tests/training/test_peers.py": "four ranks",
    "tests/training/test_ranks_killed.py": "four ranks",
}  # fmt: skip
"""Files and folders whose tests start the same processes: one worker runs them, so that these are started once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileAndStart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            found = (name for place, name in SHARED_STARTS.items() if nodeid.startswith(place))
            return next(found, super()._split_scope(nodeid))

    return ByFileAndStart(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        import torch

        torch.set_default_device(config.getoption("--device"))


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Runs programs that train, in forks of a process that has imported and loaded what they need."""
    rooms = (f"cnr_store.{name}" for name in ("changes", "communication", "integrations.dcp", "serving"))
    with closing(Launcher("tests.support.warm_training", "hypothesis", "pytest", *rooms)) as started:
        yield started
