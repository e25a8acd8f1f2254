"""Move names and the head: tag, untag, channel, rollback."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_store import BadInput
from cnr_store_tools import render
from cnr_store_tools.options import Branch, Debug, Json, StorageOptions, Url, Version, open_store
from cnr_store_tools.output import emit

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tag.")]


def tag(
    url: Url,
    name: Name,
    version: Version = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """Name a version for ever; a tag does not move."""
    with open_store(url, storage_option, branch) as store:
        committed = store.tag(name, version)
        target = store.tags()[name]
        document = {
            "url": store.url, "tag": name, "target": target, "version": committed,
            "message": f"tag {name} names version {target} (record {committed})",
        }  # fmt: skip
    emit(document, render.message, as_json=json)


def untag(
    url: Url,
    name: Name,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """Remove a tag; the version that it named stays as long as others do."""
    with open_store(url, storage_option, branch) as store:
        committed = store.untag(name)
        document = {
            "url": store.url, "tag": name, "version": committed,
            "message": f"removed tag {name} (record {committed})",
        }  # fmt: skip
    emit(document, render.message, as_json=json)


def channel(
    url: Url,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    version: Version = None,
    drop: Annotated[bool, typer.Option("--drop", help="Remove the channel.")] = False,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """Point a name that moves at a version, for those who read by it; the version stays while it points there."""
    if drop and version is not None:
        raise BadInput("give --version or --drop, not both")
    with open_store(url, storage_option, branch) as store:
        committed = store.drop_channel(name) if drop else store.set_channel(name, version)
        target = store.record(committed).target
        done = f"removed channel {name}" if drop else f"channel {name} points to version {target}"
        document = {
            "url": store.url, "channel": name, "target": target, "version": committed,
            "message": f"{done} (record {committed})",
        }  # fmt: skip
    emit(document, render.message, as_json=json)


def rollback(
    url: Url,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", min=0, help="The version whose state becomes the head's.")
    ],
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """Make an older version's state the newest; nothing is deleted."""
    with open_store(url, storage_option, branch) as store:
        committed = store.rollback(version)
        step = store.record(committed).step
        document = {
            "url": store.url, "target": version, "version": committed, "step": step,
            "message": f"version {committed} has the state of version {version} (step {step})",
        }  # fmt: skip
    emit(document, render.message, as_json=json)
