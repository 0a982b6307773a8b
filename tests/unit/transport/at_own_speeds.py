"""Run models of kernels step by step, each at a speed of its own, while their stores arrive late."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np


class Memory(Protocol):
    """Of all ranks, with the stores that are on their way to it."""

    rng: np.random.Generator

    @property
    def travelling(self) -> Sequence[object]:
        """The stores on their way."""

    def arrive(self) -> None:
        """Let one of them arrive."""


def run_all(machine: Memory, models: Sequence[Iterator[None]], *, slowest: float, arrives: float, steps: int) -> bool:
    """Run all until they have ended; False if they have not after so many steps.

    Args:
        slowest: how likely the slowest one goes on when its turn comes.
        arrives: how likely a store arrives before a step, if one is on its way.
    """
    running = list(models)
    speeds = [slowest + float(speed) for speed in machine.rng.random(len(running)) ** 4]
    for _ in range(steps):
        if not running:
            return True
        if machine.travelling and machine.rng.random() < arrives:
            machine.arrive()
            continue
        at = int(machine.rng.integers(len(running)))
        if machine.rng.random() < speeds[at] and next(running[at], machine) is machine:
            del running[at], speeds[at]
    return False
