"""What consumers hold: cursors, drop-cursor."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_store_tools import documents, render
from cnr_store_tools.options import Debug, Json, StorageOptions, Url, open_store
from cnr_store_tools.output import emit


def cursors(
    url: Url,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """List the consumers that keep versions: where each stands, since when, and until when it counts."""
    with open_store(url, storage_option) as store:
        document = documents.cursors_document(store)
    emit(document, render.cursors, as_json=json)


def drop_cursor(
    url: Url,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The consumer.")],
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """Forget a consumer; what it kept goes with the next `cnr gc`, and the consumer starts over if it comes back."""
    with open_store(url, storage_option) as store:
        store.drop_cursor(name)
        document = {"url": store.url, "cursor": name, "message": f"forgot cursor {name}"}
    emit(document, render.message, as_json=json)
