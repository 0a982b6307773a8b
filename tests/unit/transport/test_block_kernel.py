"""The kernel of blocks, executed: the CTAs of all ranks step by step in random order, each store late at random.

A CTA is a generator that stops before each load and each store. A store travels for as long as the dice say; a flag is
stored when what its CTA has stored before has arrived, which is what the kernel's fence sees to. A rank's next kernel
begins when all CTAs of the last one have ended and the rank's own memory has what they stored there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import pytest

from blinkmpi.errors import ArgumentError, BlinkError, CollectiveTimeout, MismatchError
from blinkmpi.program.blocks import BlockMoves
from blinkmpi.transport.cuda.blocks import Ends, block_words, ends_of, usable_lanes
from blinkmpi.transport.cuda.failure_report import COUNTS, MISMATCH, RECEIVE_BLOCK, SEND_BLOCK, TIMEOUT, AbortReport
from blinkmpi.transport.cuda.kernel_layout import BLOCK_END, BLOCKS
from blinkmpi.transport.cuda.memory_layout import (
    BLOCK_CTAS,
    BLOCK_LANE,
    LINE,
    MAX_RANKS,
    MESSAGE_CHUNK,
    block_bytes,
    block_lanes,
    lanes_of_block,
)
from tests.unit.transport.at_own_speeds import run_all

LANES, DEPTH = 2, 2
LENGTHS = (0, 1, BLOCK_LANE + 1, MESSAGE_CHUNK + 5, 9 * MESSAGE_CHUNK)
SENT, EXPECTED = 0, 1
Place = tuple[object, ...]  # in whose memory, and where there
Mutation = Literal["", "one turn", "turns by the number of the call", "senders wait for nobody"]


class Wrong(Exception):
    """What a kernel would have read is not what was sent."""


class Call(NamedTuple):
    """A call: what each rank sends to each, and, where they differ, what each expects of each."""

    collective: str
    root: int
    sends: np.ndarray
    expects: np.ndarray

    def length(self, rank: int, peer: int, *, sends: bool) -> int:
        """Bytes of the block of an end, as its rank knows it."""
        return int(self.sends[rank, peer] if sends else self.expects[peer, rank])


def chunks_of(nbytes: int, lanes: int) -> int:
    """Chunks of a block, as fifo.cuh has them."""
    return -(-nbytes // min((nbytes // lanes + LINE) // LINE * LINE, MESSAGE_CHUNK))


@dataclass
class Machine:
    """The memory of all ranks, and the stores that are on their way."""

    rng: np.random.Generator
    mutation: Mutation = ""
    memory: dict[Place, object] = field(default_factory=dict)
    travelling: list[tuple[Place, object, object]] = field(default_factory=list)  # and who stores
    differ: set[tuple[int, int]] = field(default_factory=set)  # ranks that have found a length to differ, with a peer
    read: int = 0  # chunks

    def number(self, *place: object) -> int:
        found = self.memory.get(place, 0)
        assert isinstance(found, int)
        return found

    def store(self, place: Place, value: object, by: object) -> None:
        self.travelling.append((place, value, by))

    def arrive(self) -> None:
        """Any store arrives, but for those to one place in their order."""
        some = self.travelling[int(self.rng.integers(len(self.travelling)))][0]
        first = next(i for i, (place, *_) in enumerate(self.travelling) if place == some)
        self.memory[some] = self.travelling.pop(first)[1]

    # ---- what blocks.cu does

    def turn(self, rank: int, peer: int, seq: int) -> int:
        if self.mutation == "turns by the number of the call":
            return seq
        last, count = self.memory.get((rank, "turn", peer), (0, 0))  # type: ignore[misc]
        return int(count) + (last != seq)

    def words(self, owner: int, writer: int, turn: int, what: int) -> list[Place]:
        turns = 1 if self.mutation == "one turn" else 2
        return [(owner, "length", writer, turn % turns, what, half) for half in (0, 1)]

    def announce(self, rank: int, peer: int, what: int, nbytes: int, seq: int) -> None:
        turn = self.turn(rank, peer, seq)
        for half, place in enumerate(self.words(peer, rank, turn, what)):
            self.store(place, (seq, nbytes >> 20 if half else nbytes % (1 << 20)), rank)
        self.store((rank, "turn", peer), (seq, turn), rank)

    def said(self, rank: int, peer: int, what: int, seq: int) -> int | None:
        turn = self.turn(rank, peer, seq)
        found = [self.memory.get(place, (0, 0)) for place in self.words(rank, peer, turn, what)]
        (low_seq, low), (high_seq, high) = found  # type: ignore[misc]
        return high << 20 | low if low_seq == high_seq == seq else None

    def compare(self, call: Call, seq: int, rank: int, peer: int, lane: int, *, sends: bool) -> Iterator[bool]:
        """Stops until the peer has said how long a block is; gives False at last if that is wrong, or ranks give up.

        Lane 0 alone gives up by itself, which has announced this rank's length.
        """
        what, mine = EXPECTED if sends else SENT, call.length(rank, peer, sends=sends)
        while self.number(rank, "begun", peer) < seq or self.said(rank, peer, what, seq) is None:
            if self.number(rank, "abort"):
                self.give_up(call, seq, rank)
                yield False
                return
            yield True
        if self.said(rank, peer, what, seq) != mine:
            while lane == 0 and any(by == rank for *_, by in self.travelling):  # the fence before an abort
                yield True
            if lane == 0:
                self.give_up(call, seq, rank)
            yield False

    def give_up(self, call: Call, seq: int, rank: int) -> None:
        """Abort on all ranks; a length that differs may be why another one has."""
        for peer, sends in ends_of(call.collective, call.root, rank, len(call.sends)):
            theirs = self.said(rank, peer, EXPECTED if sends else SENT, seq)
            if theirs is not None and theirs != call.length(rank, peer, sends=sends):
                self.differ.add((rank, peer))
        for other in range(len(call.sends)):
            self.store((other, "abort"), 1, None)

    def end(self, call: Call, seq: int, rank: int, peer: int, sends: bool, lane: int) -> Iterator[None]:
        nbytes = call.length(rank, peer, sends=sends)
        lanes = lanes_of_block(nbytes, LANES)
        if lane >= lanes:
            return
        me = rank, peer, sends, lane
        fifo = (rank, peer, lane) if sends else (peer, rank, lane)
        awaited, raised = (rank, "tail", *fifo), (peer, "head", *fifo)
        if not sends:
            awaited, raised = (rank, "head", *fifo), (peer, "tail", *fifo)
        base = self.number(rank, "count", *me)
        if lane == 0:
            self.announce(rank, peer, SENT if sends else EXPECTED, nbytes, seq)
            yield
        chunks = range(lane, chunks_of(nbytes, lanes), lanes)
        compares = self.compare(call, seq, rank, peer, lane, sends=sends)
        if not sends:
            for right in compares:
                if not right:
                    return
                yield
        for j, chunk in enumerate(chunks):
            while self.number(*awaited) < base + j + 1 - (DEPTH if sends else 0):
                if self.number(rank, "abort"):
                    self.give_up(call, seq, rank)
                    return
                yield
            slot: Place = ((peer if sends else rank), "slot", *fifo, (base + j) % DEPTH)
            if sends:
                self.store(slot, (seq, chunk), me)
            elif self.memory.get(slot) != (seq, chunk):
                raise Wrong(f"{slot} has {self.memory.get(slot)}, and {(seq, chunk)} is wanted")
            else:
                self.read += 1
            while any(by == me for *_, by in self.travelling):
                yield
            self.store(raised, base + j + 1, me)
            yield
        self.memory[rank, "count", *me] = base + len(chunks)
        if sends and lane == 0 and self.mutation != "senders wait for nobody":
            for _ in compares:
                yield

    def kernels(self, calls: Sequence[Call], rank: int) -> Iterator[None]:
        """All calls of a rank."""
        for seq, call in enumerate(calls, 1):
            n = len(call.sends)
            for peer in range(n):
                self.store((peer, "begun", rank), seq, rank)
            ends: Ends = ends_of(call.collective, call.root, rank, n)
            ctas = [self.end(call, seq, rank, peer, sends, lane) for peer, sends in ends for lane in range(LANES)]
            while ctas:
                at = int(self.rng.integers(len(ctas)))
                if next(ctas[at], self) is self:
                    del ctas[at]
                yield
            while any(place[0] == rank and by == rank for place, _, by in self.travelling):
                yield


def run(machine: Machine, calls: Sequence[Call], n: int, steps: int = 400_000) -> bool:
    """Run all ranks until they have ended, each at a speed of its own; False if they have not after so many steps."""
    models = [machine.kernels(calls, rank) for rank in range(n)]
    arrives = float(machine.rng.choice([0.05, 0.3, 0.5]))  # how fast stores are
    return run_all(machine, models, slowest=0.02, arrives=arrives, steps=steps)


def some_calls(n: int, many: int, rng: np.random.Generator) -> list[Call]:
    found = []
    for _ in range(many):
        sends, root = rng.choice(LENGTHS, (n, n)), int(rng.integers(n))
        found.append(Call(str(rng.choice(["alltoall", "gather", "scatter"])), root, sends, sends))
    return found


def wanted(call: Call) -> int:
    """Chunks that are read in a call."""
    n = len(call.sends)
    lengths = [
        call.length(rank, peer, sends=False)
        for rank in range(n)
        for peer, sends in ends_of(call.collective, call.root, rank, n)
        if not sends
    ]
    return sum(chunks_of(nbytes, lanes_of_block(nbytes, LANES)) for nbytes in lengths)


@pytest.mark.parametrize(("n", "many", "runs"), [(2, 12, 20), (4, 5, 6), (8, 2, 2)])
def test_every_chunk_comes_and_all_ends(n: int, many: int, runs: int) -> None:
    for seed in range(runs):
        machine = Machine(np.random.default_rng(seed))
        calls = some_calls(n, many, machine.rng)
        assert run(machine, calls, n), seed
        assert machine.read == sum(map(wanted, calls))
        assert not machine.differ


@pytest.mark.parametrize("mutation", ["one turn", "turns by the number of the call", "senders wait for nobody"])
def test_a_kernel_whose_announcements_overwrite_others_is_found(mutation: Mutation) -> None:
    found = 0
    for seed in range(30):
        machine = Machine(np.random.default_rng(seed), mutation)
        calls = some_calls(3, 8, machine.rng)
        try:
            found += not run(machine, calls, 3, steps=60_000) or bool(machine.differ)
        except Wrong:
            found += 1
    assert found


@pytest.mark.parametrize("n", [2, 4])
def test_both_ranks_find_that_a_length_differs(n: int) -> None:
    for seed in range(20):
        machine = Machine(np.random.default_rng(seed))
        rng = machine.rng
        sends = rng.choice(LENGTHS, (n, n))
        expects = sends.copy()
        writer, reader = (int(r) for r in rng.choice(n, 2, replace=False))
        expects[writer, reader] += rng.choice([1, 3 * MESSAGE_CHUNK])
        run(machine, [Call("alltoall", -1, sends, expects)], n, steps=60_000)
        assert machine.differ == {(writer, reader), (reader, writer)}, seed


@pytest.mark.parametrize("collective", ["alltoall", "gather", "scatter"])
def test_every_end_has_another(collective: str) -> None:
    for n in (2, 3, 8):
        for root in range(n):
            ends = {(rank, *end) for rank in range(n) for end in ends_of(collective, root, rank, n)}
            assert all((peer, rank, not sends) in ends for rank, peer, sends in ends)
            assert len(ends) == 2 * (n * (n - 1) if collective == "alltoall" else n - 1)


def test_arguments() -> None:
    """Of the root of a Scatterv, whose own block lies where it belongs, and of its lanes."""
    sends = ((0, 10), (10, 5), (100, 3 * BLOCK_LANE))
    moves = BlockMoves("scatterv", "scatter", 1, sends, ((0, 0), (7, 5), (0, 0)))
    words, ctas = block_words(moves, 1, 4096, 8)
    own = len(BLOCKS) - 3
    assert words[:own] == [4096, 8, 2]
    assert words[own : len(BLOCKS)] == [10, 7, 5]
    assert words[len(BLOCKS) : len(BLOCKS) + 2 * len(BLOCK_END)] == [2, 1, 100, 3 * BLOCK_LANE, 0, 1, 0, 10]
    assert len(words) == len(BLOCKS) + 4 * len(BLOCK_END)
    assert ctas == 3 * 3
    kept = BlockMoves("scatterv", "scatter", 1, sends, ((0, 0), (10, 5), (0, 0)), stays=True)
    assert block_words(kept, 1, 4096, 2)[0][own : len(BLOCKS)] == [10, 10, 0]
    assert block_words(kept, 1, 4096, 2)[1] == 3 * 2


def test_all_ctas_of_a_call_have_room() -> None:
    for n in range(2, MAX_RANKS + 1):
        assert (2 * n - 1) * block_lanes(n) <= BLOCK_CTAS
        assert block_bytes(n) <= 13 << 20
        for ctas in (1, 2 * n - 2, 2 * n - 1, 40, 100):
            assert (2 * n - 1) * usable_lanes(n, ctas) <= ctas
            assert (usable_lanes(n, ctas) > 0) == (ctas >= 2 * n - 1)


def test_what_a_kernel_reports_of_a_block() -> None:
    def error(code: int, stage: int, chunk: int, want: int, seen: int) -> BlinkError:
        report = AbortReport(code, 3, 0, stage, chunk, want, seen)
        return report.error("alltoallv(float32) in GPU memory", (4, 7), 1, lambda: [3, 3])

    wrong = error(MISMATCH, SEND_BLOCK, 400, 400, 300)
    assert isinstance(wrong, MismatchError)
    assert "rank 7 sends 400 bytes to rank 4, which expects 300" in str(wrong)
    assert "rank 7 expects 400 bytes from rank 4, which sends 8" in str(error(MISMATCH, RECEIVE_BLOCK, 400, 400, 8))
    late = error(TIMEOUT, RECEIVE_BLOCK, 400, 9, 8)
    assert isinstance(late, CollectiveTimeout)
    assert "GPU call 3, alltoallv(float32) in GPU memory: rank 7 waited too long for rank 4, to send a block" in str(
        late
    )
    assert "to take a block of 400 bytes" in str(error(TIMEOUT, SEND_BLOCK, 400, 9, 8))
    counts = error(COUNTS, SEND_BLOCK, 10, 100, -1)
    assert isinstance(counts, ArgumentError)
    assert "counts[4] of rank 7 is -1, from element 10 on, of a buffer of 100" in str(counts)
    more = error(COUNTS, RECEIVE_BLOCK, 90, 100, 11)
    assert "rank 7 gets 11 elements from rank 4, from element 90 on, of a buffer of 100" in str(more)
