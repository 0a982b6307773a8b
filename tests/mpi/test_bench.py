"""The benchmark on ranks, with MPI itself in the place of our communicator: what it counts, refuses and writes."""

import argparse
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace

import blinkmpi
from blinkmpi.bench import command as bench
from blinkmpi.bench.nccl_tests import TEST_NAMES
from blinkmpi.bench.options import add_flags
from blinkmpi.bench.peers import on_all_ranks
from blinkmpi.errors import ArgumentError
from blinkmpi.planning.plan import Plan
from blinkmpi.runtime import inspection
from tests.harness import mpi, run_command


class StandIn:
    """MPI's own collectives with our communicator's way of naming operations."""

    gpu = None

    def __init__(self, comm: Any, *, topology: Any = None, executor: str = "auto", algo: str = "") -> None:
        self.comm, self.executor, self.algo = comm, executor, algo
        self.machine = topology or SimpleNamespace(name="stand-in", fingerprint="0", n=comm.Get_size())
        self.compiler = None
        self.freed, self.context = False, self

    def Free(self) -> None:
        self.freed = True

    def plan(self, collective: str, root: int = 0) -> SimpleNamespace:
        return SimpleNamespace(wire="accumulator")

    def __getattr__(self, name: str) -> Callable[..., None]:
        from mpi4py import MPI

        def call(*buffers: Any, op: str = "", **keywords: Any) -> None:
            if op:
                keywords["op"] = getattr(MPI, op.upper())
            getattr(self.comm, name)(*buffers, **keywords)

        return call


def choice(ours: StandIn, collective: str, nbytes: int, **facts: object) -> dict[str, Any]:
    return {"scheme": "mpi", "executor": ours.executor, "chunk_bytes": 0, "reason": ours.algo}


def predict(ours: StandIn, collective: str, nbytes: int, **facts: object) -> tuple[None, float]:
    return None, nbytes / 1e9


class RoundsUnasked(blinkmpi.Communicator):
    """Rounds partial results on each hop, and says that it does not."""

    def __init__(self, comm: Any, **keywords: Any) -> None:
        super().__init__(comm, wire="operand", **keywords)

    def plan(self, collective: str, root: int = 0) -> Plan:
        return replace(super().plan(collective, root), wire="accumulator")


class LosesRankOne(StandIn):
    """Forgets what rank 1 contributes to a sum."""

    def Allreduce(self, sendbuf: Any, recvbuf: Any, *, op: str) -> None:
        from mpi4py import MPI

        mine = np.array(recvbuf if sendbuf is MPI.IN_PLACE else sendbuf)
        if self.comm.Get_rank() == 1:
            mine[:] = 0
        self.comm.Allreduce(mine, recvbuf)


def run(comm: Any, words: str, make: Callable[..., Any] = StandIn) -> tuple[int, str]:
    """The exit status and what this rank printed, with a stand-in."""
    with mock.patch.multiple(inspection, choice=choice, predict=predict, measure_steps=lambda *_: None):
        return run_real(comm, words, make)


def run_real(comm: Any, words: str, make: Callable[..., Any] = blinkmpi.Communicator) -> tuple[int, str]:
    """The same with a communicator of ours."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with redirect_stdout(io.StringIO()) as said:
        status = bench.run(parser.parse_args(words.split()), comm, make_communicator=make)
    return status, said.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


@mpi(ranks=(1, 2, 3, 4))
def test_every_collective_is_right_in_both_places(comm: Any) -> None:
    for name in TEST_NAMES.values():
        status, said = run(comm, f"{name}_perf -b 1 -e 70000 -f 41 -n 3 -r {comm.size - 1} --compare mpi")
        assert status == 0, (name, said)
        if comm.rank:
            assert said == ""
            continue
        table = rows(said)
        assert len(table) == 4
        assert all((row[8], row[12], len(row)) == ("0", "0", 17) for row in table), said
        assert "# Out of bounds values : 0 OK" in said


@mpi(ranks=(3,))
def test_types_operations_and_roots(comm: Any) -> None:
    for datatype in ("int8", "uint64", "double"):
        status, said = run(comm, f"reduce -b 4K -e 4K -n 2 -d {datatype} -o prod -r -1 --compare mpi")
        assert status == 0
        if comm.rank == 0:
            assert [row[2:5] for row in rows(said)] == [[datatype, "prod", str(root)] for root in range(3)]
    status, said = run(comm, "broadcast -b 4K -e 4K -n 2 -d int32 -u 3 --compare mpi")
    assert status == 0


@mpi(ranks=(2, 3))
def test_wrong_results_are_counted_and_fail_the_run(comm: Any) -> None:
    status, said = run(comm, "all_reduce -b 1K -e 1K -n 2", LosesRankOne)
    assert status == 1
    if comm.rank == 0:
        (row,) = rows(said)
        assert int(row[8]) == int(row[12]) == 256 * comm.size
        assert "FAILED" in said
    status, said = run(comm, "all_reduce -b 1K -e 1K -n 2 -c 0", LosesRankOne)
    assert status == 0
    assert comm.rank or rows(said)[0][8] == "N/A"


@mpi(ranks=(3,))
def test_rounding_on_each_hop_is_allowed_where_it_was_asked_for(comm: Any) -> None:
    for words in ("all_reduce --algo allreduce:chain -o avg", "reduce --algo reduce:chain -r 1"):
        words += " -b 256K -e 256K -n 1 -d bfloat16"
        assert run_real(comm, words)[0] == 0
        assert run_real(comm, f"{words} --wire operand")[0] == 0
        assert run_real(comm, words, RoundsUnasked)[0] == 1


@mpi(ranks=(2,))
def test_a_slow_run_fails_if_a_bandwidth_is_asked_for(comm: Any) -> None:
    os.environ["NCCL_TESTS_MIN_BW"] = "1e6"
    assert run(comm, "all_reduce -b 1K -e 1K -n 2")[0] == 1
    os.environ["BLINKMPI_TESTS_MIN_BW"] = "1e-9"
    assert run(comm, "all_reduce -b 1K -e 1K -n 2")[0] == 0
    del os.environ["NCCL_TESTS_MIN_BW"], os.environ["BLINKMPI_TESTS_MIN_BW"]


@mpi(ranks=(2,))
def test_json_executors_and_the_scheme_asked_for(comm: Any) -> None:
    status, said = run(
        comm, "all_gather -b 1K -e 4K -f 4 -n 3 -a 1 --executor c,numpy --algo allgather:direct --predict --json"
    )
    assert status == 0
    if comm.rank == 0:
        made = json.loads(said)
        assert [r["blinkmpi"]["executor"] for r in made["results"]] == ["c", "c", "numpy", "numpy"]
        assert {r["blinkmpi"]["reason"] for r in made["results"]} == {"allgather:direct"}
        assert made["results"][0]["blinkmpi"]["bound_us"] == pytest.approx(1.024)
        assert made["blinkmpi"]["statistic"] == "the average rank's mean over iterations"
        assert made["results"][0]["actual_iterations"] == 3
        assert made["blinkmpi"]["versions"]["numpy"] == np.__version__


@mpi(ranks=(2,))
def test_files_formats_and_extras(comm: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    status, said = run(comm, f"all_reduce -b 1K -e 1K -n 2 -N 2 -I 1 -S 1 -M 1 -J {path}")
    assert status == 0
    status, table = run(comm, "all_reduce -b 1K -e 1K -n 4 --format osu")
    if comm.rank == 0:
        assert len(json.loads(path.read_text())["results"]) == 2
        assert "Peak" in said
        assert "blinkmpi in-place (us)" in said
        assert table.splitlines()[-1].split()[0::4] == ["1024", "4"]
        assert table.rstrip().endswith("Pass")


@mpi(ranks=(4,))
def test_an_emulated_machine_must_have_as_many_devices_as_ranks(comm: Any) -> None:
    with pytest.raises(ArgumentError, match="mpirun -np 8"):
        run(comm, "all_reduce -n 2 --topology dgx-1v")
    status, said = run(comm, "all_reduce -b 1K -e 1K -n 2 --topology dgx-1v --gpus 1,4,5,6")
    assert status == 0
    assert comm.rank or rows(said)[0][-1] == "emulated"


@mpi(ranks=(2,))
def test_buffers_that_do_not_fit_are_refused_on_every_rank(comm: Any) -> None:
    with pytest.raises(ArgumentError, match="smaller --maxbytes"):
        run(comm, "all_reduce -b 1024G -e 1024G -f 2")
    with pytest.raises(ArgumentError, match="does not exist"):
        run(comm, "all_reduce -J no/such/folder/x.json")


@mpi(ranks=(2,))
def test_what_needs_gpus_is_refused_on_every_rank_without_them(comm: Any) -> None:
    for words, message in (
        ("--memory gpu", "have no GPUs"),
        ("-G 2", "CUDA graphs"),
        ("--compare nccl", "measured on gpu memory only"),
        ("--compare symm_mem", "measured on gpu memory only"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run(comm, f"all_reduce -b 1K -e 1K {words}")
    status, said = run(comm, "all_reduce -b 1K -e 1K -n 2 --memory host --json")
    assert status == 0
    assert comm.rank or json.loads(said)["blinkmpi"]["memory"] == "host"


@mpi(ranks=(3,))
def test_a_step_that_fails_on_one_rank_fails_on_all(comm: Any) -> None:
    def step() -> int:
        if comm.rank == 1:
            raise OSError("no such library")
        return int(comm.rank)

    with pytest.raises(ArgumentError, match="rank 1 failed: OSError: no such library"):
        on_all_ranks(comm, step)
    assert on_all_ranks(comm, lambda: comm.rank) == comm.rank


@pytest.mark.mpi_skip  # starts an mpirun of its own
def test_the_command_on_our_own_communicator(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    words = f"all_reduce -b 4 -e 1M -f 512 -n 3 --compare mpi --executor auto,numpy --predict -J {path}"
    ran = run_command(3, [sys.executable, "-m", "blinkmpi", "bench", *words.split()], timeout=60)
    assert ran.rc == 0, ran.output
    made = json.loads(path.read_text())
    assert len(made["results"]) == 6
    assert all(r[place]["nwrong"] == 0 for r in made["results"] for place in ("out_of_place", "in_place"))
    assert all(r["blinkmpi"]["in_place"]["compare"]["mpi"]["ratio"] > 0 for r in made["results"])
    assert made["results"][0]["blinkmpi"]["scheme"]
    long = made["results"][2]
    for place in ("out_of_place", "in_place"):  # by what steps of C took; a measured time is whatever it was
        own = long["blinkmpi"][place]
        assert math.isfinite(own["predicted_us"])
        assert own["predicted_us"] > 0
        assert own["error"] == pytest.approx(own["predicted_us"] / long[place]["time"] - 1)
    assert made["blinkmpi"]["steps"] is None  # of the last executor, NumPy
    table = [line for line in ran.output.splitlines() if line.split()[:1] == ["1048576"]]
    assert all(re.fullmatch(r"[+-]\d+\.\d", row.split()[-i]) for row in table for i in (3, 5)), ran.output
    refused = run_command(2, [sys.executable, "-m", "blinkmpi", "bench", "all_reduce", "-G", "1"], timeout=60)
    assert refused.rc != 0
    assert "CUDA graphs" in refused.output


@pytest.mark.mpi_skip  # starts an mpirun of its own
def test_tune_keeps_what_steps_cost_on_cpu_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    blinkmpi = [sys.executable, "-m", "blinkmpi"]
    words = ["tune", "allreduce", "-b", "1M", "-e", "1M"]
    tuned = run_command(2, [*blinkmpi, *words], timeout=60)
    assert tuned.rc == 0, tuned.output
    assert "us/MiB" in tuned.output
    (file,) = tmp_path.glob("steps-cpu-x2-*.json")
    assert len(json.loads(file.read_text())["costs"]) >= 4
    text = "c.explain('allreduce', 1 << 20)"
    program = f"import blinkmpi; from mpi4py import MPI; c = blinkmpi.Communicator(MPI.COMM_WORLD); print({text})"
    told = run_command(2, [sys.executable, "-c", program], timeout=60)
    assert "predictions are by the steps of calls" in told.output, told.output
    file.write_text("{")
    warned = run_command(2, [sys.executable, "-c", program], timeout=60)
    assert warned.rc == 0
    assert file.name in warned.output
    assert "blinkmpi tune times" in warned.output
