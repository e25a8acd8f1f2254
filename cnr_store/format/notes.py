"""What a save says of itself in its record's ``user`` field: message, metrics, metadata, git commit, timing. Pure.

Notes are for people and for `Store.best`; no reader needs them, so a reader takes what it finds, and ignores the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cnr_store.errors import BadInput
from cnr_store.format.documents import canonical_json, nests_deeper
from cnr_store.format.records import CommitRecord
from cnr_store.types import JsonValue

MAX_MESSAGE_BYTES = 1024
MAX_METRICS = 64
MAX_METRIC_NAME_BYTES = 128
MAX_METADATA_BYTES = 8 * 1024
MAX_METADATA_NESTING = 16


def checked_notes(
    message: str | None, metrics: Mapping[str, float] | None, metadata: Mapping[str, JsonValue] | None
) -> dict[str, JsonValue]:
    """Return the notes as a record has them; those that are None are left out.

    Raises
    ------
    BadInput
        A message above 1,024 bytes; above 64 metrics, or one that is no finite number; metadata that is no JSON or
        above 8 KiB.
    """
    notes: dict[str, JsonValue] = {}
    if message is not None:
        size = len(message.encode("utf-8", "surrogatepass"))
        if size > MAX_MESSAGE_BYTES:
            raise BadInput(
                f"message has {size} bytes; at most {MAX_MESSAGE_BYTES} are recorded",
                expected=MAX_MESSAGE_BYTES,
                found=size,
            )
        notes["message"] = message
    if metrics is not None:
        notes["metrics"] = _checked_metrics(metrics)
    if metadata is not None:
        notes["metadata"] = _checked_metadata(metadata)
    return notes


def _checked_metrics(metrics: Mapping[str, float]) -> dict[str, JsonValue]:
    if len(metrics) > MAX_METRICS:
        raise BadInput(f"metrics has {len(metrics)} names; at most {MAX_METRICS} are recorded", found=len(metrics))
    checked: dict[str, JsonValue] = {}
    for name, value in metrics.items():
        if not 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_METRIC_NAME_BYTES:
            raise BadInput(f"a metric's name is text of 1 to {MAX_METRIC_NAME_BYTES} bytes; found {name!r}", found=name)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"metric {name!r} must be a number; found {value!r}", found=value) from error
        if not math.isfinite(number):
            raise BadInput(f"metric {name!r} is {number}; only finite numbers can be compared", found=number)
        checked[name] = number
    return checked


def _checked_metadata(metadata: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    plain = dict(metadata)
    if nests_deeper(plain, MAX_METADATA_NESTING):
        raise BadInput(f"metadata nests deeper than {MAX_METADATA_NESTING} levels, or contains itself; flatten it")
    try:
        data = canonical_json(plain)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BadInput(f"metadata cannot be stored as JSON: {error}") from error
    size = len(data)
    if size > MAX_METADATA_BYTES:
        raise BadInput(
            f"metadata has {size} bytes; at most {MAX_METADATA_BYTES} are recorded: save more as a document",
            expected=MAX_METADATA_BYTES, found=size,
        )  # fmt: skip
    found: dict[str, JsonValue] = msgspec.json.decode(data)
    return found


def metrics_of(record: CommitRecord) -> dict[str, float]:
    """Return the finite metrics that a record has; empty for a record without any, or with something else there."""
    found = record.user.get("metrics")
    if record.kind not in ("baseline", "delta") or not isinstance(found, dict):
        return {}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if abs(value) < math.inf}
