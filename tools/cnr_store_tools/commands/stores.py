"""Make stores and look at them: init, log, show, version."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from cnr_store import Store
from cnr_store_tools import documents, render
from cnr_store_tools.options import (
    Branch,
    Channel,
    Debug,
    Json,
    Step,
    StorageOptions,
    Tag,
    Url,
    Version,
    open_snapshot,
    open_store,
    place_options,
)
from cnr_store_tools.output import emit


def init(
    url: Url,
    profile: Annotated[
        Literal["compact", "portable"],
        typer.Option("--profile", help="compact: smallest. portable: core Zarr codecs only."),
    ] = "compact",
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """Create an empty store."""
    with Store.create(url, profile=profile, **place_options(storage_option)) as store:
        document = {
            "url": store.url, "store_uuid": store.uuid, "profile": profile,
            "message": f"created {store.url} (profile {profile}, uuid {store.uuid})",
        }  # fmt: skip
    emit(document, render.message, as_json=json)


def log(
    url: Url,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many records.")] = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """List the commit records, newest first."""
    with open_store(url, storage_option, branch) as store:
        document = documents.log_document(store, limit)
    emit(document, render.log, as_json=json)


def show(
    url: Url,
    version: Version = None,
    step: Step = None,
    tag: Tag = None,
    channel: Channel = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """Show a version: its tables, its chain, and how many bytes are rows, codes, slots, ..."""
    with open_store(url, storage_option, branch) as store:
        document = documents.show_document(store, open_snapshot(store, version, step, tag, channel))
    emit(document, render.show, as_json=json)


def version(
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """Print the versions of the program and of the packages it works with."""
    import platform
    from importlib import metadata

    packages: dict[str, str | None] = {}
    for name in ("cnr-store", "numpy", "numba", "pcodec", "zarr", "fsspec", "pyarrow", "torch"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    text = f"cnr-store {packages['cnr-store']} (Python {platform.python_version()})"
    others = ", ".join(f"{name} {found}" for name, found in packages.items() if found and name != "cnr-store")
    document = {"version": packages["cnr-store"], "python": platform.python_version(), "packages": packages}
    emit({**document, "message": f"{text}; {others}"}, render.message, as_json=json)
