"""Find the live machine: every process describes itself, and all agree on one topology (Blink section 3, "probe").

The communicator is an argument; nothing here imports MPI. The ranks exchange who shares a node with whom, then what
each process says of itself (with its copy rate, measured while all ranks of a node copy at once through memory that
they share, and the rate between nodes), then the topology, which rank 0 builds and every rank checks. A rank that fails
still takes part in each exchange and sends its error, so that all ranks raise and none hangs.

CPU ranks of a node share one memory that all of them read: a ``memory`` switch with a link each way for every rank. Two
ranks are on one node if the launcher says so (``node_comm``), and boot id and the device of /dev/shm are equal (two
containers on one host may share no memory); ``BLINKMPI_NODE_ID`` replaces the latter two.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import TopologyError
from ..util.codec import Value
from ..util.shared_memory import NO_ROOM, SHM, NotShared, shared_file
from ..util.text import plural, ranks_text
from ..util.together import Comm, allgather, attempt, failure_of, from_root, gathered, result_of, together
from .model import Device, Link, Origin, Switch, Topology
from .network_rate import MessagingComm, even_out, net_rate, rounded

if TYPE_CHECKING:
    import numpy as np

    from .gpu import GpuFacts

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BOOT_ID = "/proc/sys/kernel/random/boot_id"
SLOT_BYTES = 256 << 10
_VECTOR_BYTES = 32 << 20  # of a rank; together with its neighbours' more than the caches hold
_PAGE_BYTES = 4096
_SECONDS = 0.03
_DURING = "while the machine was gathered"
NOBODY = "no rank has a GPU"  # how a reason begins that holds for a part of the ranks, too
_MAX_THREADS = 32  # that copy at once in one process; with more they would measure the interpreter's lock


class ProcessInfo(Value, frozen=True):
    """What one process reports about itself; ``place`` is equal for processes that can share memory."""

    host: str
    pid: int
    place: str
    cores: tuple[int, ...]
    copy_mbps: int | None = None
    leader: int = 0
    net_mbps: int | None = None  # of the leader alone: its node's rate to and from the network


def gather(comm: MessagingComm, node_comm: Comm, *, measure: bool = True) -> Topology:
    """Find the machine that the ranks of ``comm`` run on; collective.

    Args:
        node_comm: this rank's communicator of the ranks that share memory, as the launcher sees it.
        measure: time memory copies (30 ms); otherwise the catalogue's rate is taken.

    Raises:
        RemoteError: another rank failed; the message names it and holds its error.
        BlinkError: this rank's own failure.
    """
    processes = exchange(comm, node_comm, measure=measure)
    text = from_root(comm, lambda: cpu_topology(processes).to_json(), str, during=_DURING)
    return together(comm, lambda: Topology.from_json(text, source="topology from rank 0"), during=_DURING)


class GpuMachine(NamedTuple):
    """The machine of a job with a GPU per rank, or why there is none."""

    topology: Topology | None
    reason: str = ""


def gather_gpus(
    comm: MessagingComm, node_comm: Comm, facts: GpuFacts | Exception | str, *, per_gpu: int = 1
) -> GpuMachine:
    """Find the machine that the ranks' GPUs make; collective, with one result on all ranks.

    Args:
        node_comm: as for :func:`gather`.
        facts: what :func:`.probe.probe` gave for this rank's GPU; or the error with which it failed, which becomes an
            error on all ranks; or, in words, why this rank has no GPU.
        per_gpu: how many ranks may share a GPU.

    Raises:
        RemoteError: another rank's probe failed; the message names it and holds its error.
        BlinkError: this rank's own failure.
        TopologyError: the same on all ranks, for facts that make no machine: two ranks on one GPU, a GPU in MIG mode.
    """
    from .gpu import GpuFacts

    processes = exchange(comm, node_comm, measure=False)

    def own() -> GpuFacts | str:
        if isinstance(facts, Exception):
            raise facts
        return facts or "no GPU"

    everybody = gathered(comm, own, GpuFacts | str, during=_DURING)
    without = {rank: reason for rank, reason in enumerate(everybody) if isinstance(reason, str)}
    if without:
        some = f"{ranks_text([*without])} {'have' if len(without) > 1 else 'has'} no"
        who = f"{some} GPU" if len(without) < len(everybody) else NOBODY
        return GpuMachine(None, f"{who}: {next(iter(without.values()))}")
    from .gpu_topology import from_gpus

    gpus = [found for found in everybody if not isinstance(found, str)]
    nodes, hosts = nodes_of(processes), [process.host for process in processes]
    # the same facts everywhere, the same result
    made = attempt(lambda: from_gpus(gpus, nodes=nodes, hosts=hosts, per_gpu=per_gpu))
    failure = failure_of(made)
    said = str(failure) if isinstance(made, Exception) else f"fingerprint {made.fingerprint}"
    results = allgather(comm, said, str)
    if len(set(results)) > 1:
        raise TopologyError(
            f"the ranks make different machines of the same GPUs: {results}; start one version everywhere"
        )
    return GpuMachine(result_of(made))


def exchange(comm: MessagingComm, node_comm: Comm, *, measure: bool = True) -> tuple[ProcessInfo, ...]:
    """What every process says of itself, in rank order, with the leader (lowest rank) of its node; collective.

    Raises:
        RemoteError: another rank failed.
        BlinkError: this rank's own failure.
    """
    process = attempt(this_process)
    ranks = allgather(node_comm, comm.rank, int)
    rate = _copy_rate(comm.rank, ranks, node_comm) if measure else None
    firsts = sorted(set(allgather(comm, min(ranks), int)))
    net = attempt(lambda: net_rate(comm, firsts)) if measure else None

    def own() -> ProcessInfo:
        rates = {"copy_mbps": result_of(rate), "net_mbps": result_of(net)}
        return msgspec.structs.replace(result_of(process), leader=min(ranks), **rates)

    return tuple(gathered(comm, own, ProcessInfo, during=_DURING))


def _copy_rate(rank: int, ranks: list[int], node_comm: Comm) -> int | Exception:
    """This rank's copy rate among its neighbours, or its error; it takes part in every exchange, whatever fails."""
    mine = ranks.index(rank)
    slots = attempt(lambda: shared_slots(node_comm, mine))
    if isinstance(slots, NotShared) or (isinstance(slots, OSError) and slots.errno in NO_ROOM):
        slots = [page_aligned(SLOT_BYTES)]  # without shared memory `place` will differ

    def prepare() -> Callable[[], int]:
        return copy_test(result_of(slots), mine % len(result_of(slots)))

    test = attempt(prepare)
    node_comm.Barrier()  # all start at once
    return test if isinstance(test, Exception) else attempt(test)


def this_process() -> ProcessInfo:
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
    return ProcessInfo(host=host, pid=os.getpid(), place=place, cores=cores)


def copy_test(slots: Sequence[Bytes], mine: int) -> Callable[[], int]:
    """Prepare a test; the call of the result times copies for 30 ms and gives their rate in MB/s.

    It copies as collectives do: from a long private vector into the slot ``slots[mine]``, then from the neighbour's
    slot, which another core has just written, back into the vector. Time that the system gives to other processes
    counts, because we want the rate of a rank among its neighbours. All buffers are page-aligned: where the destination
    lies 16 bytes past the source modulo the page, glibc's memcpy is several times slower.
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


def shared_slots(node: Comm, mine: int) -> list[Bytes]:
    """Map a slot for each rank of ``node``, of which slot ``mine`` is reserved here; collective.

    Raises:
        NotShared: where this rank shares no memory with the first one.
        OSError: if there is no room.
        TopologyError: on every rank, where no such memory can be made.
    """
    import numpy as np

    file = shared_file(node, node.size * SLOT_BYTES)

    def mapped() -> Bytes:
        if isinstance(file, OSError):
            raise file
        with open(file, "r+b") as shared:
            os.posix_fallocate(file, mine * SLOT_BYTES, SLOT_BYTES)
            return np.memmap(shared, np.uint8, "r+", shape=(node.size * SLOT_BYTES,))

    memory = attempt(mapped)
    full = isinstance(memory, OSError) and memory.errno in NO_ROOM
    if any(allgather(node, full, bool)) and not isinstance(memory, Exception):
        raise OSError(errno.ENOSPC, f"{SHM} is full")  # nobody may touch what another rank could not reserve
    whole = result_of(memory)
    return [whole[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for i in range(node.size)]


def nodes_of(processes: Sequence[ProcessInfo]) -> list[int]:
    """The node of every rank, from 0 in order of appearance: launcher and system must agree that memory is shared."""
    node_of: dict[tuple[int, str], int] = {}
    return [node_of.setdefault((process.leader, process.place), len(node_of)) for process in processes]


def cpu_topology(processes: Sequence[ProcessInfo]) -> Topology:
    """Build the topology of CPU ranks from their processes, rank by rank.

    All ranks of a node get one rate, the mean of theirs to two digits: ranks of one memory differ by noise,
    and uneven links would make a needlessly uneven plan that changes from run to run.
    """
    from .machines import NET_MBPS

    at = nodes_of(processes)
    members = [[rank for rank, node in enumerate(at) if node == wanted] for wanted in sorted(set(at))]
    devices: dict[int, Device] = {}
    links: list[Link] = []
    facts: list[str] = []
    n, several = len(processes), len(members) > 1
    net = n + len(members)
    measured = [processes[ranks[0]].net_mbps for ranks in members]
    known = [mbps for mbps in measured if mbps is not None]
    network: list[int] = even_out(known) if len(known) == len(members) else [NET_MBPS] * len(members)
    net_origin: Origin = "measured" if len(known) == len(members) else "table"
    for node, ranks in enumerate(members):
        memory = n + node
        rate, origin = _node_rate([processes[r].copy_mbps for r in ranks])
        for index, rank in enumerate(ranks):
            devices[rank] = Device("cpu", node, index, host=processes[rank].host)
            links += [Link(rank, memory, "memory", 1, rate, origin), Link(memory, rank, "memory", 1, rate, origin)]
        if several:
            links += [Link(a, b, "net", 1, network[node], net_origin) for a, b in ((memory, net), (net, memory))]
        cores = len({c for r in ranks for c in processes[r].cores})
        facts.append(
            f"{processes[ranks[0]].host}: {plural(len(ranks), 'rank')} on {plural(cores, 'core')}, "
            f"{'each copies' if origin == 'measured' else 'assumed'} {rate / 1000:g} GB/s with all at work"
        )
    switches = [Switch("memory", node, f"memory@{node}" if several else "memory") for node in range(len(members))]
    if several:
        switches.append(Switch("net", -1, "network"))
        rates = ", ".join(f"{mbps / 1000:g}" for mbps in (network if len(set(network)) > 1 else network[:1]))
        facts.append(f"between nodes {rates} GB/s {'assumed, not ' * (net_origin == 'table')}measured")
    return Topology(
        name=f"cpu:{n}" + (f" on {len(members)} nodes" if several else ""),
        devices=tuple(devices[r] for r in range(n)),
        switches=tuple(switches),
        links=tuple(links),
        source="; ".join(facts),
    ).check()


def this_machine() -> Topology:
    """This machine from one process without a launcher: a CPU rank on each core that it may use."""
    from concurrent.futures import ThreadPoolExecutor

    process = this_process()
    at_once = process.cores[:_MAX_THREADS]
    slots = [page_aligned(SLOT_BYTES) for _ in at_once]
    tests = [copy_test(slots, i) for i in range(len(slots))]
    with ThreadPoolExecutor(len(at_once)) as pool:  # NumPy copies without the interpreter's lock
        rates = list(pool.map(lambda test: test(), tests))
    measured = [msgspec.structs.replace(process, copy_mbps=rate) for rate in rates]
    return cpu_topology(measured + [process] * (len(process.cores) - len(at_once)))


def _node_rate(rates: Sequence[int | None]) -> tuple[int, Origin]:
    """One rate for a node's ranks: the mean of the measured ones to two digits, or the table's."""
    known = [r for r in rates if r is not None]
    if not known:
        from .machines import CPU_MBPS

        return CPU_MBPS, "table"
    return rounded(sum(known) // len(known)), "measured"
