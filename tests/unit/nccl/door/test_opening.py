"""The door opens GPUs in unchanged programs: it finds blinkmpi in their Python, and all ranks open theirs, or none."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from blinkmpi.cli.main import main
from blinkmpi.nccl.library import LIBRARY, door
from blinkmpi.nccl.table import Faster, FasterTable, file_of, variables
from blinkmpi.topology.gpu_topology import from_gpus
from blinkmpi.transport.cuda.kernels.compiler import kernels_digest
from tests.harness import ENVIRONMENT, ROOT
from tests.unit.topology.test_probe import recorded

HERE = Path(__file__).parent
SECONDS = 100
CALLS = 20
CUDA = """
#include <unistd.h>
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuDeviceGetUuid_v2(unsigned long *uuid, int device) { return uuid[0] = getpid(), uuid[1] = device, 0; }
"""
LACKS = """
import sys

class Lacks:
    def find_spec(self, name, path=None, target=None):
        if name == "blinkmpi.nccl.inside":
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Lacks())
"""
AT_END = """
#include <stddef.h>
#include <stdio.h>
static void *comm, *buffer[1 << 10];
static int (*make)(const void *, void *, size_t, int, int, void *, void *), (*ask)(void *, int *);
void at_end(void *c, void *call, void *error) { comm = c, make = call, ask = error; }
__attribute__((destructor)) static void end(void) {
  int error = -1;
  if (!comm) return;
  const int made = make(buffer, buffer, 1000, 7, 0, comm, NULL), asked = ask(comm, &error);
  printf("at the end: %d %d %d\\n", made, asked, error);
}
"""
pytestmark = [pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a stub of NCCL, and a driver that knows one GPU for each process."""
    made = tmp_path_factory.mktemp("opening")
    words = ["cc", "-shared", "-fPIC", "-pthread"]
    nccl = ["-Wl,-soname,libnccl.so.2", "-o", str(made / "libnccl.so.2"), str(HERE / "stub.c")]
    subprocess.run([*words, *nccl], check=True, timeout=SECONDS)
    cuda = ["-Wl,-soname,libcuda.so.1", "-o", str(made / "libcuda.so.1"), "-x", "c", "-"]
    subprocess.run([*words, *cuda], input=CUDA, text=True, check=True, timeout=SECONDS)
    return made


class Ended:
    """What became of a rank: its exit code, what it told, and its stderr."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code, self.errors = code, errors
        self.told: dict[str, Any] = json.loads(output) if output else {}


def ranks(
    folder: Path, n: int, env: Mapping[str, str], by_rank: Mapping[int, Mapping[str, str]] | None = None,
    *, before: Sequence[str] = (), library: str | None = None,
) -> list[Ended]:  # fmt: skip
    """Run a client of each rank, to its end."""
    processes = started(folder, n, env, by_rank, before=before, library=library)
    try:
        told = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Ended(p.returncode, *both) for p, both in zip(processes, told, strict=True)]


def started(
    folder: Path, n: int, env: Mapping[str, str], by_rank: Mapping[int, Mapping[str, str]] | None = None,
    *, before: Sequence[str] = (), library: str | None = None,
) -> list[Any]:  # fmt: skip
    """A client of each rank.

    Args:
        before: words in front of its command.
        library: that it opens; by default the door.
    """
    name, processes = uuid4().hex, []
    common = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "STUB_FOLDER": str(folder), **env}
    common = {"BLINKMPI_NCCL": "all", **common}
    common |= {LIBRARY: str(folder / "libnccl.so.2"), "LD_LIBRARY_PATH": str(folder)}
    for rank in range(n):
        opened = str(door()) if library is None else library
        words = [*before, sys.executable, str(HERE / "opened_client.py"), opened, name, str(n), str(rank)]
        own = {**common, **(by_rank or {}).get(rank, {})}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        processes.append(subprocess.Popen(words, env=own, cwd=ROOT, text=True, **pipes))  # type: ignore[call-overload]
    return processes


@pytest.mark.parametrize("n", [2, 3])
def test_all_ranks_open_their_gpus_and_launch_the_same_calls(folder: Path, n: int) -> None:
    found = ranks(folder, n, {"FAKE": "1"})
    assert [rank.errors for rank in found] == [""] * n
    assert all(rank.told == found[0].told for rank in found)
    told = found[0].told
    assert (told["state"], told["kinds"]) == ("open", [["AllReduce", "float32", "sum", 4096, "ours"]])
    assert told["ours"] > CALLS
    assert len(told["launched"]) == CALLS


def test_a_process_may_have_several_communicators(folder: Path) -> None:
    for rank in ranks(folder, 2, {"FAKE": "1", "COMMS": "3"}):
        assert (rank.code, rank.errors, rank.told["all"]) == (0, "", [["open", True]] * 3)


@pytest.mark.parametrize("library", ["", "VLLM_NCCL_SO_PATH"])
def test_the_command_runs_programs_that_are_linked_and_those_that_open_by_name(folder: Path, library: str) -> None:
    found = ranks(folder, 2, {"FAKE": "1"}, before=[sys.executable, "-m", "blinkmpi", "nccl", "run"], library=library)
    for rank in found:
        assert (rank.code, rank.errors, rank.told["state"]) == (0, "", "open")
        assert rank.told["ours"] > CALLS


@pytest.mark.parametrize("chosen", ["all", "off"])
def test_a_running_process_is_asked_whose_its_calls_are(
    folder: Path, chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"FAKE": "1", "WAITS": "1", "BLINKMPI_NCCL": chosen}
    if chosen == "off":
        env["LEAVES"] = "1"
    processes = started(folder, 2, env, before=[sys.executable, "-m", "blinkmpi", "nccl", "run"], library="")
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        pid = processes[1].pid
        assert main(["nccl", "status", str(pid), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert main(["nccl", "status", str(pid)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
    finally:
        for process in processes:
            process.communicate("\n", timeout=SECONDS)
    assert told["pid"] == pid
    if chosen == "off":
        assert (told["why"], told["communicators"]) == ("BLINKMPI_NCCL=off", [])
        assert shown == f"All calls of process {pid} are NCCL's: BLINKMPI_NCCL=off."
        return
    (comm,) = told["communicators"]
    assert (comm["state"], comm["ranks"], comm["rank"], comm["why"]) == ("open", 2, 1, "")
    assert comm["ours"] == comm["kinds"][0]["ours"] > CALLS
    assert f"rank 1 of 2, open: {comm['ours']} calls ours, {comm['nccls']} NCCL's" in shown
    assert "AllReduce float32 sum" in shown


def test_calls_that_are_ours_stay_so_when_python_has_ended(folder: Path) -> None:
    """As of torch's threads, which ask for errors until the process has gone."""
    made = folder / "at_end.so"
    words = ["cc", "-shared", "-fPIC", "-o", str(made), "-x", "c", "-"]
    subprocess.run(words, input=AT_END, text=True, check=True, timeout=SECONDS)
    for process in started(folder, 2, {"FAKE": "1", "AT_END": str(made)}):
        output, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, output, errors) == (0, "kept\nat the end: 0 0 0\n", "")


def test_a_program_may_end_while_its_gpus_are_opened(folder: Path) -> None:
    for rank in ranks(folder, 2, {"FAKE": "1", "LEAVES": "1"}):
        assert (rank.code, rank.errors) == (0, "")


STEPS = ("shared_folder", "agree_on_settings", "gather_gpus", "kept", "agree_on_plan", "CudaTransport")


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_dies_in_a_step_leaves_the_others_with_nccl(folder: Path, step: str) -> None:
    n = 3 if step == "gather_gpus" else 2
    *left, dead = ranks(folder, n, {"FAKE": "1", "DIES": f"{n - 1}:{step}"})
    assert dead.code == -signal.SIGKILL
    for rank in left:
        assert (rank.code, rank.told["state"], rank.told["ours"]) == (0, "NCCL's", 0), rank.errors
        assert f"rank {n - 1}" in rank.told["why"]
        assert rank.errors.count("a communicator's calls stay NCCL's: PeerLost: ") == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_on_one_rank_fails_on_all(folder: Path, step: str) -> None:
    found = ranks(folder, 2, {"FAKE": "1", "FAILS": f"1:{step}"})
    assert "a test wants it so" in found[1].errors
    for rank in found:
        assert (rank.code, rank.told["state"], rank.told["ours"]) == (0, "NCCL's", 0), rank.errors
        assert rank.errors.count("a communicator's calls stay NCCL's: ") == 1


def test_a_rank_whose_python_lacks_a_package_leaves_all_with_nccl(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKS)
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = ranks(folder, 2, {}, {0: {"FAKE": "1"}, 1: path})
    assert "stay NCCL's: ImportError: no blinkmpi.nccl.inside here; install" in found[1].errors
    assert "rank 1 has not opened its GPU and will not" in found[0].errors
    assert [(rank.code, rank.told["state"], rank.told["ours"]) for rank in found] == [(0, "NCCL's", 0)] * 2


def test_opening_imports_no_mpi() -> None:
    """An unchanged program may have none, or begin it itself later."""
    code = "import sys, blinkmpi.nccl.inside, blinkmpi.nccl.opening; print([m for m in sys.modules if 'mpi4py' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "[]\n"


def test_another_setting_on_one_rank_is_said_on_all(folder: Path) -> None:
    env = {0: {"BLINKMPI_MAX_CTAS": "8"}, 1: {"BLINKMPI_MAX_CTAS": "16"}}
    for rank in ranks(folder, 2, {"FAKE": "1"}, env):
        assert "MismatchError: rank 1 has other BLINKMPI_ variables than rank 0" in rank.errors
        assert (rank.code, rank.told["ours"]) == (0, 0)


def test_without_a_table_all_calls_are_nccls_unless_the_user_chooses(folder: Path, tmp_path: Path) -> None:
    env = {"FAKE": "1", "BLINKMPI_NCCL": "", "BLINKMPI_CACHE_DIR": str(tmp_path)}
    for rank in ranks(folder, 2, env):
        assert "no table says which calls are faster than NCCL's on 2 fake: mpirun -np 2 blinkmpi tune" in rank.errors
        assert (rank.told["state"], rank.told["ours"]) == ("NCCL's", 0)


@pytest.mark.parametrize(("most", "whose"), [(4096, "ours"), (8192, "NCCL's")])
def test_with_a_table_calls_are_ours_that_its_rows_have(folder: Path, tmp_path: Path, most: int, whose: str) -> None:
    """Rank 0's counts, wherever the others keep theirs."""
    found = from_gpus(recorded("nvml-h200x8")[:2])
    rows = (Faster("allreduce", "float32", most, 1.2),)
    facts = "fake", 2, found.name, "2026-11-30", "2.28.9", variables(), kernels_digest(), ("allreduce",)
    file_of(tmp_path, "fake", found).write_text(FasterTable(*facts, rows).to_json())
    env = {"FAKE": "1", "BLINKMPI_NCCL": ""}
    for rank in ranks(folder, 2, env, {0: {"BLINKMPI_CACHE_DIR": str(tmp_path)}}):
        assert rank.told["kinds"] == [["AllReduce", "float32", "sum", 4096, whose]], rank.errors
        assert (rank.told["ours"] > 0) == (whose == "ours")


def test_without_cupy_or_a_gpu_all_ranks_say_so(folder: Path) -> None:
    for rank in ranks(folder, 2, {"CUDA_VISIBLE_DEVICES": ""}):
        assert "stay NCCL's: DeviceError: " in rank.errors
        assert rank.told["state"] == "NCCL's"
