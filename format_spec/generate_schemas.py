"""Write the JSON Schemas of every document of the format, from the types that parse them.

python -m format_spec.generate_schemas
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

from cnr_store.format import fields, records

FOLDER = Path(__file__).parent / "schemas"
DOCUMENTS = {
    "identity": records.Identity,
    "commit_record": records.CommitRecord,
    "overflow": records.Overflow,
    "segment": records.SegmentDocument,
    "receipt": records.Receipt,
    "hint": records.Hint,
    "reader_lease": records.ReaderLease,
    "cursor": records.Cursor,
    "relay": records.RelayMarker,
    "relay_trims": records.RelayTrims,
}
"""File name to type; the objects they describe are in sections 3, 7.8 and 7.11 of the specification."""


def schema(name: str) -> dict[str, Any]:
    """Return the schema of one document. Fields that a newer minor version adds are allowed everywhere."""
    generated = _cleaned(msgspec.json.schema(DOCUMENTS[name]))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"cnr-store 1.0 {name}", **generated}


def _cleaned(value: Any) -> Any:
    """Return a schema without what is Python's: descriptions that are indented (not in 3.13), ends of patterns."""
    if isinstance(value, dict):
        return {
            key: inspect.cleandoc(item) if key == "description" and isinstance(item, str) else _cleaned(item)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return value.replace(fields.END, "$")
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


def text(name: str) -> str:
    """Return the file's content."""
    return json.dumps(schema(name), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (FOLDER / f"{name}.json").write_text(text(name))
