"""What the library needs of the machine: threads, compiled kernels, ranks, local files, checks of arguments.

Never knows tables, documents or stores. Open `threads` first.
"""
