"""``blinkmpi run``: programs of mpi4py's start, find their arguments and end as under ``python -m mpi4py``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, run_command

PLAIN, OURS = ("-m", "mpi4py"), ("-m", "blinkmpi", "run")
PROGRAM = """
import json, sys
import __main__
from mpi4py import MPI

comm = MPI.COMM_WORLD
facts = {
    "argv": sys.argv, "name": __name__, "main": __main__.__name__, "here": vars(__main__)["comm"] is comm,
    "path": sys.path[0], "file": globals().get("__file__"), "sum": comm.allreduce(comm.rank + 1),
}
if comm.rank == 0:
    print("facts", json.dumps(facts), flush=True)
"""
AS_MPI = """
import copy, pickle
import numpy as np
from mpi4py import MPI
from mpi4py.MPI import COMM_WORLD

import blinkmpi

comm = MPI.COMM_WORLD
assert COMM_WORLD is comm
assert isinstance(comm, blinkmpi.Communicator)
assert comm.Get_name() == "MPI_COMM_WORLD"
assert comm.Get_attr(MPI.TAG_UB) > 1 << 14
for other in pickle.loads(pickle.dumps(comm)), copy.copy(comm), copy.deepcopy([comm])[0]:
    assert other is comm
assert type(MPI.COMM_SELF) is MPI.Intracomm
for end in comm.Free, comm.Disconnect:
    try:
        end()
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_COMM
    else:
        raise AssertionError("freed")
total = np.zeros(3)
comm.Allreduce(np.ones(3), total)
part = comm.Split(comm.rank % 2)
part.Barrier()
assert total.tolist() == [comm.size] * 3
print("ours", [c.calls for c in comm.stats().collectives if c.collective == "allreduce"], flush=True)
"""
ENDINGS = {
    "a code": ("import sys; sys.exit(3)", 3, ""),
    "a text": ("import sys; sys.exit('that was all')", 1, "that was all"),
    "an error": ("from mpi4py import MPI; c = MPI.COMM_WORLD; 1 // (1 - c.rank); c.Barrier()", 1, "ZeroDivisionError"),
    "an error of a call": ("from mpi4py import MPI; MPI.COMM_WORLD.Allreduce(3, 4)", 1, "Error: "),
    "nothing": ("", 0, ""),
}
SECONDS = 60.0


def path(*folders: Path) -> str:
    return os.pathsep.join(map(str, (*folders, ROOT)))


def facts(n: int, start: tuple[str, ...], words: list[str], cwd: Path) -> dict[str, Any]:
    done = run_command(n, [sys.executable, *start, *words], timeout=SECONDS, env={"PYTHONPATH": path(cwd)})
    assert done.rc == 0, done.output
    return json.loads(done.output.partition("facts ")[2].partition("\n")[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("words", [["FILE", "-m", "--strict"], ["-m", "a_program", "-c", "x"], ["-c", PROGRAM, "a b"]])
def test_a_program_finds_what_it_finds_under_mpi4py(words: list[str], tmp_path: Path) -> None:
    program = tmp_path / "a_program.py"
    program.write_text(PROGRAM)
    words = [str(program) if word == "FILE" else word for word in words]
    plain, ours = (facts(2, start, words, tmp_path) for start in (PLAIN, OURS))
    assert ours == plain
    assert plain["sum"] == 3


def test_a_program_from_stdin() -> None:
    plain, ours = (
        subprocess.run([sys.executable, *start, "-", "x"], input=PROGRAM, text=True, capture_output=True, check=True)
        for start in (PLAIN, OURS)
    )
    assert ours.stdout == plain.stdout
    assert '"sum": 1' in plain.stdout


def test_the_communicator_is_what_mpis_own_is(tmp_path: Path) -> None:
    program = tmp_path / "as_mpi.py"
    program.write_text(AS_MPI)
    done = run_command(3, [sys.executable, *OURS, "--strict", str(program)], timeout=SECONDS)
    assert done.rc == 0, done.output
    assert done.output.count("ours [1]") == 3


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_under_mpi4py(ending: str) -> None:
    code, rc, said = ENDINGS[ending]
    for start in PLAIN, OURS:
        done = run_command(2, [sys.executable, *start, "-c", code], timeout=SECONDS)
        assert done.rc == rc, done.output
        assert said in done.output
        assert not done.leftovers


def test_ranks_may_end_long_after_one_another() -> None:
    """A deadline is for calls, not for ends."""
    code = "import time; from mpi4py import MPI; c = MPI.COMM_WORLD; c.context.timeout_s = 2; time.sleep(4 * c.rank)"
    done = run_command(2, [sys.executable, *OURS, "-c", code], timeout=SECONDS)
    assert done.rc == 0, done.output
    assert "WARN" not in done.output


@pytest.mark.parametrize(("words", "said"), [
    ([], "no program; name a file"), (["no.py"], "no.py: no such file"),
    (["--timeout", "-1", "-c", ""], "timeout=-1.0"),
])  # fmt: skip
def test_what_cannot_be_run(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, *OURS, *words], text=True, capture_output=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
