"""One segment: everything that one transaction wrote, as arrays and a manifest (spec, section 4).

Never reads the log, never looks at a second segment. Open `writer` and `reader` first, then `codes` (the codes of a
row range) and `rows` (row ids).
"""
