"""How large and how deep documents of the format may be, and what is in them (spec, section 3.6).

Of an object of a segment nobody reads more than its inventory says (`cnr_store.storage.read_verified`).
"""

MAX_NESTING = 64
"""Objects and arrays that lie in each other in a document; of documents of segments `MAX_TREE_NESTING`."""

MAX_TREE_NESTING = 256
"""Three for each of the 64 levels of a tree, and what a leaf has (spec, section 4.7)."""

MAX_USER_NESTING = 32
"""Of ``user`` of a record, and of scalars: plain JSON that a caller brings."""

MAX_RECORD_BYTES = 64 * 1024
"""A commit record: one request on every backend."""

MAX_SMALL_BYTES = 64 * 1024
"""A document without long lists: ``cnr.json``, the root's ``zarr.json``, hints, ``relay.json``, leases, cursors."""

MAX_LISTS_BYTES = 64 * 1024 * 1024
"""Documents with lists of versions, segments or tasks: side objects, ``relay/trims.json``, ``leases/compact.json``."""

MAX_INLINE_BYTES = 8 * 1024
"""The lists of a record that has no side objects."""

MAX_CHANGES_BYTES = 2 * 1024
"""What a record itself adds to and removes from the lists of its side objects: each record repeats it."""

MAX_LAYERS = 16
"""Side objects of one record: each is larger than `MAX_CHANGES_BYTES`, and has twice the bytes of the next, or more."""

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
"""A manifest or a receipt, whose inventory grows with the state, and a document in a segment: as JSON, and stored."""

MAX_SEPARATORS = 1 << 24
"""Commas and opening brackets in the JSON text of such a document: each value but the first follows one, or a name.

A few kilobytes of zstd hold any number of values, and in memory each takes some 60 bytes.
"""

MAX_OBJECT_BYTES = MAX_MANIFEST_BYTES
"""An object that an inventory lists: a document, or the largest chunk and what its codec may add."""

MAX_INTEGER = 2**53 - 1
"""Largest integer of a document, but for row ids: every JSON reader holds it exactly."""

MAX_ELEMENTS = 1 << 50
"""Most elements of a table or array."""

MAX_DIM = 1 << 20
"""Most columns of a table."""

MAX_SLOTS = 64
"""Most slots of a table."""

MAX_SHIFT = 31
"""Most halvings of a generation's scale."""

MAX_SHIFT_IN_CHAIN = 8
"""Halvings between the segments of a chain: differences of codes of the coarsest fit int32 in the finest's unit."""

MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""Largest finite float32."""

MIN_SCALE, MAX_SCALE = 2.0**-126, MAX_FLOAT32 / 2.0**22
"""The scales that decode every code to a finite, normal number or zero."""

MAX_CHUNK_ROWS = 1 << 20
"""Most rows of a chunk."""

CHUNK_BYTES = 8 * 1024 * 1024
"""Most bytes of a decoded chunk of weights, of dense tensors and of the ids of deleted rows, unless it is one row."""

MAX_CHUNK_BYTES = 16 * CHUNK_BYTES
"""Most bytes of any other decoded chunk: slots beside codes of 2 bits have 16 times their bytes."""

SHARD_BYTES = 8 * CHUNK_BYTES
"""Most bytes of the decoded chunks of a shard that a writer makes."""

SHARD_CHUNKS = 8
"""An array of so many chunks is stored in shards: below, each chunk is an object that need not wait for others."""

MAX_SHARD_CHUNKS = 1024
"""Most chunks of a shard: its index has 16 bytes for each."""

MAX_DIMENSIONS = 64
"""Most dimensions of a dense tensor."""
