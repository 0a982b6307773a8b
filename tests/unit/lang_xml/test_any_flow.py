"""Flows drawn at random, of no collective in particular: what is exported is proved, and is the same again."""

import random

import pytest

from blinkmpi.lang.flow import Contribution, Flow, Goal, Node
from blinkmpi.lang.xml.check import judge
from blinkmpi.lang.xml.export import export, replicated
from blinkmpi.lang.xml.file import parse_xml, write_xml
from tests.unit.lang_xml.machine import Machine, by_chunk
from tests.unit.lang_xml.test_export import folds


def drawn(seed: int) -> Flow:
    """Values of values, copies within ranks and of copies among them; inputs, and values of other ranks, as outputs."""
    rng = random.Random(seed)
    n, chunks = rng.randint(1, 4), rng.randint(1, 4)
    nodes: list[Node] = []
    held: list[frozenset[Contribution]] = []

    def of(rank: int, reference: int) -> frozenset[Contribution]:
        return held[reference] if reference >= 0 else frozenset({(rank, ~reference)})

    for i in range(rng.randint(1, 24)):
        rank, operands, total = rng.randrange(n), list[int](), frozenset[Contribution]()
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
            reference = rng.choice([*range(i)] * 2 + [~c for c in range(chunks)])
            part = of(rank, reference)
            if total.isdisjoint(part):
                operands, total = [*operands, reference], total | part
        nodes.append(Node(rank, tuple(operands), f"test.py:{i}"))
        held.append(total)
    outputs = [
        [rng.choice([None, *range(len(nodes)), ~rng.randrange(chunks)]) for _ in range(chunks)] for _ in range(n)
    ]
    wanted = tuple(
        tuple(() if x is None else tuple(sorted(of(rank, x))) for x in row) for rank, row in enumerate(outputs)
    )
    return Flow(Goal("custom", n, chunks, -1, (chunks,) * n, wanted), tuple(nodes), tuple(map(tuple, outputs))).prove()


def widened(flow: Flow, width: int) -> Flow:
    """The same of chunks that are ``width`` chunks each, side by side: steps of a ``cnt``."""

    def wide(reference: int, j: int) -> int:
        return reference * width + j if reference >= 0 else ~(~reference * width + j)

    piece = range(width)
    nodes = [Node(n.rank, tuple(wide(r, j) for r in n.operands), n.where) for n in flow.nodes for j in piece]
    outputs = tuple(tuple(None if r is None else wide(r, j) for r in row for j in piece) for row in flow.outputs)
    wanted = tuple(
        tuple(tuple((r, c * width + j) for r, c in want) for want in row for j in piece) for row in flow.goal.wanted
    )
    given = tuple(g * width for g in flow.goal.given)
    goal = Goal("custom", flow.goal.n, flow.goal.chunks * width, -1, given, wanted)
    return Flow(goal, tuple(nodes), outputs).prove()


@pytest.mark.parametrize("block", range(8))
def test_any_flow_goes_round(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        flow = widened(drawn(seed), rng.choice((1, 1, 2, 3, 5)))
        in_place, channels, instances = rng.random() < 0.5, rng.randint(1, 3), rng.randint(1, 2)
        made = export(flow, name=str(seed), in_place=in_place, channels=channels, instances=instances)
        assert parse_xml(write_xml(made)) == made
        report, again = judge(made)
        assert [fault.text for fault in report.faults] == [], seed
        assert again is not None
        whole = replicated(flow, instances)
        assert report.slots_needed in (1, 2), seed
        assert report.slots_by_chunk in (1, 2), seed
        for rank, (mine, theirs) in enumerate(zip(folds(whole), folds(again), strict=True)):
            for chunk, want in enumerate(mine):
                assert want is None or theirs[chunk] == want, (seed, rank, chunk)
        ran = by_chunk(made) if rng.random() < 0.5 else made
        machine = Machine(ran, whole.goal, in_place=in_place, slots=2, seed=seed)
        assert machine.run(), seed
        assert machine.right(), seed
