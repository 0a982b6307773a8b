"""The driver of the GPU measurements, without GPUs: what it starts, how it shares the time, what it prints."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blinkmpi.bench.options import read, settle
from blinkmpi.cli import main as cli
from tests.unit.benchmarks.scripts import needs, script

pytestmark = needs("gpu")


@pytest.fixture
def gpu() -> ModuleType:
    return script("gpu")


def test_every_step_is_a_command_that_ranks_with_gpus_take(gpu: Any) -> None:
    found = gpu.steps(8, "1G")
    assert len({step.name for step in found}) == len(found)
    for step in found:
        args = cli._parser(with_bench=True).parse_args(["bench", *step.words.split()])
        options = read(args, 8)
        assert settle(args, options, gpu=True) == "gpu"
        if step.writes:
            assert (options.sizes[0], options.sizes[-1], len(options.sizes)) == (1 << 10, 1 << 30, 11)
            assert "nccl" in options.peers
    words = gpu.command(4, ["all_reduce"])
    assert words[:6] == ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "4"]
    assert words[-3:] == ["blinkmpi", "bench", "all_reduce"]


def test_the_time_is_shared_and_never_exceeded(gpu: Any) -> None:
    shares = [step.share for step in gpu.steps(8, "1G")]
    assert gpu.limits(shares, 480) < 480 / 10
    assert gpu.limits([2.0], 30) == 30
    left = 480.0
    for i in range(len(shares)):  # every step takes all that it may
        left -= gpu.limits(shares[i:], left)
    assert left >= 0


def result() -> dict[str, Any]:
    places = {
        place: {"compare": {"nccl": {"time": 40.0, "ratio": 4.0, "nwrong": 1}, "symm_mem": None}}
        for place in ("out_of_place", "in_place")
    }
    timed = {"time": 10.0, "nwrong": 0}
    row = {"size": 1 << 20, "out_of_place": timed, "in_place": timed}
    own = {"protocol": "packets", "ctas": 16, **places}
    return {"results": [{**row, "blinkmpi": own}], "blinkmpi": {"compare": ["nccl", "symm_mem"]}}


def test_the_table_has_every_row_and_is_cut_at_its_length(gpu: Any) -> None:
    text = gpu.table([("all_reduce-gpu-np8", result())])
    assert text.startswith("all_reduce-gpu-np8: ours us, nccl us, ratio, symm_mem us, ratio")
    assert text.splitlines()[1].split() == ["1M", "packets", "16", *["10.0", "40.0", "4.00", "N/A"] * 2, "2"]
    cut = gpu.table([(f"file{i}", result()) for i in range(200)])
    assert len(cut) < gpu.TABLE_CHARACTERS + 100
    assert cut.endswith("the rest is in the files")
    assert gpu.table([]) == ""


def test_a_failing_step_is_named_and_the_next_goes_on(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(step: Any, n: int, out: Path, seconds: float) -> tuple[str, str]:
        ran.append(step.name)
        if "reduce_scatter" in step.name:
            return "exit status 2", "some words\nthe last word"
        if step.writes:
            (out / f"{step.name}.json").write_text(json.dumps(result()))
        return "ok", ""

    monkeypatch.setattr(gpu, "run", run)
    out = tmp_path / "out"
    assert gpu.main(["2", "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert ran == [step.name for step in gpu.steps(2, "1G")]
    assert "reduce_scatter-gpu-np2: exit status 2" in said
    assert "the last word" in said
    assert said.rstrip().endswith("reduce_scatter-gpu-np2: exit status 2\nreduce_scatter-gpu-graph-np2: exit status 2")
    assert "the last word" in (out / "gpu-np2.log").read_text()
    with pytest.raises(SystemExit):
        gpu.main(["2", "--out", str(out)])
    assert "earlier run" in capsys.readouterr().err
    assert gpu.main(["2", "--out", str(tmp_path / "two"), "--only", "broadcast-gpu"]) == 0
    assert gpu.main(["2", "--out", str(tmp_path / "three"), "--budget", "5", "--only", "broadcast-gpu"]) == 1
    assert "not started" in capsys.readouterr().out


def test_a_step_that_does_not_end_is_ended(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = gpu.Step("x", "", 1)
    sleeps = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    monkeypatch.setattr(gpu, "command", lambda n, words: sleeps)
    assert gpu.run(step, 2, tmp_path, 1.5) == ("no end after 2 s", "begun\n")
    monkeypatch.setattr(gpu, "command", lambda n, words: [sys.executable, "-c", f"print({words!r})"])
    assert gpu.run(step, 2, tmp_path, 30) == ("ok", f"{['-J', str(tmp_path / 'x.json')]}\n")
