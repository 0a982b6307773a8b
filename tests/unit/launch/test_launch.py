"""``blinkmpi launch`` and the job scripts: what is printed, what is really started, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blinkmpi.cli import launch as cli_launch
from blinkmpi.cli import main as cli
from blinkmpi.launch.hostfile import read
from blinkmpi.util.launcher import RANK_VARIABLES
from tests.harness import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "hostfiles"
JOB = ("SLURM_", "PBS_", "LSB_", "NCCL_", "CUDA_", "BLINKMPI_", "UCX_", "FI_", "MPICH_", "I_MPI_")
SIZE = "from mpi4py import MPI; print('world of', MPI.COMM_WORLD.size)"


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(JOB) or name in RANK_VARIABLES or name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cli_launch, "version_text", lambda: "Open MPI v5.0.11")
    monkeypatch.setattr(cli_launch, "find_mpirun", lambda: "/opt/mpi/bin/mpirun")


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that the command prints."""
    code = cli.main(["launch", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    line, empty, *reasons = out.splitlines()
    assert not empty
    assert reasons
    return str(line)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["launch", *words]) == 2
    return capsys.readouterr().err


def test_the_mpi_that_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = launched(capsys, "-np", "4", "--", "python", "train.py", "--lr", "0.1", "a b")
    expected = "/opt/mpi/bin/mpirun -np 4 --bind-to none -x OMP_NUM_THREADS -x PATH python train.py --lr 0.1 'a b'"
    assert line == expected
    monkeypatch.setattr(cli_launch, "version_text", lambda: "MPICH Version: 4.3")
    assert "-genvlist OMP_NUM_THREADS,PATH" in launched(capsys, "-np", "4", "--", "p")
    assert "--mpi=pmi2" in launched(capsys, "-np", "4", "--mpi", "srun", "--", "p")
    assert "--mpi=pmix" in launched(capsys, "-np", "4", "--mpi", "srun", "--pmi", "pmix", "--", "p")
    monkeypatch.setattr(cli_launch, "version_text", lambda: "")
    assert "no MPI here" in refused(capsys, "-np", "4", "--", "p")


def test_a_hostfile_of_the_other_dialect_is_told_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    other, own, mixed = (str(EXAMPLES / name) for name in ("two-nodes-hydra", "two-nodes-openmpi", "mixed-openmpi"))
    assert "--host node01:8,node02:8 " in launched(capsys, "--hostfile", other, "-np", "16", "--", "p")
    assert f"--hostfile {own} " in launched(capsys, "--hostfile", own, "-np", "16", "--", "p")
    names = str(EXAMPLES / "names")
    line = launched(capsys, "--hostfile", names, "-np", "8", "--ppn", "4", "--mpi", "intel", "--", "p")
    assert "-hosts node01,node02 -ppn 4 " in line
    assert "-hosts big01:8,small01:4,small02:2 " in launched(
        capsys, "--hostfile", mixed, "-np", "14", "--mpi", "mpich", "--", "p"
    )


def test_a_hostfile_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mixed, out = str(EXAMPLES / "mixed-openmpi"), tmp_path / "hosts"
    line = launched(capsys, "--hostfile", mixed, "-np", "14", "--mpi", "intel", "-o", str(out), "--", "p")
    assert f"-machinefile {out} " in line
    assert read(out, "hydra") == read(mixed, "openmpi")
    assert "no machines to write" in refused(capsys, "-np", "1", "-o", str(out), "--", "p")
    words = ("--hostfile", mixed, "-np", "1", "--mpi", "srun", "--pmi", "pmix", "-o", str(out), "--", "p")
    assert "srun reads no hostfile" in refused(capsys, *words)


def test_a_job_of_slurm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "n[08-10],x"), ("TASKS_PER_NODE", "2(x3),1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    line = launched(capsys, "--from-env", "--", "p")
    assert "-np 7 --host n08:2,n09:2,n10:2,x:1 " in line
    assert "CUDA_VISIBLE" not in line
    line = launched(capsys, "--from-env", "--mpi", "srun", "--", "p")
    assert line.startswith("srun --mpi=pmix --ntasks=7 --cpu-bind=none ")
    assert launched(capsys, "--from-env", "--mpi", "mpich", "--", "p").startswith("env SLURM_MPI_TYPE=none mpirun ")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x")
    assert "SLURM_TASKS_PER_NODE: '2(x'" in refused(capsys, "--from-env", "--", "p")


@pytest.mark.parametrize(("words", "said"), [
    (["--", "p"], "how many ranks? Give -np N"),
    (["-np", "2"], "write it after --"),
    (["--from-env", "--", "p"], "no scheduler's job"),
    (["-np", "2", "--pmi", "pmix", "--", "p"], "give --mpi srun too"),
    (["-np", "2", "-x", "NOT_SET_HERE", "--", "p"], "-x NOT_SET_HERE"),
    (["-np", "2", "--hostfile", "/nowhere/hosts", "--", "p"], "/nowhere/hosts: cannot read the hostfile"),
    (["-np", "99", "--hostfile", str(EXAMPLES / "two-nodes-hydra"), "--", "p"], "2 hosts take 16 ranks"),
])  # fmt: skip
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refused(capsys, *words)


def test_a_launcher_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "-np", "2", "--run", "--", "p")
    assert "cannot start '/opt/mpi/bin/mpirun': No such file" in error


# ---------------------------------------------------------------- what is really started


def started(*argv: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "VENV": sys.prefix}
    env = {**os.environ, **ENVIRONMENT, **path, **variables}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_the_line_starts_ranks() -> None:
    words = ("launch", "-np", "2", "--run", "--", sys.executable, "-c", SIZE)
    done = started(sys.executable, "-m", "blinkmpi", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world of 2") == 2
    assert "-np 2" in done.stderr
    done = started(sys.executable, "-m", "blinkmpi", *words[:-1], "raise SystemExit(3)")
    assert done.returncode == 3, done.stderr


needs_command = pytest.mark.skipif(
    not (Path(sys.prefix) / "bin" / "blinkmpi").exists(), reason="blinkmpi is not installed: pip install -e '.[test]'"
)

# An srun for the tests: a launcher with this MPI's mpirun behind it, or one that does not fit the MPI.
FITS = 'exec mpirun -np "$n" "$@"'
ALONE = 'code=0; for ((i = 0; i < n; i++)); do "$@" || code=$?; done; exit "$code"'


def srun(folder: Path, how: str) -> str:
    """Write an ``srun``; the PATH that has it."""
    (folder / "srun").write_text(
        "#!/bin/bash\n"
        'while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && n=${1#*=}; shift; done\n'
        f'for name in "${{!SLURM_@}}"; do unset "$name"; done\n{how}\n'
    )  # fmt: skip
    (folder / "srun").chmod(0o755)
    return f"{folder}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
}  # fmt: skip


@pytest.mark.slow
@needs_command
@pytest.mark.mpi_skip
def test_the_slurm_script_runs_a_program(tmp_path: Path) -> None:
    script = str(ROOT / "launch" / "slurm.sbatch")
    done = started("bash", script, "python", "-c", SIZE, cwd=tmp_path, **SLURM, VENV="", PATH=srun(tmp_path, FITS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world of 2") == 2
    assert "--ntasks=2" in done.stderr
    assert "--nodes=2 --ntasks-per-node=1" in done.stderr


@needs_command
@pytest.mark.mpi_skip
def test_the_slurm_script_refuses_worlds_of_one(tmp_path: Path) -> None:
    script = str(ROOT / "launch" / "slurm.sbatch")
    done = started("bash", script, "python", "-c", SIZE, cwd=tmp_path, **SLURM, VENV="", PATH=srun(tmp_path, ALONE))
    assert done.returncode != 0
    assert "the world has 1 ranks, the job 2 tasks" in done.stderr
    assert "world of" not in done.stdout


@pytest.mark.slow
@needs_command
@pytest.mark.mpi_skip
def test_the_pbs_script_runs_a_program(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    (tmp_path / "size.py").write_text(SIZE)
    job = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path), "BLINKMPI_GPU_DISABLE": "1"}
    script = str(ROOT / "launch" / "pbs.sh")
    done = started("bash", script, **job, PROGRAM="python size.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world of 2") == 2
    assert "--host localhost:2" in done.stderr


@pytest.mark.parametrize("name", ["slurm.sbatch", "pbs.sh"])
def test_a_script_outside_its_job_says_so(name: str, tmp_path: Path) -> None:
    path = ROOT / "launch" / name
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    done = started("bash", str(path), cwd=tmp_path)
    assert done.returncode != 0
    assert "start this with" in done.stderr
    assert "gpus-per-task" not in path.read_text()
