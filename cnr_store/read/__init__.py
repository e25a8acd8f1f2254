"""Read one version: which chunks of its chain are needed, and how they become floats.

Never writes, never chooses a version. Open `snapshot` first, then `plan` (which chunks) and `replay` (decode, apply).
"""
