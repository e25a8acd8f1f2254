"""numba's ``njit``, with a cache on disk that several processes may fill at once.

Why this module exists: numba numbers the files of a kernel's signatures, and two processes that compile two signatures
at the same time may give both the same number. The index of the one then stands beside the code of the other, for good:
code for other layouts and dtypes is called without a check, and reads and writes where it must not. The ranks of a
training that starts on a machine for the first time compile all kernels at the same moment. Here a file is named for
its signature, so no other code can stand in it.

It must never change what numba compiles, nor the caches of functions that are not ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numba
from numba.core import caching

_CacheFile: Any = caching.IndexDataCacheFile  # has no annotations


class _NamedBySignature(_CacheFile):
    """Files of one kernel: an index, and for each signature one file of code."""

    def save(self, key: Any, data: Any) -> None:
        """Save the code of a signature, then list it: who finds it in the index finds this code, or newer of its own.

        Who loses a race for the index compiles again.
        """
        identity = repr((self._version, self._source_stamp, key)).encode()
        name = self._data_name(int.from_bytes(hashlib.sha256(identity).digest()[:8]))
        self._save_data(name, data)
        overloads = self._load_index()
        if overloads.get(key) != name:
            overloads[key] = name
            self._save_index(overloads)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``numba.njit(cache=True, **options)``; without a cache where no folder for one can be written.

    Compiles nothing: numba does when a kernel is called first with arguments of some types.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder for a cache
            return numba.njit(**options)(function)
        kept = dispatcher._cache._cache_file
        dispatcher._cache._cache_file = _NamedBySignature(
            kept._cache_path, kept._index_name.removesuffix(".nbi"), kept._source_stamp
        )
        return dispatcher

    return compiled
