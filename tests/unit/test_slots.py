"""How a program finds out how its slots are best written."""

from __future__ import annotations

import pytest

from blinkmpi.transport.slots import AGAIN, FIRST, SlotStyle


def run(style: SlotStyle, calls: int, spent_ns: tuple[int, int]) -> list[int]:
    """Make calls on a machine where each way takes so long; the ways that were chosen."""
    ways = []
    for _ in range(calls):
        ways.append(style.next())
        style.learn(spent_ns[ways[-1]])
    return ways


@pytest.mark.parametrize("best", [0, 1])
def test_both_ways_are_tried_and_the_better_one_is_kept(best: int) -> None:
    ways = run(SlotStyle(), AGAIN, (100, 200) if best == 0 else (200, 100))
    assert sorted(ways[: len(FIRST)]) == [0, 0, 1, 1]
    assert set(ways[len(FIRST) :]) == {best}


@pytest.mark.parametrize("best", [0, 1])
def test_a_machine_that_changes_is_followed(best: int) -> None:
    style = SlotStyle()
    run(style, 3 * AGAIN, (100, 200) if best == 1 else (200, 100))
    ways = run(style, 3 * AGAIN, (200, 100) if best == 1 else (100, 200))
    assert set(ways[-AGAIN // 2 :]) == {best}


def test_the_other_way_is_tried_now_and_then() -> None:
    ways = run(SlotStyle(), 10 * AGAIN, (100, 200))
    assert 5 <= sum(ways[len(FIRST) :]) <= 10


def test_a_call_that_was_asked_for_twice_counts_once() -> None:
    """A call that C alone would have made, and could not, is made the longer way."""
    style, ways = SlotStyle(), []
    for _ in range(len(FIRST)):
        style.next()
        ways.append(style.next())
        style.learn(100)
    assert ways == list(FIRST)
