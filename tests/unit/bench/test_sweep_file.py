"""The file of a sweep and the machines: its runs, the line of each, what is refused; and sweeps that start jobs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.bench.sweep.file import Resources, Run, expand, node_sizes, parse
from blinkmpi.bench.sweep.jobs import line, machines
from blinkmpi.bench.sweep.results import read
from blinkmpi.errors import ArgumentError, BlinkError, FormatError
from blinkmpi.launch.hostfile import Host
from tests.harness import ENVIRONMENT, ROOT, run_command
from tests.unit.bench.test_sweep import outside_a_job
from tests.unit.launch.test_launch import FITS, needs_command, srun

OPEN_MPI = "Open MPI v5.0.11"
NO_GPUS = {"BLINKMPI_GPU_DISABLE": "1"}
HERE = Resources(nodes=1, slots=4, gpus=False, local=True)
FOUR = Resources(nodes=4, slots=8, gpus=False)


def runs(text: str, resources: Resources = HERE) -> list[Run]:
    return [run for run, _ in expand(parse(text, source="x.toml"), resources, source="x.toml")]


# ---------------------------------------------------------------- the file


def test_an_empty_file_measures_allreduce_on_all_there_is() -> None:
    (one,) = runs("")
    assert (one.collective, one.nodes, one.ranks, one.compare) == ("all_reduce", 1, 4, ("mpi",))
    assert [(run.nodes, run.ranks) for run in runs("", FOUR)] == [(1, 8), (2, 16), (4, 32)]
    assert [run.nodes for run in runs("", Resources(nodes=3, slots=2, gpus=False))] == [1, 2, 3]
    assert runs("", Resources(nodes=1, slots=8, gpus=True))[0].compare == ("nccl",)
    assert runs('memory = "host"', Resources(nodes=1, slots=8, gpus=True))[0].compare == ("mpi",)


def test_the_runs_are_the_product_of_the_lists() -> None:
    found = runs(
        'collectives = ["all_reduce", "bcast"]\nnodes = [2, 4]\nranks_per_node = [1, 8]\nschemes = ["auto", "chain"]\n'
        'types = "double"\nops = ["sum", "max"]\n',
        FOUR,
    )
    reductions = [run for run in found if run.collective == "all_reduce"]
    assert len(reductions) == 2 * 2 * 2 * 2
    assert len(found) - len(reductions) == 2 * 2 * 2, "an operation makes no difference to a broadcast"
    assert {run.root for run in found if run.collective == "broadcast"} == {0}
    words = " ".join(reductions[-1].words)
    assert "-d double" in words
    assert "-o max" in words
    assert "--algo allreduce:chain" in words
    assert "-b 1024 -e 67108864" in words


def test_virtual_nodes_are_told_by_their_ranks() -> None:
    even, odd = runs('nodes = ["2+2", "4+ 1"]')
    assert (even.nodes, even.ranks, even.virtual, even.ranks_per_node) == (2, 4, "2+2", 2)
    assert (odd.nodes, odd.ranks, odd.virtual, odd.ranks_per_node) == (2, 5, "4+1", None)
    on = machines(parse("", source="x")[0], NO_GPUS, OPEN_MPI)
    argv, env = line(odd, on, "/r.json", {"PATH": "/bin"})
    assert env["BLINKMPI_NODES"] == "4+1"
    assert "-x BLINKMPI_NODES" in " ".join(argv)
    assert node_sizes("8") == (8,)
    assert node_sizes("4x2") == node_sizes("0+1") == node_sizes("") == ()


def test_a_part_changes_keys_of_the_whole() -> None:
    found = expand(
        parse('minbytes = "4K"\ntimeout = 5\n[[part]]\n[[part]]\ncollectives = "reduce"\nminbytes = 8\ntimeout = 9\n'
              "[[part]]\n", source="x"), HERE, source="x"
    )  # fmt: skip
    assert [(run.collective, run.minbytes, seconds) for run, seconds in found] == [
        ("all_reduce", 4096, 5.0), ("reduce", 8, 9.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [
    ("nodez = 1", "x.toml: nodez: there is no such key; did you mean 'nodes'?"),
    ("collectives = 3", "x.toml: collectives[0]: expected `str`, got `int`"),
    ("timeout = true", "x.toml: timeout: expected `float`, got `bool`"),
    ("timeout = 0", "timeout: 0 s; expected more than 0"),
    ("nodes = []", "nodes: an empty list"),
    ("nodes = 2", 'nodes[0]: 2, and there is 1 here; nodes of one machine are written "4+4"'),
    ('nodes = [1, "4x4"]', "nodes[1]: '4x4'; expected a number of nodes, or virtual nodes"),
    ("ranks_per_node = [2, 0]", "ranks_per_node[1]: 0; expected at least 1"),
    ('collectives = "all_to_some"', "x.toml: collectives: collective 'all_to_some' is unknown"),
    ('minbytes = "9Q"', "x.toml: minbytes: size '9Q'"),
    ('launcher = "ssh"', "launcher: invalid enum value 'ssh'"),
    ('types = "float128"', "bench refuses this: datatype 'float128' is unknown"),
    ('minbytes = "4M"\nmaxbytes = "1M"', "--minbytes 4194304 is more than --maxbytes 1048576"),
    ('compare = "nccl"\nmemory = "host"', "--compare nccl: it is measured on gpu memory only"),
    ('collectives = "barrier"', "bench cannot time barrier"),
    ('schemes = "allreduce:"', "expected COLLECTIVE:SCHEME"),
    ('flags = ["-J", "x"]', "flags: -J: the sweep itself needs it"),
    ('flags = ["--no-such-flag"]', "unrecognized arguments: --no-such-flag"),
    ('[[part]]\nhostfile = "h"', "part[0].hostfile: the same for the whole sweep"),
    ('[[part]]\n[[part]]\nitres = 3', "part[1].itres: there is no such key; did you mean 'iters'"),
    ("part = 3", "part: expected tables"),
    ("x =", "x.toml: no TOML"),
])  # fmt: skip
def test_a_wrong_file_is_refused_with_the_key_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        runs(text)


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(FormatError, match="there are 4 here; take it out"):
        runs("nodes = [1, 8]", FOUR)
    with pytest.raises(FormatError, match="a node has 8 slots"):
        runs("ranks_per_node = 9", FOUR)


# ---------------------------------------------------------------- the machines and the line


def text_line(text: str, environ: dict[str, str], index: int = 0, **more: Any) -> str:
    sweeps = parse(text, source="x")
    on = machines(sweeps[0], environ, OPEN_MPI, **more)
    return " ".join(line(expand(sweeps, on.resources, source="x")[index][0], on, "/r.json", environ)[0])


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "8(x4)", "PATH": "/bin",
         "BLINKMPI_GPU_DISABLE": "1"}  # fmt: skip


def test_fewer_nodes_are_the_first_ones_of_the_job() -> None:
    made = text_line("nodes = [2, 4]\nranks_per_node = 3", SLURM)
    assert " -np 6 --host n1:3,n2:3 --map-by ppr:3:node " in made
    made = text_line('nodes = 2\nlauncher = "srun"', {**SLURM, "SLURM_GPUS_ON_NODE": "4"})
    assert "--ntasks=8 --nodelist=n1,n2 --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 " in made
    made = text_line('nodes = ["4+4"]', SLURM)
    assert " -np 8 --host n1:8 " in made


def test_a_hostfile_and_a_launcher_win_over_the_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=4\n")
    made = text_line("", SLURM, index=1, hostfile=str(hosts), launcher="mpich")
    assert made.startswith("env SLURM_MPI_TYPE=none mpirun -n 4 -hosts a:2,b:2 ")
    hosts.write_text("a\nb\n")
    with pytest.raises(ArgumentError, match="a: how many ranks"):
        text_line("", NO_GPUS, hostfile=str(hosts))
    assert "--host a:3 " in text_line("nodes = 1\nranks_per_node = 3", NO_GPUS, hostfile=str(hosts))


def test_this_machine_takes_more_ranks_than_cores() -> None:
    on = machines(parse("", source="x")[0], NO_GPUS, OPEN_MPI)
    assert on.resources.local
    (many,) = runs("ranks_per_node = 512")
    assert f"--host localhost:{many.ranks} " in " ".join(line(many, on, "/r.json", {})[0])
    assert on.hosts == ()
    assert machines(parse("", source="x")[0], SLURM, OPEN_MPI).hosts[0] == Host("n1", 8)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "sweeps").glob("*.toml")), ids=lambda p: p.name)
def test_the_examples_can_be_read(path: Path) -> None:
    for resources in (HERE, Resources(nodes=8, slots=8, gpus=False)):
        try:
            assert runs(path.read_text(), resources)
        except BlinkError as error:
            pytest.fail(f"{path.name}: {error}")


# ---------------------------------------------------------------- jobs that are really started


__all__ = ["outside_a_job"]  # a fixture that every test here uses


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "blinkmpi", *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.slow
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


@pytest.mark.slow
@needs_command
@pytest.mark.mpi_skip  # starts mpirun
@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_script_runs_a_sweep(scheduler: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text('nodes = 1\nmaxbytes = "1K"\niters = 2\n')
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    if scheduler == "slurm":
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2"}
        argv = ["bash", str(ROOT / "launch" / "slurm.sbatch"), "sweep", "tiny.toml"]
    else:
        job = {"PBS_JOBID": "7.x", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
        job["SWEEP"] = "tiny.toml"
        argv = ["bash", str(ROOT / "launch" / "pbs.sh")]
    env = {**os.environ, **ENVIRONMENT, **job, "PATH": srun(tmp_path, FITS), "PYTHONPATH": str(ROOT), "VENV": ""}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs are good; JSON in results/tiny.json" in done.stdout
    body = read(str(tmp_path / "results" / "tiny.json"))
    assert body["scheduler"] == {"kind": scheduler, "job": "7" if scheduler == "slurm" else "7.x"}
    (only,) = body["runs"]
    assert only["result"]["blinkmpi"]["ranks"] == 2
    assert only["command"][0].endswith("srun" if scheduler == "slurm" else "mpirun")
