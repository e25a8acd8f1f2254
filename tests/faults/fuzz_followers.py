"""Doors of consumers: the log grows past the damage while they follow it."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from pathlib import Path

from cnr_store import CnrStoreError, RetentionPolicy
from cnr_store.changes import changes
from cnr_store.errors import VersionNotFound
from cnr_store.relay import Relay
from cnr_store.serving import Loader, LoaderOptions
from tests.faults.fuzz_doors import READING, WRITING, Visit, Wrong, raise_first
from tests.faults.fuzz_stores import opened, put_all
from tests.support.change_copy import ChangeCopy, content_of
from tests.support.loader_checks import check_is_snapshot
from tests.support.snapshot_bytes import bytes_of


class FollowedVisit(Visit):
    """The doors of `Visit`, and those of a loader, a change stream and a relay."""

    is_rewritten = False
    """Whether a record or segment was replaced after the consumer began: then its copy matches no version."""

    def _grown(self) -> tuple[Path, Callable[[], None]]:
        """Return a store that is sound up to some version, and a function that adds the rest of the damaged one."""
        root = self.folder / f"g{self._copies}"
        self._copies += 1
        sample = self.case.sample
        versions = sorted(version for branch, version in sample.held if branch is None)
        cut = self.chance.choice(versions)
        early = {
            key: data for key, data in sample.objects.items()
            if not key.startswith(("commits/", "hint/")) or key <= f"commits/{cut:020d}.json"
        }  # fmt: skip
        put_all(root, early)

        def grow() -> None:
            later = self.case.objects.keys() | self.case.special.keys()
            changed = {
                key for key in later
                if key in self.case.special or self.case.objects[key] != early.get(key) or key not in early
            }  # fmt: skip
            for key in (changed & early.keys()) | (early.keys() - later):
                (root / key).unlink()
            self.case.put(root, changed)
            self.is_rewritten = not self.case.is_damage and self._tells_otherwise(changed & early.keys())

        return root, grow

    def _tells_otherwise(self, changed: Set[str]) -> bool:
        """Whether existing records were replaced, or a merged segment differs from the segments it was merged from."""
        compacted, before = set[str](), set[str]()
        for key in sorted(key for key in self.case.sample.objects if key.startswith("commits/")):
            try:
                record = json.loads(self.case.sample.objects[key])
            except ValueError:
                continue  # superseded
            chain = {entry["seg"] for entry in record["chain"]}
            compacted |= chain - before if record["kind"] == "compact" else set()
            before = chain
        return any(
            key.startswith("commits/") or key.split("/")[1:2] in [[name] for name in compacted] for key in changed
        )

    def loader(self) -> None:
        root, grow = (self.fresh(), None) if self.chance.random() < 0.3 else self._grown()
        kept_as = self.chance.choice(["auto", "values", "codes"])
        served = self.chance.choice([None, None, "int8", "float16"])
        with (
            opened(root) as store,
            Loader(store, threads=1, options=LoaderOptions(kept_as=kept_as, served=served)) as loader,
        ):
            version = loader.version
            if grow is not None:
                grow()
            errors = []
            for _ in range(4):
                errors.append(loader.poll().error)
                if loader.version == version and errors[-1] is None:
                    break
                version = loader.version
            with opened(root) as other:
                try:
                    if self.is_rewritten or served is not None:
                        raise VersionNotFound("nothing to compare with")
                    snapshot = other.snapshot(loader.version)
                    bytes_of(snapshot)
                except CnrStoreError:
                    raise_first(errors)
                    return
                try:
                    check_is_snapshot(loader, snapshot)
                except AssertionError as error:
                    raise Wrong(f"a loader at version {loader.version} serves something else: {error}") from error
            raise_first(errors)

    def changes(self) -> None:
        root, grow = (self.fresh(), None) if self.chance.random() < 0.3 else self._grown()
        mirror = self.chance.choice(["none", "memory"])
        with opened(root) as store, changes(store, mirror=mirror) as stream:
            copy = ChangeCopy()
            for batch in stream:
                copy.apply(batch)
            if grow is not None:
                grow()
                with changes(store, since=stream.cursor, mirror=mirror) as stream:
                    for batch in stream:
                        copy.apply(batch)
                    cursor = stream.cursor
            else:
                cursor = stream.cursor
            if cursor is None or self.is_rewritten:
                return
            with opened(root) as other:
                content = content_of(other.snapshot(cursor.version), slots=False)
            if content != copy.tables:
                raise Wrong(f"a copy kept by changes is not version {cursor.version}")

    def relay(self) -> None:
        """A relay copies a damaged store, or a damaged relay continues; the versions it shows equal the source's."""
        sample, problem = self.case.sample, None
        if sample.source is not None:
            source, near, grow = self.folder / f"source{self._copies}", self.fresh(), None
            put_all(source, sample.source)
        else:
            source, grow = (self.fresh(), None) if self.chance.random() < 0.3 else self._grown()
            near = self.folder / f"near{self._copies}"
        with opened(source) as store:
            policy = RetentionPolicy(keep_last=self.chance.choice([1, 5]))
            relay = Relay(store, str(near), policy=policy, grace_s=0, fsync=False)
            relay.advance()
            if grow is not None:
                grow()
                problem = relay.advance().problem
                if self.is_rewritten:
                    return
        if problem is not None:
            raise CnrStoreError(problem)
        with opened(near) as copy:
            snapshot = copy.snapshot()
            found = bytes_of(snapshot)
            if found != self.seen.get((None, snapshot.version)):
                self.judge(near if sample.source is not None else source, snapshot, found)


DOORS = (*READING, *WRITING, "loader", "changes", "relay")
