"""init, log, show, tag, untag, rollback, version: their text output, and their JSON."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, segment_sizes
from tests.support.servers import web_server
from tests.tools.cli_runner import cnr


def test_init_makes_a_store(tmp_path: Path) -> None:
    done = cnr("init", tmp_path / "s", "--json")

    assert (done.code, done.err) == (0, "")
    with Store.open(str(tmp_path / "s")) as store:
        assert done.document["store_uuid"] == store.uuid


def test_a_store_for_a_single_writer_is_written_with_the_option(root: Path, tmp_path: Path) -> None:
    option = ("--storage-option", "unsafe_single_writer=true")
    assert cnr("init", tmp_path / "s", *option).code == 0
    assert cnr("export", root, tmp_path / "f.safetensors", "--version", 4).code == 0

    refused = cnr("import", tmp_path / "s", tmp_path / "f.safetensors", "--json")
    assert refused.code == 7
    assert refused.document["error"]["kind"] == "unsafe_backend"

    assert cnr("import", tmp_path / "s", tmp_path / "f.safetensors", *option).code == 0
    assert cnr("maintain", tmp_path / "s", *option).code == 0
    assert cnr("show", tmp_path / "s").code == 0
    assert cnr("show", tmp_path / "s", "--storage-option", "unsafe_single_writer=maybe").code == 4


def test_init_of_an_existing_store_is_a_conflict(root: Path) -> None:
    done = cnr("init", root)

    assert done.code == 5
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_log_lists_records_newest_first(root: Path) -> None:
    done = cnr("log", root, "--json")

    kinds = [(item["version"], item["kind"]) for item in done.document["records"]]
    assert kinds == [(6, "tag"), (5, "delta"), (4, "delta"), (3, "delta"), (2, "baseline"), (1, "fence"), (0, "init")]
    assert done.document["records"][0]["name"] == "good"
    assert done.document["records"][0]["target"] == 3


def test_log_for_people_names_every_record_and_obeys_the_limit(root: Path) -> None:
    done = cnr("log", root, "--limit", 2)

    assert done.code == 0
    assert "good -> 3" in done.out
    assert "delta" in done.out
    assert "baseline" not in done.out


def test_log_prints_what_is_newer_than_a_missing_record(root: Path) -> None:
    """A regression: of a log with a hole it printed the error alone."""
    (root / "commits" / f"{3:020d}.json").unlink()

    done = cnr("log", root)
    document = cnr("log", root, "--json")

    assert (done.code, document.code) == (6, 6)
    assert "good -> 3" in done.out
    assert "position 3 is empty" in done.err
    assert document.document["error"]["kind"] == "corrupt_store"


def test_show_lists_tables_chain_and_bytes_by_kind(root: Path) -> None:
    done = cnr("show", root, "--json").document

    assert done["version"] == 6
    assert done["step"] == 40
    user = done["tables"]["user"]
    assert (user["rows"], user["dim"], user["dtype"], user["encoding"]["encoding"]) == (400, 8, "float32", "lattice")
    assert user["slots"]["momentum1"]["encoding"] == {"encoding": "float_bits", "mantissa_bits": 4}
    assert done["tables"]["half/item"]["encoding"] == {"encoding": "float_bits", "mantissa_bits": 10}
    assert [item["kind"] for item in done["chain"]] == ["baseline", "delta", "delta", "delta"]
    assert done["dense"]["flag"] == {"dtype": "bool", "shape": [2]}
    assert done["chain"][0]["fp32_bytes"] == 4 * (400 * 8 + 400 + 90 * 4) + 8 * 15 + 2
    assert done["sizes"]["total"] == sum(item["sizes"]["total"] for item in done["chain"])


def test_show_sizes_are_those_on_disk(root: Path) -> None:
    done = cnr("show", root, "--json").document

    for item in done["chain"]:
        files = [path for path in (root / "data" / item["segment"]).rglob("*") if path.is_file()]
        by_kind = dict.fromkeys(item["sizes"], 0)
        for path in files:
            name = path.relative_to(root).as_posix()
            kind = "metadata"
            if ".document-" in name:
                kind = "documents"
            elif "/c." in name:
                array = name.split("/c.")[0]
                kind = next(
                    kind
                    for mark, kind in ((".dense.", "dense"), (".slots.", "slots"), (".rows", "rows"), ("", "codes"))
                    if mark in array
                )
            by_kind[kind] += path.stat().st_size
            by_kind["total"] += path.stat().st_size
        assert item["sizes"] == by_kind


def test_affine_parameters_count_as_scales(tmp_path: Path) -> None:
    import numpy as np

    from cnr_store import TableOptions

    with Store.create(str(tmp_path / "s"), fsync=False) as store:
        with store.writer() as writer, writer.begin(step=1) as txn:
            values = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
            txn.write_table("t", values, options=TableOptions(encoding="affine", bits=4))
        sizes = segment_sizes(store.snapshot().manifests[0])

    assert sizes.scales == 2 * (100 * 2 + 4)
    assert sizes.codes == 100 * 4 + 4


@pytest.mark.parametrize(
    ("choice", "version"), [(("--version", 3), 3), (("--step", 20), 3), (("--tag", "good"), 3), ((), 6)]
)
def test_show_opens_the_version_asked_for(root: Path, choice: tuple[object, ...], version: int) -> None:
    assert cnr("show", root, *choice, "--json").document["version"] == version


def test_show_for_people_has_every_kind_of_byte(root: Path) -> None:
    done = cnr("show", root)

    assert done.code == 0
    for word in ("user", "half/item", "lattice", "rows", "codes", "slots", "dense", "metadata", "total", "momentum1"):
        assert word in done.out


def test_show_of_an_empty_store_says_so(tmp_path: Path) -> None:
    cnr("init", tmp_path / "s")

    assert "nothing has been saved yet" in cnr("show", tmp_path / "s").out
    assert cnr("show", tmp_path / "s", "--json").document["chain"] == []


def test_tag_names_a_version_and_untag_forgets_it(root: Path) -> None:
    made = cnr("tag", root, "release", "--version", 4, "--json")
    assert made.document["target"] == 4
    assert cnr("show", root, "--tag", "release", "--json").document["version"] == 4

    gone = cnr("untag", root, "release", "--json")

    assert gone.code == 0
    assert cnr("show", root, "--tag", "release").code == 3


def test_tag_does_not_move(root: Path) -> None:
    done = cnr("tag", root, "good", "--json")

    assert done.code == 5
    assert done.document["error"]["kind"] == "tag_exists"


def test_rollback_makes_an_older_state_the_newest(root: Path) -> None:
    done = cnr("rollback", root, 2, "--json")

    assert (done.document["version"], done.document["target"], done.document["step"]) == (7, 2, 10)
    assert cnr("show", root, "--json").document["step"] == 10
    assert "version 8 has the state of version 5" in cnr("rollback", root, 5).out


def test_rollback_to_a_version_without_a_state_is_refused(root: Path) -> None:
    """Readers were served an empty state, without a word."""
    done = cnr("rollback", root, 0)

    assert done.code == 4
    assert "nothing was saved yet at version 0" in done.err
    assert cnr("show", root, "--json").document["version"] == 6


def test_show_and_diff_list_tables_in_natural_order(tmp_path: Path) -> None:
    """emb.10 came before emb.2."""
    with Store.create(str(tmp_path / "s"), fsync=False) as store, store.writer() as writer:
        for step in (1, 2):
            with writer.begin(step, kind="baseline") as txn:
                for number in (1, 2, 10):
                    txn.write_table(f"emb.{number}", np.full((4, 2), step, np.float32))

    for command in (["show"], ["diff", 2, 3]):
        printed = cnr(command[0], tmp_path / "s", *command[1:]).out
        assert printed.index("emb.1 ") < printed.index("emb.2 ") < printed.index("emb.10 ")


def test_the_lines_of_show_before_its_tables_fit_a_narrow_terminal(root: Path) -> None:
    lines = cnr("show", root, columns=80).out.splitlines()

    assert lines[0] == str(root)
    assert re.fullmatch(r"version 6 \(tag\), step 40, \d{4}-.*Z, format 1\.\d", lines[1]), lines[1]
    assert all(len(line) <= 80 for line in lines[1:])


def test_show_counts_the_documents_of_many_ranks_on_one_line(tmp_path: Path) -> None:
    names = [f"{kind}/{rank}" for kind in ("reader", "rng", "trainer") for rank in range(64)]
    with Store.create(str(tmp_path / "s"), fsync=False) as store, store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("user", np.ones((2, 2), np.float32))
        for name in names:
            txn.put_document(name, {})

    assert "documents: 192 (reader, rng, trainer)\n" in cnr("show", tmp_path / "s", columns=80).out
    assert sorted(cnr("show", tmp_path / "s", "--json").document["documents"]) == sorted(names)


def test_version_names_the_package(tmp_path: Path) -> None:
    assert cnr("version", "--json").document["version"] == "0.1.0"
    assert cnr("version").out.startswith("cnr-store 0.1.0")


def test_names_from_a_store_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "s"), fsync=False)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("[red]x[/red]\u202e", np.ones((2, 2), np.float32))

    out = cnr("show", tmp_path / "s").out

    assert "[red]x[/red]\\u202e" in out
    assert "\u202e" not in out


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal_and_name_what_they_leave_out(root: Path, columns: int) -> None:
    for command in ("log", "show"):
        printed = cnr(command, root, columns=columns).out
        assert max(len(line.rstrip()) for line in printed.splitlines() if str(root) not in line) <= columns
        assert ("a wider terminal, or --json, also has:" in printed) == (columns == 80)
    records = cnr("log", root, "--json").document["records"]
    rows = [line for line in cnr("log", root, columns=columns).out.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == len(records)  # one line each


def test_long_names_take_one_line_each_and_lose_nothing(tmp_path: Path) -> None:
    beginning = "model.sparse_arch.embedding_bag_collection.embedding_bags."
    names = [f"{beginning}t_feature_{index}_of_a_long_name.weight" for index in range(12)]
    with Store.create(str(tmp_path / "s"), fsync=False) as store, store.writer() as writer:
        for step in (1, 2):
            with writer.begin(step=step, kind="baseline") as txn:
                for name in names:
                    txn.write_table(name, np.full((2, 2), step, np.float32))
        for index in range(8):
            store.tag(f"experiment-{index}", 3)

    for command in (("show",), ("diff", 2, 3)):
        lines = [line.rstrip() for line in cnr(command[0], tmp_path / "s", *command[1:], columns=80).out.splitlines()]
        assert len([line for line in lines if line.startswith("\N{HORIZONTAL ELLIPSIS}t_feature_")]) == len(names)
        assert f"\N{HORIZONTAL ELLIPSIS} is {beginning}" in lines
        assert all(name in cnr(command[0], tmp_path / "s", *command[1:]).out for name in names)
    assert "3 more: `cnr tags`" in cnr("log", tmp_path / "s").out
    assert len(re.findall(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", cnr("log", tmp_path / "s", columns=80).out)) == 12


def test_names_are_listed_and_given_by_step(root: Path) -> None:
    assert cnr("tag", root, "by-step", "--step", "20", "--json").document["target"] == 3
    assert cnr("channel", root, "live", "--step", "30", "--json").document["target"] == 4
    assert cnr("fork", root, "side", "--step", "20", "--json").document["version"] == 3

    tags = cnr("tags", root, "--json").document["tags"]
    assert {item["tag"]: (item["version"], item["step"]) for item in tags}["by-step"] == (3, 20)
    assert [(item["channel"], item["version"]) for item in cnr("channels", root, "--json").document["channels"]] == [
        ("live", 4)
    ]
    assert "by-step" in cnr("tags", root).out
    assert cnr("rollback", root, "--step", "20", "--json").document["target"] == 3
    assert cnr("fork", root, "named", "--tag", "by-step", "--json").document["version"] == 3
    assert cnr("rollback", root, "--tag", "by-step", "--json").document["target"] == 3
    numbered, tagged = (cnr("diff", root, name, 4, "--json").document for name in (3, "by-step"))
    assert tagged == numbered
    assert cnr("diff", root, 3, "no-such-tag").code == 3
    assert cnr("rollback", root).code == 4
    assert cnr("rollback", root, "3", "--tag", "by-step").code == 4
    assert cnr("rollback", root, "3", "--step", "20").code == 4


def test_log_and_show_say_which_versions_have_expired(root: Path) -> None:
    assert not any(item["expired"] for item in cnr("log", root, "--json").document["records"])
    assert "expired" not in cnr("log", root).out

    assert cnr("gc", root, "--keep-last", 1, "--grace", "0s", "--force").code == 0

    records = cnr("log", root, "--json").document["records"]
    opened = [cnr("show", root, "--version", item["version"]) for item in records]
    assert [item["version"] for item in records if item["expired"]] == [4, 2, 1, 0]  # "good" keeps 3
    assert [done.code != 0 for done in opened] == [item["expired"] for item in records]
    assert all("has expired" in done.err for done in opened if done.code)
    assert all(f"the newest is {records[0]['version']}" in done.err for done in opened if done.code)
    assert cnr("log", root).out.count("expired") == 4


def test_a_store_behind_a_web_server_is_read_and_never_written(root: Path) -> None:
    with web_server(root.parent) as server:
        url = f"{server}/{root.name}"
        found, tagged, verified = cnr("show", url, "--json"), cnr("tag", url, "x"), cnr("verify", url)
        with Store.open(url) as far, Store.open(str(root)) as near:
            for name in near.snapshot().tables:
                rows = far.snapshot().table(name).read()
                assert rows.tobytes() == near.snapshot().table(name).read().tobytes()
            sparse = far.snapshot().table("user").read_rows([3, 399])
            assert sparse.tobytes() == near.snapshot().table("user").read_rows([3, 399]).tobytes()

    assert found.document["tables"].keys() == cnr("show", root, "--json").document["tables"].keys()
    assert (tagged.code, verified.code) == (8, 8)
    assert "can only be read" in tagged.err
    assert cnr("show", url.replace(root.name, "nothing")).code != 0
