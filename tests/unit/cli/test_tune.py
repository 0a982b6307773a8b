"""The command ``tune``: its sizes, which are known before anything is measured."""

import argparse

import pytest

from blinkmpi.cli.tune import sizes_of
from blinkmpi.errors import ArgumentError


def asked(begin: str | None = None, end: str | None = None, factor: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(begin=begin, end=end, factor=factor)


def test_what_is_not_said_is_as_usual() -> None:
    assert sizes_of(asked(), "1K", "64K", 4) == [1 << 10, 1 << 12, 1 << 14, 1 << 16]
    assert sizes_of(asked("3K", "12K", 2), "1K", "64K", 4) == [3 << 10, 6 << 10, 12 << 10]
    assert sizes_of(asked("1M", "1M"), "1K", "64K", 4) == [1 << 20]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (asked(factor=1), "-f 1: the factor between two sizes is at least 2; leave -f out for 4"),
        (asked(factor=0), "-f 0: the factor between two sizes is at least 2"),
        (asked("0"), "-b 0 -e 64K: expected sizes from 1 byte on, the second not below the first"),
        (asked("1M"), "-b 1M -e 64K: expected sizes"),
        (asked(end="x"), "size 'x'"),
    ],
)
def test_sizes_that_never_end_are_refused(args: argparse.Namespace, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        sizes_of(args, "1K", "64K", 4)
