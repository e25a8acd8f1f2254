"""Warnings at the line of the program that uses the library, however deep inside they arise.

Python 3.12 has ``skip_file_prefixes=`` for this; 3.11 is supported.
"""

from __future__ import annotations

import sys
import warnings

_INSIDE = frozenset({"cnr_store", "cnr_store_gpu", "cnr_store_tools", "torch", "contextlib"})
"""Packages whose lines say nothing to a user: ours, and those that call us back."""


def warn_caller(message: str) -> None:
    """Issue a `RuntimeWarning` for the innermost line that is outside of the library; in a thread of ours, its last."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
    warnings.warn_explicit(
        message, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno,
        module=frame.f_globals.get("__name__"), registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )  # fmt: skip
