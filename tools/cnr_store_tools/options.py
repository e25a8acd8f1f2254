"""Arguments that several commands share, and the parsing of their values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import typer

from cnr_store import BadInput, KeepBest, Store

Url = Annotated[str, typer.Argument(metavar="URL", help="The store: a local path, s3://..., gs://..., abfs://...")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Passed to the storage driver, never printed; may be repeated. "
        "A dotted key (client_kwargs.endpoint_url) sets a nested option. unsafe_single_writer=true accepts a backend "
        "that cannot create objects exclusively; then only one process may write at a time.",
    ),
]
TargetOptions = Annotated[
    list[str] | None,
    typer.Option("--target-option", metavar="KEY=VALUE", help="Like --storage-option, for the target."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")]
Version = Annotated[int | None, typer.Option("--version", help="The version; default the newest.", min=0)]
Step = Annotated[int | None, typer.Option("--step", help="The newest version of this training step.")]
Tag = Annotated[str | None, typer.Option("--tag", help="The version that a tag names.")]
Channel = Annotated[str | None, typer.Option("--channel", help="The version that a channel names now.")]
Branch = Annotated[str | None, typer.Option("--branch", help="Use the log of this branch instead of the store's own.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]

Bits = Literal[2, 3, 4, 8]
_BITS: dict[int, Bits] = {2: 2, 3: 3, 4: 4, 8: 8}
_WORDS = {"true": True, "false": False, "null": None}
MAX_PORT = 65_535
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)", re.ASCII)


def parse_storage_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the options for the driver; messages contain keys and positions, never values.

    A value is text, except true, false, null, and JSON objects and lists.

    >>> parse_storage_options(["anon=true", "client_kwargs.region_name=eu"])
    {'anon': True, 'client_kwargs': {'region_name': 'eu'}}

    Raises
    ------
    BadInput
    """
    options: dict[str, Any] = {}
    for position, text in enumerate(texts or (), start=1):
        key, mark, value = text.partition("=")
        if not mark or not all(key.split(".")):
            raise BadInput(f"storage option {position} must be KEY=VALUE")
        *outer, last = key.split(".")
        place = options
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise BadInput(f"storage option {position} puts a key below another option's value")
        if last in place:
            raise BadInput(f"storage option {position} was given before")
        place[last] = _value(value, position)
    return options


def _value(text: str, position: int) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise BadInput(f"the value of storage option {position} starts like JSON, but is not valid JSON") from None


def check_bits(bits: int) -> Bits:
    """Return a checked value of ``--bits``.

    Raises
    ------
    BadInput
    """
    if bits not in _BITS:
        raise BadInput(f"--bits must be 2, 3, 4 or 8, found {bits}", found=bits)
    return _BITS[bits]


def parse_duration(text: str, option: str) -> float:
    """Return a time in seconds from a text with its unit; only ``0`` needs no unit.

    >>> parse_duration("90s", "--grace"), parse_duration("1.5h", "--grace"), parse_duration("7d", "--grace")
    (90.0, 5400.0, 604800.0)

    Raises
    ------
    BadInput
    """
    return _amount(text, option, _SECONDS, "a time like 90s, 30m, 12h, 7d or 2w")


def parse_best(text: str) -> KeepBest:
    """Return which saves `--keep-best` keeps; a metric's name may have colons.

    >>> parse_best("auc:3"), parse_best("val:loss:2:smallest")
    (KeepBest(metric='auc', count=3, best='largest'), KeepBest(metric='val:loss', count=2, best='smallest'))

    Raises
    ------
    BadInput
    """
    name, _, last = text.rpartition(":")
    best: Literal["largest", "smallest"] = "smallest" if last == "smallest" else "largest"
    metric, _, count = (name if last in ("largest", "smallest") else text).rpartition(":")
    if not metric or not count.isascii() or not count.isdigit():
        raise BadInput(f"--keep-best takes METRIC:N or METRIC:N:smallest, found {text!r}", found=text)
    return KeepBest(metric, int(count), best)


def parse_size(text: str, option: str) -> int:
    """Return a size in bytes from a text with its unit; only ``0`` needs no unit.

    >>> parse_size("64MiB", "--bandwidth")
    67108864

    Raises
    ------
    BadInput
    """
    return int(_amount(text, option, _BYTES, "a size like 500KiB, 64MiB or 2GiB"))


def optional_duration(text: str | None, option: str) -> float | None:
    """Return a time in seconds; None for None."""
    return None if text is None else parse_duration(text, option)


def optional_size(text: str | None, option: str) -> int | None:
    """Return a size in bytes; None for None."""
    return None if text is None else parse_size(text, option)


def _amount(text: str, option: str, units: Mapping[str, int], wanted: str) -> float:
    if text == "0":
        return 0.0
    match = _AMOUNT.fullmatch(text)
    if match is None or match.group(2) not in units:
        raise BadInput(f"{option} takes {wanted}, found {text!r}", found=text)
    return float(match.group(1)) * units[match.group(2)]


def parse_address(text: str) -> tuple[str, int]:
    """Return a host and a port; an IPv6 address needs brackets.

    >>> parse_address("127.0.0.1:9464"), parse_address("[::1]:0")
    (('127.0.0.1', 9464), ('::1', 0))

    Raises
    ------
    BadInput
    """
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if is_bracketed else host
    is_host = bool(name) and (is_bracketed or ":" not in name)
    if not is_host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise BadInput(f"--listen takes HOST:PORT, e.g. 127.0.0.1:9464, found {text!r}", found=text)
    return name, int(port)


class PlaceOptions(TypedDict):
    """Arguments with which the library opens or creates a store."""

    storage_options: dict[str, Any] | None
    unsafe_single_writer: bool


def place_options(texts: Sequence[str] | None) -> PlaceOptions:
    """Return the options of a store; all except ``unsafe_single_writer`` are for the storage driver.

    >>> place_options(["anon=true", "unsafe_single_writer=true"])
    {'storage_options': {'anon': True}, 'unsafe_single_writer': True}

    Raises
    ------
    BadInput
    """
    options = parse_storage_options(texts)
    is_unsafe = options.pop("unsafe_single_writer", False)
    if not isinstance(is_unsafe, bool):
        raise BadInput("the storage option unsafe_single_writer must be true or false")
    return PlaceOptions(storage_options=options or None, unsafe_single_writer=is_unsafe)


def open_store(
    url: str, storage_options: Sequence[str] | None, branch: str | None = None, threads: int | None = None
) -> Store:
    """Return the opened store, or its branch, of a command."""
    return Store.open(url, branch=branch, threads=threads, **place_options(storage_options))


def named_version(store: Store, version: int | None, step: int | None, tag: str | None = None) -> int | None:
    """Return the version that a command's version, ``--step`` or ``--tag`` names; None for the newest.

    Raises
    ------
    BadInput
        More than one is given.
    """
    if step is None and tag is None:
        return version
    return store.snapshot(version, step=step, tag=tag).version
