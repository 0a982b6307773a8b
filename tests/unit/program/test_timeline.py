"""A simulated call as a trace: every link carries one chunk at a time, for as long as the prediction says."""

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from blinkmpi.cli import main as cli
from blinkmpi.errors import PlanError
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.call import call_of_bytes
from blinkmpi.program.cost_model import price, timeline
from blinkmpi.topology.machines import machine
from blinkmpi.util.launcher import RANK_VARIABLES


def test_links_are_busy_as_long_as_predicted() -> None:
    topology = machine("dgx-1v")
    call = call_of_bytes("allreduce", 8, 1 << 20)
    plan = make_plan(topology, collectives=["allreduce"], roots=[0])
    rule = choose(plan, call)
    program, packing = program_for(plan, call, rule), plan.packing("allreduce", -1, rule.scheme)
    cost, crossings = price(program, packing, topology), timeline(program, packing, topology, most=1 << 20)
    by_link = defaultdict(list)
    for crossing in crossings:
        by_link[crossing.link].append((crossing.start_s, crossing.end_s))
    assert set(by_link) == {row[:3] for row in cost.busy}
    for *link, seconds in cost.busy:
        spans = sorted(by_link[tuple(link)])  # type: ignore[index]
        assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(spans))
        assert sum(end - start for start, end in spans) == pytest.approx(seconds)
        assert spans[-1][1] <= cost.seconds
    with pytest.raises(PlanError, match="give fewer --bytes"):
        timeline(program, packing, topology, most=len(crossings) - 1)


def test_the_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "t.json"
    assert cli.main(["simulate", "dgx-1v", "--bytes", "64K", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert any(row.startswith("GPU 0 -> GPU ") and row.endswith("(nvlink)") for row in rows)
    assert {e["args"]["tree"] for e in events if e["ph"] == "X"} >= {0}
    assert cli.main(["simulate", "dgx-1v", "--bytes", "64K", "--trace", str(tmp_path / "none" / "t.json")]) == 2
    assert "give a path in a folder that exists" in capsys.readouterr().err
