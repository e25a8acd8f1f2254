"""Files as TorchEasyRec dumps them, made with pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Array = npt.NDArray[Any]
Rows = Mapping[int, Array]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one rank dumps of a table: rows by key, and keys that were evicted."""

    table: str
    rows: Rows
    evicted: Sequence[int] = ()


def rows_of(seed: int, keys: Sequence[int], dim: int) -> dict[int, Array]:
    values = np.random.default_rng(seed).normal(size=(len(keys), dim)).astype(np.float32)
    return dict(zip(keys, values, strict=True))


def quantized(rows: Array) -> Array:
    """Return rows as bytes: a code for each element, then scale and offset as float16."""
    offset = rows.min(axis=1, keepdims=True).astype(np.float16)
    scale = ((rows.max(axis=1, keepdims=True) - offset) / 255).astype(np.float16)
    scale[scale == 0] = 1
    codes = np.clip(np.rint((rows - offset) / scale), 0, 255).astype(np.uint8)
    return np.concatenate([codes, scale.view(np.uint8), offset.view(np.uint8)], axis=1)


def decoded(row: Array) -> Array:
    """Return the floats of a quantized row, element by element."""
    scale, offset = (np.float32(one) for one in np.frombuffer(quantized(row[None])[0, -4:].tobytes(), "<f2"))
    return np.array([np.float32(code) * scale + offset for code in quantized(row[None])[0, :-4]], np.float32)


def write_dump(
    folder: Path, step: int, ranks: Sequence[Sequence[Chunk]], *, as_bytes: bool = False, **changed: Any
) -> list[Path]:
    """Write the files of a step as the dumper does: chunk by chunk, and a file without rows for an idle rank.

    ``changed``: columns to replace, by name, in every row.
    """
    paths = []
    for rank, chunks in enumerate(ranks):
        alone = len(ranks) == 1
        name = f"delta_embedding_step_{step}" + ("" if alone else f"_rank_{rank}_of_{len(ranks)}") + ".parquet"
        paths.append(folder / name if alone else folder / f"step_{step}" / name)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        element = pa.uint8() if as_bytes else pa.float32()
        types = {
            "global_step": pa.int64(), "rank": pa.int32(), "world_size": pa.int32(), "feature_name": pa.string(),
            "table_fqn": pa.string(), "key_id": pa.int64(), "embedding": pa.list_(element), "source": pa.string(),
        }  # fmt: skip
        schema = pa.schema(list(types.items()))
        with pq.ParquetWriter(paths[-1], schema) as writer:
            for chunk in chunks:
                for keys, source in (
                    (list(chunk.rows), "model_delta_tracker"),
                    (chunk.evicted, "dynamicemb_evicted"),
                ):
                    zeros = np.zeros_like(next(iter(chunk.rows.values())))
                    values = np.array([chunk.rows.get(key, zeros) for key in keys])
                    if not len(keys):
                        continue
                    common = {"global_step": step, "rank": rank, "world_size": len(ranks), "feature_name": "f"}
                    common |= {"table_fqn": chunk.table, "source": source} | changed
                    embedding = (quantized(values) if as_bytes else values).tolist()
                    columns = {name: [value] * len(keys) for name, value in common.items()}
                    arrays = {"key_id": list(keys), "embedding": embedding} | columns
                    writer.write_table(pa.table({name: pa.array(arrays[name], types[name]) for name in types}, schema))
            if not chunks:
                writer.write_table(schema.empty_table())
    return paths
