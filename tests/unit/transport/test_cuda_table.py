"""The tables of stages.cu, executed by NumPy: many CTAs in a random but legal order, over one memory.

What is legal is what the kernel's waits allow and no more: a CTA works on a chunk when its flags have come; each flag
that it then raises lands at any later time, those of one word in their order; a rank begins its next call when its own
CTAs are through, whatever the others do. Every rank has addresses of its own for every arena.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from blinkmpi.planning.plan import Plan, Rule
from blinkmpi.planning.selection import make_plan, program_for
from blinkmpi.program import interpreter
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.ir import Program
from blinkmpi.program.reduction import Array, accumulator_of, combine, dtype_of, finish
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.codegen import BEFORE_CHANNELS, CHANNEL_WORDS, Shape, shapes_of, table
from blinkmpi.transport.cuda.device import kernel_source
from blinkmpi.transport.cuda.memory_layout import (
    BOXES_AT,
    HEAD_BYTES,
    HOST_BYTES,
    LINE,
    groups,
    place,
    slots_at,
    stages_of,
)
from tests.unit.trees.packings import call_of, reference, sends_of

STAGES = kernel_source("stages.cu")
MACHINES = {
    "hgx-h200 x 2": ("hgx-h200", "0,1"),
    "hgx-h200 x 3": ("hgx-h200", "0,1,2"),
    "hgx-h200 x 4": ("hgx-h200", "0,1,2,3"),
    "hgx-h200 x 8": ("hgx-h200", ""),
    "dgx-1v x 8": ("dgx-1v", ""),
    "dgx-1v 1,4,5,6": ("dgx-1v", "1,4,5,6"),
}
TYPES = ("float32", "bfloat16", "int8", "float64", "complex64")


def words(struct: str) -> list[str]:
    """The names in one of the kernel's declarations."""
    found = re.search(struct, STAGES, re.DOTALL)
    assert found is not None
    return re.findall(r"\w+", found[1])


ROW = words(r"enum \{[^\n]*\n(.*?), WORDS_BEFORE_CHANNELS")
CHANNEL = words(r"struct Channel \{ i64 (.*?); \}")


@cache
def plan_of(name: str) -> Plan:
    """The plan of one of the machines."""
    catalogued, gpus = MACHINES[name]
    return make_plan(modify(machine(catalogued), gpus=gpus) if gpus else machine(catalogued), gpus="onehop")


class World:
    """The arenas of all ranks, and the host's memory, which they share."""

    def __init__(self, n: int, slot_bytes: int = 4 << 20) -> None:
        self.n, self.arena_bytes = n, slots_at(n) + slot_bytes
        self.memory = [np.zeros(self.arena_bytes, np.uint8) for _ in range(n)]
        self.memory.append(np.zeros(HOST_BYTES, np.uint8))

    def mapped(self, viewer: int) -> list[int]:
        """Where a rank has mapped them, the host's last."""
        return [(1 + viewer * (self.n + 1) + owner) << 40 for owner in range(self.n + 1)]

    def where(self, viewer: int, address: int) -> tuple[int, int]:
        """(owner, offset) of one of a rank's addresses."""
        seen_by, owner = divmod((address >> 40) - 1, self.n + 1)
        assert seen_by == viewer, f"rank {viewer} uses an address of rank {seen_by}"
        return owner, address & (1 << 40) - 1

    def at(self, viewer: int, address: int, nbytes: int) -> Array:
        """The bytes at an address."""
        owner, offset = self.where(viewer, address)
        assert offset + nbytes <= self.memory[owner].size
        return self.memory[owner][offset : offset + nbytes]

    def flag(self, viewer: int, address: int) -> Array:
        """A flag's word."""
        return self.at(viewer, address, 8).view(np.int64)


@dataclass
class Made:
    """A call with its tables and buffers."""

    program: Program
    sends: list[Array | None]
    recvs: list[Array | None]
    rows: list[Any]
    shapes: list[list[Shape]]


def made(
    world: World,
    program: Program,
    sends: list[Array | None],
    *,
    ctas: int,
    in_place: bool = False,
    hosted: Sequence[int] = (),
) -> Made:
    """Lay a program out as the transport does; ``hosted`` channels take the host path."""
    call = program.call
    item = dtype_of(call.dtype).itemsize
    partial = accumulator_of(call.dtype).itemsize if call.collective in REDUCTIONS else item
    groups_of = groups(program, ctas, hosted)
    places = place(program, groups_of, item, partial, world.arena_bytes, hosted)
    rows = []
    for rank in range(call.n):
        *arenas, host = world.mapped(rank)
        rows.append(table(program, rank, groups_of, places, arenas, host))
        assert len(rows[-1]) == len(stages_of(program, rank, groups_of)) <= ctas
    recvs: list[Array | None] = [np.full(call.recv_count(r), 7, dtype_of(call.dtype)) for r in range(call.n)]
    sends = [None if s is None else s.copy() for s in sends]
    return Made(program, sends, sends if in_place else recvs, rows, [shapes_of(program, r) for r in range(call.n)])


@dataclass
class Cta:
    """A CTA of ``stages``: which chunks it has moved, and which of its flags have landed."""

    world: World
    call: Made
    rank: int
    seq: int
    row: dict[str, int]
    shape: Shape
    ins: list[dict[str, int]]
    outs: list[dict[str, int]]
    worked: int = 0
    landed: list[int] = field(default_factory=list)

    @staticmethod
    def of(world: World, call: Made, rank: int, seq: int, numbers: Sequence[int]) -> Cta:
        row = dict(zip(ROW, numbers, strict=False))
        shape = call.shapes[rank][row["SHAPE"]]
        channels = [
            dict(zip(CHANNEL, numbers[BEFORE_CHANNELS + CHANNEL_WORDS * i :], strict=False))
            for i in range(shape.ins + shape.outs)
        ]
        ins, outs = channels[: shape.ins], channels[shape.ins :]
        return Cta(world, call, rank, seq, row, shape, ins, outs, landed=[0] * len(channels))

    @property
    def rounds(self) -> int:
        chunks = -(-self.row["COUNT"] // self.row["CHUNK"])
        return len(range(self.row["FIRST"], chunks, self.row["STRIDE"]))

    @property
    def done(self) -> bool:
        return self.worked == self.rounds and all(k == self.rounds for k in self.landed)

    def may_work(self, entered: Sequence[int]) -> bool:
        """Whether the waiter would let the workers go on."""
        if self.worked == self.rounds or any(entered[c["peer"]] < self.seq for c in (*self.ins, *self.outs)):
            return False
        want = (self.seq << 24) + self.worked + 1
        heads = all(self.world.flag(self.rank, c["head"])[0] >= want for c in self.ins)
        free = want - self.row["DEPTH"]
        return heads and (
            self.worked < self.row["DEPTH"] or all(self.world.flag(self.rank, c["tail"])[0] >= free for c in self.outs)
        )

    def work(self) -> None:
        """Move the next chunk, as ``run`` does."""
        row, shape, call = self.row, self.shape, self.call.program.call
        folds = call.collective in REDUCTIONS
        kind = dtype_of(call.dtype) if folds else np.dtype(np.uint8)
        wide = accumulator_of(call.dtype) if folds else kind
        k = row["FIRST"] + self.worked * row["STRIDE"]
        first = k * row["CHUNK"]
        n = min(row["COUNT"] - first, row["CHUNK"])
        slot = self.worked % row["DEPTH"]

        def part(buffer: Array | None, at: int) -> Array:
            assert buffer is not None
            start = at + first * kind.itemsize
            assert start + n * kind.itemsize <= buffer.nbytes, f"rank {self.rank}: beyond its buffer"
            return buffer.view(np.uint8)[start : start + n * kind.itemsize].view(kind)

        def in_slot(channel: dict[str, int], slot_bytes: int, dtype: np.dtype[Any]) -> Array:
            per_pack = 16 // kind.itemsize
            packs = -(-n // per_pack) * per_pack * dtype.itemsize
            assert packs <= slot_bytes, "packs are written whole"
            return self.world.at(self.rank, channel["slots"] + slot * slot_bytes, packs)[: n * dtype.itemsize].view(
                dtype
            )

        in_type, out_type = (wide if partial else kind for partial in (shape.in_partial, shape.out_partial))
        operands = [in_slot(c, row["IN_BYTES"], in_type) for c in self.ins]
        if shape.own_at >= 0:
            operands.insert(shape.own_at, part(self.call.sends[self.rank], row["OWN"]))
        value = operands[0].astype(wide)
        for operand in operands[1:]:
            combine(call.op, value, operand.astype(wide), value)
        if shape.final:
            finish(call.op, call.n, value)
        for c in self.outs:
            in_slot(c, row["OUT_BYTES"], out_type)[:] = value.astype(out_type)
        if shape.stores:
            part(self.call.recvs[self.rank], row["STORE"])[:] = value.astype(kind)
        self.worked += 1

    def land(self, which: int) -> bool:
        """Let one flag come one chunk further, if it has been raised."""
        if self.landed[which] == self.worked:
            return False
        address = [*(c["tail"] for c in self.ins), *(c["head"] for c in self.outs)][which]
        self.landed[which] += 1
        self.world.flag(self.rank, address)[0] = (self.seq << 24) + self.landed[which]
        return True


class Deadlock(AssertionError):
    """Nothing can go on."""


def execute(world: World, calls: list[Made], rng: np.random.Generator, *, seq: int = 0) -> None:
    """Run calls one after another on every rank; some ranks and flags are slow, until nothing else can go on."""
    n, entered = world.n, [seq] * world.n
    live: list[list[Cta]] = [[] for _ in range(n)]
    postponed: set[tuple[int, int]] = set()
    stuck = False

    def moves(rank: int) -> Iterator[bool]:
        while not live[rank] and entered[rank] - seq < len(calls):
            call = calls[entered[rank] - seq]
            entered[rank] += 1
            live[rank] = [Cta.of(world, call, rank, entered[rank], row.tolist()) for row in call.rows[rank]]
            yield True
        for cta in live[rank]:
            if cta.may_work(entered):
                cta.work()
                yield True
            for which in range(len(cta.landed)):
                if (rank, which) not in postponed:
                    yield cta.land(which)
        live[rank] = [cta for cta in live[rank] if not cta.done]

    while any(live) or min(entered) - seq < len(calls):
        slow = set(np.flatnonzero(rng.random(n) < 0.4).tolist())
        moved = False
        for rank in rng.permutation(n).tolist():
            if stuck or rank not in slow:
                moved |= any([*moves(rank)])
        if not moved and stuck and not postponed:
            waiting = [(c.rank, c.row["LANE"], c.worked, c.rounds) for of in live for c in of]
            raise Deadlock(f"calls {entered}; (rank, stage, chunks done, of): {waiting}")
        stuck = not moved
        if stuck:
            postponed.clear()
        elif rng.random() < 0.1:
            postponed = {(r, int(i)) for r in range(n) for i in rng.integers(0, 4, 2)}


def check_layout(world: World, call: Made) -> None:
    """Writer and reader agree on every slot and flag, and no two channels share a byte."""
    ends: Counter[tuple[int, int, int]] = Counter()
    for rank, rows in enumerate(call.rows):
        for numbers in rows.tolist():
            cta = Cta.of(world, call, rank, 1, numbers)
            for c, slot_bytes in [
                *((c, cta.row["IN_BYTES"]) for c in cta.ins), *((c, cta.row["OUT_BYTES"]) for c in cta.outs)
            ]:  # fmt: skip
                owner, slots = world.where(rank, c["slots"])
                ends[owner, slots, slots + slot_bytes * cta.row["DEPTH"]] += 1
                assert slots % LINE == 0
                assert owner == world.n or slots >= slots_at(world.n)
                assert slots + slot_bytes * cta.row["DEPTH"] <= world.memory[owner].size
                for flag in (c["head"], c["tail"]):
                    owner, at = world.where(rank, flag)
                    ends[owner, at, at + LINE] += 1
                    assert at % LINE == 0
                    assert HEAD_BYTES <= at <= BOXES_AT - LINE
    assert set(ends.values()) <= {2}, "each is seen by one writer and one reader"
    for (owner, _, end), (other, begin, _) in zip(sorted(ends), sorted(ends)[1:], strict=False):
        assert owner != other or end <= begin, f"rank {owner}: bytes {begin}..{end} belong to two channels"


def compare(call: Made, want: Sequence[Array | None]) -> None:
    """Every rank has what it should have, to the bit."""
    for rank, expected in enumerate(want):
        got = call.recvs[rank]
        if expected is not None:
            assert got is not None
            where = f"{call.program.call.collective} by {call.program.scheme}: rank {rank}"
            assert got[: expected.size].tobytes() == expected.tobytes(), where


def pairs(plan: Plan) -> list[tuple[Any, str]]:
    """Every (collective, scheme) that moves something."""
    return list(dict.fromkeys((p.collective, p.scheme) for p in plan.packings if p.collective != "barrier"))


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
        call = call_of(collective, plan.n, int(rng.integers(300, 1200)), dtype=dtype, root=root)
        rule = Rule(collective, 0, scheme, 512, depth)
        sends = sends_of(call, rng)
        program = program_for(plan, call, rule)
        hosted = np.flatnonzero(rng.random(len(program.channels)) < rng.choice([0.0, 0.3])).tolist()
        calls.append(made(world, program, sends, ctas=int(rng.integers(40, 133)), hosted=hosted))
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
        call = call_of(collective, plan.n, count, dtype=dtype, root=seq % plan.n)
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
            sends, hosted = sends_of(call, rng), range(len(program.channels)) if host_path else ()
            calls.append(made(world, program, sends, ctas=32, hosted=hosted))
            wants.append(reference(call, sends))
        execute(world, calls, rng)
        for made_call, want in zip(calls, wants, strict=True):
            compare(made_call, want)


def test_only_what_a_rank_writes_is_paced() -> None:
    """The time of a link is kept by the rank that sends over it."""
    plan = plan_of("dgx-1v x 8")
    call = call_of("allreduce", 8, 5000)
    program = program_for(plan, call, Rule("allreduce", 0, "trees", 1024, 2))
    groups_of = groups(program, 132)
    places = place(program, groups_of, 4, 4, World(8).arena_bytes)
    paced = set()
    for rank in range(8):

        def pace(channel: int, rank: int = rank) -> tuple[int, int]:
            assert program.channels[channel].writer == rank
            paced.add(channel)
            return 1000 + channel, 10 + channel

        rows = table(program, rank, groups_of, places, [0] * 8, 0, pace).tolist()
        assert len(rows) == len(stages_of(program, rank, groups_of))
        for row, (stage, _, _) in zip(rows, stages_of(program, rank, groups_of), strict=True):
            assert row[ROW.index("LINKS")] == 1
            channels = [row[at:] for at in range(BEFORE_CHANNELS, len(row), CHANNEL_WORDS)][
                : len(stage.ins + stage.outs)
            ]
            clocks, paces = ([words[CHANNEL.index(name)] for words in channels] for name in ("clock", "pace"))
            assert clocks == [0] * len(stage.ins) + [1000 + c for c in stage.outs]
            assert paces == [0] * len(stage.ins) + [10 + c for c in stage.outs]
    assert paced == set(range(len(program.channels)))


# ---------------------------------------------------------------- the emulator finds what it should


def broken(seed: int, change: Any) -> None:
    """Run an allreduce whose tables were changed."""
    rng = np.random.default_rng(seed)
    plan = plan_of("dgx-1v 1,4,5,6")
    world = World(plan.n)
    call = call_of("allreduce", plan.n, 3000)
    sends = sends_of(call, rng)
    ran = made(world, program_for(plan, call, Rule("allreduce", 0, "trees", 512, 2)), sends, ctas=32)
    change(ran)
    check_layout(world, ran)
    execute(world, [ran], rng)
    compare(ran, reference(call, sends))


def test_shared_slots_are_found() -> None:
    def change(ran: Made) -> None:
        slots = BEFORE_CHANNELS + CHANNEL.index("slots")
        first = next(row for row in ran.rows[0] if ran.shapes[0][row[0]].ins > 0)
        first[slots] += 64

    with pytest.raises(AssertionError):
        broken(1, change)


def test_a_flag_that_nobody_raises_is_a_deadlock() -> None:
    def change(ran: Made) -> None:
        for rank, rows in enumerate(ran.rows):
            for row in rows:
                if ran.shapes[rank][row[0]].ins == 0:
                    row[ROW.index("COUNT")] = 0

    with pytest.raises(Deadlock):
        broken(2, change)


def test_a_deeper_ring_than_there_is_overwrites_chunks() -> None:
    def change(ran: Made) -> None:
        for rank, rows in enumerate(ran.rows):
            for row in rows:
                if ran.shapes[rank][row[0]].ins == 0:
                    row[ROW.index("STRIDE")] = 1

    with pytest.raises(AssertionError):
        broken(3, change)
