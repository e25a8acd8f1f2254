"""Fixtures of all tests, and the device on which they make their tensors."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.support.servers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "where the models and tensors of the tests are made: `--device cuda` for tests/gpu and tests/training"
    parser.addoption("--device", default="cpu", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        import torch

        torch.set_default_device(config.getoption("--device"))
