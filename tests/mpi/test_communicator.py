"""The Communicator as users meet it: an mpi4py communicator in every way, and what it adds."""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, FallbackError, MismatchError, RemoteError
from blinkmpi.topology import machine, modify
from tests.harness import mpi, run_ranks

COLLECTIVES = ("broadcast", "reduce", "allreduce", "gather", "scatter", "allgather", "reduce_scatter")
OURS = ";".join(f"{c}:^mpi" for c in COLLECTIVES)
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
        for word in (
            "64 MiB",
            "bfloat16 sum",
            "runs as",
            "trees",
            "rate",
            "bound",
            "predicted",
            "not chosen",
            "runner",
        ):
            assert word in text, f"{word!r} is missing in\n{text}"
        assert "MPI's own" in ours.explain("allreduce", op=MPI.MAXLOC)
        assert ours.how("allreduce", 1 << 20, op=MPI.MAXLOC)["scheme"] == "mpi"
        how = ours.how("allreduce", 64 << 20)
        assert how["scheme"] in ours.plans.schemes("allreduce")
        assert set(how) == {"scheme", "runner", "protocol", "ctas", "chunk_bytes", "depth", "reason"}
        assert "tree" in ours.plan_line("broadcast", root=1)
        seconds, bound = ours.predict("allreduce", 64 << 20)
        assert seconds is not None
        assert bound is not None
        assert seconds >= bound > 0
        assert ours.machine.n == ours.plans.n == 2
        with pytest.raises(BlinkError, match="unknown"):
            ours.explain("alltoall")


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


# ---------------------------------------------------------------- arguments


@mpi(ranks=(2, 3))
def test_buffers_of_all_kinds(comm: MPI.Intracomm) -> None:
    """What mpi4py takes, and what it lacks (bfloat16, float16, avg, names of operations)."""
    import array
    import ctypes

    rank, n = comm.rank, comm.size
    everybody = np.arange(n)
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        numbers = array.array("d", [rank] * 5)
        ours.Allreduce(MPI.IN_PLACE, numbers)
        assert list(numbers) == [everybody.sum()] * 5
        raw = bytearray(b"abc" if rank == 0 else 3)
        ours.Bcast(memoryview(raw), root=0)
        assert raw == b"abc"
        inside = (ctypes.c_int * 3)(rank, rank, rank)
        ours.Allreduce(sendbuf=None, recvbuf=inside, op=MPI.MAX)
        assert list(inside) == [n - 1] * 3
        zero_d = np.array(float(rank))
        ours.Allreduce(zero_d, zero_d)  # the same object on both sides is in place
        assert zero_d == everybody.sum()
        fortran = np.asfortranarray(np.full((3, 4), rank))
        ours.Allreduce(MPI.IN_PLACE, fortran, op="prod")
        assert (fortran == everybody.prod()).all()

        long = np.full(100, rank, np.float32)
        ours.Allreduce(MPI.IN_PLACE, [long, 7, MPI.FLOAT])
        ours.Allreduce(MPI.IN_PLACE, (long, (3, 10)))
        ours.Bcast([long, 5, 20, "f"], root=n - 1)
        want = np.full(100, float(rank))
        want[:7] = want[10:13] = everybody.sum()
        want[20:25] = n - 1
        assert (long == want).all()
        blocks = np.full(2 * n + 1, -1)
        ours.Allgather([np.full(9, rank), 2], [blocks, 2])  # counts are of one block
        assert blocks.tolist() == [*np.repeat(everybody, 2), -1]
        ours.Gather(sendbuf=(np.full(2, rank), MPI.INT64_T), recvbuf=blocks[:-1] if rank == 1 else None, root=1)
        mine = np.zeros(2, np.int64)
        ours.Scatter(sendbuf=[blocks, 2] if rank == 0 else None, recvbuf=mine, root=0)
        assert (mine == rank).all()
        part = np.zeros(rank, np.int64)
        ours.Reduce_scatter(np.arange(n * (n - 1) // 2), part)  # blocks as long as the receive buffers
        start = rank * (rank - 1) // 2
        assert part.tolist() == (n * np.arange(start, start + rank)).tolist()

        halves = np.full(33, 0.5 + rank, np.float16)
        ours.Allreduce(MPI.IN_PLACE, halves, "avg")
        assert (halves == 0.5 + everybody.mean()).all()
        brain = np.full(33, 0.5 + rank, ml_dtypes.bfloat16)
        ours.Iallreduce(MPI.IN_PLACE, brain).Wait()
        assert (brain.astype(float) == (0.5 + everybody).sum()).all()
        ours.Bcast([brain, MPI.BYTE])
        ours.Allreduce(MPI.IN_PLACE, np.zeros(0))
        ours.Bcast(np.zeros(0, np.int8))
    with blinkmpi.Communicator(comm) as small:  # by default, tiny vectors may be MPI's; not what it cannot do
        for dtype, op in ((ml_dtypes.bfloat16, "sum"), (np.float16, MPI.MAX), (np.float32, "avg"), (np.uint8, "sum")):
            one = np.ones(3, dtype)
            small.Allreduce(MPI.IN_PLACE, one, op)
            assert (one.astype(float) == (n if op == "sum" else 1)).all(), (dtype, op)


class Tensor:
    """What exports DLPack alone, as tensors of other libraries do."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class OnGpu:
    """What looks like a GPU array."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}  # noqa: RUF012


@mpi(ranks=(2,))
def test_tensors(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        tensor = Tensor(np.full(50, comm.rank, np.float32))
        ours.Allreduce(MPI.IN_PLACE, tensor)
        assert (tensor.array == 1).all()
        for call in (ours.Allreduce, ours.Iallreduce):
            with pytest.raises(BufferTypeError, match=r"GPU memory.*; pass NumPy copies"):
                call(MPI.IN_PLACE, OnGpu())
        ours.Barrier()


@mpi(ranks=(2,))
def test_torch(comm: MPI.Intracomm) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with blinkmpi.Communicator(comm) as ours:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = torch.full((70,), comm.rank + 1, dtype=dtype)
            ours.Allreduce(MPI.IN_PLACE, tensor)
            assert (tensor == 3).all()
        weight = torch.nn.Parameter(torch.full((4, 4), float(comm.rank)))
        ours.Bcast(weight, root=1)
        assert (weight == 1).all()


@mpi(ranks=(3,))
def test_what_is_mpis_alone_goes_to_mpi(comm: MPI.Intracomm) -> None:
    """User operations, locations, derived datatypes; also when the arguments of one rank alone are of that kind."""
    rank = comm.rank
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        pair = np.array([(rank, rank)], dtype=np.dtype([("value", "d"), ("where", "i")], align=True))
        best = np.zeros_like(pair)
        ours.Allreduce([pair, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], MPI.MAXLOC)
        assert best["where"] == 2
        twice = MPI.Op.Create(lambda a, b, _: np.copyto(np.frombuffer(b), np.frombuffer(a) + 2 * np.frombuffer(b)))
        x = np.ones(2)
        request = ours.Iallreduce(MPI.IN_PLACE, x, op=twice)
        request.Wait()
        twice.Free()
        assert (x > 3).all()
        every_other = MPI.INT64_T.Create_vector(4, 1, 2).Commit()
        for root in range(3):
            for start in (ours.Bcast, ours.Ibcast):
                strided = np.full(8, rank)
                kind = every_other.Dup()
                request = start([strided, 1, kind] if rank == root else strided[:4], root)
                kind.Free()
                if request is not None:
                    request.Wait()
                assert (strided[: 8 if rank == root else 4] == root).all()
        every_other.Free()
        # calls of the user's own on the same communicator meanwhile do not get in the way
        requests = [ours.Iallreduce(MPI.IN_PLACE, np.ones(4, np.longdouble)) for _ in range(3)]
        assert ours.allgather(rank) == [0, 1, 2]
        MPI.Request.Waitall(requests)
    with blinkmpi.Communicator(comm, strict=True) as strict:
        with pytest.raises(FallbackError, match=r"strict=True: allreduce: MPI's own.*element type"):
            strict.Allreduce(MPI.IN_PLACE, np.ones(4, np.longdouble))
        strict.Barrier()


@mpi(ranks=(2,))
def test_bad_arguments_are_errors_on_every_rank(comm: MPI.Intracomm) -> None:
    rank = comm.rank
    good, half = np.zeros(8), np.zeros(4)
    read_only = np.zeros(8)
    read_only.flags.writeable = False
    with blinkmpi.Communicator(comm) as ours:
        bad: list[tuple[str, type[Exception], tuple[Any, ...], dict[str, Any]]] = [
            ("Allreduce", ValueError, (good, half), {}),
            ("Allreduce", ValueError, (good, np.zeros(8, np.int64)), {}),
            ("Allreduce", ValueError, (good, read_only), {}),
            ("Allreduce", ValueError, (good[:6], good[2:]), {}),
            ("Allreduce", TypeError, (good, [1, 2, 3]), {}),
            ("Allreduce", TypeError, (good, np.array([None])), {}),
            ("Allreduce", TypeError, (good, good.astype(">f8")), {}),
            ("Allreduce", TypeError, (good, good, MPI.LAND), {}),
            ("Allreduce", ValueError, (good, good, "median"), {}),
            ("Allreduce", ValueError, ([good, 9], good), {}),
            ("Allreduce", ValueError, (np.zeros((4, 4))[:, ::2], good), {}),
            ("Bcast", ValueError, (good,), {"root": 2}),
            ("Bcast", TypeError, (None,), {}),
            ("Reduce", TypeError, (MPI.IN_PLACE, good), {"root": 1 - rank}),
            ("Allgather", ValueError, (half, np.zeros(7)), {}),
            ("Reduce_scatter", ValueError, (good, half, [4, 4, 4]), {}),
            ("Reduce_scatter", ValueError, (good, half, [4, 3]), {}),
            ("Reduce_scatter", TypeError, (good, half, ["a", "b"]), {}),
            ("Reduce_scatter", ValueError, (MPI.IN_PLACE, good), {}),
        ]
        for name, kind, args, keywords in bad:
            with pytest.raises(kind) as caught:
                getattr(ours, name)(*args, **keywords)
            assert isinstance(caught.value, BlinkError), (name, args)
        for name, kind, args, keywords in bad:  # on one rank alone: the other is told, and neither waits
            fine = (good,) if name == "Bcast" else (good, np.zeros(16 if name == "Allgather" else 8))
            if name == "Reduce_scatter":
                fine = (good, half, [4, 4]) if len(args) == 3 else (good, half)
            wrong = rank == len(args) % 2
            with pytest.raises(BlinkError) as caught:
                getattr(ours, name)(*(args if wrong else fine), **(keywords if wrong else {}))
            assert isinstance(caught.value, kind if wrong else (RemoteError, MismatchError)), (name, args)
        if rank == 0:  # as MPI does, a non-blocking call raises at once for its own arguments; the peer's Wait tells
            with pytest.raises(ValueError):
                ours.Iallreduce(good, half)
        else:
            with pytest.raises(RemoteError, match="rank 0 failed: ArgumentError: send and receive buffers differ"):
                ours.Iallreduce(good, good).Wait()
        ours.Allreduce(MPI.IN_PLACE, good, timeout=5)  # it lives


# ---------------------------------------------------------------- non-blocking calls


@mpi(ranks=(1, 3))
def test_requests(comm: MPI.Intracomm) -> None:
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        x = np.zeros(1000, np.int64)
        request = ours.Iallreduce(np.full(1000, rank), x)
        assert isinstance(request, MPI.Request)
        assert request.Wait() is True
        assert request == MPI.REQUEST_NULL
        assert (x == n * (n - 1) // 2).all()
        request = ours.Ibarrier()
        while not request.Test():
            pass
        assert ours.Ibarrier().wait() is None
        request = ours.Ibarrier()
        while not (answer := request.test())[0]:
            pass
        assert answer == (True, None)

        token = np.zeros(1, np.int64)
        mixed = [
            ours.Ibcast(x),
            comm.Isend(np.array([rank]), (rank + 1) % n),
            comm.Irecv(token, (rank - 1) % n),
            ours.Iallreduce(MPI.IN_PLACE, x),
        ]
        MPI.Request.Waitall(mixed)
        assert token == (rank - 1) % n
        assert (x == n * (n * (n - 1) // 2)).all()
        some = [ours.Ibarrier(), comm.Ibarrier(), ours.Ibarrier()]
        assert sorted(MPI.Request.Waitany(some) for _ in some) == [0, 1, 2]
        rest = [ours.Ibarrier(), comm.Ibarrier()]
        while not MPI.Request.Testall(rest):
            time.sleep(0)
        ours.Ibarrier().Free()  # MPI lets a user give a request up


@mpi(ranks=(2, 4))
def test_many_outstanding(comm: MPI.Intracomm) -> None:
    """They run in their order, and a blocking call behind them."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        sizes = [(37 * i * i) % 50021 for i in range(50)]
        data = [np.full(size, rank + i, np.float64) for i, size in enumerate(sizes)]
        requests = [ours.Iallreduce(MPI.IN_PLACE, x) for x in data]
        last = np.zeros(1)
        ours.Allreduce(np.ones(1), last)
        assert all(r.Test() for r in requests), "the blocking call overtook"
        assert last == n
        for i, x in enumerate(data):
            assert (x == n * i + n * (n - 1) // 2).all(), i
        x = np.full(20000, float(rank))
        chain = [ours.Ibcast(x, 1), ours.Iallreduce(MPI.IN_PLACE, x), ours.Ireduce(MPI.IN_PLACE if rank == 0 else x, x)]
        MPI.Request.Waitall(chain)
        assert (x == (n * n if rank == 0 else n)).all()


@mpi(ranks=(2,))
def test_buffers_live_as_long_as_their_call(comm: MPI.Intracomm) -> None:
    """They are kept while it is under way, and given up by the time that Wait returns: ours, and what MPI does."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        if ours.how("allreduce", 1 << 20)["runner"] != "c":
            pytest.skip("no C compiler: the steps in NumPy keep their last buffers")
        for dtype in (np.float64, np.longdouble):
            send, recv = np.full(1 << 18, comm.rank + 1, dtype), np.zeros(1 << 18, dtype)
            watch = weakref.ref(send)
            gc.disable()
            if comm.rank == 0:
                time.sleep(0.2)  # the call of rank 1 is under way meanwhile
            request = ours.Iallreduce(send, recv)
            del send
            request.Wait()
            assert (recv == 3).all()
            assert watch() is None, f"a finished call keeps its buffers ({np.dtype(dtype)})"
            gc.enable()


@mpi(ranks=(2,))
def test_errors_come_out_of_wait(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        x = np.zeros(4 + comm.rank)
        request = ours.Iallreduce(MPI.IN_PLACE, x)
        with pytest.raises(MismatchError, match=r"rank 0: allreduce\(4 x.*rank 1: allreduce\(5 x"):
            request.Wait()
        assert request.Wait()  # it is over
        several = [ours.Iallreduce(MPI.IN_PLACE, x), comm.Ibarrier()]
        with pytest.raises(MPI.Exception):
            MPI.Request.Waitall(several)
        ours.Barrier()


@mpi(ranks=(2,))
def test_computation_goes_on_during_a_call(comm: MPI.Intracomm) -> None:
    """The progress thread does the call while this one computes: nobody waits, and it is done."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        if ours.how("allreduce", 1 << 25)["runner"] != "c":
            pytest.skip("no C compiler: NumPy's steps take the interpreter's lock")
        x = np.ones(1 << 22)
        ours.Barrier()
        request = ours.Iallreduce(MPI.IN_PLACE, x)
        end, total = time.monotonic() + 20, 0.0
        while not request.Test() and time.monotonic() < end:
            total += float(np.arange(1000.0).sum())
        assert total > 0
        request.Wait()
        assert (x == 2).all()


# ---------------------------------------------------------------- order of summation


@mpi(ranks=(4,))
def test_deterministic_sums_have_one_order(comm: MPI.Intracomm) -> None:
    """The same bits at every size, whole or in pieces, every time: the fold in the order of the ranks."""
    rng = np.random.default_rng(comm.rank)
    x = (rng.standard_normal(200_000) * 10.0 ** rng.integers(-8, 8, 200_000)).astype(np.float32)
    parts = comm.allgather(x)
    with blinkmpi.Communicator(comm, deterministic=True) as ours:
        assert all(rule.scheme != "mpi" for rule in ours.plans.rules)
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
