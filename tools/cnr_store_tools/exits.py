"""Exit codes, and the conversion of errors to a line of text or a JSON document.

Prints a traceback only with ``--debug``.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from cnr_store.errors import MissingDependency
from cnr_store_tools.text import one_line


class ExitCode(IntEnum):
    """The exit code of a command, for scripts. Codes are append-only."""

    OK = 0
    """Done."""
    PROBLEMS = 1
    """``verify`` found problems, or ``repair`` has something to do."""
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
    """A relay or a web server is only read; or a newer or another program, or an optional package, is needed."""
    UNFINISHED = 9
    """The time limit was reached; the next run continues."""
    INTERNAL = 70
    """A bug of this program."""
    INTERRUPTED = 130
    """Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of the output has closed it."""
    TERMINATED = 143
    """SIGTERM, as a shell reports it; ``metrics --listen`` ends with 0."""


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
    except CnrStoreError as error:
        details = error.details() | ({} if error.__cause__ is None else {"cause": cause_text(error.__cause__)})
        return _fail(exit_code(error), error.kind, full_message(error), details, as_json=as_json, debug=debug)
    except typer.Abort:
        result = ExitCode.INTERRUPTED
    except KeyboardInterrupt:
        result = ExitCode.INTERRUPTED
    except _ReaderGone:
        _discard_unwritable()
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        return _fail(ExitCode.STORAGE, "os_error", str(error), {}, as_json=as_json, debug=debug)
    except ModuleNotFoundError as error:
        return _fail(
            ExitCode.UNSUPPORTED, MissingDependency.kind, missing_text(error.name), {"found": error.name},
            as_json=as_json, debug=debug,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - users get a message, not a traceback
        if hasattr(error, "format_message"):
            message = _usage_text(error)
            command_path = getattr(getattr(error, "ctx", None), "command_path", "cnr")
            hint = f"{message.rstrip('.')}; see `{command_path} --help`"
            return _fail(ExitCode.USAGE, "usage", hint, {}, as_json=as_json, debug=debug)
        what = f"internal error: {type(error).__name__}: {error}; this is a bug, --debug prints the traceback"
        return _fail(ExitCode.INTERNAL, "internal", what, {}, as_json=as_json, debug=debug)
    if result == ExitCode.INTERRUPTED:
        return _fail(ExitCode.INTERRUPTED, "interrupted", "interrupted", {}, as_json=as_json, debug=False)
    return result if isinstance(result, int) else ExitCode.OK


_WANTED = {
    "int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number",
    "greater_than_equal": "{ge} or more", "less_than_equal": "{le} or less",
}  # fmt: skip
"""What pydantic, by which newer versions of typer check values, found missing, in words for users."""


def _usage_text(error: Any) -> str:
    """Return typer's message, with what was found and what is wanted in place of pydantic's words."""
    found = getattr(error.__cause__, "errors", None)
    if found is not None:
        first = found()[0]
        wanted = _WANTED.get(first["type"])
        error.message = first["msg"].removeprefix("Value error, ")
        if wanted is not None:
            error.message = f"'{first['input']}' is not {wanted.format(**first.get('ctx', {}))}"
    option = getattr(error, "option_name", "")
    if option[:1] == "-" and option[1:2].isdigit():
        return f"{option} begins like an option; versions and steps are numbered from 0. Give a text like that after --"
    return str(error.format_message())


def _check_text(words: Sequence[str]) -> None:
    """Raise if an argument is not valid Unicode: it could not be printed, recorded, or passed to other libraries."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise BadInput(
                f"argument {word!a} is not valid Unicode; rename the file or folder", found=ascii(word)
            ) from None


_EXTRA_OF = {"torch": "train", "torchdata": "train", "triton": "gpu", "prometheus_client": "metrics"}


def missing_text(module: str | None) -> str:
    """Return which package a command lacks and how to install it.

    >>> missing_text("torch")
    "this command needs torch, which is not installed: pip install 'cnr-store[train]'"
    """
    package = (module or "a package").partition(".")[0]
    wanted = f"'cnr-store[{_EXTRA_OF[package]}]'" if package in _EXTRA_OF else package
    return f"this command needs {package}, which is not installed: pip install {wanted}"


def need(module: str) -> None:
    """Return if a module is installed; does not import it.

    Raises
    ------
    MissingDependency
    """
    if importlib.util.find_spec(module) is None:
        raise MissingDependency(missing_text(module), found=module)


def full_message(error: CnrStoreError) -> str:
    """Return the message with what it lacks of the cause: its class and its text, unless it has the text."""
    if error.__cause__ is None or isinstance(error, MissingDependency | NotFound):
        return error.message
    told = getattr(error.__cause__, "strerror", None) or one_line(str(error.__cause__)).strip()
    if told and told in error.message:
        return error.message
    cause = cause_text(error.__cause__)
    name = type(error.__cause__).__name__
    if f"({name})" in error.message or f"({name}, " in error.message:  # as the storage writes it
        cause = cause.removeprefix(name).removeprefix(": ")
    return error.message if cause in error.message else f"{error.message}: {cause}"


def cause_text(cause: BaseException) -> str:
    """Return the class and the text of an error from another library, at most 300 characters."""
    text = one_line(str(cause)).strip()
    return f"{type(cause).__name__}: {text}"[:300] if text else type(cause).__name__


@contextmanager
def log_printed(*, is_wanted: bool) -> Iterator[None]:
    """Print what the library logs, from level INFO on, to standard error while the block runs."""
    if not is_wanted:
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("cnr_store", "cnr_store_gpu", "cnr_store_tools")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def _fail(code: ExitCode, kind: str, message: str, details: dict[str, Any], *, as_json: bool, debug: bool) -> ExitCode:
    if debug:
        traceback.print_exc(file=sys.stderr)
    if as_json:
        document = {"error": {"kind": kind, "message": message, "details": details, "exit_code": int(code)}}
        try:
            sys.stdout.write(json.dumps(document, default=str) + "\n")
            sys.stdout.flush()
        except OSError:  # the output is full or gone: its error can be read at stderr only
            as_json = False
    if not as_json:
        sys.stderr.write(f"error: {one_line(message)}\n")
    _discard_unwritable()
    return code


def _discard_unwritable() -> None:
    """Discard output that cannot be written: Python flushes it again at exit, and would exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _ReaderGone(Exception):
    """The reader of the output has closed it. No OSError, because typer exits with 1 on those."""


@contextmanager
def _reader_checked() -> Iterator[None]:
    """Raise `_ReaderGone` if the block prints what nobody reads."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise _ReaderGone from error
        raise


class GuardedGroup(TyperGroup):
    """The group of all commands; `guarded` handles all their errors."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the arguments; prints the help, if they ask for it."""
        with _reader_checked():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and flush what it printed."""
        with _reader_checked():
            result = super().invoke(ctx)
            sys.stdout.flush()
        return result

    def main(  # type: ignore[override] # narrower than click's overloads, which differ only by standalone_mode
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command in ``args`` (None: the process's arguments), and exit with its code."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # the process was started with it closed
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
        given = list(sys.argv[1:] if args is None else args)
        words = [word for word in given if word not in ("--debug", "-v", "--verbose")]
        with log_printed(is_wanted="-v" in given or "--verbose" in given):

            def command() -> Any:
                _check_text(words)
                return super(GuardedGroup, self).main(words, prog_name or "cnr", complete_var, False, **extra)

            code = guarded(
                command,
                as_json="--json" in given,
                debug="--debug" in given,
            )
        if standalone_mode:
            sys.exit(int(code))
        return code
