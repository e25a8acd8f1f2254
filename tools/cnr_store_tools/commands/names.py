"""Commands for names of versions and logs: tags, channels, rollback, branches, cursors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from cnr_store import BadInput, Store, read_status
from cnr_store_tools.options import (
    Branch,
    Json,
    Step,
    StorageOptions,
    Tag,
    Url,
    Version,
    named_version,
    open_store,
    optional_duration,
)
from cnr_store_tools.output import Document, emit, emit_message, table, to_document
from cnr_store_tools.render import place_text, until_text
from cnr_store_tools.text import natural

TagName = Annotated[str, typer.Argument(metavar="NAME", help="The tag.")]
BranchName = Annotated[str, typer.Argument(metavar="NAME", help="The branch.")]


def tag(
    url: Url,
    name: TagName,
    version: Version = None,
    step: Step = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Give a version a permanent name."""
    with open_store(url, storage_option, branch) as store:
        committed = store.tag(name, named_version(store, version, step))
        target = store.tags()[name]
    document = {"url": store.url, "tag": name, "target": target, "version": committed}
    emit_message(f"tag {name} names version {target} (record {committed})", document, as_json=json)


def list_tags(url: Url, branch: Branch = None, storage_option: StorageOptions = None, json: Json = False) -> None:
    """List the tags: the version, step and time of each."""
    with open_store(url, storage_option, branch) as store:
        _emit_names(store, "tag", store.tags(), as_json=json)


def list_channels(url: Url, branch: Branch = None, storage_option: StorageOptions = None, json: Json = False) -> None:
    """List the channels: the version, step and time of each."""
    with open_store(url, storage_option, branch) as store:
        _emit_names(store, "channel", store.channels(), as_json=json)


def _emit_names(store: Store, kind: str, names: Mapping[str, int], *, as_json: bool) -> None:
    found = []
    for name, version in sorted(names.items(), key=lambda item: natural(item[0])):
        record = store.record(version)
        found.append({kind: name, "version": version, "step": record.step, "time_ms": record.ts_ms})
    document: Document = {"url": store.url, "branch": store.branch, f"{kind}s": found}
    drawn = table(place_text(document), found, (kind, "version", "step", "time_ms"))
    emit(document, (drawn,) if found else (f"{place_text(document)} has no {kind}s",), as_json=as_json)


def untag(
    url: Url, name: TagName, branch: Branch = None, storage_option: StorageOptions = None, json: Json = False
) -> None:
    """Remove a tag. The version is then kept only by the retention policy."""
    with open_store(url, storage_option, branch) as store:
        committed = store.untag(name)
    document = {"url": store.url, "tag": name, "version": committed}
    emit_message(f"removed tag {name} (record {committed})", document, as_json=json)


def channel(
    url: Url,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The channel.")],
    version: Version = None,
    step: Step = None,
    drop: Annotated[bool, typer.Option("--drop", help="Remove the channel.")] = False,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Set a channel, a name that may change its version. Readers can follow it, and its version does not expire."""
    if drop and (version is not None or step is not None):
        raise BadInput("give a version or --drop, not both")
    with open_store(url, storage_option, branch) as store:
        committed = store.drop_channel(name) if drop else store.set_channel(name, named_version(store, version, step))
        target = store.record(committed).target
    done = f"removed channel {name}" if drop else f"channel {name} points to version {target}"
    document = {"url": store.url, "channel": name, "target": target, "version": committed}
    emit_message(f"{done} (record {committed})", document, as_json=json)


def rollback(
    url: Url,
    version: Annotated[
        int | None, typer.Argument(metavar="VERSION", min=0, help="The version whose state becomes the head's.")
    ] = None,
    step: Step = None,
    tag: Tag = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Make an older version's state the newest. Deletes nothing."""
    with open_store(url, storage_option, branch) as store:
        target = named_version(store, version, step, tag)
        if target is None:
            raise BadInput("give the version to go back to, or --step or --tag")
        if store.relay is None and not store.record(target).chain:
            raise BadInput(f"nothing was saved yet at version {target}: readers would get no table", version=target)
        committed = store.rollback(target)
        found = store.record(committed).step
    document = {"url": store.url, "target": target, "version": committed, "step": found}
    emit_message(f"version {committed} has the state of version {target} (step {found})", document, as_json=json)


def fork(
    url: Url,
    name: BranchName,
    version: Version = None,
    step: Step = None,
    tag: Tag = None,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires", metavar="TIME", help="Time after which `cnr gc` may close it: 30d, 12h; default never."
        ),
    ] = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Create a branch with its own log from a version. Copies nothing."""
    ttl_s = optional_duration(expires, "--expires")
    with open_store(url, storage_option) as store:
        store.fork(name, named_version(store, version, step, tag), ttl_s=ttl_s).close()
        pin = store.branches()[name]
    until = "" if pin.expires_ms is None else f", until {until_text(pin.expires_ms, '')}"
    document = {"url": store.url, "branch": name, "version": pin.version, "expires_ms": pin.expires_ms}
    emit_message(f"branch {name} begins with version {pin.version}{until}", document, as_json=json)


def list_branches(url: Url, storage_option: StorageOptions = None, json: Json = False) -> None:
    """List the branches: fork point, newest version, and expiry."""
    with open_store(url, storage_option) as store:
        heads = {head.branch: {"version": head.version, "step": head.step} for head in read_status(store).heads}
        found: list[Document] = [
            {"branch": name, "version": pin.version, "expires_ms": pin.expires_ms, "head": heads.get(name)}
            for name, pin in sorted(store.branches().items(), key=lambda item: natural(item[0]))
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
    """Drop a branch. Its writers are fenced, its versions cannot be read, and `cnr gc` deletes what only they need."""
    with open_store(url, storage_option) as store:
        store.drop_branch(name)
    emit_message(f"dropped branch {name}", {"url": store.url, "branch": name}, as_json=json)


def cursors(url: Url, storage_option: StorageOptions = None, json: Json = False) -> None:
    """List the registered consumers. Prints the version that each has read, when it was updated, and its expiry."""
    with open_store(url, storage_option) as store:
        found = _cursors(store)
    rows = [item | {"until": until_text(item["expires_ms"], "dropped")} for item in found]
    drawn = table(
        store.url,
        rows,
        ("cursor", "branch", "version", "head", "moved_ms", "until", "holder"),
        ("holder", "moved_ms", "branch"),
    )
    parts = (drawn,) if found else (f"{store.url} has no cursors",)
    emit({"url": store.url, "cursors": found}, parts, as_json=json)


def _cursors(store: Store) -> list[Document]:
    """Return the cursors by name; ``branch`` is null for the store's own log, a uuid if the branch was dropped."""
    heads = {head.branch: head.version for head in read_status(store).heads}
    names = {key: pin.name for key, pin in store.head().record.pins.items()}
    found = []
    for name, cursor in sorted(store.cursors().items(), key=lambda item: natural(item[0])):
        branch = names.get(cursor.branch, cursor.branch) or None
        found.append(to_document(cursor) | {"cursor": name, "branch": branch, "head": heads.get(branch)})
    return found


def drop_cursor(
    url: Url,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The consumer.")],
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Remove a consumer. The next `cnr gc` may delete the versions that it kept; it must then start from a snapshot."""
    with open_store(url, storage_option) as store:
        store.drop_cursor(name)
    emit_message(f"removed cursor {name}", {"url": store.url, "cursor": name}, as_json=json)
