"""Who is left of the ranks, in control pages that are plain memory; and that GPUs of several nodes end with a loss."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkmpi.errors import ArgumentError, CannotShrink, CollectiveTimeout, PeerLost
from blinkmpi.runtime.shrinking.by_mpi import MpiShrinking
from blinkmpi.runtime.shrinking.meeting import excluded, meet
from blinkmpi.transport.control_pages import CONTROL, LEFT, SHRINKS, WENT_ON, ControlPages
from blinkmpi.transport.liveness import Peers
from tests.harness import NEVER_S

N = 4


def job() -> Peers:
    """What rank 0 sees: all ranks have come, and are this process."""
    pages = ControlPages(np.zeros(N * CONTROL, np.uint8), N, 0, tuple(range(N)), None)
    for rank in range(N):
        pages.rank = rank
        pages.introduce(0, 0)
    pages.rank = 0
    pages.see()
    pages.lefts[1:] = SHRINKS
    return Peers(pages, ["here"] * N)


def test_all_who_come_are_left() -> None:
    found = meet(job(), frozenset(), NEVER_S)
    assert (found.rest, found.gone, found.alive) == ((0, 1, 2, 3), (), ())


def test_who_has_died_or_left_or_is_excluded_is_not_waited_for() -> None:
    peers = job()
    peers.pages.starts[1] = 1  # another process had this number before
    peers.pages.lefts[2] = LEFT
    peers.pages.lefts[3] = 0
    found = meet(peers, frozenset({3}), NEVER_S)
    assert (found.rest, found.gone, found.alive) == ((0,), (1,), (2, 3))


def test_who_runs_and_does_not_come_is_named_at_the_deadline() -> None:
    peers = job()
    peers.pages.lefts[2] = 0
    with pytest.raises(CollectiveTimeout, match=rf"rank 2 \(process {os.getpid()}\) runs"):
        meet(peers, frozenset(), 0.01)
    assert peers.pages.comes_to_shrink(0), "others may have counted on it"


def test_who_comes_when_the_others_have_gone_on_is_refused() -> None:
    peers = job()
    peers.pages.lefts[1] = peers.pages.lefts[3] = WENT_ON
    with pytest.raises(CannotShrink, match="ranks 1, 3 went on without rank 0"):
        meet(peers, frozenset(), NEVER_S)


@pytest.mark.parametrize(("exclude", "text"), [
    ([0], "rank 0 excludes itself"), ([4], "exclude=4: expected a rank, 0 to 3"), ([1.5], "exclude=1.5"),
    (2, "expected ranks"), ("12", "expected ranks"),
])  # fmt: skip
def test_what_cannot_be_excluded_is_refused(exclude: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        excluded(exclude, 0, N)


def test_what_names_ranks_is_taken() -> None:
    assert excluded([], 0, N) == excluded(range(0), 0, N) == frozenset()
    assert excluded(np.array([1, 3]), 0, N) == excluded({1, 3}, 0, N) == frozenset({1, 3})


def test_nobody_goes_on_with_gpus_of_several_nodes_after_a_loss() -> None:
    gpus = SimpleNamespace(here=(0, 1))
    context = SimpleNamespace(gpus=gpus, n=N, rank=0, mpi=SimpleNamespace(public=None))
    dispatcher: Any = SimpleNamespace(context=context, sequence=SimpleNamespace(dead=PeerLost("rank 1 is gone", [1])))
    with pytest.raises(CannotShrink, match=r"GPUs on several nodes.*start the job again"):
        MpiShrinking(dispatcher).run(frozenset(), None)
