"""The examples of docs/sinks.md run unchanged."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, TableOptions
from tests.support.servers import RedisServer

DOCS = Path(__file__).parents[2] / "docs" / "sinks.md"
DEVICE, FUSED, REDIS = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(5).normal(size=(100, 8)).astype(np.float32)
    with (
        Store.create(str(tmp_path / "run-7"), fsync=False) as store,
        store.writer() as writer,
        writer.begin(0) as txn,
    ):
        for table in ("user", "item"):
            txn.write_table(table, values, options=TableOptions(bits=8))
    monkeypatch.chdir(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_fused_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    Path("example.py").write_text(FUSED)
    runpy.run_path("example.py")
    assert capsys.readouterr().out == "2 torch.Size([2, 8])\n"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_tables_on_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    Path("example.py").write_text(DEVICE)
    runpy.run_path("example.py")
    assert capsys.readouterr().out == "2 torch.float16 (2, 8)\n"


@pytest.mark.servers
def test_redis(redis_server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = "redis://127.0.0.1:6379/0"
    assert url in REDIS
    Path("example.py").write_text(REDIS.replace(url, redis_server.url))
    runpy.run_path("example.py")
    assert capsys.readouterr().out == "2 (2, 8) [False]\n"
