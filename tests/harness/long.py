"""Which values of a parameter are for every run of the tests, and which for the long ones."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def long_but(usual: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values, each one or a tuple of several parameters, all of which are long tests but the ``usual`` ones."""

    def long(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)

    return [value if value in usual else long(value) for value in values]


def sizes(usual: Sequence[int], long: Sequence[int], name: str) -> list[Any]:
    """Numbers of processes in ascending order, with their names in a test's; those of ``long`` are long tests."""
    marks = {**dict.fromkeys(usual, ()), **dict.fromkeys(long, (pytest.mark.long,))}
    return [pytest.param(n, id=f"{name}{n}", marks=marks[n]) for n in sorted(marks)]
