"""Exit codes, and the conversion of errors to a line of text or a JSON document.

Prints a traceback only with ``--debug``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from cnr_store import (
    BackgroundSaveFailed,
    BadInput,
    CnrStoreError,
    Conflict,
    CorruptStore,
    NotFound,
    RankFailed,
    StorageFailure,
    Unsupported,
    VersionRefused,
)
from cnr_store_tools.text import one_line


class ExitCode(IntEnum):
    """The exit code of a command, for scripts. Codes are append-only."""

    OK = 0
    """Done."""
    PROBLEMS = 1
    """``verify`` or ``serve-demo`` found problems, or ``repair`` has something to do."""
    USAGE = 2
    """The arguments are not a valid command."""
    NOT_FOUND = 3
    """No such store, version, table, tag or file."""
    BAD_INPUT = 4
    """An argument or a file cannot be used; nothing was written."""
    CONFLICT = 5
    """Another process changed the store first, or the thing to create exists."""
    CORRUPT = 6
    """Stored data contradicts itself."""
    STORAGE = 7
    """The backend or the disk failed, or refused access."""
    UNSUPPORTED = 8
    """A newer or another program, or an optional package, is needed."""
    UNFINISHED = 9
    """The time limit was reached; the next run continues."""
    INTERNAL = 70
    """A bug of this program."""
    INTERRUPTED = 130
    """Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of the output has closed it."""


_BY_CLASS: tuple[tuple[type[CnrStoreError], ExitCode], ...] = (
    (NotFound, ExitCode.NOT_FOUND),
    (BadInput, ExitCode.BAD_INPUT),
    (Conflict, ExitCode.CONFLICT),
    (CorruptStore, ExitCode.CORRUPT),
    (StorageFailure, ExitCode.STORAGE),
    (BackgroundSaveFailed, ExitCode.STORAGE),
    (VersionRefused, ExitCode.CONFLICT),
    (RankFailed, ExitCode.CONFLICT),
    (Unsupported, ExitCode.UNSUPPORTED),
)


def exit_code(error: CnrStoreError) -> ExitCode:
    """Return the exit code of an error of the library."""
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), ExitCode.INTERNAL)


def guarded(command: Callable[[], Any], *, as_json: bool, debug: bool) -> int:
    """Run a command and return its exit code; print errors instead of raising them."""
    try:
        result = command()
        sys.stdout.flush()
    except CnrStoreError as error:
        return _fail(exit_code(error), error.kind, error.message, error.details(), as_json=as_json, debug=debug)
    except typer.Abort:
        result = ExitCode.INTERRUPTED
    except KeyboardInterrupt:
        result = ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno == errno.EPIPE:
            # Python flushes stdout again at exit; that must not raise.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.BROKEN_PIPE
        return _fail(ExitCode.STORAGE, "os_error", str(error), {}, as_json=as_json, debug=debug)
    except Exception as error:  # noqa: BLE001 - users get a message, not a traceback
        if hasattr(error, "format_message"):
            message = error.format_message()
            command_path = getattr(getattr(error, "ctx", None), "command_path", "cnr")
            hint = f"{message.rstrip('.')}; see `{command_path} --help`"
            return _fail(ExitCode.USAGE, "usage", hint, {}, as_json=as_json, debug=debug)
        what = f"internal error: {type(error).__name__}: {error}; this is a bug, --debug prints the traceback"
        return _fail(ExitCode.INTERNAL, "internal", what, {}, as_json=as_json, debug=debug)
    if result == ExitCode.INTERRUPTED:
        return _fail(ExitCode.INTERRUPTED, "interrupted", "interrupted", {}, as_json=as_json, debug=False)
    return result if isinstance(result, int) else ExitCode.OK


def _fail(code: ExitCode, kind: str, message: str, details: dict[str, Any], *, as_json: bool, debug: bool) -> ExitCode:
    if debug:
        traceback.print_exc(file=sys.stderr)
    if as_json:
        document = {"error": {"kind": kind, "message": message, "details": details, "exit_code": int(code)}}
        sys.stdout.write(json.dumps(document, default=str) + "\n")
    else:
        sys.stderr.write(f"error: {one_line(message)}\n")
    return code


class GuardedGroup(TyperGroup):
    """The group of all commands; `guarded` handles all their errors."""

    def main(  # type: ignore[override] # narrower than click's overloads, which differ only by standalone_mode
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command in ``args`` (None: the process's arguments), and exit with its code."""
        given = list(sys.argv[1:] if args is None else args)
        words = [word for word in given if word != "--debug"]
        code = guarded(
            lambda: super(GuardedGroup, self).main(words, prog_name or "cnr", complete_var, False, **extra),
            as_json="--json" in given,
            debug="--debug" in given,
        )
        if standalone_mode:
            sys.exit(int(code))
        return code
