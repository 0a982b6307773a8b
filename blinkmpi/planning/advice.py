"""Say which GPUs of a machine to take: every set of a size, up to symmetry, with the rates that it gives, best first.

Sets whose links look the same are one class; each class is planned for once. Pure functions.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from math import comb, prod

from msgspec.structs import replace

from ..errors import ArgumentError, TopologyError
from ..topology.model import Topology
from ..trees.graph.fabric import FAST, Fabric, choose_links, fabric
from ..trees.packing import pack
from ..trees.tree import Packing
from ..util.codec import Value
from ..util.text import plural, quoted
from .subsets import Allocations, classes

COLLECTIVES = ("allreduce", "broadcast")
MOST_SETS = 2_000  # that are looked at; GPUs that can be swapped count once
MOST_CLASSES = 200  # that are planned for
Counts = tuple[int, ...]  # of GPUs taken from each group of like ones


class GpuSet(Value, frozen=True):
    """One class of sets.

    ``gpus`` is its first set, as ranks of the machine, and ``alike`` the number of its sets. ``rates`` and ``rings``
    are MB/s for each of :data:`COLLECTIVES`, of packed trees and of NCCL's rings; ``links`` and ``ring_links`` are the
    kinds of links that they use. A broadcast is from the root for which it is slowest. Without rings, which some
    machines do not allow, ``rings`` is empty.
    """

    gpus: tuple[int, ...]
    alike: int
    rates: tuple[Fraction, ...]
    links: str
    rings: tuple[Fraction, ...] = ()
    ring_links: str = ""


class Advice(Value, frozen=True):
    """All classes, the best first, and how many sets no links join.

    ``free`` are the GPUs to choose from, as ranks of the machine.
    """

    take: int
    free: tuple[int, ...]
    choices: tuple[GpuSet, ...]
    apart: int = 0


def advise(topology: Topology, take: int, free: Sequence[int] | None = None, *, seconds: float | None = None) -> Advice:
    """The sets of ``take`` GPUs, up to symmetry, fastest AllReduce first, then the fastest broadcast.

    Args:
        free: the ranks to choose from; all by default.
        seconds: for each search for trees, as :func:`~blinkmpi.trees.pack` has it.

    Raises:
        ArgumentError: for CPU ranks, an impossible number, or more sets than can be looked at.
        TopologyError: for a rank that the machine does not have, or GPUs of which no set is joined.
    """
    if any(device.kind != "gpu" for device in topology.devices):
        raise ArgumentError(f"{topology.name} has CPU ranks; advise is about GPUs: name a machine such as dgx-1v")
    chosen = tuple(sorted(set(range(topology.n) if free is None else free)))
    if not 2 <= take <= len(chosen):
        there = f"{topology.name} has {plural(len(chosen), 'GPU')} to choose from"
        least = "there must be two at least" if len(chosen) < 2 else f"take 2 to {len(chosen)}"
        raise ArgumentError(f"cannot take {plural(take, 'GPU')}: {there}; {least}")
    machine = topology.subset(chosen)
    found, apart = _classes(machine, take)
    if not found:
        raise TopologyError(
            f"{topology.name}: no {take} of GPUs {quoted(list(chosen))} are joined by links; take fewer, or free others"
        )
    choices = [_planned(machine.subset(one.ranks), [chosen[r] for r in one.ranks], one.alike, seconds) for one in found]
    choices.sort(key=lambda c: (tuple(-rate for rate in c.rates), tuple(-rate for rate in c.rings), c.gpus))
    return Advice(take, chosen, tuple(choices), apart)


def _classes(machine: Topology, take: int) -> tuple[list[Allocations], int]:
    """The classes of joined sets, and the number of sets that are not joined."""
    groups = like(machine)
    sizes = [len(group) for group in groups]
    number = ways(sizes, take)
    if number > MOST_SETS:
        raise ArgumentError(
            f"{machine.name}: {number} sets of {take} GPUs that may differ, more than the {MOST_SETS} that are looked "
            "at; choose from fewer GPUs with --from"
        )
    found, apart = classes(machine, (
        (sorted(r for group, k in zip(groups, counts, strict=True) for r in group[:k]), prod(map(comb, sizes, counts)))
        for counts in _counts(sizes, take)
    ))  # fmt: skip
    if len(found) > MOST_CLASSES:
        raise ArgumentError(
            f"{machine.name}: {len(found)} kinds of sets of {take} GPUs, more than the {MOST_CLASSES} that are planned "
            "for; choose from fewer GPUs with --from"
        )
    return found, apart


def like(machine: Topology) -> list[list[int]]:
    """The ranks in groups of those that can be swapped one for another without changing any link, in their order.

    Where NVLinks or xGMI join every two ranks without a third, as an NVSwitch does, these alone count, since every
    set uses them alone.
    """
    fast = fabric(machine, FAST)
    every = len(fast.hops) == machine.n * (machine.n - 1)
    graphs = [fast] if every else [fast, fabric(machine, machine.kinds())]
    groups: list[list[int]] = []
    for rank in range(machine.n):
        home = next((g for g in groups if all(_swaps(f, g[0], rank) for f in graphs)), None)
        if home is None:
            groups.append([rank])
        else:
            home.append(rank)
    return groups


def _swaps(f: Fabric, a: int, b: int) -> bool:
    """Whether the graph stays the same when ranks ``a`` and ``b`` change places."""
    moved = {a: b, b: a}
    near = ((u, v, c) for (u, v), c in f.arcs.items() if u in moved or v in moved)
    return all(f.arcs.get((moved.get(u, u), moved.get(v, v))) == c for u, v, c in near)


def ways(sizes: Sequence[int], take: int) -> int:
    """How many ways there are to take so many from groups of these sizes, members of a group being equal."""
    found = [1] + [0] * take
    for size in sizes:
        sums = [0, *accumulate(found)]
        found = [sums[k + 1] - sums[max(0, k - size)] for k in range(take + 1)]
    return found[take]


def _counts(sizes: Sequence[int], take: int) -> Iterator[Counts]:
    """The ways themselves; those that take most from the first groups come first."""
    if not sizes:
        if not take:
            yield ()
        return
    for k in range(min(sizes[0], take), max(0, take - sum(sizes[1:])) - 1, -1):
        for rest in _counts(sizes[1:], take - k):
            yield (k, *rest)


def _planned(part: Topology, gpus: Sequence[int], alike: int, seconds: float | None) -> GpuSet:
    """Trees and rings for a class."""
    even = choose_links(part, "allreduce", 0).even
    trees = _slowest(part, even, lambda c, root: pack(part, c, root=root, seconds=seconds))
    found = GpuSet(tuple(gpus), alike, tuple(p.rate for p in trees), trees[0].links)
    try:
        rings = _slowest(part, even, lambda c, root: pack(part, c, root=root, method="rings"))
    except (ArgumentError, TopologyError):
        return found
    return replace(found, rings=tuple(p.rate for p in rings), ring_links=rings[0].links)


def _slowest(part: Topology, even: bool, packed: Callable[[str, int], Packing]) -> list[Packing]:
    """Packings of :data:`COLLECTIVES`; of the broadcasts that from the slowest root, which on even links is any."""
    roots = range(1 if even else part.n)
    return [packed("allreduce", 0), min((packed("broadcast", root) for root in roots), key=lambda p: p.rate)]
