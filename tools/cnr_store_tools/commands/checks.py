"""Commands that check and repair a store: verify, repair."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_store import BadInput, repair_store, verify_store
from cnr_store_tools.exits import ExitCode
from cnr_store_tools.options import Branch, DryRun, Json, StorageOptions, Url, Version, open_store
from cnr_store_tools.output import emit, to_document
from cnr_store_tools.progress import progress_bars
from cnr_store_tools.render import repair_parts, verify_parts


def verify(
    url: Url,
    version: Version = None,
    all_versions: Annotated[
        bool, typer.Option("--all", help="All versions that readers may open, not only the newest and tagged ones.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also replay every table, and compare the state digest of each segment.")
    ] = False,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Read the log and every object, and list all damage. Exit code 1 if there is any."""
    if all_versions and version is not None:
        raise BadInput("give --version or --all, not both")
    with open_store(url, storage_option, branch) as store, progress_bars() as progress:
        report = verify_store(store, version=version, all_versions=all_versions, deep=deep, progress=progress)
    emit({"is_sound": report.is_sound, **to_document(report)}, verify_parts(report), as_json=json)
    if not report.is_sound:
        raise typer.Exit(ExitCode.PROBLEMS)


def repair(
    url: Url,
    dry_run: DryRun = False,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Make the newest undamaged state the head. Stop writers first. Deletes nothing. Exit code 1: dry run has work."""
    with open_store(url, storage_option, branch) as store, progress_bars() as progress:
        report = repair_store(store, dry_run=dry_run, progress=progress)
    emit(to_document(report), repair_parts(report), as_json=json)
    if report.target is None or (report.is_dry_run and report.actions):
        raise typer.Exit(ExitCode.PROBLEMS)
