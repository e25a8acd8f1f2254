"""Imports tensors into a store, and exports them to files that other programs read.

Never loads a file format that can run code. Open `exporting` or `importing` first.
"""
