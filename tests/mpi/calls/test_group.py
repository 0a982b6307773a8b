"""Groups on CPU ranks: what mpi4py gives call by call, in fewer calls; and what is wrong with them."""
# ruff: noqa: PT012  (what is wrong with a group is raised at the end of its block)

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, MismatchError, PeerLost, RemoteError
from blinkmpi.runtime.grouping.launches import HOST_ALONE
from tests.harness import mpi

LENGTHS = (0, 5, 0, 1, 300, 64, 7)
TYPES = (np.float32, np.int8, np.complex128, np.uint16, np.bool_)
Array = np.ndarray[Any, Any]


def numbers(rank: int, i: int, count: int, dtype: Any) -> Array:
    """What a rank gives to call ``i``; sums of them are exact."""
    return ((np.arange(count) * 7 + 3 * rank + i) % 5).astype(dtype)


def calls(n: int, rank: int, dtype: Any, *, in_place: bool) -> list[tuple[str, list[Any]]]:
    """Calls of all grouped collectives, of several lengths, in turns."""
    op = MPI.LXOR if dtype is np.bool_ else MPI.PROD if dtype is np.complex128 else MPI.SUM
    op = MPI.MAX if dtype in (np.int8, np.uint16) else op  # whose sums are the business of MPI's version
    root, found = n - 1, []
    for i, m in enumerate(LENGTHS):
        one, many = (lambda k, i=i: numbers(rank, i, k, dtype)), np.full(n * m, 1).astype(dtype)  # type: ignore[misc]
        own = many.copy()
        own[rank * m : (rank + 1) * m] = one(m)
        at = rank == root
        vector: tuple[Any, Any] = (MPI.IN_PLACE, one(m)) if in_place else (one(m), np.zeros(m, dtype))
        kept: Any = MPI.IN_PLACE if in_place and at else one(m)
        found += [
            ("Allreduce", [*vector, op]),
            ("Bcast", [one(m), root]),
            ("Reduce", [kept, one(m) if at else None, op, root]),
            ("Allgather", [MPI.IN_PLACE, own] if in_place else [one(m), many.copy()]),
            ("Gather", [kept, own.copy() if at else None, root]),
            ("Scatter", [one(n * m) if at else None, MPI.IN_PLACE if in_place and at else np.zeros(m, dtype), root]),
            ("Alltoall", [one(n * m), many.copy()]),
            ("Reduce_scatter_block", [MPI.IN_PLACE, one(n * m), op] if in_place else [one(n * m), many[:m], op]),
        ]
    return found


def made(comm: Any, some: list[tuple[str, list[Any]]]) -> list[Array]:
    """Make calls; all their arrays afterwards."""
    for name, args in some:
        getattr(comm, name)(*args)
    return [arg for _, args in some for arg in args if isinstance(arg, np.ndarray)]


@mpi(ranks=(1, 2, 3, 4), timeout=90)
def test_a_group_gives_what_mpi4py_gives(comm: MPI.Intracomm) -> None:
    n, rank = comm.size, comm.rank
    settings: list[dict[str, Any]] = [{}, {"executor": "numpy"}, {"algo": "allreduce:mpi;allgather:mpi;broadcast:mpi"}]
    for keys in settings:
        with blinkmpi.Communicator(comm, **keys) as ours:
            for dtype in TYPES if not keys else TYPES[:2]:
                for in_place in (False, True):
                    want = made(comm, calls(n, rank, dtype, in_place=in_place))
                    some = calls(n, rank, dtype, in_place=in_place)
                    before = ours._dispatcher().sequence.seq
                    with ours.grouped():
                        made(ours, some)
                    found = [arg for _, args in some for arg in args if isinstance(arg, np.ndarray)]
                    kinds = dict.fromkeys(name for name, _ in some)
                    for i, (one, other) in enumerate(zip(found, want, strict=True)):
                        if in_place and some_scatter(some, one):  # behind the result MPI leaves what it likes
                            one, other = one[: one.size // n], other[: other.size // n]
                        assert (one == other).all(), (keys, dtype, in_place, i, one, other)
                    if not in_place and dtype is not TYPES[0]:  # planned and bound before
                        assert ours._dispatcher().sequence.seq - before <= len(kinds) + 2 * n, "launches"


def some_scatter(some: list[tuple[str, list[Any]]], array: Array) -> bool:
    """Whether an array is that of a Reduce_scatter_block in place."""
    return any(name == "Reduce_scatter_block" and args[1] is array for name, args in some)


@mpi(ranks=(2, 3))
def test_one_launch(comm: MPI.Intracomm) -> None:
    """Also of odd places in memory, types that MPI lacks, a tensor given twice; and again with other numbers."""
    n, rank = comm.size, comm.rank
    with blinkmpi.Communicator(comm) as ours:
        raw = [np.zeros(4 * m + 1, np.uint8)[1:].view(np.float32) for m in (3, 1000, 17)]
        for salt in range(3):
            for i, one in enumerate(raw):
                one[:] = rank + i + salt
            before = ours._dispatcher().sequence.seq
            with ours.grouped():
                for one in raw:
                    ours.Allreduce(MPI.IN_PLACE, one, "avg")
            for i, one in enumerate(raw):
                assert (one == (n - 1) / 2 + i + salt).all()
            assert salt == 0 or ours._dispatcher().sequence.seq == before + 1
        shared, outs = np.arange(6, dtype=np.float16), [np.zeros(6, np.float16) for _ in range(2)]
        shared.flags.writeable = False
        ours.Allreduce([shared, shared], outs)
        assert all((out == n * shared).all() for out in outs)
        long = np.full(HOST_ALONE // 8 + 5, rank, np.float64)
        short = [np.full(3, rank, np.float64) for _ in range(2)]
        before = ours._dispatcher().sequence.seq
        for _ in range(2):
            for one in (*short, long):
                one[:] = rank
            with ours.grouped(timeout=20):
                ours.Allreduce(MPI.IN_PLACE, short[0])
                ours.Allreduce(MPI.IN_PLACE, long)
                ours.Allreduce(MPI.IN_PLACE, short[1])
            assert all((one == n * (n - 1) / 2).all() for one in (*short, long))
        assert ours._dispatcher().sequence.seq == before + 4, "the long one is a call by itself"
        with ours.grouped():
            pass
        with ours.grouped():  # nothing to move
            ours.Allreduce(MPI.IN_PLACE, np.zeros(0))
            ours.Allreduce(MPI.IN_PLACE, np.zeros(0))


@mpi(ranks=(2,))
def test_what_is_not_packed_keeps_its_order(comm: MPI.Intracomm) -> None:
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm) as ours:
        one, other, sums, moved = np.full(4, rank), np.full(2, rank), np.zeros(4, int), np.full(4, rank)
        all_of = np.zeros(4 * n, int)
        with ours.grouped():
            ours.Allreduce(one, sums)
            ours.Allgatherv(sums, all_of)  # behind the first, whose result it sends
            ours.Barrier()
            ours.Scan(MPI.IN_PLACE, other)
            with ours.grouped():
                ours.Bcast(moved, 0)
            assert not sums.any(), "nothing is made before the outermost group ends"
        assert (all_of == 1).all()
        assert (other == rank).all()
        assert not moved.any()
        buffers = [np.full(3, rank), np.full(5, rank)]
        with ours.grouped():
            ours.Bcast(buffers, root=1)
        assert all((buffer == 1).all() for buffer in buffers)
        ours.Reduce(buffers, [np.zeros(3, int), np.zeros(5, int)] if rank == 0 else None, "max", 0)
        spec = np.full(9, rank)
        ours.Allreduce(MPI.IN_PLACE, [spec, 4])  # mpi4py's specification of a buffer stays one
        assert spec.tolist() == [1] * 4 + [rank] * 5


@mpi(ranks=(2, 3))
def test_a_mistake_is_an_error_on_every_rank_before_anything_is_sent(comm: MPI.Intracomm) -> None:
    rank = comm.rank
    here = rank == 0

    def group_of(ours: blinkmpi.Communicator, *middle: Callable[[], None]) -> tuple[Array, Array]:
        first, last = np.full(10, rank + 1.0), np.full(HOST_ALONE, rank + 1, np.int8)
        with ours.grouped():
            ours.Allreduce(MPI.IN_PLACE, first)
            for call in middle:
                call()
            ours.Allreduce(MPI.IN_PLACE, last, "max")
        return first, last

    with blinkmpi.Communicator(comm) as ours:
        wrong: list[tuple[Callable[[], None], type[BlinkError], str]] = [
            (lambda: ours.Allreduce(np.zeros(3), np.zeros(4)), ArgumentError, r"call 1 of the group, allreduce: .*3 x"),
            (lambda: ours.Bcast(np.zeros(3), 7), ArgumentError, "root=7"),
            (lambda: ours.Allreduce([np.zeros(3)], [np.zeros(3)] * 2), ArgumentError, "lists of 1 and 2 buffers"),
            (lambda: ours.Allreduce(np.zeros(3), [np.zeros(3)]), ArgumentError, "a list beside a buffer"),
            (lambda: ours.Bcast(object()), BufferTypeError, "no buffer that we can read"),
            (lambda: ours.Allreduce(MPI.IN_PLACE, np.zeros(3), timeout=-1), BlinkError, "timeout"),
            (lambda: ours.Allreduce(MPI.IN_PLACE, np.zeros(3), stream=3), ArgumentError, "GPU memory"),
            (lambda: ours.Allreduce(MPI.IN_PLACE, np.zeros(3), MPI.MINLOC), BufferTypeError, "outside of the group"),
        ]
        for call, error, text in wrong:
            with pytest.raises(error if here else RemoteError, match=text):
                group_of(ours, call if here else lambda: ours.Allreduce(MPI.IN_PLACE, np.zeros(3)))
        same = np.arange(6.0)
        for one, other in ((same, same), (same[:4], same[3:])):
            with pytest.raises(ArgumentError if here else RemoteError, match="use the same memory"):
                group_of(
                    ours,
                    lambda one=one: ours.Allreduce(MPI.IN_PLACE, one if here else np.zeros(one.size)),  # type: ignore
                    lambda other=other: ours.Allreduce(MPI.IN_PLACE, other),  # type: ignore[misc]
                )
        assert same.tolist() == list(range(6))
        first, last = group_of(ours)  # the communicator lives on
        assert (first == comm.size * (comm.size + 1) / 2).all()
        assert (last == comm.size).all()


MIDDLES: list[Callable[[Any, bool], Any]] = [
    lambda ours, here: ours.Allreduce(MPI.IN_PLACE, np.zeros(3 + here)),
    lambda ours, here: ours.Allreduce(MPI.IN_PLACE, np.zeros(3, np.float32 if here else np.float64)),
    lambda ours, here: ours.Allreduce(MPI.IN_PLACE, np.zeros(3), "min" if here else "max"),
    lambda ours, here: ours.Bcast(np.zeros(3), int(here)),
    lambda ours, here: ours.Allreduce(MPI.IN_PLACE, np.zeros(3, np.int8)) if here else None,
]


@pytest.mark.parametrize("which", range(len(MIDDLES)))
@mpi(ranks=(2,))
def test_groups_that_differ_are_found_before_the_first_call(comm: MPI.Intracomm, which: int) -> None:
    first = np.full(10, comm.rank + 1, np.int16)
    with blinkmpi.Communicator(comm) as ours:
        with pytest.raises(MismatchError, match="the ranks disagree"), ours.grouped():
            ours.Allreduce(MPI.IN_PLACE, first)
            MIDDLES[which](ours, comm.rank == 0)
            ours.Allreduce(MPI.IN_PLACE, np.zeros(20, np.int16))
        assert (first == comm.rank + 1).all(), "nothing was sent"


@mpi(ranks=(2,), timeout=30)
def test_an_order_that_differs(comm: MPI.Intracomm) -> None:
    """Where the calls of each kind are the same."""
    with blinkmpi.Communicator(comm) as ours:
        kinds = ["h", "b", "h"] if comm.rank else ["h", "h", "b"]
        with pytest.raises(MismatchError, match="calls 0"), ours.grouped():
            for kind in kinds:
                ours.Allreduce(MPI.IN_PLACE, np.zeros(4, kind))


@mpi(ranks=(2,), timeout=30)
def test_a_call_that_only_mpi_can_make_on_one_rank(comm: MPI.Intracomm) -> None:
    numbers = [np.zeros(4), np.zeros(4)]
    with blinkmpi.Communicator(comm) as ours, pytest.raises(BlinkError) as caught:
        ours.Bcast(np.zeros(4))
        if comm.rank:
            ours.Bcast(numbers)
        else:
            ours.Bcast([np.zeros(8), 8, MPI.DOUBLE.Dup()])
            ours.Barrier()
    assert isinstance(caught.value, MismatchError | RemoteError | PeerLost), repr(caught.value)
    assert "group" in str(caught.value), str(caught.value)


@mpi(ranks=(2,))
def test_an_exception_in_the_body_forgets_its_calls(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        one, other = np.ones(3), np.ones(3)
        before = ours._dispatcher().sequence.seq
        with pytest.raises(KeyError), ours.grouped():
            ours.Allreduce(MPI.IN_PLACE, one)
            raise KeyError
        assert ours._dispatcher().sequence.seq == before
        with ours.grouped():
            ours.Allreduce(MPI.IN_PLACE, other)
            with pytest.raises(KeyError), ours.grouped():
                ours.Allreduce(MPI.IN_PLACE, one)
                raise KeyError
        assert (one == 1).all()
        assert (other == comm.size).all()
        ours.Allreduce(MPI.IN_PLACE, one)  # at once
        assert (one == comm.size).all()


@mpi(ranks=(1,))
def test_nesting_threads_and_what_is_not_grouped(comm: MPI.Intracomm) -> None:
    ours = blinkmpi.Communicator(comm)
    outer, inner = ours.grouped(), ours.grouped()
    with pytest.raises(ArgumentError, match="ends in the thread that opened it"):
        inner.__exit__(None, None, None)
    outer.__enter__()
    with pytest.raises(ArgumentError, match="this group is open"):
        outer.__enter__()
    with pytest.raises(ArgumentError, match="only blocking calls are grouped"):
        ours.Iallreduce(MPI.IN_PLACE, np.zeros(3))
    inner.__enter__()
    errors: list[BaseException] = []
    here = np.full(3, 2.0)

    def elsewhere() -> None:
        """Another thread's calls are made at once, and it cannot end this group."""
        try:
            ours.Allreduce(here, there := np.zeros(3))
            assert (there == 2).all()
            with pytest.raises(ArgumentError, match="ends in the thread"):
                inner.__exit__(None, None, None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not errors, errors
    ours.Allreduce(here, out := np.zeros(3))
    with pytest.raises(ArgumentError, match="before the groups around it"):
        outer.__exit__(None, None, None)
    assert not out.any(), "nothing of it was sent"
    ours.Allreduce(here, out)
    assert (out == 2).all(), "no group is open any more"
    group = ours.grouped()
    with pytest.raises(ArgumentError, match="freed"), group:
        ours.Allreduce(here, out)
        ours.Free()
    with pytest.raises(ArgumentError, match="freed"):
        ours.grouped()
