"""What a manager is asked for is checked when it is made, not at the first save, hours later."""

from __future__ import annotations

import ast
import pickle
import re
from typing import Any

import pytest
import torch

from cnr_store import BadInput, Store, TableOptions
from cnr_store.training import CheckpointManager, TrackingOptions
from tests.training.runs import Training, grouped


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"options": {"bits": 4}}, "options="),
        ({"options": {"user.weight": {"bits": 4}}}, "options="),
        ({"options": "exact"}, "options="),
        ({"options": TableOptions(mantissa_bits=12)}, "name the encoding"),
        ({"policy": "sometimes"}, "policy"),
        ({"mirror": "disk"}, "mirror"),
        ({"mirror": None}, "mirror"),
        ({"mirror": "mmap", "mirror_folder": "/never/made"}, "mirror_folder"),
        ({"first_baseline": "later"}, "first_baseline"),
        ({"when_busy": True}, "when_busy"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_bypass": "ignore"}, "on_bypass"),
        ({"in_flight": "keep"}, "in_flight"),
        ({"schedule": "cosine"}, "schedule"),
        ({"save_on_sigterm": "yes"}, "save_on_sigterm"),
        ({"every_steps": 0}, "every_steps"),
        ({"every_steps": 1.5}, "every_steps"),
        ({"every_steps": True}, "every_steps"),
        ({"every_seconds": 0}, "every_seconds"),
        ({"every_seconds": "60"}, "every_seconds"),
        ({"bytes_per_s": 0}, "bytes_per_s"),
        ({"bytes_per_s": "1e9"}, "bytes_per_s"),
        ({"threads": 0}, "threads"),
        ({"verify_rows": -1}, "verify_rows"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_at_once(given: dict[str, Any], named: str) -> None:
    training = Training()
    before = len(training.model.user._forward_hooks)

    with pytest.raises(BadInput, match=named):
        CheckpointManager(
            "memory://never-made", model=training.model, optimizer=training.optimizers, **grouped(**given)
        )

    assert len(training.model.user._forward_hooks) == before


@pytest.mark.parametrize("options", [TableOptions(bits=4), TableOptions(scale=0.5)])
def test_options_that_a_tables_dtype_does_not_have_are_refused_at_once(options: TableOptions) -> None:
    training = Training("sgd", dtype=torch.bfloat16)

    with pytest.raises(BadInput, match="table 'item"):
        CheckpointManager("memory://never-made", model=training.model, optimizer=training.optimizers, options=options)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": 1}, "model= takes"),
        ({"optimizer": torch.optim.lr_scheduler.StepLR(Training("sgd").optimizers[0], 1)}, "StepLR is no torch.optim"),
        ({"extras": [Training("sgd").optimizers[0]]}, "extras= takes a dict"),
        ({"extras": {"best": 0.5}}, "extras.'best'. is a float.*give it an object that has"),
    ],
)
def test_an_object_of_another_kind_is_refused_with_what_is_taken(given: dict[str, Any], named: str) -> None:
    """A regression: these were an AttributeError or a TypeError from within."""
    training = Training("sgd")

    with pytest.raises(BadInput, match=named):
        CheckpointManager("memory://never-made", **{"model": training.model, "optimizer": training.optimizers} | given)


def test_a_writer_of_an_unknown_mirror_fences_nobody() -> None:
    store = Store.create("memory://unknown-mirror")
    head = store.latest_version()

    with pytest.raises(BadInput, match="mirror"):
        store.writer(mirror="disk")  # type: ignore[arg-type]

    assert store.latest_version() == head


def test_a_manager_says_what_it_is_and_is_not_pickled() -> None:
    """A regression: pickling it failed with "cannot pickle '_thread.RLock' object"."""
    training = Training("sgd")
    with CheckpointManager("memory://named", model=training.model, optimizer=training.optimizers) as manager:
        assert repr(manager) == "<CheckpointManager memory://named, step 0>"
        with pytest.raises(TypeError, match=r"a CheckpointManager has threads .* send the URL"):
            pickle.dumps(manager)


def test_what_the_warning_of_an_unknown_optimizer_advises_is_taken() -> None:
    """A regression: it advised ``Movement.TOUCHED``, which ``TrackingOptions`` refuses."""
    training = Training()
    with pytest.warns(RuntimeWarning, match="its step is not known here") as warned:
        CheckpointManager("memory://unknown", model=training.model, optimizer=training.optimizers).close()
    advised = re.search(r"TrackingOptions\(assume=(\{'(\w+)': '(\w+)'\})\)", str(warned[0].message))
    assert advised is not None

    tracking = TrackingOptions(assume=ast.literal_eval(advised[1]))

    CheckpointManager("memory://known", model=training.model, optimizer=training.optimizers, tracking=tracking).close()
