"""Fold a contiguous run of a chain into one segment, exactly, beside live writers.

A *run* is a contiguous stretch of a chain's segments, a *piece* is one part of the result, a *task* is what one worker
folds and writes. Deciding is pure (`plan`, `tasks`); folding streams, one chunk of the result at a time (`fold`).
"""
