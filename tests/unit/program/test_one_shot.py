"""Programs in one shot: proved as others are, with the same results as along trees, and short enough for slots."""

import numpy as np
import pytest

from blinkmpi.errors import PlanError
from blinkmpi.planning.default_tables import rows_of
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import program_for
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.check import check
from blinkmpi.program.interpreter import run
from blinkmpi.program.one_shot import one_shot
from blinkmpi.program.partition import LINE, messages_of
from blinkmpi.program.reduction import accumulator_of, dtype_of
from blinkmpi.topology import machine
from blinkmpi.transport.control_pages import HEADS
from blinkmpi.transport.host.shared_window import ONE_SHOT_BYTES
from blinkmpi.trees.tree import ROOTED, Collective

KINDS: tuple[Collective, ...] = (
    "broadcast", "reduce", "allreduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall", "scan",
    "exscan",
)  # fmt: skip


def call_of(kind: Collective, n: int, count: int, root: int, dtype: str = "float32") -> Call:
    counts = (count,) * (n if kind == "reduce_scatter" else 1)
    return Call(kind, n, counts, dtype, "sum" if kind in REDUCTIONS else "", root if kind in ROOTED else -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_results_are_those_of_trees(kind: Collective, n: int) -> None:
    """To the last bit: operands are folded in the order of ranks."""
    plan = make_plan(machine(f"cpu:{n}"), mpi=False, algo=f"{kind}:direct" if n > 1 else "")
    rng = np.random.default_rng(n)
    for count, dtype, root in ((1, "float32", 0), (77, "float32", n - 1), (130, "float64", n // 2)):
        call = call_of(kind, n, count, root, dtype)
        program = check(one_shot(call))
        few = 100 if kind == "reduce" else 0  # integers: on a way to a root trees fold partial results
        sends = [
            (rng.integers(0, few, call.send_length(r)) if few else rng.random(call.send_length(r))).astype(dtype)
            if call.sends(r)
            else None
            for r in range(n)
        ]
        rule = plan.rule(kind, call.nbytes, root=call.root)
        assert rule.protocol == "slots" or n == 1
        wanted = run(check(program_for(plan, call, rule)), sends)
        for got, want in zip(run(program, sends), wanted, strict=True):
            assert (got is None) == (want is None)
            assert got is None or want is None or got.tobytes() == want.tobytes()
        waits = [stage for stage in program.stages if stage.ins and stage.outs]
        assert not waits, "no stage passes on what it has received"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4, 64, HEADS])
def test_what_the_table_sends_in_one_shot_fits(kind: Collective, n: int) -> None:
    """Into half of the memory for it, each slot at the beginning of a line; and with unequal blocks, too."""
    longest = max(rows_of("memory", many, kind)[1].min_bytes for many in (2, 8))
    elements = longest - 1
    blocks = n if kind in ("reduce_scatter", "allgather", "gather", "scatter") else 1
    slots = blocks if kind in ("reduce_scatter", "scatter") else n if kind == "alltoall" else 1
    assert elements + 64 * slots <= ONE_SHOT_BYTES // 2


def test_a_barrier_is_no_program() -> None:
    with pytest.raises(PlanError, match="barrier"):
        one_shot(Call("barrier", 2, (0,), ""))


NODES = ((0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 2, 2, 2, 5), (0, 1, 2, 0, 1))


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_between_nodes_are_those_of_one(kind: Collective, nodes: tuple[int, ...]) -> None:
    """Of whole numbers, which do not depend on who folds first."""
    n, rng = len(nodes), np.random.default_rng(3)
    for count, dtype, root in ((1, "int64", 0), (77, "float16", n - 1), (130, "float32", n // 2)):
        call = call_of(kind, n, count, root, dtype)
        sends = [rng.integers(0, 9, call.send_length(r)).astype(dtype) if call.sends(r) else None for r in range(n)]
        program = check(one_shot(call, nodes))
        for got, want in zip(run(program, sends), run(one_shot(call), sends), strict=True):
            assert (got is None) == (want is None)
            assert got is None or want is None or got.tobytes() == want.tobytes()


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_hold_what_other_nodes_read(kind: Collective, nodes: tuple[int, ...]) -> None:
    """Each slot once, in every message whose receiver reads it, behind a header that belongs to no slot."""
    call = call_of(kind, len(nodes), 50, 1, "bfloat16")
    program = one_shot(call, nodes)
    sent = messages_of(program, nodes)
    assert set(sent.messages) == {(a, b) for a in nodes for b in nodes if a != b}
    used: dict[tuple[int, int], str] = {}  # lines, by node
    for (source, _), (first, nbytes) in sent.messages.items():
        assert first % LINE == nbytes % LINE == 0
        assert nbytes >= LINE
        used[source, first] = "header"
        lengths = {n for (node, _), (at, n) in sent.messages.items() if (node, at) == (source, first)}
        assert len(lengths) == 1, "who shares a header shares the length that it tells"
    counts = {c: stage.count for stage in program.stages for c in stage.outs}
    for c, channel in enumerate(program.channels):
        source, away = nodes[channel.writer], {nodes[r] for r in channel.readers} - {nodes[channel.writer]}
        assert (c in sent.slots) == bool(away)
        if not away:
            continue
        nbytes = counts[c] * (accumulator_of if channel.wide else dtype_of)(call.dtype).itemsize
        for line in range(sent.slots[c], sent.slots[c] + nbytes, LINE):
            assert (source, line) not in used
            used[source, line] = "slot"
        for node in away:
            first, length = sent.messages[source, node]
            assert first + LINE <= sent.slots[c]
            assert sent.slots[c] + nbytes <= first + length


def test_a_node_sends_one_vector_of_a_reduction() -> None:
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    sent = messages_of(one_shot(call_of("allreduce", 8, 1000, 0), nodes), nodes)
    assert sent.longest == LINE + 4032  # 4000 bytes in whole lines
