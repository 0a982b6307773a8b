"""Measure the links of a machine (``blinkmpi topo --measure``): which transfers run at once, and what their times say.

Pairs of ranks run in rounds as in a tournament, so that no two pairs share a GPU. Where copies go over PCIe, whose
switches and sockets are shared, only one pair runs at a time. In the end all are busy at once. All ranks of a node go
through the same traffic patterns, and exchange times or errors after each repeat, which also synchronises them.

:class:`~..transport.cuda.link_rates.Rates` times the transfers of a rank's GPU. Nothing here imports MPI or CUDA.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import RemoteError
from ..topology.live import copy_test, shared_slots
from ..topology.measured import FAST, NOWHERE, LinkMeasurement, Measured, MeasurementKind, links_between
from ..topology.model import Topology
from ..topology.network_rate import MessagingComm, net_rate
from ..util.together import Comm, allgather, gathered, together

if TYPE_CHECKING:
    from ..transport.cuda.link_rates import Rates

REPEATS = 5
FLAG_REPEATS = 3
MEMORY_REPEATS = 3
BATCH = 4  # copies that are timed as one, so that the beginning and the end count little
BATCH_S = 0.008  # unless they take longer than this
Move = tuple[int, int]
_DURING = "while links were measured"
T = TypeVar("T")
Say = Callable[[int, int, str], None]

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


class TrafficPattern(NamedTuple):
    """The transfers that run at the same time, by ranks on the node; a GPU is the source of at most one of them."""

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


def traffic_patterns(n: int, lost: Mapping[Move, str], *, apart: bool) -> list[TrafficPattern]:
    """All traffic patterns for the GPUs of a node, in order.

    Args:
        lost: (rank, peer) where the rank could not map the peer's memory.
        apart: whether pairs share links.
    """
    everybody = range(n)
    made = [TrafficPattern("host", (move,)) for r in everybody for move in ((r, NOWHERE), (NOWHERE, r))]
    if n > 1:
        made.append(TrafficPattern("host-all", tuple((r, NOWHERE) for r in everybody)))
        made.append(TrafficPattern("host-all", tuple((NOWHERE, r) for r in everybody)))
    for pairs in rounds(n, apart=apart):
        there = tuple(pairs)
        back = tuple((b, a) for a, b in pairs)
        mutual = tuple(move for move in there + back if not {move, move[::-1]} & lost.keys())
        for one, both in BY:
            made += [TrafficPattern(one, there), TrafficPattern(one, back), TrafficPattern(both, mutual)]
        made.append(TrafficPattern("flag", mutual))
    if n > 2:  # two are a pair
        ring = tuple((r, (r + 1) % n) for r in everybody)
        made += [TrafficPattern("copy-all", ring), TrafficPattern("push-all", ring)]
    kept = (TrafficPattern(what, tuple(move for move in moves if move not in lost)) for what, moves in made)
    return [pattern for pattern in kept if pattern.moves]


def move_of(pattern: TrafficPattern, me: int) -> Move | None:
    """The transfer that a rank runs in a pattern: it sends, or reads from the host."""
    return next((m for m in pattern.moves if m[0] == me or (m[0] == NOWHERE and m[1] == me)), None)


def batch_of(seconds: Sequence[float]) -> int:
    """How many transfers to time as one, by the seconds that one took."""
    return max(1, min(BATCH, int(BATCH_S / max(*seconds, 1e-9))))


def seconds_of(pattern: TrafficPattern, repeats: Sequence[Mapping[Move, float]]) -> dict[Move, float]:
    """The seconds of each transfer, from those of every repeat.

    The best of them; both ways at once, the best of the longer of the two; with all at once the median, since the best
    would be that of a rank that happened to be early or late and so alone.
    """
    if pattern.what.endswith("-all"):
        return {m: statistics.median(times[m] for times in repeats) for m in pattern.moves}
    if pattern.what.endswith("-both"):
        return {m: min(max(times[m], times[m[::-1]]) for times in repeats) for m in pattern.moves}
    return {m: min(times[m] for times in repeats) for m in pattern.moves}


def is_apart(topology: Topology, ranks: Sequence[int]) -> bool:
    """Whether copies between different pairs of these ranks may share links: all kinds but NVLink do."""
    found = [links_between(topology, a, b) for a in ranks for b in ranks if a != b]
    return any(not links or any(k.kind not in FAST for k in links) for links in found)


# ---- doing it


def on_all_ranks(comm: Any, work: Callable[[], T], kind: Any) -> list[T]:
    """Everybody's result; a failure on one rank raises RemoteError on all."""
    return gathered(comm, work, kind, during=_DURING, error=RemoteError)


def measure_gpus(
    world: MessagingComm, node: Comm, topology: Topology, timer: Callable[[int, int], Rates], say: Say
) -> tuple[tuple[LinkMeasurement, ...], tuple[str, ...]]:
    """The rows of all pairs of GPUs, and what could not be measured; collective.

    Args:
        node: this rank's communicator of the ranks on its node.
        timer: makes this rank's timer, from its number on the node and how many there are.
        say: is called before every pattern: how many are done, of how many, and what comes next.

    Raises:
        RemoteError: the same on all ranks.
    """
    ranks = allgather(node, world.rank, int)
    return _of_all_nodes(world, ranks, lambda: _on_node(node, ranks, topology, timer, say))


def measure_memory(world: MessagingComm, node: Comm, say: Say) -> tuple[tuple[LinkMeasurement, ...], tuple[str, ...]]:
    """The same of CPU ranks: what each copies through the memory that its node shares; collective."""
    ranks = allgather(node, world.rank, int)
    return _of_all_nodes(world, ranks, lambda: (_memory(node, ranks.index(world.rank), len(ranks), say), {}))


def document(
    topology: Topology,
    found: tuple[tuple[LinkMeasurement, ...], tuple[str, ...]],
    driver: str,
    versions: Mapping[str, str],
) -> Measured:
    """The measurements with date, driver and versions."""
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
    except Exception as trouble:  # raised on the other nodes too
        error = f"on the node of rank {ranks[0]}: {trouble}; blinkmpi doctor on the same ranks says more"
    if failed := list(filter(None, allgather(world, error, str))):
        raise RemoteError(error or failed[0])
    place = {NOWHERE: NOWHERE, **dict(enumerate(ranks))}
    if world.rank != ranks[0]:
        rows, lost = [], {}  # all ranks of a node have the same
    mine = [LinkMeasurement(place[r.src], place[r.dst], r.what, r.mbps, r.us) for r in rows]
    reasons = [((place[a], place[b]), text) for (a, b), text in lost.items()]
    turns = allgather(world, (mine, reasons), tuple[list[LinkMeasurement], list[tuple[Move, str]]])
    firsts = sorted(set(allgather(world, ranks[0], int)))
    net = on_all_ranks(world, lambda: net_rate(world, firsts), int | None)
    made = sorted((row for some, _ in turns for row in some), key=lambda r: (r.what, r.src, r.dst))
    between = [LinkMeasurement(rank, NOWHERE, "net", mbps) for rank, mbps in enumerate(net) if mbps is not None]
    missing = sorted(reason for _, some in turns for reason in some)
    return (*made, *between), tuple(f"rank {a} to {b}: {text}" for (a, b), text in missing)


def _on_node(
    node: Comm, ranks: Sequence[int], topology: Topology, make: Callable[[int, int], Rates], say: Say
) -> tuple[list[LinkMeasurement], dict[Move, str]]:
    """A node's rows, and the pairs that cannot reach each other, by numbers on the node."""
    n = len(ranks)
    me = node.rank
    timers: list[Rates] = []  # this rank's, if it could be made
    rows: list[LinkMeasurement] = []

    def opened() -> bytes:
        timers.append(make(me, n))
        return timers[0].handle()

    def unmapped() -> None:
        for timer in timers:
            timer.disconnect()

    try:
        handles = on_all_ranks(node, opened, bytes)
        answers = on_all_ranks(node, lambda: timers[0].connect(handles), dict[int, str])
        lost = {(rank, peer): text for rank, some in enumerate(answers) for peer, text in some.items()}
        plan = traffic_patterns(n, lost, apart=is_apart(topology, ranks))
        for done, pattern in enumerate(plan):
            say(done, len(plan), WORDS[pattern.what])
            rows += _timed(node, timers[0], pattern, me)
        say(len(plan), len(plan), "done")
    finally:
        try:
            together(node, unmapped, during=_DURING, error=RemoteError)
        finally:  # memory is freed when nobody maps it any more
            for timer in timers:
                timer.close()
    return rows, lost


def _timed(node: Comm, timer: Rates, pattern: TrafficPattern, me: int) -> list[LinkMeasurement]:
    """Time one traffic pattern on all ranks of a node."""
    mine = move_of(pattern, me)

    def everybody(times: int) -> dict[Move, float]:
        seconds = on_all_ranks(
            node, lambda: None if mine is None else _one(timer, pattern.what, mine, times), float | None
        )
        return {move: s for rank, s in enumerate(seconds) if s is not None and (move := move_of(pattern, rank))}

    if pattern.what == "flag":
        found = seconds_of(pattern, [everybody(1) for _ in range(FLAG_REPEATS)])
        return [LinkMeasurement(*move, "flag", us=round(s * 1e6, 2)) for move, s in found.items()]
    times = batch_of([*everybody(1).values()])  # the first also opens the way
    found = seconds_of(pattern, [everybody(times) for _ in range(REPEATS)])
    nbytes = times * (timer.host_bytes if pattern.what.startswith("host") else timer.nbytes)
    return [LinkMeasurement(*move, pattern.what, max(1, round(nbytes / s / 1e6))) for move, s in found.items()]


def _one(timer: Rates, what: MeasurementKind, move: Move, times: int) -> float:
    """Do one move."""
    dst = move[1]
    if NOWHERE in move:
        return timer.to_host(times) if dst == NOWHERE else timer.from_host(times)
    if what == "flag":
        return timer.flag(dst)
    return timer.copy(dst, times) if what.startswith("copy") else timer.push(dst, times)


def _memory(node: Comm, me: int, n: int, say: Say) -> list[LinkMeasurement]:
    """CPU ranks' rows, by numbers on the node."""
    tests: list[Callable[[], int]] = []
    together(node, lambda: tests.append(copy_test(shared_slots(node, me), me)), during=_DURING, error=RemoteError)

    def measured(who: int) -> list[int]:
        return on_all_ranks(node, lambda: tests[0]() if who in (me, NOWHERE) else 0, int)

    alone = []
    for rank in range(n):
        say(rank, n + 1, WORDS["memory"])
        tries = [measured(rank) for _ in range(MEMORY_REPEATS)]
        alone.append(max(rates[rank] for rates in tries))
    say(n, n + 1, WORDS["memory-all"])
    tries = [measured(NOWHERE) for _ in range(MEMORY_REPEATS)]
    at_once = [statistics.median_low(rates) for rates in zip(*tries, strict=True)]
    say(n + 1, n + 1, "done")
    rows = [LinkMeasurement(rank, NOWHERE, "memory", mbps) for rank, mbps in enumerate(alone)]
    return rows + [LinkMeasurement(rank, NOWHERE, "memory-all", mbps) for rank, mbps in enumerate(at_once)]
