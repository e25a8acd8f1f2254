"""Names for versions and logs: tag, untag, channel, rollback, fork, branches, drop-branch, cursors, drop-cursor."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_store import BadInput, Store, read_status
from cnr_store_tools.options import Branch, Json, StorageOptions, Url, Version, open_store, optional_duration
from cnr_store_tools.output import Document, emit, emit_message, table, to_document
from cnr_store_tools.render import until_text

TagName = Annotated[str, typer.Argument(metavar="NAME", help="The tag.")]
BranchName = Annotated[str, typer.Argument(metavar="NAME", help="The branch.")]


def tag(
    url: Url,
    name: TagName,
    version: Version = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Name a version for ever; a tag does not move."""
    with open_store(url, storage_option, branch) as store:
        committed = store.tag(name, version)
        target = store.tags()[name]
    document = {"url": store.url, "tag": name, "target": target, "version": committed}
    emit_message(f"tag {name} names version {target} (record {committed})", document, as_json=json)


def untag(
    url: Url, name: TagName, branch: Branch = None, storage_option: StorageOptions = None, json: Json = False
) -> None:
    """Remove a tag; the version that it named stays as long as others do."""
    with open_store(url, storage_option, branch) as store:
        committed = store.untag(name)
    document = {"url": store.url, "tag": name, "version": committed}
    emit_message(f"removed tag {name} (record {committed})", document, as_json=json)


def channel(
    url: Url,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    version: Version = None,
    drop: Annotated[bool, typer.Option("--drop", help="Remove the channel.")] = False,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Point a name that moves at a version, for those who read by it; the version stays while it points there."""
    if drop and version is not None:
        raise BadInput("give --version or --drop, not both")
    with open_store(url, storage_option, branch) as store:
        committed = store.drop_channel(name) if drop else store.set_channel(name, version)
        target = store.record(committed).target
    done = f"removed channel {name}" if drop else f"channel {name} points to version {target}"
    document = {"url": store.url, "channel": name, "target": target, "version": committed}
    emit_message(f"{done} (record {committed})", document, as_json=json)


def rollback(
    url: Url,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", min=0, help="The version whose state becomes the head's.")
    ],
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Make an older version's state the newest; nothing is deleted."""
    with open_store(url, storage_option, branch) as store:
        committed = store.rollback(version)
        step = store.record(committed).step
    document = {"url": store.url, "target": version, "version": committed, "step": step}
    emit_message(f"version {committed} has the state of version {version} (step {step})", document, as_json=json)


def fork(
    url: Url,
    name: BranchName,
    version: Version = None,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires", metavar="TIME", help="When `cnr gc` may end it, from now on: 30d, 12h. Never if not given."
        ),
    ] = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Branch off a version into a log of its own; nothing is copied."""
    expires_s = optional_duration(expires, "--expires")
    with open_store(url, storage_option) as store, store.fork(name, version, expires_s=expires_s):
        pin = store.branches()[name]
    until = "" if pin.expires_ms is None else f", until {until_text(pin.expires_ms, '')}"
    document = {"url": store.url, "branch": name, "version": pin.version, "expires_ms": pin.expires_ms}
    emit_message(f"branch {name} begins with version {pin.version}{until}", document, as_json=json)


def list_branches(url: Url, storage_option: StorageOptions = None, json: Json = False) -> None:
    """List the branches: where each begins, how far it has come, and when it ends."""
    with open_store(url, storage_option) as store:
        heads = {head.branch: {"version": head.version, "step": head.step} for head in read_status(store).heads}
        found: list[Document] = [
            {"branch": name, "version": pin.version, "expires_ms": pin.expires_ms, "head": heads.get(name)}
            for name, pin in sorted(store.branches().items())
        ]
    rows = [
        {
            "branch": item["branch"], "from version": item["version"],
            **{f"head {key}": value for key, value in (item["head"] or {"version": "over"}).items()},
            "ends": until_text(item["expires_ms"], "never"),
        }
        for item in found
    ]  # fmt: skip
    drawn = table(store.url, rows, ("branch", "from version", "head version", "head step", "ends"))
    parts = (drawn,) if found else (f"{store.url} has no branches",)
    emit({"url": store.url, "branches": found}, parts, as_json=json)


def drop_branch(url: Url, name: BranchName, storage_option: StorageOptions = None, json: Json = False) -> None:
    """End a branch: its writers are stopped, its versions are gone, and `cnr gc` deletes what only they needed."""
    with open_store(url, storage_option) as store:
        store.drop_branch(name)
    emit_message(f"dropped branch {name}", {"url": store.url, "branch": name}, as_json=json)


def cursors(url: Url, storage_option: StorageOptions = None, json: Json = False) -> None:
    """List the consumers that keep versions: where each stands, since when, and until when it counts."""
    with open_store(url, storage_option) as store:
        found = _cursors(store)
    rows = [item | {"until": until_text(item["expires_ms"], "dropped")} for item in found]
    drawn = table(store.url, rows, ("cursor", "branch", "version", "head", "moved_ms", "until", "holder"))
    parts = (drawn,) if found else (f"{store.url} has no cursors",)
    emit({"url": store.url, "cursors": found}, parts, as_json=json)


def _cursors(store: Store) -> list[Document]:
    """The registered cursors by name; ``branch`` is null on the store's own log, a uuid if the branch ended."""
    heads = {head.branch: head.version for head in read_status(store).heads}
    names = {key: pin.name for key, pin in store.head().record.pins.items()}
    found = []
    for name, cursor in sorted(store.cursors().items()):
        branch = names.get(cursor.branch, cursor.branch) or None
        found.append(to_document(cursor) | {"cursor": name, "branch": branch, "head": heads.get(branch)})
    return found


def drop_cursor(
    url: Url,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The consumer.")],
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Forget a consumer; what it kept goes with the next `cnr gc`, and the consumer starts over if it comes back."""
    with open_store(url, storage_option) as store:
        store.drop_cursor(name)
    emit_message(f"forgot cursor {name}", {"url": store.url, "cursor": name}, as_json=json)
