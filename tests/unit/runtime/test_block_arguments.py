"""Blocks of different lengths at places of their own: what is read, what is copied, what is refused."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError, BufferTypeError
from blinkmpi.program.call import Call
from blinkmpi.runtime import arguments
from blinkmpi.runtime import block_arguments as calls
from blinkmpi.runtime.arguments import Prepared
from blinkmpi.runtime.buffers import DelegatedToMPI, parse_blocks
from tests.unit.runtime.test_calls import at, x

N = 3


def made(ready: Prepared) -> None:
    """Make the copies before a call."""
    for to, source in ready.before:
        to[:] = source  # type: ignore[index]


@pytest.mark.parametrize(("spec", "counts", "starts"), [
    (lambda a: a, (4, 4, 4), (0, 4, 8)),
    (lambda a: [a, [1, 0, 3]], (1, 0, 3), (0, 1, 1)),
    (lambda a: [a, np.array([1, 0, 3])], (1, 0, 3), (0, 1, 1)),
    (lambda a: [a, 2], (2, 2, 2), (0, 2, 4)),
    (lambda a: [a, (2, 5)], (2, 2, 2), (0, 5, 10)),
    (lambda a: [a, ([1, 0, 3], None)], (1, 0, 3), (0, 1, 1)),
    (lambda a: [a, ([1, 0, 3], [8, 99, 2])], (1, 0, 3), (8, 99, 2)),
    (lambda a: (a, [1, 0, 3], [8, 0, 2], MPI.FLOAT), (1, 0, 3), (8, 0, 2)),
    (lambda a: [a, [1, 0, 3], "f"], (1, 0, 3), (0, 1, 1)),
    (lambda a: [a, MPI.FLOAT], (4, 4, 4), (0, 4, 8)),
    (lambda a: [a, None, None, MPI.FLOAT], (4, 4, 4), (0, 4, 8)),
])  # fmt: skip
def test_specifications_as_in_mpi4py(spec: Any, counts: tuple[int, ...], starts: tuple[int, ...]) -> None:
    got = parse_blocks(spec(x(12)), name="recvbuf", writable=True, n=N)
    assert (got.counts, got.starts) == (counts, starts)


@pytest.mark.parametrize(("spec", "message"), [
    (lambda a: [a, [1, 2]], "there are 2, expected one for each of 3 ranks"),
    (lambda a: [a, [1, -2, 3]], "count of rank 1 -2 is negative"),
    (lambda a: [a, ([1, 2, 3], [0, -1, 3])], "displacement of rank 1 -1 is negative"),
    (lambda a: [a, ([1, 2, 3], [0, 1, 10])], "rank 2, elements 10 to 13, lies outside of an array that has 12"),
    (lambda a: [a, [1, 2, 3.5]], "count of rank 2 3.5 is no integer"),
    (lambda a: [a, "abc", MPI.FLOAT], "count of rank 0 'a' is no integer"),
    (lambda a: a[:10], "10 elements, no multiple of 3 ranks"),
    (lambda a: [a, (1, 2, 3)], "expected a number or"),
    (lambda a: [a, object()], "are no integers"),
])  # fmt: skip
def test_bad_specifications(spec: Any, message: str) -> None:
    with pytest.raises((ArgumentError, BufferTypeError), match=message):
        parse_blocks(spec(x(12)), name="recvbuf", writable=True, n=N)


def test_what_is_mpis_alone() -> None:
    with pytest.raises(DelegatedToMPI):
        parse_blocks([None, [0, 0, 0], MPI.FLOAT], name="recvbuf", writable=True, n=N)
    kind = MPI.FLOAT.Create_vector(2, 1, 2).Commit()
    with pytest.raises(DelegatedToMPI, match="derived"):
        parse_blocks([x(12), [1, 1, 1], kind], name="recvbuf", writable=True, n=N)
    kind.Free()


def test_packed_blocks_are_received_where_they_belong() -> None:
    recv, send = x(12), x(3)
    got = calls.allgatherv(2, N, send, [recv, ([1, 0, 3], [4, 0, 5])])
    assert got.call == Call("allgather", N, (1, 0, 3), "float32")
    assert (at(got.send), at(got.recv), got.before, got.after) == (at(send), at(recv[4:8]), (), ())
    even = calls.allgatherv(1, N, x(4), recv)
    assert even.call == Call("allgather", N, (4,), "float32"), "as an Allgather"
    assert at(calls.allgatherv(2, N, MPI.IN_PLACE, [recv, [1, 0, 3]]).send) == at(recv[1:4])


def test_other_blocks_are_copied_from_memory_of_ours() -> None:
    recv = x(12)
    got = calls.allgatherv(2, N, MPI.IN_PLACE, [recv, ([1, 2, 3], [9, 0, 5])])
    assert at(got.send) == at(recv[5:8])
    assert got.recv is not None
    got.recv[:] = np.arange(1, 7)  # type: ignore[index]
    for to, source in got.after:
        to[:] = source  # type: ignore[index]
    assert recv.tolist() == [2, 3, 0, 0, 0, 4, 5, 6, 0, 1, 0, 0]


def test_a_gather_and_a_scatter_know_their_lengths_when_all_have_told() -> None:
    big, small = np.arange(12, dtype="float32"), x(2)
    root, other = calls.gatherv(0, N, small, [big, [2, 2, 5]], 0), calls.gatherv(1, N, small, "ignored", 0)
    assert root.numbers == other.numbers == (2,)
    assert root.with_numbers(((2,), (2,), (5,))).call == other.with_numbers(((2,), (2,), (5,))).call
    assert root.with_numbers(((2,), (2,), (5,))).call == Call("gather", N, (2, 2, 5), "float32", "", 0)
    with pytest.raises(
        ArgumentError, match=r"Gatherv: rank 1 sends 3 elements, but recvcounts\[1\] of the root 0 is 2"
    ):
        root.with_numbers(((2,), (3,), (5,)))
    root = calls.scatterv(0, N, [big, ([2, 2, 5], [10, 0, 3])], small, 0)
    made(ready := root.with_numbers(((2,), (2,), (5,))))
    assert ready.send is not None
    assert list(ready.send) == [10, 11, 0, 1, 3, 4, 5, 6, 7]  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match=r"Scatterv: rank 2 receives 4 elements, but sendcounts\[2\] .* is 5"):
        root.with_numbers(((2,), (2,), (4,)))
    assert at(calls.scatterv(1, N, [big, [1, 2, 3]], MPI.IN_PLACE, 1).buffers.recv) == at(big[1:3])


def test_an_alltoallv_knows_the_blocks_of_all() -> None:
    send, recv = np.arange(6, dtype="float32"), x(9)
    rank1 = calls.alltoallv(1, N, [send, [1, 2, 3]], [recv, [4, 2, 0]])
    rows = ((0, 4, 0), (1, 2, 3), (5, 0, 5))
    assert rank1.numbers == rows[1]
    assert rank1.with_numbers(rows).call == Call("alltoall", N, (0, 4, 0, 1, 2, 3, 5, 0, 5), "float32")
    with pytest.raises(ArgumentError, match=r"rank 0 sends 5 elements to rank 1, which expects 4"):
        rank1.with_numbers(((0, 5, 0), rows[1], rows[2]))
    with pytest.raises(ArgumentError, match="rank 1: sendbuf has 1 elements for rank 1 itself, recvbuf room for 2"):
        calls.alltoallv(1, N, [send, [1, 1, 3]], [recv, [4, 2, 0]])
    with pytest.raises(ArgumentError, match="differ"):
        calls.alltoallv(1, N, [send.astype("f8"), [1, 2, 3]], [recv, [4, 2, 0]])


def test_alltoalls_in_place_send_from_where_they_receive() -> None:
    vector = np.arange(6, dtype="float32")
    for got in (
        calls.alltoall(0, N, MPI.IN_PLACE, vector),
        calls.alltoallv(0, N, None, vector).with_numbers(((2,) * N,) * N),
    ):
        assert got.call == Call("alltoall", N, (2,), "float32", in_place=True)
        assert at(got.recv) == at(got.send) == at(vector)
        assert not got.before
        assert not got.after


def test_blocks_with_gaps_are_exchanged_in_one_memory_of_ours() -> None:
    vector = np.arange(9, dtype="float32")
    got = calls.alltoallv(0, N, None, [vector, ([2, 2, 2], [0, 3, 6])]).with_numbers(((2,) * N,) * N)
    assert got.call.in_place
    assert at(got.send) == at(got.recv) != at(vector)
    made(got)
    assert np.array_equal(got.send, [0, 1, 3, 4, 6, 7])  # type: ignore[arg-type]
    got.recv[:] = -1  # type: ignore[index]
    for to, source in got.after:
        to[:] = source  # type: ignore[index]
    assert np.array_equal(vector, [-1, -1, 2, -1, -1, 5, -1, -1, 8])


@pytest.mark.parametrize("make", [
    lambda a: calls.allgatherv(0, N, x(2), [a, ([2, 2, 2], [0, 1, 4])]),
    lambda a: calls.gatherv(0, N, x(2), [a, ([2, 2, 2], [0, 1, 4])], 0),
    lambda a: calls.alltoallv(0, N, x(6), [a, ([2, 2, 2], [0, 3, 4])]),
    lambda a: calls.allgatherv(0, N, a[1:3], [a, [2, 2, 2]]),
    lambda a: calls.gatherv(1, N, a[0:2], [a, [2, 2, 2]], 1),
    lambda a: calls.scatterv(0, N, [a, [2, 2, 2]], a[1:3], 0),
    lambda a: calls.alltoall(0, N, a[:6], a[3:9]),
    lambda a: calls.alltoallv(0, N, a[:6], a[3:9]),
    lambda a: arguments.scan(0, N, a[:6], a[3:9], "sum"),
    lambda a: arguments.exscan(1, N, a[:6], a[3:9], "sum"),
])  # fmt: skip
def test_overlaps_are_refused(make: Any) -> None:
    with pytest.raises(ArgumentError, match="overlap"):
        make(x(12))


def test_what_lies_in_the_gaps_may_be_used() -> None:
    both = x(12)
    got = calls.allgatherv(0, N, both[2:4], [both, ([2, 2, 2], [0, 4, 8])])
    assert at(got.send) == at(both[2:4])
    sends = [both, ([1, 1, 1], [1, 5, 9])]
    assert calls.alltoallv(0, N, sends, [both, ([1, 1, 1], [0, 4, 8])]).numbers == (1, 1, 1)
    assert calls.alltoallv(0, N, [x(3), ([1, 1, 1], [0, 0, 0])], x(3)).numbers == (1, 1, 1), "sends may overlap"


def test_scans() -> None:
    send, recv = x(), x()
    got = arguments.scan(1, N, send, recv, MPI.SUM)
    assert got.call == Call("scan", N, (6,), "float32", "sum")
    assert (at(got.send), at(got.recv)) == (at(send), at(recv))
    for first in (arguments.exscan(0, N, send, recv, "sum"), arguments.exscan(0, N, send, None, "sum")):
        assert (first.call, at(first.send), first.recv) == (Call("exscan", N, (6,), "float32", "sum"), at(send), None)
    assert at(arguments.exscan(0, N, MPI.IN_PLACE, recv, "sum").send) == at(recv)
    later = arguments.exscan(1, N, None, recv, "sum")
    assert at(later.recv) == at(recv) != at(later.send)
    assert len(later.before) == 1
    for scan in (arguments.scan, arguments.exscan):
        with pytest.raises(ArgumentError, match="avg"):
            scan(1, N, send, recv, "avg")
