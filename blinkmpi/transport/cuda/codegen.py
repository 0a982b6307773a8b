"""From a program to a kernel's source and table (Blink section 4, CodeGen): pure, no GPU needed.

The source does not contain trees, only the kinds of stages that a rank has
(how many channels are reduced, the position of the own operand, how many are
written): few per plan, each compiled with its loops unrolled. Addresses, spans
and chunks are in the table, one row per CTA.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ...program.call import REDUCTIONS, Call
from ...program.ir import Program, Stage
from ...program.partition import RemoteEnd
from ...program.reduction import accumulator_of, dtype_of
from . import kernel_layout
from .device import kernel_source
from .kernel_layout import BEFORE_CHANNELS, CHANNEL
from .memory_layout import LINE, ChannelPlace, stages_of
from .packets import LL16, Codec, PacketProtocol

ELEMENTS = {
    "bool": "u8", "uint8": "u8", "int8": "signed char", "uint16": "u16", "int16": "short", "uint32": "u32",
    "int32": "int", "uint64": "u64", "int64": "i64", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
    "float16": "f16", "bfloat16": "bf16", "float32": "float",
    "float64": "double", "complex64": "cplx<float>", "complex128": "cplx<double>",
}  # fmt: skip
WORKERS = 448  # threads of a CTA that move data
STAGE_THREADS = WORKERS + 64  # in stages.cu: with a warp that waits, and a warp that raises flags
PACKET_THREADS = 256


@dataclass(frozen=True)
class StageKind:
    """A kind of stage: the parameters of the template ``Kind`` of stages.cu."""

    ins: int
    own_at: int
    outs: int
    stores: bool
    final: bool
    in_wide: int  # by position among the channels that are reduced: a mask of those with partial results
    out_wide: bool

    def __str__(self) -> str:
        stores, final, out = (str(flag).lower() for flag in (self.stores, self.final, self.out_wide))
        return f"{self.ins}, {self.own_at}, {self.outs}, {stores}, {final}, {self.in_wide}, {out}"


def reduces(call: Call) -> bool:
    """Whether a call reduces elements; if not, it only moves bytes."""
    return call.collective in REDUCTIONS


def item_bytes(call: Call) -> tuple[int, int]:
    """(bytes of an element, of a partial result) as the kernels count: single bytes if nothing is reduced."""
    return (dtype_of(call.dtype).itemsize, accumulator_of(call.dtype).itemsize) if reduces(call) else (1, 1)


def widths(call: Call) -> tuple[int, int]:
    """Bytes of an element in a slot, and of a partial result."""
    item = dtype_of(call.dtype).itemsize
    return item, accumulator_of(call.dtype).itemsize if reduces(call) else item


def scale(call: Call) -> int:
    """How many of the kernels' elements an element of the call has."""
    return 1 if reduces(call) else dtype_of(call.dtype).itemsize


def arithmetic(call: Call) -> tuple[str, str]:
    """The element type and the operation that a kernel is compiled for."""
    op = {"avg": "SUM", "": "NONE"}.get(call.op, call.op.upper())
    return ELEMENTS[call.dtype] if reduces(call) else "raw", op


def packet_threads(n: int, codec: Codec) -> int:
    """Threads of a CTA of ``packets``: for long vectors, as many as have registers for packs of all ranks."""
    if codec is LL16 or n > 8:
        return PACKET_THREADS
    return 512 if n <= 4 else 384


def packets_source(call: Call, n: int, protocol: PacketProtocol) -> str:
    """Source of the kernel ``packets``."""
    macros: dict[str, str | int] = {
        "PACKET_THREADS": packet_threads(n, protocol.codec),
        "CODEC": protocol.codec.name,
        "ALGORITHM": "two_shot" if protocol.two_shot else "one_shot",
    }
    return _source("packets.cu", call, n, macros, kernel_layout.packets_layout(n))


def direct_source(call: Call, n: int) -> str:
    """Source of the kernel ``direct``."""
    return _source("direct.cu", call, n, {"WORKERS": WORKERS}, kernel_layout.direct_layout(n))


def stages_source(call: Call, kinds: Sequence[StageKind], row_words: int, n: int, spans: int = 0) -> str:
    """Source of the kernel ``stages`` for these kinds of stages, on a node with ``n`` ranks.

    Args:
        spans: how many are among the arguments; 0 if the table has them.
    """
    cases = " ".join(f"case {i}: run_stage<Kind<{kind}>>(a.c, row, seq, s); break;" for i, kind in enumerate(kinds))
    macros: dict[str, str | int] = {"WORKERS": WORKERS, "ROW_WORDS": row_words, "STAGE_KINDS": cases, "SPANS": spans}
    return _source("stages.cu", call, n, macros, kernel_layout.stages_layout(n, STAGE_THREADS, spans))


def _source(name: str, call: Call, n: int, macros: dict[str, str | int], layout: str) -> str:
    """A kernel with its macros before it, and behind it the assertions that host and kernel agree."""
    element, op = arithmetic(call)
    macros = {"ELEMENT": element, "OPERATION": op, **macros}
    defined = "".join(f"#define {macro} {value}\n" for macro, value in macros.items())
    return kernel_layout.macros(n) + defined + kernel_source(name) + kernel_layout.common_layout(n) + layout


def kind_of(program: Program, stage: Stage) -> StageKind:
    """The kind of a stage."""
    wide = item_bytes(program.call)[0] != item_bytes(program.call)[1]
    return StageKind(
        ins=len(stage.ins),
        own_at=stage.fold.index(-1) if stage.local is not None else -1,
        outs=len(stage.outs),
        stores=stage.store is not None,
        final=stage.final and program.call.op == "avg",
        in_wide=sum(1 << i for i, c in enumerate(ordered_ins(stage)) if wide and program.channels[c].wide),
        out_wide=wide and any(program.channels[c].wide for c in stage.outs),
    )


def ordered_ins(stage: Stage) -> list[int]:
    """The channels that a stage reduces, in the order in which it does."""
    return [stage.ins[i] for i in stage.fold if i >= 0]


def kinds_of(program: Program, rank: int) -> list[StageKind]:
    """The kinds of stages that a rank has, in order of appearance."""
    return list(dict.fromkeys(kind_of(program, stage) for stage in program.of(rank)))


def row_words(program: Program, rank: int) -> int:
    """Words of a row: room for the stage with the most channels."""
    links = max((len(stage.ins) + len(stage.outs) for stage in program.of(rank)), default=0)
    return -(-(BEFORE_CHANNELS + len(CHANNEL) * links) // 32) * 32


def table(
    program: Program,
    rank: int,
    groups_of: dict[int, int],
    places: Sequence[ChannelPlace],
    symmetric: Sequence[int],
    host: int = 0,
    emulated: Callable[[int], tuple[int, int]] | None = None,
    network: Mapping[int, RemoteEnd] = MappingProxyType({}),
    network_at: tuple[int, int] = (0, 0),
) -> NDArray[np.int64]:
    """The rows of a rank, one per CTA.

    Args:
        symmetric: addresses of the ranks' symmetric memory here; ``host``: of the slots in host memory.
        emulated: gives the emulated link of a channel that this rank writes: (address of its clock, ns per MiB).
        network: channels to other nodes; ``network_at``: where this rank's flags and slots for them begin.
    """
    kinds, words, times = kinds_of(program, rank), row_words(program, rank), scale(program.call)
    item, _ = item_bytes(program.call)
    rows = []
    span = -1
    for index, (stage, cta, many) in enumerate(stages_of(program, rank, groups_of)):
        span += cta == 0  # as many as this rank has stages
        chunk = program.chunk_of(stage)
        ins = ordered_ins(stage)
        in_bytes = places[ins[0]].slot_bytes if ins else 0
        out_bytes = places[stage.outs[0]].slot_bytes if stage.outs else 0
        row = [
            kinds.index(kind_of(program, stage)), stage.count * times, chunk * times,
            -1 if stage.local is None else stage.local * item * times,
            -1 if stage.store is None else stage.store * item * times,
            cta, many, program.depth, index, int(emulated is not None), in_bytes, out_bytes, span,
        ]  # fmt: skip
        row += [0] * (BEFORE_CHANNELS - len(row))
        for c in (*ins, *stage.outs):
            at, reads = places[c], c in ins
            clock, ns = emulated(c) if emulated is not None and not reads else (0, 0)
            ring = at.slots + cta * program.depth * at.slot_bytes
            if at.network:
                (flags, slots), peer = network_at, -1 - network[c].rank
                head, tail = flags + at.heads + cta * LINE, flags + at.tails + cta * LINE
            else:
                slots, peer = host if at.in_host_memory else symmetric[at.reader], at.writer if reads else at.reader
                head, tail = symmetric[at.reader] + at.heads + cta * LINE, symmetric[at.writer] + at.tails + cta * LINE
            row += [slots + ring, head, tail, peer, clock, ns]
        rows.append(row + [0] * (words - len(row)))
    return np.array(rows, np.int64).reshape(-1, words)
