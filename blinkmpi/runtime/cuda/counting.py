"""Calls on GPU memory as they are counted: a number for each kind of call, and bytes by link when somebody asks.

A start of a kernel takes a few microseconds, so it adds one to a number. What a kind of call moves follows from its
program, where it goes through slots; packets and ``direct`` have none, so of these only calls are counted.
Replays of a CUDA graph pass no code of ours, and are not counted.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from ...program.call import Call
from ...program.partition import part_of
from ...transport.counters import Name
from ...transport.host.traffic import traffic_of
from ...transport.host.transport import HostTransport

if TYPE_CHECKING:
    from .context import CudaContext

KINDS = 4096  # of calls that are known at a time


class Starts(ctypes.Structure):
    """How often one kind of call was started since the last look; ``known``: whether anybody will look again.

    launches.h counts here, too.
    """

    _fields_ = (("number", ctypes.c_int64), ("known", ctypes.c_int64))

    number: int
    known: int


class StartedCalls:
    """The kinds of calls of a communicator."""

    def __init__(self, context: CudaContext, host: HostTransport) -> None:
        self._context, self._host = context, host
        self._kinds: dict[tuple[Call, str], Starts] = {}

    def of(self, call: Call, protocol: str) -> Starts:
        """The starts of one kind."""
        found = self._kinds.get((call, protocol))
        if found is None:
            if len(self._kinds) >= KINDS:
                self._forget()
            found = self._kinds[call, protocol] = Starts(0, 1)
        return found

    def settle(self) -> None:
        """Add what was counted to the counters of the host transport. Local."""
        for (call, protocol), starts in self._kinds.items():
            times, starts.number = starts.number, 0
            if times:
                moved = self._moved(call, protocol)
                tally = {name: (times * nbytes, times * calls) for name, (nbytes, calls) in moved.items()}
                self._host.recorder.tally(tally).add()

    def _forget(self) -> None:
        self.settle()
        for starts in self._kinds.values():
            starts.known = 0
        self._kinds.clear()

    def _moved(self, call: Call, protocol: str) -> dict[Name, tuple[int, int]]:
        """(bytes, calls) by name of a counter in one call."""
        if protocol != "slots":
            return {("collective", call.collective): (call.nbytes, 1), ("protocol", protocol): (0, 1)}
        context, rank = self._context, self._context.rank
        program = context.program(call, context.rule(call))
        stages = [(stage, False) for stage in program.of(rank)]
        return dict(traffic_of(part_of(program, range(call.n)), program, rank, {}, stages).moved)
