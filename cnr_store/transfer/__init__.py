"""Imports tensors into a store, exports them to files that other programs read, and copies a store to another place.

Never loads a file format that can run code. Open `exporting`, `importing` or `copying` first.
"""
