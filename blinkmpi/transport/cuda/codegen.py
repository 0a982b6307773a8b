"""From a program to a kernel's source and table (Blink section 4, CodeGen): pure, no GPU needed.

Trees do not appear in the source, only the kinds of stages that a rank has
(how many channels are folded, where the own operand stands, how many are
written): few per plan, each compiled with its loops unrolled. Addresses, spans
and chunks are in the table, one row per CTA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ...program.call import REDUCTIONS, Call
from ...program.ir import Program, Stage
from ...program.partition import RemoteEnd
from ...program.reduction import accumulator_of, dtype_of
from .device import kernel_source
from .memory_layout import HEAD_BYTES, LINE, MAX_CTAS, MAX_RANKS, Place, stages_of

ELEMENTS = {
    "bool": "u8", "uint8": "u8", "int8": "signed char", "uint16": "u16", "int16": "short", "uint32": "u32",
    "int32": "int", "uint64": "u64", "int64": "i64", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
    "float16": "f16", "bfloat16": "bf16", "float32": "float",
    "float64": "double", "complex64": "cplx<float>", "complex128": "cplx<double>",
}  # fmt: skip
WORKERS = 448  # threads of a CTA that move data
PACKET_THREADS = 256
EXTRA = 64  # in stages.cu: a warp that waits, a warp that raises flags
BEFORE_CHANNELS, CHANNEL_WORDS = 16, 6  # of a row, as in stages.cu
MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A kind of stage, as a template of stages.cu knows it."""

    ins: int
    own_at: int
    outs: int
    stores: bool
    final: bool
    in_partial: bool
    out_partial: bool

    def __str__(self) -> str:
        flags = (self.stores, self.final, self.in_partial, self.out_partial)
        return f"{self.ins}, {self.own_at}, {self.outs}, " + ", ".join(str(f).lower() for f in flags)


def reduces(call: Call) -> bool:
    """Whether a call folds elements; if not, only bytes move."""
    return call.collective in REDUCTIONS


def item_bytes(call: Call) -> tuple[int, int]:
    """(bytes of an element, of a partial result) as the kernels count: single bytes where nothing is folded."""
    return (dtype_of(call.dtype).itemsize, accumulator_of(call.dtype).itemsize) if reduces(call) else (1, 1)


def scale(call: Call) -> int:
    """The call's elements in the kernels' elements."""
    return 1 if reduces(call) else dtype_of(call.dtype).itemsize


def prelude(call: Call, n: int) -> str:
    """The macros and the text that every kernel begins with."""
    element = ELEMENTS[call.dtype] if reduces(call) else "raw"
    op = {"avg": "SUM", "": "NONE"}.get(call.op, call.op.upper())
    return (
        f"#define N {n}\n#define MAX_RANKS {MAX_RANKS}\n#define WORKERS {WORKERS}\n#define ELEMENT {element}\n"
        f"#define OPERATION {op}\n#define HEAD_BYTES {HEAD_BYTES}\n#define MAX_CTAS {MAX_CTAS}\n"
        + kernel_source("common.cuh")
    )


def packet_threads(n: int, *, lines: bool) -> int:
    """Threads of a CTA of ``packets``: for long vectors, as many as have registers for packs of all ranks."""
    if not lines or n > 8:
        return PACKET_THREADS
    return 512 if n <= 4 else 384


def packets_source(call: Call, n: int, *, lines: bool = False) -> str:
    """Source of the kernel ``packets``, with packets of 16 bytes or lines of 128."""
    macros = f"#define PACKET_THREADS {packet_threads(n, lines=lines)}\n#define LINES {int(lines)}\n"
    return macros + prelude(call, n) + kernel_source("packets.cu")


def direct_source(call: Call, n: int) -> str:
    """Source of the kernel ``direct``."""
    return prelude(call, n) + kernel_source("direct.cu")


def shape_of(program: Program, stage: Stage) -> Shape:
    """The kind of a stage."""
    wide = item_bytes(program.call)[0] != item_bytes(program.call)[1]
    return Shape(
        ins=len(stage.ins),
        own_at=stage.fold.index(-1) if stage.local is not None else -1,
        outs=len(stage.outs),
        stores=stage.store is not None,
        final=stage.final and program.call.op == "avg",
        in_partial=wide and any(program.channels[c].partial for c in stage.ins),
        out_partial=wide and any(program.channels[c].partial for c in stage.outs),
    )


def shapes_of(program: Program, rank: int) -> list[Shape]:
    """The kinds of stages that a rank has, in order of appearance."""
    return list(dict.fromkeys(shape_of(program, stage) for stage in program.of(rank)))


def stages_source(call: Call, shapes: Sequence[Shape], row_words: int, n: int) -> str:
    """Source of the kernel ``stages`` for these kinds of stages, on ``n`` ranks that share arenas."""
    cases = " ".join(f"case {i}: run<{shape}>(a, row, seq, s); break;" for i, shape in enumerate(shapes))
    macros = f"#define SHAPES {cases}\n#define ROW_WORDS {row_words}\n"
    return prelude(call, n) + macros + kernel_source("stages.cu")


def row_words(program: Program, rank: int) -> int:
    """Words of a row: room for the stage with the most channels."""
    links = max((len(stage.ins) + len(stage.outs) for stage in program.of(rank)), default=0)
    return -(-(BEFORE_CHANNELS + CHANNEL_WORDS * links) // 32) * 32


def table(
    program: Program,
    rank: int,
    groups_of: dict[int, int],
    places: Sequence[Place],
    arenas: Sequence[int],
    host: int = 0,
    pace: Callable[[int], tuple[int, int]] | None = None,
    far: Mapping[int, RemoteEnd] = MappingProxyType({}),
    port: tuple[int, int] = (0, 0),
) -> NDArray[np.int64]:
    """The rows of a rank, one per CTA.

    Args:
        arenas: addresses of the ranks' arenas here; ``host``: of the slots in host memory.
        far: channels to other nodes; ``port``: where this rank's flags and slots for them lie.
        pace: for emulated links: (address of the link's clock, ns per MiB) of a channel that this rank writes.
    """
    shapes, words, times = shapes_of(program, rank), row_words(program, rank), scale(program.call)
    item, _ = item_bytes(program.call)
    rows = []
    for index, (stage, cta, many) in enumerate(stages_of(program, rank, groups_of)):
        chunk = program.chunk_of(stage)
        ins = [stage.ins[i] for i in stage.fold if i >= 0]
        in_bytes = places[ins[0]].slot_bytes if ins else 0
        out_bytes = places[stage.outs[0]].slot_bytes if stage.outs else 0
        row = [
            shapes.index(shape_of(program, stage)), stage.count * times, chunk * times, cta, many,
            -1 if stage.local is None else stage.local * item * times,
            -1 if stage.store is None else stage.store * item * times,
            program.depth, index, int(pace is not None), in_bytes, out_bytes,
        ]  # fmt: skip
        row += [0] * (BEFORE_CHANNELS - len(row))
        for c in (*ins, *stage.outs):
            at, reads = places[c], c in ins
            clock, ns = pace(c) if pace is not None and not reads else (0, 0)
            if at.far:
                head, tail = port[0] + at.heads + cta * LINE, port[0] + at.tails + cta * LINE
                slots = port[1] + at.slots + cta * program.depth * at.slot_bytes
                row += [slots, head, tail, -1 - far[c].rank, clock, ns]
                continue
            slots = (host if at.hosted else arenas[at.reader]) + at.slots + cta * program.depth * at.slot_bytes
            head, tail = arenas[at.reader] + at.heads + cta * LINE, arenas[at.writer] + at.tails + cta * LINE
            row += [slots, head, tail, at.writer if reads else at.reader, clock, ns]
        rows.append(row + [0] * (words - len(row)))
    return np.array(rows, np.int64).reshape(-1, words)
