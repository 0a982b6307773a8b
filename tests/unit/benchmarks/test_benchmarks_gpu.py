"""The drivers of the GPU measurements, without GPUs: what they start, read, print and write."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blinkmpi.bench.options import memory_for, read
from blinkmpi.cli import main as cli
from blinkmpi.lang.source import algorithm_for
from blinkmpi.planning.algorithms import named_in
from tests.harness import ROOT
from tests.unit.benchmarks.scripts import script

MODELS = ("resnet50", "gpt2-124m", "transformer-25m", "transformer-267m")


@pytest.fixture
def gpu() -> ModuleType:
    return script("gpu")


def test_every_step_is_a_command_that_ranks_with_gpus_take(gpu: Any) -> None:
    found = gpu.steps(8, "1G")
    assert len({step.name for step in found}) == len(found)
    for step in found:
        args = cli.parsed(["bench", *step.words.split()])
        options = read(args, 8)
        assert memory_for(args, options, gpu=True) == "gpu"
        if step.writes:
            assert (options.sizes[0], options.sizes[-1], len(options.sizes)) == (1 << 10, 1 << 30, 11)
            assert "nccl" in options.peers
    assert {f"alltoall-{kind}gpu-{how}np8" for kind in ("", "bfloat16-") for how in ("", "graph-")} < {
        step.name for step in found
    }
    words = gpu.command(4, gpu.Step("x", "all_reduce -G 4", 1), Path("out"))
    assert words[:6] == ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "4"]
    assert words[-7:] == ["blinkmpi", "bench", "all_reduce", "-G", "4", "-J", "out/x.json"]


def test_the_other_parts_are_programs_that_are_there_and_chunk_programs(gpu: Any) -> None:
    calls, training = gpu.steps(2, "1G", "calls"), gpu.steps(2, "1G", "training")
    for step in [*calls, *training]:
        words = gpu.command(2, step, Path("out"))
        if step.program:
            assert words[7:] == [str(ROOT / "benchmarks" / step.program), *step.words.split(), "-o",
                                 f"out/{step.name}.json"]  # fmt: skip
            assert Path(words[7]).is_file()
            continue
        args = cli.parsed(words[words.index("bench") :])
        memory_for(args, read(args, 2), gpu=True)
        for n in (2, 4, 8):
            (made,) = named_in(args.algo, (), n).asked.values()
            assert made.n == n
    sets = [f"emulated-{gpus}" for gpus in ("0-3", "0-1", "0-5")]
    assert [step.name for step in training] == [f"training-{name}-gpu-np2" for name in (*MODELS, *sets)]
    names = [step.name for step in calls]
    assert names[:4] == ["host-time-gpu-np2", "messages-gpu-np2", "beside-compute-gpu-np2", "groups-gpu-np2"]
    on_four = [gpu.command(4, step, Path("out")) for step in gpu.steps(4, "1G", "calls") if "lang-" in step.name]
    given = [words[words.index("--algorithm") + 1] for words in on_four if "--algorithm" in words]
    assert [algorithm_for(one, 4).name for one in given] == ["hierarchical", "two_step"]
    assert names.index("message-cost-gpu-np2") < names.index("lang-bruck_alltoall-gpu-graph-np2")
    assert gpu.steps(2, "1G", "all") == [*gpu.steps(2, "1G"), *calls, *training]
    assert "message-cost-gpu-np4" not in [step.name for step in gpu.steps(4, "1G", "calls")], "it is for two"


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.parametrize(
    "program",
    ["groups", "torch_group", "torch_host_time", "message_cost", "beside_compute/measure", "training/measure"],
)
def test_every_program_takes_the_words_of_its_step(gpu: Any, program: str) -> None:
    pytest.importorskip("torch")
    steps = [step for step in gpu.steps(2, "1G", "all") if step.program == f"{program}.py"]
    assert steps
    for step in steps[:1]:
        _, _, _, _, _, _, *words = gpu.command(2, step, Path("out"))
        done = subprocess.run([*words, "--help"], capture_output=True, text=True, timeout=60, env=environment())
        assert done.returncode == 0, done.stderr
        for flag in (word for word in words if word.startswith("-")):
            assert flag in done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_dry_run_says_what_would_run_and_for_how_long(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "run", None)
    for part in ("sweeps", "calls", "training"):
        assert gpu.main(["2", "--out", str(tmp_path / "x"), "--part", part, "--budget", "540", "--dry-run"]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        steps = gpu.steps(2, "1G", part)
        assert [line.partition(",")[0] for line in lines] == [step.name for step in steps]
        assert all(": mpirun --oversubscribe" in line for line in lines)
        seconds = [int(re.findall(r"at most (\d+) s", line)[0]) for line in lines]
        assert min(seconds) >= 10, "jobs.FEWEST_SECONDS"
        assert max(seconds) < 540
        assert last == f"{len(steps)} steps, 540 s"
    assert not (tmp_path / "x").exists()


def test_the_time_is_shared_and_never_exceeded(gpu: Any) -> None:
    shares = [step.share for step in gpu.steps(8, "1G")]
    assert gpu.limits(shares, 480) < 480 / 10
    assert max(gpu.limits(shares[i:], 480) for i in range(len(shares) // 2)) < 480 / 4
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
    row = {"size": 1 << 20, "type": "float", "out_of_place": timed, "in_place": timed}
    own = {"protocol": "packets", "ctas": 16, **places}
    facts = {"compare": ["nccl", "symm_mem"], "memory": "gpu", "ranks": 8, "collective": "allreduce"}
    facts |= {"local_register": 2, "gpu": {"name": "NVIDIA H200"}}
    return {"results": [{**row, "blinkmpi": own}], "blinkmpi": facts}


def test_the_table_has_every_row_or_is_of_ratios_and_is_cut_at_its_length(gpu: Any) -> None:
    text = gpu.table([("all_reduce-gpu-np8", result())])
    assert text.startswith("all_reduce-gpu-np8: ours us, nccl us, ratio, symm_mem us, ratio")
    assert text.splitlines()[1].split() == ["1M", "packets", "16", *["10.0", "40.0", "4.00", "N/A"] * 2, "2"]
    short = gpu.table([(f"file{i}", result()) for i in range(50)])
    assert "| allreduce | float32 | registered | NCCL | 4.00\n" in short
    assert len(short) <= 8000
    cut = gpu.table([(f"file{i}", result()) for i in range(200)])
    assert len(cut) < 8100
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
    out, archive = tmp_path / "out", tmp_path / "all.tar.gz"
    assert gpu.main(["2", "--out", str(out), "--tar", str(archive)]) == 1
    said = capsys.readouterr().out
    assert ran == [step.name for step in gpu.steps(2, "1G")]
    assert "reduce_scatter-gpu-np2: exit status 2" in said
    assert "the last word" in said
    failed = [name for name in ran if "reduce_scatter" in name and not name.startswith("sanity")]
    assert {"reduce_scatter-gpu-np2", "reduce_scatter-bfloat16-gpu-graph-np2"} < set(failed)
    assert said.rstrip().endswith("\n".join(f"{name}: exit status 2" for name in failed))
    assert "the last word" in (out / "gpu-sweeps-np2.log").read_text()
    with tarfile.open(archive) as kept:
        assert sorted(kept.getnames()) == sorted(path.name for path in out.iterdir())
    assert len(list(tmp_path.iterdir())) == 2, "nothing else is left"
    with pytest.raises(SystemExit):
        gpu.main(["2", "--out", str(out)])
    assert "earlier run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["2", "--out", str(tmp_path / "two"), "--tar", str(tmp_path / "two" / "x.tar.gz")])
    assert "hold itself" in capsys.readouterr().err
    assert gpu.main(["2", "--out", str(tmp_path / "two"), "--only", "broadcast-gpu"]) == 0
    assert gpu.main(["2", "--out", str(tmp_path / "three"), "--budget", "5", "--only", "broadcast-gpu"]) == 1
    assert "not started" in capsys.readouterr().out


def test_a_step_that_does_not_end_is_ended(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = gpu.Step("x", "", 1)
    sleeps = ["sh", "-c", "echo begun; exec sleep 60"]
    monkeypatch.setattr(gpu, "command", lambda n, step, out: sleeps)
    assert gpu.run(step, 2, tmp_path, 1.5) == ("no end after 2 s", "begun\n")
    monkeypatch.setattr(gpu, "command", lambda n, step, out: [sys.executable, "-c", f"print({step.name!r})"])
    assert gpu.run(step, 2, tmp_path, 30) == ("ok", "x\n")
