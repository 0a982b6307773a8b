"""The launchers' lines: every word where it belongs, every impossible job refused with a remedy."""

import shlex
from typing import Any

import pytest

from blinkmpi.errors import ArgumentError
from blinkmpi.launch.command import LAUNCHERS, Job, Launcher, command, exported, mpi_of
from blinkmpi.launch.hostfile import Host

TWO = (Host("a", 8), Host("b", 8))
MIXED = (Host("a", 8), Host("b", 4))


def line(launcher: Launcher, **job: Any) -> str:
    """The line for a job, without the program."""
    made = command(Job(("prog", "an arg"), **job), launcher)
    assert made.argv[-2:] == ("prog", "an arg")
    assert all(part.why for part in made.parts)
    return shlex.join(made.argv[:-2])


@pytest.mark.parametrize(("launcher", "job", "expected"), [
    ("openmpi", {"ranks": 4}, "mpirun -np 4 --bind-to none"),
    ("openmpi", {"ranks": 4, "bind": "numa"}, "mpirun -np 4 --bind-to numa"),
    ("openmpi", {"ranks": 12, "hosts": MIXED}, "mpirun -np 12 --host a:8,b:4 --bind-to none"),
    ("openmpi", {"ranks": 12, "hosts": MIXED, "hostfile": "f"}, "mpirun -np 12 --hostfile f --bind-to none"),
    ("openmpi", {"ranks": 8, "hosts": TWO, "ppn": 4, "variables": ("A", "B")},
     "mpirun -np 8 --host a:4,b:4 --map-by ppr:4:node --bind-to none -x A -x B"),
    ("mpich", {"ranks": 4}, "mpirun -n 4 -bind-to none"),
    ("mpich", {"ranks": 4, "ppn": 2}, "mpirun -n 4 -ppn 2 -bind-to none"),
    ("mpich", {"ranks": 12, "hosts": MIXED, "bind": "core"}, "mpirun -n 12 -hosts a:8,b:4 -bind-to core"),
    ("mpich", {"ranks": 12, "hosts": MIXED, "hostfile": "f"}, "mpirun -n 12 -f f -bind-to none"),
    ("mpich", {"ranks": 4, "hosts": TWO, "hostfile": "f", "ppn": 2}, "mpirun -n 4 -hosts a:2,b:2 -bind-to none"),
    ("mpich", {"ranks": 2, "variables": ("A", "B")}, "mpirun -n 2 -bind-to none -genvlist A,B"),
    ("mpich", {"ranks": 2, "scheduler": "slurm"}, "env SLURM_MPI_TYPE=none mpirun -n 2 -bind-to none"),
    ("mpich", {"ranks": 2, "scheduler": "pbs"}, "mpirun -n 2 -bind-to none"),
    ("intel", {"ranks": 16, "hosts": TWO}, "mpirun -n 16 -hosts a,b -ppn 8 -genv I_MPI_PIN 0"),
    ("intel", {"ranks": 12, "hosts": MIXED, "hostfile": "f"}, "mpirun -n 12 -machinefile f -genv I_MPI_PIN 0"),
    ("intel", {"ranks": 4, "hosts": TWO, "ppn": 2, "scheduler": "pbs", "bind": "core", "variables": ("A",)},
     "env I_MPI_JOB_RESPECT_PROCESS_PLACEMENT=off mpirun -n 4 -hosts a,b -ppn 2 "
     "-genv I_MPI_PIN_DOMAIN core -genvlist A"),
    ("srun", {"ranks": 4}, "srun --mpi=pmix --ntasks=4 --cpu-bind=none --export=ALL --kill-on-bad-exit=1"),
    ("srun", {"ranks": 16, "hosts": TWO, "allocated": True, "gpus": 8, "pmi": "pmi2", "variables": ("A",)},
     "srun --mpi=pmi2 --ntasks=16 --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none "
     "--cpu-bind=none --export=ALL --kill-on-bad-exit=1"),
    ("srun", {"ranks": 8, "hosts": TWO, "bind": "numa"},
     "srun --mpi=pmix --ntasks=8 --nodelist=a --nodes=1 --ntasks-per-node=8 "
     "--cpu-bind=ldoms --export=ALL --kill-on-bad-exit=1"),
    ("srun", {"ranks": 5, "ppn": 2},
     "srun --mpi=pmix --ntasks=5 --nodes=3 --ntasks-per-node=2 --cpu-bind=none --export=ALL --kill-on-bad-exit=1"),
    ("srun", {"ranks": 12, "hosts": MIXED, "allocated": True},
     "srun --mpi=pmix --ntasks=12 --cpu-bind=none --export=ALL --kill-on-bad-exit=1"),
])  # fmt: skip
def test_lines(launcher: Launcher, job: dict[str, Any], expected: str) -> None:
    assert line(launcher, **job) == expected


def test_gpus_limit_the_ranks_of_a_node_and_fewer_slots_do_too() -> None:
    assert Job(("p",), 2, gpus=8).per_node == 8
    assert Job(("p",), 2, gpus=8, ppn=2).per_node == 2
    for slots, expected in (((64, 64), 8), ((4, 4), 4), ((8, 4), None), ((None, None), 8), ((None, 8), 8)):
        hosts = tuple(Host(name, n) for name, n in zip("ab", slots, strict=True))
        assert Job(("p",), 2, hosts, gpus=8).per_node == expected, slots


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_launcher_hides_a_gpu_from_its_peers(launcher: Launcher) -> None:
    words = line(launcher, ranks=16, hosts=TWO, gpus=8)
    assert "gpus-per-task" not in words
    assert "8" in words
    assert any("GPU of its local rank" in part.why for part in command(Job(("p",), 8, gpus=8), launcher).parts)


@pytest.mark.parametrize(("launcher", "job", "said"), [
    ("openmpi", {"program": (), "ranks": 1}, "write it after --"),
    ("openmpi", {"ranks": 0}, "-np 0: expected at least 1"),
    ("mpich", {"ranks": 1, "ppn": 0}, "--ppn 0"),
    ("srun", {"ranks": 1, "gpus": 0}, "--gpus-per-node 0"),
    ("openmpi", {"ranks": 8, "ppn": 8, "gpus": 4}, "a node has 4 GPUs"),
    ("openmpi", {"ranks": 17, "hosts": TWO}, "2 hosts take 16 ranks"),
    ("mpich", {"ranks": 5, "hosts": TWO, "ppn": 2}, "2 hosts take 4 ranks"),
    ("mpich", {"ranks": 5, "hosts": MIXED, "ppn": 8}, "b has 4 slots"),
    ("mpich", {"ranks": 5, "hosts": (Host("a", 16), Host("b", 4)), "gpus": 8}, "b has 4 slots"),
    ("openmpi", {"ranks": 2, "hosts": (Host("a"),)}, "a: how many ranks"),
    ("intel", {"ranks": 12, "hosts": MIXED}, "write one with -o FILE"),
    ("srun", {"ranks": 12, "hosts": MIXED}, "these hosts differ; give --ppn"),
])  # fmt: skip
def test_impossible_jobs(launcher: Launcher, job: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        command(Job(**{"program": ("p",), **job}), launcher)
    assert said in str(caught.value)


@pytest.mark.parametrize(("text", "launcher", "pmi"), [
    ("Open MPI v5.0.11, package: Open MPI x Distribution, ident: 5.0.11", "openmpi", "pmix"),
    ("mpirun (Open MPI) 5.0.11\n\nReport bugs", "openmpi", "pmix"),
    ("MPICH Version:      4.3.2\nMPICH Release date: ...", "mpich", "pmi2"),
    ("HYDRA build details:\n    Version:  5.0.2", "mpich", "pmi2"),
    ("MVAPICH Version      :\t4.0", "mpich", "pmi2"),
    ("Intel(R) MPI Library 2021.17 for Linux* OS\n", "intel", "pmi2"),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.17 Build 2025 (id: HYDRA)", "intel", "pmi2"),
])  # fmt: skip
def test_versions_tell_the_mpi(text: str, launcher: Launcher, pmi: str) -> None:
    assert mpi_of(text) == (launcher, pmi)


@pytest.mark.parametrize("text", ["", "IBM something", "MPI VERSION    : CRAY MPICH version 8.1"])
def test_an_unknown_mpi_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"say so with --mpi openmpi\|mpich\|intel\|srun"):
        mpi_of(text)


def test_variables() -> None:
    there = ["PATH", "HOME", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "BLINKMPI_ALGO", "MINE", "XNCCL_"]
    assert exported(there) == ("BLINKMPI_ALGO", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "PATH")
    assert exported(there, allocated=True) == ("BLINKMPI_ALGO", "NCCL_DEBUG", "PATH")
    both = exported(there, extra=["MINE", "CUDA_VISIBLE_DEVICES"], allocated=True)
    assert both[1:3] == ("CUDA_VISIBLE_DEVICES", "MINE")
    with pytest.raises(ArgumentError, match="-x YOURS: there is no such variable"):
        exported(there, extra=["YOURS"])
