"""The commit log: the records that change what readers see, and what keeps or expires them (spec, sections 3 and 7).

Never knows what a table is or how rows are stored. Open `commit_log` first, then `rebase` (a record that lost its
position), `branches`, `leases` and `retention`.
"""
