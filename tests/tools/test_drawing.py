"""Tables as lines of text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cnr_store_tools.drawing import GAP, Column, drawn, widths_within

cells = st.text(st.sampled_from("ab \N{LATIN SMALL LETTER E WITH ACUTE}\N{CJK UNIFIED IDEOGRAPH-8868}"), max_size=30)


@given(rows=st.lists(st.tuples(cells, cells), max_size=4), room=st.integers(7, 70), is_number=st.booleans())
def test_lines_fit_the_room_and_lose_no_letter(rows: list[tuple[str, str]], room: int, is_number: bool) -> None:
    columns = [Column("name", [row[0] for row in rows]), Column("rows", [row[1] for row in rows], is_number=is_number)]

    widths = widths_within(columns, room)
    lines = list(drawn(columns, widths, "-"))

    assert all(cell_len(line) <= room for line in lines)
    assert sum(widths) + GAP <= room
    if max(column.width for column in columns) * 2 + GAP <= room:
        assert len(lines) == 2 + len(rows)  # nothing was folded
    printed = "".join(lines).replace("-", "")
    given_text = "namerows" + "".join(cell for row in rows for cell in row)
    assert sorted(printed.replace(" ", "")) == sorted(given_text.replace(" ", ""))


def test_column_that_keeps_its_width_is_not_folded() -> None:
    columns = [Column("note", ["n" * 40]), Column("time", ["2026-11-28 15:00:00"], keeps_width=True)]

    lines = list(drawn(columns, widths_within(columns, 30), "-"))

    assert lines[2] == "n" * 9 + "  2026-11-28 15:00:00"
    assert max(map(len, lines)) == 30
