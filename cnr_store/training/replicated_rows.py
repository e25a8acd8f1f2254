"""Which rows of a replicated table changed: the union of what each rank's batches touched.

Every rank sees its own batches, all ranks move by all of them. The words travel once per save, never per step.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

import numpy as np

from cnr_store.types import RowIds
from cnr_store_gpu import Taken
from cnr_store_gpu.words import Words, mark_words, rows_of, words_of_rows


def words_of(taken: Mapping[str, Taken], tables: Iterable[str]) -> dict[str, str]:
    """Return the marks of this rank's copies of ``tables`` as text, one bit per row; empty ones are left out."""
    found = {table: taken[table].words for table in tables if table in taken and len(taken[table])}
    return {table: base64.b85encode(words.tobytes()).decode() for table, words in found.items()}


def union_of(answers: Iterable[Mapping[str, str]]) -> dict[str, Words]:
    """Return the union over all ranks of what `words_of` gave, for tables with a mark."""
    union: dict[str, Words] = {}
    for answer in answers:
        for table, text in answer.items():
            words = np.frombuffer(base64.b85decode(text), np.uint32)
            union[table] = words | union[table] if table in union else words
    return union


def taken_rows(name: str, num_rows: int, rows: RowIds) -> Taken:
    """Return sorted rows of a shard as taken ones, to be given back."""
    words = np.zeros(words_of_rows(num_rows), np.uint32)
    mark_words(words, rows, 0, num_rows)
    return Taken(name, num_rows, rows, words)


def taken_words(name: str, num_rows: int, words: Words) -> Taken:
    """Return words as taken rows, to be saved, or given back if the save does not win."""
    return Taken(name, num_rows, rows_of(words), words)
