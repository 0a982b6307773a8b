"""Packings made by hand or by chance, calls, and what NumPy says their results are: shared by the unit tests."""

import random
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace

from blinkmpi.program.call import BLOCKED, REDUCTIONS, Call
from blinkmpi.program.reduction import Array, accumulator_of, dtype_of
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees.tree import MAY_BE_CARRIED, ROOTED, Certificate, Collective, Edge, Packing, Tree, carried


def tree(root: int, edges: str, weight: int = 1) -> Tree:
    """A tree from "0-1 1-2": parent-child pairs over direct links."""
    pairs = [tuple(map(int, edge.split("-"))) for edge in edges.split()]
    return Tree(root, tuple(Edge(a, b, (a, b)) for a, b in pairs), Fraction(weight))


def packing(collective: Collective, n: int, trees: list[Tree], *, root: int = -1, rate: Fraction | int = 0) -> Packing:
    """A packing of ``trees``; its rate is the sum of their weights unless told."""
    total = Fraction(rate) or sum((t.weight for t in trees), Fraction(0))
    proof = Certificate("trivial", (), total, Fraction(1), "by construction")
    return Packing(collective, root, n, "trees", "nvlink", tuple(trees), total, total, proof)


def random_tree(n: int, root: int, rng: random.Random) -> Tree:
    """A spanning tree of ``n`` ranks."""
    order = [root, *rng.sample([r for r in range(n) if r != root], n - 1)]
    edges = [(order[rng.randrange(i)], order[i]) for i in range(1, n)]
    return tree(root, " ".join(f"{a}-{b}" for a, b in edges), rng.randint(1, 5))


def random_path(n: int, root: int, end: int, rng: random.Random) -> Tree:
    """A path from ``root`` to ``end`` over some of the other ranks."""
    others = [r for r in range(n) if r not in (root, end)]
    stops = [root, *rng.sample(others, rng.randint(0, len(others))), end]
    return tree(root, " ".join(f"{a}-{b}" for a, b in pairwise(stops)), rng.randint(1, 5))


def random_packing(collective: Collective, n: int, rng: random.Random, *, root: int = 0) -> Packing:
    """Trees as the collective wants them, with random shapes, roots and weights."""
    if collective in MAY_BE_CARRIED:
        return carried(collective, [random_packing("scatter", n, rng, root=r) for r in range(n)])
    trees: list[Tree] = []
    if collective in ("gather", "scatter"):
        for end in (r for r in range(n) if r != root):
            trees += [random_path(n, root, end, rng) for _ in range(rng.randint(1, 3))]
    elif collective in BLOCKED:
        for rank in range(n):
            trees += [random_tree(n, rank, rng) for _ in range(rng.randint(1, 3))]
    else:
        anywhere = collective not in ROOTED
        trees = [random_tree(n, rng.randrange(n) if anywhere else root, rng) for _ in range(rng.randint(1, 4))]
        if collective == "allreduce":
            trees = [replace(t, up=random_tree(n, t.root, rng).upward) if rng.random() < 0.5 else t for t in trees]
    return packing(collective, n, trees, root=root if collective in ROOTED else -1)


def even_call(kind: Any, n: int, count: int, *, dtype: str = "float32", op: str = "sum", root: int = 0) -> Call:
    """A call; a reduce_scatter gives every rank ``count`` elements."""
    counts = (count,) * (n if kind == "reduce_scatter" else 1)
    return Call(kind, n, counts, dtype, op if kind in REDUCTIONS else "", root if kind in ROOTED else -1)


def call_of(kind: Collective, n: int, count: int, *, uneven: bool = False, **keys: Any) -> Call:
    """As :func:`even_call`, but every third rank gets no elements of a reduce_scatter; ``uneven`` does so to others."""
    call = even_call(kind, n, count, **keys)
    counts = tuple(count if r % 3 != 1 else 0 for r in range(n))
    if uneven and kind == "alltoall":
        counts = tuple(count + 5 * r if r % 3 != 1 else 0 for r in range(n * n))
    return replace(call, counts=counts) if kind == "reduce_scatter" or (uneven and kind in BLOCKED) else call


def sends_of(call: Call, rng: np.random.Generator) -> list[Array | None]:
    """Small whole numbers, so that every order of folding gives the same result exactly."""
    sends: list[Array | None] = []
    for rank in range(call.n):
        n = call.send_length(rank) if call.sends(rank) else -1
        data: Any = rng.integers(0, 2 if call.dtype == "bool" else 4, max(n, 0))
        if call.dtype.startswith("complex"):
            data = data + 1j * rng.integers(0, 2, max(n, 0))
        sends.append(data.astype(dtype_of(call.dtype)) if n >= 0 else None)
    return sends


def reference(call: Call, sends: list[Array | None]) -> list[Array | None]:
    """What MPI defines, by NumPy, in one line per collective."""
    got = [s for s in sends if s is not None]
    ranks, kind = range(call.n), call.collective
    if kind in ("scan", "exscan"):
        return [_reduce(call, got[: r + (kind == "scan")]) if r or kind == "scan" else None for r in ranks]
    if kind == "alltoall":
        pieces = [[call.piece(s, r) for s in ranks] for r in ranks]
        return [np.concatenate([got[s][at : at + k] for s, (at, _, k) in enumerate(row)]) for row in pieces]
    if kind in REDUCTIONS:
        total = _reduce(call, got)
        if kind == "reduce":
            return [total if r == call.root else None for r in ranks]
        return [total if kind == "allreduce" else total[slice_of(call, r)] for r in ranks]
    if kind == "broadcast":
        return [None if r == call.root else got[0] for r in ranks]
    if kind == "scatter":
        return [got[0][slice_of(call, r)] for r in ranks]
    if kind in ("allgather", "gather"):
        return [np.concatenate(got) if kind == "allgather" or r == call.root else None for r in ranks]
    return [None for _ in ranks]


def slice_of(call: Call, rank: int) -> slice:
    """Where ``rank``'s block lies in the vector of all blocks."""
    start, length = call.block(rank)
    return slice(start, start + length)


def _reduce(call: Call, got: list[Array]) -> Array:
    if len(got) == 1:
        return got[0]
    table = np.stack(got).astype(accumulator_of(call.dtype))
    ufuncs = {"sum": "add", "avg": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
    ufuncs |= {f"l{k}": f"logical_{k}" for k in ("and", "or", "xor")}
    ufuncs |= {f"b{k}": f"bitwise_{k}" for k in ("and", "or", "xor")}
    ufunc = getattr(np, ufuncs[call.op])
    total = table[0]
    for row in table[1:]:
        total = ufunc(total, row).astype(table.dtype)
    if call.op == "avg" and np.issubdtype(table.dtype, np.integer):  # towards zero
        total = np.where(total < 0, -(-total // call.n), total // call.n)
    elif call.op == "avg":
        total = total / table.dtype.type(call.n)
    result: Array = total.astype(dtype_of(call.dtype))
    return result


def machine_of(n: int, edges: str, mbps: int = 10_000) -> Topology:
    """GPUs with direct NVLinks both ways: "0-1 1-2"; repeat a pair for more links."""
    links_of: dict[tuple[int, int], int] = {}
    for edge in edges.split():
        a, b = map(int, edge.split("-"))
        links_of[a, b] = links_of[b, a] = links_of.get((a, b), 0) + 1
    links = tuple(Link(a, b, "nvlink", k, mbps) for (a, b), k in sorted(links_of.items()))
    return Topology("by hand", tuple(Device("gpu", 0, i) for i in range(n)), (), links).check()
