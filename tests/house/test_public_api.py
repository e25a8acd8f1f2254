"""The public names of every package, as a list that a change has to touch. What is not here may change."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

ERRORS = """
    CnrStoreError NotFound BadInput Conflict CorruptStore StorageFailure Unsupported
    BackgroundSaveFailed VersionRefused RankFailed
"""

# One entry for each package that exists; its names, separated by blanks.
PUBLIC = {
    "cnr_store": ERRORS
    + """
        Snapshot Store TableOptions TableView Transaction Writer ChunkCache LogReport CacheCounts
        ScaleChoice expected_restores
        Ranks Shard KeyShare key_owners Rectangle Declaration RowUpdate TableValues
        verify_store VerifyReport Problem
        repair_store RepairReport RepairAction
        maintain MaintenanceReport StageReport Stage
        compact CompactionPolicy CompactionReport
        read_status StoreStatus HeadStatus LastMaintenance
        collect_garbage RetentionPolicy KeepBest compare_tables TableDifference read_id_map IdMap GcReport Lease
        segment_sizes total_sizes fp32_bytes SegmentSizes
        export_snapshot ExportReport ExportedTensor check_import import_tensors ImportReport TensorFile TensorSpec
        copy_store StoreCopyReport
        LogEntry CommitRecord ChainEntry WriterInfo TableSchema DenseEntry Pin Cursor
        RelayMarker SegmentReport VersionReport LostState
    """,
    "cnr_store_gpu": """
        RowTracker RowBitmap DeviceBitmaps Cumulative Taken warmup
        WatchedShard ChangeSource
        ModelTable plan_tables
        Movement RowMovement row_movement row_slots rows_with_state scalar_state
        RowRequest Staged JoinedCopies StagingBuffers
        LatticeCodes
    """,
    "cnr_store.serving": """
        Loader LoaderProcess LoaderOptions AttachedTables Candidate PollResult LoaderMetrics LookupBatch RowRange
        HashShard
    """,
    "cnr_store.changes": """
        changes ChangeStream VersionChanges ChangeCursor change_schema catch_up CatchUp
        write_parquet write_ipc recorded_cursor RecordedVersion RecordingReport PriorityPublisher PublishReport
    """,
    "cnr_store.relay": "Relay RelayReport assign_shards assign_users",
    "cnr_store.serving.sinks": """
        FusedRows DeviceTables DeviceBatch SinkFeed PushResult SinkMetrics
        RowSink SinkSource Published SinkState SinkTable SourceRows
    """,
    "cnr_store.integrations": "",
    "cnr_store.integrations.dcp": "CnrStorageReader CnrStorageWriter CnrStager",
    "cnr_store.integrations.redis": "RedisSink RedisRows RedisBatch RedisNews",
    "cnr_store.testing": "",
    "cnr_store.communication": """
        CommunicationState RankState StateTensor chunk reshard
        Meter Traffic
        ThresholdedGradients QuantizedGradients PowerSGD
        OneBitAdam OneBitLamb PartialFirstLayer PartialSums SplitTable TopKActivations
    """,
    "cnr_store.training": """
        CheckpointManager SavePolicy TrackingOptions PrecisionPolicy StoreOptions PeerCopies RestoredState load
        Survivor SaveReport ScaleChange RateStatus TableRate SaveInterval SaveMeasure ProcessRanks
        calibrate Calibration Trial DynamicTable DynamicTables KeyedRows KeyChanges
        CarriedBatch CarryingReader GrantedReader IntervalReader reader_states_for
        share_evenly
    """,
    "cnr_store_tools": "",
}

# Packages that promise names to a user, with the folder each is in.
PACKAGES = {
    "cnr_store": "cnr_store",
    "cnr_store.communication": "cnr_store/communication",
    "cnr_store.training": "cnr_store/training",
    "cnr_store.serving": "cnr_store/serving",
    "cnr_store.changes": "cnr_store/changes",
    "cnr_store.relay": "cnr_store/relay",
    "cnr_store.serving.sinks": "cnr_store/serving/sinks",
    "cnr_store.integrations": "cnr_store/integrations",
    "cnr_store.integrations.dcp": "cnr_store/integrations/dcp",
    "cnr_store.integrations.redis": "cnr_store/integrations/redis",
    "cnr_store.testing": "cnr_store/testing",
    "cnr_store_gpu": "gpu/cnr_store_gpu",
    "cnr_store_tools": "tools/cnr_store_tools",
}

HEAVY = [
    "torch",
    "triton",
    "ray",
    "prometheus_client",
    "s3fs",
    "gcsfs",
    "adlfs",
    "hypothesis",
    "typer",
    "rich.table",
    "cnr_store_gpu",
]
"""Optional, or large, or for the command line: `import cnr_store` must work and be quick without them."""


def visible_names(module: types.ModuleType) -> set[str]:
    """Names without an underscore that are neither a submodule (importing one binds it) nor a future flag."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }


def test_every_package_that_exists_has_its_list() -> None:
    existing = {name for name, folder in PACKAGES.items() if (REPOSITORY / folder / "__init__.py").is_file()}

    assert set(PUBLIC) == existing


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_the_listed_ones(name: str) -> None:
    module = importlib.import_module(name)

    assert sorted(module.__all__) == sorted(PUBLIC[name].split())


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_all_names_are_what_is_visible(name: str) -> None:
    module = importlib.import_module(name)

    assert len(set(module.__all__)) == len(module.__all__)
    assert visible_names(module) == set(module.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_functions_and_classes_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    public = {public: getattr(module, public) for public in module.__all__}

    undocumented = [public for public, value in public.items() if callable(value) and not value.__doc__]

    assert module.__doc__
    assert undocumented == []


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("cnr_store", HEAVY),
        ("cnr_store_tools.cli", ["torch", "pyarrow", "redis"]),
        ("cnr_store.training", ["pyarrow", "redis"]),
    ],
)
def test_library_command_and_training_start_without_what_others_need(module: str, without: list[str]) -> None:
    program = f"import sys, {module}; print([name for name in {without} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", ["cnr_store", "gpu/cnr_store_gpu", "tools/cnr_store_tools"])
def test_packages_say_that_they_are_typed(folder: str) -> None:
    assert (REPOSITORY / folder / "py.typed").is_file()


INTERNAL = {
    "Board", "Layer", "Manifest", "Mirrors", "Refinement", "SegmentReader",
    "TableCodes", "TablePlan", "Tensor", "View", "Workers",
}  # fmt: skip
"""What methods of public classes return and no user is meant to hold: the list only shrinks."""


def returned_classes(package: str) -> Iterator[tuple[str, type]]:
    """Each class of ours in what a public function returns, or a public report holds, with where it stands."""
    module = importlib.import_module(package)
    for name in module.__all__:
        public = getattr(module, name)
        if inspect.isfunction(public):
            yield from ((name, found) for found in classes_in(hints_of(public).get("return")))
        elif inspect.isclass(public):
            if dataclasses.is_dataclass(public):
                for field, hint in hints_of(public).items():
                    yield from ((f"{name}.{field}", found) for found in classes_in(hint))
            for member, value in vars(public).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if inspect.isfunction(function) and not member.startswith("_"):
                    yield from ((f"{name}.{member}", found) for found in classes_in(hints_of(function).get("return")))


def hints_of(annotated: object) -> dict[str, object]:
    return typing.get_type_hints(annotated, localns={"torch": importlib.import_module("torch")})


def classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        yield hint
    for argument in typing.get_args(hint):
        yield from classes_in(argument)


def test_what_public_methods_return_can_be_imported() -> None:
    public = {id(getattr(importlib.import_module(name), one)) for name in PUBLIC for one in PUBLIC[name].split()}
    public |= {id(value) for value in vars(importlib.import_module("cnr_store.types")).values()}

    hidden = {
        found.__name__
        for name in PUBLIC
        for _, found in returned_classes(name)
        if found.__module__.startswith("cnr_store") and id(found) not in public
    }

    assert hidden == INTERNAL
