"""Streams for collectives of all ranks on rails that no switch joins, some of whose ports may be slower than others.

What a box sends goes by the same rail to all others, so a slow port slows its rail down for everybody. A linear program
says how much every box sends by each rail: few unknowns, however many ranks there are. Its basis is solved again in
integers (:mod:`..exact.rational`).
"""

from collections.abc import Sequence
from fractions import Fraction
from math import floor, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from ..exact.rational import solve
from ..graph.fabric import Ints
from .between_boxes import Stream
from .boxes import Box

EPSILON = 1e-9
GRAIN = 10**9
Floats = NDArray[np.float64]


class _Program(NamedTuple):
    """``uses @ x <= room`` and ``equal @ x == 0``; x is what each box sends by each rail, then the rate."""

    uses: Ints
    room: list[int]
    equal: Ints


def one_way(boxes: Sequence[Box], part: Sequence[Fraction]) -> list[Stream]:
    """AllGather: what the ranks of each box have to send, ``part`` of the vector, goes by rails that have room."""
    rails, streams = len(boxes[0].ports), list[Stream]()
    for b, (box, sizes) in enumerate(zip(boxes, _solved(boxes, part), strict=True)):
        left, each = list(sizes), sum(sizes, Fraction(0)) / box.m
        rest = [each] * box.m
        own = [(i, i) for i in range(min(box.m, rails))]  # the rank's own rail first
        for i, rail in [*own, *((i, rail) for i in range(box.m) for rail in range(rails))]:
            if size := min(rest[i], left[rail]):
                streams.append(Stream(b, box.vertices[i], rail, size, b))
                rest[i] -= size
                left[rail] -= size
    return streams


def both_ways(boxes: Sequence[Box]) -> list[Stream]:
    """AllReduce: stars from the ports of each box."""
    return [
        Stream(b, boxes[b].ports[rail].rank, rail, size, b)
        for b, sizes in enumerate(_solved(boxes, None))
        for rail, size in enumerate(sizes)
        if size
    ]


def _solved(boxes: Sequence[Box], part: Sequence[Fraction] | None) -> list[list[Fraction]]:
    """MB/s that each box sends by each rail, to every other box; ``part`` is None for an AllReduce."""
    count, rails = len(boxes), len(boxes[0].ports)
    program, unit = _program(boxes, part)
    aim = np.zeros(count * rails + 1)
    aim[-1] = -1
    found = linprog(
        aim, A_ub=program.uses, b_ub=program.room, A_eq=program.equal, b_eq=np.zeros(len(program.equal)), method="highs"
    )
    assert found.x is not None, found.message  # nothing sent is a solution
    x = _exact(program, found.x) or _lowered(program, found.x)
    return [[Fraction(x[b * rails + r]) / unit for r in range(rails)] for b in range(count)]


def _program(boxes: Sequence[Box], part: Sequence[Fraction] | None) -> tuple[_Program, int]:
    """The program in integers, and how many of its units are one MB/s."""
    count, rails = len(boxes), len(boxes[0].ports)
    ports = [(b, r, port) for b, box in enumerate(boxes) for r, port in enumerate(box.ports)]
    unit = lcm(*(c.denominator for *_, port in ports for c in (port.into, port.out)))
    rows: list[list[int]] = []
    room: list[int] = []
    for b, r, port in ports:
        leaving = [0] * (count * rails + 1)
        leaving[b * rails + r] = count - 1
        entering = [int(i % rails == r and i // rails != b) for i in range(count * rails)] + [0]
        if part is None:
            rows.append([x + y for x, y in zip(leaving, entering, strict=True)])
            room.append(int(min(port.into, port.out) * unit))
        else:
            rows += [leaving, entering]
            room += [int(port.out * unit), int(port.into * unit)]
    equal = []
    for b, share in enumerate(part if part is not None else [Fraction(1)]):
        sent = [part is None or i // rails == b for i in range(count * rails)]
        equal.append([int(x) * share.denominator for x in sent] + [-share.numerator])
    return _Program(np.array(rows, np.int64), room, np.array(equal, np.int64)), unit


def _exact(program: _Program, x: Floats) -> list[Fraction] | None:
    """The corner at which the solver stopped, in fractions; None if it is none."""
    room = np.array(program.room, float)
    support = np.flatnonzero(x > EPSILON * x.max())
    tight = np.flatnonzero(room - program.uses @ x <= EPSILON * room.max())
    rows = np.concatenate([program.uses[tight], program.equal])[:, support]
    found = solve(rows, [*(program.room[i] for i in tight), *[0] * len(program.equal)])
    if found is None or min(found) < 0:
        return None
    whole = [Fraction(0)] * len(x)
    for i, value in zip(support.tolist(), found, strict=True):
        whole[i] = value
    loads = [sum((int(row[i]) * whole[i] for i in np.flatnonzero(row)), Fraction(0)) for row in program.uses]
    return whole if all(load <= most for load, most in zip(loads, program.room, strict=True)) else None


def _lowered(program: _Program, x: Floats) -> list[Fraction]:
    """The solver's floats a little lower, with the parts of the boxes as they must be."""
    values = [Fraction(floor(max(v, 0.0) * (1 - 1 / GRAIN) * GRAIN), GRAIN) for v in x.tolist()]
    rates = [
        sum((int(c) * v for c, v in zip(row[:-1], values, strict=False)), Fraction(0)) / int(-row[-1])
        for row in program.equal
    ]
    for row, rate in zip(program.equal, rates, strict=True):
        for i in np.flatnonzero(row[:-1]).tolist():
            values[i] *= min(rates) / rate
    return [*values[:-1], min(rates)]
