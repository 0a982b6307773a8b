"""What processes asked of NCCL: read from the pages that ``count.c`` keeps, and added up."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import ArgumentError
from .library import FOLDER

MAGIC = int.from_bytes(b"blncunt1", "little")
MEMFD = "/memfd:blinkmpi-nccl-counts"
FUNCTIONS = (
    "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Gather", "Scatter", "Send", "Recv",
)  # fmt: skip
TYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16",
    "float8_e4m3", "float8_e5m2",
)  # fmt: skip
OPS = ("sum", "prod", "max", "min", "avg", "a program's own")


class _Comm(ctypes.Structure):
    _fields_ = (("ranks", ctypes.c_int64), ("rank", ctypes.c_int64))


class _Record(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("comm", "function", "type", "op", "size_class", "calls", "bytes", "grouped", "captured")
    )


class _Page(ctypes.Structure):
    """``page_t`` of count.c."""

    _fields_ = (
        ("magic", ctypes.c_uint64), ("pid", ctypes.c_int64), ("comms", ctypes.c_int64), ("records", ctypes.c_int64),
        ("lost", ctypes.c_int64), ("name", ctypes.c_char * 64), ("comm", _Comm * 256), ("record", _Record * 4096),
    )  # fmt: skip


class Calls(msgspec.Struct, frozen=True):
    """Calls that are alike.

    Attributes:
        communicator: its number in its process, as they were met.
        ranks: of the communicator; 0 if NCCL did not say.
        most_bytes: a power of two that none of them is longer than; the least one of these. 0: they carry nothing.
        nbytes: of all together, counted as nccl-tests does: of the longer of the two buffers.
        grouped: how many were in a group with others.
        captured: how many were put into a CUDA graph.
    """

    communicator: int
    ranks: int
    function: str
    dtype: str
    op: str
    most_bytes: int
    calls: int
    nbytes: int
    grouped: int
    captured: int


class Process(msgspec.Struct, frozen=True):
    """What one process asked.

    Attributes:
        communicators: (ranks, own rank) of each, as they were met.
        lost: calls of more kinds, or communicators, than there is room for.
    """

    pid: int
    name: str
    communicators: tuple[tuple[int, int], ...]
    calls: tuple[Calls, ...]
    lost: int


class Kind(msgspec.Struct, frozen=True):
    """Calls that are alike, of all processes that made any: of communicators of one size.

    Attributes:
        fewest, most: calls of one process.
        nbytes, grouped, captured: of all processes.
    """

    function: str
    dtype: str
    op: str
    ranks: int
    most_bytes: int
    processes: int
    fewest: int
    most: int
    nbytes: int
    grouped: int
    captured: int


class Report(msgspec.Struct, frozen=True):
    """What ``blinkmpi nccl count`` writes as JSON."""

    command: tuple[str, ...]
    exit_code: int
    kinds: tuple[Kind, ...]
    processes: tuple[Process, ...]
    format: str = "blinkmpi.nccl-counts"
    version: int = 1


P = TypeVar("P", bound=ctypes.Structure)


def page_of(path: Path, kind: type[P], magic: int, what: str) -> P:
    """The page that a process keeps in a file.

    Args:
        magic: the page's first word.
        what: what it should have, for the error.

    Raises:
        ArgumentError: if the file cannot be read, or is none of ours.
    """
    try:
        with path.open("rb") as file:
            data = file.read(ctypes.sizeof(kind) + 1)
    except OSError as error:
        raise ArgumentError(f"cannot read {str(path)!r}: {error.strerror}") from error
    if len(data) != ctypes.sizeof(kind) or (page := kind.from_buffer_copy(data)).magic != magic:
        raise ArgumentError(f"{str(path)!r} has no {what}")
    return page


def read(path: Path) -> Process:
    """What a process counted, while it runs or after it.

    Raises:
        ArgumentError: if the file cannot be read, or is none of ours.
    """
    page = page_of(path, _Page, MAGIC, "counts of NCCL's calls as this version writes them")
    comms = tuple((int(c.ranks), int(c.rank)) for c in page.comm[: page.comms])
    calls = tuple(
        Calls(
            r.comm, comms[r.comm][0], FUNCTIONS[r.function], _name(TYPES, r.type), _name(OPS, r.op),
            1 << r.size_class if r.size_class >= 0 else 0, r.calls, r.bytes, r.grouped, r.captured,
        )
        for r in page.record[: page.records]
    )  # fmt: skip
    return Process(page.pid, page.name.decode(errors="replace"), comms, calls, page.lost)


def read_folder(folder: Path) -> list[Process]:
    """What all processes counted that were told this folder."""
    return [read(path) for path in sorted(folder.glob("*.counts"))]


def read_process(pid: int) -> Process:
    """What a running process has counted so far.

    Raises:
        ArgumentError: if there is no such process, it may not be looked into, or it counts nothing.
    """
    own = Path("/proc", str(pid))
    try:
        for link in (own / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(link).startswith(MEMFD):
                    return read(link)
        told = dict(word.partition("=")[::2] for word in (own / "environ").read_bytes().decode("latin-1").split("\0"))
    except OSError as error:
        raise ArgumentError(f"process {pid} cannot be looked into: {error.strerror}") from error
    found = sorted(Path(told[FOLDER]).glob(f"{pid}-*.counts")) if told.get(FOLDER) else []
    if not found:
        raise ArgumentError(
            f"process {pid} has met no library of ours: it has made no communicator of NCCL's yet, or none from "
            "Python; start it by `blinkmpi nccl run` or `blinkmpi nccl count`"
        )
    return read(found[-1])


def kinds(processes: Iterable[Process]) -> tuple[Kind, ...]:
    """The calls of all processes by kind: by function, then the largest communicators and the longest first."""
    rows: dict[tuple[int, str, str, int, int], dict[int, list[Calls]]] = defaultdict(lambda: defaultdict(list))
    for number, process in enumerate(processes):
        for calls in process.calls:
            key = FUNCTIONS.index(calls.function), calls.dtype, calls.op, -calls.ranks, -calls.most_bytes
            rows[key][number].append(calls)
    found = []
    for (function, dtype, op, ranks, most), by_process in sorted(rows.items()):
        every = [calls for made in by_process.values() for calls in made]
        each = [sum(calls.calls for calls in made) for made in by_process.values()]
        sums = (sum(getattr(calls, name) for calls in every) for name in ("nbytes", "grouped", "captured"))
        found.append(Kind(FUNCTIONS[function], dtype, op, -ranks, -most, len(each), min(each), max(each), *sums))
    return tuple(found)


def _name(names: tuple[str, ...], code: int) -> str:
    """A code of NCCL's in words; one that came after this was written stays a number."""
    return "" if code < 0 else names[code] if code < len(names) else str(code)
