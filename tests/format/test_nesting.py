"""How deep documents nest: one limit for every caller, however deep its stack is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import BadInput, Store, TableOptions, repair_store, verify_store
from cnr_store.errors import CorruptRecord
from cnr_store.format import documents
from cnr_store.format.commit_record import encode_record
from cnr_store.format.document_tree import MAX_DEPTH
from cnr_store.format.documents import nesting_of, nests_deeper
from cnr_store.format.layout import commit_key
from cnr_store.format.limits import MAX_NESTING, MAX_USER_NESTING

Result = TypeVar("Result")
SPARE_FRAMES = 150


def nested(levels: int) -> Any:
    """Lists and objects in turn, as many in each other."""
    value: Any = None
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def deep_in_the_stack(call: Callable[[], Result]) -> Result:
    """Call where few frames are left: enough for the library, too few for a parser of a deep document."""

    def down(frames: int) -> Result:
        return down(frames - 1) if frames else call()

    used = 0
    frame = sys._getframe()
    while frame.f_back is not None:
        used, frame = used + 1, frame.f_back
    return down(sys.getrecursionlimit() - used - SPARE_FRAMES)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(str(tmp_path / "store"), threads=1)
    with made.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    return made


def depth_of(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth_of, inside), default=0)


words = st.text(st.sampled_from('[]{}"\\ax\n'), max_size=6)
trees = st.recursive(
    st.none() | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("block_bytes", [1, 2, 5, 1 << 20])
def test_bytes_tell_how_deep_a_document_nests(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_BLOCK_BYTES", block_bytes)

    @given(trees)
    def check(tree: Any) -> None:
        depth = depth_of(tree)
        assert nesting_of(msgspec.json.encode(tree), enough=-1) == depth
        assert not nests_deeper(tree, depth)
        assert depth == 0 or nests_deeper(tree, depth - 1)

    check()


@pytest.mark.parametrize("levels", [MAX_USER_NESTING, 100, 950, 100_000])
def test_what_a_caller_brings_and_nests_too_deep_is_refused(store: Store, levels: int) -> None:
    with store.writer() as writer:
        writer.restore()
        with writer.begin(2) as txn:
            for bring in (lambda deep: txn.commit(user=deep), txn.put_scalars):
                with pytest.raises(BadInput, match="deeper than 32"):
                    bring({"a": nested(levels)})

    assert store.snapshot().step == 2, "the transaction went on"


def test_what_contains_itself_is_refused(store: Store) -> None:
    loop: list[Any] = []
    loop.append(loop)

    with store.writer() as writer, writer.begin(2, kind="baseline") as txn:
        txn.write_table("t", np.ones((4, 2), np.float32))
        with pytest.raises(BadInput, match="contains itself"):
            txn.commit(user={"a": loop})


def test_the_deepest_record_is_read_by_callers_deep_in_the_stack(store: Store) -> None:
    """At 930 levels it was a commit to its writer, and a torn record to code 50 frames further down."""
    user = {"a": nested(MAX_USER_NESTING - 1)}
    with store.writer() as writer:
        writer.restore()
        with writer.begin(2) as txn:
            version = txn.commit(user=user)

    assert deep_in_the_stack(lambda: store.head().record.user) == user
    assert store.latest_version() == version
    assert repair_store(store, dry_run=True).actions == ()


@pytest.mark.parametrize("levels", [MAX_NESTING - 1, 900, 30_000])
def test_a_record_that_nests_too_deep_is_refused_wherever_it_is_read(store: Store, levels: int) -> None:
    head = store.head()
    after = msgspec.structs.replace(head.record, v=head.record.v + 1, kind="tag", parent_digest=head.digest)
    text = b"[" * levels + b"]" * levels
    data = encode_record(msgspec.structs.replace(after, user={"a": "deep"})).replace(b'"deep"', text)
    store.storage.create(commit_key(after.v), data)

    for call in (lambda: store.head(), lambda: deep_in_the_stack(store.head)):
        with pytest.raises(CorruptRecord, match=f"nests {levels + 2} levels deep"):
            call()
    assert [problem.kind for problem in verify_store(store).problems] == ["corrupt_record"]


def test_the_deepest_document_is_read(store: Store) -> None:
    value: Any = np.arange(3)
    for _ in range(MAX_DEPTH):
        value = {1: value}

    with store.writer() as writer, writer.begin(2, kind="baseline") as txn:
        txn.write_table("t", np.ones((4, 2), np.float32))
        txn.put_document("reader/0", value)

    found = store.snapshot().read_document("reader/0")
    for _ in range(MAX_DEPTH):
        found = found[1]
    assert found.tolist() == [0, 1, 2]
    assert verify_store(store, deep=True).is_sound
