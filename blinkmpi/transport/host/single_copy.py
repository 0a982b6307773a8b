"""The protocol ``cma``: what lies in its writer's buffer crosses in one copy, by ``process_vm_readv``.

A program is the same by every protocol. Through slots, a chunk is copied into the channel and out of it. By cma ("cross
memory attach"), its reader copies it straight out of the writer's buffer, and the writer may leave the call when all
its readers have read. What can be read there: what a rank sends unchanged, also an operand of a reduction, and what it
has received or completed and keeps. What a rank only passes on (an inner rank of a gather's path, a sum that is not
complete) goes through slots.

A rank reads the memory of others and writes only its own: reading from a rank that aborted is harmless; writing could
corrupt its memory.

The kernel lets a process read another's memory if it might trace it: the same user, and no objection by Yama
(``kernel.yama.ptrace_scope``), seccomp or namespaces. So every rank tries it on every other when the transport opens
(capabilities.py). We do not ask for permission (``prctl(PR_SET_PTRACER)``): whether a process is open to all others of
its user is not ours to decide.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ...program.ir import Program
from ...program.reduction import accumulator_of, dtype_of
from .native import Native

LONG_BYTES = 16 << 20  # chunks of what is read from send buffers alone: no slot bounds them


class ExportedChunks(NamedTuple):
    """Where a channel's values lie: in the writer's send or receive buffer, from this element on."""

    buffer: Literal["send", "recv"]
    offset: int


def exported_channels(program: Program) -> dict[int, ExportedChunks]:
    """The channels of a program that need no slots, because their values lie in the writers' buffers."""
    call = program.call
    wide = bool(call.op) and accumulator_of(call.dtype) != dtype_of(
        call.dtype
    )  # the stored value is rounded to dtype, the one that is sent is not
    found: dict[int, ExportedChunks] = {}
    for stage in program.stages:
        if stage.local is not None and not stage.ins:
            found.update(dict.fromkeys(stage.outs, ExportedChunks("send", stage.local)))
        elif stage.store is not None:
            kept = [c for c in stage.outs if not (wide and program.channels[c].wide)]
            found.update(dict.fromkeys(kept, ExportedChunks("recv", stage.store)))
    return found


def in_long_chunks(program: Program, exported: Mapping[int, ExportedChunks], itemsize: int) -> Program:
    """The program with longer chunks if all is read from send buffers, so that nobody waits for a part of anything."""
    if not exported or len(exported) < len(program.channels) or any(at.buffer == "recv" for at in exported.values()):
        return program
    return replace(program, chunk=max(program.chunk, LONG_BYTES // itemsize))


class Helper:
    """A second thread for copies from other processes, where half of the ranks only wait until they were read.

    One reader cannot fill a machine's memory bandwidth, and the cores of ranks that wait are idle. The thread starts
    when a program first needs it, makes no call of MPI or Python, and sleeps between copies.
    """

    def __init__(self, loaded: Native | None, ranks: int) -> None:
        self._native = loaded if ranks <= len(os.sched_getaffinity(0)) else None
        self._at = 0
        self.failure = ""  # why it could not be started

    def address(self, program: Program, exported: Mapping[int, ExportedChunks]) -> int:
        """The helper that executor.c takes for this program; 0 for none."""
        return self.started() if self.serves(program, exported) else 0

    def started(self) -> int:
        """The helper, which is started now if it has not been; 0 where there is none."""
        if self._native is not None and not self._at and not self.failure:
            self._at = self._native.code.blink_help() or 0
            self.failure = "" if self._at else os.strerror(ctypes.get_errno())
        return self._at

    def serves(self, program: Program, exported: Mapping[int, ExportedChunks]) -> bool:
        """Whether a program has a helper read, as far as one can be started."""
        ranks = {r for channel in program.channels for r in (channel.writer, *channel.readers)}
        busy = {s.rank for s in program.stages if s.store is not None or not exported.keys() >= {*s.outs}}
        return self._native is not None and bool(exported) and 2 * len(busy) <= len(ranks)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        at, self._at, native = self._at, 0, self._native
        self._native = None
        if at and native is not None:
            native.code.blink_help_no_more(at)
