"""The protocol ``cma``: what lies in its writer's buffer crosses in one copy, by ``process_vm_readv``.

A program is the same on every protocol. By slots a chunk is copied into the
channel and out of it; by cma ("cross memory attach") its reader copies it
straight out of the writer's buffer, and the writer may leave the call when all
its readers have read. What can be read there: what a rank sends unchanged, an
operand of a reduction too, and what it has received or completed and keeps.
What a rank only passes on (an inner rank of a gather's path, a sum that is not
complete) goes through slots.

A rank reads the memory of others and writes its own alone: who has left a call
by an error may be read from in vain, but never written to.

The kernel lets a process read another's memory if it might trace it: the same
user, and no objection by Yama (``kernel.yama.ptrace_scope``), seccomp or
namespaces. So every rank tries it on every other when the transport opens
(agree.py). We do not ask for permission (``prctl(PR_SET_PTRACER)``): to open a
process to all others of its user is not ours to decide.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ...program.ir import Program
from .native import Native

LONG_BYTES = 16 << 20  # chunks of what is read from send buffers alone: no slot bounds them


class Lent(NamedTuple):
    """Where a channel's values lie: in the writer's send or receive buffer, from this element on."""

    buffer: Literal["send", "recv"]
    offset: int


def lent_channels(program: Program) -> dict[int, Lent]:
    """The channels of a program that need no slots, because their values lie in the writer's buffers."""
    found: dict[int, Lent] = {}
    for stage in program.stages:
        if stage.local is not None and not stage.ins:
            found.update(dict.fromkeys(stage.outs, Lent("send", stage.local)))
        elif stage.store is not None:
            found.update(dict.fromkeys(stage.outs, Lent("recv", stage.store)))
    return found


def in_long_chunks(program: Program, lent: Mapping[int, Lent], itemsize: int) -> Program:
    """The program with longer chunks if all is read from send buffers, so that nobody waits for a part of anything."""
    if not lent or len(lent) < len(program.channels) or any(at.buffer == "recv" for at in lent.values()):
        return program
    return replace(program, chunk=max(program.chunk, LONG_BYTES // itemsize))


class Helper:
    """A second thread for copies from other processes, where half of the ranks only wait to be read from.

    One reader cannot fill a machine's memory bandwidth, and the cores of those who wait are idle. The thread is started
    when it is first needed, makes no call of MPI or Python, and sleeps between copies.
    """

    def __init__(self, loaded: Native | None, ranks: int) -> None:
        self._native = loaded if ranks <= len(os.sched_getaffinity(0)) else None
        self._at = 0
        self.why_not = ""  # if it was needed and could not be started

    def address(self, program: Program, lent: Mapping[int, Lent]) -> int:
        """The helper that executor.c takes for this program; 0 for none."""
        ranks = {r for channel in program.channels for r in (channel.writer, *channel.readers)}
        busy = {stage.rank for stage in program.stages if stage.store is not None or not lent.keys() >= {*stage.outs}}
        if self._native is None or not lent or 2 * len(busy) > len(ranks):
            return 0
        if not self._at and not self.why_not:
            self._at = self._native.code.blink_help() or 0
            self.why_not = "" if self._at else os.strerror(ctypes.get_errno())
        return self._at

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        at, self._at, native = self._at, 0, self._native
        self._native = None
        if at and native is not None:
            native.code.blink_help_no_more(at)
