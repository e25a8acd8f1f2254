"""Updates of served tables: records decide which rows can differ; those are read and become an overlay."""
