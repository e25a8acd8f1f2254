"""Experiments beside the run: fork, branches, drop-branch."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_store_tools import documents, render
from cnr_store_tools.options import Debug, Json, StorageOptions, Url, Version, open_store, parse_duration
from cnr_store_tools.output import emit

Name = Annotated[str, typer.Argument(metavar="NAME", help="The branch.")]


def fork(
    url: Url,
    name: Name,
    version: Version = None,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires", metavar="TIME", help="When `cnr gc` may end it, from now on: 30d, 12h. Never if not given."
        ),
    ] = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """Branch off a version into a log of its own; nothing is copied."""
    expires_s = None if expires is None else parse_duration(expires, "--expires")
    with open_store(url, storage_option) as store, store.fork(name, version, expires_s=expires_s) as branch:
        document = documents.fork_document(store, branch)
    emit(document, render.message, as_json=json)


def list_(
    url: Url,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """List the branches: where each begins, how far it has come, and when it ends."""
    with open_store(url, storage_option) as store:
        document = documents.branches_document(store)
    emit(document, render.branches, as_json=json)


def drop(
    url: Url,
    name: Name,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """End a branch: its writers are stopped, its versions are gone, and `cnr gc` deletes what only they needed."""
    with open_store(url, storage_option) as store:
        store.drop_branch(name)
        document = {"url": store.url, "branch": name, "message": f"dropped branch {name}"}
    emit(document, render.message, as_json=json)
