"""Calls of blocks by the C executor: its ranks are threads of this process, on memory like a node's."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.program.blocks import BlockMoves, Place
from blinkmpi.transport.control_pages import CONTROL, ControlPages
from blinkmpi.transport.host import block_memory, native
from blinkmpi.transport.host.block_memory import CHUNKS, BlockMemory
from blinkmpi.transport.host.host_program import place

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Matrix = Sequence[Sequence[int]]  # bytes from each rank to each
SLOTS, ARENA = 4096, 16384  # of each rank: so that few bytes are a long block
SHORT, CHUNK, READ_FROM = 200, 256, 1300
DONE, EXPIRED, ABORTED, DIFFER = 0, 1, 2, 3
GAP = 0xEE


@pytest.fixture(scope="module", autouse=True)
def _shorter() -> Any:
    short, read = (SHORT, SHORT), (READ_FROM, READ_FROM)
    sizes = {"SHORT_BYTES": short, "READ_FROM": read, "READ_FROM_OF_ALL": read, "CHUNK_BYTES": CHUNK}
    with mock.patch.multiple(block_memory, CHUNK_OF_ALL=CHUNK, **sizes):
        yield


def library() -> Any:
    found, why = native.build()
    if found is None:
        pytest.skip(why)
    return native.load(Path(found), why).code


class Node:
    """The memory of ``n`` ranks, and the calls that they make."""

    def __init__(self, n: int, *, reads: bool = True) -> None:
        self.n, self.code, self.seq = n, library(), 8
        each = SLOTS + ARENA
        self.bytes = np.zeros(n * (CONTROL + each), np.uint8)
        window = SimpleNamespace(
            bytes=self.bytes, arena_bytes=ARENA, one_shot_bytes=SLOTS,
            arena=lambda r: n * CONTROL + r * each, one_shot=lambda r: n * CONTROL + r * each + ARENA,
        )  # fmt: skip
        self.windows = []
        for r in range(n):
            pages = ControlPages(self.bytes, n, r, tuple(range(n)), None)
            pages.pids[r] = os.getpid()
            pages.announced[r] = pages.finished[r] = self.seq
            self.windows.append(SimpleNamespace(**vars(window), pages=pages))
        self.memories: list[BlockMemory] = [BlockMemory(w, reads=reads, crowded=n > 2) for w in self.windows]  # type: ignore[arg-type]
        assert all(memory.fits for memory in self.memories)

    def bound(self, rank: int, moves: BlockMoves, send: Bytes | None, recv: Bytes | None, timeout_s: float) -> Any:
        """A rank's structure, and what lives as long as it does."""
        struct = native.CallStruct()
        place(struct, self.windows[rank])  # type: ignore[arg-type]
        table, body = self.memories[rank].table(moves), np.zeros(8, np.uint8)
        in_kernels = np.zeros(2, np.uint64)
        struct.one_shot, struct.spins, struct.timeout_ns, struct.print = 1, 2, int(timeout_s * 1e9), 77
        struct.send, struct.recv = (0 if a is None else a.ctypes.data for a in (send, recv))
        struct.blocks, struct.in_kernels = table.ctypes.data, in_kernels.ctypes.data
        struct.body, struct.body_bytes = body.ctypes.data, 8
        self.code.blink_sum_lengths(native.address(struct))
        return struct, (table, body, in_kernels, send, recv)

    def run(self, calls: Sequence[Any], timeout_s: float = 60.0) -> list[int]:
        """Make a call on all ranks that have one; gives what C said of each."""
        self.seq += 1
        made = [None if c is None else self.bound(r, *c, timeout_s) for r, c in enumerate(calls)]
        with ThreadPoolExecutor(self.n) as threads:
            runs = [threads.submit(self.code.blink_run, native.address(m[0]), None, self.seq) for m in made if m]
            return [run.result() for run in runs]


def packed(lengths: Sequence[int], gap: int) -> tuple[tuple[Place, ...], int]:
    """Places of blocks with gaps, those of the last ranks first, and the bytes of the whole."""
    found: list[Place] = [(0, 0)] * len(lengths)
    at = gap
    for r in reversed(range(len(lengths))):
        found[r] = at, lengths[r]
        at += lengths[r] + gap
    return tuple(found), at


def content(source: int, target: int, nbytes: int, turn: int) -> Bytes:
    return ((np.arange(nbytes) * 7 + 31 * source + 57 * target + 3 * turn) % 200).astype(np.uint8)


def alltoall(lengths: Matrix, turn: int, gap: int) -> list[tuple[BlockMoves, Bytes, Bytes]]:
    """An exchange of blocks of these lengths: (moves, send, recv) of each rank."""
    n, found = len(lengths), []
    for r in range(n):
        sends, sent = packed(lengths[r], gap)
        receives, received = packed([row[r] for row in lengths], gap)
        send, recv = np.full(sent, GAP, np.uint8), np.full(received, GAP, np.uint8)
        for target, (at, nbytes) in enumerate(sends):
            send[at : at + nbytes] = content(r, target, nbytes, turn)
        found.append((BlockMoves("exchange", "alltoall", -1, sends, receives), send, recv))
    return found


def check(lengths: Matrix, calls: Sequence[tuple[BlockMoves, Bytes, Bytes]], turn: int) -> None:
    for r, (moves, _, recv) in enumerate(calls):
        want = np.full(recv.size, GAP, np.uint8)
        for source, (at, nbytes) in enumerate(moves.receives):
            want[at : at + nbytes] = content(source, r, nbytes, turn)
        assert (recv == want).all(), (r, lengths)


EDGES = [0, SHORT, SHORT + 1, CHUNK * CHUNKS, READ_FROM - 1, READ_FROM, CHUNK * (CHUNKS + 3) + 5]
sizes = st.one_of(st.integers(0, 40), st.sampled_from(EDGES))


@st.composite
def matrices(draw: Any) -> Matrix:
    n = draw(st.integers(1, 4))
    row = st.lists(sizes, min_size=n, max_size=n)
    return draw(st.lists(row, min_size=n, max_size=n))  # type: ignore[no-any-return]


@settings(max_examples=60, deadline=None)
@given(matrices(), st.booleans(), st.integers(0, 9))
def test_every_block_comes_where_it_belongs(lengths: Matrix, reads: bool, gap: int) -> None:
    """Twice and once more, as the slots of the last call but one are filled again."""
    node = Node(len(lengths), reads=reads)
    for turn in range(3):
        calls = alltoall(lengths, turn, gap)
        assert node.run(calls) == [DONE] * node.n
        check(lengths, calls, turn)


@settings(max_examples=30, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_one_block_goes_to_all(lengths: Sequence[int], reads: bool, stays: bool) -> None:
    n = len(lengths)
    node = Node(n, reads=reads)
    for turn in range(3):
        calls = []
        for r in range(n):
            receives, received = packed(lengths, 3)
            recv = np.full(received, GAP, np.uint8)
            own = content(r, 0, lengths[r], turn)
            at = receives[r][0] if stays else 0
            send = recv if stays else own.copy()
            send[at : at + own.size] = own
            moves = BlockMoves("all", "allgather", -1, ((at, own.size),) * n, receives, shared=True, stays=stays)
            calls.append((moves, send, recv))
        assert node.run(calls) == [DONE] * n
        for moves, _, recv in calls:
            for source, (at, nbytes) in enumerate(moves.receives):
                assert (recv[at : at + nbytes] == content(source, 0, nbytes, turn)).all()
                assert recv[at - 1] == recv[at + nbytes] == GAP


@settings(max_examples=30, deadline=None)
@given(matrices())
def test_in_place_a_block_comes_when_the_one_there_has_left(lengths: Matrix) -> None:
    n = len(lengths)
    even = [[lengths[min(r, s)][max(r, s)] for s in range(n)] for r in range(n)]
    node, calls = Node(n), []
    for r in range(n):
        places, whole = packed(even[r], 2)
        both = np.full(whole, GAP, np.uint8)
        for target, (at, nbytes) in enumerate(places):
            both[at : at + nbytes] = content(r, target, nbytes, 0)
        calls.append((BlockMoves("turn", "alltoall", -1, places, places, in_place=True, stays=True), both, both))
    assert node.run(calls) == [DONE] * n
    check(even, calls, 0)


@settings(max_examples=60, deadline=None)
@given(matrices().filter(lambda m: len(m) > 1), st.data())
def test_another_length_of_any_pair_is_seen_by_all(lengths: Matrix, data: Any) -> None:
    """And nobody has received anything then; the next call is as if nothing had been."""
    n = len(lengths)
    node, calls = Node(n), alltoall(lengths, 0, 1)
    target = data.draw(st.integers(0, n - 1))
    source = data.draw(st.integers(0, n - 1).filter(lambda r: r != target))
    moves, send, _ = calls[target]
    receives = list(moves.receives)
    receives[source] = 0, data.draw(sizes.filter(lambda nbytes: nbytes != lengths[source][target]))
    other = BlockMoves(moves.text, moves.collective, -1, moves.sends, tuple(receives))
    calls[target] = other, send, np.full(max(4000, calls[target][2].size), GAP, np.uint8)
    assert node.run(calls) == [DIFFER] * n
    assert all((recv == GAP).all() for _, _, recv in calls)
    for window in node.windows:
        window.pages.finished[window.pages.rank] = node.seq
    right = alltoall(lengths, 1, 1)
    assert node.run(right) == [DONE] * n
    check(lengths, right, 1)


def test_two_lengths_that_are_exchanged_are_seen() -> None:
    """Sums in which only the bytes were added would be equal."""
    node, lengths = Node(3), [[0, 5, 9], [0, 0, 0], [0, 0, 0]]
    calls = alltoall(lengths, 0, 0)
    for r in (1, 2):
        moves, send, _ = calls[r]
        receives = ((0, lengths[0][3 - r]), *moves.receives[1:])
        calls[r] = BlockMoves(moves.text, "alltoall", -1, moves.sends, receives), send, np.full(20, GAP, np.uint8)
    assert node.run(calls) == [DIFFER] * 3


@pytest.mark.parametrize("reads", [True, False])
def test_who_does_not_come_is_waited_for_and_no_longer(reads: bool) -> None:
    node, lengths = Node(3, reads=reads), [[10, 3000, 20]] * 3
    calls: list[Any] = [*alltoall(lengths, 0, 0)]
    recv = calls[0][2]
    assert node.run([*calls[:2], None], timeout_s=0.05) == [EXPIRED] * 2
    assert (recv == GAP).all()


@pytest.mark.parametrize("reads", [True, False])
def test_a_sender_stays_until_its_long_block_was_read(reads: bool) -> None:
    """A rank that has entered, and then does nothing, is waited for; an abort ends the wait."""
    node, lengths = Node(2, reads=reads), [[0, 3000], [0, 0]]
    calls = alltoall(lengths, 0, 0)
    node.seq += 1
    sender, _keep = node.bound(0, *calls[0], 0.05)
    silent, _keep_too = node.bound(1, *calls[1], -1)
    code = node.code
    assert code.blink_run(native.address(silent), None, node.seq) == EXPIRED  # it has filled its slots
    assert code.blink_run(native.address(sender), None, node.seq) == EXPIRED
    assert code.blink_execute(native.address(sender), None) == EXPIRED
    node.windows[0].pages.abort[0] = 2
    assert code.blink_execute(native.address(sender), None) == ABORTED
    node.windows[0].pages.abort[0] = 0
    with ThreadPoolExecutor(1) as thread:
        silent.timeout_ns = sender.timeout_ns = 60_000_000_000
        late = thread.submit(code.blink_execute, native.address(silent), None)
        assert code.blink_execute(native.address(sender), None) == DONE
        assert late.result() == DONE
    check(lengths, calls, 0)
