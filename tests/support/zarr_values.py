"""What docs/zarr.md shows, as it stands there: values of a store by zarr-python and numpy alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "zarr.md"


def _shown() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(block, names)  # noqa: S102  a page of this repository
    return names


SHOWN = _shown()
integers_of: Any = SHOWN["integers_of"]
weights_of: Any = SHOWN["weights_of"]
