"""The tables that pages show of result files: each mark has one, each table has a page, and a wrong mark is named."""

import re
from pathlib import Path

import pytest

from benchmarks.pages import made
from benchmarks.pages.rows import anchor
from tests.harness import ROOT

pytestmark = pytest.mark.slow


PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_every_table_is_on_one_page_and_every_mark_has_its_table() -> None:
    marked = [name for path in PAGES for name in made.MARK.findall(path.read_text(encoding="utf-8"))]
    there = [f"{source}/{name}" for source in made.SOURCES for name in made.made(source)]
    assert sorted(marked) == sorted(there)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_filled_with_whole_tables(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    filled = made.filled(text)
    assert "<!-- made:" not in filled
    assert (filled == text) == (not made.MARK.search(text))
    widths: list[int] = []
    for line in [*filled.splitlines(), ""]:
        if line.startswith("|"):
            widths.append(len(re.split(r"(?<!\\)\|", line)))
        else:
            assert len(set(widths)) <= 1, f"rows of different length before: {line}"
            widths = []


def test_a_table_of_the_page_has_the_numbers_of_its_file() -> None:
    name = "all_reduce-np2.json"
    text = made.made("measurements")["all"]
    assert f"## {name}" in text
    assert f"measurements.md#{anchor(name)}" in made.made("performance")["cpu-ranks"]
    assert "| A100 | 8 |" in made.made("planner")["catalogue"]


@pytest.mark.parametrize(
    ("mark", "known"), [("paper/none", "paper-speedup"), ("none/x", "measurements, losses, nccl, paper")]
)
def test_a_mark_without_a_table_is_named_with_those_there_are(mark: str, known: str) -> None:
    with pytest.raises(KeyError, match=f"made: {mark} .*{known}"):
        made.filled(f"# A page\n\n<!-- made: {mark} -->\n")
