"""export and import: what other programs read is what a restore gives, bit for bit, and the way back too."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from cnr_store import BadInput, Snapshot, Store, TableOptions, verify_store
from cnr_store.errors import BadDtype, BadShape, NonFiniteValues
from cnr_store.integrations.checkpoints import load_checkpoint
from cnr_store.transfer import exporting, importing
from cnr_store.transfer.exporting import export_snapshot
from cnr_store.transfer.importing import ImportPlan, check_planned, commit_import, import_tensors, plan_import
from cnr_store.transfer.safetensors_file import Tensor, TensorFile, TensorSpec, open_safetensors, write_safetensors
from tests.support.snapshot_bytes import bytes_of
from tests.support.store_oracle import same_bits
from tests.tools.cli_runner import cnr

Array = npt.NDArray[Any]


def rows_of(seed: int, rows: int, dim: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """All dtypes, both kinds of slots, a hashed table, absent rows, dense tensors of odd shapes."""
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=2)
    with store.writer() as writer:
        with writer.begin(step=5) as txn:
            slots = {"sum": np.abs(rows_of(2, 300, 1)).reshape(-1), "avg": rows_of(3, 300, 8)}
            txn.write_table("model.user", rows_of(1, 300, 8), slots=slots, options=TableOptions.exact())
            txn.write_table("half/item", rows_of(4, 50, 4).astype(np.float16))
            txn.write_table("brain", bfloat16_bits(rows_of(5, 60, 3)))
            txn.create_table("hashed", dim=2, options=TableOptions(scale=2**-10), slots={"sum": "row"})
            keys = np.asarray([-7, 0, 10**17])
            txn.write_rows("hashed", keys, np.ones((3, 2), np.float32), slots={"sum": np.ones(3, np.float32)})
            dense = {
                "w": rows_of(6, 3, 5), "t": np.asarray(2.5, np.float64), "none": np.empty((0, 4), np.float32),
                "bits": np.asarray([1, 0, 1], np.uint8), "b": bfloat16_bits(rows_of(7, 1, 6)), "i": np.asarray([2**40]),
            }  # fmt: skip
            txn.put_dense(dense, {"bits": "bool", "b": "bfloat16"})
        with writer.begin(step=6) as txn:
            txn.delete_rows("model.user", np.asarray([4]))
    return store


def root_of(store: Store) -> str:
    return store.url


def contents(snapshot: Snapshot) -> dict[str, tuple[str, Array]]:
    """Every tensor of a snapshot by its exported name, with its logical dtype."""
    found: dict[str, tuple[str, Array]] = {}
    for name, schema in snapshot.tables.items():
        view = snapshot.table(name)
        if schema.keys == "hashed":
            keys, values = view.read_all(slots=True)
            found[f"{name}/row_ids"] = ("int64", keys)
            arrays = values
        else:
            arrays = {"values": view.read(), **{slot: view.read(slot=slot) for slot in schema.slots}}
        found[name] = (schema.dtype, arrays["values"])
        found |= {f"{name}/{slot}": (kind.dtype, arrays[slot]) for slot, kind in schema.slots.items()}
    found |= {name: (entry.dtype, snapshot.read_dense(name)) for name, entry in snapshot.dense.items()}
    return found


def assert_same(found: Mapping[str, tuple[str, Array]], expected: Mapping[str, tuple[str, Array]]) -> None:
    assert found.keys() == expected.keys()
    for name, (dtype, values) in expected.items():
        assert found[name][0] == dtype, name
        assert found[name][1].shape == values.shape, name
        assert found[name][1].tobytes() == values.tobytes(), name


def from_torch(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Array]]:
    found = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        plain = {"bfloat16": torch.uint16, "bool": torch.uint8}.get(dtype)
        found[name] = (dtype, (tensor if plain is None else tensor.view(plain)).numpy())
    return found


def test_safetensors_reads_the_export_bit_for_bit(store: Store, tmp_path: Path) -> None:
    done = cnr("export", root_of(store), tmp_path / "out.safetensors", "--json")

    assert (done.code, done.err) == (0, "")
    assert done.document["files"] == ["out.safetensors"]
    assert_same(from_torch(safetensors.torch.load_file(tmp_path / "out.safetensors")), contents(store.snapshot()))


def test_windows_do_not_show_in_any_format(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "WINDOW_BYTES", 100)
    expected = contents(store.snapshot())

    for form in ("safetensors", "parquet", "npy"):
        assert cnr("export", root_of(store), tmp_path / form, "--format", form).code == 0

    assert_same(from_torch(safetensors.torch.load_file(tmp_path / "safetensors")), expected)
    assert_same(read_npy(tmp_path / "npy"), expected)
    file = pq.ParquetFile(tmp_path / "parquet" / "tables" / "model.user.parquet")
    assert file.num_row_groups == 300
    assert_same(read_parquet(tmp_path / "parquet"), expected)


def read_npy(folder: Path) -> dict[str, tuple[str, Array]]:
    index = json.loads((folder / "tensors.json").read_text())
    return {item["name"]: (item["dtype"], np.load(folder / item["file"])) for item in index["tensors"]}


def read_parquet(folder: Path) -> dict[str, tuple[str, Array]]:
    found: dict[str, tuple[str, Array]] = {}
    for file in (folder / "tables").iterdir():
        data = pq.read_table(file)
        about = json.loads(data.schema.metadata[b"cnr_store"])
        rows = data["row_id"].to_numpy()
        name = about["table"]
        if name == "hashed":
            found[f"{name}/row_ids"] = ("int64", rows)
        else:
            assert np.array_equal(rows, np.arange(len(rows)))
        for column, dtype in about["dtypes"].items():
            field = data[column].combine_chunks()
            dim = getattr(field.type, "list_size", None)
            flat = field.to_numpy() if dim is None else field.flatten().to_numpy().reshape(-1, dim)
            values = bfloat16_bits(np.ascontiguousarray(flat)) if dtype == "bfloat16" else flat
            found[name if column == "values" else f"{name}/{column}"] = (dtype, values)
    for row in pq.read_table(folder / "dense.parquet").to_pylist():
        carrier = {"bool": "uint8", "bfloat16": "uint16"}.get(row["dtype"], row["dtype"])
        found[row["name"]] = (row["dtype"], np.frombuffer(row["data"], carrier).reshape(row["shape"]))
    return found


def test_parquet_types_are_plain(store: Store, tmp_path: Path) -> None:
    cnr("export", root_of(store), tmp_path / "out.parquet", "--table", "half/*", "--no-dense")

    schema = pq.read_schema(tmp_path / "out.parquet" / "tables" / "half%2Fitem.parquet")
    assert str(schema.field("row_id").type) == "int64"
    assert schema.field("values").type == pa.list_(pa.float16(), 4)
    assert not (tmp_path / "out.parquet" / "dense.parquet").exists()


def test_chosen_tables_without_slots_or_dense(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    done = cnr("export", root_of(store), target, "--table", "model.*", "--no-slots", "--no-dense", "--json")

    assert [item["name"] for item in done.document["tensors"]] == ["model.user"]
    assert list(safetensors.numpy.load_file(target)) == ["model.user"]


def test_export_of_an_older_version(store: Store, tmp_path: Path) -> None:
    done = cnr("export", root_of(store), tmp_path / "out", "--step", 5, "--json")

    assert done.document["step"] == 5
    exported = safetensors.torch.load_file(tmp_path / "out")["model.user"].numpy()
    assert np.array_equal(exported, rows_of(1, 300, 8))


def test_existing_target_is_kept_unless_asked(store: Store, tmp_path: Path) -> None:
    """The exit code was 4, where the table of the docs has 5, and no message named the option."""
    target = tmp_path / "out.safetensors"
    target.write_text("mine")

    refused = cnr("export", root_of(store), target)

    assert refused.code == 5
    assert "--overwrite" in refused.err
    assert target.read_text() == "mine"
    assert cnr("export", root_of(store), target, "--overwrite").code == 0
    assert "model.user" in open_safetensors(target).tensors


def test_an_export_with_rows_that_are_not_finite_is_imported_again(root: Path, tmp_path: Path) -> None:
    """The command had no way to keep such rows, which the store that was exported had."""
    file, copy = tmp_path / "out.safetensors", tmp_path / "copy"
    assert cnr("export", root, file).code == 0
    refused = cnr("import", copy, file, "--create", "--exact")

    done = cnr("import", copy, file, "--create", "--exact", "--nonfinite", "escape")

    assert (refused.code, done.code) == (4, 0)
    assert "--nonfinite escape" in refused.err
    assert not np.isfinite(safetensors.numpy.load_file(file)["user"]).all()
    assert cnr("export", copy, tmp_path / "again.safetensors", "--table", "user").code == 0
    rows = [safetensors.numpy.load_file(one)["user"] for one in (file, tmp_path / "again.safetensors")]
    assert same_bits(*rows)
    assert re.search(r"user .* (inf|nan)", cnr("diff", root, 2, 5).out), "it was blank"


def test_folder_that_no_export_made_is_never_replaced(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "photo.jpg").write_text("x")

    for form in ("parquet", "npy", "safetensors"):
        assert cnr("export", root_of(store), folder, "--format", form, "--overwrite").code == 4
    assert (folder / "photo.jpg").exists()

    exported = tmp_path / "out"
    assert cnr("export", root_of(store), exported, "--format", "npy").code == 0
    assert cnr("export", root_of(store), exported, "--format", "parquet", "--overwrite").code == 0
    assert not (exported / "dense").exists()


def test_failed_export_leaves_nothing(store: Store, tmp_path: Path) -> None:
    chunk = next(Path(root_of(store)).glob("data/*/*set-0.codes/c.0.0"))
    chunk.unlink()

    done = cnr("export", root_of(store), tmp_path / "new" / "out.npy")

    assert done.code == 6
    assert list((tmp_path / "new").iterdir()) == []


def test_names_that_would_collide_are_refused(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "s"), fsync=False)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("t", rows_of(1, 5, 2), slots={"m": np.ones(5, np.float32)})
        txn.put_dense({"t/m": np.ones(3)})

    with pytest.raises(BadInput, match="'t/m'"):
        export_snapshot(store.snapshot(), tmp_path / "x")


@pytest.mark.parametrize("form", ["safetensors", "npy", "parquet"])
def test_import_of_an_export_gives_the_same_state(store: Store, tmp_path: Path, form: str) -> None:
    cnr("export", root_of(store), tmp_path / f"out.{form}")

    done = cnr("import", tmp_path / "copy", tmp_path / f"out.{form}", "--create", "--exact", "--json")

    assert (done.code, done.err) == (0, "")
    assert done.document["step"] == 6
    with Store.open(str(tmp_path / "copy")) as copy:
        assert_same(contents(copy.snapshot()), contents(store.snapshot()))
        assert copy.snapshot().table("model.user").schema.slots.keys() == {"sum", "avg"}
        assert verify_store(copy, deep=True).is_sound
        assert copy.snapshot().manifests[0].parts[0].state_digest is not None


@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_an_export_with_a_foreign_index_is_refused(store: Store, tmp_path: Path, form: str) -> None:
    folder = tmp_path / f"out.{form}"
    cnr("export", root_of(store), folder)
    index = json.loads((folder / "tensors.json").read_text())
    (tmp_path / "secret.npy").write_bytes(b"x")
    outside = [item | {"file": "../secret.npy", "shape": [7, *item["shape"][1:]]} for item in index["tensors"]]

    for changed in ({**index, "tensors": outside}, {**index, "tensors": 3}):
        (folder / "tensors.json").write_text(json.dumps(changed))
        done = cnr("import", tmp_path / "copy", folder, "--create", "--json")
        assert (done.code, done.document["error"]["kind"]) == (4, "bad_input")
    (folder / "tensors.json").unlink()
    assert cnr("import", tmp_path / "copy", folder, "--create").code == 3


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_import_finds_tables_by_shape(tmp_path: Path, form: str) -> None:
    tensors = {
        "emb.weight": torch.from_numpy(rows_of(1, 1000, 4)),
        "emb.half": torch.from_numpy(rows_of(2, 1200, 2)).to(torch.bfloat16),
        "small": torch.from_numpy(rows_of(3, 999, 4)),
        "count": torch.tensor(3),
        "wide": torch.zeros(2000, 2, dtype=torch.float64),
    }
    file = tmp_path / ("m.safetensors" if form == "safetensors" else "m.pt")
    safetensors.torch.save_file(tensors, file) if form == "safetensors" else torch.save(tensors, file)

    done = cnr("import", tmp_path / "s", file, "--create", "--exact", "--step", 77, "--json").document

    assert sorted(done["tables"]) == ["emb.half", "emb.weight"]
    assert (done["version"], done["step"]) == (2, 77)
    with Store.open(str(tmp_path / "s")) as store:
        assert_same(contents(store.snapshot()), from_torch(tensors))


def test_import_takes_nested_state_and_plain_values_from_a_torch_file(tmp_path: Path) -> None:
    state = {
        "model": {"emb": torch.ones(8, 2), "flag": torch.tensor([True, False])},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.5, "foreach": None}]},
        "bad": float("nan"),
    }
    torch.save(state, tmp_path / "m.pt")

    done = cnr("import", tmp_path / "s", tmp_path / "m.pt", "--create", "--table", "e*", "--json").document

    assert done["tables"] == ["emb"]
    assert sorted(done["dense"]) == ["flag", "optimizer.state.0.step"]
    assert done["ignored"] == ["bad"]
    with Store.open(str(tmp_path / "s")) as store:
        assert store.snapshot().scalars == {"optimizer.groups.0.lr": 0.5, "optimizer.groups.0.foreach": None}
        assert store.snapshot().dense["flag"].dtype == "bool"


def test_import_lists_the_slots_that_a_training_file_gives(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": {"x": 1}}, tmp_path / "m.pt")

    done = cnr("import", tmp_path / "s", tmp_path / "m.pt", "--create", "--table", "0.*", "--extra", "lr")
    refused = cnr("import", tmp_path / "s", tmp_path / "m.pt", "--extra", "rl")
    wrong = cnr("import", tmp_path / "s", tmp_path / "m.pt", "--format", "dcp")

    assert done.err == ""
    assert "tables (1): 0.weight (slots: sum)" in done.out.splitlines()
    assert [refused.code, wrong.code] == [4, 4]
    with Store.open(str(tmp_path / "s")) as store:
        assert store.snapshot().read_document("progress/0")["extras"] == {"lr": {"x": 1}}


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("code ran",))


def test_import_of_a_torch_file_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": _Evil()}, tmp_path / "evil.pt")
    Store.create(str(tmp_path / "s"), fsync=False).close()

    done = cnr("import", tmp_path / "s", tmp_path / "evil.pt")

    assert done.code == 4
    assert "weights only" in done.err
    assert "code ran" not in done.out + done.err + capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.zeros(2, dtype=torch.complex64), "bad_dtype"), (torch.eye(2).to_sparse(), "bad_dtype")],
)
def test_import_refuses_tensors_that_a_store_cannot_hold(tmp_path: Path, tensor: torch.Tensor, kind: str) -> None:
    torch.save({"x": tensor}, tmp_path / "m.pt")

    assert cnr("import", tmp_path / "s", tmp_path / "m.pt", "--create", "--json").document["error"]["kind"] == kind
    assert not (tmp_path / "s").exists()


def test_import_into_a_store_with_other_tables_needs_replace(store: Store, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"only": rows_of(1, 1000, 2)}, tmp_path / "m.safetensors")

    refused = cnr("import", root_of(store), tmp_path / "m.safetensors", "--json")
    done = cnr("import", root_of(store), tmp_path / "m.safetensors", "--replace", "--json")

    assert refused.code == 4
    assert done.document["dropped"] == ["brain", "half/item", "hashed", "model.user"]
    assert list(store.snapshot().tables) == ["only"]
    assert "model.user" in store.snapshot(step=6).tables


def test_import_over_itself_keeps_the_state(store: Store, tmp_path: Path) -> None:
    before = contents(store.snapshot())
    cnr("export", root_of(store), tmp_path / "out.safetensors")

    done = cnr("import", root_of(store), tmp_path / "out.safetensors", "--exact", "--json")

    assert done.code == 0
    assert_same(contents(store.snapshot()), before)
    assert verify_store(store, deep=True).is_sound


def test_import_options_set_the_encoding(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"t": rows_of(1, 1000, 8)}, tmp_path / "m.safetensors")
    source = rows_of(1, 1000, 8)

    for index, option in enumerate((("--bits", 4), ("--max-error", 0.001), ())):
        assert cnr("import", tmp_path / f"{index}", tmp_path / "m.safetensors", "--create", *option).code == 0

    stored = [Store.open(str(tmp_path / f"{index}")).snapshot().table("t") for index in range(3)]
    scales = [view.schema.encoding.scale for view in stored]  # type: ignore[union-attr]
    assert scales[0] > scales[2]
    assert np.abs(stored[1].read() - source).max() <= 0.001
    assert cnr("import", tmp_path / "x", tmp_path / "m.safetensors", "--create", "--bits", 5).code == 4
    assert cnr("import", tmp_path / "x", tmp_path / "m.safetensors", "--create", "--bits", 4, "--exact").code == 4


def test_import_with_a_pattern_that_fits_no_table_is_refused(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"v": np.ones(5, np.float32)}, tmp_path / "m.safetensors")

    vector = cnr("import", tmp_path / "s", tmp_path / "m.safetensors", "--create", "--table", "v")
    nothing = cnr("import", tmp_path / "s", tmp_path / "m.safetensors", "--create", "--table", "w*")

    assert (vector.code, nothing.code) == (4, 3)


def with_nan(rows: int) -> torch.Tensor:
    values = torch.from_numpy(rows_of(1, rows, 2))
    values[rows - 1, 1] = torch.nan
    return values


@pytest.mark.parametrize(
    ("name", "save", "tensors", "options"),
    [
        ("m.pt", torch.save, {}, ()),
        ("m.pt", torch.save, {"w": with_nan(1000)}, ()),
        ("m.safetensors", safetensors.torch.save_file, {"w": with_nan(1500)}, ("--exact",)),
        ("m.safetensors", safetensors.torch.save_file, {"w": with_nan(4).half()}, ("--table", "w")),
        ("m.safetensors", safetensors.torch.save_file, {"w": torch.ones(1000, 2)}, ("--max-error", 1e-30)),
        ("m.safetensors", safetensors.torch.save_file, {"w": torch.ones(1000, 2)}, ("--table", "absent")),
    ],
)  # fmt: skip
def test_an_import_that_fails_leaves_no_store_that_it_created(
    tmp_path: Path, name: str, save: Callable[..., None], tensors: dict[str, torch.Tensor], options: tuple[Any, ...]
) -> None:
    save(tensors, tmp_path / name)

    done = cnr("import", tmp_path / "s", tmp_path / name, "--create", *options)

    assert done.code in (3, 4)
    assert not (tmp_path / "s").exists()


def test_the_check_of_an_import_names_the_first_bad_row_of_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_WINDOW_BYTES", 64)
    table, slot = rows_of(1, 1000, 2), np.zeros(1000, np.float32)
    table[501, 1] = table[502, 0] = np.inf
    slot[500] = np.nan
    file = TensorFile({"w": Tensor("float32", table), "s": Tensor("float32", slot)})

    with pytest.raises(NonFiniteValues, match="row 500 of table 'w' and 2 more"):
        check_planned(file, ImportPlan({"w": "w"}, {"w": {"sum": "s"}}, {}, ()), None)
    check_planned(file, ImportPlan({"w": "w"}, {"w": {"sum": "s"}}, {}, ()), TableOptions(nonfinite="escape"))


@pytest.mark.parametrize(
    ("table", "slot"),
    [
        (np.zeros(4, np.float32), None),
        (np.zeros((), np.float32), None),
        (np.zeros((4, 2), np.int64), None),
        (np.zeros((4, 0), np.float32), None),
        (np.zeros((4, 2), np.float32), np.zeros(3, np.float32)),
        (np.zeros((4, 2), np.float32), np.zeros((8, 2), np.float32)),
    ],
)
def test_the_check_of_an_import_refuses_what_the_import_refuses(
    tmp_path: Path, table: np.ndarray[Any, Any], slot: np.ndarray[Any, Any] | None
) -> None:
    given = {"w": table} if slot is None else {"w": table, "s": slot}
    file = TensorFile({name: Tensor(str(array.dtype), array) for name, array in given.items()})
    plan = ImportPlan({"w": "w"}, {"w": {"sum": "s"}} if slot is not None else {}, {}, ())
    with Store.create(str(tmp_path / "s")) as store, pytest.raises((BadShape, BadDtype)) as refused:
        commit_import(store, file, plan, step=0, options=None, scalars={}, replace=False, progress=None)

    with pytest.raises(type(refused.value), match=re.escape(str(refused.value))):
        check_planned(file, plan, None)


# The safetensors reader and writer against the package itself.


def test_our_reader_equals_the_package(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.int64).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.zeros(0, 3), "d": torch.tensor(1.5), "e": torch.tensor([True]), "f": torch.ones(5, dtype=torch.int8),
        "g": torch.ones(3, dtype=torch.float16),
    }  # fmt: skip
    safetensors.torch.save_file(tensors, tmp_path / "x", {"about": "this"})

    found = open_safetensors(tmp_path / "x")

    assert found.metadata == {"about": "this"}
    assert_same({n: (t.dtype, np.asarray(t.values)) for n, t in found.tensors.items()}, from_torch(tensors))


def header_of(document: object, data: bytes = b"") -> bytes:
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (10**12).to_bytes(8, "little") + b"{}",
        header_of([1, 2]),
        header_of({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        header_of({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, b"1234"),
        header_of({"t": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"),
        header_of({"t": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}}),
        header_of({"t": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
        header_of({"t": {"dtype": "F32", "shape": [1]}}, b"1234"),
        header_of({"__metadata__": {"cnr_store": 5}}),
    ],
)
def test_malformed_safetensors_is_bad_input(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)

    done = cnr("import", tmp_path / "s", file, "--create", "--json")

    assert done.code == 4
    assert done.document["error"]["kind"] == "bad_input"


@pytest.mark.parametrize(
    "described",
    ["no json", '{"step": 1, "tensors": [{"name": "absent", "role": "table", "table": "t"}]}',
     '{"step": 1, "tensors": [{"name": "v", "role": "slot", "table": "t", "slot": "m"}]}'],
)  # fmt: skip
def test_description_that_does_not_fit_its_file_is_bad_input(described: str) -> None:
    source = TensorFile({"v": Tensor("float32", np.ones(3, np.float32))}, {"cnr_store": described})

    with pytest.raises(BadInput):
        plan_import(source)


def test_a_file_without_tensors_is_refused() -> None:
    """A regression: the import of such a file was a version with nothing in it."""
    with pytest.raises(BadInput, match="no tensors"):
        plan_import(TensorFile({}))


def test_repeated_names_are_refused_by_the_writer(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "float32", (1,)), TensorSpec("a", "int64", (1,))]

    with pytest.raises(BadInput, match="'a'"):
        write_safetensors(tmp_path / "x", specs, {}, lambda spec: [np.zeros(spec.shape, spec.dtype)])


def test_import_tensors_reports_progress(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"t": rows_of(1, 1000, 2), "d": rows_of(2, 3, 2)}, tmp_path / "m.safetensors")
    seen: list[tuple[int, int]] = []

    with Store.create(str(tmp_path / "s"), fsync=False) as store:
        import_tensors(store, tmp_path / "m.safetensors", progress=lambda done, total: seen.append((done, total)))

    assert seen[-1] == (8024, 8024)
    assert importing.MIN_TABLE_ROWS == 1000


def test_old_torch_files_load_too(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)

    assert load_checkpoint(tmp_path / "old.pt").tensors["w"].tolist() == [1.0, 1.0]


def test_a_copy_reports_what_it_made_and_that_it_is_complete(store: Store, tmp_path: Path) -> None:
    before = bytes_of(store.snapshot())
    store.tag("good")

    first = cnr("copy", store.url, tmp_path / "copy", "--all")
    again = cnr("copy", store.url, tmp_path / "copy", "--all", "--json")
    printed = cnr("copy", store.url, tmp_path / "copy", "--all")
    refused = cnr("copy", store.url, tmp_path / "copy", "--tag", "good")

    copy = Store.open(str(tmp_path / "copy"))
    assert [outcome.code for outcome in (first, again, refused)] == [0, 0, 5]
    made, source = f"made store {copy.uuid}: its version {copy.latest_version()}", store.latest_version()
    assert f"{made} has the state of the source's version {source}, " in first.out
    assert (again.document["version"], again.document["objects"]) == (copy.latest_version(), 0)
    assert f"store {copy.uuid} was complete already: it is a copy of the source's version {source}" in printed.out
    assert "has a copy of all versions" in refused.err
    assert bytes_of(copy.snapshot(tag="good")) == before


def test_promote_makes_a_store_of_a_relay_whose_source_is_lost(store: Store, tmp_path: Path) -> None:
    source, before = Path(store.url), bytes_of(store.snapshot())
    assert cnr("relay", store.url, tmp_path / "near", "--once").code == 0
    step, newest = store.snapshot().step, store.latest_version()
    shutil.rmtree(source)

    done = cnr("promote", tmp_path / "near", tmp_path / "new")

    assert f"the source's version {newest}" in done.out
    assert f"newest version is {newest}, step {step}, of " in done.out
    assert str(source) in done.out
    with Store.open(str(tmp_path / "new")) as promoted, promoted.writer():
        assert promoted.relay is None
        assert bytes_of(promoted.snapshot()) == before


def test_promote_refuses_what_is_no_relay(store: Store, tmp_path: Path) -> None:
    refused = cnr("promote", store.url, tmp_path / "new")

    assert refused.code == 4
    assert "not a relay" in refused.err
    assert not (tmp_path / "new").exists()
