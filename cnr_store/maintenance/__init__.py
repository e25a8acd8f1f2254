"""Maintain a store: compaction, garbage collection, verification, repair, status.

It never changes a value that a version reads. Open `maintain` first (one run of everything), then the package of the
job.
"""
