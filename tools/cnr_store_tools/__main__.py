"""The entry point of `cnr`, and of `python -m cnr_store_tools`.

Apart from the commands, because to import them takes a second, in which Ctrl-C would print a traceback.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Import the commands, run the one that this process was given, and exit."""
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if waits:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process at once: nothing has been begun
    from cnr_store_tools import cli

    if waits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
