"""Time the steps of calls on the ranks of a node, kind by kind, with the executor's own code (``blink_time_steps``).

All ranks go through a program in turns. In a turn each does a chunk of every row, and a row that needs what another one
makes is a chunk behind it, as in a call; so the bytes lie in the caches in which a call finds them. Between two turns
all meet. No rank waits inside what is timed, and a rank's time is that of its thread, so a step costs the same however
many ranks share its core.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.call import Call
from ..program.ir import Program, Stage
from ..program.memory import address
from ..program.reduction import dtype_of
from ..transport.host import native
from ..transport.host.host_program import HostProgram, resolve
from ..transport.host.native_rows import rows_of
from ..transport.host.transport import HostTransport
from ..transport.network.bounded import Bounded
from ..util.together import allgather
from .rates import StepCost, StepRates, hardware_of
from .steps import TWO_THREADS, HostSteps, host_steps

Bytes = NDArray[np.uint8]
LEAST_REPEATS, MOST_REPEATS = 3, 12
MOST_WARM_UPS = 6  # a vector comes into a large cache in several passes
REPEATED_BYTES = 192 << 20  # longer vectors have fewer repeats
MEETINGS = 12


def in_one_memory(call: Call, rank: int, send: Bytes, recv: Bytes, *, in_place: bool) -> tuple[Bytes, Bytes]:
    """The send and the receive buffer of a rank in a call, cut out of longer ones."""
    item = call.itemsize
    source, target = send[: call.send_length(rank) * item], recv[: call.recv_count(rank) * item]
    if in_place and call.collective == "allgather":
        start, count = call.block(rank)
        source = recv[start * item : (start + count) * item]
    elif in_place:
        source = recv[: call.send_length(rank) * item]
    return source, target


class Trial(NamedTuple):
    """A call whose steps are timed: what makes its program, the protocol, the place, and whether results go past the
    caches."""

    make: Callable[[], Program]
    protocol: str
    in_place: bool
    stream: bool


def measured(
    host: HostTransport, together: Bounded, trials: Sequence[Trial], buffers: tuple[Bytes, Bytes],
    meet: Callable[[], object],
) -> StepRates:  # fmt: skip
    """What the steps of some calls cost; collective, between calls, and the same on every rank.

    Args:
        buffers: long enough to send all of them from, and to receive them into.
        meet: makes a call without data.
    """
    costs = [cost for trial in trials for cost in _timed(host, together, trial, buffers)]
    samples = []
    for _ in range(MEETINGS):
        together.Barrier()
        start = time.perf_counter()
        for _ in range(MEETINGS):
            meet()
        samples.append((time.perf_counter() - start) / MEETINGS * 1e6)
    slowest = [max(row) for row in zip(*allgather(together, samples, list[float]), strict=True)]
    today = datetime.date.today().isoformat()
    return StepRates(hardware_of(host.n, host.executor_reason), today, float(np.median(slowest)), tuple(costs))


def _timed(host: HostTransport, together: Bounded, trial: Trial, buffers: tuple[Bytes, Bytes]) -> list[StepCost]:
    """The costs of the steps of one call; none if some rank could not read another's memory."""
    program = trial.make()
    steps = replace(host_steps(host, program, trial.protocol), stream=trial.stream)
    call, loaded = program.call, host.load(trial.make, trial.protocol)
    loaded.struct.stream = trial.stream
    runs = _Runs(host, loaded, steps, *in_one_memory(call, host.rank, *buffers, in_place=trial.in_place))
    samples: dict[str, list[float]] = defaultdict(list)
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, REPEATED_BYTES // max(1, call.nbytes)))
    warm_ups = max(1, min(MOST_WARM_UPS, REPEATED_BYTES // max(1, call.nbytes)))
    for repeat in range(-warm_ups, repeats):
        found = runs.once(together)
        for kind, us in found.items() if repeat >= 0 else ():
            samples[kind].append(us)
    everyone = allgather(together, dict(samples), dict[str, list[float]])
    if any(runs.failures(together)):
        return []
    costs = []
    for kind in sorted({kind for found in everyone for kind in found}):
        ranks = [found[kind] for found in everyone if kind in found]
        low, mid, high = np.percentile([sum(row) / len(row) for row in zip(*ranks, strict=True)], (25, 50, 75)).tolist()
        costs.append(StepCost(call.collective, trial.in_place, call.nbytes, kind, mid, low, high))
    return costs


class _Runs:
    """The rows of this rank, to run level by level."""

    def __init__(self, host: HostTransport, loaded: HostProgram, steps: HostSteps, send: Bytes, recv: Bytes) -> None:
        assert host.native is not None
        self._code, self._steps, self._fault = host.native.code, steps, 0
        self._keep = loaded, send, recv
        resolved = resolve(loaded.make(), host.window, host.native, cma=loaded.cma)
        item = dtype_of(steps.program.call.dtype).itemsize
        rows = rows_of(resolved.program, resolved.layout, host.window, resolved.exported, item, {})
        place = {id(stage): i for i, stage in enumerate(resolved.program.stages)}
        levels = steps.levels()
        self._rows: list[tuple[Stage, int, int]] = []  # with its level and its place
        for stage, waits, counter in zip(rows.stages, rows.waits, rows.counters, strict=True):
            if not waits:
                at = loaded.rows.ctypes.data + 8 * (counter - native.DONE_CHUNKS)
                self._rows.append((stage, levels[place[id(stage)]], at))
        self._turns = steps.program.steps + max(levels.values(), default=0)
        self._struct = native.CallStruct.from_buffer_copy(loaded.struct)
        self._struct.send, self._struct.recv = address(send), address(recv)
        sends, receives = loaded.exports
        self._struct.send_bytes, self._struct.recv_bytes = sends * send.nbytes, receives * recv.nbytes
        self._struct.trace = 0
        if loaded.cma:
            self._code.blink_export(ctypes.addressof(self._struct))

    def once(self, together: Bounded) -> dict[str, float]:
        """Microseconds for each MiB, by kind; collective."""
        spent: dict[str, float] = defaultdict(float)
        done: dict[str, float] = defaultdict(float)
        for turn in range(self._turns):
            together.Barrier()
            for stage, level, at in self._rows:
                chunk = turn - level
                if not 0 <= chunk * self._steps.program.chunk_of(stage) < stage.count:
                    continue
                kind = self._steps.kind(stage)
                spent[kind] += self._time(kind, at, chunk)
                done[kind] += self._steps.mib(stage) if chunk == 0 else 0.0
        return {kind: spent[kind] / done[kind] for kind in spent}

    def _time(self, kind: str, at: int, chunk: int) -> float:
        passed = ctypes.c_int64()
        struct = ctypes.addressof(self._struct)
        ns = self._code.blink_time_steps(struct, at, chunk, chunk + 1, ctypes.byref(passed))
        if ns < 0:
            self._fault = int(self._struct.fault)
            return 0.0
        return float(passed.value if kind.endswith(TWO_THREADS) else ns) / 1e3

    def failures(self, together: Bounded) -> list[int]:
        """What every rank met where it could not read another's memory: errno, or 0."""
        return allgather(together, self._fault, int)
