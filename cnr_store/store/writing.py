"""Open the writer of a store: the ranks exchange their shards, and rank 0 fences earlier writers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from typing import get_args

from cnr_store.errors import BadInput
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import WriterInfo
from cnr_store.log.author import writer_info
from cnr_store.log.rebase import draft_after, rebase_fence
from cnr_store.runtime.arguments import checked_choice, checked_count, checked_text
from cnr_store.runtime.ranks import Ranks, rank_zero, together
from cnr_store.runtime.threads import Throttle, check_rate
from cnr_store.segment.shards import KeyShare, Placement, check_placements, column_cuts
from cnr_store.store.internals import StoreInternals
from cnr_store.types import KeyRule, Rectangle
from cnr_store.write.mirrors import MirrorMode, Mirrors, check_mirror_folder
from cnr_store.write.writer import Writer
from cnr_store.write.writer_state import RankShards, Succession, WriterSetup, WriterState


def open_writer(
    internals: StoreInternals,
    *,
    mirror: MirrorMode,
    mirror_folder: str | None,
    bytes_per_s: float | None,
    run_id: str | None,
    ranks: Ranks,
    shards: Placement | None,
    key_rule: KeyRule,
    keyed_mirror_bytes: int | None,
    succession: Succession | None,
) -> Writer:
    """Open a writer; see `Store.writer`. Blocks for a few requests, on all ranks together."""
    if shards is None and ranks.world > 1:
        raise BadInput("several ranks write together, but this one has no shards; pass its rectangles with shards=")
    checked_choice("mirror", mirror, get_args(MirrorMode))
    checked_choice("key_rule", key_rule, get_args(KeyRule))
    check_rate(bytes_per_s)
    if keyed_mirror_bytes is not None:
        checked_count("keyed_mirror_bytes", keyed_mirror_bytes, least=0)
    # Check on all ranks before rank 0 fences: if one fails, all raise and no writer is fenced.
    together(ranks, partial(check_mirror_folder, mirror, mirror_folder))
    info = writer_info(uuid.uuid4().hex if run_id is None else checked_text("run_id", run_id))
    fenced: list[LogEntry] = []

    def open_committer() -> int:
        fenced.append(_fence(internals, info) if succession is None else internals.entry(succession.version))
        return fenced[0].record.v

    version = rank_zero(ranks, open_committer)
    rules = together(ranks, lambda: key_rule)
    if len(set(rules)) > 1:
        raise BadInput(f"the ranks own keys by the rules {rules}; pass the same key_rule= on all", found=rules)
    placements = _exchange_shards(ranks, shards)
    shapes = check_placements(placements)
    heads: list[LogEntry] = []
    together(ranks, lambda: heads.append(fenced[0] if fenced else internals.entry(version)))
    return Writer(
        WriterState(
            WriterSetup(
                internals.storage, internals.log, info, internals.workers,
                Throttle(bytes_per_s), ranks,
                RankShards(
                    ranks.rank, None if shards is None else placements[ranks.rank], shapes, column_cuts(placements),
                    KeyShare(ranks.rank, ranks.world, key_rule),
                ),
            ),
            heads[0], Mirrors(mirror, mirror_folder, keyed_mirror_bytes), succession=succession,
        )
    )  # fmt: skip


def _fence(internals: StoreInternals, info: WriterInfo) -> LogEntry:
    """Commit a fence, after which no earlier writer can commit; return its entry."""
    head = internals.writable_head()
    draft = draft_after(head.record, "fence", info, epoch=head.record.epoch + 1)
    return internals.log.append(head, draft, rebase_fence)


def _exchange_shards(ranks: Ranks, shards: Placement | None) -> list[dict[str, list[Rectangle]]]:
    """Return the shards of every rank, in the order of the ranks."""
    own: Mapping[str, list[list[list[int]]]] = {
        table: [[[int(end) for end in ends] for ends in (one.rows, one.columns)] for one in held]
        for table, held in (shards or {}).items()
    }
    return [
        {table: [Rectangle(tuple(rows), tuple(columns)) for rows, columns in held] for table, held in one.items()}
        for one in together(ranks, lambda: own)
    ]
