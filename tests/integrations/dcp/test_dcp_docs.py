"""The examples of docs/dcp.md run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "dcp.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


PRINTED = ("200\n", "{'version': 2}\n{'version': 3}\n")


@pytest.mark.parametrize(("example", "printed"), [*zip(EXAMPLES, PRINTED, strict=True)])
def test_the_examples(
    example: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("example.py").write_text(example)
    runpy.run_path("example.py")
    assert capsys.readouterr().out == printed
