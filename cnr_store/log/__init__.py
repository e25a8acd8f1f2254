"""The commit log: records that change what readers see, and their retention (spec, sections 3 and 7).

It knows nothing about tables or stored rows. Open `commit_log` first, then `rebase` (a record that lost its position),
`branches`, `leases` and `retention`.
"""
