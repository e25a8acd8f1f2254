"""Processes killed at random moments: the next one finds what was acknowledged, or what was being saved, whole."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, verify_store
from cnr_store.format.commit_record import is_live
from tests.faults.life_model import differing, read_state, unreferenced
from tests.faults.life_program import PHASES, collect, compact_all, create_life, noted, read_values
from tests.support.launcher import Server

CI_KILLS, SOAK_KILLS = 20, 200

pytestmark = pytest.mark.slow


def errors(folder: Path) -> str:
    path = folder / "errors.txt"
    return path.read_text() if path.exists() else ""


def check_what_is_stored(folder: Path) -> str:
    """A fresh process sees the state that was acknowledged last, or the one that was being saved; says which."""
    acknowledged = dict(noted(folder / "acknowledged.jsonl"))
    last = max(acknowledged.values())
    with Store.open(str(folder / "store"), threads=2) as store:
        head = store.snapshot()
        assert head.step in (last, last + 1)
        assert (folder / f"{head.step}.npz").exists(), "a state that was never saved"
        assert differing(read_state(head), read_values(folder, head.step)) == []
        for version in sorted(acknowledged)[-3:]:
            if not is_live(store.head().record, version):
                continue
            snapshot = store.snapshot(version)
            assert snapshot.step == acknowledged[version]
            assert differing(read_state(snapshot), read_values(folder, snapshot.step)) == []
        assert verify_store(store, deep=True).problems == ()
        compact_all(store, head.step)
        collect(store)
        assert unreferenced(store) == []
        assert differing(read_state(store.snapshot()), read_values(folder, head.step)) == []
    return "in flight" if head.step > last else "acknowledged"


def kill_often(lives: Server, folder: Path, kills: int, seed: int) -> Counter[str]:
    """Kill lives of one store, each going on where the last was killed; what they were at, and what was found."""
    chance = random.Random(seed)
    create_life(folder)
    calm = lives.ask(job="live", folder=str(folder), rounds=6)
    assert calm["code"] == 0, errors(folder)
    usual_s = {phase: float(np.median(took)) for phase, took in calm["took_s"].items()}
    assert set(usual_s) == set(PHASES)
    found: Counter[str] = Counter()
    for kill in range(kills):
        phase = PHASES[kill % len(PHASES)]
        answer = lives.ask(
            job="live",
            folder=str(folder),
            phase=phase,
            skip=chance.randrange(2),
            delay_s=chance.uniform(0, 1.5 * usual_s[phase]),
        )
        assert answer["code"] == -9, f"{answer}\n{errors(folder)}"
        found[f"killed in {answer['died_in'] or 'between'}"] += 1
        found[f"found {check_what_is_stored(folder)}"] += 1
    return found


def test_a_store_whose_processes_are_killed_keeps_what_was_acknowledged(lives: Server, tmp_path: Path) -> None:
    found = kill_often(lives, tmp_path, CI_KILLS, seed=1)
    sys.stdout.write(f"{CI_KILLS} kills: {dict(found)}\n")

    for phase in PHASES:
        assert found[f"killed in {phase}"] > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_store_keeps_what_was_acknowledged_over_two_hundred_kills(lives: Server, tmp_path: Path) -> None:
    found = kill_often(lives, tmp_path, SOAK_KILLS, seed=2)
    sys.stdout.write(f"{SOAK_KILLS} kills: {dict(found)}\n")

    for phase in PHASES:
        assert found[f"killed in {phase}"] > SOAK_KILLS // 10


def train_beside_killed_maintenance(lives: Server, folder: Path, rounds: int, seed: int) -> int:
    """Train while two processes at a time that compact and delete are killed; how many were."""
    create_life(folder)

    answer = lives.ask(job="beside", folder=str(folder), rounds=rounds, seed=seed, most_s=0.8)

    assert (answer["code"], answer["codes"]) == (0, [-9]), f"{answer}\n{errors(folder)}"
    acknowledged = noted(folder / "acknowledged.jsonl")
    assert [step for _, step in acknowledged] == list(range(rounds + 1))
    with Store.open(str(folder / "store")) as store:
        records = list(store.log())
        saves = [record for record in records if record.kind in ("baseline", "delta")]
        assert [[record.v, record.step] for record in saves] == acknowledged[::-1]
        assert {"compact", "expire"} <= {record.kind for record in records}
    assert check_what_is_stored(folder) == "acknowledged"
    return int(answer["kills"])


def test_a_training_goes_on_while_those_who_compact_and_delete_are_killed(lives: Server, tmp_path: Path) -> None:
    kills = train_beside_killed_maintenance(lives, tmp_path, rounds=40, seed=1)

    sys.stdout.write(f"40 saves beside {kills} kills\n")
    assert kills > 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_long_training_goes_on_while_compaction_and_gc_are_killed(lives: Server, tmp_path: Path) -> None:
    kills = train_beside_killed_maintenance(lives, tmp_path, rounds=600, seed=2)

    sys.stdout.write(f"600 saves beside {kills} kills\n")
    assert kills > 50
