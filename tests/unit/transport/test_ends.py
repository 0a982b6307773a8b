"""Ends of channels between nodes, by messages of a process to itself: flags, order, slots, chunks."""

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from blinkmpi.errors import PlanError
from blinkmpi.transport.network.endpoints import Endpoint, Endpoints, tag_of

HEAD, TAIL = (0, 8), (16, 24)  # of the sending end, of the receiving one
BASE = 3 << 24


class Channel:
    """A channel of ``depth`` slots, both of whose ends are here."""

    def __init__(self, total: int, chunk: int, depth: int, first: int = 0, stride: int = 1) -> None:
        self.words = np.zeros(32, np.uint64)
        self.out, self.into = (np.zeros((depth, chunk), np.uint8) for _ in range(2))
        self.comm = MPI.Intracomm(MPI.COMM_SELF).Dup()
        ends = [
            Endpoint(sends, 0, 16, self.words, HEAD[i], TAIL[i], list(slots), chunk, total, first, stride)
            for i, (sends, slots) in enumerate(((True, self.out), (False, self.into)))
        ]
        self.chunks = ends[0].chunks
        self.ends = Endpoints(ends)

    def begin(self, base: int) -> None:
        self.ends.start(base)

    def raise_flag(self, at: int, value: int) -> None:
        self.words[at] = value

    def seen(self, at: int, base: int) -> int:
        return max(int(self.words[at]) - base, 0)

    def move(self) -> None:
        """Until nothing moves any more."""
        idle = 0
        while idle < 100:
            idle = 0 if self.ends.progress(self.comm, None) else idle + 1


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel(total=1000, chunk=300, depth=2)
    yield made
    made.comm.Free()


def test_chunks_go_when_they_are_written_and_come_while_slots_are_free(channel: Channel) -> None:
    data = np.arange(1000, dtype=np.int64).astype(np.uint8)
    for base in (BASE, BASE + (1 << 24)):  # flags of one call mean nothing in the next
        channel.begin(base)
        got: list[NDArray[np.uint8]] = []
        channel.move()
        assert channel.seen(TAIL[0], base) == channel.seen(HEAD[1], base) == 0
        for k in range(channel.chunks):
            part = data[300 * k : 300 * (k + 1)]
            channel.out[k % 2, : part.size] = part
            channel.raise_flag(HEAD[0], base + k + 1)
            channel.move()
            arrived = min(k + 1, 2 + max(k - 1, 0))
            assert channel.seen(HEAD[1], base) == arrived
            if k >= 1:  # the reader is a chunk behind the writer
                got.append(channel.into[(k - 1) % 2, : min(300, 1000 - 300 * (k - 1))].copy())
                channel.raise_flag(TAIL[1], base + k)
            channel.move()
        got.append(channel.into[3 % 2, :100].copy())
        assert (np.concatenate(got) == data).all()
        assert channel.ends.finished
        assert channel.seen(TAIL[0], base) == channel.chunks == 4


def test_no_more_comes_than_there_are_slots(channel: Channel) -> None:
    channel.begin(BASE)
    channel.raise_flag(HEAD[0], BASE + 4)
    channel.move()
    assert channel.seen(HEAD[1], BASE) == 2
    assert not channel.ends.finished
    channel.raise_flag(TAIL[1], BASE + 1)
    channel.move()
    assert channel.seen(HEAD[1], BASE) == 3
    channel.raise_flag(TAIL[1], BASE + 4)
    channel.move()
    assert channel.ends.finished


@pytest.mark.parametrize(("first", "stride", "lengths"), [(0, 2, [300, 300]), (1, 2, [300, 100]), (2, 4, [300])])
def test_an_end_may_carry_every_so_many_th_chunk(first: int, stride: int, lengths: list[int]) -> None:
    channel = Channel(1000, 300, 4, first, stride)
    assert channel.chunks == len(lengths)
    for i, length in enumerate(lengths):
        chunk = channel.ends.all[0].chunk_at(i)
        assert len(chunk) == length
        assert np.shares_memory(chunk, channel.out[i % 4]), "its chunks take its slots in turn"
    channel.comm.Free()


def test_a_rank_without_endpoints_has_finished() -> None:
    ends = Endpoints()
    ends.start(BASE)
    assert ends.finished
    assert not ends.progress(MPI.COMM_SELF, None)


def test_a_channel_for_which_mpi_has_no_tag_is_refused() -> None:
    assert len({tag_of(channel) for channel in range(100)}) == 100
    most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    with pytest.raises(PlanError, match=f"tags end at {most}; choose a scheme with fewer trees"):
        tag_of(most)
