"""What is wrong with a manifest's statements, as far as no type says it (spec, CNR-DOC-8 and CNR-DOC-9). Pure.

Here stands what one field says of another; ranges and patterns of single fields are in `fields`, what manifests of one
chain say of each other in `chain_checks`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, count
from operator import attrgetter

import msgspec
import xxhash

from cnr_store.format.arrays import chunk_bytes, decoded_bytes, index_bytes, object_paths
from cnr_store.format.layout import check_name, check_names, segment_name
from cnr_store.format.limits import CHUNK_BYTES, MAX_CHUNK_BYTES, MAX_ELEMENTS, MAX_SCALE, MIN_SCALE
from cnr_store.format.records import (
    OPERATIONS,
    ArrayEntry,
    ChainEntry,
    DenseEntry,
    Manifest,
    PartEntry,
    PartPlace,
    RowListEntry,
    TableSchema,
)
from cnr_store.types import Affine, Encoding, FloatBits, Lattice

_CARRIERS = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
_STORED_AS = {"bfloat16": "uint16", "bool": "uint8"}
_INTEGERS = ("int16", "int32", "int64")
_NO_BYTES = xxhash.xxh3_128_hexdigest(b"")
_DIGITS, _DIGEST_DIGITS = "0123456789abcdef", 16
_MANTISSA_BITS = {"float32": range(24), "float16": range(10, 11), "bfloat16": range(7, 8)}


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with a manifest's own statements, before anybody allocates by them.

    Raises
    ------
    BadName
        A name that cannot be one.
    """
    known = {entry.path: entry for entry in manifest.objects}
    if len(known) != len(manifest.objects):
        yield "an object is listed twice"
    check_names((*manifest.tables, *manifest.dropped, *manifest.dense, *manifest.ended))
    if manifest.kind == "baseline" and (manifest.dropped or manifest.ended):
        yield "a baseline drops what no state has"
    if manifest.kind == "baseline" and manifest.kept_documents:
        yield "a baseline keeps documents of no state"
    both = [*(set(manifest.dropped) & manifest.tables.keys()), *(set(manifest.ended) & manifest.dense.keys())]
    if both:
        yield f"{both[0]!r} is both dropped and there"
    for name in (*manifest.documents, *manifest.kept_documents):
        for node in name.split("/"):
            check_name(node)
    if len({*manifest.documents, *manifest.kept_documents}) != len(manifest.documents) + len(manifest.kept_documents):
        yield "a document is kept twice, or kept and stored"
    yield from digest_problems(manifest.parts)
    form_of: dict[int, int] = {}
    for name, schema in {id(schema): (name, schema) for name, schema in manifest.tables.items()}.values():
        sound = _SOUND.get(id(schema))
        if sound is None or sound[0] is not schema:
            problems = [*_schema_problems(name, schema), *_form_problems(name, schema)]
            yield from problems
            sound = schema, _number_of(_form_of(schema))
            if not problems:
                _keep_sound(*sound)
        form_of[id(schema)] = sound[1]
    fitting: Fitting = set()
    plain: set[str] = set()
    for part in manifest.parts:
        own = manifest.tables.get(part.table)
        if own is None:
            yield f"a part belongs to unknown table {part.table!r}"
        elif is_plain(part, own, form := form_of[id(own)], fitting):
            plain.add(part.table)
        else:
            yield from part_problems(part, own, form, fitting)
    if len(manifest.parts_of) < len(manifest.parts):
        yield from _overlaps(manifest.parts_of)
    yield from _gaps(manifest, plain)
    yield from _array_problems(manifest)
    yield from _chunk_problems(manifest)
    yield from _order_problems(manifest)
    packs = {array.path: array for array in manifest.dense_arrays}
    for name, tensor in manifest.dense.items():
        yield from _tensor_problems(name, tensor, packs)
    yield from _shared_elements(manifest)


def digest_problems(parts: Sequence[PartPlace]) -> Iterator[str]:
    """Yield state digests that are not 16 hexadecimal digits."""
    digests = chain(map(attrgetter("base_digest"), parts), map(attrgetter("state_digest"), parts))
    texts = [digest for digest in digests if digest is not None]
    if {*map(len, texts)} - {_DIGEST_DIGITS} or "".join(texts).strip(_DIGITS):
        wrong = next(text for text in texts if len(text) != _DIGEST_DIGITS or text.strip(_DIGITS))
        yield f"a part has state digest {wrong!r}"


def entry_problems(manifest: Manifest, entry: ChainEntry) -> Iterator[str]:
    """Yield where a manifest is not the one that its chain entry describes. Pure."""
    if segment_name(manifest.base, manifest.txn) != entry.seg:
        yield f"has transaction {manifest.txn} and base {manifest.base}, its chain entry has segment {entry.seg}"
    if (manifest.l0, manifest.l1, manifest.kind) != (entry.l0, entry.l1, entry.kind):
        yield (
            f"is {manifest.kind} {manifest.l0} to {manifest.l1}, its chain entry has {entry.kind} {entry.l0} to "
            f"{entry.l1}"
        )
    rows, size = manifest.changed_rows, sum(item.size for item in manifest.objects)
    if rows != entry.rows or size > entry.size_bytes:
        yield f"has {rows} rows in {size} bytes, its chain entry has {entry.rows} in {entry.size_bytes}"


Form = tuple[object, ...]
"""What decides which arrays a table has: the same for tables that differ in name, size and scale alone."""


_SOUND: dict[int, tuple[TableSchema, int]] = {}
"""By identity: schemas without problems, with the number of their form. Those that did not change are one object in all
manifests."""

_MOST_SOUND = 1 << 14


def _keep_sound(schema: TableSchema, form: int) -> None:
    if len(_SOUND) >= _MOST_SOUND:
        _SOUND.clear()
    _SOUND[id(schema)] = schema, form


_NUMBERS = count()


@lru_cache(maxsize=_MOST_SOUND)
def _number_of(_: Form) -> int:
    """A number that no other form has. It is hashed faster."""
    return next(_NUMBERS)


def _form_of(schema: TableSchema) -> Form:
    encoding = Lattice if isinstance(schema.encoding, Lattice) else schema.encoding
    return encoding, schema.dtype, schema.shift, *schema.slots.items()


def _schema_problems(table: str, schema: TableSchema) -> Iterator[str]:
    """Sizes that cannot be."""
    if schema.num_rows * schema.dim > MAX_ELEMENTS:
        yield f"table {table!r} has shape ({schema.num_rows}, {schema.dim})"
    if schema.keys == "hashed" and schema.num_rows:
        yield f"table {table!r} has hashed keys and {schema.num_rows} rows"
    if schema.shift and not isinstance(schema.encoding, Lattice):
        yield f"table {table!r} has shift {schema.shift} and no scale"
    yield from _scale_problems(table, schema.encoding, schema.shift)


def _form_problems(table: str, schema: TableSchema) -> Iterator[str]:
    """What would make decoding undefined, of every table of this form."""
    for name, slot in schema.slots.items():
        check_name(name)
        yield from _scale_problems(table, slot.encoding, schema.shift)
    encodings = [(schema.encoding, schema.dtype), *((slot.encoding, slot.dtype) for slot in schema.slots.values())]
    for encoding, dtype in encodings:
        if isinstance(encoding, FloatBits) and encoding.mantissa_bits not in _MANTISSA_BITS[dtype]:
            yield f"table {table!r} has float_bits with {encoding.mantissa_bits} mantissa bits of {dtype}"


def _scale_problems(table: str, encoding: Encoding, shift: int) -> Iterator[str]:
    if isinstance(encoding, Lattice) and not MIN_SCALE <= encoding.scale * 0.5**shift <= MAX_SCALE:
        yield f"table {table!r} has scale {encoding.scale} and shift {shift}"


def _overlaps(parts_of: Mapping[str, Sequence[PartEntry]]) -> Iterator[str]:
    """Parts of one table are disjoint rectangles: swept by their first row, beside those that have not ended."""
    for table, parts in parts_of.items():
        own = [part for part in parts if part.rows[0] < part.rows[1]] if len(parts) > 1 else parts
        if len(own) < 2:
            continue
        ends = iter(sorted(own, key=lambda part: part.rows[1]))
        next_end = next(ends)
        lefts: list[int] = []  # of the rectangles that have the row, sorted; and where each stops
        rights: dict[int, int] = {}
        for part in sorted(own, key=lambda part: part.rows):
            while next_end.rows[1] <= part.rows[0]:
                del lefts[bisect_left(lefts, next_end.columns[0])]
                next_end = next(ends)
            left, right = part.columns
            at = bisect_right(lefts, left)
            if (at and rights[lefts[at - 1]] > left) or (at < len(lefts) and lefts[at] < right):
                yield f"two parts of table {table!r} overlap at row {part.rows[0]}"
                return
            lefts.insert(at, left)
            rights[left] = right


def _gaps(manifest: Manifest, whole: Collection[str]) -> Iterator[str]:
    """Disjoint parts of a table make it up where their areas do: rows of no part would be taken for absent ones.

    ``whole`` are tables of which a part has all rows and columns.
    """
    for name, schema in manifest.tables.items():
        if name in whole:
            continue  # nearly all
        parts = manifest.parts_of.get(name, ())
        area = sum((one.rows[1] - one.rows[0]) * (one.columns[1] - one.columns[0]) for one in parts)
        if schema.keys == "dense" and area != schema.num_rows * schema.dim:
            yield f"the parts of table {name!r} of shape ({schema.num_rows}, {schema.dim}) do not make it up"


def _expected_arrays(schema: TableSchema, operation: str, width: int) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Array name to the dtypes and the number of columns it may have in a row list (None: one-dimensional)."""
    expected: dict[str, tuple[tuple[str, ...], int | None]] = {"rows": (("int64",), None)}
    if operation == "delete":
        return expected
    encodings = {"codes": (schema.encoding, schema.dtype, False)} | {
        f"slots/{name}": (slot.encoding, slot.dtype, slot.kind == "row") for name, slot in schema.slots.items()
    }
    for name, (encoding, dtype, is_vector) in encodings.items():
        columns = None if is_vector else width
        if operation == "escape":
            expected["values" if name == "codes" else name] = ((_CARRIERS[dtype],), columns)
        elif isinstance(encoding, Affine):
            expected["codes"] = (("uint8",), (width + 7) // 8 * encoding.bits)
            expected["scale"] = expected["zero_point"] = ((encoding.param_dtype,), None)
        elif isinstance(encoding, Lattice | FloatBits):
            expected[name] = (("int16", "int32"), columns)
        else:
            expected[name] = ((_CARRIERS[dtype],), columns)
    return expected


Fitting = set[tuple[int, int, str, int]]
"""Arrays of a group that are those of a row list: identity of the group, number of the table's form, operation and
width. They are compared once, however many tables are alike."""


def is_plain(part: PartEntry, schema: TableSchema, form: int, fitting: Fitting) -> bool:
    """Whether a part has one list, in one chunk, of a whole table, as nearly all of a delta, and no problem.

    False says nothing: `part_problems` does.
    """
    one, operation = part.add or part.set, "add" if part.set is None else "set"
    if one is None or (part.add and part.set) or part.delete or part.escape:
        return False
    is_whole = part.rows == (0, schema.num_rows) and part.columns == (0, schema.dim) and schema.keys == "dense"
    fits = (id(one.group), form, operation, schema.dim) in fitting and len(one.first) == len(one.last) == 1
    if not is_whole or not fits:
        return False
    chunk_rows, first, last = one.group["rows"].chunk_rows, one.first[0], one.last[0]
    is_inside = first >= 0 and last < schema.num_rows and one.count <= last - first + 1
    return is_inside and one.start % chunk_rows + one.count <= chunk_rows


def part_problems(part: PartEntry, schema: TableSchema, form: int, fitting: Fitting) -> Iterator[str]:
    """Yield what is wrong with a part of a table of this schema, whose form has that number; adds to ``fitting``."""
    start, stop = part.columns
    if not start < stop <= schema.dim:
        yield f"part {part} has columns {part.columns} of {schema.dim}"
    if schema.keys == "hashed" and (part.columns != (0, schema.dim) or part.rows != (0, 0)):
        yield f"part {part} of a hashed table has rows {part.rows} and columns {part.columns}"
    if not part.rows[0] <= part.rows[1] <= (schema.num_rows if schema.keys == "dense" else 0):
        yield f"part {part} has rows {part.rows} of {schema.num_rows}"
    for operation in OPERATIONS:
        row_list: RowListEntry | None = getattr(part, operation)
        if row_list is None:
            continue
        fit = id(row_list.group), form, operation, stop - start
        if fit not in fitting:
            problems = [*_misfits(row_list.group, schema, operation, stop - start)]
            yield from (f"part {part} {operation}{problem}" for problem in problems)
            if not problems:
                fitting.add(fit)
        if operation == "add" and not isinstance(schema.encoding, Lattice | FloatBits):
            yield f"part {part} of a table without differences has add rows"
        for problem in _list_problems(part, row_list, schema) if "rows" in row_list.group else ():
            yield f"part {part} {operation}{problem}"


def _list_problems(part: PartEntry, row_list: RowListEntry, schema: TableSchema) -> Iterator[str]:
    chunks = row_list.chunks
    if len(row_list.first) != chunks or len(row_list.last) != chunks:
        yield f" has {len(row_list.first)} and {len(row_list.last)} chunk ranges for {chunks} chunks"
        return
    for k, (first, last) in enumerate(zip(row_list.first, row_list.last, strict=True)):
        if last - first + 1 < row_list.rows_in(k) or (k and first <= row_list.last[k - 1]):
            yield f" chunk {k} covers rows {first} to {last} out of order"
    if schema.keys == "dense" and not part.rows[0] <= row_list.first[0] <= row_list.last[-1] < part.rows[1]:
        yield f" holds rows outside {part.rows}"


def _misfits(group: Mapping[str, ArrayEntry], schema: TableSchema, operation: str, columns: int) -> Iterator[str]:
    """Arrays that a row list needs, and its group lacks or has in another form."""
    for name, (dtypes, width) in _expected_arrays(schema, operation, columns).items():
        found = group.get(name)
        if found is None:
            yield f" lacks array {name!r}"
        elif found.dtype not in dtypes or found.shape[1:] != (() if width is None else (width,)):
            yield f": array {name!r} is {found.dtype} {found.shape}"


def _array_problems(manifest: Manifest) -> Iterator[str]:
    """Arrays that are no dense pack or have chunks too large to decode; groups that hold lists of two operations."""
    operations: dict[str, str] = {}
    groups = [(operation, own) for operation in OPERATIONS for own in _groups_of(manifest, operation)]
    for operation, own in groups:
        weights = next((own[name].path for name in ("codes", "values", "rows") if name in own), "")
        if operations.setdefault(weights, operation) != operation:
            yield f"array {weights} holds {operation} and {operations[weights]} rows"
    for array in manifest.arrays:
        yield from _size_problems(array, CHUNK_BYTES if array.path in operations else MAX_CHUNK_BYTES)
    for array in manifest.dense_arrays:
        if len(array.shape) != 1:
            yield f"dense array {array.path} has shape {array.shape}"
        yield from _size_problems(array, CHUNK_BYTES)


def _groups_of(manifest: Manifest, operation: str) -> Collection[Mapping[str, ArrayEntry]]:
    """The groups that have a list of this operation, each once."""
    lists = map(attrgetter(operation), manifest.parts)
    return {id(one.group): one.group for one in lists if one is not None}.values()


def _size_problems(array: ArrayEntry, most_bytes: int) -> Iterator[str]:
    """``most_bytes``: of a decoded chunk, unless it is one row."""
    if math.prod(array.shape) > MAX_ELEMENTS:
        yield f"array {array.path} claims {math.prod(array.shape)} elements"
    size = decoded_bytes(array)
    if size > most_bytes and array.chunk_rows > 1:
        yield f"array {array.path} declares chunks of {size} bytes, at most {most_bytes} are read"
    is_integer = array.dtype in _INTEGERS if array.codec == "digits" else array.dtype == "int64"
    if array.codec != "bytes" and not is_integer:
        yield f"array {array.path} of {array.dtype} has codec {array.codec}"


def _order_problems(manifest: Manifest) -> Iterator[str]:
    """Only integers of an ``add`` list, not the row ids, have an order: that of an int16 vector beside them.

    A reader finds that vector by its path, and gives it to a kernel without checks of bounds.
    """
    by_path = {array.path: array for array in manifest.arrays}
    ordered = {
        one.path for own in _groups_of(manifest, "add") for one in own.values()
        if one.codec == "digits" and len(one.shape) == 2
    }  # fmt: skip
    for array in (*manifest.arrays, *manifest.dense_arrays):
        if array.order is msgspec.UNSET:
            continue
        keys = by_path.get(array.order)
        is_key = keys is not None and (keys.dtype, len(keys.shape), keys.order) == ("int16", 1, msgspec.UNSET)
        if array.path not in ordered or not is_key:
            yield f"the rows of array {array.path} lie in the order of {array.order!r}"


def _chunk_problems(manifest: Manifest) -> Iterator[str]:
    """Stored chunks that cannot be what they are said to be, and shards that have other bytes than those inside."""
    sizes = {item.path: item.size for item in manifest.objects}
    for array in (*manifest.arrays, *manifest.dense_arrays):
        size, objects = chunk_bytes(array), [sizes[path] for path in object_paths(array)[1:]]
        least, most = (size + 4, size + 4) if array.codec == "bytes" else (4, size + size // 4 + 4096)
        chunks: Sequence[int] = objects
        if array.shards is not msgspec.UNSET:
            room, chunks = array.shards.chunks, array.shards.sizes
            whole = [sum(chunks[k : k + room]) + index_bytes(room) for k in range(0, len(chunks), room)]
            if objects != whole:
                yield f"shards of array {array.path} have {objects} bytes, what is inside takes {whole}"
        for k, found in enumerate(chunks):
            if not least <= found <= most:
                yield f"chunk {k} of array {array.path} has {found} bytes, expected {least} to {most}"


def _tensor_problems(name: str, tensor: DenseEntry, packs: Mapping[str, ArrayEntry]) -> Iterator[str]:
    size = math.prod(tensor.shape)
    # Also of a tensor without elements the other dimensions are multiplied: by whoever takes memory for it.
    if math.prod(filter(None, tensor.shape)) > MAX_ELEMENTS or (size == 0 and tensor.digest != _NO_BYTES):
        yield f"dense tensor {name!r} of shape {tensor.shape} has digest {tensor.digest}"
    pack = packs.get(tensor.path)
    dtype = _STORED_AS.get(tensor.dtype, tensor.dtype)
    if pack is None or pack.dtype != dtype or tensor.offset + size > pack.shape[0]:
        yield (
            f"dense tensor {name!r}, {tensor.dtype} of shape {tensor.shape}, is not in array {tensor.path} at offset "
            f"{tensor.offset}"
        )


def _shared_elements(manifest: Manifest) -> Iterator[str]:
    """Tensors of one array have their own elements: any number of them could be all of it, in a line each."""
    ends: dict[str, int] = {}
    for name, tensor in sorted(manifest.dense.items(), key=lambda item: item[1].offset):
        size = math.prod(tensor.shape)
        if size:
            if tensor.offset < ends.get(tensor.path, 0):
                yield f"dense tensor {name!r} has elements of array {tensor.path} that another tensor has"
            ends[tensor.path] = tensor.offset + size
