"""Limits of the format: sizes and nesting of documents, and ranges of their fields (spec, section 3.6).

Readers never read more of a segment's object than its inventory size (`cnr_store.storage.read_verified`).
"""

MAX_NESTING = 64
"""Nested objects and arrays in a document; documents saved by a user may have `MAX_TREE_NESTING`."""

MAX_TREE_NESTING = 256
"""Nested objects and arrays in a saved document: three per level of its 64, and those of a leaf (spec, 4.7)."""

MAX_USER_NESTING = 32
"""Nesting of the caller's plain JSON: ``user`` of a record, and scalars."""

MAX_RECORD_BYTES = 64 * 1024
"""Most bytes of a commit record, so that one request reads it on every backend."""

MAX_SMALL_BYTES = 64 * 1024
"""Most bytes of ``cnr.json``, the root's ``zarr.json``, hints, ``relay.json``, leases and cursors."""

MAX_LISTS_BYTES = 64 * 1024 * 1024
"""Most bytes of documents with long lists: side objects, ``relay/trims.json``, ``leases/compact.json``."""

MAX_INLINE_BYTES = 8 * 1024
"""Most bytes of the lists of a record without side objects."""

MAX_CHANGES_BYTES = 2 * 1024
"""Most bytes of a record's own changes to the lists of its side objects; later records repeat them."""

MAX_LAYERS = 16
"""Most side objects of a record: each has more than `MAX_CHANGES_BYTES`, and at least twice the bytes of the next."""

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
"""Most bytes of a manifest, a receipt or a saved document, both as JSON and as stored."""

MAX_OWN_DOCUMENT_BYTES = 2 * 1024
"""Most bytes, as JSON, of a saved document that the manifest itself has. It nests no deeper than `MAX_USER_NESTING`.

Who reads a manifest reads it, also who serves: states of generators are larger.
"""

MAX_SEPARATORS = 1 << 24
"""Commas and opening brackets in the JSON text of such a document: each value but the first follows one, or a name.

A few kilobytes of zstd hold any number of values, and in memory each takes some 60 bytes.
"""

MAX_OBJECT_BYTES = MAX_MANIFEST_BYTES
"""Most bytes of an object in an inventory."""

MAX_INTEGER = 2**53 - 1
"""Largest integer in a document, except row ids: every JSON parser reads it exactly."""

MAX_ELEMENTS = 1 << 50
"""Most elements of a table or array."""

MAX_DIM = 1 << 20
"""Most columns of a table."""

MAX_SLOTS = 64
"""Most slots of a table."""

MAX_SHIFT = 31
"""Most halvings of a generation's scale."""

MAX_SHIFT_IN_CHAIN = 8
"""Most halvings within a chain: so differences of the coarsest codes fit int32 in units of the finest."""

MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""Largest finite float32."""

MIN_SCALE, MAX_SCALE = 2.0**-126, MAX_FLOAT32 / 2.0**22
"""Scales with which every code decodes to zero or a finite, normal float32."""

MAX_CHUNK_ROWS = 1 << 20
"""Most rows of a chunk."""

CHUNK_BYTES = 8 * 1024 * 1024
"""Most bytes of a decoded chunk of weights, dense tensors or ids of deleted rows, unless the chunk is one row."""

MAX_CHUNK_BYTES = 16 * CHUNK_BYTES
"""Most bytes of any other decoded chunk: slots beside codes of 2 bits have 16 times their bytes."""

SHARD_BYTES = 8 * CHUNK_BYTES
"""Most decoded bytes of a shard that this library writes."""

SHARD_CHUNKS = 8
"""Fewest chunks of an array in shards, or those of a full shard if it has fewer. Below, each chunk is an object."""

MAX_SHARD_CHUNKS = 1024
"""Most chunks of a shard, whose index has 16 bytes per chunk."""

MAX_DIMENSIONS = 64
"""Most dimensions of a dense tensor."""
