"""A call of the Communicator that torch's arguments ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .operands import After, Tensor


class Operation:
    """A call, ready to be made.

    Args:
        name: the Communicator's method.
        args: its arguments; tensors in host memory are NumPy arrays here.
        memory: the tensors that the call reads and writes.
        outputs: those that torch's user gets.
        after: what brings results from temporaries to their places.
    """

    __slots__ = ("after", "args", "memory", "name", "outputs")

    def __init__(
        self, name: str, args: tuple[Any, ...], memory: Sequence[Tensor], outputs: Sequence[Tensor], after: After = None
    ) -> None:
        self.name, self.args, self.memory, self.outputs, self.after = name, args, memory, outputs, after
