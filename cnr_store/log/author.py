"""Identify the writer of a commit record, for messages to people. No decision depends on it."""

from __future__ import annotations

import os
import socket

from cnr_store.errors import Fenced
from cnr_store.format.records import CommitRecord, WriterInfo
from cnr_store.log.clock import text_of

LIBRARY = "cnr-store 0.1.0"


def writer_info(run_id: str = "") -> WriterInfo:
    """Return the writer of a record: host, process and library of this process."""
    return WriterInfo(host=f"{socket.gethostname()}:{os.getpid()}", lib=LIBRARY, run_id=run_id)


def author_of(record: CommitRecord) -> str:
    """Return host, process and time of a record as text for a message. Pure.

    Examples
    --------
    >>> info = WriterInfo(host="node-7:4711", lib=LIBRARY, run_id="")
    >>> author_of(
    ...     CommitRecord(
    ...         v=0, kind="init", commit_uuid="", store_uuid="", parent_digest="", epoch=0, checkpoint=0, step=0,
    ...         ts_ms=1_700_000_000_000, writer=info,
    ...     )
    ... )
    'host node-7, process 4711, at 2023-11-14T22:13:20Z'
    """
    host, _, process = record.writer.host.rpartition(":")
    who = f"host {host}, process {process}" if host and process.isdigit() else f"host {record.writer.host}"
    return f"{who}, at {text_of(record.ts_ms)}"


def fenced_by(record: CommitRecord, epoch: int) -> Fenced:
    """Return the error of a writer of ``epoch`` that reads a record of a later epoch. Pure."""
    return Fenced(
        f"another writer has taken over with commit record {record.v} ({record.kind}): {author_of(record)}; its epoch "
        f"is {record.epoch}, this writer's is {epoch}. This writer cannot commit any more: stop it, or stop the other "
        "one and restore here again",
        version=record.v, expected=epoch, found=record.epoch,
    )  # fmt: skip
