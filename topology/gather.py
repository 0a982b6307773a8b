"""The live machine: every process says where it is, all agree on one topology (Blink section 3, "probe").

The communicator is handed in; nothing here imports MPI. The exchanges: who shares a node with
whom, the parts (with the copy rate, measured while all ranks of a node copy at once through
memory that they share, and the rate between nodes), and the topology, which rank 0 builds and
every rank checks. A rank that fails takes part in the exchange all the same and sends its error,
so that all ranks raise and none hangs.

CPU ranks of a node share one memory that all of them read: a ``memory`` switch with a link
each way for every rank. Two ranks are on one node if the launcher says so (``node_comm``), and
boot id and the device of /dev/shm are equal (two containers may share a host and yet no memory);
``BLINKMPI_NODE_ID`` replaces the latter two.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from ..errors import RemoteError, TopologyError
from ..util.codec import Value
from .gpu import GpuFacts
from .gpus import from_gpus
from .machines import CPU_MBPS, NET_MBPS
from .model import Device, Link, Origin, Switch, Topology
from .wire import Messages, even_out, net_rate

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

T = TypeVar("T")

BOOT_ID = "/proc/sys/kernel/random/boot_id"
SHM = "/dev/shm"

SLOT_BYTES = 256 << 10
_VECTOR_BYTES = 32 << 20  # of a rank: with its neighbours', more than the caches hold
_PAGE_BYTES = 4096
_SECONDS = 0.03
_MAX_THREADS = 32  # of one process that copy at once; with more, the interpreter's lock is what they measure


class Comm(Messages, Protocol):
    """What is asked of a communicator: mpi4py's lower-case methods, and messages if there are several nodes."""

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Everybody's object, in rank order."""

    def bcast(self, obj: Any, root: int, /) -> Any:
        """The root's object."""


class Part(Value, frozen=True):
    """What one process says about itself; ``place`` is equal for processes that can share memory."""

    host: str
    pid: int
    place: str
    cores: tuple[int, ...]
    copy_mbps: int | None = None
    leader: int = 0
    net_mbps: int | None = None  # of the leader: its node's, to and from the network


class _Message(Value, frozen=True):
    """One rank's turn in an exchange: its part, or its error."""

    part: Part | None = None
    error: str = ""


def gather(comm: Comm, node_comm: Comm, *, measure: bool = True) -> Topology:
    """Find the machine that the ranks of ``comm`` run on; collective.

    Args:
        node_comm: this rank's communicator of the ranks that share memory, as the launcher sees it.
        measure: time memory copies (30 ms); otherwise the catalogue's rate is taken.

    Raises:
        RemoteError: another rank failed; the message names it and holds its error.
        BlinkError: this rank's own failure.
    """
    parts = exchange(comm, node_comm, measure=measure)
    return _from_rank_0(comm, lambda: cpu_topology(parts))


class GpuMachine(NamedTuple):
    """The machine of a job with a GPU per rank, or why there is none."""

    topology: Topology | None
    reason: str = ""


def gather_gpus(comm: Comm, node_comm: Comm, facts: GpuFacts | Exception | str) -> GpuMachine:
    """Find the machine that the ranks' GPUs make; collective, with one result on all ranks.

    Args:
        node_comm: as for :func:`gather`.
        facts: what :func:`.probe.probe` gave for this rank's GPU; or the error with which it failed, which becomes an
            error on all ranks; or, in words, why this rank has no GPU.

    Raises:
        RemoteError: another rank's probe failed; the message names it and holds its error.
        BlinkError: this rank's own failure.
        TopologyError: the same on all ranks, for facts that make no machine: two ranks on one GPU, a GPU in MIG mode.
    """
    parts = exchange(comm, node_comm, measure=False)
    turn = _GpuMessage(facts=facts) if isinstance(facts, GpuFacts) else _GpuMessage(none=str(facts) or "no GPU")
    if isinstance(facts, Exception):
        turn = _GpuMessage(error=_text_of(facts))
    turns = [msgspec.json.decode(t, type=_GpuMessage) for t in comm.allgather(msgspec.json.encode(turn))]
    _agree([t.error for t in turns], facts)
    without = [rank for rank, t in enumerate(turns) if t.facts is None]
    if without:
        some = "no rank has a GPU" if len(without) == len(turns) else f"rank {','.join(map(str, without))} has no GPU"
        return GpuMachine(None, f"{some}: {turns[without[0]].none}")
    everybody = [t.facts for t in turns if t.facts is not None]
    nodes, hosts = nodes_of(parts), [part.host for part in parts]
    made = _attempt(
        lambda: from_gpus(everybody, nodes=nodes, hosts=hosts)
    )  # the same facts everywhere, the same result
    results = comm.allgather(_text_of(made) if isinstance(made, Exception) else f"fingerprint {made.fingerprint}")
    if len(set(results)) > 1:
        raise TopologyError(
            f"the ranks make different machines of the same GPUs: {results}; start one version everywhere"
        )
    if isinstance(made, Exception):
        raise made
    return GpuMachine(made)


class _GpuMessage(Value, frozen=True):
    """One rank's turn: its GPU, or why it has none, or its error."""

    facts: GpuFacts | None = None
    none: str = ""
    error: str = ""


def _from_rank_0(comm: Comm, build: Callable[[], Topology]) -> Topology:
    """What rank 0 builds, checked by every rank; its error on every rank."""
    built = _attempt(lambda: build().to_json()) if comm.rank == 0 else ""
    text, error = comm.bcast(("", _text_of(built)) if isinstance(built, Exception) else (built, ""), 0)
    _agree([error], built)
    checked = _attempt(lambda: Topology.from_json(text, source="topology from rank 0"))
    return _agree(comm.allgather(_text_of(checked)), checked)


def exchange(comm: Comm, node_comm: Comm, *, measure: bool = True) -> tuple[Part, ...]:
    """Everybody's part in rank order, with the leader (lowest rank) of its launcher's node; collective.

    Raises:
        RemoteError: another rank failed.
        BlinkError: this rank's own failure.
    """
    part = _attempt(this_process)
    ranks = node_comm.allgather(comm.rank)
    rate = _measured(comm.rank, ranks, node_comm) if measure else None
    firsts = sorted(set(comm.allgather(min(ranks))))
    net = _attempt(lambda: net_rate(comm, firsts)) if measure else None

    def own_part() -> Part:
        if isinstance(part, Exception):
            raise part
        if isinstance(rate, Exception):
            raise rate
        if isinstance(net, Exception):
            raise net
        return msgspec.structs.replace(part, copy_mbps=rate, leader=min(ranks), net_mbps=net)

    own = _attempt(own_part)
    message = _Message(error=_text_of(own)) if isinstance(own, Exception) else _Message(part=own)
    messages = [msgspec.json.decode(t, type=_Message) for t in comm.allgather(msgspec.json.encode(message))]
    _agree([m.error for m in messages], own)
    return tuple(m.part for m in messages if m.part is not None)


def _measured(rank: int, ranks: list[int], node_comm: Comm) -> int | Exception:
    """This rank's copy rate among its neighbours, or what went wrong; every exchange is taken part in."""
    leader, mine = rank == min(ranks), ranks.index(rank)
    path = node_comm.allgather(f"{SHM}/blinkmpi-{uuid.uuid4().hex}" if leader else "")[ranks.index(min(ranks))]
    slots: list[Bytes] | Exception = ValueError("not mapped yet")
    for turn in (True, False):  # the leader makes the file, then the others open it
        if leader == turn:
            slots = _attempt(lambda: shared_slots(path, len(ranks), create=leader))
        node_comm.allgather(None)
    if leader and not isinstance(slots, Exception):
        os.unlink(path)  # everybody has it mapped
    if isinstance(slots, FileNotFoundError):  # no memory in common after all: `place` will tell the two apart
        slots = [page_aligned(SLOT_BYTES)]

    def prepare() -> Callable[[], int]:
        if isinstance(slots, Exception):
            raise slots
        return copy_test(slots, mine % len(slots))

    test = _attempt(prepare)
    node_comm.allgather(None)  # all start at once
    return test if isinstance(test, Exception) else _attempt(test)


def this_process() -> Part:
    """Describe the calling process.

    Raises:
        TopologyError: where the system does not say which memory it shares with whom.
    """
    host = socket.gethostname()
    place = os.environ.get("BLINKMPI_NODE_ID", "")
    if not place:
        try:
            with open(BOOT_ID, encoding="ascii") as file:
                place = f"{file.read().strip()}/{os.stat(SHM).st_dev}"
        except OSError as error:
            raise TopologyError(
                f"{host}: cannot tell which processes share memory: {error.filename}: {error.strerror}; "
                "set BLINKMPI_NODE_ID to a text that is the same for the ranks of one machine and no other"
            ) from error
    if hasattr(os, "sched_getaffinity"):
        cores = tuple(sorted(os.sched_getaffinity(0)))
    else:
        cores = tuple(range(os.cpu_count() or 1))
    return Part(host=host, pid=os.getpid(), place=place, cores=cores)


def copy_test(slots: Sequence[Bytes], mine: int) -> Callable[[], int]:
    """Prepare a test; the call of the result times copies for 30 ms and gives their rate in MB/s.

    It copies as collectives do: from a long private vector into the slot ``slots[mine]``, then from the neighbour's
    slot, which another core has just written, back into the vector. The time that the system gives to others counts:
    it is the rate of a rank among its neighbours that is asked for. All is page-aligned: where the destination lies 16
    bytes past the source modulo the page, glibc's memcpy is several times slower.
    """
    vector = page_aligned(_VECTOR_BYTES)
    own, other = slots[mine], slots[(mine + 1) % len(slots)]
    pairs = [(at, (at + _VECTOR_BYTES // 2) % _VECTOR_BYTES) for at in range(0, _VECTOR_BYTES, SLOT_BYTES)]

    def timed() -> int:
        import numpy as np

        copied, start = 0, time.perf_counter()
        while True:
            for source, target in pairs:
                np.copyto(own, vector[source : source + SLOT_BYTES])
                np.copyto(vector[target : target + SLOT_BYTES], other)
                copied += 2 * SLOT_BYTES
                if (spent := time.perf_counter() - start) > _SECONDS:
                    return max(1, round(copied / spent / 1e6))

    return timed


def page_aligned(size: int) -> Bytes:
    """A private buffer whose pages have been touched."""
    import numpy as np

    raw = np.ones(size + _PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % _PAGE_BYTES
    return raw[start : start + size]


def shared_slots(path: str, count: int, *, create: bool) -> list[Bytes]:
    """Map ``count`` slots of the file ``path``, made here or by another process of this machine."""
    import numpy as np

    with open(path, "x+b" if create else "r+b") as file:
        if create:
            file.truncate(count * SLOT_BYTES)
        memory = np.memmap(file, np.uint8, "r+", shape=(count * SLOT_BYTES,))
    return [memory[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for i in range(count)]


def nodes_of(parts: Sequence[Part]) -> list[int]:
    """The node of every rank, from 0 in order of appearance: launcher and system must agree that memory is shared."""
    node_of: dict[tuple[int, str], int] = {}
    return [node_of.setdefault((part.leader, part.place), len(node_of)) for part in parts]


def cpu_topology(parts: Sequence[Part]) -> Topology:
    """Build the topology of CPU ranks from their parts, rank by rank.

    All ranks of a node get one rate, the mean of theirs to two digits: ranks of one memory differ by noise,
    and uneven links would make a needlessly uneven plan that changes from run to run.
    """
    at = nodes_of(parts)
    members = [[rank for rank, node in enumerate(at) if node == wanted] for wanted in sorted(set(at))]
    devices: dict[int, Device] = {}
    links: list[Link] = []
    facts: list[str] = []
    n, several = len(parts), len(members) > 1
    net = n + len(members)
    measured = [parts[ranks[0]].net_mbps for ranks in members]
    known = [mbps for mbps in measured if mbps is not None]
    wires: list[int] = even_out(known) if len(known) == len(members) else [NET_MBPS] * len(members)
    net_origin: Origin = "measured" if len(known) == len(members) else "table"
    for node, ranks in enumerate(members):
        memory = n + node
        rate, origin = _node_rate([parts[r].copy_mbps for r in ranks])
        for index, rank in enumerate(ranks):
            devices[rank] = Device("cpu", node, index, host=parts[rank].host)
            links += [Link(rank, memory, "memory", 1, rate, origin), Link(memory, rank, "memory", 1, rate, origin)]
        if several:
            links += [Link(a, b, "net", 1, wires[node], net_origin) for a, b in ((memory, net), (net, memory))]
        cores = len({c for r in ranks for c in parts[r].cores})
        facts.append(
            f"{parts[ranks[0]].host}: {_count(len(ranks), 'rank')} on {_count(cores, 'core')}, "
            f"{'each copies' if origin == 'measured' else 'assumed'} {rate / 1000:g} GB/s with all at work"
        )
    switches = [Switch("memory", node, f"memory@{node}" if several else "memory") for node in range(len(members))]
    if several:
        switches.append(Switch("net", -1, "network"))
        rates = ", ".join(f"{mbps / 1000:g}" for mbps in (wires if len(set(wires)) > 1 else wires[:1]))
        facts.append(
            f"between nodes {rates} GB/s {'measured' if net_origin == 'measured' else 'assumed, not measured'}"
        )
    return Topology(
        name=f"cpu:{n}" + (f" on {len(members)} nodes" if several else ""),
        devices=tuple(devices[r] for r in range(n)),
        switches=tuple(switches),
        links=tuple(links),
        source="; ".join(facts),
    ).check()


def this_machine() -> Topology:
    """This machine from one process without a launcher: a CPU rank on each core that it may use."""
    part = this_process()
    at_once = part.cores[:_MAX_THREADS]
    slots = [page_aligned(SLOT_BYTES) for _ in at_once]
    tests = [copy_test(slots, i) for i in range(len(slots))]
    with ThreadPoolExecutor(len(at_once)) as pool:  # NumPy copies without the interpreter's lock
        rates = list(pool.map(lambda test: test(), tests))
    measured = [msgspec.structs.replace(part, copy_mbps=rate) for rate in rates]
    return cpu_topology(measured + [part] * (len(part.cores) - len(at_once)))


def _node_rate(rates: Sequence[int | None]) -> tuple[int, Origin]:
    """One rate for a node's ranks: the mean of the measured ones to two digits, or the table's."""
    known = [r for r in rates if r is not None]
    if not known:
        return CPU_MBPS, "table"
    mean = sum(known) // len(known)
    unit = 10 ** max(0, len(str(mean)) - 2)
    return max(1, (mean + unit // 2) // unit * unit), "measured"


def _attempt(work: Callable[[], T]) -> T | Exception:
    """Do ``work`` and return its result, or its error for the next exchange."""
    try:
        return work()
    except Exception as error:
        return error


def _agree(errors: Sequence[str], own: T | Exception) -> T:
    """Return ``own`` if nobody failed; else raise this rank's own error, or the first other's."""
    if isinstance(own, Exception):
        raise own
    failed = [rank for rank, text in enumerate(errors) if text]
    if failed:
        more = f" (so did ranks {failed[1:]})" if len(failed) > 1 else ""
        raise RemoteError(f"rank {failed[0]} failed while the machine was gathered{more}: {errors[failed[0]]}")
    return own


def _text_of(result: object) -> str:
    """What the others are told of a result: nothing, or the error."""
    return f"{type(result).__name__}: {result}" if isinstance(result, Exception) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
