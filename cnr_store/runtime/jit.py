"""numba's ``njit``, with a cache on disk that several processes may fill at once.

numba numbers the files of a kernel's signatures. Two processes that compile two signatures at once may choose the same
number; then the index of one permanently refers to the code of the other. Code for other layouts and dtypes is called
without a check, and reads and writes out of bounds. This happens when the ranks of a training start on a new machine,
because they compile all kernels at once. Here the file's name is derived from its signature, so it cannot contain other
code. numba also treats a cached kernel as fresh while its source file is unchanged. Here its options, the constants it
uses and the kernels of other files that it calls must be unchanged, too.

This module must not change what numba compiles, nor the caches of other functions. numba has no public interface for
this: if its cache has different internals than expected, kernels are not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import caching

logger = logging.getLogger(__name__)

_CacheFile: Any = getattr(caching, "IndexDataCacheFile", object)  # has no annotations
_METHODS = ("_data_name", "_save_data", "_load_index", "_save_index")
_FIELDS = ("_cache_path", "_index_name", "_source_stamp", "_version")


class _NamedBySignature(_CacheFile):
    """The cache files of one kernel: an index, and one file of code per signature."""

    def load(self, key: Any) -> Any:
        """Return the code of a signature; None if files are missing or damaged, so that it is recompiled."""
        try:
            return super().load(key)
        except Exception:  # noqa: BLE001 - whatever unpickling raises of files that were cut
            return None

    def save(self, key: Any, data: Any) -> None:
        """Save the code of a signature. If that fails, e.g. on a full disk, the next process recompiles it."""
        try:
            self._save_named(key, data)
        except OSError as error:
            logger.debug("kernels cannot be cached in %s: %s", self._cache_path, error)

    def _save_named(self, key: Any, data: Any) -> None:
        """Save the code of a signature, then add it to the index: each indexed signature has its own code.

        A process that loses a race for the index compiles again. The first to save for a new source deletes the code of
        older sources, and code that another process has saved and not indexed yet, which is then compiled again.
        """
        identity = repr((self._version, self._source_stamp, key)).encode()
        name = self._data_name(int.from_bytes(hashlib.sha256(identity).digest()[:8]))
        self._save_data(name, data)
        try:
            overloads = self._load_index()
        except Exception:  # noqa: BLE001 - as in `load`
            overloads = {}
        is_first = not overloads
        if overloads.get(key) != name:
            overloads[key] = name
            self._save_index(overloads)
        if is_first:
            self._remove_all_but(name)

    def _remove_all_but(self, name: str) -> None:
        base = self._index_name.removesuffix("nbi")
        for file in Path(self._cache_path).iterdir():
            if file.name.startswith(base) and file.suffix == ".nbc" and file.name != name:
                with contextlib.suppress(OSError):  # gone, or open elsewhere
                    file.unlink()


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``numba.njit(cache=True, **options)``; without a cache if no folder for it is writable.

    Nothing is compiled here: numba compiles at the first call with arguments of given types. Under
    ``NUMBA_DISABLE_JIT`` functions are returned unchanged.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        if getattr(numba.config, "DISABLE_JIT", False):
            return function
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder for a cache
            return numba.njit(**options)(function)
        kept = _file_of(dispatcher)
        if kept is None:
            warnings.warn(
                f"the cache of numba {numba.__version__} has unknown internals, so each process compiles the kernels "
                "that it calls, some seconds each; use a numba version that this cnr-store was tested with",
                RuntimeWarning,
                stacklevel=2,
            )
            return numba.njit(**options)(function)
        dispatcher._cache._cache_file = _NamedBySignature(
            kept._cache_path, kept._index_name.removesuffix(".nbi"), _stamp(function, options, kept._source_stamp)
        )
        return dispatcher

    return compiled


def _file_of(dispatcher: Any) -> Any:
    """Return the cache files of a kernel; None if they have other internals than this module expects."""
    file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    return file if all(hasattr(file, name) for name in (*_METHODS, *_FIELDS)) else None


def _stamp(function: Callable[..., Any], options: dict[str, Any], source: Any) -> Any:
    """Return a stamp of a kernel's source file, options, constants, and of the kernels that it calls."""
    known = function.__globals__
    used = {name: known[name] for name in function.__code__.co_names if name in known}
    numbers = sorted((name, repr(one)) for name, one in used.items() if isinstance(one, int | float | np.generic))
    files = {name: _file_of(one) for name, one in used.items()}
    called = sorted((name, repr(file._source_stamp)) for name, file in files.items() if file is not None)
    # The order of a set differs between processes.
    given = sorted((name, repr(sorted(one) if isinstance(one, set) else one)) for name, one in options.items())
    return source, tuple(given), tuple(numbers), tuple(called)
