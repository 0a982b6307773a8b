"""Measure links (``blinkmpi topo --measure``): what is timed together with what, and what the times say.

Two ranks meet at a time, as in a tournament, so that no two pairs share a GPU; where copies go over PCIe, whose
switches and sockets pairs do share, one pair at a time. Then all are busy at once. All ranks of a node go through the
same stages, and exchange times, or errors, after each repeat; that exchange is also where they start together.

The GPU's part is a :class:`Port`; ``transport.cuda.rates`` has the real one. Nothing here imports MPI or CUDA.
"""

from __future__ import annotations

import datetime
import os
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import RemoteError
from ..topology.gather import SHM, copy_test, shared_slots
from ..topology.measured import FAST, NOWHERE, LinkMeasurement, Measured, MeasurementKind, links_between
from ..topology.model import Topology
from ..topology.network_rate import MessagingComm, net_rate
from ..util.together import Comm

REPEATS = 5
FLAG_REPEATS = 3
MEMORY_REPEATS = 3
BATCH = 4  # copies that are timed as one, so that the beginning and the end count little
BATCH_S = 0.008  # unless they take longer than this
Move = tuple[int, int]
Say = Callable[[int, int, str], None]
T = TypeVar("T")

BY: tuple[tuple[MeasurementKind, MeasurementKind], ...] = (("copy", "copy-both"), ("push", "push-both"))
WORDS: Mapping[str, str] = {
    "host": "the host's path, one GPU at a time",
    "host-all": "the host's path, all GPUs at once",
    "copy": "peer copies",
    "copy-both": "peer copies, both ways at once",
    "copy-all": "peer copies, all GPUs at once",
    "push": "stores by multiprocessors",
    "push-both": "stores, both ways at once",
    "push-all": "stores, all GPUs at once",
    "flag": "round trips of a flag",
    "memory": "copies through memory, one rank at a time",
    "memory-all": "copies through memory, all ranks at once",
    "net": "messages between nodes",
}


class Port(Protocol):
    """One rank's GPU: does something ``times`` times and gives the seconds; ``nbytes`` and ``host_bytes`` each time."""

    nbytes: int
    host_bytes: int

    def handle(self) -> bytes:
        """By which peers map this rank's memory."""

    def connect(self, handles: Sequence[bytes]) -> dict[int, str]:
        """Map the peers' memory; those that cannot be mapped, and why."""

    def disconnect(self) -> None:
        """Unmap it."""

    def close(self) -> None:
        """Free this rank's memory."""

    def copy(self, peer: int, times: int) -> float:
        """To a peer by the copy engine."""

    def push(self, peer: int, times: int) -> float:
        """To a peer by stores."""

    def to_host(self, times: int) -> float:
        """To the host's memory."""

    def from_host(self, times: int) -> float:
        """From the host's memory."""

    def flag(self, peer: int) -> float:
        """A round trip, together with the peer."""


class Stage(NamedTuple):
    """What happens at the same time, by numbers on the node; every GPU does at most one of the moves."""

    what: MeasurementKind
    moves: tuple[Move, ...]


# ---- what is timed


def rounds(n: int, *, apart: bool = False) -> list[list[Move]]:
    """All pairs, each once, in rounds in which everybody meets at most one other; ``apart``: one pair a round.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    if apart:
        return [[(a, b)] for a in range(n) for b in range(a + 1, n)]
    circle = n - 1 + n % 2  # an odd number of places; the last number of an even one stands in the middle
    found = []
    for turn in range(circle if n > 1 else 0):
        pairs = [((turn + i) % circle, (turn - i) % circle) for i in range(1, circle // 2 + 1)]
        if n % 2 == 0:
            pairs.append((turn, circle))
        found.append(sorted((min(pair), max(pair)) for pair in pairs))
    return found


def stages(n: int, lost: Mapping[Move, str], *, apart: bool) -> list[Stage]:
    """Everything that GPUs of a node are asked, in order.

    Args:
        lost: (rank, peer) where the rank could not map the peer's memory.
        apart: whether pairs would be in one another's way.
    """
    everybody = range(n)
    made = [Stage("host", (move,)) for r in everybody for move in ((r, NOWHERE), (NOWHERE, r))]
    if n > 1:
        made.append(Stage("host-all", tuple((r, NOWHERE) for r in everybody)))
        made.append(Stage("host-all", tuple((NOWHERE, r) for r in everybody)))
    for pairs in rounds(n, apart=apart):
        there = tuple(pairs)
        back = tuple((b, a) for a, b in pairs)
        mutual = tuple(move for move in there + back if not {move, move[::-1]} & lost.keys())
        for one, both in BY:
            made += [Stage(one, there), Stage(one, back), Stage(both, mutual)]
        made.append(Stage("flag", mutual))
    if n > 2:  # two are a pair
        ring = tuple((r, (r + 1) % n) for r in everybody)
        made += [Stage("copy-all", ring), Stage("push-all", ring)]
    kept = (Stage(what, tuple(move for move in moves if move not in lost)) for what, moves in made)
    return [stage for stage in kept if stage.moves]


def move_of(stage: Stage, me: int) -> Move | None:
    """What a rank does in a stage: it sends, or takes from the host."""
    return next((m for m in stage.moves if m[0] == me or (m[0] == NOWHERE and m[1] == me)), None)


def batch_of(seconds: Sequence[float]) -> int:
    """How many times to do what took so long once: some, but not for long."""
    return max(1, min(BATCH, int(BATCH_S / max(*seconds, 1e-9))))


def settle(stage: Stage, repeats: Sequence[Mapping[Move, float]]) -> dict[Move, float]:
    """The seconds of each move, from those of every repeat.

    The best of them; both ways at once, the best of the longer of the two; with all at once the median, since the best
    would be that of a rank that happened to be early or late and so alone.
    """
    if stage.what.endswith("-all"):
        return {m: statistics.median(times[m] for times in repeats) for m in stage.moves}
    if stage.what.endswith("-both"):
        return {m: min(max(times[m], times[m[::-1]]) for times in repeats) for m in stage.moves}
    return {m: min(times[m] for times in repeats) for m in stage.moves}


def is_apart(topology: Topology, ranks: Sequence[int]) -> bool:
    """Whether some copies between these ranks take what others' copies take too: all but NVLinks."""
    found = [links_between(topology, a, b) for a in ranks for b in ranks if a != b]
    return any(not links or any(k.kind not in FAST for k in links) for links in found)


# ---- doing it


def together(comm: Comm, work: Callable[[], T]) -> list[T]:
    """Everybody's result; collective.

    Raises:
        RemoteError: the same on all ranks, if one or more failed.
    """
    result: T | None = None
    error = ""
    try:
        result = work()
    except Exception as trouble:
        error = f"{type(trouble).__name__}: {trouble}"
    turns: list[tuple[Any, str]] = comm.allgather((result, error))
    failed = [rank for rank, (_, text) in enumerate(turns) if text]
    if failed:
        more = f" (so did {failed[1:]})" if len(failed) > 1 else ""
        raise RemoteError(
            f"number {failed[0]} of {len(turns)} ranks failed while links were measured{more}: {turns[failed[0]][1]}; "
            "blinkmpi doctor on the same ranks says more"
        )
    return [value for value, _ in turns]


def measure_gpus(
    world: MessagingComm, node: Comm, topology: Topology, port: Callable[[int, int], Port], say: Say
) -> tuple[tuple[LinkMeasurement, ...], tuple[str, ...]]:
    """The rows of all pairs of GPUs, and what could not be measured; collective.

    Args:
        node: this rank's communicator of the ranks on its node.
        port: makes this rank's port, from its number on the node and how many there are.
        say: hears of every stage: how many are done, of how many, and what it is.

    Raises:
        RemoteError: the same on all ranks.
    """
    ranks = node.allgather(world.rank)
    return _of_all_nodes(world, ranks, lambda: _on_node(node, ranks, topology, port, say))


def measure_memory(world: MessagingComm, node: Comm, say: Say) -> tuple[tuple[LinkMeasurement, ...], tuple[str, ...]]:
    """The same of CPU ranks: what each copies through the memory that its node shares; collective."""
    ranks = node.allgather(world.rank)
    return _of_all_nodes(world, ranks, lambda: (_memory(node, ranks.index(world.rank), len(ranks), say), {}))


def document(
    topology: Topology,
    found: tuple[tuple[LinkMeasurement, ...], tuple[str, ...]],
    driver: str,
    versions: Mapping[str, str],
) -> Measured:
    """What was measured, with what belongs to it."""
    today = datetime.date.today().isoformat()
    return Measured(topology.name, topology.devices, today, driver, dict(versions), *found).check()


def _of_all_nodes(
    world: MessagingComm, ranks: Sequence[int], work: Callable[[], tuple[list[LinkMeasurement], dict[Move, str]]]
) -> tuple[tuple[LinkMeasurement, ...], tuple[str, ...]]:
    """Do a node's work, and put all nodes' rows together, by the ranks of the job, with what is between them."""
    rows: list[LinkMeasurement] = []
    lost: dict[Move, str] = {}
    error = ""
    try:
        rows, lost = work()
    except Exception as trouble:  # the other nodes hear of it
        error = str(trouble)
    if failed := list(filter(None, world.allgather(error))):
        raise RemoteError(error or failed[0])
    place = {NOWHERE: NOWHERE, **dict(enumerate(ranks))}
    if world.rank != ranks[0]:
        rows, lost = [], {}  # all ranks of a node have the same
    mine = [LinkMeasurement(place[r.src], place[r.dst], r.what, r.mbps, r.us) for r in rows]
    reasons = [((place[a], place[b]), text) for (a, b), text in lost.items()]
    turns = world.allgather((mine, reasons))
    firsts = sorted(set(world.allgather(ranks[0])))
    net = together(world, lambda: net_rate(world, firsts))
    made = sorted((row for some, _ in turns for row in some), key=lambda r: (r.what, r.src, r.dst))
    between = [LinkMeasurement(rank, NOWHERE, "net", mbps) for rank, mbps in enumerate(net) if mbps is not None]
    missing = sorted(reason for _, some in turns for reason in some)
    return (*made, *between), tuple(f"rank {a} to {b}: {text}" for (a, b), text in missing)


def _on_node(
    node: Comm, ranks: Sequence[int], topology: Topology, make: Callable[[int, int], Port], say: Say
) -> tuple[list[LinkMeasurement], dict[Move, str]]:
    """A node's rows, and the pairs that cannot reach each other, by numbers on the node."""
    n = len(ranks)
    me = node.rank
    ports: list[Port] = []  # this rank's, if it could be made
    rows: list[LinkMeasurement] = []

    def opened() -> bytes:
        ports.append(make(me, n))
        return ports[0].handle()

    def unmapped() -> None:
        for port in ports:
            port.disconnect()

    try:
        handles = together(node, opened)
        answers = together(node, lambda: ports[0].connect(handles))
        lost = {(rank, peer): text for rank, some in enumerate(answers) for peer, text in some.items()}
        plan = stages(n, lost, apart=is_apart(topology, ranks))
        for done, stage in enumerate(plan):
            say(done, len(plan), WORDS[stage.what])
            rows += _timed(node, ports[0], stage, me)
        say(len(plan), len(plan), "done")
    finally:
        try:
            together(node, unmapped)
        finally:  # memory is freed when nobody maps it any more
            for port in ports:
                port.close()
    return rows, lost


def _timed(node: Comm, port: Port, stage: Stage, me: int) -> list[LinkMeasurement]:
    """Time one stage on all ranks of a node."""
    mine = move_of(stage, me)

    def everybody(times: int) -> dict[Move, float]:
        seconds = together(node, lambda: None if mine is None else _one(port, stage.what, mine, times))
        return {move: s for rank, s in enumerate(seconds) if s is not None and (move := move_of(stage, rank))}

    if stage.what == "flag":
        found = settle(stage, [everybody(1) for _ in range(FLAG_REPEATS)])
        return [LinkMeasurement(*move, "flag", us=round(s * 1e6, 2)) for move, s in found.items()]
    times = batch_of([*everybody(1).values()])  # the first also opens the way
    found = settle(stage, [everybody(times) for _ in range(REPEATS)])
    nbytes = times * (port.host_bytes if stage.what.startswith("host") else port.nbytes)
    return [LinkMeasurement(*move, stage.what, max(1, round(nbytes / s / 1e6))) for move, s in found.items()]


def _one(port: Port, what: MeasurementKind, move: Move, times: int) -> float:
    """Do one move."""
    dst = move[1]
    if NOWHERE in move:
        return port.to_host(times) if dst == NOWHERE else port.from_host(times)
    if what == "flag":
        return port.flag(dst)
    return port.copy(dst, times) if what.startswith("copy") else port.push(dst, times)


def _memory(node: Comm, me: int, n: int, say: Say) -> list[LinkMeasurement]:
    """CPU ranks' rows, by numbers on the node."""
    path = node.allgather(f"{SHM}/blinkmpi-{uuid.uuid4().hex}")[0]
    slots: list[Any] = []

    def opened(turn: bool) -> None:
        if turn == (me == 0):
            slots.extend(shared_slots(path, n, create=turn))

    try:
        together(node, lambda: opened(True))
        together(node, lambda: opened(False))
    finally:
        if me == 0 and os.path.exists(path):
            os.unlink(path)
    tests: list[Callable[[], int]] = []
    together(node, lambda: tests.append(copy_test(slots, me)))
    alone = []
    for rank in range(n):
        say(rank, n + 1, WORDS["memory"])
        tries = [together(node, lambda who=rank: tests[0]() if who == me else 0) for _ in range(MEMORY_REPEATS)]  # type: ignore[misc]
        alone.append(max(rates[rank] for rates in tries))
    say(n, n + 1, WORDS["memory-all"])
    tries = [together(node, tests[0]) for _ in range(MEMORY_REPEATS)]
    at_once = [statistics.median_low(rates) for rates in zip(*tries, strict=True)]
    say(n + 1, n + 1, "done")
    rows = [LinkMeasurement(rank, NOWHERE, "memory", mbps) for rank, mbps in enumerate(alone)]
    return rows + [LinkMeasurement(rank, NOWHERE, "memory-all", mbps) for rank, mbps in enumerate(at_once)]
