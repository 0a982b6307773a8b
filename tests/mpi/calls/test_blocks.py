"""Calls of blocks on ranks: as mpi4py's own, whatever the lengths and places; what two ranks differ in, all hear of."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import permutations
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, CollectiveTimeout, MismatchError, RemoteError
from blinkmpi.transport.host.block_call import BlockCall
from blinkmpi.transport.host.block_memory import READ_FROM_OF_ALL, SHORT_BYTES
from tests.harness import mpi
from tests.mpi.test_observed import events_of, traced

Array = np.ndarray[Any, Any]
TYPES = ("f8", "i4", "u1", "c16")
ANNOUNCED = 1  # a phase of executor.c
IN_CHUNKS, LONG = 3 * SHORT_BYTES[1], 2 * READ_FROM_OF_ALL[1]  # bytes of blocks; of 3 ranks, all read others' long ones


def places(counts: Sequence[int], random: Random) -> list[int]:
    """Where blocks begin, in some order, with gaps or without."""
    order, found, at = random.sample(range(len(counts)), len(counts)), [0] * len(counts), 0
    for r in order:
        at += random.choice([0, 0, 1, 17])
        found[r] = at
        at += counts[r]
    return found


def drawn(rank: int, n: int, random: Random) -> tuple[str, tuple[Any, ...], Array]:
    """A call, the same on all ranks: its method and arguments, and the array that it writes."""
    kind, root = random.choice(["Alltoallv", "Allgatherv", "Gatherv", "Scatterv"]), random.randrange(n)
    dtype, most = random.choice(TYPES), random.choice([1, 10, 1000, 20_000, 300_000])
    inside = random.random() < 0.3
    lengths = [[random.choice([0, 1, random.randrange(most + 1)]) for _ in range(n)] for _ in range(n)]
    if inside and kind == "Alltoallv":
        lengths = [[lengths[min(r, s)][max(r, s)] for s in range(n)] for r in range(n)]
    own = [Random(random.random()) for _ in range(n)][rank]  # what ranks need not have alike
    counts = {"Allgatherv": [row[0] for row in lengths], "Gatherv": [row[root] for row in lengths],
              "Scatterv": lengths[root], "Alltoallv": [row[rank] for row in lengths]}[kind]  # fmt: skip
    at = places(counts, own)
    whole = max((a + c for a, c in zip(at, counts, strict=True)), default=0) + 3
    data = np.arange(whole + sum(lengths[rank]) + max(counts)) % 97 + 100 * rank
    big: Array = (data % 251)[:whole].astype(dtype)
    small: Array = (data % 251)[whole : whole + counts[rank]].astype(dtype)
    spread = [big, (counts, at)]
    if kind == "Alltoallv":
        starts = places(lengths[rank], own)
        send = np.arange(max(a + c for a, c in zip(starts, lengths[rank], strict=True)) + 1).astype(dtype)
        return kind, (MPI.IN_PLACE if inside else [send, (lengths[rank], starts)], spread), big
    if kind == "Allgatherv":
        return kind, (MPI.IN_PLACE if inside else small, spread), big
    if kind == "Gatherv":
        return kind, ((MPI.IN_PLACE if inside else small, spread) if rank == root else (small, None)) + (root,), big
    source = spread if rank == root else None
    return kind, (source, MPI.IN_PLACE if inside and rank == root else small, root), small


@pytest.mark.parametrize("disabled", ["0", "1"])
@mpi(ranks=(2, 3), long=(4,), timeout=120)
def test_they_are_as_mpi4pys_own(comm: MPI.Intracomm, disabled: str) -> None:
    """Blocking or not; by cma and without it."""
    with mock.patch.dict(os.environ, BLINKMPI_CMA_DISABLE=disabled), blinkmpi.Communicator(comm, timeout=60) as ours:
        for seed in range(120):
            found = []
            for of in (comm, ours):
                name, args, written = drawn(comm.rank, comm.size, Random(seed))
                if of is ours and seed % 3 == 0:
                    getattr(of, f"I{name.lower()}")(*args).Wait()
                else:
                    getattr(of, name)(*args)
                found.append(written)
            assert found[0].tobytes() == found[1].tobytes(), (seed, name)
        stats = ours.stats()
        assert {p.protocol for p in stats.protocols} == ({"slots"} if disabled == "1" else {"slots", "cma"})
        assert {t.scheme for t in stats.trees} == {"blocks"}


@pytest.mark.parametrize("count", [3, IN_CHUNKS, LONG])
@mpi(ranks=(2, 3), timeout=60)
def test_the_lengths_of_each_pair_are_compared(comm: MPI.Intracomm, count: int) -> None:
    """The receiver is told who sends what, the others that it has failed; nobody has received anything."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        send, recv = np.full(n * count + 1, rank, np.uint8), np.full(n * count + 1, 99, np.uint8)
        for source, target in permutations(range(n), 2):
            sends = [count + (rank == source and r == target) for r in range(n)]
            text = f"rank {source} sends {count + 1} elements to rank {target}, which expects {count}"
            for method in (ours.Alltoallv, lambda *a: ours.Ialltoallv(*a).Wait()):
                before = ours._dispatcher().sequence.seq
                with pytest.raises(ArgumentError if rank == target else RemoteError, match=text):
                    method([send, sends], [recv, [count] * n])
                assert (recv == 99).all()
                assert ours._dispatcher().sequence.seq == before + 3, "the call, the lengths, the refusal"
        for root, other in permutations(range(n), 2):
            more = count + (rank == other)
            whole = [recv, [count] * n] if rank == root else None
            with pytest.raises(ArgumentError if rank == root else RemoteError, match=f"rank {other} sends {count + 1}"):
                ours.Gatherv(send[:more], whole, root)
            source_of_all = [send, [count] * n] if rank == root else None
            text = f"rank {other} receives {count + 1}"
            with pytest.raises(ArgumentError if rank == root else RemoteError, match=text):
                ours.Scatterv(source_of_all, recv[:more], root)
            counts = [count + (rank == other and r == other) for r in range(n)]
            text = rf"rank {other} sends {count + 1} elements, but recvcounts\[{other}\] of rank"
            with pytest.raises(RemoteError if rank == other else ArgumentError, match=text):
                ours.Allgatherv(send[: counts[rank]], [recv, counts])
            assert (recv == 99).all()
        ours.Alltoallv([send, [count] * n], [recv, [count] * n])
        assert (recv[:-1].reshape(n, count) == np.arange(n)[:, None]).all()


@mpi(ranks=(2, 3), timeout=60)
def test_a_call_that_is_known_compares_lengths_too(comm: MPI.Intracomm) -> None:
    """It is found by its arrays; what the others send is theirs to change."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        send, recv = np.full(12 * n, rank, "i4"), np.zeros(12 * n, "i4")
        longer = [13, *[12] * (n - 1)]
        for _ in range(4):
            ours.Alltoallv(send, recv)
        assert len(ours._dispatcher().repeated) == 1, "C has it"
        with pytest.raises(ArgumentError if rank == 0 else RemoteError, match="rank 1 sends 13 elements to rank 0"):
            ours.Alltoallv([np.zeros(12 * n + 1, "i4"), longer] if rank == 1 else send, recv)
        recv[:] = 0
        ours.Alltoallv(send, recv)
        assert (recv.reshape(n, 12) == np.arange(n)[:, None]).all()


@mpi(ranks=(2, 3), timeout=60)
def test_c_makes_a_known_call_on_other_buffers(comm: MPI.Intracomm) -> None:
    """Of whatever lengths and places, in lists or arrays; Python sees the first of each method, and of long blocks."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        dispatcher, through_python = ours._dispatcher(), []
        before = dispatcher.call
        dispatcher.call = lambda *a: through_python.append(a[0].name) or before(*a)  # type: ignore[method-assign, func-returns-value]
        for count in (5, IN_CHUNKS, LONG):
            each, at = [count] * n, [r * (count + 1) for r in range(n)]
            for i in range(4):
                send, recv = np.full(n * count, 10 * i + rank, "u1"), np.zeros(n * (count + 1), "u1")
                ours.Alltoallv([send, each], [recv, np.array(each), at, MPI.BYTE])
                assert (recv.reshape(n, count + 1)[:, :-1] == 10 * i + np.arange(n)[:, None]).all()
                recv[:] = 0
                ours.Allgatherv(send[:count], [recv, each, at, MPI.BYTE])
                assert (recv.reshape(n, count + 1)[:, :-1] == 10 * i + np.arange(n)[:, None]).all()
                recv[:] = 0
                ours.Gatherv(send[:count], [recv, each, at, MPI.BYTE] if rank == 0 else None, 0)
                assert rank or (recv.reshape(n, count + 1)[:, :-1] == 10 * i + np.arange(n)[:, None]).all()
                ours.Scatterv([recv, each, at, MPI.BYTE] if rank == 0 else None, send[:count], 0)
                assert (send[:count] == 10 * i + rank).all()
        assert through_python == ["alltoallv", "allgather", "gatherv", "scatterv"] * 2


@mpi(ranks=(2,), timeout=60)
def test_types_and_roots_are_compared(comm: MPI.Intracomm) -> None:
    """Though the bytes are as many."""
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        a = np.zeros(4, "f4" if comm.rank else "i4")
        with pytest.raises(MismatchError, match=r"alltoallv\(int32\).*alltoallv\(float32\)"):
            ours.Alltoallv([a, [2, 2]], [a.copy(), [2, 2]])
        with pytest.raises(MismatchError, match="root 1"):
            ours.Gatherv(a[:2].astype("f8"), [np.zeros(4), [2, 2]], comm.rank)
        with pytest.raises(MismatchError, match="in place"):
            ours.Alltoallv(MPI.IN_PLACE if comm.rank else [np.zeros(4), [2, 2]], [np.zeros(4), [2, 2]])


@mpi(ranks=(2, 3), timeout=60)
def test_one_call_is_one_meeting(comm: MPI.Intracomm) -> None:
    n, count = comm.size, LONG
    with blinkmpi.Communicator(comm) as ours:
        send, recv = np.zeros(n * count, np.uint8), np.zeros(n * count, np.uint8)
        each = [count] * n
        before = ours._dispatcher().sequence.seq
        ours.Alltoallv([send, each], [recv, each])
        ours.Allgatherv(send[:count], [recv, each])
        ours.Gatherv(send[:count], [recv, each], 0)
        ours.Scatterv([send, each], recv[:count], 0)
        assert ours._dispatcher().sequence.seq == before + 4
        assert not ours._dispatcher().binder.programs


@mpi(ranks=(2, 3), timeout=60)
def test_where_a_scheme_was_asked_for_it_is_taken(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, algo="gather:direct") as ours:
        recv = np.zeros(2 * comm.size)
        ours.Gatherv(np.full(2, comm.rank, "f8"), [recv, [2] * comm.size])
        assert comm.rank or recv.tolist() == np.repeat(np.arange(comm.size), 2).tolist()
        assert {t.scheme for s in ours.gather_stats() for t in s.trees} == {"direct"}


@mpi(ranks=(2,), timeout=60)
def test_memory_that_cannot_be_read_goes_in_chunks(comm: MPI.Intracomm) -> None:
    """Rank 1's memory cannot be read, as a device's may not be; the other's can."""
    n, count = comm.size, IN_CHUNKS
    send, recv = np.full(count, 10 + comm.rank, np.uint8), np.zeros(n * count, np.uint8)

    def refused(call: BlockCall, seq: int, **_: Any) -> None:
        """As if the kernel refused as this rank announces the call, by an address in no page."""
        struct, code = call.struct, call.transport.native.code  # type: ignore[union-attr]
        kept, struct.send = struct.send, 8
        call.transport.records.write(seq, call.fingerprint, call.record, 20.0)
        assert code.blink_begin(call.addresses[0], seq) == 0
        struct.timeout_ns = -1
        while struct.phase != ANNOUNCED:
            code.blink_execute(*call.addresses)
        struct.send = kept
        comm.send(None, 0)
        call.wait()

    with blinkmpi.Communicator(comm, executor="c") as ours, ExitStack() as stack:
        if comm.rank == 1:
            stack.enter_context(mock.patch.object(BlockCall, "run", refused))
        else:
            comm.recv(source=1)
        ours.Allgatherv(send, [recv, [count] * n])
        assert (recv.reshape(n, count) == 10 + np.arange(n, dtype=np.uint8)[:, None]).all()


@mpi(ranks=(3,), timeout=60, own_job=True)
def test_who_does_not_read_is_named(comm: MPI.Intracomm) -> None:
    """A rank that enters and does nothing more: what it owes stands in the error."""
    count = LONG
    ours = blinkmpi.Communicator(comm, timeout=1 if comm.rank != 1 else 30)
    args = [np.zeros(3 * count, np.uint8), [count] * 3], [np.zeros(3 * count, np.uint8), [count] * 3]
    if comm.rank == 1:
        with mock.patch.object(BlockCall, "run", lambda self, seq, **_: self.start(seq)):
            ours.Alltoallv(*args)  # it comes first, so nothing has been read
        comm.Barrier()
        comm.Barrier()
    else:
        comm.Barrier()
        with pytest.raises(CollectiveTimeout, match=rf"rank 1 for its reading of a block of {count} bytes"):
            ours.Alltoallv(*args)
        comm.Barrier()


@mpi(ranks=(2, 3), timeout=60)
def test_a_trace_has_every_block(comm: MPI.Intracomm) -> None:
    n = comm.size
    with traced(comm) as path:
        with blinkmpi.Communicator(comm) as ours:
            for count in (5, LONG):
                each = [count] * n
                send, recv = np.zeros(n * count, np.uint8), np.zeros(n * count, np.uint8)
                ours.Alltoallv([send, each], [recv, each])
                ours.Allgatherv(send[:count], [recv, each])
                ours.Gatherv(send[:count], [recv, each], 0)
            stats = ours.gather_stats()
        comm.Barrier()
        events = events_of(path)
    slices = [e for e in events if e["ph"] == "X"]
    for rank in range(n):
        names = [e["args"]["what"] for e in slices if e["pid"] == rank and e["args"].get("what")]
        assert names[:3] == ["alltoallv(uint8)", "allgather(uint8) in blocks", "gatherv(uint8, root 0)"]
        chunks = [e for e in slices if e["pid"] == rank and "chunk" in e["args"]]
        received = 2 * (2 * n + (n if rank == 0 else 0))  # its own among them
        sent = (n - 1) + 1 + (rank != 0)  # the short ones, into slots
        assert len(chunks) == received + sent
    total = sum(s.sent_bytes for s in stats)
    assert total == sum(t.bytes for s in stats for t in s.trees) == sum(s.received_bytes for s in stats)
    assert total == (5 + LONG) * (2 * n * (n - 1) + n - 1)
    assert {c.collective: c.calls for c in stats[0].collectives} == {"allgather": 2, "alltoall": 2, "gather": 2}
