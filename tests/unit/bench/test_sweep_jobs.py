"""Sweeps that really start jobs: on this machine, and from the job scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blinkmpi.bench.sweep.results import read
from tests.harness import ENVIRONMENT, ROOT, run_command
from tests.unit.bench.test_sweep import outside_a_job

__all__ = ["outside_a_job"]  # a fixture that every test here uses

needs_command = pytest.mark.skipif(
    not (Path(sys.prefix) / "bin" / "blinkmpi").exists(), reason="blinkmpi is not installed: pip install -e '.[test]'"
)


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "blinkmpi", *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.mpi_skip  # starts mpirun
def test_a_sweep_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text('collectives = ["all_reduce", "broadcast"]\nranks_per_node = [1, 2]\nmaxbytes = "16K"\n'
                    "stepfactor = 16\niters = 3\ntimeout = 60\n")  # fmt: skip
    done = command("bench", "--sweep", str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 runs are good; JSON in tiny.json" in done.stdout
    body = read(str(tmp_path / "tiny.json"))
    assert [run["result"]["blinkmpi"]["ranks"] for run in body["runs"]] == [1, 2, 1, 2]
    assert all(row["in_place"]["nwrong"] == 0 for run in body["runs"] for row in run["result"]["results"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.json", "tiny.toml"]
    again = command("bench", "--sweep", str(file), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "4 of them in tiny.json already" in again.stderr


@pytest.mark.mpi_skip  # starts mpirun
def test_a_sweep_under_mpirun_is_refused() -> None:
    words = [sys.executable, "-m", "blinkmpi", "bench", "--sweep", "benchmarks/sweeps/quick.toml"]
    done = run_command(2, words, timeout=60, cwd=ROOT)
    assert done.rc != 0
    assert done.output.count("a launcher started 2 of it; call it without one") == 1


# The start of an srun that has this MPI's mpirun behind it.
MPIRUN_BEHIND = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && n=${1#*=}; shift; done
for name in "${!SLURM_@}"; do unset "$name"; done
exec mpirun -np "$n" "$@"
"""


@needs_command
@pytest.mark.mpi_skip  # starts mpirun
@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_script_runs_a_sweep(scheduler: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text('nodes = 1\nmaxbytes = "1K"\niters = 2\n')
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    (tmp_path / "srun").write_text(MPIRUN_BEHIND)
    (tmp_path / "srun").chmod(0o755)
    if scheduler == "slurm":
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2"}
        argv = ["bash", str(ROOT / "launch" / "slurm.sbatch"), "sweep", "tiny.toml"]
    else:
        job = {"PBS_JOBID": "7.x", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
        job["SWEEP"] = "tiny.toml"
        argv = ["bash", str(ROOT / "launch" / "pbs.sh")]
    path = f"{tmp_path}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, **ENVIRONMENT, **job, "PATH": path, "PYTHONPATH": str(ROOT), "VENV": ""}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs are good; JSON in results/tiny.json" in done.stdout
    body = read(str(tmp_path / "results" / "tiny.json"))
    assert body["scheduler"] == {"kind": scheduler, "job": "7" if scheduler == "slurm" else "7.x"}
    (only,) = body["runs"]
    assert only["result"]["blinkmpi"]["ranks"] == 2
    assert only["command"][0].endswith("srun" if scheduler == "slurm" else "mpirun")
