"""The road ``cma``: what lies in its writer's buffer crosses in one copy, by ``process_vm_readv``.

A program is the same on every road. By slots a chunk is copied into the
channel and out of it; by cma ("cross memory attach") its reader copies it
straight out of the writer's buffer, and the writer may leave the call when all
its readers have read. What can be read there, in collectives that only move
bytes: what a rank sends, and what it has received and keeps. What a rank only
passes on (an inner rank of a gather's path) goes through slots. Reductions do
so, too: reading their operands by cma won nothing in trials.

A rank reads the memory of others and writes its own alone: who has left a call
by an error may be read from in vain, but never written to.

The kernel lets a process read another's memory if it might trace it: the same
user, and no objection by Yama (``kernel.yama.ptrace_scope``), seccomp or
namespaces. So every rank tries it on every other when the transport opens
(agree.py). We do not ask for permission (``prctl(PR_SET_PTRACER)``): to open a
process to all others of its user is not ours to decide.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..program import REDUCTIONS, Program


class Lent(NamedTuple):
    """Where a channel's values lie: in the writer's send or receive buffer, from this element on."""

    buffer: Literal["send", "recv"]
    offset: int


def lent_channels(program: Program) -> dict[int, Lent]:
    """The channels of a program that need no slots, because their values lie in the writer's buffers."""
    found: dict[int, Lent] = {}
    if program.call.collective in REDUCTIONS:
        return found
    for lane in program.lanes:
        if lane.local is not None:
            found.update(dict.fromkeys(lane.outs, Lent("send", lane.local)))
        elif lane.store is not None:
            found.update(dict.fromkeys(lane.outs, Lent("recv", lane.store)))
    return found
