"""An emulator of stages.cu in NumPy: it executes the tables of all ranks, many CTAs in a random but legal order.

An order is legal if the kernel's waits allow it: a CTA works on a chunk when its flags have come; each flag that it
then raises lands at any later time, those of one word in their order; a rank begins its next call when its own CTAs
are done, whatever the others do. A CTA of several rows takes them in turn. Every rank has mapped every rank's
symmetric memory at addresses of its own.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy as np
from msgspec.structs import replace

from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.ir import Program
from blinkmpi.program.reduction import Array, accumulator_of, combine, dtype_of, finish
from blinkmpi.program.template import Sizes, Template
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.codegen import StageKind, check_rows, kinds_of, row_words, table, widths
from blinkmpi.transport.cuda.kernel_layout import BEFORE_CHANNELS, SPAN_WORDS
from blinkmpi.transport.cuda.kernels.compiler import kernel_source
from blinkmpi.transport.cuda.loaded_kernel import LoadedTemplate
from blinkmpi.transport.cuda.memory_layout import (
    HEAD_BYTES,
    HOST_BYTES,
    LINE,
    LL16_AT,
    groups,
    laid_out,
    place,
    slots_at,
    stages_of,
)

STAGES = kernel_source("stages.cu")
MACHINES = {
    "hgx-h200 x 2": ("hgx-h200", "0,1"),
    "hgx-h200 x 3": ("hgx-h200", "0,1,2"),
    "hgx-h200 x 4": ("hgx-h200", "0,1,2,3"),
    "hgx-h200 x 8": ("hgx-h200", ""),
    "dgx-1v x 8": ("dgx-1v", ""),
    "dgx-1v 1,4,5,6": ("dgx-1v", "1,4,5,6"),
}


def words(struct: str) -> list[str]:
    """The names in one of the kernel's declarations."""
    found = re.search(struct, STAGES, re.DOTALL)
    assert found is not None
    return re.findall(r"\w+", found[1])


ROW = words(r"enum RowWord \{\n(.*?),\s+WORDS_BEFORE_CHANNELS")
CHANNEL = words(r"struct Channel \{ i64 (.*?); \}")


@cache
def plan_of(name: str) -> Plan:
    """The plan of one of the machines."""
    catalogued, gpus = MACHINES[name]
    return make_plan(modify(machine(catalogued), gpus=gpus) if gpus else machine(catalogued), gpus="onehop")


class World:
    """The symmetric memory of all ranks, and the host memory that they share."""

    def __init__(self, n: int, slot_bytes: int = 4 << 20) -> None:
        self.n, self.symmetric_bytes = n, slots_at(n) + slot_bytes
        self.memory = [np.zeros(self.symmetric_bytes, np.uint8) for _ in range(n)]
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
    kinds: list[list[StageKind]]
    words: list[int]  # of a row, by rank


def made(
    world: World,
    program: Program,
    sends: list[Array | None],
    *,
    ctas: int,
    in_place: bool = False,
    host_channels: Sequence[int] = (),
) -> Made:
    """Lay a program out as the transport does; ``host_channels`` take the host path."""
    call, ranks = program.call, range(program.call.n)
    groups_of, places = laid_out(program, ctas, *widths(call), world.symmetric_bytes, host_channels)
    check_rows(program, groups_of, ctas)
    rows = []
    for rank in ranks:
        *symmetric, host = world.mapped(rank)
        rows.append(table(program, rank, groups_of, places, symmetric, host, ctas=ctas))
        assert len(rows[-1]) == min(len(stages_of(program, rank, groups_of)), ctas)
    sends = [None if s is None else s.copy() for s in sends]
    recvs = in_place_of(call, sends) if in_place else received(call)
    return Made(
        program, sends, recvs, rows, [kinds_of(program, r) for r in ranks], [row_words(program, r) for r in ranks]
    )


def in_place_of(call: Call, sends: list[Array | None]) -> list[Array | None]:
    """Where reductions in place leave their results: a reduce-scatter in the rank's own block."""
    if call.collective != "reduce_scatter":
        return sends
    blocks = [call.block(r) for r in range(call.n)]
    return [None if s is None else s[at : at + count] for s, (at, count) in zip(sends, blocks, strict=True)]


def received(call: Call) -> list[Array | None]:
    """Buffers to receive into."""
    return [np.full(call.recv_count(r), 7, dtype_of(call.dtype)) for r in range(call.n)]


@dataclass
class MadeTemplate:
    """A template's tables, laid out as the transport does, for calls of some sizes."""

    program: Program
    rows: list[Any]
    loaded: list[LoadedTemplate]

    @classmethod
    def of(cls, world: World, template: Template, sizes: Sizes, *, ctas: int) -> Self:
        program, n = template.at(sizes.largest(template.call)), template.call.n
        groups_of = groups(program, ctas)
        room = template.slots(sizes)
        places = place(program, groups_of, *widths(program.call), world.symmetric_bytes, room=room)
        rows, loaded = [], []
        for rank in range(n):
            *symmetric, _ = world.mapped(rank)
            rows.append(table(program, rank, groups_of, places, symmetric))
            loaded.append(LoadedTemplate.of(template, rank))
        return cls(program, rows, loaded)

    def call(self, call: Call, sends: list[Array | None]) -> Made:
        """A call of these sizes: the kernel puts the words of its arguments into the rows."""
        rows = []
        first, last = ROW.index("COUNT"), ROW.index("STORE")
        for table_rows, loaded in zip(self.rows, self.loaded, strict=True):
            words = np.array(loaded.words(call), np.int64).reshape(-1, SPAN_WORDS)
            filled = table_rows.copy()
            filled[:, first : last + 1] = words[filled[:, ROW.index("SPAN")]]
            rows.append(filled)
        kinds = [kinds_of(self.program, rank) for rank in range(call.n)]
        words_of = [row_words(self.program, rank) for rank in range(call.n)]
        program = replace(self.program, call=call)
        return Made(program, [None if s is None else s.copy() for s in sends], received(call), rows, kinds, words_of)


@dataclass
class Turns:
    """Whose turn it is among the rows of a CTA: by round, then by row."""

    rows: list[int]
    taken: int = 0


@dataclass
class Row:
    """A row of a CTA of ``stages``: which chunks it has moved, and which of its flags have landed."""

    world: World
    call: Made
    rank: int
    seq: int
    row: dict[str, int]
    kind: StageKind
    ins: list[dict[str, int]]
    outs: list[dict[str, int]]
    number: int = 0  # in the CTA
    turns: Turns = field(default_factory=lambda: Turns([]))
    worked: int = 0
    landed: list[int] = field(default_factory=list)

    @classmethod
    def of_cta(cls, world: World, call: Made, rank: int, seq: int, numbers: Sequence[int]) -> list[Self]:
        """The rows of a CTA, without those that only fill its place in the table."""
        words = call.words[rank]
        rows = [cls.of(world, call, rank, seq, numbers[at : at + words]) for at in range(0, len(numbers), words)]
        turns = Turns([i for j in range(max(r.rounds for r in rows)) for i, r in enumerate(rows) if j < r.rounds])
        for i, row in enumerate(rows):
            row.number, row.turns = i, turns
        return [row for row in rows if row.rounds or any(c["slots"] for c in (*row.ins, *row.outs))]

    @classmethod
    def of(cls, world: World, call: Made, rank: int, seq: int, numbers: Sequence[int]) -> Self:
        row = dict(zip(ROW, numbers, strict=False))
        kind = call.kinds[rank][row["KIND"]]
        channels = [
            dict(zip(CHANNEL, numbers[BEFORE_CHANNELS + len(CHANNEL) * i :], strict=False))
            for i in range(kind.ins + kind.outs)
        ]
        ins, outs = channels[: kind.ins], channels[kind.ins :]
        return cls(world, call, rank, seq, row, kind, ins, outs, landed=[0] * len(channels))

    @property
    def rounds(self) -> int:
        chunks = -(-self.row["COUNT"] // self.row["CHUNK"])
        return len(range(self.row["FIRST"], chunks, self.row["STRIDE"]))

    @property
    def done(self) -> bool:
        return self.worked == self.rounds and all(k == self.rounds for k in self.landed)

    def may_work(self, entered: Sequence[int]) -> bool:
        """Whether the waiting warp would let the workers go on."""
        if self.worked == self.rounds or self.turns.rows[self.turns.taken] != self.number:
            return False
        if any(entered[c["peer"]] < self.seq for c in (*self.ins, *self.outs)):
            return False
        want = (self.seq << 24) + self.worked + 1
        heads = all(self.world.flag(self.rank, c["head"])[0] >= want for c in self.ins)
        free = want - self.row["DEPTH"]
        after = self.row["AFTER"]
        if after and self.world.flag(self.rank, after)[0] < want:
            return False
        return heads and (
            self.worked < self.row["DEPTH"] or all(self.world.flag(self.rank, c["tail"])[0] >= free for c in self.outs)
        )

    def work(self) -> None:
        """Move the next chunk, as ``move_chunks`` does."""
        row, kind, call = self.row, self.kind, self.call.program.call
        folds = call.collective in REDUCTIONS
        element = dtype_of(call.dtype) if folds else np.dtype(np.uint8)
        wide = accumulator_of(call.dtype) if folds else element
        k = row["FIRST"] + self.worked * row["STRIDE"]
        first = k * row["CHUNK"]
        n = min(row["COUNT"] - first, row["CHUNK"])
        slot = self.worked % row["DEPTH"]

        def part(buffer: Array | None, at: int) -> Array:
            assert buffer is not None
            start = at + first * element.itemsize
            assert start + n * element.itemsize <= buffer.nbytes, f"rank {self.rank}: beyond its buffer"
            return buffer.view(np.uint8)[start : start + n * element.itemsize].view(element)

        def in_slot(channel: dict[str, int], slot_bytes: int, dtype: np.dtype[Any]) -> Array:
            per_pack = 16 // element.itemsize
            packs = -(-n // per_pack) * per_pack * dtype.itemsize
            assert packs <= slot_bytes, "packs are written whole"
            return self.world.at(self.rank, channel["slots"] + slot * slot_bytes, packs)[: n * dtype.itemsize].view(
                dtype
            )

        out_type = wide if kind.out_wide else element
        in_types = [wide if kind.in_wide >> i & 1 else element for i in range(kind.ins)]
        operands = [in_slot(c, row["IN_BYTES"], kind_in) for c, kind_in in zip(self.ins, in_types, strict=True)]
        if kind.own_at >= 0:
            operands.insert(kind.own_at, part(self.call.sends[self.rank], row["OWN"]))
        value = operands[0].astype(wide)
        for operand in operands[1:]:
            combine(call.op, value, operand.astype(wide), value)
        if kind.final:
            finish(call.op, call.n, value)
        for c in self.outs:
            in_slot(c, row["OUT_BYTES"], out_type)[:] = value.astype(out_type)
        if kind.stores:
            part(self.call.recvs[self.rank], row["STORE"])[:] = value.astype(element)
        self.worked += 1
        self.turns.taken += 1

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
    live: list[list[Row]] = [[] for _ in range(n)]
    postponed: set[tuple[int, int]] = set()
    stuck = False

    def moves(rank: int) -> Iterator[bool]:
        while not live[rank] and entered[rank] - seq < len(calls):
            call = calls[entered[rank] - seq]
            entered[rank] += 1
            ctas = call.rows[rank].tolist()
            live[rank] = [row for cta in ctas for row in Row.of_cta(world, call, rank, entered[rank], cta)]
            yield True
        for row in live[rank]:
            if row.may_work(entered):
                row.work()
                yield True
            for which in range(len(row.landed)):
                if (rank, which) not in postponed:
                    yield row.land(which)
        live[rank] = [row for row in live[rank] if not row.done]

    while any(live) or min(entered) - seq < len(calls):
        slow = set(np.flatnonzero(rng.random(n) < 0.4).tolist())
        moved = False
        for rank in rng.permutation(n).tolist():
            if stuck or rank not in slow:
                moved |= any([*moves(rank)])
        if not moved and stuck and not postponed:
            waiting = [(c.rank, c.row["STAGE"], c.worked, c.rounds) for of in live for c in of]
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
            for row, c, slot_bytes in [
                (one.row, c, one.row[name])
                for one in Row.of_cta(world, call, rank, 1, numbers)
                for name, channels in (("IN_BYTES", one.ins), ("OUT_BYTES", one.outs))
                for c in channels
            ]:
                owner, slots = world.where(rank, c["slots"])
                ends[owner, slots, slots + slot_bytes * row["DEPTH"]] += 1
                assert slots % LINE == 0
                assert owner == world.n or slots >= slots_at(world.n)
                assert slots + slot_bytes * row["DEPTH"] <= world.memory[owner].size
                for flag in (c["head"], c["tail"]):
                    owner, at = world.where(rank, flag)
                    ends[owner, at, at + LINE] += 1
                    assert at % LINE == 0
                    assert HEAD_BYTES <= at <= LL16_AT - LINE
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
