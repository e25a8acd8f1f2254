"""Tensors into a store and out of it, as files that other programs write and read.

Never loads a file format that can run code. Open `exporting` or `importing` first.
"""
