"""The report as one HTML page that loads nothing. Every text from the store is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

from cnr_store_tools.output import to_document
from cnr_store_tools.report.charts import Bar, NamedBar, bar_chart, sparkline, stacked_bar
from cnr_store_tools.report.facts import SAVED, StoreFacts, VersionFacts
from cnr_store_tools.text import count_text, duration_text, one_line, ranges_text, size_text, time_text

_KINDS = (("baseline", "baseline"), ("delta", "delta"), ("compact", "compaction"), ("other", "tag, channel, ..."))
"""Styles of bars, and what they mean."""
MOST_TABLES = 200
STYLE = """
:root { color-scheme: light dark; --fg: #1d2330; --bg: #ffffff; --quiet: #667; --line: #dde; --panel: #f6f7fb;
  --baseline: #d08a20; --delta: #4a63d9; --compact: #3a9a5b; --other: #99a; --bad: #c22; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e8ef; --bg: #14161c; --quiet: #99a; --line: #333a48;
  --panel: #1c1f28; --baseline: #e0a040; --delta: #7d92ff; --compact: #55bb77; --other: #667; --bad: #f66; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto;
  max-width: 1040px; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 36px 0 8px; }
.quiet { color: var(--quiet); } .bad { color: var(--bad); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 12px; margin: 20px 0; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 22px; }
svg { width: 100%; height: auto; display: block; } svg.spark { width: 120px; height: 20px; }
.grid { stroke: var(--line); } .axis { fill: var(--quiet); font-size: 12px; }
.baseline { fill: var(--baseline); } .delta { fill: var(--delta); } .compact { fill: var(--compact); }
.other, .mark { fill: var(--other); } .s0 { fill: #4a63d9; } .s1 { fill: #d08a20; } .s2 { fill: #8a5bc7; }
.s3 { fill: #3a9a5b; } .s4 { fill: #c2587a; } .s5 { fill: #3aa0b0; } .s6 { fill: #889; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 14px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); } td.n, th.n { text-align: right; }
"""
SIZE_KINDS = ("codes", "slots", "rows", "scales", "dense", "documents", "metadata")


def report_html(facts: StoreFacts) -> str:
    """Return the page."""
    url = escape(one_line(facts.status.url))
    body = "\n".join([
        f"<h1>{url}</h1>", _summary(facts), _damage(facts), _sizes(facts), _restores(facts), _times(facts),
        _tables(facts), _segments(facts), _names(facts),
    ])  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{url}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )


def _summary(facts: StoreFacts) -> str:
    head = facts.status.heads[0]
    saved = [one for one in facts.versions if one.kind in SAVED]
    last = saved[-1] if saved else None
    about = f"version {head.version}, step {head.step}, {count_text(len(saved), 'checkpoint')} in this log"
    if head.checkpoint_ms is not None:
        about += f", the newest saved {time_text(head.checkpoint_ms)}"
    cards = [
        ("newest checkpoint", size_text(last.size_bytes or 0) if last else "none"),
        ("against fp32", _ratio(facts.fp32_bytes, last.size_bytes if last else None)),
        ("a restore reads", f"{size_text(head.chain_bytes)} in {count_text(head.chain_length, 'segment')}"),
        ("tables", f"{len(facts.tables):,}"),
        ("rows", f"{sum(table.rows for table in facts.tables):,}"),
        ("between checkpoints", _median_interval(saved)),
    ]
    drawn = "".join(
        f'<div class="card"><span class="quiet">{escape(name)}</span><b>{escape(value)}</b></div>'
        for name, value in cards
    )
    return f'<p class="quiet">{escape(about)}</p>\n<div class="cards">{drawn}</div>'


def _damage(facts: StoreFacts) -> str:
    if facts.damage is not None:
        return f'<p class="bad">The newest version cannot be opened: {escape(one_line(facts.damage))}</p>'
    if facts.verified is None:
        return ""
    if facts.verified.is_sound:
        read = f"{count_text(facts.verified.objects, 'object')}, {size_text(facts.verified.size_bytes)}"
        return f"<p>Verified: every object that a version needs was read ({read}). No problems.</p>"
    rows = [
        (one.kind, one.path or "", ranges_text(sorted(one.versions)), one.message) for one in facts.verified.problems
    ]
    whole = ranges_text(sorted(facts.verified.restorable)) or "none"
    return (
        f'<h2 class="bad">{count_text(len(rows), "problem")}</h2>'
        f"{_table(('kind', 'object', 'versions', 'problem'), rows)}<p>Undamaged versions: {escape(whole)}</p>"
    )


def _sizes(facts: StoreFacts) -> str:
    saved = [one for one in facts.versions if one.size_bytes is not None]
    bars = [
        Bar(
            one.size_bytes or 0,
            one.kind,
            f"{_hint(one)}: {one.kind}, {size_text(one.size_bytes or 0)}, {one.rows:,} rows",
        )
        for one in saved
    ]
    at = {one.version: index for index, one in enumerate(saved)}
    marks = [
        NamedBar(at[nearest], one_line(name))
        for one in facts.versions for name in one.names
        if (nearest := max((version for version in at if version <= one.version), default=None)) is not None
    ]  # fmt: skip
    keys = _keys([(style, name) for style, name in _KINDS if style in SAVED])
    chart = bar_chart(
        bars, label="bytes of each checkpoint", unit=_size_axis, ends=_ends(saved), marks=marks, is_log=True
    )
    rows = bar_chart(
        [Bar(one.rows or 0, one.kind, f"{_hint(one)}: {one.rows:,} rows") for one in saved],
        label="rows of each checkpoint", unit=lambda value: f"{value:,.0f}", ends=_ends(saved),
    )  # fmt: skip
    return f"<h2>Bytes of each checkpoint</h2>{keys}{chart}\n<h2>Rows of each checkpoint</h2>{rows}"


def _restores(facts: StoreFacts) -> str:
    shown = [one for one in facts.versions if one.restore_segments]
    bars = [
        Bar(
            one.restore_bytes, one.kind if one.kind in (*SAVED, "compact") else "other",
            f"{_hint(one)}: {one.kind}, a restore reads {size_text(one.restore_bytes)} in "
            f"{count_text(one.restore_segments, 'segment')}",
        )
        for one in shown
    ]  # fmt: skip
    drawn = {bar.style for bar in bars}
    keys = _keys([(style, name) for style, name in _KINDS if style in drawn])
    chart = bar_chart(bars, label="bytes that a restore of each version reads", unit=_size_axis, ends=_ends(shown))
    return f"<h2>What a restore of each version reads</h2>{keys}{chart}"


def _times(facts: StoreFacts) -> str:
    """Charts of what saves cost the training, and of how old the newest state became before the next one."""
    saved = [one for one in facts.versions if one.kind in SAVED]
    stalled = [one for one in saved if one.stall_s is not None]
    stalls = bar_chart(
        [
            Bar(one.stall_s or 0.0, one.kind, f"{_hint(one)}: {one.kind}, {duration_text(one.stall_s or 0.0)}")
            for one in stalled
        ],
        label="seconds that the training waited for each checkpoint", unit=duration_text, ends=_ends(stalled),
        is_log=True,
    )  # fmt: skip
    ages = [(one, (after.time_ms - one.time_ms) / 1000 + (one.encode_s or 0.0)) for one, after in pairwise(saved)]
    stale = bar_chart(
        [Bar(age, one.kind, f"{_hint(one)}: {duration_text(age)} old when the next one came") for one, age in ages],
        label="age of each checkpoint when the next one came", unit=duration_text, ends=_ends([one for one, _ in ages]),
        is_log=True,
    )  # fmt: skip
    return (
        f"<h2>How long the training waited for each checkpoint</h2>{stalls}\n"
        f"<h2>How old each checkpoint was when the next one came</h2>{stale}"
    )


def _tables(facts: StoreFacts) -> str:
    has_deltas = len(facts.segments) > 1

    def cells() -> Iterator[Sequence[str]]:
        for table in facts.tables[:MOST_TABLES]:
            last = table.changed[-1] if table.changed else 0
            share = f"{last / table.rows:.1%}" if table.rows else ""
            yield (
                escape(one_line(table.name)), f"{table.rows:,}", str(table.dim), escape(table.encoding),
                escape(table.slots), f"{last:,}", share, *[sparkline(table.changed[1:])] * has_deltas,
            )  # fmt: skip

    left_out = len(facts.tables) - MOST_TABLES
    more = f'<p class="quiet">and {left_out:,} smaller tables</p>' if left_out > 0 else ""
    header = ["table", "#rows", "#dim", "encoding", "optimizer state", "#rows of the last segment", "#share"]
    header += ["deltas"] * has_deltas
    return f"<h2>Tables of the newest version</h2>{_raw_table(header, cells())}{more}"


def _segments(facts: StoreFacts) -> str:
    if not facts.segments:
        return ""
    total = {kind: sum(getattr(one.sizes, kind) for one in facts.segments) for kind in SIZE_KINDS}
    bar = stacked_bar([(kind, total[kind], f"s{index}") for index, kind in enumerate(SIZE_KINDS)], "bytes by kind")
    keys = _keys(
        [(f"s{index}", f"{kind} {size_text(total[kind])}") for index, kind in enumerate(SIZE_KINDS) if total[kind]]
    )
    rows = [
        (one.name.lstrip("0")[:10], one.kind, str(one.step), f"{sum(one.rows.values()):,}", size_text(one.sizes.total),
         _ratio(facts.fp32_bytes, one.sizes.total))
        for one in facts.segments
    ]  # fmt: skip
    table = _table(("segment", "kind", "#step", "#rows", "#bytes", "#against fp32"), rows)
    return f"<h2>Segments that a restore of the newest version reads</h2>{keys}{bar}<p></p>{table}"


def _names(facts: StoreFacts) -> str:
    named = [(name, f"{one.version}", f"{one.step}") for one in facts.versions for name in one.names]
    branches = [(head.branch or "", f"{head.version}", f"{head.step}") for head in facts.status.heads[1:]]
    parts = []
    if named:
        parts.append(f"<h2>Tags and channels</h2>{_table(('name', '#version', '#step'), named)}")
    if branches:
        parts.append(f"<h2>Branches</h2>{_table(('branch', '#newest version', '#step'), branches)}")
    last = facts.status.last_maintenance
    if last is not None:
        plain = to_document(last)
        parts.append(
            f"<h2>Last maintenance</h2><p>{escape(plain['outcome'])}, ended {time_text(plain['ended_ms'])}: rewrote "
            f"{size_text(plain['rewritten_bytes'])}, deleted {size_text(plain['deleted_bytes'])}.</p>"
        )
    return "\n".join(parts)


# ---- parts of the page


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return _raw_table(header, ([escape(one_line(cell)) for cell in row] for row in rows))


def _raw_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a header that begins with # is a column of numbers. Cells are HTML."""
    classes = [' class="n"' if name.startswith("#") else "" for name in header]
    heads = "".join(f"<th{style}>{escape(name.lstrip('#'))}</th>" for name, style in zip(header, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{style}>{cell}</td>" for cell, style in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _keys(keys: Sequence[tuple[str, str]]) -> str:
    drawn = "".join(
        f'<svg class="key" viewBox="0 0 1 1"><rect class="{style}" width="1" height="1"/></svg>{escape(name)}'
        for style, name in keys
    )
    return f'<p class="quiet">{drawn}</p>'


def _hint(one: VersionFacts) -> str:
    return f"version {one.version}, step {one.step}, {time_text(one.time_ms)}"


def _ends(shown: Sequence[VersionFacts]) -> tuple[str, str]:
    if not shown:
        return "", ""
    first, last = shown[0], shown[-1]
    return (
        f"version {first.version}, {time_text(first.time_ms)[:16]}",
        f"version {last.version}, {time_text(last.time_ms)[:16]}",
    )


def _size_axis(value: float) -> str:
    return size_text(round(value))


def _ratio(full_bytes: int, stored_bytes: int | None) -> str:
    return f"{full_bytes / stored_bytes:,.1f}x fewer bytes" if stored_bytes and full_bytes else "-"


def _median_interval(saved: Sequence[VersionFacts]) -> str:
    gaps = sorted((b.time_ms - a.time_ms) / 1000 for a, b in pairwise(saved))
    if not gaps:
        return "-"
    seconds = gaps[len(gaps) // 2]
    for limit, unit in ((120, "s"), (7200, "min"), (172_800, "h")):
        if seconds < limit:
            return f"{seconds / {'s': 1, 'min': 60, 'h': 3600}[unit]:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"
