"""The tables of stages.cu, executed by an emulator against the reference; where a program's stages and slots lie."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from blinkmpi.errors import ArgumentError, DeviceError
from blinkmpi.planning.plan import Plan, Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import program_for
from blinkmpi.program import interpreter
from blinkmpi.program.call import Call
from blinkmpi.program.in_place import without_own_blocks
from blinkmpi.program.ir import Program
from blinkmpi.program.reduction import Array, accumulator_of, dtype_of, finish
from blinkmpi.topology import machine, modify
from blinkmpi.transport.announcement import COUNT, Called
from blinkmpi.transport.cuda.codegen import scale, table
from blinkmpi.transport.cuda.kernel_layout import BEFORE_CHANNELS
from blinkmpi.transport.cuda.loaded_kernel import fingerprint
from blinkmpi.transport.cuda.memory_layout import (
    LINE,
    SYMMETRIC_BYTES,
    groups,
    laid_out,
    most_stages,
    place,
    sent_first,
    stages_of,
)
from blinkmpi.trees.tree import MAY_BE_CARRIED, Collective
from tests.unit.transport.table_emulator import (
    CHANNEL,
    MACHINES,
    ROW,
    Deadlock,
    Made,
    Row,
    World,
    check_layout,
    compare,
    execute,
    made,
    plan_of,
)
from tests.unit.transport.test_cuda_one_hop import REAL
from tests.unit.trees.packings import call_of, even_call, reference, sends_of

TYPES = ("float32", "bfloat16", "int8", "float64", "complex64")


def pairs(plan: Plan) -> list[tuple[Any, str]]:
    """Every (collective, scheme) that moves something and that every root has."""
    found = [(p.collective, p.scheme) for p in plan.packings if p.collective != "barrier"]
    found = [(c, scheme) for c, scheme in found if all(scheme in plan.schemes(c, root) for root in range(plan.n))]
    return list(dict.fromkeys([*found, *((c, scheme) for c in MAY_BE_CARRIED for scheme in plan.schemes(c))]))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", MACHINES)
def test_calls_one_after_another(name: str, depth: int, rng: np.random.Generator) -> None:
    """All collectives by all schemes, over the same memory: nothing is reset between them."""
    plan = plan_of(name)
    world = World(plan.n)
    calls, wants = [], []
    order = pairs(plan)
    for i in rng.permutation(len(order)).tolist():
        collective, scheme = order[i]
        root, dtype = int(rng.integers(plan.n)), TYPES[int(rng.integers(len(TYPES)))]
        uneven = bool(rng.random() < 0.5)
        call = call_of(collective, plan.n, int(rng.integers(300, 1200)), dtype=dtype, root=root, uneven=uneven)
        rule = Rule(collective, 0, scheme, 512, depth)
        sends = sends_of(call, rng)
        program = program_for(plan, call, rule)
        host_channels = np.flatnonzero(rng.random(len(program.channels)) < rng.choice([0.0, 0.3])).tolist()
        calls.append(made(world, program, sends, ctas=int(rng.integers(40, 133)), host_channels=host_channels))
        wants.append(reference(call, sends))
        check_layout(world, calls[-1])
    execute(world, calls, rng)
    for call, want in zip(calls, wants, strict=True):
        compare(call, want)


@pytest.mark.parametrize("count", [1, 2, 63, 65, 127, 4099])
@pytest.mark.parametrize("name", ["hgx-h200 x 4", "dgx-1v 1,4,5,6"])
def test_odd_sizes(name: str, count: int, rng: np.random.Generator) -> None:
    plan = plan_of(name)
    world = World(plan.n)
    for seq, (collective, scheme) in enumerate(pairs(plan)):
        dtype = TYPES[seq % len(TYPES)]
        call = call_of(collective, plan.n, count, dtype=dtype, root=seq % plan.n, uneven=seq % 2 == 0)
        sends = sends_of(call, rng)
        ran = made(world, program_for(plan, call, Rule(collective, 0, scheme, 1024, 2)), sends, ctas=64)
        execute(world, [ran], rng, seq=seq)
        compare(ran, reference(call, sends))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", MACHINES)
def test_sums_in_place_have_the_bits_of_the_simulator(name: str, dtype: str, rng: np.random.Generator) -> None:
    plan = plan_of(name)
    world = World(plan.n)
    for seq, (scheme, op) in enumerate((s, op) for s in plan.schemes("allreduce") for op in ("sum", "avg")):
        call = Call("allreduce", plan.n, (1501,), dtype, op)
        program = program_for(plan, call, Rule("allreduce", 0, scheme, 2048, 2))
        sends: list[Array | None] = [rng.normal(size=1501).astype(dtype_of(dtype)) for _ in range(plan.n)]
        ran = made(world, program, sends, ctas=132, in_place=True)
        execute(world, [ran], rng, seq=seq)
        compare(ran, interpreter.run(program, sends))
        if scheme == "onehop":
            total = np.zeros(1501, accumulator_of(dtype))
            for i, send in enumerate(sends):
                assert send is not None
                total = send.astype(total.dtype) + (total if i else np.zeros_like(total))
            finish(op, plan.n, total)
            compare(ran, [total.astype(dtype_of(dtype))] * plan.n)


def alltoall_in_place(world: World, name: str, rng: np.random.Generator, ctas: int) -> tuple[Made, list[Array | None]]:
    """A call with its tables, and what it should give."""
    plan = plan_of(name)
    call = replace(call_of("alltoall", plan.n, int(rng.integers(1, 1500)), dtype=TYPES[ctas % 5]), in_place=True)
    program = program_for(plan, call, Rule("alltoall", 0, "onehop", 512, 2))
    sends = sends_of(call, rng)
    return made(world, without_own_blocks(program), sends, ctas=ctas, in_place=True), reference(call, sends)


@pytest.mark.parametrize("name", [name for name in MACHINES if name.startswith("hgx")])
def test_alltoall_in_place(name: str, rng: np.random.Generator) -> None:
    """Blocks are not copied before the call, with any number of CTAs and whatever is late."""
    world = World(plan_of(name).n)
    ran = [alltoall_in_place(world, name, rng, ctas) for ctas in (2 * world.n, 40, 63, 64, 100, 132)]
    for call, _ in ran:
        check_layout(world, call)
        for rank, rows in enumerate(call.rows):
            program = call.program
            assert sent_first(program, rank, laid_out(program, len(rows), 1, 1, world.symmetric_bytes)[0])
            assert [row[ROW.index("AFTER")] != 0 for row in rows] == [row[ROW.index("STORE")] >= 0 for row in rows]
            assert not any(row[ROW.index("STORE")] == row[ROW.index("OWN")] for row in rows)
    execute(world, [call for call, _ in ran], rng)
    for call, want in ran:
        compare(call, want)


def test_without_waiting_for_what_is_sent_alltoall_in_place_would_be_wrong(rng: np.random.Generator) -> None:
    def run(times: int) -> None:
        for _ in range(times):
            world = World(4)
            ran, want = alltoall_in_place(world, "hgx-h200 x 4", rng, 40)
            for rows in ran.rows:
                rows[:, ROW.index("AFTER")] = 0
            execute(world, [ran], rng)
            compare(ran, want)

    with pytest.raises(AssertionError, match="alltoall by onehop"):
        run(20)


def test_alltoall_in_place_that_must_be_copied() -> None:
    """Where a block is cut, where blocks differ, and where a CTA has several rows."""
    cut = make_plan(machine("dgx-1v"), collectives=["alltoall"], gpus="onehop")
    even = plan_of("hgx-h200 x 4")
    for plan, uneven, scheme in ((cut, False, cut.packings[0].scheme), (even, True, "onehop")):
        call = replace(call_of("alltoall", plan.n, 3000, uneven=uneven), in_place=True)
        program = without_own_blocks(program_for(plan, call, Rule("alltoall", 0, scheme, 512, 2)))
        groups_of, _ = laid_out(program, 132, 4, 4, SYMMETRIC_BYTES)
        assert any(sent_first(program, rank, groups_of) is None for rank in range(plan.n))
    world = World(4)
    call = replace(call_of("alltoall", 4, 3000), in_place=True)
    program = program_for(even, call, Rule("alltoall", 0, "onehop", 512, 2))
    crowded = made(world, program, sends_of(call, np.random.default_rng(1)), ctas=3)
    for rank, rows in enumerate(crowded.rows):
        several = [Row.of_cta(world, crowded, rank, 1, cta) for cta in rows.tolist()]
        assert max(map(len, several)) > 1
        assert not any(one.row["AFTER"] for cta in several for one in cta)


@pytest.mark.parametrize("host_path", [False, True])
def test_what_is_late_in_one_call_does_no_harm_in_the_next(host_path: bool, rng: np.random.Generator) -> None:
    """A reader may read its last chunk, and raise its last flag, when the others are in the next call's channels."""
    plan = plan_of("hgx-h200 x 4")
    for _ in range(30):
        world = World(plan.n)
        calls, wants = [], []
        for _ in range(8):
            collective = ("broadcast", "reduce", "gather", "scatter")[int(rng.integers(4))]
            call = call_of(collective, plan.n, 40, root=int(rng.integers(plan.n)))
            program = program_for(plan, call, Rule(collective, 0, plan.schemes(collective, call.root)[0], 256, 2))
            sends, host_channels = sends_of(call, rng), range(len(program.channels)) if host_path else ()
            calls.append(made(world, program, sends, ctas=32, host_channels=host_channels))
            wants.append(reference(call, sends))
        execute(world, calls, rng)
        for made_call, want in zip(calls, wants, strict=True):
            compare(made_call, want)


def test_a_link_is_emulated_by_the_rank_that_writes() -> None:
    """The clock of an emulated link is at the rank that sends over it."""
    plan = plan_of("dgx-1v x 8")
    call = call_of("allreduce", 8, 5000)
    program = program_for(plan, call, Rule("allreduce", 0, "trees", 1024, 2))
    groups_of = groups(program, 132)
    places = place(program, groups_of, 4, 4, World(8).symmetric_bytes)
    paced = set()
    for rank in range(8):

        def emulated(channel: int, rank: int = rank) -> tuple[int, int]:
            assert program.channels[channel].writer == rank
            paced.add(channel)
            return 1000 + channel, 10 + channel

        rows = table(program, rank, groups_of, places, [0] * 8, 0, emulated).tolist()
        assert len(rows) == len(stages_of(program, rank, groups_of))
        for row, (stage, _, _) in zip(rows, stages_of(program, rank, groups_of), strict=True):
            assert row[ROW.index("EMULATED")] == 1
            channels = [row[at:] for at in range(BEFORE_CHANNELS, len(row), len(CHANNEL))][
                : len(stage.ins + stage.outs)
            ]
            clocks, paces = (
                [words[CHANNEL.index(name)] for words in channels] for name in ("link_clock", "link_ns_per_mib")
            )
            assert clocks == [0] * len(stage.ins) + [1000 + c for c in stage.outs]
            assert paces == [0] * len(stage.ins) + [10 + c for c in stage.outs]
    assert paced == set(range(len(program.channels)))


# ---------------------------------------------------------------- the emulator finds what it should


def in_first_stages(word: str, value: int) -> Callable[[Made], None]:
    """Set a word of the rows of all stages that read no channel."""

    def change(ran: Made) -> None:
        for kinds, rows in zip(ran.kinds, ran.rows, strict=True):
            for row in rows:
                if kinds[row[0]].ins == 0:
                    row[ROW.index(word)] = value

    return change


def shared_slots(ran: Made) -> None:
    slots = BEFORE_CHANNELS + CHANNEL.index("slots")
    first = next(row for row in ran.rows[0] if ran.kinds[0][row[0]].ins > 0)
    first[slots] += 64


@pytest.mark.parametrize(("seed", "change", "error"), [
    (1, shared_slots, AssertionError),
    (2, in_first_stages("COUNT", 0), Deadlock),  # a flag that nobody raises
    (3, in_first_stages("STRIDE", 1), AssertionError),  # a deeper ring than there is overwrites chunks
], ids=["shared slots", "no flag", "deeper ring"])  # fmt: skip
def test_changed_tables_are_found(seed: int, change: Callable[[Made], None], error: type[Exception]) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_of("dgx-1v 1,4,5,6")
    world = World(plan.n)
    call = call_of("allreduce", plan.n, 3000)
    sends = sends_of(call, rng)
    ran = made(world, program_for(plan, call, Rule("allreduce", 0, "trees", 512, 2)), sends, ctas=32)
    change(ran)

    def checked() -> None:
        check_layout(world, ran)
        execute(world, [ran], rng)
        compare(ran, reference(call, sends))

    with pytest.raises(error):
        checked()


# ---------------------------------------------------------------- groups and slots


H200 = machine("hgx-h200")


def program(collective: Collective, n: int, scheme: str, *, count: int = 1 << 20, chunk: int = 64 << 10) -> Program:
    topology = modify(H200, gpus=",".join(map(str, range(n))))
    plan = make_plan(topology, collectives=(collective,), gpus="onehop")
    return program_for(plan, even_call(collective, n, count), Rule(collective, 0, scheme, chunk, 4))


@pytest.mark.parametrize("collective", [*REAL, *MAY_BE_CARRIED])
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
    assert groups(lowered, 1) == dict.fromkeys(taken, 1), "CTAs have several rows then"


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


@pytest.mark.parametrize("collective", [*REAL, *MAY_BE_CARRIED])
@pytest.mark.parametrize("n", [2, 8])
def test_the_largest_gpu_has_flags_enough(collective: Collective, n: int) -> None:
    """Each pair of ranks has a fixed number of flag lines, whatever the plan."""
    lowered = program(collective, n, "onehop", chunk=LINE)
    assert len(place(lowered, groups(lowered, 256), 4, 4, 1 << 40)) == len(lowered.channels)


def test_fingerprints_tell_calls_apart() -> None:
    texts = [Called(f"allreduce({n} x float32, op sum)") for n in range(2000)]
    counts = [Called(f"allreduce({COUNT} x float32, op {op})", n) for op in ("sum", "max") for n in range(2000)]
    prints = {fingerprint("slots", called) for called in (*texts, *counts)} | {fingerprint("direct", texts[0])}
    assert len(prints) == len(texts) + len(counts) + 1
    assert all(0 < p < 1 << 32 for p in prints)


def test_moves_are_counted_in_bytes() -> None:
    assert scale(Call("broadcast", 2, (5,), "complex128", "", 0)) == 16
    assert scale(Call("allreduce", 2, (5,), "complex128", "sum")) == 1
