"""docs/files.md says of each file what the file says of itself."""

from __future__ import annotations

from tests.support.files import PAGE, page, purpose
from tests.support.rooms import GPU, LIBRARY, TOOLS, sources


def test_the_page_of_files_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.support.files"


def test_every_file_says_what_it_is_for_in_a_line() -> None:
    said = {file: purpose(file) for root in (TOOLS, LIBRARY, GPU) for file in sources(root)}

    assert [str(file) for file, words in said.items() if not 10 <= len(words) <= 200] == []
