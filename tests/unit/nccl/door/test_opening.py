"""The door opens GPUs in unchanged programs: it finds blinkmpi in their Python, and all ranks open theirs, or none."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from blinkmpi.nccl.library import LIBRARY, door
from tests.harness import ENVIRONMENT, ROOT

HERE = Path(__file__).parent
SECONDS = 100
CALLS = 20
SHM = Path("/dev/shm")
CUDA = """
#include <unistd.h>
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuDeviceGetUuid_v2(unsigned long *uuid, int device) { return uuid[0] = getpid(), uuid[1] = device, 0; }
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


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """In /dev/shm: neither pages nor stores."""
    pattern = f"blinkmpi-nccl-{os.getuid()}-*"
    before = set(SHM.glob(pattern))
    yield
    assert set(SHM.glob(pattern)) <= before


class Ended:
    """What became of a rank: its exit code, what it told, and its stderr."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code, self.errors = code, errors
        self.told: dict[str, Any] = json.loads(output) if output else {}


def ranks(
    folder: Path, n: int, env: Mapping[str, str], by_rank: Mapping[int, Mapping[str, str]] | None = None,
    *, before: Sequence[str] = (), library: str | None = None,
) -> list[Ended]:  # fmt: skip
    """Run a client of each rank.

    Args:
        before: words in front of its command.
        library: that it opens; by default the door.
    """
    name, processes = uuid4().hex, []
    common = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "STUB_FOLDER": str(folder), **env}
    common |= {LIBRARY: str(folder / "libnccl.so.2"), "LD_LIBRARY_PATH": str(folder)}
    for rank in range(n):
        opened = str(door()) if library is None else library
        words = [*before, sys.executable, str(HERE / "opened_client.py"), opened, name, str(n), str(rank)]
        own = {**common, **(by_rank or {}).get(rank, {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(words, env=own, cwd=ROOT, text=True, **pipes))  # type: ignore[call-overload]
    try:
        told = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Ended(p.returncode, *both) for p, both in zip(processes, told, strict=True)]


@pytest.mark.parametrize("n", [2, 3])
def test_all_ranks_open_their_gpus_and_launch_the_same_calls(folder: Path, n: int) -> None:
    found = ranks(folder, n, {"FAKE": "1"})
    assert [rank.errors for rank in found] == [""] * n
    assert all(rank.told == found[0].told for rank in found)
    told = found[0].told
    assert (told["state"], told["kinds"]) == ("open", [["AllReduce", "float32", "sum", 4096, "ours"]])
    assert told["ours"] > CALLS
    assert len(told["launched"]) == CALLS


@pytest.mark.parametrize("library", ["", "VLLM_NCCL_SO_PATH"])
def test_the_command_runs_programs_that_are_linked_and_those_that_open_by_name(folder: Path, library: str) -> None:
    found = ranks(folder, 2, {"FAKE": "1"}, before=[sys.executable, "-m", "blinkmpi", "nccl", "run"], library=library)
    for rank in found:
        assert (rank.code, rank.errors, rank.told["state"]) == (0, "", "open")
        assert rank.told["ours"] > CALLS


def test_a_program_may_end_while_its_gpus_are_opened(folder: Path) -> None:
    for rank in ranks(folder, 2, {"FAKE": "1", "LEAVES": "1"}):
        assert (rank.code, rank.errors) == (0, "")


STEPS = ("shared_folder", "agree_on_settings", "gather_gpus", "as_measured", "agree_on_plan", "CudaContext")


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
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = ranks(folder, 2, {}, {0: {"FAKE": "1"}, 1: path})
    assert "stay NCCL's: ImportError: no mpi4py here" in found[1].errors
    assert "rank 1 has not opened its GPU and will not" in found[0].errors
    assert [(rank.code, rank.told["state"], rank.told["ours"]) for rank in found] == [(0, "NCCL's", 0)] * 2


def test_another_setting_on_one_rank_is_said_on_all(folder: Path) -> None:
    env = {0: {"BLINKMPI_MAX_CTAS": "8"}, 1: {"BLINKMPI_MAX_CTAS": "16"}}
    for rank in ranks(folder, 2, {"FAKE": "1"}, env):
        assert "MismatchError: rank 1 has other BLINKMPI_ variables than rank 0" in rank.errors
        assert (rank.code, rank.told["ours"]) == (0, 0)


def test_without_cupy_or_a_gpu_all_ranks_say_so(folder: Path) -> None:
    for rank in ranks(folder, 2, {"CUDA_VISIBLE_DEVICES": ""}):
        assert "stay NCCL's: DeviceError: " in rank.errors
        assert rank.told["state"] == "NCCL's"
