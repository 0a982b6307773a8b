"""How the doctor looks at a job, which must not crash or hang; its child job; and the command."""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.cli import doctor as cli_doctor
from blinkmpi.doctor import examination as doctor_look
from blinkmpi.doctor.examination import clock_skew, examine, packages, run_child, self_test, try_pairs
from blinkmpi.doctor.report import PeerTrial, RankFacts, SelfTest
from blinkmpi.topology import ProcessInfo
from blinkmpi.util.together import allgather
from tests import harness
from tests.unit.cli.test_doctor import MPI
from tests.unit.topology.test_gather import on_ranks
from tests.unit.topology.test_probe import recording

HERE = ProcessInfo("vm", 1, "boot", (0,))


def test_looking_keeps_secrets_and_reads_this_machine() -> None:
    env = {"AWS_SECRET": "x", "NCCL_DEBUG": "INFO", "BLINKMPI_DEBG": "INFO", "CC": "no-such-compiler"}
    own = examine(HERE, rank=0, mpi=MPI, environ=env, source=recording("no-driver"))
    assert own.environment == {"NCCL_DEBUG": "INFO", "BLINKMPI_DEBG": "INFO"}
    assert own.unknown == ("BLINKMPI_DEBG is unknown; did you mean BLINKMPI_DEBUG?",)
    assert own.gpus_here == ()
    assert own.compiler != "no-such-compiler"
    assert {"blinkmpi", "numpy", "mpi4py"} <= set(own.packages)
    assert on_ranks([0, 0], lambda comm, _: allgather(comm, own, RankFacts)) == [[own] * 2] * 2


class FakeGpu:
    """A GPU whose memory some ranks cannot open; counts what stays open."""

    def __init__(self, bus_id: str, refused: Sequence[bytes] = (), *, broken: bool = False) -> None:
        self.bus_id, self.refused, self.broken = bus_id, refused, broken
        self.open_now = self.allocated = 0

    def allocate(self, nbytes: int) -> int:
        if self.broken:
            raise MemoryError("out of memory")
        self.allocated += 1
        return 64

    def free(self, at: int) -> None:
        self.allocated -= 1

    def export(self, at: int) -> bytes:
        return self.bus_id.encode()

    def open(self, handle: bytes) -> int:
        if handle in self.refused:
            raise ValueError("invalid device context")
        self.open_now += 1
        return 128

    def shut(self, at: int) -> None:
        self.open_now -= 1


def test_looking_at_a_gpu_joins_it_by_its_bus_id() -> None:
    own = examine(HERE, rank=0, mpi=MPI, gpu=FakeGpu("0000:00:0B.0"), source=recording("nvml-h200x8"))
    assert own.gpu is not None
    assert (own.gpu.index, own.no_gpu, len(own.gpus_here)) == (5, "", 8)


def test_every_rank_tries_every_other_of_its_node() -> None:
    gpus = [FakeGpu("a"), FakeGpu("b", [b"a"]), FakeGpu("c", broken=True), FakeGpu("d")]
    places = ["x", "x", "x", "y"]
    got = on_ranks([0] * 4, lambda comm, _: try_pairs(comm, places[comm.rank], gpus[comm.rank]))
    assert got[0] == (PeerTrial(1, ""),)
    assert got[1] == (PeerTrial(0, "ValueError: invalid device context"),)
    assert got[2] == (PeerTrial(0, "MemoryError: out of memory"), PeerTrial(1, "MemoryError: out of memory"))
    assert got[3] == ()
    assert {(g.open_now, g.allocated) for g in gpus} == {(0, 0)}
    none = on_ranks([0, 0], lambda comm, _: try_pairs(comm, "x", "no GPU"))
    assert none == [(), ()]


def test_clocks_are_compared_with_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    names = threading.local()

    def late() -> float:
        return 1e9 + float(getattr(names, "ahead", 0.0))

    def work(comm: Any, _: Any) -> float:
        names.ahead = 5.0 * comm.rank
        return clock_skew(comm)

    monkeypatch.setattr(doctor_look.time, "time", late)
    assert on_ranks([0, 0], work) == [0.0, 5.0]


# ---------------------------------------------------------------- the child job


@pytest.mark.mpi_skip
@pytest.mark.parametrize(("program", "expected"), [
    ("from mpi4py import MPI", SelfTest(True, True, "exit status 0")),
    ("from mpi4py import MPI; import sys; sys.exit(3)", SelfTest(True, False, "wrong data")),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", SelfTest(True, False, "SIGSEGV")),
])  # fmt: skip
def test_a_child_job_may_die_and_this_process_lives(
    program: str, expected: SelfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in harness.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")  # as if this were a rank itself
    monkeypatch.setenv("PMIX_NAMESPACE", "of another job")
    assert self_test(harness.mpirun(), program=program) == expected


def test_a_child_without_launcher_or_cupy_is_said() -> None:
    assert self_test(None).ran is False
    lost = self_test("mpirun", run=lambda argv, env, seconds: (1, "Traceback\nImportError: no cupy\n---\n"))
    assert lost.words == "exit status 1: ImportError: no cupy"
    assert not lost.right


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"echo $$ > {mark}; exec sleep 60"  # a shell, which starts in a thousandth of this time
    code, words = run_child(["sh", "-c", program], os.environ, 1.5)
    assert (code, words) == (124, "no end within 1.5 s")
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


# ---------------------------------------------------------------- the command


def test_the_command_prints_and_its_exit_code_says(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = blink("doctor --json --no-self-test")
    body = json.loads(out)
    assert (body["format"], body["version"], body["ranks"]) == ("blinkmpi.doctor", 1, 1)
    assert code == int(any(line["state"] == "fail" for line in body["lines"]))
    monkeypatch.setenv("BLINKMPI_TIMEOUT", "soon")
    code, out, _ = blink("doctor --no-self-test")
    assert code == 1
    assert "FAIL" in out
    assert "-> correct the variable" in out
    assert "a job would not run well here (1 failed" in out


def test_without_mpi_the_command_says_so(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "mpi_module", lambda: (None, "cannot load MPI library"))
    code, out, _ = blink("doctor")
    assert code == 1
    assert "none found: cannot load MPI library" in out


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_under_mpirun_all_ranks_look_and_one_prints() -> None:
    done = harness.run_command(3, [sys.executable, "-m", "blinkmpi", "doctor", "--json"], timeout=60,
                               env={"BLINKMPI_NODE_ID": "here", "PYTHONUNBUFFERED": None})  # fmt: skip
    body = json.loads(done.output[done.output.index("{") : done.output.rindex("}") + 1])
    assert body["ranks"] == 3
    lines = {line["check"]: line for line in body["lines"]}
    assert "3 ranks, started by Open MPI's mpirun" in lines["start"]["evidence"]
    assert done.rc == int(any(line["state"] == "fail" for line in body["lines"]))
    assert packages()["blinkmpi"] in lines["versions"]["evidence"]
