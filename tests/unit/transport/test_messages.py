"""The FIFOs of messages, executed: the CTAs of all ranks step by step in random order, each store late at random.

An end of a FIFO has a CTA for each lane of a message, and its messages run one after another, as on a stream of their
own. A CTA is a generator that stops before each load and each store. A store travels for as long as the dice say. A
flag is stored when what was stored before has arrived, which is what the kernel's fence sees to.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.errors import CollectiveTimeout, MismatchError
from blinkmpi.transport.cuda.failure_report import MISMATCH, RECEIVE, SEND, TIMEOUT, AbortReport
from blinkmpi.transport.cuda.memory_layout import (
    LINE,
    MAX_RANKS,
    MESSAGE_CHUNK,
    MESSAGE_CTAS,
    MESSAGE_DEPTH,
    MESSAGE_LANE,
    lanes_for,
    message_bytes,
    message_lanes,
)
from tests.unit.transport.at_own_speeds import run_all

Chunk = tuple[int, int]  # of which message, and where it begins
Cta = tuple[int, int, int, bool]  # writer, reader, lane, which end
Place = tuple[str, int, int, int, int]  # what, writer, reader, lane, slot


def chunks_of(nbytes: int, lanes: int) -> list[tuple[int, int]]:
    """(begin, end) of the chunks of a message, as the kernel has them."""
    chunk = min((nbytes // lanes + LINE) // LINE * LINE, MESSAGE_CHUNK)
    many = -(-nbytes // chunk) if nbytes > chunk else 1
    return [(i * chunk, min((i + 1) * chunk, nbytes)) for i in range(many)]


class Stale(Exception):
    """A reader got another chunk than the one that it waits for."""


@dataclass
class Machine:
    """The memory of some ranks, and the stores that are on their way."""

    rng: np.random.Generator
    depth: int = MESSAGE_DEPTH
    memory: dict[Place, int | Chunk] = field(default_factory=dict)
    travelling: list[tuple[Place, int | Chunk, Cta]] = field(default_factory=list)  # and the CTA that stores
    read: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)  # by writer, reader, message: what came

    def flag(self, kind: str, writer: int, reader: int, lane: int) -> int:
        found = self.memory.get((kind, writer, reader, lane, 0), 0)
        assert isinstance(found, int)
        return found

    def store(self, place: Place, value: int | Chunk, cta: Cta) -> None:
        self.travelling.append((place, value, cta))

    def arrive(self) -> None:
        place, value, _ = self.travelling.pop(int(self.rng.integers(len(self.travelling))))
        self.memory[place] = value


@dataclass
class End:
    """An end of a FIFO, and its messages in order, by bytes; it waits for ``slack`` chunks less than is right."""

    machine: Machine
    writer: int
    reader: int
    sends: bool
    sizes: Sequence[int]
    n: int
    slack: int = 0
    counts: dict[int, int] = field(default_factory=dict)  # of chunks so far, by lane

    def run(self) -> Iterator[None]:
        """All messages, each by its CTAs in random order."""
        for number, nbytes in enumerate(self.sizes):
            lanes = lanes_for(nbytes, self.n)
            chunks = chunks_of(nbytes, lanes)
            ctas = [self.cta(number, lane, chunks[lane::lanes]) for lane in range(lanes)]
            while ctas:
                at = int(self.machine.rng.integers(len(ctas)))
                if next(ctas[at], self) is self:
                    del ctas[at]
                yield

    def cta(self, number: int, lane: int, chunks: Sequence[tuple[int, int]]) -> Iterator[None]:
        machine, base = self.machine, self.counts.get(lane, 0)
        fifo = self.writer, self.reader, lane
        me = (*fifo, self.sends)
        for j, (begin, _) in enumerate(chunks):
            slot: Place = ("slot", *fifo, (base + j) % machine.depth)
            awaited, want = ("tail", base + j + 1 - machine.depth) if self.sends else ("head", base + j + 1)
            while machine.flag(awaited, *fifo) < want - self.slack:
                yield
            if self.sends:
                machine.store(slot, (number, begin), me)
            else:
                if machine.memory.get(slot) != (number, begin):
                    raise Stale(f"{slot}: {machine.memory.get(slot)} in place of {(number, begin)}")
                machine.read.setdefault((self.writer, self.reader, number), []).append(begin)
            while any(cta == me for *_, cta in machine.travelling):
                yield
            machine.store(("head" if self.sends else "tail", *fifo, 0), base + j + 1, me)
            yield
        self.counts[lane] = base + len(chunks)


def run(machine: Machine, ends: Sequence[End], steps: int = 500_000) -> bool:
    """Run all until they have ended, each at a speed of its own; False if they have not after so many steps."""
    return run_all(machine, [end.run() for end in ends], slowest=0.03, arrives=0.5, steps=steps)


SIZES = (0, 1, MESSAGE_LANE, MESSAGE_LANE + 1, 5 * MESSAGE_LANE, 40 * MESSAGE_CHUNK)


def ring(n: int) -> list[tuple[int, int]]:
    return [(r, (r + 1) % n) for r in range(n)]


def all_pairs(n: int) -> list[tuple[int, int]]:
    return [*itertools.permutations(range(n), 2)]


@pytest.mark.parametrize(("n", "pairs"), [(2, ring), (3, ring), (8, ring), (3, all_pairs), (4, all_pairs)])
def test_every_chunk_comes_once_and_all_ends(n: int, pairs: Callable[[int], list[tuple[int, int]]]) -> None:
    rng = np.random.default_rng(n)
    for _ in range(3):
        machine = Machine(rng)
        ends = []
        for writer, reader in pairs(n):
            sizes = [int(size) for size in rng.choice(SIZES, 3)]
            ends += [End(machine, writer, reader, sends, sizes, n) for sends in (True, False)]
        assert run(machine, ends)
        for end in ends:
            for number, nbytes in enumerate(end.sizes):
                came = machine.read[end.writer, end.reader, number]
                assert sorted(came) == [begin for begin, _ in chunks_of(nbytes, lanes_for(nbytes, n))]


def test_a_message_of_a_few_chunks_is_sent_before_anybody_receives_it() -> None:
    machine = Machine(np.random.default_rng(1))
    assert run(machine, [End(machine, 0, 1, True, [MESSAGE_DEPTH * message_lanes(2) * MESSAGE_CHUNK // 2], 2)])
    assert not run(machine, [End(machine, 1, 0, True, [3 * MESSAGE_DEPTH * message_lanes(2) * MESSAGE_CHUNK], 2)], 9999)


@pytest.mark.parametrize("sends", [True, False])
def test_an_end_that_waits_for_less_is_found(sends: bool) -> None:
    """The model would see a kernel that writes slots which are not free, or reads such as are not written."""
    stale = 0
    for seed in range(5):
        machine = Machine(np.random.default_rng(seed))
        sizes = [400 * MESSAGE_CHUNK]
        ends = [End(machine, 0, 1, end, sizes, 3, slack=int(end is sends)) for end in (True, False)]
        try:
            run(machine, ends)
        except Stale:
            stale += 1
    assert stale


@given(st.integers(0, 1 << 30), st.integers(2, MAX_RANKS))
def test_chunks_cover_a_message(nbytes: int, n: int) -> None:
    lanes = lanes_for(nbytes, n)
    chunks = chunks_of(nbytes, lanes)
    assert 1 <= lanes <= message_lanes(n)
    assert (chunks[0][0], chunks[-1][1]) == (0, nbytes)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(chunks))
    assert max(end - begin for begin, end in chunks) <= MESSAGE_CHUNK


def test_all_messages_of_a_rank_have_room_at_once() -> None:
    for n in range(2, MAX_RANKS + 1):
        assert 2 * (n - 1) * message_lanes(n) <= MESSAGE_CTAS
        assert message_bytes(n) <= 9 << 20


def test_what_a_kernel_reports_of_a_message() -> None:
    def error(code: int, stage: int, want: int = 0, seen: int = 0) -> Exception:
        return AbortReport(code, 3, 0, stage, 4096, want, seen).error("x", (4, 7), 1, lambda: [0, 0])

    wrong = error(MISMATCH, RECEIVE, 4000, 3)
    assert isinstance(wrong, MismatchError)
    assert "rank 7 receives 4096 bytes with tag 3 from rank 4, which has sent 4000 bytes with tag 3" in str(wrong)
    late = error(TIMEOUT, RECEIVE)
    assert isinstance(late, CollectiveTimeout)
    assert "rank 7 waited too long to receive 4096 bytes with tag 3 from rank 4, which did not send them" in str(late)
    assert "to send 4096 bytes with tag 3 to rank 4, which did not receive" in str(error(TIMEOUT, SEND))
