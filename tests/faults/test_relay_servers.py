"""A relay from a real object store to a local disk and to another bucket, killed on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from cnr_store import RetentionPolicy, Store, TableOptions, verify_store
from cnr_store.format.layout import COMMITS, DATA
from cnr_store.relay.relay import Relay
from tests.support.launcher import Launcher, Program
from tests.support.servers import Place
from tests.support.snapshot_bytes import bytes_of

ROWS, DIM = 20_000, 16


def train(store: Store, steps: range) -> None:
    rng = np.random.default_rng(steps.start)
    with store.writer() as writer:
        if not store.snapshot().is_empty:
            writer.restore()
        for step in steps:
            with writer.begin(step) as txn:
                if step == 0:
                    table = rng.standard_normal((ROWS, DIM)).astype(np.float32)
                    txn.write_table("user", table, options=TableOptions(bits=4))
                else:
                    rows = np.sort(rng.choice(ROWS, 500, replace=False))
                    txn.write_rows("user", rows, rng.standard_normal((500, DIM)).astype(np.float32))


FOLLOWER = """
import json, sys
from cnr_store import RetentionPolicy, Store
from cnr_store.relay import Relay

with Store.open(sys.argv[1], storage_options=json.loads(sys.argv[2])) as source:
    Relay(source, sys.argv[3], policy=RetentionPolicy(keep_last=3), grace_s=0).run(poll_interval_s=0.02)
"""


@pytest.mark.servers
def test_a_relay_of_a_bucket_serves_whole_versions_however_often_killed(
    launcher: Launcher, s3_place: Place, tmp_path: Path
) -> None:
    target = str(tmp_path / "near")
    follow = Program(["-c", FOLLOWER, s3_place.url, json.dumps(s3_place.storage_options), target])
    with Store.create(s3_place.url, storage_options=s3_place.storage_options) as store:
        train(store, range(1))
        for life in range(3):
            with launcher.running(follow, folder=tmp_path):
                train(store, range(1 + 4 * life, 5 + 4 * life))
                # Lets the first life begin, and kills each somewhere on its way.
                deadline = time.monotonic() + 60
                while not (tmp_path / "near" / "cnr.json").exists():
                    assert time.monotonic() < deadline, "the relay has not begun"
                    time.sleep(0.01)
            with Store.open(target) as near:
                version = near.latest_version()
                assert bytes_of(near.snapshot()) == bytes_of(store.snapshot(version))
        Relay(store, target, policy=RetentionPolicy(keep_last=3), grace_s=0).advance()
        with Store.open(target) as near:
            assert near.head() == store.head()
            assert bytes_of(near.snapshot()) == bytes_of(store.snapshot())
            assert verify_store(near, deep=True).is_sound


@pytest.mark.servers
def test_a_relay_from_disk_to_a_bucket_has_the_same_bytes(s3_place: Place, tmp_path: Path) -> None:
    options = s3_place.storage_options
    with Store.create(str(tmp_path / "far"), fsync=False) as store:
        train(store, range(3))
        relay = Relay(store, s3_place.url, storage_options=options)
        began = relay.advance()
        train(store, range(3, 6))
        relay.advance()

        with Store.open(s3_place.url, storage_options=options) as near:
            assert began.objects > 5
            assert near.head() == store.head()
            assert bytes_of(near.snapshot()) == bytes_of(store.snapshot())
            for stat in [*near.storage.list_objects(DATA), *near.storage.list_objects(COMMITS)]:
                assert near.storage.read(stat.key) == store.storage.read(stat.key)
            assert verify_store(near, all_versions=True, deep=True).is_sound
