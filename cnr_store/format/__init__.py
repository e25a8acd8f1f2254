"""The documents and arrays of the format: their keys, types, checks and bytes.

Never does I/O, never imports zarr's stores, never decides what to write. Open `records` first (the documents as types),
then `layout` (the keys) and `arrays` (one Zarr array as bytes; its integers as `digits`).
"""
