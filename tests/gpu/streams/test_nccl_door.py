"""A plain torch program with backend ``nccl`` whose calls the door makes: results, graphs and losses as by NCCL."""

import pytest

from benchmarks.nccl_door import COLLECTIVES, started
from tests.gpu.helpers import at_least

BUDGET_S = 90.0

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, at_least(2)]


def test_an_unchanged_program_under_the_door() -> None:
    plain, why = started(2, BUDGET_S, with_door=False, quick=True)
    assert not why
    found, why = started(2, BUDGET_S, with_door=True, quick=True)
    assert not why
    assert found["first_ours"], found["communicators"]
    wrong = [row for row in found["rows"] if row["wrong"] or row["graph_wrong"]]
    assert not wrong
    assert found["losses"] == plain["losses"], "two ranks' sums do not depend on their order"
    assert found["ours_in_training"] > 0
    ours = {row["collective"] for row in found["rows"] if row["ours"] == row["checked"]}
    assert ours >= set(COLLECTIVES) - {"all_to_all"}, found["not_ours"]  # which some versions of torch send in pieces
