"""The table of what works on which version of torch."""

from benchmarks import jobs
from tests.torch_suite.versions import RESULTS, TOPICS, cell, table


def test_what_a_cell_says() -> None:
    rows = [{"test": f"test_a[{i}]", "outcome": outcome} for i, outcome in enumerate(("passed", "skipped", "failed"))]
    assert cell(rows, ("test_a",)) == "1 of 3 fail"
    assert cell(rows[:2], ("test_a",)) == "works (1)"
    assert cell(rows[1:2], ("test_a",)) == "torch has none"
    assert cell(rows, ("test_b",)) == "not tried"
    assert cell([{"test": "test_c[np2-ddp]", "outcome": "passed"}], ("test_c[ddp",)) == "works (1)"


def test_every_topic_was_tried_on_every_version() -> None:
    files = sorted(RESULTS.glob("torch-versions-*.json"))
    assert len(files) >= 3
    for path in files:
        document = jobs.load(path)
        assert document is not None
        rows = document["results"][0]["tests"]
        assert [topic for topic, names in TOPICS if cell(rows, names) == "not tried"] == []


def test_versions_are_sorted_as_numbers() -> None:
    documents = [{"results": [{"torch": version, "tests": []}]} for version in ("2.15.0", "2.4.1")]
    assert table(documents)[0] == "| what | torch 2.4.1 | torch 2.15.0 |"
