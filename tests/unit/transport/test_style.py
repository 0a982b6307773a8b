"""How a program finds out how its slots are best written."""

import ctypes

import pytest

from blinkmpi.transport.host import native

AGAIN, FIRST = 64, (1, 1, 0, 0)  # style.h's


class Style:
    """``style_t`` and its two functions."""

    def __init__(self) -> None:
        path, why = native.build()
        if path is None:
            pytest.skip(f"no C executor: {why}")
        self.code = native.load(path, why).code
        self.state = (ctypes.c_int64 * 4)()

    def next(self) -> int:
        return int(self.code.blink_style(self.state))

    def learn(self, spent_ns: int) -> None:
        self.code.blink_learn(self.state, ctypes.c_int64(spent_ns))


def run(style: Style, calls: int, spent_ns: tuple[int, int]) -> list[int]:
    """Make calls on a machine where each way takes so long; the ways that were chosen."""
    ways = []
    for _ in range(calls):
        ways.append(style.next())
        style.learn(spent_ns[ways[-1]])
    return ways


@pytest.mark.parametrize("best", [0, 1])
def test_both_ways_are_tried_and_the_better_one_is_kept(best: int) -> None:
    ways = run(Style(), AGAIN, (100, 200) if best == 0 else (200, 100))
    assert tuple(ways[: len(FIRST)]) == FIRST
    assert set(ways[len(FIRST) :]) == {best}


@pytest.mark.parametrize("best", [0, 1])
def test_a_machine_that_changes_is_followed(best: int) -> None:
    style = Style()
    run(style, 3 * AGAIN, (100, 200) if best == 1 else (200, 100))
    ways = run(style, 3 * AGAIN, (200, 100) if best == 1 else (100, 200))
    assert set(ways[-AGAIN // 2 :]) == {best}


def test_the_other_way_is_tried_now_and_then() -> None:
    ways = run(Style(), 10 * AGAIN, (100, 200))
    assert 5 <= sum(ways[len(FIRST) :]) <= 10


def test_a_call_that_was_asked_for_twice_counts_once() -> None:
    """A call that was given up before it began is asked for again."""
    style, ways = Style(), []
    for _ in range(len(FIRST)):
        style.next()
        ways.append(style.next())
        style.learn(100)
    assert tuple(ways) == FIRST
