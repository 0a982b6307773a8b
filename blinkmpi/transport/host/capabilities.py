"""Agree on executor and protocol as the transport opens: whether all ranks have C, and can read one another."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

from ...errors import ArgumentError
from ...util.together import Comm, allgather, bcast
from ..network.messages import NodeMessages
from . import native
from .shared_window import MESSAGE_BYTES, SharedWindow
from .shots import NodeShots


class Host(NamedTuple):
    """Where a rank runs: the name of its machine, and the cores that it may use there, as bits in base 16."""

    name: str
    cores: str


def own_host() -> Host:
    """Where this rank runs."""
    return Host(MPI.Get_processor_name(), f"{sum(1 << core for core in os.sched_getaffinity(0)):x}")


def cores_of(hosts: Sequence[Host]) -> int:
    """How many cores ranks of one machine may use, all together: launchers bind each to its own."""
    found = 0
    for host in hosts:
        found |= int(host.cores, 16)
    return found.bit_count()


@dataclass(frozen=True)
class Known:
    """What the ranks of a communicator have agreed on that holds for some of them, too.

    Args:
        native, executor: the C executor, and why it is taken, or not.
        no_cma: why they cannot read one another's memory, empty if they can; None where they have to find out.
        has_shots: whether C sends the messages of short calls between nodes.
        hosts: where every rank runs.
    """

    native: native.Native | None
    executor: str
    no_cma: str | None
    has_shots: bool
    hosts: Sequence[Host]

    def of(self, ranks: Sequence[int]) -> Known:
        """What holds for these ranks."""
        return replace(self, hosts=[self.hosts[r] for r in ranks])


def agree_on_executor(comm: Comm, node: Comm, wanted: str) -> tuple[native.Native | None, str]:
    """The C executor if every rank has it (or ``wanted`` says numpy), and why; the first rank of a node compiles it."""
    if wanted not in ("auto", "c", "numpy"):
        raise ArgumentError(f"executor {wanted!r}: expected auto, c or numpy")
    if wanted == "numpy":
        return None, "NumPy executor, as asked"
    found: tuple[str | None, str] | None = None
    if node.rank == 0:
        try:
            built, why = native.build()
            found = None if built is None else str(built), why
        except Exception as error:  # the others wait for an answer, also where this rank fails
            found = None, f"the C executor cannot be built: {error!r}"
    path, why = bcast(node, found, tuple[str | None, str])
    loaded: native.Native | None = None
    if path is not None:
        try:
            loaded = native.load(Path(path), why)
        except OSError as error:
            why = f"rank {comm.rank} cannot load {path}: {error}"
    reasons = allgather(comm, None if loaded else why, str | None)
    missing = next((r for r in reasons if r is not None), None)
    if missing is None:
        bare = "" if loaded and loaded.repeated else "; calls are looked up in Python, whose headers were not found"
        return loaded, f"C executor, compiled by {why}{bare}"
    if wanted == "c":
        raise ArgumentError(f"executor='c', but there is none: {missing}; install a C compiler or use executor='auto'")
    return None, f"NumPy executor: {missing}"


def open_shots(
    comm: Comm, loaded: native.Native | None, messages: NodeMessages, window: SharedWindow
) -> tuple[NodeShots | None, str]:
    """Messages of calls in one shot, if C runs programs and all ranks find MPI's functions; in words, or why not."""
    if loaded is None:
        return None, ""
    from .mpi_functions import SHOTS, addresses

    found = addresses(*SHOTS)
    missing = next((why for why in allgather(comm, found if isinstance(found, str) else "", str) if why), "")
    if missing or isinstance(found, str):
        return None, f"; {missing}"
    shots = NodeShots(found, messages, window, MESSAGE_BYTES, partial(native.messages_done, loaded))
    return shots, ", those of short calls sent by C"


def agree_on_cma(comm: Comm, loaded: native.Native | None, *, disabled: bool) -> str:
    """Why the ranks cannot read one another's memory, the same on every rank; empty if all can read from all."""
    if disabled:
        return "BLINKMPI_CMA_DISABLE"
    if loaded is None:
        return "the NumPy executor has slots alone"
    token = ctypes.c_uint64(secrets.randbits(64))
    shown = allgather(comm, (os.getpid(), ctypes.addressof(token), token.value), tuple[int, int, int])
    failures = allgather(
        comm, _failure(loaded, comm.rank, shown), str
    )  # and nobody reads any more when this is through
    return next((failure for failure in failures if failure), "")


def _failure(loaded: native.Native, rank: int, shown: list[tuple[int, int, int]]) -> str:
    """What goes wrong as this rank reads the tokens of all ranks: (process, address, value) each."""
    seen = ctypes.c_uint64()
    for peer, (pid, address, value) in enumerate(shown):
        error = loaded.code.blink_read(pid, ctypes.addressof(seen), ctypes.sizeof(seen), address)
        if error or seen.value != value:
            why = os.strerror(error) if error else "another process has its number"
            return f"rank {rank} cannot read the memory of rank {peer} (process {pid}): {why}{_yama()}"
    return ""


def _yama() -> str:
    """What Yama says, where it is."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="utf-8") as file:
            return f"; kernel.yama.ptrace_scope is {file.read().strip()}"
    except OSError:  # no Yama here
        return ""
