"""docs/install.md: what it says about indexes, Pythons and extras agrees with what the package declares."""

from __future__ import annotations

import re
import tomllib

from tests.support.pages import DOCS

PAGE = (DOCS / "install.md").read_text()
DECLARED = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def test_every_tool_takes_torch_from_the_index_for_cpus() -> None:
    (project,) = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    uv = tomllib.loads(project)["tool"]["uv"]

    assert uv["index"] == [{"name": uv["sources"]["torch"]["index"], "url": CPU_INDEX, "explicit": True}]
    assert re.findall(r"https?://[^\s\"`)]+", PAGE) == [CPU_INDEX] * 3  # pip, uv, poetry


def test_the_page_names_every_extra_for_users() -> None:
    rows = re.search(r"^\| extra \|.*?\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert rows is not None

    named = set(re.findall(r"`(\w+)`(?=[^|]*\| )", rows[0]))

    assert named == set(DECLARED["optional-dependencies"]) - {"check", "test", "bench", "docs", "dev"}
