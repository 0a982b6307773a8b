"""The list of mutants fits the tree; a fault that no test sees, and a record that fits no longer, are told."""

from dataclasses import replace

import pytest

from tests.mutants import __main__ as command
from tests.mutants.records import Mutant, mutants, why_not

SEEN = next(mutant for mutant in mutants() if mutant.file == "trees/deadline.py")


def test_every_record_fits_the_tree() -> None:
    every = mutants()
    assert len(every) >= 40
    assert [why for mutant in every if (why := why_not(mutant))] == []
    assert len({(mutant.file, mutant.old) for mutant in every}) == len(every)


@pytest.mark.parametrize(("record", "why"), [
    (replace(SEEN, file="trees/nothing.py"), "is not there"),
    (replace(SEEN, old="return self."), "'return self.' 3 times"),
    (replace(SEEN, old="def late(self) -> bool:", new="def late(self) -> bool:  # soon"), "the same program"),
    (replace(SEEN, test="tests/unit/trees/test_deadline.py::test_nothing"), "no such test"),
    (replace(SEEN, test="tests/unit/trees/test_nothing.py::test_within_nests"), "no such test"),
])  # fmt: skip
def test_a_record_that_fits_no_longer_is_told(
    record: Mutant, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in why_not(record)
    monkeypatch.setattr(command, "mutants", lambda: [replace(record, number=1)])
    assert command.main([]) == 1
    assert "mutant 1: " in capsys.readouterr().out


def test_a_fault_that_no_test_sees_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    unseen = replace(SEEN, old="SLACK = 1.2", new="SLACK = 1.3")
    monkeypatch.setattr(command, "mutants", lambda: [replace(SEEN, number=1), replace(unseen, number=2)])
    assert command.main([]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 tests of the tree as it is: 1 passed")
    assert said[1].startswith(" 1  trees/deadline.py")
    assert "NOT CAUGHT" not in said[1]
    assert said[2].startswith(" 2  trees/deadline.py")
    assert said[2].endswith("NOT CAUGHT: passed")
    assert said[-1] == "2 mutants: 1 caught"
