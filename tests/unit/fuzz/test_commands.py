"""A command on a spoilt file ends with 0, 1 or 2 and, if not 0, with one line that says why; never with a traceback."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.cli import main as cli
from blinkmpi.planning.planner import make_plan
from blinkmpi.topology import machine
from tests.unit.fuzz.mutators import EXAMPLES, many, spoilt, spoilt_json
from tests.unit.fuzz.test_readers import files

RING = machine("dgx-1v").subset([0, 1, 2, 3])
MACHINES = tuple(json.loads(m.to_json()) for m in (RING, machine("pcie-8").subset([0, 1, 4]), machine("cpu:3")))
XML = files("tests/data/nccl-topo-h200x8.xml")
PLANS = (json.loads(make_plan(RING, roots=[0]).to_json()),)
RESULTS = tuple(json.loads(text) for text in files("benchmarks/results/all_reduce-np2.json"))
COMMANDS = {
    "topo": ("topo", "FILE"),
    "topo --json": ("topo", "FILE", "--json"),
    "topo --diff": ("topo", "dgx-1v", "--diff", "FILE"),
    "topo -o": ("topo", "FILE", "-o", "OUT.xml"),
    "plan": ("plan", "FILE", "--collective", "allreduce"),
    "plan --json": ("plan", "FILE", "--collective", "broadcast", "--json"),
    "plan --gpus": ("plan", "FILE", "--collective", "reduce", "--gpus", "1,0", "--scale", "nvlink=1/3"),
    "explain": ("explain", "FILE", "--bytes", "1M"),
    "simulate": ("simulate", "FILE", "--collective", "allgather", "--bytes", "64K"),
    "advise": ("advise", "FILE", "--take", "2", "--json"),
    "plan --diff": ("plan", "--diff", "FILE", "PLAN"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    (made / "PLAN").write_text(json.dumps(PLANS[0]))
    return made


def ends_with_a_line(folder: Path, text: bytes, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "FILE").write_bytes(text)
    capsys.readouterr()
    places = {name: str(folder / name) for name in ("FILE", "PLAN", "OUT.xml", "OUT.svg")}
    code = cli.main([places.get(word, word) for word in words])
    said = capsys.readouterr().err
    assert code in (0, 1, 2)
    assert "Traceback" not in said
    if code == 2:
        assert said.startswith("blinkmpi: error: ")
        assert said.count("\n") == 1
        assert len(said) < 2500


@pytest.mark.slow
@pytest.mark.parametrize("command", list(COMMANDS))
@many
@given(data=st.data())
def test_a_command_on_a_spoilt_file(
    command: str, data: st.DataObject, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = PLANS if command == "plan --diff" else MACHINES
    text = data.draw(spoilt_json(seeds) | spoilt((json.dumps(seeds[0]).encode(), *XML)))
    ends_with_a_line(folder, text, COMMANDS[command], capsys)


@pytest.mark.slow
@settings(many, max_examples=max(5, EXAMPLES // 10))  # which take half a second each
@given(data=st.data())
def test_the_picture_of_a_spoilt_result(data: st.DataObject, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends_with_a_line(folder, data.draw(spoilt_json(RESULTS)), ("plot", "FILE", "-o", "OUT.svg"), capsys)
