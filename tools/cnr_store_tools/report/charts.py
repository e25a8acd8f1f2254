"""Charts as inline SVG: text in, text out. Colours are classes of the page's style, so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 220
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 12, 44
MOST_BARS = 400
"""More values than this are drawn as so many bars, each of the largest value of its run."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its height, its class of the style, and the text that a pointer over it shows."""

    value: float
    style: str
    hint: str


@dataclass(frozen=True, slots=True)
class NamedBar:
    """A named point on the horizontal axis; ``at`` is an index into the bars."""

    at: int
    text: str


def thinned(bars: Sequence[Bar], marks: Sequence[NamedBar] = ()) -> tuple[list[Bar], list[NamedBar]]:
    """Return at most `MOST_BARS` bars, the largest of each run, and the marks moved with them."""
    per_bar = max(1, math.ceil(len(bars) / MOST_BARS))
    runs = [bars[start : start + per_bar] for start in range(0, len(bars), per_bar)]
    return [max(run, key=lambda bar: bar.value) for run in runs], [
        NamedBar(mark.at // per_bar, mark.text) for mark in marks
    ]


def bar_chart(
    bars: Sequence[Bar], *, label: str, unit: Callable[[float], str], ends: tuple[str, str],
    marks: Sequence[NamedBar] = (), is_log: bool = False,
) -> str:  # fmt: skip
    """Return a chart of bars, left to right.

    Parameters
    ----------
    label
        What the chart shows, for screen readers.
    unit
        Turns a value into the text of the vertical axis.
    ends
        Texts below the first and the last bar.
    is_log
        Heights grow with the logarithm: baselines and deltas differ by orders of magnitude.
    """
    drawn, named = thinned(bars, marks)
    values = [bar.value for bar in drawn if bar.value > 0]
    if not values:
        return f'<p class="quiet">{escape(label)}: nothing to draw</p>'
    low, high = _bounds(values, is_log=is_log)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    step = plot_width / len(drawn)

    def height(value: float) -> float:
        if value <= 0:
            return 0.0
        share = (math.log(value / low) / math.log(high / low)) if is_log else value / high
        return plot_height * min(1.0, max(0.0, share))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    for tick in _ticks(low, high, is_log=is_log):
        y = TOP + plot_height - height(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, unit(tick), "end"))
    for index, bar in enumerate(drawn):
        x, tall = LEFT + index * step, height(bar.value)
        parts.append(
            f'<rect class="{bar.style}" x="{x:.1f}" y="{TOP + plot_height - tall:.1f}" '
            f'width="{max(1.0, step - (1 if step > 3 else 0)):.1f}" height="{tall:.1f}">'
            f"<title>{escape(bar.hint)}</title></rect>"
        )
    if is_log:
        parts.append(_text(WIDTH - RIGHT, TOP - 4, "logarithmic axis", "end"))
    for mark in named:
        x = LEFT + (mark.at + 0.5) * step
        parts.append(f'<path class="mark" d="M{x:.1f} {TOP + plot_height + 3} l4 8 h-8 z"/>')
        anchor = "end" if x > WIDTH * 0.9 else "start" if x < WIDTH * 0.1 else "middle"
        parts.append(_text(x, TOP + plot_height + 24, mark.text, anchor))
    for x, text, anchor in ((LEFT, ends[0], "start"), (WIDTH - RIGHT, ends[1], "end")):
        parts.append(_text(x, HEIGHT - 4, text, anchor))
    return "".join([*parts, "</svg>"])


def stacked_bar(shares: Sequence[tuple[str, float, str]], label: str) -> str:
    """Return one horizontal bar of parts: name, value and class of each; empty parts are left out."""
    total = sum(value for _, value, _ in shares) or 1.0
    x, parts = 0.0, [f'<svg viewBox="0 0 {WIDTH} 22" role="img" aria-label="{escape(label)}">']
    for name, value, style in shares:
        width = WIDTH * value / total
        if width > 0:
            title = f"<title>{escape(f'{name}: {value / total:.1%}')}</title>"
            parts.append(f'<rect class="{style}" x="{x:.1f}" y="0" width="{width:.1f}" height="22">{title}</rect>')
        x += width
    return "".join([*parts, "</svg>"])


def sparkline(values: Sequence[float]) -> str:
    """Return small bars without axes, for a cell of a table."""
    high = max(values, default=0) or 1
    drawn, _ = thinned([Bar(value, "delta", "") for value in values])
    step = 120 / max(1, len(drawn))
    bars = "".join(
        f'<rect class="delta" x="{index * step:.1f}" y="{20 - 20 * bar.value / high:.1f}" '
        f'width="{max(0.5, step - 0.5):.1f}" height="{20 * bar.value / high:.1f}"/>'
        for index, bar in enumerate(drawn)
    )
    return f'<svg class="spark" viewBox="0 0 120 20" aria-hidden="true">{bars}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bounds(values: Sequence[float], *, is_log: bool) -> tuple[float, float]:
    if not is_log:
        return 0.0, max(values)
    low, high = 4.0 ** math.floor(math.log(min(values), 4)), 4.0 ** math.ceil(math.log(max(values), 4))
    return low, max(high, 4 * low)


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return quarters; of a logarithmic axis powers of four, at most about six."""
    if not is_log:
        return [high * share for share in (0, 0.25, 0.5, 0.75, 1)]
    powers = range(round(math.log(low, 4)), round(math.log(high, 4)) + 1)
    return [4.0**power for power in powers[:: math.ceil(len(powers) / 6)]]
