"""Arguments that several commands share, and how their text becomes values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from cnr_store import BadInput, Snapshot, Store

Url = Annotated[str, typer.Argument(metavar="URL", help="The store: a local path, s3://..., gs://..., abfs://...")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Passed to the storage driver, never printed; repeat it for more. "
        "A dotted key (client_kwargs.endpoint_url) makes nested options.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Version = Annotated[int | None, typer.Option("--version", help="A version; the newest if not given.", min=0)]
Step = Annotated[int | None, typer.Option("--step", help="The newest version of this training step.")]
Tag = Annotated[str | None, typer.Option("--tag", help="The version that a tag names.")]

Bits = Literal[2, 3, 4, 8]
_BITS: dict[int, Bits] = {2: 2, 3: 3, 4: 4, 8: 8}
_WORDS = {"true": True, "false": False, "null": None}


def parse_storage_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the options as the driver wants them; messages name keys and positions, never values.

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
            raise BadInput(f"storage option {position} is not KEY=VALUE")
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
        raise BadInput(f"the value of storage option {position} begins like JSON and is none") from None


def check_bits(bits: int) -> Bits:
    """Return a width that tables can be stored at.

    Raises
    ------
    BadInput
    """
    if bits not in _BITS:
        raise BadInput(f"--bits is 2, 3, 4 or 8, found {bits}", found=bits)
    return _BITS[bits]


def open_store(url: str, storage_options: Sequence[str] | None) -> Store:
    """Open the store that a command works on."""
    return Store.open(url, storage_options=parse_storage_options(storage_options) or None)


def open_snapshot(store: Store, version: int | None, step: int | None, tag: str | None) -> Snapshot:
    """Open the state that a command works on; one that was never saved to is refused by name.

    Raises
    ------
    BadInput
        More than one of the three is given.
    """
    return store.snapshot(version, step=step, tag=tag)
