"""The figures of the library on the page: what the result file says, and what the program would say again."""

import json

import pytest

from blinkmpi.lang import library
from tests.unit.benchmarks.scripts import needs, script

pytestmark = needs("lang_library")


def test_the_pages_table_is_what_the_result_file_gives() -> None:
    made = script("lang_library")
    page = made.PAGE.read_text(encoding="utf-8")
    assert made.with_table(page, json.loads(made.RESULT.read_text(encoding="utf-8"))) == page, (
        "run python benchmarks/lang_library.py --page"
    )


@pytest.mark.parametrize("name", ["islands", "one_step"])
def test_a_row_of_the_file_is_what_the_model_says(name: str) -> None:
    made = script("lang_library")
    on = {"islands": ("pcie-8", library.islands(8, 4)), "one_step": ("cpu:8", library.one_step(8))}[name]
    found = made.simulated(made.Row(*on))
    rows = json.loads(made.RESULT.read_text(encoding="utf-8"))["rows"]
    assert found == next(row for row in rows if (row["machine"], row["algorithm"]) == (on[0], name))


def test_every_algorithm_of_the_library_has_a_row() -> None:
    made = script("lang_library")
    rows = json.loads(made.RESULT.read_text(encoding="utf-8"))["rows"]
    written = {name for name, value in vars(library).items() if type(value).__name__ == "Written"}
    assert {row["algorithm"] for row in rows} == written
