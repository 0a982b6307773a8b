"""Algorithms on real ranks: every one of the library by both executors, on several nodes, and how they are chosen."""

from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi import lang
from blinkmpi.errors import ArgumentError, MismatchError, RemoteError, SettingsError
from blinkmpi.lang import Algorithm, chunk, library
from blinkmpi.planning.plan import Plan
from tests.conformance import Case, cases
from tests.harness import mpi
from tests.mpi.test_conformance import run_all
from tests.mpi.test_nodes import split
from tests.unit.lang.algorithms import COLLECTIVES, by_chance, of_ranks
from tests.unit.trees.packings import call_of

CALLS = {"allreduce": ("allreduce",), "allgather": ("allgather", "allgatherv"), "alltoall": ("alltoall", "alltoallv")}


def calls(collective: str, n: int, *, few: bool) -> list[Case]:
    """Small counts of a few types, and long vectors of two of them, in place and not; fewer for many ranks."""
    found = [case for kind in CALLS[collective] for case in cases(kind, n, full=False)]
    main = [case for case in found if case.dtype in ("float32", "bfloat16") and case.op != "min" and case.count >= 7]
    return main if few or n > 4 else [case for case in found if case in main or case.count <= 7]


def rounds(n: int) -> list[list[Algorithm]]:
    """All algorithms for ``n`` ranks, in each round one for each collective that has some left."""
    by_kind: dict[str, list[Algorithm]] = {}
    for made in of_ranks(n, inner=n > 4):
        by_kind.setdefault(made.collective, []).append(made)
    return [[made for made in some if made is not None] for some in zip_longest(*by_kind.values())]


def run_round(ours: blinkmpi.Communicator, some: list[Algorithm], *, few: bool = True) -> None:
    for made in some:
        assert made.name in ours.explain(made.collective, 1 << 20).splitlines()[2]
        run_all(ours, calls(made.collective, ours.size, few=few))


@mpi(ranks=(3,), long=(1, 4, 8), timeout=250)
def test_every_algorithm_of_the_library(comm: MPI.Intracomm) -> None:
    """In C with all types, and with the main ones by NumPy and between nodes."""
    nodes = {4: ("2+2", "1+3"), 8: ("4+4", "3+5")}.get(comm.size)
    for turn, some in enumerate(rounds(comm.size)):
        for executor in ("auto", "numpy"):
            with blinkmpi.Communicator(comm, algorithms=some, executor=executor) as ours:
                run_round(ours, some, few=executor == "numpy")
        if nodes:
            with split(comm, nodes[turn % 2], algorithms=some, executor=("auto", "numpy")[turn // 2 % 2]) as ours:
                run_round(ours, some)


@mpi(ranks=(3,), long=(4,), timeout=200)
def test_algorithms_by_chance(comm: MPI.Intracomm) -> None:
    """All collectives, with values that go round about, and several uses of one on its own rank."""
    n = comm.size
    for seed, executor in enumerate(("auto", "numpy")):
        drawn = [by_chance(collective, n, 2 + seed, seed, at=0) for collective in COLLECTIVES]
        channels = [c for made in drawn for c in made.program(call_of(made.collective, n, 500, root=0)).channels]
        assert any(c.writer in c.readers for c in channels)
        some = [case for collective in COLLECTIVES for case in cases(collective, n, full=False)]
        some = [case for case in some if case.root == 0 and (case.dtype == "int16" or case.collective != "allreduce")]
        with blinkmpi.Communicator(comm, algorithms=drawn, executor=executor) as ours:
            run_all(ours, some)
        with split(comm, {3: "1+2", 4: "2+2"}[n], algorithms=drawn, executor=executor) as ours:
            run_all(ours, some)


@mpi(ranks=(4,), timeout=150)
def test_how_algorithms_are_chosen(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """Each of these checks by itself, in one job."""
    an_algorithm_takes_calls_of_its_sizes(comm)
    communicators_of_fewer_ranks_plan_as_usual(comm)
    a_plan_carries_algorithms(comm, tmp_path)
    what_does_not_fit_is_refused_on_every_rank(comm)


def scheme_of(comm: blinkmpi.Communicator, nbytes: int, collective: str = "allreduce") -> str:
    comm.Barrier()
    return comm.plan(collective).rule(collective, nbytes).scheme


def an_algorithm_takes_calls_of_its_sizes(comm: MPI.Intracomm) -> None:
    middle = lang.algorithm("allreduce", chunks=1, inplace=True, name="middle", min_bytes=1024, max_bytes=4095)
    star = middle(library.one_step.body)(comm.size)
    with blinkmpi.Communicator(comm, algorithms=[star, library.bruck_allgather(comm.size)]) as ours:
        found = [scheme_of(ours, nbytes) for nbytes in (1, 1023, 1024, 4095, 4096, 1 << 30)]
        assert [scheme == "lang:middle" for scheme in found] == [False, False, True, True, False, False]
        assert scheme_of(ours, 1 << 20, "allgather") == "lang:bruck_allgather"
        assert scheme_of(ours, 1 << 20, "broadcast") != "lang:middle"
        run_all(ours, [case for kind in ("allreduce", "allgather", "broadcast") for case in cases(kind, 4, full=False)])
        text = ours.explain("allreduce", 2048)
        assert "runs as     lang:middle: an algorithm of 12 messages of a chunk, 1 after one another" in text
        assert "lang:middle" in ours.explain("allreduce", 1 << 20), "beside what was chosen"
        requests = [ours.Iallreduce(np.ones(400, np.float32), np.empty(400, np.float32)) for _ in range(3)]
        MPI.Request.Waitall(requests)


@mpi(ranks=(4,), timeout=60, env={"BLINKMPI_ALGO": "allreduce:lang:ring;broadcast:^mpi"})
def test_a_variable_names_one_of_the_library(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        assert {scheme_of(ours, nbytes) for nbytes in (1, 1 << 30)} == {"lang:ring"}
        run_all(ours, list(cases("allreduce", comm.size, full=False)))
        half = ours.Split(comm.rank % 2)
        assert isinstance(half, blinkmpi.Communicator)
        assert scheme_of(half, 1 << 20) == "lang:ring"
        run_all(half, list(cases("allreduce", 2, full=False)))
        half.Free()


def communicators_of_fewer_ranks_plan_as_usual(comm: MPI.Intracomm) -> None:
    mine = lang.algorithm("allreduce", chunks=1, inplace=True, name="mine")(library.one_step.body)(4)
    with blinkmpi.Communicator(comm, algorithms=[mine], algo="allreduce:lang:mine") as ours:
        three = ours.Split(comm.rank // 3)
        assert isinstance(three, blinkmpi.Communicator)
        assert not scheme_of(three, 1 << 20).startswith("lang:")
        same = ours.Dup()
        assert scheme_of(same, 1 << 20) == "lang:mine"
        same.Free()
        three.Free()
    with blinkmpi.Communicator(comm, algorithms=[mine], algo="allreduce:chain") as ours:
        assert scheme_of(ours, 1 << 20) == "chain", "who names a scheme means it"
    with blinkmpi.Communicator(comm, algorithms=[mine], algo="allreduce:^mpi") as ours:
        assert scheme_of(ours, 1 << 20) == "lang:mine"


def a_plan_carries_algorithms(comm: MPI.Intracomm, tmp_path: Path) -> None:
    path = comm.bcast(str(tmp_path / "plan.json"))
    machine = "cpu:4"
    with blinkmpi.Communicator(comm, algorithms=[library.all_pairs(4)], topology=machine) as ours:
        ours.plan("allreduce")
        if comm.rank == 0:
            Path(path).write_text(ours.plans.to_json())
        comm.Barrier()
    with blinkmpi.Communicator(comm, plan=path, topology=machine) as again:
        assert scheme_of(again, 1 << 20) == "lang:all_pairs"
        assert Plan.from_json(again.plans.to_json()).algorithms == (library.all_pairs(4),)
        run_all(again, list(cases("allreduce", 4, full=False)))


def what_does_not_fit_is_refused_on_every_rank(comm: MPI.Intracomm) -> None:
    @lang.algorithm(lang.custom(given=lambda n, rank: 1, wanted=lambda n, rank: [[(rank, 0)]]), chunks=1)
    def own(n: int) -> None:
        for r in range(n):
            chunk(r, "input", 0).copy(r, "output", 0)

    for arguments, kind, match in (
        ({"algorithms": [library.ring(3)]}, ArgumentError, "ring is for allreduce of 3 ranks, the job has 4; make it"),
        ({"algorithms": [own(4)]}, ArgumentError, "own is for a collective of its own.* call comm.Custom"),
        ({"algorithms": [library.ring]}, ArgumentError, "pass what a function with @lang.algorithm gives"),
        ({"algorithms": [library.ring(4)] * 2}, ArgumentError, "two are called ring"),
        ({"algo": "allreduce:lang:rign"}, SettingsError, "there is no algorithm 'rign'; .* ring"),
        ({"algo": "allreduce:lang:islands"}, SettingsError, "missing a required argument: 'k'"),
        ({"algo": "broadcast:lang:ring"}, SettingsError, "ring is for allreduce; name one for broadcast"),
        ({"algo": "allreduce:lang:ring,chain"}, SettingsError, "an algorithm stands alone"),
    ):
        with pytest.raises(kind, match=match):
            blinkmpi.Communicator(comm, **arguments)  # type: ignore[arg-type]
    with pytest.raises((MismatchError, RemoteError), match=r"algorithms=(ring|all_pairs)#"):
        blinkmpi.Communicator(comm, algorithms=[library.ring(4) if comm.rank else library.all_pairs(4)])
