"""Commodities on rails that no switch joins, some of whose ports may be slower than others, or missing.

A commodity leaves a box for another one by rails of which both have a port, for each target by other ones if need be. A
linear program says how large the commodities are and which rails they take: few unknowns, however many ranks there are.
Commodities are stars from the box in which they begin; those of rooted collectives also from other boxes, their hubs.
Of several ports of a box on one rail the last one is taken. The program's basis is solved again in integers
(:mod:`..exact.basis`).
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, product
from math import lcm
from typing import NamedTuple

import numpy as np

from ..deadline import Deadline
from ..exact.basis import Floats, exact_basis, lowered
from ..graph.boxes import Box
from ..graph.fabric import Ints
from .between_boxes import Commodity, Entries, star

EPSILON = 1e-9
GRAIN = 10**9
MOST_EXACT = 600  # unknowns or equations that are solved again in integers: a second
Crossing = tuple[int, int, int]  # from a box to a box by a plane of the network
Star = tuple[int, int]  # the box in which a commodity begins, and its hub


class _Program(NamedTuple):
    """``uses @ x <= capacity`` and ``equal @ x == 0``: sizes of stars, their crossings to each box, the rate."""

    stars: list[Star]
    crossings: list[tuple[int, Crossing]]  # with the number of the star
    uses: Ints
    capacity: list[int]
    equal: Ints
    unit: int  # in which MB/s are counted


def from_root(boxes: Sequence[Box], root: int, deadline: Deadline) -> list[Commodity]:
    """Broadcast: the root's box sends a part to every hub, which sends it on."""
    source = next(b for b, box in enumerate(boxes) if root in box.vertices[: box.m])
    program = _program(boxes, [(source, hub) for hub in range(len(boxes))], None, both=False)
    solved = _solved(boxes, program, deadline)
    return [Commodity(source, root, 0, size, hub, ports=entries) for (_, hub), size, entries in solved]


def from_all(boxes: Sequence[Box], part: Sequence[Fraction], deadline: Deadline) -> list[Commodity]:
    """AllGather: ``part`` of the vector begins in each box, as much at each of its ranks."""
    commodities = []
    program = _program(boxes, [(b, b) for b in range(len(boxes))], part, both=False)
    for (b, _), size, entries in _solved(boxes, program, deadline):
        each = size / boxes[b].m
        for i, rank in enumerate(boxes[b].vertices[: boxes[b].m]):
            commodities.append(Commodity(b, rank, 0, each, b, ports=_cut(entries, i * each, (i + 1) * each)))
    return commodities


def both_ways(boxes: Sequence[Box], deadline: Deadline) -> list[Commodity]:
    """AllReduce: stars from the ports by which a box sends to the first other one."""
    commodities = []
    program = _program(boxes, [(b, b) for b in range(len(boxes))], None, both=True)
    for (b, _), _, entries in _solved(boxes, program, deadline):
        start = Fraction(0)
        for size, port, _ in entries[0][1]:
            own = _cut(entries, start, start + size)
            commodities.append(Commodity(b, boxes[b].ports[port].rank, 0, size, b, ports=own))
            start += size
    return commodities


def _cut(entries: Entries, start: Fraction, stop: Fraction) -> Entries:
    """What lies between two places of a star."""
    found = []
    for arc, pieces in entries:
        ends = list(accumulate(size for size, _, _ in pieces))
        inside = []
        for end, (size, leave, enter) in zip(ends, pieces, strict=True):
            if (part := min(end, stop) - max(end - size, start)) > 0:
                inside.append((part, leave, enter))
        found.append((arc, tuple(inside)))
    return tuple(found)


def _program(boxes: Sequence[Box], stars: list[Star], part: Sequence[Fraction] | None, *, both: bool) -> _Program:
    """The program in integers.

    Args:
        part: of the vector that begins in each box, one star each; None where only the sum counts.
    """
    count = len(boxes)
    ports = {(b, port.plane): port for b, box in enumerate(boxes) for port in box.ports}
    planes = sorted({plane for _, plane in ports})
    crossings = [
        (k, (a, b, plane))
        for k, ends in enumerate(stars)
        for (a, b), plane in product(star(*ends, count), planes)
        if (a, plane) in ports and (b, plane) in ports
    ]
    unit = lcm(*(c.denominator for port in ports.values() for c in (port.into, port.out)))
    size = len(stars) + len(crossings) + 1
    row_of = {end: i for i, end in enumerate(ports)}
    uses = np.zeros((len(ports) * (1 if both else 2), size), np.int64)
    for i, (_, (a, b, plane)) in enumerate(crossings, len(stars)):
        uses[row_of[a, plane], i] = 1
        uses[row_of[b, plane] + (0 if both else len(ports)), i] = 1
    out = [int((min(p.out, p.into) if both else p.out) * unit) for p in ports.values()]
    capacity = out if both else [*out, *(int(p.into * unit) for p in ports.values())]
    arcs = {(k, arc): i for i, (k, arc) in enumerate((k, arc) for k, s in enumerate(stars) for arc in star(*s, count))}
    shares = [Fraction(1)] if part is None else list(part)
    equal = np.zeros((len(arcs) + len(shares), size), np.int64)
    for (k, _), i in arcs.items():
        equal[i, k] = -1
    for i, (k, (a, b, _)) in enumerate(crossings, len(stars)):
        equal[arcs[k, (a, b)], i] = 1
    for b, share in enumerate(shares):
        row = equal[len(arcs) + b]
        row[range(len(stars)) if part is None else b] = share.denominator
        row[-1] = -share.numerator
    return _Program(stars, crossings, uses, capacity, equal, unit)


def _solved(boxes: Sequence[Box], program: _Program, deadline: Deadline) -> list[tuple[Star, Fraction, Entries]]:
    """The stars of the best solution, their sizes in MB/s, and the ports that they take.

    There are none if two boxes have no rail in common.
    """
    size = len(program.stars) + len(program.crossings) + 1
    objective = np.zeros(size)
    objective[-1] = -1
    from scipy.optimize import linprog

    none = np.zeros(len(program.equal))
    found = linprog(objective, A_ub=program.uses, b_ub=program.capacity, A_eq=program.equal, b_eq=none, method="highs")
    assert found.x is not None, found.message  # nothing sent is a solution
    if found.x[-1] <= EPSILON * max(program.capacity):
        return []
    rows = np.vstack([program.uses, program.equal])
    right = np.array([*program.capacity, *[0] * len(program.equal)])
    exact = None if deadline.late() else exact_basis(rows, right, found.x, equal=len(program.equal), most=MOST_EXACT)
    x = exact or _lowered(program, found.x)
    number = [{port.plane: k for k, port in enumerate(box.ports)} for box in boxes]
    taken: list[dict[tuple[int, int], list[tuple[Fraction, int, int]]]] = [{} for _ in program.stars]
    for (k, (a, b, plane)), amount in zip(program.crossings, x[len(program.stars) :], strict=False):
        if amount:
            taken[k].setdefault((a, b), []).append((amount / program.unit, number[a][plane], number[b][plane]))
    return [
        (ends, x[k] / program.unit, tuple((arc, tuple(pieces)) for arc, pieces in taken[k].items()))
        for k, ends in enumerate(program.stars)
        if x[k]
    ]


def _lowered(program: _Program, x: Floats) -> list[Fraction]:
    """The solver's floats a little lower, with the parts of boxes, and the crossings of each star, as they must be."""
    values = lowered(x, GRAIN)
    stars = len(program.stars)
    for row in program.equal[np.flatnonzero(program.equal[:, -1] == 0)]:  # a star takes what its narrowest arc carries
        (k,) = np.flatnonzero(row[:stars])
        values[k] = min(values[k], sum((values[i] for i in np.flatnonzero(row[stars:]) + stars), Fraction(0)))
    whole = program.equal[np.flatnonzero(program.equal[:, -1])]
    rates = [sum((int(row[i]) * values[i] for i in range(stars)), Fraction(0)) / int(-row[-1]) for row in whole]
    for row, rate in zip(whole, rates, strict=True):
        for i in np.flatnonzero(row[:stars]).tolist():
            values[i] *= min(rates) / rate if rate else 0
    for row in program.equal[np.flatnonzero(program.equal[:, -1] == 0)]:
        (k,) = np.flatnonzero(row[:stars])
        rest = values[k]
        for i in (np.flatnonzero(row[stars:]) + stars).tolist():
            values[i] = min(rest, values[i])
            rest -= values[i]
    return values
