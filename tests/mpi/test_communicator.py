"""The Communicator as users meet it: an mpi4py communicator in every way, and what it adds."""

import gc
import inspect
import os
import weakref
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, PeerLost
from blinkmpi.guarded import GuardedIntracomm
from blinkmpi.runtime.inspection import choice, predict
from blinkmpi.topology import machine, modify
from tests.harness import mpi, run_ranks
from tests.mpi.test_conformance import OURS

CALLS = (
    "Bcast", "Reduce", "Allreduce", "Gather", "Scatter", "Allgather", "Reduce_scatter_block", "Reduce_scatter",
    "Barrier",
)  # fmt: skip


def ranks_of(comm: MPI.Comm, parent: MPI.Comm) -> list[int]:
    """The ranks in ``parent`` of the members of ``comm``, in their order."""
    return [int(r) for r in comm.Get_group().Translate_ranks(None, parent.Get_group())]


# ---------------------------------------------------------------- the class


def test_signatures_are_mpi4pys_and_timeout_and_stream() -> None:
    for name in (*CALLS, *(f"I{name.lower()}" for name in CALLS)):
        theirs = inspect.signature(getattr(MPI.Intracomm, name)).parameters
        ours = dict(inspect.signature(getattr(blinkmpi.Communicator, name)).parameters)
        for extra in ("timeout",) if "barrier" in name.lower() else ("timeout", "stream"):
            added = ours.pop(extra)
            assert (added.kind, added.default) == (inspect.Parameter.KEYWORD_ONLY, None), name
        assert list(ours) == list(theirs), name
        for key, parameter in ours.items():
            assert (parameter.default, parameter.kind) == (theirs[key].default, theirs[key].kind), f"{name}({key})"


@pytest.mark.parametrize(
    "name", ["Dup", "Dup_with_info", "Idup", "Clone", "Split", "Split_type", "Create", "Create_group", "Free", "free"]
)
def test_signatures_of_what_makes_communicators_are_mpi4pys(name: str) -> None:
    theirs = inspect.signature(getattr(MPI.Intracomm, name)).parameters
    ours = inspect.signature(getattr(blinkmpi.Communicator, name)).parameters
    assert {k: p.default for k, p in ours.items()} == {k: p.default for k, p in theirs.items()}


@mpi(ranks=(1, 2, 4))
def test_family(comm: MPI.Intracomm) -> None:
    """Everything that makes a communicator makes one of ours, which works; COMM_NULL stays mpi4py's."""
    rank, n = comm.rank, comm.size

    def works(child: Any, members: list[int]) -> None:
        assert isinstance(child, blinkmpi.Communicator)
        assert ranks_of(child, comm) == members
        assert child.machine.n == child.plans.n == len(members)
        got = np.zeros(1000, np.int64)
        child.Allreduce(np.full(1000, rank), got)
        assert (got == sum(members)).all()
        child.Free()
        assert child == MPI.COMM_NULL
        with pytest.raises(ArgumentError, match="freed; make one with"):
            child.Allreduce(got, got)
        child.Free()
        child.free()

    everybody = list(range(n))
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        assert isinstance(ours, MPI.Intracomm)
        assert (ours.rank, ours.size) == (rank, n)
        assert MPI.Comm.Compare(ours, comm) == MPI.CONGRUENT
        works(ours.Dup(), everybody)
        works(ours.Dup(MPI.INFO_NULL), everybody)
        works(ours.Dup_with_info(MPI.INFO_NULL), everybody)
        works(ours.Clone(), everybody)
        child, request = ours.Idup()
        request.Wait()
        works(child, everybody)
        works(ours.Split(color=rank % 2, key=-rank), [r for r in reversed(everybody) if r % 2 == rank % 2])
        works(ours.Split_type(MPI.COMM_TYPE_SHARED), everybody)
        works(blinkmpi.Communicator(ours), everybody)
        null = ours.Split(MPI.UNDEFINED if rank == 0 else 1)
        if rank == 0:
            assert null is MPI.COMM_NULL or (null == MPI.COMM_NULL and type(null) is MPI.Intracomm)
        else:
            works(null, everybody[1:])
        first = ours.Get_group().Incl([0])
        created = ours.Create(first)
        assert (created == MPI.COMM_NULL) == (rank > 0)
        if rank == 0:
            works(created, [0])
            works(ours.Create_group(first, tag=3), [0])
        ours.Barrier()
    assert ours == MPI.COMM_NULL
    comm.Barrier()  # the user's own communicator is as it was


@mpi(ranks=(1,))
def test_what_mpi_may_still_work_on_outlives_a_dead_communicator(comm: MPI.Intracomm) -> None:
    """Messages between nodes may be under way from and to what its calls had."""
    ours = blinkmpi.Communicator(comm)
    x = np.ones(10)
    ours.Allreduce(MPI.IN_PLACE, x)
    dispatcher = ours._dispatcher()
    parts = [weakref.ref(part) for part in (dispatcher.binder, dispatcher.context.host)]
    for _ in range(2):
        dispatcher.sequence.die(PeerLost("a peer is gone"))
    del dispatcher, ours
    gc.collect()
    assert all(part() is not None for part in parts)


@mpi(ranks=(4,))
def test_child_of_an_emulated_machine_is_its_part(comm: MPI.Intracomm) -> None:
    told = modify(machine("dgx-1v"), gpus="1,4,5,6")
    with blinkmpi.Communicator(comm, topology=told) as ours:
        assert ours.machine.fingerprint == told.fingerprint
        child = ours.Split(comm.rank == 3, key=-comm.rank)
        members = [3] if comm.rank == 3 else [2, 1, 0]
        assert isinstance(child, blinkmpi.Communicator)
        assert child.machine.fingerprint == told.subset(members).fingerprint
        assert [d.bus for d in child.machine.devices] == [told.devices[r].bus for r in members]
        got = np.zeros(5000, np.float32)
        child.Allreduce(np.full(5000, comm.rank, np.float32), got)
        assert (got == sum(members)).all()
        child.Free()


@mpi(ranks=(2,))
def test_construction_and_end(comm: MPI.Intracomm) -> None:
    rank = comm.rank
    with pytest.raises(ArgumentError, match=r"pass MPI\.COMM_WORLD"):
        blinkmpi.Communicator()
    with pytest.raises(ArgumentError, match="expected an intracommunicator"):
        blinkmpi.Communicator(MPI.COMM_NULL)
    with pytest.raises(TypeError):
        blinkmpi.Communicator(comm, OURS)  # type: ignore[call-arg]

    # mpi4py makes such objects without calling __init__: they are plain communicators
    plain = MPI.Intracomm.__new__(blinkmpi.Communicator, comm)
    again, part = plain.Dup(), plain.Split(0, rank)
    assert (type(again), type(part)) == (blinkmpi.Communicator, GuardedIntracomm), "as mpi4py's are of their own type"
    assert again.allreduce(1) == part.allreduce(1) == comm.size
    again.Free()
    part.Free()
    got = np.zeros(2, np.int64)
    plain.Allreduce(np.full(2, rank), got)
    plain.Iallreduce(MPI.IN_PLACE, got, op="max").Wait()
    assert got.tolist() == [1, 1]
    plain.Reduce_scatter(np.full(2, rank), got[:1])
    plain.Barrier()
    copy = plain.Dup()
    copy.Bcast(got)
    copy.Free()
    with pytest.raises(ArgumentError, match="not initialised"):
        plain.explain("allreduce")

    # an error in the block: freed here alone, without waiting for peers
    ours = blinkmpi.Communicator(comm, timeout=2.0)
    with pytest.raises(BlinkError if rank else ZeroDivisionError), ours:
        ours.Allreduce(MPI.IN_PLACE, np.zeros(1 // rank))
    comm.Barrier()
    with pytest.raises(ArgumentError, match="freed"):
        ours.Allreduce(got, got)

    ours = blinkmpi.Communicator(comm, algo=OURS)
    ours.Disconnect()
    assert ours == MPI.COMM_NULL
    with pytest.raises(ArgumentError, match="freed; make one with"):
        ours.Allreduce(got, got)
    ours.free()

    # two at once, used in turn, one inside the other's calls
    one, two = blinkmpi.Communicator(comm, algo=OURS), blinkmpi.Communicator(comm, algo=OURS)
    a, b = np.full(3000, rank), np.full(3000, 10 + rank)
    request = one.Iallreduce(MPI.IN_PLACE, a)
    two.Allreduce(MPI.IN_PLACE, b)
    request.Wait()
    assert (a == 1).all()
    assert (b == 21).all()
    one.Free()
    two.Barrier()
    two.Free()


@mpi(ranks=(2,))
def test_what_it_tells(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        text = ours.explain("all_reduce", 64 << 20, dtype="bfloat16", op=MPI.SUM)
        words = ("64 MiB", "bfloat16 sum", "runs as", "trees", "rate", "bound", "predicted", "not chosen", "executor")
        for word in words:
            assert word in text, f"{word!r} is missing in\n{text}"
        assert "MPI's own" in ours.explain("allreduce", op=MPI.MAXLOC)
        assert choice(ours.context, "allreduce", 1 << 20, op=MPI.MAXLOC)["scheme"] == "mpi"
        how = choice(ours.context, "allreduce", 64 << 20)
        assert how["scheme"] in ours.plan("allreduce").schemes("allreduce")
        assert set(how) == {"scheme", "executor", "protocol", "ctas", "chunk_bytes", "depth", "reason"}
        assert "tree" in ours.plan_line("broadcast", root=1)
        seconds, bound = predict(ours.context, "allreduce", 64 << 20)
        assert seconds is not None
        assert bound is not None
        assert seconds >= bound > 0
        assert ours.machine.n == ours.plans.n == 2
        with pytest.raises(BlinkError, match="unknown"):
            ours.explain("gossip")


def log_lines(comm: MPI.Intracomm) -> None:
    """Make a few calls, some of them of the same shape."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        x = np.ones(1000, np.float32)
        for _ in range(3):
            ours.Allreduce(MPI.IN_PLACE, x)
            ours.Bcast(x)
        ours.Bcast(x[:10])
        for _ in range(2):
            ours.Allreduce(np.zeros(3), np.zeros(3), MPI.Op.Create(lambda a, b, t: None))


@pytest.mark.mpi_skip
def test_debug_says_one_line_for_each_communicator_and_shape() -> None:
    report = run_ranks(2, log_lines, 30, env={"BLINKMPI_DEBUG": "INFO"})
    assert report.problem is None, report.problem
    lines = [line for line in report.job.output.splitlines() if "BLINKMPI INFO" in line]
    assert sum("2 ranks on" in line for line in lines) == 1, report.job.output
    for shape in ("allreduce(1000 x float32, op sum)", "broadcast(1000 x float32, root 0)", "broadcast(10 x float32"):
        assert sum(shape in line for line in lines) == 1, report.job.output
    assert sum("allreduce: MPI's own, because the operation is" in line for line in lines if "1]" not in line) >= 1


# ---------------------------------------------------------------- order of summation


@mpi(ranks=(4,))
def test_deterministic_sums_have_one_order(comm: MPI.Intracomm) -> None:
    """The same bits at every size, whole or in pieces, every time: the fold in the order of the ranks."""
    rng = np.random.default_rng(comm.rank)
    x = (rng.standard_normal(200_000) * 10.0 ** rng.integers(-8, 8, 200_000)).astype(np.float32)
    parts = comm.allgather(x)
    with blinkmpi.Communicator(comm, deterministic=True) as ours:
        assert all(rule.scheme != "mpi" for rule in ours.plan("allreduce").rules)
        whole, again, pieces = np.empty_like(x), np.empty_like(x), np.empty_like(x)
        ours.Allreduce(x, whole)
        ours.Allreduce(x, again)
        assert whole.tobytes() == again.tobytes()
        start = 0
        for length in (1, 2, 3, 100, 1000, 7, 50_000, 200_000):
            ours.Allreduce(x[start : start + length], pieces[start : start + length])
            start += length
        scattered = np.empty(50_000, np.float32)
        ours.Reduce_scatter_block(x, scattered)
    error = np.abs(whole - np.sum(parts, 0, dtype=np.float64)) / np.sum(np.abs(parts), 0, dtype=np.float64)
    assert error.max() <= 3 * np.finfo(np.float32).eps
    assert pieces.tobytes() == whole.tobytes(), f"{(pieces != whole).sum()} elements differ between whole and pieces"
    assert scattered.tobytes() == whole[comm.rank * 50_000 :][:50_000].tobytes()


@mpi(ranks=(2,))
@pytest.mark.parametrize("executor", ["c", "numpy"])
def test_a_freed_communicator_leaves_no_descriptor_though_nobody_collects(comm: MPI.Intracomm, executor: str) -> None:
    """Its memory goes with the last reference: nothing of it refers to itself."""

    def held() -> tuple[int, int]:
        with open("/proc/self/maps", encoding="utf-8") as file:
            return len(os.listdir("/proc/self/fd")), sum("/dev/shm/" in line for line in file)

    x, found = np.ones(50_000), []
    with blinkmpi.Communicator(comm, executor=executor) as ours:
        gc.disable()
        try:
            for _ in range(4):
                for made in (ours.Dup(), ours.Split(0, comm.rank)):
                    made.Allreduce(MPI.IN_PLACE, x)
                    made.Iallreduce(MPI.IN_PLACE, x).Wait()
                    made.Bcast(x, root=1)
                    made.Allreduce([x, MPI.DOUBLE], np.empty_like(x), MPI.MAX)
                    with made.grouped():
                        made.Bcast(x[:10])
                        made.Bcast(x[10:20])
                    made.Free()
                del made
                found.append(held())
        finally:
            gc.enable()
    assert len(set(found[1:])) == 1, found
