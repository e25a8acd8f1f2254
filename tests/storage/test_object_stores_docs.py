"""The example of docs/object_stores.md runs unchanged, against a real S3 server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pages import DOCS, python_blocks, run_example
from tests.support.servers import S3Server


@pytest.mark.servers
def test_the_example_saves_and_loads_from_a_bucket(
    seaweed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = python_blocks(DOCS / "object_stores.md")
    bucket = f"docs-{uuid.uuid4().hex[:12]}"
    seaweed.client().create_bucket(Bucket=bucket)
    model = torch.nn.EmbeddingBag(50, 4, sparse=True)
    shown = 's3 = {"key": "...", "secret": "...", "endpoint_url": "http://127.0.0.1:8333"}'
    assert shown in example
    given: dict[str, Any] = {
        "seaweed": seaweed, "model": model, "optimizer": torch.optim.Adagrad(model.parameters(), lr=0.1),
    }  # fmt: skip

    run_example(example.replace(shown, "s3 = seaweed.storage_options").replace("s3://bucket", f"s3://{bucket}"), given)

    assert capsys.readouterr().out == "[0]\n"
