"""Check single argument values, by name, and name a few of many in a message. Pure.

Valid numbers are returned as Python's int or float, because they may be stored: JSON has no numpy scalars.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from cnr_store.errors import BadInput


def checked_choice(name: str, value: Any, allowed: Sequence[object]) -> Any:
    """Return the value if it is one of ``allowed``, and of the same type: ``True`` and ``1.0`` are not 1.

    Raises
    ------
    BadInput
    """
    plain = value.item() if isinstance(value, np.generic) else value
    if not any(type(plain) is type(one) and plain == one for one in allowed):
        choices = ", ".join(repr(one) for one in allowed)
        raise BadInput(f"{name} must be one of {choices}; found {value!r}", expected=list(allowed), found=value)
    return plain


def checked_text(name: str, value: Any) -> str:
    """Return the value if it is a string.

    Raises
    ------
    BadInput
    """
    if not isinstance(value, str):
        raise BadInput(f"{name} must be a string; found {value!r}", found=repr(value))
    return value


def some_of(names: Collection[str], near: str | None = None) -> str:
    """Return at most five of the names as text, for a message, and how many more there are.

    In their order if they have one, else sorted. Of more than five, those that are most like ``near``.
    """
    few = list(names if isinstance(names, Sequence) else sorted(names))
    if len(few) <= 5:
        return f"{few}"
    few = few[:5] if near is None else difflib.get_close_matches(near, few, n=5, cutoff=0)
    return f"{few} and {len(names) - 5} more"


def check_not_one(name: str, names: Iterable[str] | None) -> None:
    """Refuse one string where several are taken: its letters would be the names.

    Raises
    ------
    BadInput
    """
    if isinstance(names, str):
        raise BadInput(f"{name} takes a list of names, found {names!r}; give [{names!r}]", found=names)


def checked_count(name: str, value: Any, *, least: int | None = 0, most: int | None = None) -> int:
    """Return an integer within its range, both ends included; without ``least``, any integer.

    Raises
    ------
    BadInput

    Examples
    --------
    >>> checked_count("keep_last", np.int64(3), least=1)
    3
    """
    is_bool = isinstance(value, bool | np.bool_)
    try:
        number = None if is_bool else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f" of {least} or more" if most is None else f" from {least} to {most}"
        raise BadInput(f"{name} must be a whole number{bounds}; found {value!r}", expected=(least, most), found=value)
    return number


def checked_number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, most: float | None = None
) -> float:
    """Return a finite number within its range; ``above`` is exclusive, ``least`` and ``most`` inclusive.

    Raises
    ------
    BadInput

    Examples
    --------
    >>> checked_number("keep", 1, above=0, most=1)
    1.0
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    is_within = (
        math.isfinite(number)
        and (above is None or number > above)
        and (least is None or number >= least)
        and (most is None or number <= most)
    )
    if not is_within:
        bounds = [f"above {above:g}"] if above is not None else []
        bounds += [f"of {least:g} or more"] if least is not None else []
        bounds += [f"at most {most:g}"] if most is not None else []
        said = " ".join(["a finite number", " and ".join(bounds)]).rstrip()
        raise BadInput(f"{name} must be {said}; found {value!r}", found=value)
    return number
