"""Programs in one shot: proved as others are, with the same results as along trees, and short enough for slots."""

import numpy as np
import pytest

from blinkmpi.errors import PlanError
from blinkmpi.planning.memory_rows import MEMORY_ROWS
from blinkmpi.planning.selection import make_plan, program_for
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.check import check
from blinkmpi.program.interpreter import run
from blinkmpi.program.one_shot import one_shot
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
    plan = make_plan(machine(f"cpu:{n}"), mpi=False, algo=f"{kind}:direct" if n > 1 and kind in MEMORY_ROWS else "")
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
    longest = max(MEMORY_ROWS[kind][large][1].min_bytes for large in (False, True))
    elements = longest - 1
    blocks = n if kind in ("reduce_scatter", "allgather", "gather", "scatter") else 1
    slots = blocks if kind in ("reduce_scatter", "scatter") else n if kind == "alltoall" else 1
    assert elements + 64 * slots <= ONE_SHOT_BYTES // 2


def test_a_barrier_is_no_program() -> None:
    with pytest.raises(PlanError, match="barrier"):
        one_shot(Call("barrier", 2, (0,), ""))
