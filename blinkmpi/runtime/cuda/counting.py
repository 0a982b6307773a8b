"""Count calls on GPU memory: one counter for each kind of call; bytes by link are computed when somebody asks.

A start of a kernel takes a few microseconds, so it adds one to a number. What a kind of call moves follows from its
program, where it goes through slots; packets and ``direct`` have none, so of these only calls are counted.
Replays of a CUDA graph pass no code of ours, and are not counted.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakSet

from msgspec.structs import replace

from ...program.call import Call
from ...program.ir import Program
from ...program.partition import part_of
from ...program.template import Template
from ...transport.counters import Name
from ...transport.host.traffic import traffic_of
from ...transport.host.transport import HostTransport

if TYPE_CHECKING:
    from .context import CudaContext

KINDS = 1024  # kinds of calls that are known at a time


class Starts(ctypes.Structure):
    """How often one kind of call was started since the last look; ``known``: whether anybody will look again.

    launches.h counts here, too.
    """

    _fields_ = (("number", ctypes.c_int64), ("known", ctypes.c_int64), ("nbytes", ctypes.c_int64))

    number: int
    known: int
    nbytes: int  # of calls of blocks, whose lengths differ


class CountedStarts:
    """The starts of calls that differ in their counts alone: those of one count, until another one comes.

    Args:
        template: theirs, if they go through slots.
        full: is called when many counts were there.
    """

    def __init__(self, call: Call, protocol: str, template: Template | None, full: Callable[[], None]) -> None:
        self.starts, self.protocol, self.template = Starts(0, 1), protocol, template
        self._call, self._full = call, full
        self._times: Counter[int] = Counter()  # by count

    def turn_to(self, call: Call) -> None:
        """Count another call from now on."""
        self._keep()
        self._call = call
        if len(self._times) > KINDS:
            self._full()

    def taken(self) -> Iterator[tuple[Call, int]]:
        """What was counted since the last look: calls, and how often."""
        self._keep()
        times, self._times = self._times, Counter()
        for count, number in times.items():
            yield replace(self._call, counts=(count,) * len(self._call.counts)), number

    def _keep(self) -> None:
        if self.starts.number:
            self._times[self._call.counts[0]] += self.starts.number
            self.starts.number = 0


class StartedCalls:
    """The kinds of calls of a communicator."""

    def __init__(self, context: CudaContext, host: HostTransport) -> None:
        self._context, self._host = context, host
        self._kinds: dict[tuple[Call, str], Starts] = {}
        self._of_counts: WeakSet[CountedStarts] = WeakSet()

    def of(self, call: Call, protocol: str) -> Starts:
        """The starts of one kind."""
        found = self._kinds.get((call, protocol))
        if found is None:
            if len(self._kinds) >= KINDS:
                self._forget()
            found = self._kinds[call, protocol] = Starts(0, 1)
        return found

    def of_counts(self, call: Call, protocol: str, template: Template | None) -> CountedStarts:
        """The starts of a kind whatever its count, which is the call's now."""
        made = CountedStarts(call, protocol, template, self.flush)
        self._of_counts.add(made)
        return made

    def _taken(self) -> Iterator[tuple[Call, str, int, int, Template | None]]:
        """What was counted since the last look: calls, protocols, how often, bytes, and templates that are known."""
        for (call, protocol), starts in [*self._kinds.items()]:  # other threads may add kinds meanwhile
            times, moved = starts.number, starts.nbytes
            starts.number = starts.nbytes = 0
            if times:
                yield call, protocol, times, moved + times * call.nbytes, None
        for counted in list(self._of_counts):
            for call, times in counted.taken():
                yield call, counted.protocol, times, times * call.nbytes, counted.template

    def flush(self) -> None:
        """Add what was counted to the counters of the host transport. Local.

        Calls of one template are added up tree by tree, so that one program says what all of them have moved.
        """
        nbytes: Counter[Name] = Counter()
        calls: Counter[Name] = Counter()

        def add(program: Program, each: int, times: int) -> None:
            for name, moved in self._moved(program).items():
                nbytes[name] += each * moved
                calls[name] += times

        alike: dict[tuple[Template, frozenset[int]], Counter[int]] = {}  # by template and the trees that carry anything
        made: Counter[tuple[Template, frozenset[int]]] = Counter()
        for call, protocol, times, moved, template in self._taken():
            nbytes["collective", call.collective] += moved
            calls["collective", call.collective] += times
            if protocol != "slots":
                calls["protocol", protocol] += times
                continue
            if template is None:
                rule = self._context.rule(call)
                template = self._context.template(call, rule)
                if template is None:
                    add(self._context.program(call, rule), times, times)
                    continue
            lengths = template.lengths(call)
            kind = template, frozenset(lengths)
            made[kind] += times
            alike.setdefault(kind, Counter()).update({tree: times * length for tree, length in lengths.items()})
        for kind, lengths in alike.items():
            add(kind[0].carrying(lengths), 1, made[kind])
        self._host.recorder.tally({name: (nbytes[name], calls[name]) for name in calls}).add()

    def _forget(self) -> None:
        self.flush()
        for starts in self._kinds.values():
            starts.known = 0
        self._kinds.clear()

    def _moved(self, program: Program) -> dict[Name, int]:
        """Bytes by name of a counter: what a program moves by link, tree and protocol."""
        whole = part_of(program, range(program.call.n))
        moved = traffic_of(whole, program, self._context.rank, {}, ()).moved
        return {name: nbytes for name, (nbytes, _) in moved.items() if name[0] != "collective"}
