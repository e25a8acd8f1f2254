"""Write one version: a transaction encodes rows into a segment, a commit makes it visible.

Never deletes what a version can need, never reads a whole table to write a part of it. Open `transaction` first, then
`staged_tables` (what it was given), `delta_rows` and `baseline_rows` (how rows become row lists) and `commit`.
"""
