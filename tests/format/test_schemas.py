"""The published JSON Schemas are those of the types that parse the documents, and real documents meet them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cnr_store import Store
from format_spec import generate_schemas, vectors
from tests.support.ranks import ThreadRank, on_ranks
from tests.write.many_ranks import one_table, open_store, row_wise, save, started, touch

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"
PATTERNS = {
    "identity": "*/store/cnr.json",
    "commit_record": "*/store/commits/*.json",
    "overflow": "*/store/state/*.json",
    "segment": "*/store/data/*/_segment.json.zst",
    "hint": "*/store/hint/latest.json",
}

FIELDS = {
    "identity": "major",
    "commit_record": "v",
    "overflow": "v",
    "segment": "l0",
    "receipt": "txn",
    "hint": "version",
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Documents of each schema: those of the golden stores, and receipts of two ranks, since one writer puts none."""
    folder = tmp_path_factory.mktemp("schemas") / "store"
    Store.create(str(folder), fsync=False, threads=1).close()
    models, placements = one_table(), row_wise(2)
    started(folder, placements, models)
    change = touch(models, 1)

    def work(rank: ThreadRank) -> None:
        mine = placements[rank.rank]
        with open_store(folder) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            save(writer, mine, models, change, 1)

    on_ranks(2, work)
    paths = {name: sorted(GOLDEN.glob(pattern)) for name, pattern in PATTERNS.items()}
    paths["receipt"] = sorted(folder.glob("data/*/*.receipt.json.zst"))
    return {
        name: [json.loads(vectors.text_of(path.name, path.read_bytes())) for path in of_schema]
        for name, of_schema in paths.items()
    }


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((generate_schemas.FOLDER / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", sorted(generate_schemas.DOCUMENTS))
def test_the_published_schema_is_that_of_the_type(name: str) -> None:
    assert (generate_schemas.FOLDER / f"{name}.json").read_text() == generate_schemas.text(name)


@pytest.mark.parametrize("name", sorted(generate_schemas.DOCUMENTS))
def test_patterns_of_schemas_are_without_look_around(name: str) -> None:
    assert not re.findall(r'"pattern": ".*\(\?.*"', generate_schemas.text(name))


def test_there_is_no_other_schema() -> None:
    assert {path.stem for path in generate_schemas.FOLDER.glob("*.json")} == set(generate_schemas.DOCUMENTS)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_documents_meet_their_schema(name: str, documents: dict[str, list[Any]]) -> None:
    validator = jsonschema.Draft202012Validator(load(name))
    validator.check_schema(load(name))

    assert documents[name]
    for document in documents[name]:
        validator.validate(document)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_document_without_a_field_or_of_another_type_does_not(name: str, documents: dict[str, list[Any]]) -> None:
    validator = jsonschema.Draft202012Validator(load(name))
    document = documents[name][0]
    field = FIELDS[name]

    assert validator.is_valid(document)
    assert not validator.is_valid({key: value for key, value in document.items() if key != field})
    assert not validator.is_valid({**document, field: [None]})


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_field_of_a_newer_minor_version_is_allowed(name: str, documents: dict[str, list[Any]]) -> None:
    document = documents[name][0]

    jsonschema.Draft202012Validator(load(name)).validate({**document, "from_the_future": {"x": 1}})
