"""``blinkmpi lang check``: exit codes, what is printed, JSON."""

from pathlib import Path

import pytest

from blinkmpi.cli.main import main
from blinkmpi.lang.xml.check import XmlReport
from blinkmpi.lang.xml.export import export
from blinkmpi.lang.xml.file import XmlAlgorithm, write_xml
from tests.unit.lang_xml.flows import ring_allgather, ring_allreduce
from tests.unit.lang_xml.test_check import EXCHANGE, OTHER, file


def check(path: Path, made: XmlAlgorithm | str, *flags: str) -> tuple[int, str]:
    path.write_text(made if isinstance(made, str) else write_xml(made))
    return main(["lang", "check", str(path), *flags]), str(path)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return Path("made.xml")


def test_a_right_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(path, export(ring_allreduce(4), name="ring", in_place=True)) == (0, "made.xml")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "made.xml: ring",
        "collective allreduce of 4 ranks, in place",
        "size 4 chunks, 4 thread blocks, 28 steps, protocol Simple",
        "structure sound",
        "order no deadlock: 1 of the 2 messages that a connection holds are enough",
        "races none",
        "reads only what was written before",
        "results as allreduce wants them",
        "unused no step",
        "proved",
    ]


def test_a_race(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(path, file("allreduce", EXCHANGE, OTHER, in_place=True, both=True))[0] == 1
    out = capsys.readouterr().out
    assert "called in place: gpu 0 tb 1 step 0 (s) and gpu 0 tb 0 step 0 (rrc) both use i[0] of gpu 0" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[-3:] == ["reads not known", "results not known", "refused: 2 faults"]


def test_a_deadlock_that_more_slots_undo(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [*(f"s i{c}" for c in range(3)), *(f"rrc i{c} o{c}" for c in range(3))]
    made = file("allreduce", [(1, 1, 0, steps)], [(0, 0, 0, steps)], chunks=3)
    assert check(path, made)[0] == 1
    assert "where a connection holds 2 messages; with 3 they do not" in " ".join(capsys.readouterr().out.split())
    assert check(path, made, "--slots", "3")[0] == 0


def test_a_file_for_short_vectors_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["s i0 x3", "rrc i0 o0 x3"]
    assert check(path, file("allreduce", [(1, 1, 0, steps)], [(0, 0, 0, steps)], chunks=3))[0] == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "long vectors 3 messages, where chunks are so large that each is a message of its own" in out


def test_many_faults_are_cut_short(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(path, file("allreduce", [], [], chunks=4))[0] == 1
    out = capsys.readouterr().out
    assert "and 3 more; see --json" in out
    assert out.count("is never written") == 5
    assert check(path, file("allreduce", [], [], chunks=4), "--json")[0] == 1
    report = XmlReport.from_json(capsys.readouterr().out)
    assert (len(report.faults), report.proved, report.source) == (8, False, "made.xml")


def test_json_of_a_right_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(path, export(ring_allgather(3), name="ring"), "--json")[0] == 0
    report = XmlReport.from_json(capsys.readouterr().out)
    assert (report.proved, report.collective, report.ranks, report.faults) == (True, "allgather", 3, ())


@pytest.mark.parametrize(("text", "flags", "message"), [
    ("<algo/>", [], "made.xml: <algo> has no coll; add it"),
    ("no XML", [], "made.xml: not XML"),
    ("<algo/>", ["--slots", "0"], "--slots 0: a connection holds at least one message"),
])  # fmt: skip
def test_no_such_file(
    path: Path, text: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(path, text, *flags)[0] == 2
    assert message in capsys.readouterr().err
    assert main(["lang", "check", "none.xml"]) == 2
