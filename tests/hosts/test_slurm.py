"""A real Slurm on two hosts runs ``launch/slurm.sbatch``: a controller on the first, a slurmd on each, no munge."""

import json
import runpy
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import ENVIRONMENT, ROOT, TAIL, other_mpi
from tests.hosts.conftest import lacking
from tests.hosts.world import ROOTLESS, HostsError, World, program, search_path

pytestmark = [pytest.mark.hosts, pytest.mark.mpi_skip]
JOB_S = 60.0
WAITING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

CONFIGURATION = (ROOT / "tests" / "data" / "slurm.conf").read_text()  # with places for the folder and the hosts


@dataclass
class Slurm:
    """A cluster of all hosts of a world."""

    world: World
    folder: Path
    env: dict[str, str]

    def sbatch(self, *args: str, **env: str) -> str:
        """Run ``launch/slurm.sbatch`` on two ranks of each of two nodes to its end; gives what it printed."""
        size = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0"]
        return self.job(*size, "launch/slurm.sbatch", *args, **env)

    def job(self, *args: str, **env: str) -> str:
        """Run a job to its end; gives its output file.

        Not by ``sbatch --wait``, which looks for the end after 2, 10 and 42 seconds.
        """
        output = f"--output={self.folder}/%j.out"
        job = self.do("sbatch", "--parsable", output, *args, **env)
        end = time.monotonic() + JOB_S
        while (state := self.do("squeue", "--noheader", "--states=all", f"--job={job}", "--format=%T")) in WAITING:
            if time.monotonic() > end:
                self.do("scancel", job)
                break
            time.sleep(0.2)
        log = self.folder / f"{job}.out"
        printed = log.read_text() if log.exists() else ""
        if state != "COMPLETED":
            raise HostsError(f"job {job} is {state} after {JOB_S:.0f} s at most:\n{printed[-TAIL:]}")
        return printed

    def do(self, *argv: str, **env: str) -> str:
        return self.world.do("host0", *argv, env={**self.env, **env}).strip()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm whose daemons end with the world."""
    lacks = [tool for tool in ("slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(tool, path=search_path())]
    if lacks:
        lacking(f"no {', '.join(lacks)}: apt-get install slurm-wlm")
    if not list(Path("/usr/lib").glob("*/libpmix.so")):
        lacking("no libpmix.so for Slurm's PMIx plugin: apt-get install libpmix-dev")
    if ROOTLESS:
        pytest.skip("slurmd wants to be started by root")
    folder = tmp_path_factory.mktemp("slurm")
    with World(2) as world:
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, names=",".join(world.names)))
        for gpu in ("nvidia0", "nvidia1"):  # in the place of devices
            (folder / gpu).touch()
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/nvidia[0-1]\n")
        (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")  # each host's own
        for name in ("state", *world.names):
            (folder / name).mkdir()
        found = Slurm(world, folder, {**ENVIRONMENT, "SLURM_CONF": str(folder / "slurm.conf"), "VENV": sys.prefix})
        found.do("slurmctld", "-c")
        for host in world.names:
            world.do(host, "slurmd", env=found.env)
        yield found


def test_slurm_runs_the_training_example(slurm: Slurm) -> None:
    output = slurm.sbatch(*program((2, 2), train, timeout=40))
    assert "on 2 nodes" in output
    assert "bit-identical on 4 ranks" in output
    assert "passed" in output


def train() -> None:
    sys.argv = ["train.py", "--epochs", "4", "--hidden", "256"]
    runpy.run_path(str(ROOT / "examples" / "train.py"), run_name="__main__")


def test_slurm_runs_it_by_the_launcher_of_open_mpi(slurm: Slurm) -> None:
    output = slurm.sbatch(*program((2, 2), print, "there", timeout=30), LAUNCHER="openmpi")
    assert output.count("\nthere") == 4, output


def test_slurm_runs_it_with_pmi2_where_the_mpi_is_mpich(slurm: Slurm, tmp_path: Path) -> None:
    variables = other_mpi("mpich", tmp_path)
    output = slurm.sbatch(*program((2, 2), train, timeout=40), **variables)
    assert "srun --mpi=pmi2 " in output
    assert "on 2 nodes" in output
    assert "bit-identical on 4 ranks" in output
    assert "passed" in output


GPUS = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]  # of a job


def script(folder: Path, line: str) -> str:
    """A job script in this environment, of one line."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\nset -e\nsource {sys.prefix}/bin/activate\n{line}\n")
    return str(path)


def test_a_job_with_a_gpu_for_each_task_runs(slurm: Slurm, tmp_path: Path) -> None:
    """Files stand for the GPUs, which ranks do not look for: what such a job sets does not contradict launch's line."""
    argv = shlex.join(program((2, 2), train, timeout=40))
    line = f"echo $SLURM_GPUS_PER_TASK GPU for each task; blinkmpi launch --from-env --mpi srun --run -- {argv}"
    output = slurm.job(*GPUS, "--gpus-per-task=1", script(tmp_path, line))
    assert "1 GPU for each task" in output
    assert "srun --mpi=pmix " in output
    assert "on 2 nodes" in output
    assert "bit-identical on 4 ranks" in output
    assert "passed" in output


PLACES = ("out_of_place", "in_place")
SWEEP = """\
collectives = ["all_reduce", "broadcast"]
nodes = [2]
ranks_per_node = [2]
minbytes = "4K"
maxbytes = "64K"
stepfactor = 16
iters = 2
memory = "host"
"""


def test_slurm_runs_a_sweep(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SWEEP)
    output = slurm.sbatch("sweep", str(tmp_path / "small.toml"), RESULTS=str(tmp_path / "results"))
    assert "2 of 2 runs are good" in output
    runs = json.loads((tmp_path / "results" / "small.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["ok", "ok"]
    for run in runs:
        devices = run["result"]["config"]["devices"]
        assert [device["hostname"] for device in devices] == ["host0", "host0", "host1", "host1"]
        assert all(size[place]["nwrong"] == 0 for size in run["result"]["results"] for place in PLACES)
