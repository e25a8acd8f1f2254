"""The errors are an interface: tree, kinds and details are pinned, and they cross process boundaries."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from cnr_store import errors
from cnr_store.errors import BadInput, CnrStoreError, NotFound

# (name, parent, kind) in the order of introduction. Append only: scripts key on kinds, handlers on classes.
TREE = [
    ("CnrStoreError", "Exception", "error"),
    ("NotFound", "CnrStoreError", "not_found"),
    ("NotAStore", "NotFound", "not_a_store"),
    ("VersionNotFound", "NotFound", "version_not_found"),
    ("VersionExpired", "NotFound", "version_expired"),
    ("TableNotFound", "NotFound", "table_not_found"),
    ("TagNotFound", "NotFound", "tag_not_found"),
    ("BadInput", "CnrStoreError", "bad_input"),
    ("BadName", "BadInput", "bad_name"),
    ("BadShape", "BadInput", "bad_shape"),
    ("BadDtype", "BadInput", "bad_dtype"),
    ("BadRowIds", "BadInput", "bad_row_ids"),
    ("NonFiniteValues", "BadInput", "non_finite_values"),
    ("Conflict", "CnrStoreError", "conflict"),
    ("Fenced", "Conflict", "fenced"),
    ("TransactionAborted", "Conflict", "transaction_aborted"),
    ("DoesNotApply", "Conflict", "does_not_apply"),
    ("TagExists", "Conflict", "tag_exists"),
    ("StoreExists", "Conflict", "store_exists"),
    ("SaveInProgress", "Conflict", "save_in_progress"),
    ("CommitStateUnknown", "Conflict", "commit_state_unknown"),
    ("CorruptStore", "CnrStoreError", "corrupt_store"),
    ("CorruptRecord", "CorruptStore", "corrupt_record"),
    ("CorruptObject", "CorruptStore", "corrupt_object"),
    ("MissingObject", "CorruptStore", "missing_object"),
    ("StorageFailure", "CnrStoreError", "storage_failure"),
    ("AccessDenied", "StorageFailure", "access_denied"),
    ("UnsafeBackend", "StorageFailure", "unsafe_backend"),
    ("WrongClock", "StorageFailure", "wrong_clock"),
    ("Unsupported", "CnrStoreError", "unsupported"),
    ("NewerFormat", "Unsupported", "newer_format"),
    ("UnknownFeature", "Unsupported", "unknown_feature"),
    ("ReadOnlyStore", "Unsupported", "read_only_store"),
    ("MissingDependency", "Unsupported", "missing_dependency"),
    ("BackgroundSaveFailed", "CnrStoreError", "background_save_failed"),
    ("RankFailed", "CnrStoreError", "rank_failed"),
    ("RankLost", "RankFailed", "rank_lost"),
    ("ChannelNotFound", "NotFound", "channel_not_found"),
    ("BranchNotFound", "NotFound", "branch_not_found"),
    ("BranchExists", "Conflict", "branch_exists"),
    ("CursorExpired", "VersionExpired", "cursor_expired"),
    ("VersionRefused", "CnrStoreError", "version_refused"),
    ("MemoryMoved", "BadInput", "memory_moved"),
    ("UnsupportedModule", "Unsupported", "unsupported_module"),
    ("PathExists", "Conflict", "path_exists"),
]

# Second bases: what a caller who does not know this library would catch.
BUILTIN_BASES = {"NotFound": KeyError, "BadInput": ValueError}

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, CnrStoreError)]
DETAILS = {"path": "data/x/rows", "table": "user", "version": 0, "expected": [4096, 8], "found": [4000, 8]}


def test_tree_and_kinds_are_the_pinned_ones() -> None:
    built = {(cls.__name__, cls.__bases__[0].__name__, cls.kind) for cls in CLASSES}

    assert built == set(TREE)


def test_every_class_has_a_kind_of_its_own() -> None:
    without = [cls.__name__ for cls in CLASSES if "kind" not in vars(cls)]
    kinds = [cls.kind for cls in CLASSES]

    assert without == []
    assert len(set(kinds)) == len(kinds)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", kind) for kind in kinds)


def test_builtin_bases_are_the_pinned_ones() -> None:
    extra = {cls.__name__: cls.__bases__[1] for cls in CLASSES if len(cls.__bases__) > 1}

    assert extra == BUILTIN_BASES


def test_docstring_draws_the_tree_of_the_classes() -> None:
    # The depth of a line is where its name starts; the root stands at the margin of the literal block.
    drawn: set[tuple[str, str]] = set()
    ancestors: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    [│├└─ ]*([A-Z]\w+)\b", line)
        if not match:
            continue
        depth, name = match.start(1), match.group(1)
        while ancestors and ancestors[-1][0] >= depth:
            ancestors.pop()
        drawn.add((name, ancestors[-1][1] if ancestors else "Exception"))
        ancestors.append((depth, name))

    assert drawn == {(name, parent) for name, parent, _ in TREE}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_message_is_shown_as_it_was_written(cls: type[CnrStoreError]) -> None:
    # KeyError shows the repr of its argument; a sentence in quotes is not what a user should read.
    error = cls("table 'user' is not here")

    assert str(error) == error.message == "table 'user' is not here"
    assert error.args == ("table 'user' is not here",)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("trip", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_round_trip_keeps_type_message_and_details(cls: type[CnrStoreError], trip) -> None:
    error = cls("what, where, found, what to do", **DETAILS)

    again = trip(error)

    assert type(again) is cls
    assert again.message == error.message
    assert again.details() == DETAILS
    assert again.args == error.args


def test_details_hold_only_what_applies() -> None:
    assert NotFound("nothing known").details() == {}
    assert BadInput("zero is a value", version=0, expected=False, found="").details() == {
        "version": 0,
        "expected": False,
        "found": "",
    }


def test_details_are_attributes_and_none_when_they_do_not_apply() -> None:
    error = CnrStoreError("short", table="user")

    assert error.table == "user"
    assert (error.path, error.version, error.expected, error.found) == (None, None, None, None)


def test_details_are_given_by_keyword() -> None:
    with pytest.raises(TypeError):
        CnrStoreError("message", "data/x")  # type: ignore[misc]
