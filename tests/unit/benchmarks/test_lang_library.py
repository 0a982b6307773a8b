"""The figures of the library: what is on the page, in the result files, and what the programs would say again."""

import json
from pathlib import Path

import pytest

from blinkmpi.lang import library
from tests.unit.benchmarks.scripts import script
from tests.unit.lang.algorithms import NODES, WRITTEN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["islands", "one_step"])
def test_a_simulated_row_is_what_the_model_says(name: str) -> None:
    made = script("lang/simulate")
    on = {"islands": ("pcie-8", library.islands(8, 4)), "one_step": ("cpu:8", library.one_step(8))}[name]
    found = made.simulated(made.Row(*on))
    rows = json.loads(made.RESULT.read_text(encoding="utf-8"))["rows"]
    assert found == next(row for row in rows if (row["machine"], row["algorithm"]) == (on[0], name))


def test_every_algorithm_of_the_library_is_simulated_and_measured() -> None:
    made, page = script("lang/simulate"), script("lang/page")
    names = {written.name for written in WRITTEN}
    assert {row["algorithm"] for row in json.loads(made.RESULT.read_text(encoding="utf-8"))["rows"]} == names
    of_nodes = {written.name for written in NODES}
    found = {}
    for path in page.measured_files():
        document = json.loads(path.read_text(encoding="utf-8"))
        assert document["blinkmpi"]["commit"]
        assert all(row[side]["wrong"] == 0 for row in document["results"] for side in ("algorithm", "default", "mpi"))
        key = document["blinkmpi"]["ranks"], document["lang_measured"]["nodes"]
        found[key] = {row["name"] for row in document["results"]}
    one_node = names - of_nodes
    assert found == {(4, ""): one_node, (8, ""): one_node, (4, "2+2"): of_nodes, (8, "4+4"): of_nodes}


@pytest.mark.slow
def test_it_measures_and_shows_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, path = script("lang/measure"), tmp_path / "x.json"
    few = f"-np 2 --sizes 16384 --rounds 1 --iters 2 --limit 60 -o {path}"
    assert made.main(few.split()) == 0, capsys.readouterr()
    rows = json.loads(path.read_text())["results"]
    assert {row["name"] for row in rows} == {written.name for written in WRITTEN if written not in NODES}
    for row in rows:
        own = row["algorithm"]
        assert own["how"]["scheme"] == f"lang:{row['name']}"
        assert own["predicted_by"] == "steps"
        assert min(own["us"], own["predicted_us"], row["default"]["bound_us"], row["mpi"]["us"]) > 0
        assert row["mpi"]["ratio"] == row["mpi"]["us"] / own["us"]
    page = script("report").render([("lang-measured-x.json", json.loads(path.read_text()))])
    assert "## Chunk programs" in page
    assert "2 on one node" in page
    assert "| ring | allreduce | 16 KiB |" in page


@pytest.mark.parametrize("words", ["-np 1", "-np 4 --nodes 1+3", "-np 4 --nodes 4", "-np 4 --nodes 4+4"])
def test_what_it_cannot_measure_is_said(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("lang/measure").main(words.split())
    assert words.split()[-1] in capsys.readouterr().err
