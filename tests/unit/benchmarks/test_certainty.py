"""What benchmarks/certainty.py makes of the files of its jobs, and the page of that."""

from typing import Any

from benchmarks import certainty
from benchmarks.pages.certainty import certainty_file


def document(predicted: float, measured: float) -> dict[str, Any]:
    """The file of a job with one row, that took half the time in place."""
    own: dict[str, Any] = {"scheme": "direct", "protocol": "cma"}
    row: dict[str, Any] = {"size": 1 << 20, "blinkmpi": own}
    for place, part in (("out_of_place", 1.0), ("in_place", 0.5)):
        own[place] = {"predicted_us": predicted * part, "bound_us": 40.0 * part}
        row[place] = {"time": measured * part, "nwrong": 0}
    return {"results": [row], "blinkmpi": {"collective": "allgather"}}


def test_a_row_has_the_medians_over_the_jobs() -> None:
    found = certainty.rows([document(90.0, 100.0), document(95.0, 80.0), document(92.0, 120.0)])
    assert [row["place"] for row in found] == ["out_of_place", "in_place"]
    first = found[0]
    assert (first["predicted_us"], first["measured_us"], first["bound_us"]) == (92.0, 100.0, 40.0)
    assert first["measured_us_quartiles"] == [90.0, 110.0]
    assert first["error"] == 92.0 / 100.0 - 1
    assert first["within"]
    assert not certainty.rows([document(80.0, 100.0)])[0]["within"]
    assert "-20.0  *" in certainty.table(certainty.rows([document(80.0, 100.0)]))


def test_the_page_marks_what_misses() -> None:
    about = {"rounds": 1, "within": 0.1, "calibration_s": [0.5, 0.25]}
    rows = certainty.rows([document(80.0, 100.0)])
    page = certainty_file("x.json", {"certainty": about, "results": rows, "blinkmpi": {"ranks": 2}, "env": []})
    assert "0 of 2 rows are within 10%" in page
    assert "-20.0 % *" in page
    assert "0.25 to 0.50 s" in page
