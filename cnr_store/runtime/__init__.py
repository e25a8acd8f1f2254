"""Services of the machine: threads, compiled kernels, ranks, local files; and checks of arguments.

It knows nothing about tables, documents or stores. Open `threads` first.
"""
