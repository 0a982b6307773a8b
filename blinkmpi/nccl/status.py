"""What the door in a process says of itself: whose a communicator's calls are, and why (the page of status.h)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import msgspec

from ..errors import ArgumentError
from .counts import OPS, TYPES, page_of

MAGIC = int.from_bytes(b"bnlsttt1", "little")
MEMFD = "/memfd:blinkmpi-nccl-door"
CALLS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll")
KINDS, COMMS, WHY = 256, 64, 256  # as in page.h and status.h
STATES = ("opening", "open", "NCCL's", "ended")
CANNOT = 2


class _Kind(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int64) for n in ("collective", "type", "op", "root", "size_class", "bound", "ours", "nccls")),
        ("why", ctypes.c_char * WHY),
    )


class _Comm(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_uint64 * 2), *((n, ctypes.c_int64) for n in ("n", "rank", "state", "kinds", "ours", "nccls")),
        ("why", ctypes.c_char * WHY), ("kind", _Kind * KINDS),
    )  # fmt: skip


class _Page(ctypes.Structure):
    """``told_t`` of status.h."""

    _fields_ = (
        ("magic", ctypes.c_uint64), ("pid", ctypes.c_int64), ("comms", ctypes.c_int64), ("why", ctypes.c_char * WHY),
        ("comm", _Comm * COMMS),
    )  # fmt: skip


class KindStatus(msgspec.Struct, frozen=True):
    """Calls of one kind.

    Attributes:
        root: -1 where there is none.
        most_bytes: a power of two; the calls carry at most as many, and more than half of that.
        whose: ``ours``, ``NCCL's``, or ``not settled``: NCCL's so far.
        ours, nccls: calls that this process has made.
        why: they stay NCCL's; empty where they do not.
    """

    call: str
    dtype: str
    op: str
    root: int
    most_bytes: int
    whose: str
    ours: int
    nccls: int
    why: str


class CommunicatorStatus(msgspec.Struct, frozen=True):
    """A communicator of NCCL's.

    Attributes:
        state: ``opening``, ``open``, ``NCCL's``, or ``ended``.
        ours, nccls: calls that this process has made; NCCL's alone where the communicator is.
        why: all its calls stay NCCL's; empty where they do not.
    """

    name: str
    ranks: int
    rank: int
    state: str
    ours: int
    nccls: int
    why: str
    kinds: tuple[KindStatus, ...]


class DoorStatus(msgspec.Struct, frozen=True):
    """A process; ``why`` it makes no calls at all, if it makes none."""

    pid: int
    why: str
    communicators: tuple[CommunicatorStatus, ...]
    format: str = "blinkmpi.nccl-status"
    version: int = 1


def read(path: Path) -> DoorStatus:
    """What a page says.

    Raises:
        ArgumentError: if the file cannot be read, or is none of ours.
    """
    page = page_of(path, _Page, MAGIC, "status of the door as this version writes it")
    return DoorStatus(int(page.pid), _text(page.why), tuple(_communicator(c) for c in page.comm[: page.comms]))


def of_process(pid: int) -> DoorStatus | None:
    """What the door in a running process says; None if it has not begun, or is not there.

    Raises:
        ArgumentError: if there is no such process, or it may not be looked into.
    """
    try:
        for link in Path("/proc", str(pid), "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(link).startswith(MEMFD):
                    return read(link)
    except OSError as error:
        raise ArgumentError(f"process {pid} cannot be looked into: {error.strerror}") from error
    return None


def _communicator(c: _Comm) -> CommunicatorStatus:
    state = STATES[c.state]
    kinds = tuple(_kind(k) for k in c.kind[: c.kinds])
    name = f"{c.name[0]:016x}{c.name[1]:016x}"
    return CommunicatorStatus(name, c.n, c.rank, state, c.ours, c.nccls, _text(c.why), kinds)


def _kind(k: _Kind) -> KindStatus:
    whose = "ours" if k.ours else "NCCL's" if k.bound == CANNOT else "not settled"
    op = "" if k.op < 0 else OPS[k.op]
    return KindStatus(
        CALLS[k.collective], TYPES[k.type], op, k.root, 1 << k.size_class, whose, k.ours, k.nccls, _text(k.why)
    )


def _text(words: bytes) -> str:
    return words.decode(errors="replace")
