"""Where a program's stages run on a GPU and where its slots lie, and what does not fit is refused."""

import pytest

from blinkmpi.errors import ArgumentError, DeviceError
from blinkmpi.planning.plan import Rule
from blinkmpi.planning.selection import make_plan, program_for
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.ir import Program
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.codegen import scale
from blinkmpi.transport.cuda.executor import fingerprint
from blinkmpi.transport.cuda.memory_layout import LINE, SYMMETRIC_BYTES, groups, most_stages, place
from blinkmpi.trees.tree import ROOTED, Collective
from tests.unit.transport.test_cuda_direct_segments import REAL

H200 = machine("hgx-h200")


def program(collective: Collective, n: int, scheme: str, *, count: int = 1 << 20, chunk: int = 64 << 10) -> Program:
    topology = modify(H200, gpus=",".join(map(str, range(n))))
    counts = (count,) * (n if collective == "reduce_scatter" else 1)
    op, root = "sum" if collective in REDUCTIONS else "", 0 if collective in ROOTED else -1
    plan = make_plan(topology, collectives=(collective,), gpus="onehop")
    return program_for(plan, Call(collective, n, counts, "float32", op, root), Rule(collective, 0, scheme, chunk, 4))


@pytest.mark.parametrize("collective", REAL)
def test_groups_fill_a_gpu_and_no_more(collective: Collective) -> None:
    lowered = program(collective, 8, "onehop")
    stages = {r: [stage.tree for stage in lowered.of(r)] for r in range(8)}
    fewest = most_stages(lowered)
    assert fewest == max(map(len, stages.values()))
    for ctas in (fewest, 64, 132):
        taken = groups(lowered, ctas)
        used = {r: sum(taken[tree] for tree in trees) for r, trees in stages.items()}
        assert max(used.values()) <= ctas
        assert min(taken.values()) >= 1
        chunks = {t: max(-(-x.count // lowered.chunk_of(x)) for x in lowered.stages if x.tree == t) for t in taken}
        assert all(taken[tree] <= chunks[tree] for tree in taken), "a CTA without a chunk"
        full = {t for t in taken if any(t in trees and used[r] + trees.count(t) > ctas for r, trees in stages.items())}
        assert all(taken[tree] == chunks[tree] for tree in set(taken) - full), "room is left, and work"
    with pytest.raises(DeviceError, match=f"a rank has {fewest} stages .* the GPU room for {fewest - 1} groups"):
        groups(lowered, fewest - 1)


def test_short_calls_take_few_groups_and_the_host_path_more() -> None:
    short = program("allreduce", 4, "onehop", count=64)
    assert set(groups(short, 132).values()) == {1}
    lowered = program("broadcast", 4, "onehop", count=1 << 24)
    plain, hosted = groups(lowered, 132), groups(lowered, 132, [0])
    tree = lowered.channels[0].tree
    assert hosted[tree] > plain[tree]


def test_what_does_not_fit_is_said_with_its_size() -> None:
    lowered = program("allreduce", 8, "onehop", count=1 << 26, chunk=4 << 20)
    with pytest.raises(DeviceError, match=r"allreduce by onehop needs \d+ bytes of slots"):
        place(lowered, groups(lowered, 132), 4, 4, SYMMETRIC_BYTES)
    with pytest.raises(DeviceError, match="on the host"):
        place(lowered, groups(lowered, 132), 4, 4, 1 << 40, range(len(lowered.channels)))
    shared = make_plan(machine("cpu:4"), collectives=("broadcast",))
    call = Call("broadcast", 4, (1000,), "float32", "", 0)
    multicast = program_for(shared, call, Rule("broadcast", 0, "direct", 4096, 2))
    with pytest.raises(ArgumentError, match="does not multicast"):
        place(multicast, groups(multicast, 132), 4, 4, SYMMETRIC_BYTES)


@pytest.mark.parametrize("collective", REAL)
@pytest.mark.parametrize("n", [2, 8])
def test_the_largest_gpu_has_flags_enough(collective: Collective, n: int) -> None:
    """Each pair of ranks has a fixed number of flag lines, whatever the plan."""
    lowered = program(collective, n, "onehop", chunk=LINE)
    assert len(place(lowered, groups(lowered, 256), 4, 4, 1 << 40)) == len(lowered.channels)


def test_fingerprints_tell_calls_apart() -> None:
    texts = [f"slots allreduce({n} x float32, op sum)" for n in range(2000)]
    prints = {fingerprint(text) for text in texts}
    assert len(prints) == len(texts)
    assert all(0 < p < 1 << 32 for p in prints)


def test_moves_are_counted_in_bytes() -> None:
    assert scale(Call("broadcast", 2, (5,), "complex128", "", 0)) == 16
    assert scale(Call("allreduce", 2, (5,), "complex128", "sum")) == 1
