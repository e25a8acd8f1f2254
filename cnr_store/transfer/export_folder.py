"""Reads the folders that an export to npy or Parquet wrote, as the tensors of one file.

Names of files come from the names of tensors, never from the folder's index, so no path leads out of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import from_float32
from cnr_store.errors import BadInput, NotFound
from cnr_store.format.documents import loads
from cnr_store.format.layout import encode_name
from cnr_store.runtime.local_files import failing_at
from cnr_store.transfer.exporting import INDEX_FILE, METADATA_KEY, ExportedTensor, npy_file
from cnr_store.transfer.safetensors_file import Tensor, TensorFile, carrier_dtype


class _ExportIndex(msgspec.Struct, frozen=True):
    version: int
    step: int
    tensors: tuple[ExportedTensor, ...]


# Created at import, as in documents.py.
_INDEX = msgspec.json.Decoder(_ExportIndex)


def open_export(folder: Path) -> TensorFile:
    """Open a folder of `export_snapshot`. npy files are memory-mapped; Parquet files are read into memory. Blocks.

    Raises
    ------
    NotFound
        There is no such folder, or one of its files is missing.
    BadInput
        It is not an export, or a file has not the tensors that the index gives.
    AccessDenied, StorageFailure
    """
    with failing_at(folder, "read"):
        try:
            data = (folder / INDEX_FILE).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"{folder} is no export: it has no {INDEX_FILE}", path=str(folder)) from error
        try:
            index = loads(data, _INDEX)
            is_npy = all((folder / npy_file(tensor)).is_file() for tensor in index.tensors)
            read = _npy if is_npy else _ParquetTables(folder).tensor
            tensors = {tensor.name: _checked(folder, tensor, read(folder, tensor)) for tensor in index.tensors}
        except FileNotFoundError as error:
            raise NotFound(f"a file of the export is missing: {error.filename}", path=str(folder)) from error
        except (msgspec.MsgspecError, UnicodeError, ValueError, KeyError) as error:
            raise BadInput(f"{folder} is not a whole export: {error}", path=str(folder)) from error
    return TensorFile(tensors, {METADATA_KEY: data.decode()})


def _npy(folder: Path, tensor: ExportedTensor) -> npt.NDArray[Any]:
    path = folder / npy_file(tensor)
    # An array without elements cannot be mapped.
    values: npt.NDArray[Any] = np.load(path, mmap_mode="r" if np.prod(tensor.shape) else None, allow_pickle=False)
    return values


class _ParquetTables:
    """The tables of a Parquet export; each file is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Any] = {}

    def tensor(self, folder: Path, tensor: ExportedTensor) -> npt.NDArray[Any]:  # noqa: ARG002 - as for `_npy`
        """Return the elements of a tensor, in memory."""
        if tensor.role == "dense":
            row = self._file("dense.parquet").select(["name", "data"]).to_pydict()
            data = row["data"][row["name"].index(tensor.name)]
            return np.frombuffer(data, carrier_dtype(tensor.dtype)).reshape(tensor.shape)
        columns = self._file(f"tables/{encode_name(tensor.table or '')}.parquet")
        name = "row_id" if tensor.role == "keys" else tensor.slot or "values"
        column = columns[name].combine_chunks()
        flat = column.flatten() if len(tensor.shape) > 1 else column
        values = flat.to_numpy(zero_copy_only=False).reshape(tensor.shape)
        return from_float32(values, "bfloat16") if tensor.dtype == "bfloat16" else values

    def _file(self, name: str) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if name not in self._read:
            try:
                self._read[name] = pq.read_table(self._folder / name)
            except pa.ArrowInvalid as error:
                raise BadInput(f"{name} is no Parquet file: {error}", path=name) from error
        return self._read[name]


def _checked(folder: Path, tensor: ExportedTensor, values: npt.NDArray[Any]) -> Tensor:
    wanted = carrier_dtype(tensor.dtype)
    if values.shape != tensor.shape or values.dtype != wanted:
        raise BadInput(
            f"tensor {tensor.name!r} of {folder} is {values.dtype} {values.shape}; {INDEX_FILE} gives {wanted} "
            f"{tensor.shape}: export again",
            path=str(folder), expected=f"{wanted} {tensor.shape}", found=f"{values.dtype} {values.shape}",
        )  # fmt: skip
    return Tensor(tensor.dtype, values)
