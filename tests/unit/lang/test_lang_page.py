"""docs/lang.md: its programs run, in their order, and say what the page says."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkmpi.lang import library
from blinkmpi.lang.written import Written
from blinkmpi.topology import machine
from tests.unit.lang.algorithms import NODES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "lang.md").read_text(encoding="utf-8")


def test_the_programs_of_the_page_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    without_mpi = [block for block in blocks if "Communicator" not in block]
    assert len(without_mpi) == len(blocks) - 1, "the one that opens a communicator is in tests/mpi/lang"
    there: dict[str, Any] = {}
    for number, block in enumerate(without_mpi):
        path = tmp_path / f"block{number}.py"
        path.write_text(block)
        exec(compile(block, str(path), "exec"), there)
    said = capsys.readouterr().out
    shown = re.search(r"^((?: {4}.*\n)+)", PAGE[PAGE.index("`made.explain()` says") :], re.MULTILINE)
    assert shown is not None
    assert said.startswith("".join(line[4:] + "\n" for line in shown[1].splitlines()))
    assert [None if part is None else part.tolist() for rank in there["results"] for part in rank] == [[0] * 4, [1] * 4]
    assert there["ring"](5).flow.outputs == library.ring(5).flow.outputs
    assert there["two_step"](8, 4).flow.outputs == library.two_step(8, 4).flow.outputs


def test_islands_and_ring_compare_as_the_page_says() -> None:
    seconds = [
        [made.simulate(machine("pcie-8"), nbytes).seconds for made in (library.islands(8, 4), library.ring(8))]
        for nbytes in (1 << 20, 64 << 20)
    ]
    assert seconds[0][0] < seconds[0][1]
    assert seconds[1][0] == pytest.approx(seconds[1][1], rel=0.02)


def test_the_table_has_the_whole_library_and_its_steps() -> None:
    rows = re.findall(r"^\| `(\w+)\(n(, k)?\)`.*?\| (\w+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    there = {name: value for name, value in vars(library).items() if isinstance(value, Written)}
    assert {row[0] for row in rows} == set(there)
    n, k = 8, 2
    for name, nodes, collective, steps, sent in rows:
        assert bool(nodes) == (there[name] in NODES)
        made = there[name](n, k) if nodes else there[name](n)
        assert made.collective == collective
        formula = re.sub(r"(?<!log)(\d) ?(?=[nl(])", r"\1*", steps.partition(",")[0])
        want = eval(formula, {"n": n, "k": k, "log2": np.log2})
        said = dict(line.split(None, 1) for line in made.explain().splitlines()[1:])
        assert int(said["steps"].split()[0]) == want, name
        if re.fullmatch(r"[\dn()/ -]+", sent):
            most = eval(sent.replace("2(n", "2*(n"), {"n": n})
            assert eval(said["bytes"].split()[3]) == pytest.approx(most), name
