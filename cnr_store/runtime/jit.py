"""numba's ``njit``, with a cache on disk that several processes may fill at once.

Why this module exists: numba numbers the files of a kernel's signatures, and two processes that compile two signatures
at the same time may give both the same number. The index of the one then stands beside the code of the other, for good:
code for other layouts and dtypes is called without a check, and reads and writes where it must not. The ranks of a
training that starts on a machine for the first time compile all kernels at the same moment. Here a file is named for
its signature, so no other code can stand in it. And numba takes a kernel for fresh while its own source file is; here
also its options, the numbers it is compiled with and the kernels of other files that it calls must be what they were.

It must never change what numba compiles, nor the caches of functions that are not ours. numba has no public way to do
this: where its cache is not made of the parts that are known here, kernels are kept by nobody.
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
    """Files of one kernel: an index, and for each signature one file of code."""

    def load(self, key: Any) -> Any:
        """Return the code of a signature; None, so that it is compiled again, where files are missing or damaged."""
        try:
            return super().load(key)
        except Exception:  # noqa: BLE001 - whatever unpickling raises of files that were cut
            return None

    def save(self, key: Any, data: Any) -> None:
        """Save the code of a signature; where it cannot be, on a full disk say, the next process compiles it again."""
        try:
            self._save_named(key, data)
        except OSError as error:
            logger.debug("kernels cannot be kept in %s: %s", self._cache_path, error)

    def _save_named(self, key: Any, data: Any) -> None:
        """Save the code of a signature, then list it: who finds it in the index finds this code, or newer of its own.

        Who loses a race for the index compiles again. The first to save for a new source removes the code of older
        ones; who has just saved some and not listed it yet compiles that again too.
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
    """Return ``numba.njit(cache=True, **options)``; without a cache where no folder for one can be written.

    Compiles nothing: numba does when a kernel is called first with arguments of some types. Under ``NUMBA_DISABLE_JIT``
    functions stay as they are.
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
                f"the cache of numba {numba.__version__} has other parts than are known, so each process compiles the "
                "kernels it calls, some seconds each; use a numba that this version of cnr-store was tested with",
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
    """Return the cache's files of a kernel; None if they are not what this module knows."""
    file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    return file if all(hasattr(file, name) for name in (*_METHODS, *_FIELDS)) else None


def _stamp(function: Callable[..., Any], options: dict[str, Any], source: Any) -> Any:
    """Return what code is compiled from: the source file's stamp, options, numbers, and stamps of kernels it calls."""
    known = function.__globals__
    used = {name: known[name] for name in function.__code__.co_names if name in known}
    numbers = sorted((name, repr(one)) for name, one in used.items() if isinstance(one, int | float | np.generic))
    files = {name: _file_of(one) for name, one in used.items()}
    called = sorted((name, repr(file._source_stamp)) for name, file in files.items() if file is not None)
    # The order of a set is another in each process.
    given = sorted((name, repr(sorted(one) if isinstance(one, set) else one)) for name, one in options.items())
    return source, tuple(given), tuple(numbers), tuple(called)
