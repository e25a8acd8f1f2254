"""Commands that copy tensors out of a store and into one, or all of it: export, import, copy, promote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import typer

from cnr_store import (
    BadInput,
    ImportReport,
    NotFound,
    Store,
    StoreCopyReport,
    TableOptions,
    check_import,
    copy_store,
    export_snapshot,
    import_tensors,
)
from cnr_store.errors import NotAStore
from cnr_store_tools.exits import need
from cnr_store_tools.options import (
    Branch,
    Channel,
    Json,
    Step,
    StorageOptions,
    Tag,
    TargetOptions,
    Url,
    Version,
    check_bits,
    open_store,
    optional_size,
    place_options,
)
from cnr_store_tools.output import emit, to_document
from cnr_store_tools.progress import progress_bars
from cnr_store_tools.render import export_parts
from cnr_store_tools.text import count_text, natural, size_text, time_text

ExportFormat = Literal["safetensors", "parquet", "npy"]
ImportFormat = Literal["safetensors", "parquet", "npy", "torch", "dcp", "torcheasyrec"]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", metavar="SIZE", help="Maximum bytes per second to copy: 200MiB.")
]
NewStore = Annotated[str, typer.Argument(metavar="TARGET", help="Place of the new store: empty, or a copy to finish.")]
_SUFFIXES: dict[str, ExportFormat] = {".safetensors": "safetensors", ".parquet": "parquet", ".npy": "npy"}


def export(
    url: Url,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The file (safetensors) or folder (parquet, npy) to write.")
    ],
    format: Annotated[  # noqa: A002 - the option's name
        ExportFormat | None,
        typer.Option("--format", "--to", "-f", help="Default: by the suffix of PATH, else safetensors."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", "-t", help="A table, or a pattern (*, ?); may be repeated; default all."),
    ] = None,
    slots: Annotated[bool, typer.Option("--slots/--no-slots", help="Include optimizer slots.")] = True,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Include dense tensors.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export at PATH.")] = False,
    version: Version = None,
    step: Step = None,
    tag: Tag = None,
    channel: Channel = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Write a version's tensors to safetensors, Parquet or npy."""
    chosen = format or _SUFFIXES.get(path.suffix, "safetensors")
    with open_store(url, storage_option, branch) as store, progress_bars() as progress:
        snapshot = store.snapshot(version, step=step, tag=tag, channel=channel)
        report = export_snapshot(
            snapshot, path, format=chosen, tables=table, slots=slots, dense=dense, overwrite=overwrite,
            progress=partial(progress, "export"),
        )  # fmt: skip
    emit({"url": store.url, **to_document(report)}, export_parts(report), as_json=json)


def import_(
    url: Url,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A safetensors file, a folder of an earlier export (Parquet, npy), a file of torch.save or a folder "
            "of torch.distributed.checkpoint (both without pickle), or TorchEasyRec's folder of dumped deltas.",
        ),
    ],
    format: Annotated[  # noqa: A002 - the option's name
        ImportFormat | None,
        typer.Option(
            "--format",
            "-f",
            help="Default: a folder with a .metadata is of DCP, with files of steps of TorchEasyRec, another is an "
            "export; a file is safetensors by its suffix, else of torch.",
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            "-t",
            help="A tensor that is a table, or a pattern (*, ?); may be repeated. Default: the description of an "
            "earlier export, or matrices of at least 1,000 rows. For a training to go on: its embeddings.",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Training step; default the file's step, or 0.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="torch, dcp: the entry with the model's tensors, if several have some."),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            "--extra", help="torch, dcp: an entry that a manager has in extras= (scheduler); may be repeated."
        ),
    ] = None,
    reader: Annotated[
        str | None, typer.Option("--reader", help="torch, dcp: the entry with the state of the data loader.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Keep every bit of tables and slots.")] = False,
    bits: Annotated[
        int | None, typer.Option("--bits", help="As exact as Check-N-Run rows of 2, 3, 4 or 8 bits; default 8.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option("--max-error", help="Largest error of an element, instead of --bits.")
    ] = None,
    nonfinite: Annotated[
        Literal["refuse", "escape"],
        typer.Option("--nonfinite", help="Rows with NaN or Inf: an error, or kept as they are."),
    ] = "refuse",
    create: Annotated[bool, typer.Option("--create", help="Create the store if there is none.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Drop tables of the newest version that the file lacks.")
    ] = False,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Commit the tensors of a file as a baseline. Fences a writer that is open elsewhere.

    Optimizer state in a file of torch.save or DCP is stored with the tables that it belongs to: a CheckpointManager
    resumes the training, with --exact to the last bit. Each step that TorchEasyRec dumped becomes a version; those that
    the store has are skipped.
    """
    options = _table_options(exact, bits, max_error, nonfinite)
    if not path.exists():
        raise NotFound(f"there is no file {path}", path=str(path))
    chosen = format or _import_format(path)
    if path.is_dir() != (chosen in ("parquet", "npy", "dcp", "torcheasyrec")):
        raise BadInput(f"{path} is a {'folder' if path.is_dir() else 'file'}, which format {chosen} is not")
    if chosen not in ("torch", "dcp") and (model or extra or reader):
        raise BadInput("--model, --extra and --reader are for files of torch.save and for folders of DCP")
    if chosen == "torcheasyrec":
        if table or step is not None:
            raise BadInput("--table and --step are not for a dump of TorchEasyRec: its files name tables and steps")
        _import_dump(url, path, options, storage_option, create=create, replace=replace, json=json)
        return
    check: Callable[[], None]
    save: Callable[..., ImportReport]
    if chosen in ("torch", "dcp"):
        need("torch")
        from cnr_store.integrations.checkpoints import check_checkpoint, import_checkpoint, load_checkpoint

        training = load_checkpoint(path, model=model, extras=extra or (), reader=reader)
        save = partial(import_checkpoint, source=training)
        check = partial(check_checkpoint, training, tables=table, options=options)
    else:
        save = partial(import_tensors, source=path)
        check = partial(check_import, path, tables=table, options=options)
    with _opened(url, storage_option, check if create else None) as store, progress_bars() as progress:
        report = save(
            store, step=step, tables=table, options=options, replace=replace, progress=partial(progress, "import")
        )
    emit({"url": store.url, **to_document(report)}, _import_parts(store.url, report), as_json=json)


def _import_dump(
    url: str, path: Path, options: TableOptions, storage_option: list[str] | None, *, create: bool,
    replace: bool, json: bool,
) -> None:  # fmt: skip
    from cnr_store.integrations.torcheasyrec import check_dump, import_dump

    check = partial(check_dump, path) if create else None
    with _opened(url, storage_option, check) as store, progress_bars() as progress:
        report = import_dump(store, path, options=options, replace=replace, progress=partial(progress, "import"))
    lines = [f"skipped {count_text(len(report.skipped), 'step')}: not after the step that the store had"]
    if report.versions:
        made = f"versions {report.versions[0]} to {report.versions[-1]}, steps {report.steps[0]} to {report.steps[-1]}"
        read = f"{count_text(report.rows, 'row')} and {count_text(report.evicted, 'eviction')}"
        size = size_text(report.size_bytes)
        lines.insert(0, f"{store.url}: committed {made}: {read} of {count_text(len(report.tables), 'table')}, {size}")
    emit({"url": store.url, **to_document(report)}, lines[: 1 + bool(report.skipped)], as_json=json)


def _import_format(path: Path) -> ImportFormat:
    if path.is_dir():
        if (path / ".metadata").is_file():
            return "dcp"
        # The index of an export says parquet or npy.
        return "torcheasyrec" if _looks_dumped(path) else "npy"
    return "safetensors" if path.suffix == ".safetensors" else "torch"


def _looks_dumped(folder: Path) -> bool:
    """Whether a folder has files of steps of TorchEasyRec; an export has none of these names."""
    return any(chain(folder.glob("*_step_*.parquet"), folder.glob("step_*/*_step_*.parquet")))


def _import_parts(url: str, report: ImportReport) -> Iterator[str]:
    yield f"{url}: committed version {report.version} (baseline, step {report.step}), {size_text(report.size_bytes)}"
    tables = [
        f"{name} (slots: {', '.join(report.slots[name])})" if name in report.slots else name for name in report.tables
    ]
    names = {"tables": tables, "dense": report.dense, "dropped": report.dropped, "ignored": report.ignored}
    for key, listed in names.items():
        found = sorted(listed, key=natural)
        if found:
            yield f"{key} ({len(found)}): {', '.join(found[:20])}{', ...' if len(found) > 20 else ''}"


def _opened(url: str, storage_option: list[str] | None, check: Callable[[], None] | None) -> Store:
    """Open a store; with ``check``, which raises if the source is wrong, create it if there is none."""
    try:
        return open_store(url, storage_option)
    except NotAStore:
        if check is None:
            raise
    check()  # before the store is created: a wrong source leaves none
    return Store.create(url, **place_options(storage_option))


def _table_options(
    exact: bool, bits: int | None, max_error: float | None, nonfinite: Literal["refuse", "escape"]
) -> TableOptions:
    if exact + (bits is not None) + (max_error is not None) > 1:
        raise BadInput("give at most one of --exact, --bits and --max-error")
    if exact:
        return TableOptions.exact(nonfinite=nonfinite)
    if bits is not None:
        return TableOptions(bits=check_bits(bits), nonfinite=nonfinite)
    return TableOptions(max_error=max_error, nonfinite=nonfinite)


def copy(
    url: Url,
    target: NewStore,
    all_versions: Annotated[
        bool, typer.Option("--all", help="Copy every live version, with its deltas, tags and channels.")
    ] = False,
    version: Version = None,
    step: Step = None,
    tag: Tag = None,
    channel: Channel = None,
    bandwidth: Bandwidth = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
    json: Json = False,
) -> None:
    """Make an independent store of a version, or of all. It has a new uuid. A relay can be copied too.

    Checks every object while it copies it. After a failure or kill run it again: it continues.
    """
    with open_store(url, storage_option, branch) as store, progress_bars() as progress:
        report = copy_store(
            store, target, all_versions=all_versions, version=version, step=step, tag=tag, channel=channel,
            bytes_per_s=optional_size(bandwidth, "--bandwidth"), progress=partial(progress, "copy"),
            **place_options(target_option),
        )  # fmt: skip
    emit({"url": store.url, **to_document(report)}, (_copy_text(report),), as_json=json)


def promote(
    url: Url,
    target: NewStore,
    bandwidth: Bandwidth = None,
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
    json: Json = False,
) -> None:
    """Make a writable store of a relay whose source is lost. It has a new uuid, and all that the relay has.

    The relay stays as it is. After a failure or kill run it again: it continues.
    """
    with open_store(url, storage_option) as store, progress_bars() as progress:
        if store.relay is None:
            raise BadInput(f"{store.url} is a store that can be written, not a relay; use it, or copy it: `cnr copy`")
        report = copy_store(
            store, target, all_versions=True, bytes_per_s=optional_size(bandwidth, "--bandwidth"),
            progress=partial(progress, "promote"), **place_options(target_option),
        )  # fmt: skip
        newest = store.head().record
    lost = (
        f"the relay's newest version is {newest.v}, step {newest.step}, of {time_text(newest.ts_ms)}; what"
        f" {store.relay.source} saved later is not in it"
    )
    emit({"url": store.url, **to_document(report)}, (_copy_text(report), lost), as_json=json)


def _copy_text(report: StoreCopyReport) -> str:
    source = f"the source's version {report.source_version}"
    if not report.states:
        return (
            f"store {report.store_uuid} was complete already: it is a copy of {source}; its newest version is "
            f"{report.version} now"
        )
    parts = [
        f"made store {report.store_uuid}: its version {report.version} has the state of {source}",
        count_text(report.states, "state"), count_text(report.segments, "segment"),
        count_text(report.objects, "object"), size_text(report.size_bytes),
    ]  # fmt: skip
    if report.reused_objects:
        parts.append(f"{count_text(report.reused_objects, 'object')} already there")
    if report.skipped:
        parts.append(f"skipped {count_text(report.skipped, 'expired state')}")
    return ", ".join(parts)
