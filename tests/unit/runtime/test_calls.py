"""From arguments to a Call and two views, for each collective and each kind of rank."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError
from blinkmpi.program.call import Call
from blinkmpi.runtime import arguments as calls
from blinkmpi.runtime.buffers import DelegatedOp, DelegatedToMPI

N = 3


def at(view: Any) -> tuple[int, int] | None:
    """Where a view lies."""
    return None if view is None else (view.ctypes.data, view.nbytes)


def never(_: int) -> tuple[int, ...]:
    raise AssertionError("this call needs no exchange")


def x(count: int = 6, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.zeros(count, dtype)


# ---------------------------------------------------------------- what comes out


def test_broadcast() -> None:
    buf = x()
    root, leaf = calls.broadcast(1, N, buf, 1), calls.broadcast(0, N, [buf, 6], np.int64(1))
    assert root.call == leaf.call == Call("broadcast", N, (6,), "float32", "", 1)
    assert (at(root.send), root.recv) == (at(buf), None)
    assert (leaf.send, at(leaf.recv)) == (None, at(buf))


def test_a_root_may_send_what_it_must_not_write() -> None:
    assert calls.broadcast(0, N, b"abc", 0).call.counts == (3,)
    with pytest.raises(ArgumentError, match="read-only"):
        calls.broadcast(1, N, b"abc", 0)


def test_reductions() -> None:
    send, recv = x(), x()
    for op in (MPI.SUM, "sum"):
        got = calls.allreduce(0, N, send, recv, op)
        assert got.call == Call("allreduce", N, (6,), "float32", "sum")
        assert (at(got.send), at(got.recv)) == (at(send), at(recv))
    root, leaf = calls.reduce(2, N, send, recv, MPI.MAX, 2), calls.reduce(0, N, send, None, "max", 2)
    assert root.call == leaf.call == Call("reduce", N, (6,), "float32", "max", 2)
    assert at(root.recv) == at(recv)
    assert leaf.recv is None


@pytest.mark.parametrize("send", [None, MPI.IN_PLACE, "same"])
def test_reductions_in_place(send: Any) -> None:
    recv = x()
    send = recv if send == "same" else send
    for got in (calls.allreduce(0, N, send, recv, "sum"), calls.reduce(1, N, send, recv, "sum", 1)):
        assert at(got.send) == at(got.recv) == at(recv)


def test_gathers() -> None:
    send, recv = x(2), x(6)
    everybody = calls.allgather(1, N, send, recv)
    assert everybody.call == Call("allgather", N, (2,), "float32")
    root, leaf = calls.gather(1, N, send, recv, 1), calls.gather(0, N, send, "ignored", 1)
    assert root.call == leaf.call == Call("gather", N, (2,), "float32", "", 1)
    assert at(root.recv) == at(everybody.recv) == at(recv)
    assert leaf.recv is None
    for got in (calls.allgather(1, N, MPI.IN_PLACE, recv), calls.gather(1, N, None, recv, 1)):
        assert at(got.send) == at(recv[2:4])
    longer = calls.allgather(1, N, [x(9), 2], [x(9), 2])
    assert longer.call == everybody.call
    assert longer.recv is not None
    assert longer.recv.size == 6


def test_scatter() -> None:
    send, recv = x(6), x(2)
    root, leaf = calls.scatter(2, N, send, recv, 2), calls.scatter(0, N, None, recv, 2)
    assert root.call == leaf.call == Call("scatter", N, (2,), "float32", "", 2)
    assert (at(root.send), at(root.recv)) == (at(send), at(recv))
    assert leaf.send is None
    assert at(calls.scatter(2, N, send, MPI.IN_PLACE, 2).recv) == at(send[4:])


def test_reduce_scatter_block() -> None:
    send, recv = x(6), x(2)
    got = calls.reduce_scatter_block(1, N, send, recv, "sum")
    assert got.call == Call("reduce_scatter", N, (2, 2, 2), "float32", "sum")
    assert (at(got.send), at(got.recv)) == (at(send), at(recv))
    vector = np.arange(6.0)
    own = calls.reduce_scatter_block(1, N, MPI.IN_PLACE, vector, "sum")
    assert own.call.counts == (2, 2, 2)
    assert (at(own.send), own.recv, at(own.final)) == (at(vector), None, at(vector[:2]))
    first = calls.reduce_scatter_block(0, N, MPI.IN_PLACE, vector, "sum")  # whose block nobody else reads
    assert (at(first.send), at(first.recv), first.final) == (at(vector), at(vector[:2]), None)


def test_reduce_scatter() -> None:
    send, recv = x(6), x(2)
    got = calls.reduce_scatter(1, N, send, recv, [1, 2, 3], "sum", never)
    assert got.call == Call("reduce_scatter", N, (1, 2, 3), "float32", "sum")
    vector = x(6)
    own = calls.reduce_scatter(1, N, None, vector, (1, 2, 3), "sum", never)
    assert (at(own.send), own.recv, at(own.final)) == (at(vector), None, at(vector[:2]))
    assert own.call == got.call
    told = calls.reduce_scatter(1, N, send, recv, None, "sum", lambda mine: (1, mine, 3))
    assert told.call == got.call


def test_a_result_may_be_received_in_other_memory() -> None:
    vector, memory = np.arange(6.0), np.zeros(100, np.uint8)
    own = calls.reduce_scatter(1, N, None, vector, (1, 3, 2), "sum", never).received_in(memory)
    assert isinstance(own.recv, np.ndarray)
    assert (own.recv.dtype, at(own.recv)) == (np.float64, (memory.ctypes.data, 24))
    assert at(own.final) == at(vector[:3])
    assert vector.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_rank_in_trouble_comes_to_the_exchange_too() -> None:
    said = []

    def exchange(mine: int) -> tuple[int, ...]:
        said.append(mine)
        return (1, mine, 3)

    for recv, kind in ((b"ro", ArgumentError), (object(), BufferTypeError), (np.zeros(2, "g"), DelegatedToMPI)):
        with pytest.raises(kind):
            calls.reduce_scatter(1, N, x(6), recv, None, "sum", exchange)
    assert said == [-1, -1, -1]
    with pytest.raises(DelegatedToMPI, match="another rank"):
        calls.reduce_scatter(1, N, x(6), x(2), None, "sum", lambda mine: (1, mine, -1))


def test_barrier() -> None:
    got = calls.barrier(0, N)
    assert got.call.total == 0
    assert got.send is got.recv is None


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("make", "kind", "text"), [
    (lambda: calls.broadcast(0, N, x(), 3), ValueError, r"root=3: expected a rank, 0 to 2"),
    (lambda: calls.broadcast(0, N, x(), -1), ValueError, "root=-1"),
    (lambda: calls.gather(0, N, x(2), x(6), 1.5), ValueError, r"root=1\.5"),
    (lambda: calls.reduce(0, N, None, x(), "sum", 1), TypeError, "rank 0: MPI.IN_PLACE.* root 1 alone"),
    (lambda: calls.gather(0, N, MPI.IN_PLACE, x(), 1), TypeError, "IN_PLACE"),
    (lambda: calls.scatter(0, N, x(6), None, 1), TypeError, "recvbuf is of type NoneType"),
    (lambda: calls.allreduce(0, N, x(6), x(5), "sum"), ValueError, "6 x float32 against 5 x float32"),
    (lambda: calls.allreduce(0, N, x(), x(6, "int32"), "sum"), ValueError, "float32 against 6 x int32"),
    (lambda: calls.allreduce(0, N, x(), x(), "band"), TypeError, "'band' is not defined for float32"),
    (lambda: calls.allreduce(0, N, x(4, "bool"), x(4, "bool"), "avg"), TypeError, "'avg' is not defined"),
    (lambda: calls.allreduce(0, N, x(), x(), "mean"), ValueError, "op='mean'"),
    (lambda: calls.allgather(0, N, x(2), x(7)), ValueError, "recvbuf has 7 elements, no multiple of 3 ranks"),
    (lambda: calls.allgather(0, N, x(1), x(6)), ValueError, "1 x float32 against 2 x float32"),
    (lambda: calls.scatter(0, N, x(7), x(2), 0), ValueError, "sendbuf has 7 elements"),
    (lambda: calls.scatter(0, N, x(6), x(3), 0), ValueError, "3 x float32 against 2"),
    (lambda: calls.reduce_scatter_block(0, N, x(6), x(3), "sum"), ValueError, r"the blocks \[3, 3, 3\] 9"),
    (lambda: calls.reduce_scatter_block(0, N, None, x(7), "sum"), ValueError, "no multiple of 3"),
    (lambda: calls.reduce_scatter(0, N, x(6), x(1), [1, 2], "sum", never), ValueError, "expected 3 numbers"),
    (lambda: calls.reduce_scatter(0, N, x(6), x(1), [7, 0, -1], "sum", never), ValueError, "at least 0"),
    (lambda: calls.reduce_scatter(0, N, x(6), x(1), 6, "sum", never), TypeError, "expected 3 integers"),
    (lambda: calls.reduce_scatter(0, N, x(6), x(2), [1, 2, 3], "sum", never), ValueError, "2 x float32 against 1"),
    (lambda: calls.reduce_scatter(0, N, None, x(5), [1, 2, 3], "sum", never), ValueError, "has 5 elements"),
    (lambda: calls.reduce_scatter(0, N, None, x(6), None, "sum", lambda m: (m,)), ValueError, "recvcounts is needed"),
])  # fmt: skip
def test_bad_arguments(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        make()
    assert isinstance(caught.value, BlinkError)


@pytest.mark.parametrize("shift", [0, 1])
def test_overlap(shift: int) -> None:
    y = x(12)
    part, rest = y[:6], y[shift : 6 + shift]
    if shift == 0:  # two views of the very same memory are in place
        assert at(calls.allreduce(0, N, part, rest, "sum").send) == at(part)
    else:
        with pytest.raises(ArgumentError, match=r"overlap; use MPI\.IN_PLACE"):
            calls.allreduce(0, N, part, rest, "sum")
    with pytest.raises(ArgumentError, match="overlap"):
        calls.allgather(0, N, y[4:8], y)
    assert at(calls.allgather(1, N, y[4:8], y).send) == at(y[4:8])


def test_an_operation_of_mpi_is_seen_before_anything_else() -> None:
    """All ranks must take the same protocol, whatever their buffers are."""
    for make in (
        lambda: calls.allreduce(0, N, x(1), "nonsense", MPI.MAXLOC),
        lambda: calls.reduce(0, N, None, None, MPI.MINLOC, 9),
        lambda: calls.reduce_scatter_block(0, N, x(1), x(7), MPI.MAXLOC),
        lambda: calls.reduce_scatter(0, N, x(1), x(7), None, MPI.MAXLOC, never),
    ):
        with pytest.raises(DelegatedOp):
            make()


@pytest.mark.parametrize(
    ("dtype", "op", "can"),
    [
        ("float32", "sum", True), ("float32", "avg", False), ("bfloat16", "", False), ("float16", "max", False),
        ("uint8", "sum", False), ("uint8", "", True), ("int64", "bxor", True), ("float32", "max", False),
        ("int16", "sum", False), ("bool", "lor", True),
    ],
)  # fmt: skip
def test_what_mpi_can_do(dtype: str, op: str, can: bool) -> None:
    assert calls.in_mpi(Call("allreduce" if op else "broadcast", N, (4,), dtype, op, -1 if op else 0)) is can
