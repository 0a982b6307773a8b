"""Some hundred spoiled files: what the checker says of each is true on the machine, which sees what is wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blinkmpi.lang.flow import goal_of
from blinkmpi.lang.xml import values
from blinkmpi.lang.xml.export import export
from tests.unit.lang_xml.flows import ring_allreduce
from tests.unit.lang_xml.machine import Machine
from tests.unit.lang_xml.mutations import MUTATIONS, PEER, campaign, main
from tests.unit.lang_xml.test_check import file


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_proved_or_refused_for_a_true_reason(seed: int) -> None:
    found, wrong = campaign(180, seed)
    assert wrong == []
    outcomes = {outcome for (_, outcome), count in found.items() if count}
    assert {"proved", "structure", "race", "result"} <= outcomes
    assert {kind for kind, _ in found} == {*MUTATIONS, PEER}
    assert found.total() == 180


@pytest.mark.slow
def test_a_checker_that_sees_no_races_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values.Execution, "_race", lambda *_: None)
    _, wrong = campaign(180, 11)
    assert any("proved, and wrong" in text for text in wrong)


def test_a_checker_that_sees_races_everywhere_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that forget what a dependency or a message has brought."""

    def forgetful(self: Any, i: int, number: int, others: Sequence[int]) -> Any:
        now = np.full_like(self._now[0], -1)
        now[self.block[i]] = number
        return now

    monkeypatch.setattr(values._Clocks, "step", forgetful)
    with pytest.raises(AssertionError, match="the exporter's file is not proved"):
        campaign(1, 11)


def test_the_machine_stops_at_a_deadlock() -> None:
    made = file("allreduce", [(1, 1, 0, ["rrc i0 o0", "s i0"])], [(0, 0, 0, ["rrc i0 o0", "s i0"])])
    assert not Machine(made, goal_of("allreduce", 2, 1), in_place=False).run()
    steps = [*(f"s i{c}" for c in range(3)), *(f"rrc i{c} o{c}" for c in range(3))]
    made = file("allreduce", [(1, 1, 0, steps)], [(0, 0, 0, steps)], chunks=3)
    goal = goal_of("allreduce", 2, 3)
    assert not Machine(made, goal, in_place=False, slots=2).run()
    machine = Machine(made, goal, in_place=False, slots=3)
    assert machine.run()
    assert machine.right()


def test_the_machine_runs_a_race_both_ways() -> None:
    blocks = [[(-1, p, 0, ["rrc i0 o0"]), (p, -1, 0, ["s i0"])] for p in (1, 0)]
    made, goal = file("allreduce", *blocks, in_place=True), goal_of("allreduce", 2, 1)
    ends = set()
    for seed in range(40):
        machine = Machine(made, goal, in_place=True, seed=seed)
        assert machine.run()
        ends.add(machine.right())
    assert ends == {True, False}
    for delayed, other in (((0, 0, 0), (0, 1, 0)), ((0, 1, 0), (0, 0, 0))):
        machine = Machine(made, goal, in_place=True)
        machine.delay(*delayed)
        g, b, s = other
        assert machine.done[g][b] == s + 1


def test_the_machine_knows_noise() -> None:
    made, goal = file("allreduce", [(-1, -1, 0, ["cpy s0 o0"])]), goal_of("allreduce", 1, 1)
    machine = Machine(made, goal, in_place=False)
    assert machine.run()
    assert machine.noise_read
    assert not machine.right()


def test_a_campaign_writes_its_file(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "27", "-o", str(tmp_path / "found.json")]) == 0
    assert "27 mutants, 0 on which checker and machine disagree" in capsys.readouterr().out
    text = (tmp_path / "found.json").read_text()
    assert '"mutants": 27' in text
    assert '"commit"' in text
    assert '"failed": []' in text


def test_the_exporter_is_deterministic() -> None:
    assert export(ring_allreduce(4), name="") == export(ring_allreduce(4), name="")
