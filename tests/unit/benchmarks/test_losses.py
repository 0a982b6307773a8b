"""A DGX-1V that loses GPUs: the page has a table of the result file, and the model would say the same again."""

import json
from typing import Any

import pytest

from benchmarks import losses
from benchmarks.pages.made import filled
from tests.harness import ROOT


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(losses.RESULT.read_text(encoding="utf-8"))
    return found


def test_the_page_has_the_table_of_the_result() -> None:
    page = filled((ROOT / "docs" / "elastic.md").read_text(encoding="utf-8"))
    rows = losses.table(stored()).splitlines()
    assert len(rows) == 2 + len(losses.LEFT) * len(losses.COLLECTIVES) * len(losses.SIZES)
    assert all(row in page for row in rows)


def test_a_result_says_what_it_is() -> None:
    found = stored()
    assert (found["format"], found["simulated"], found["machine"]) == ("blinkmpi.losses", True, "dgx-1v")
    assert len(found["commit"]) == 40


def test_all_sets_of_five_to_eight_gpus_are_there() -> None:
    """As many as there are ways to choose them, since NVLinks join each."""
    rows = stored()["rows"]
    counts = {left: sum(r["alike"] for r in rows if len(r["gpus"]) == left) for left in (8, 7, 6, 5)}
    assert counts == {8: 1, 7: 8, 6: 28, 5: 56}


def test_long_vectors_never_take_longer_on_trees_and_least_gain_where_all_gpus_are_there() -> None:
    found = stored()
    at = len(found["sizes"]) - 1
    gains = {len(r["gpus"]): [] for r in found["rows"]}  # type: dict[int, list[float]]
    for row in found["rows"]:
        gains[len(row["gpus"])].append(row["allreduce"]["rings"][at] / row["allreduce"]["trees"][at])
    assert min(map(min, gains.values())) > 0.98
    assert max(gains[8]) < max(gains[7]) < max(gains[6]) < max(gains[5])


def test_the_least_of_a_table_is_no_greater_than_the_mean_and_that_than_the_most() -> None:
    assert losses.three([1.0, 4.0], [1, 1]) == (1.0, pytest.approx(2.0), 4.0)
    assert losses.three([1.0, 8.0], [2, 1]) == (1.0, pytest.approx(2.0), 8.0)


@pytest.mark.slow
def test_a_row_is_what_the_model_says() -> None:
    part, ranks, alike = next(one for one in losses.sets_of("dgx-1v") if len(one[1]) == 7)
    row = next(r for r in stored()["rows"] if tuple(r["gpus"]) == ranks)
    assert row["alike"] == alike
    again = losses.row_of(part, "allreduce")
    assert again["rings_on"] == row["allreduce"]["rings_on"]
    for side in ("trees", "rings"):
        assert again[side] == pytest.approx(row["allreduce"][side])
