"""Exit codes, one-line errors, and secrets that are never printed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cnr_store import BadInput, Store, errors
from cnr_store_tools import exits
from cnr_store_tools.exits import ExitCode, exit_code, full_message, guarded
from cnr_store_tools.options import parse_storage_options
from tests.tools.cli_runner import Outcome, RunCode, cnr
from tests.tools.sample_store import build_store, flip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "store"
    build_store(root).close()
    return root


def assert_one_line(done: Outcome) -> None:
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("show", "{root}/nothing"), 3, "not_a_store"),
        (("show", "{root}", "--version", "99"), 3, "version_not_found"),
        (("show", "{root}", "--step", "11"), 3, "version_not_found"),
        (("show", "{root}", "--tag", "none"), 3, "tag_not_found"),
        (("show", "{root}", "--tag", "good", "--version", "3"), 4, "bad_input"),
        (("verify", "{root}", "--version", "99"), 3, "version_not_found"),
        (("verify", "{root}", "--version", "3", "--all"), 4, "bad_input"),
        (("export", "{root}", "{out}", "--table", "nobody*"), 3, "table_not_found"),
        (("untag", "{root}", "none"), 3, "tag_not_found"),
        (("tag", "{root}", "a\nb"), 4, "bad_name"),
        (("rollback", "{root}", "99"), 3, "version_not_found"),
        (("import", "{root}", "{out}.safetensors"), 3, "not_found"),
        (("import", "{root}", "{out}.pt"), 3, "not_found"),
        (("log", "nowhere://x"), 4, "bad_input"),
        (("log", "{root}", "--storage-option", "key=value"), 4, "bad_input"),
        (("frobnicate",), 2, "usage"),
        (("log", "{root}", "--frobnicate"), 2, "usage"),
        (("log", "{root}", "--limit", "many"), 2, "usage"),
        (("tag", "{root}"), 2, "usage"),
    ],
)
def test_error_has_its_exit_code_one_line_and_one_document(
    root: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, kind: str
) -> None:
    filled = [text.format(root=root, out=tmp_path / "out") for text in arguments]

    plain = cnr(*filled)
    as_json = cnr(*filled, "--json")

    assert plain.code == as_json.code == code
    assert_one_line(plain)
    assert as_json.err == ""
    error = as_json.document["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("export s o --format foo", "'foo' is not one of 'safetensors', 'parquet', 'npy'"),
        ("show s --version new", "'new' is not a whole number"),
        ("show s --version -3", "'-3' is not 0 or more"),
        ("import s f --step 1.5", "'1.5' is not a whole number"),
        ("compact s --max-restore-ratio much", "'much' is not a number"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_found_and_wanted(arguments: str, message: str) -> None:
    """The messages were pydantic's: "Value error, ...", "Input should be a valid integer, unable to parse ..."."""
    done = cnr(*arguments.split())

    assert done.code == 2
    assert f": {message}; see `cnr {arguments.split()[0]} --help`" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show {root} --step 11", "has no checkpoint of step 11; the nearest are 10 and 20"),
        ("show {root} --step 7", "has no checkpoint of step 7; the nearest is 10"),
        ("show {root} --version 99", "has no version 99; the newest is 6"),
    ],
)
def test_what_does_not_exist_is_told_with_what_does(root: Path, arguments: str, message: str) -> None:
    done = cnr(*arguments.format(root=root).split())

    assert done.code == 3
    assert message in done.err


def test_a_store_without_a_save_is_whole_and_has_nothing_to_export(tmp_path: Path) -> None:
    """`repair` said that no version is undamaged, with exit code 1; `export` wrote a file without a tensor."""
    Store.create(str(tmp_path / "s"), fsync=False).close()

    repaired, exported = cnr("repair", tmp_path / "s"), cnr("export", tmp_path / "s", tmp_path / "out.safetensors")

    assert (repaired.code, repaired.out) == (0, f"{tmp_path / 's'}: nothing to repair\n")
    assert exported.code == 3
    assert "nothing was saved yet at version 0, so there is nothing to export" in exported.err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("arguments", ["diff s -1 2", "rollback s -1"])
def test_a_number_that_reads_as_an_option_is_explained(arguments: str) -> None:
    """It said "No such option: -1"."""
    done = cnr(*arguments.split())

    assert done.code == 2
    assert (
        "-1 begins like an option; versions and steps are numbered from 0. Give a text like that after --" in done.err
    )


@pytest.mark.parametrize("option", [[], ["--json"]])
@pytest.mark.parametrize("words", [["log"], ["metrics"], ["relay", "target", "--once"]])
def test_a_path_that_is_no_text_is_a_wrong_argument(words: list[str], option: list[str], tmp_path: Path) -> None:
    """It was an internal error where a document or a record should name the path."""
    Store.create(str(tmp_path / "store"), fsync=False).close()
    odd = tmp_path / "s\udcff"
    (tmp_path / "store").rename(odd)

    done = cnr(words[0], odd, *words[1:], *option)

    assert done.code == 4
    assert "is not valid Unicode; rename the file or folder" in (done.err or done.document["error"]["message"])
    with pytest.raises(BadInput, match="is not valid Unicode; rename the file or folder"):
        Store.open(str(odd))


def test_damaged_identity_is_corrupt(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "s"), fsync=False).close()
    identity = tmp_path / "s" / "cnr.json"
    identity.write_bytes(flip(identity.read_bytes(), 0))

    done = cnr("verify", tmp_path / "s")

    assert done.code == 6
    assert_one_line(done)


def test_newer_format_is_unsupported(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "s"), fsync=False).close()
    identity = tmp_path / "s" / "cnr.json"
    identity.write_text(identity.read_text().replace('"major":1', '"major":9'))

    assert cnr("log", tmp_path / "s").code == 8


def test_unreadable_folder_is_a_storage_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    done = cnr("init", tmp_path / "file" / "store")

    assert done.code == 7
    assert_one_line(done)


def test_every_error_of_the_library_has_a_code_of_its_own_group() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and value is not errors.CnrStoreError]
    codes = {kind.__name__: exit_code(kind("x")) for kind in kinds if issubclass(kind, errors.CnrStoreError)}

    assert ExitCode.INTERNAL not in codes.values()
    assert codes["CommitStateUnknown"] == ExitCode.CONFLICT
    assert codes["MissingDependency"] == ExitCode.UNSUPPORTED
    assert codes["AccessDenied"] == ExitCode.STORAGE


def test_unexpected_error_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise ZeroDivisionError("a bug")

    code = guarded(fails, as_json=False, debug=False)

    printed = capsys.readouterr()
    assert code == 70
    assert printed.err.startswith("error: internal error: ZeroDivisionError: a bug")
    assert printed.err.count("\n") == 1


def test_debug_shows_the_traceback(root: Path) -> None:
    done = cnr("show", root, "--version", "99", "--debug")

    assert done.code == 3
    assert "Traceback" in done.err


def test_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert guarded(interrupted, as_json=False, debug=False) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_an_interrupt_while_the_command_is_imported_prints_nothing(tmp_path: Path) -> None:
    """It printed a traceback from within an import. The shell's code of the signal is 130, too."""
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from cnr_store_tools.__main__ import main; main()"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_output_that_cannot_be_written_is_an_error_with_its_own_code(
    run_code: RunCode, root: Path, option: list[str]
) -> None:
    """With --json it was a traceback and 1; beside other work it was once 120, which Python's last flush gives."""
    program = "import os, sys; os.close(1); os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    argv = ["cnr", "log", str(root), *option]

    done = run_code(f"{program}; from cnr_store_tools.cli import main; sys.argv = {argv!r}; main()")

    assert done.returncode == exits.ExitCode.STORAGE
    assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_a_closed_output_is_no_defect(run_code: RunCode, root: Path) -> None:
    """A process that was started without standard output printed a traceback."""
    for argv in (["log", str(root)], ["log", str(root), "--json"], ["log", "nowhere", "--json"]):
        program = "import sys; sys.stdout = sys.stderr = None; from cnr_store_tools.cli import main"

        done = run_code(f"{program}; sys.argv = {['cnr', *argv]!r}; main()")

        assert (done.returncode, done.stdout, done.stderr) == (3 if "nowhere" in argv else 0, "", "")


@pytest.mark.parametrize("command", ["log", "--help", "help of log", "--version"])
def test_a_closed_pipe_ends_with_141_and_no_message(run_code: RunCode, root: Path, command: str) -> None:
    """The help of the whole program, which is printed while arguments are parsed, once ended with 1."""
    argv = {"log": ["log", str(root)], "help of log": ["log", "--help"]}.get(command, [command])
    program = "import os, sys; receiver, sender = os.pipe(); os.close(receiver); os.dup2(sender, 1)"

    done = run_code(f"{program}; from cnr_store_tools.cli import main; sys.argv = {['cnr', *argv]!r}; main()")

    assert (done.returncode, done.stderr) == (exits.ExitCode.BROKEN_PIPE, "")


def test_a_failure_names_its_cause_in_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise errors.StorageFailure("reading 'x' failed") from ConnectionRefusedError("nobody listens")

    assert guarded(fails, as_json=False, debug=False) == 7
    assert capsys.readouterr().err == "error: reading 'x' failed: ConnectionRefusedError: nobody listens\n"
    assert guarded(fails, as_json=True, debug=False) == 7
    assert '"cause": "ConnectionRefusedError: nobody listens"' in capsys.readouterr().out


def test_a_cause_is_named_once() -> None:
    cause = ConnectionRefusedError("nobody listens")
    storage = errors.StorageFailure("a read failed (ConnectionRefusedError)")
    missing = errors.MissingDependency("install x")
    full = errors.StorageFailure("writing 'x' failed (ConnectionRefusedError, ECONNREFUSED)")
    full.__cause__ = cause
    assert full_message(full) == "writing 'x' failed (ConnectionRefusedError, ECONNREFUSED): nobody listens"
    torn, path = errors.CorruptRecord("record 7: expected ':'"), errors.BadInput("cannot write p: No such file")
    storage.__cause__, missing.__cause__ = cause, ModuleNotFoundError("No module named 'x'")
    torn.__cause__, path.__cause__ = ValueError("expected ':'"), FileNotFoundError(2, "No such file", "p")

    assert full_message(storage) == "a read failed (ConnectionRefusedError): nobody listens"
    assert full_message(missing) == "install x"
    absent = errors.NotFound("no export: no tensors.json")
    absent.__cause__ = FileNotFoundError(2, "No such file", "tensors.json")
    assert full_message(absent) == "no export: no tensors.json"
    assert full_message(torn) == "record 7: expected ':'"
    assert full_message(path) == "cannot write p: No such file"


def test_a_missing_package_is_named_with_what_installs_it(run_code: RunCode, root: Path) -> None:
    hide = "import sys; sys.modules['torch'] = None; from cnr_store_tools.cli import main"

    done = run_code(f"{hide}; sys.argv = ['cnr', 'demo', '--store', {str(root / 'demo')!r}]; main()")

    assert done.returncode == exits.ExitCode.UNSUPPORTED
    assert done.stderr == ("error: this command needs torch, which is not installed: pip install 'cnr-store[train]'\n")


def test_version_and_completion_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cnr("--version").out.startswith("cnr-store ")
    monkeypatch.setenv("_CNR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cnr chan")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert set(cnr().out.split()) == {"changes", "channel", "channels"}


def test_verbose_prints_the_log_of_the_library(root: Path, tmp_path: Path) -> None:
    cnr("export", root, tmp_path / "x.safetensors", "--version", "3")
    done = cnr("import", tmp_path / "copy", tmp_path / "x.safetensors", "--create", "-v")
    quiet = cnr("import", tmp_path / "copy", tmp_path / "x.safetensors")

    assert (done.code, quiet.code) == (0, 0)
    assert " INFO cnr_store." in done.err
    assert quiet.err == ""


def test_verbose_says_what_is_merged_and_deleted(root: Path, tmp_path: Path) -> None:
    own = shutil.copytree(root, tmp_path / "own")
    merged = cnr("compact", own, "--max-chain", "1", "-v")
    deleted = cnr("gc", own, "--keep-last", "1", "--grace", "0s", "--force", "-v")

    assert (merged.code, deleted.code) == (0, 0)
    assert re.search(r": merging \d+ segments, \d+ bytes, into one baseline: ", merged.err)
    assert re.search(r": wrote record \d+ \(compact, step \d+\)", merged.err)
    assert re.search(r": deleted segment \S+, \d+ bytes: ", deleted.err)


def test_storage_options_are_values_and_nested_by_dots() -> None:
    found = parse_storage_options(["anon=false", "key=a=b", "client_kwargs.endpoint_url=http://x", 'extra={"a": 1}'])

    assert found == {
        "anon": False, "key": "a=b", "client_kwargs": {"endpoint_url": "http://x"}, "extra": {"a": 1},
    }  # fmt: skip


@pytest.mark.parametrize("text", ["hunter2", "=hunter2", "a..b=hunter2", "json={hunter2"])
def test_malformed_storage_option_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_storage_options([text])

    assert "hunter2" not in str(caught.value)


def test_storage_options_are_never_printed(tmp_path: Path) -> None:
    secret = "hunter2secret"
    for arguments in (("log", tmp_path / "s"), ("init", "s3://bucket/x"), ("log", "memory://none")):
        for extra in ((), ("--json",), ("--debug",)):
            done = cnr(
                *arguments, "--storage-option", f"secret={secret}", "--storage-option", "key=user",
                "--storage-option", "client_kwargs.endpoint_url=http://127.0.0.1:1",
                "--storage-option", "config_kwargs.retries={\"max_attempts\": 1}", *extra,
            )  # fmt: skip
            assert done.code != 0
            assert secret not in done.out + done.err


def test_installed_command_runs(root: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("cnr")), "log", str(root), "--limit", "1", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0
    assert '"kind": "tag"' in done.stdout


def test_without_a_command_the_help_is_printed() -> None:
    done = cnr()

    assert done.code == 0
    assert "rollback" in done.out


def test_the_list_of_commands_cuts_no_sentence_off_at_80_columns() -> None:
    _, commands = cnr("--help", columns=80).out.split("Commands:")

    assert "..." not in commands
