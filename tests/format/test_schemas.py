"""The published JSON Schemas are those of the types that parse the documents, and real documents meet them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from format_spec import generate_schemas

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"
PATTERNS = {
    "identity": "*/store/cnr.json",
    "commit_record": "*/store/commits/*.json",
    "overflow": "*/store/state/*.json",
    "segment": "*/store/data/*/_segment.json",
    "receipt": "*/store/data/*/*/_receipt.json",
    "hint": "*/store/hint/latest.json",
}

FIELDS = {
    "identity": "major",
    "commit_record": "v",
    "overflow": "tags",
    "segment": "l0",
    "receipt": "txn",
    "hint": "version",
}


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((generate_schemas.FOLDER / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", sorted(generate_schemas.DOCUMENTS))
def test_the_published_schema_is_that_of_the_type(name: str) -> None:
    assert (generate_schemas.FOLDER / f"{name}.json").read_text() == generate_schemas.text(name)


def test_there_is_no_other_schema() -> None:
    assert {path.stem for path in generate_schemas.FOLDER.glob("*.json")} == set(generate_schemas.DOCUMENTS)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_golden_documents_meet_their_schema(name: str) -> None:
    validator = jsonschema.Draft202012Validator(load(name))
    validator.check_schema(load(name))
    paths = sorted(GOLDEN.glob(PATTERNS[name]))

    assert paths
    for path in paths:
        validator.validate(json.loads(path.read_bytes()))


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_document_without_a_field_or_of_another_type_does_not(name: str) -> None:
    validator = jsonschema.Draft202012Validator(load(name))
    document = json.loads(next(iter(sorted(GOLDEN.glob(PATTERNS[name])))).read_bytes())
    field = FIELDS[name]

    assert validator.is_valid(document)
    assert not validator.is_valid({key: value for key, value in document.items() if key != field})
    assert not validator.is_valid({**document, field: [None]})


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_field_of_a_newer_minor_version_is_allowed(name: str) -> None:
    document = json.loads(next(iter(sorted(GOLDEN.glob(PATTERNS[name])))).read_bytes())

    jsonschema.Draft202012Validator(load(name)).validate({**document, "from_the_future": {"x": 1}})
