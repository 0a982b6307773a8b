"""From a program to a kernel's source and table (Blink section 4, CodeGen): pure, no GPU needed.

The source does not contain trees, only the kinds of stages that a rank has
(how many channels are reduced, the position of the own operand, how many are
written): few per plan, each compiled with its loops unrolled. Addresses, spans
and chunks are in the table, one row per CTA, or several, where a rank has
more stages than the GPU has room for CTAs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...program.call import REDUCTIONS, Call
from ...program.check import check_sorted
from ...program.ir import Program, Stage
from ...program.partition import RemoteEnd
from ...program.reduction import INTEGERS, accumulator_of, dtype_of
from . import kernel_layout
from .kernel_layout import BEFORE_CHANNELS, CHANNEL, ROW
from .kernels.compiler import kernel_source
from .memory_layout import (
    BLOCK_DEPTH,
    BLOCK_LANE,
    LINE,
    MESSAGE_CHUNK,
    MESSAGE_DEPTH,
    ChannelPlace,
    block_lanes,
    message_lanes,
    sent_first,
    stages_of,
)
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
MESSAGE_WORKERS = 512  # so that they move a whole chunk at once
MESSAGE_THREADS = MESSAGE_WORKERS + 64
ROWS_BYTES = 40 << 10  # of the rows of a CTA, at most: they are in shared memory, of which a kernel has 48 KiB


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
    op = {"avg": "AVG" if call.dtype in INTEGERS else "SUM", "": "NONE"}.get(call.op, call.op.upper())
    return ELEMENTS[call.dtype] if reduces(call) else "raw", op


def packet_threads(n: int, codec: Codec) -> int:
    """Threads of a CTA of ``packets``: for long vectors, as many as have registers for packs of all ranks."""
    if codec is LL16 or n > 8:
        return PACKET_THREADS
    return 512 if n <= 4 else 384


def packets_source(call: Call, n: int, protocol: PacketProtocol, segments: int = 0) -> str:
    """Source of the kernel ``packets``.

    Args:
        segments: of a group, each way, among the arguments; 0: there is one buffer each way.
    """
    macros: dict[str, str | int] = {
        "PACKET_THREADS": packet_threads(n, protocol.codec),
        "CODEC": protocol.codec.name,
        "ALGORITHM": "two_shot" if protocol.two_shot else "one_shot",
        "SEGMENTS": segments,
    }
    return _source("packets.cu", call, n, macros, kernel_layout.packets_layout(n, segments))


def direct_source(call: Call, n: int) -> str:
    """Source of the kernel ``direct``."""
    return _source("direct.cu", call, n, {"WORKERS": WORKERS}, kernel_layout.direct_layout(n))


def stages_source(
    call: Call, kinds: Sequence[StageKind], row_words: int, n: int, spans: int = 0, rows: int = 1
) -> str:  # fmt: skip
    """Source of the kernel ``stages`` for these kinds of stages, on a node with ``n`` ranks.

    Args:
        spans: how many are among the arguments; 0 if the table has them.
        rows: of a CTA.
    """
    run = "run_stage<Kind<{}>>(a.c, row, seq, s)" if rows == 1 else "ok = run_round<Kind<{}>>(a.c, row, x, seq, s)"
    cases = " ".join(f"case {i}: {run.format(kind)}; break;" for i, kind in enumerate(kinds))
    macros: dict[str, str | int] = {
        "WORKERS": WORKERS, "ROWS": rows, "ROW_WORDS": row_words, "STAGE_KINDS": cases, "SPANS": spans
    }  # fmt: skip
    return _source("stages.cu", call, n, macros, kernel_layout.stages_layout(n, STAGE_THREADS, spans))


def messages_source(n: int) -> str:
    """Source of the kernel ``messages``."""
    macros: dict[str, str | int] = {
        "WORKERS": MESSAGE_WORKERS, "LANES": message_lanes(n), "DEPTH": MESSAGE_DEPTH, "LONGEST_CHUNK": MESSAGE_CHUNK
    }  # fmt: skip
    return _source("messages.cu", Call("broadcast", n, (1,), "uint8"), n, macros, kernel_layout.messages_layout(n))


def gate_source(n: int) -> str:
    """Source of the kernel ``gate``, whose arguments are the common ones alone."""
    return _source("gate.cu", Call("broadcast", n, (1,), "uint8"), n, {}, "")


def blocks_source(n: int, *, counted: bool = False) -> str:
    """Source of the kernel ``blocks``; ``counted``: whose lengths are in GPU memory."""
    macros: dict[str, str | int] = {
        "WORKERS": MESSAGE_WORKERS, "LANES": block_lanes(n), "DEPTH": BLOCK_DEPTH, "LONGEST_CHUNK": MESSAGE_CHUNK,
        "LANE_BYTES": BLOCK_LANE, "COUNTED": int(counted),
    }  # fmt: skip
    layout = kernel_layout.blocks_layout(n, counted=counted)
    return _source("blocks.cu", Call("broadcast", n, (1,), "uint8"), n, macros, layout)


def segments_source() -> str:
    """Source of the kernels ``gather`` and ``scatter``."""
    return (
        f"#define SEGMENTS {kernel_layout.SEGMENTS}\n#define THREADS {kernel_layout.SEGMENT_THREADS}\n"
        + kernel_source("segments.cu")
        + kernel_layout.segments_layout()
    )


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


def rows_of(program: Program, rank: int, groups_of: dict[int, int], ctas: int) -> int:
    """How many rows a CTA of a rank has, if it has at most ``ctas`` of them."""
    return -(-len(stages_of(program, rank, groups_of)) // ctas) or 1


def check_rows(program: Program, groups_of: dict[int, int], ctas: int) -> None:
    """Prove, of the whole program, that its ranks may run it on ``ctas`` CTAs each; the same on every rank.

    Raises:
        PlanError: if CTAs of several rows could wait for one another (:func:`...program.check.check_sorted`).
        DeviceError: for more rows than a CTA has room for.
    """
    for rank in range(program.call.n):
        if (rows := rows_of(program, rank, groups_of, ctas)) == 1:
            continue
        check_sorted(program)
        if (need := 8 * rows * row_words(program, rank)) > ROWS_BYTES:
            raise DeviceError(
                f"a rank has {len(program.of(rank))} stages in {program.call.collective} by {program.scheme}, {rows} "
                f"for each of {ctas} groups of threads: {need} bytes of them, of at most {ROWS_BYTES}; choose a scheme "
                "with fewer trees (BLINKMPI_ALGO), or an algorithm of fewer chunks"
            )


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
    ctas: int = 1 << 62,
) -> NDArray[np.int64]:
    """The rows of a rank: [CTA][words of its rows].

    With more rows than ``ctas``, each CTA has every ``ctas``-th, in the order of the program's stages, and empty rows
    behind them.

    Args:
        symmetric: addresses of the ranks' symmetric memory here; ``host``: of the slots in host memory.
        emulated: gives the emulated link of a channel that this rank writes: (address of its clock, ns per MiB).
        network: channels to other nodes; ``network_at``: where this rank's flags and slots for them begin.
    """
    kinds, words, times = kinds_of(program, rank), row_words(program, rank), scale(program.call)
    item, _ = item_bytes(program.call)
    each = rows_of(program, rank, groups_of, ctas)
    waits = program.call.in_place and each == 1 and not network
    after = (sent_first(program, rank, groups_of) if waits else None) or {}
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
        if stage in after:
            at = places[after[stage]]
            row.append(symmetric[at.reader] + at.heads + cta * LINE)
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
    many = min(len(rows), ctas)
    empty = [int(name in ("CHUNK", "STRIDE", "DEPTH")) for name in ROW]  # no chunk
    rows += [empty + [0] * (words - len(empty))] * (each * many - len(rows))
    return np.array(rows, np.int64).reshape(each, many, words).swapaxes(0, 1).reshape(many, each * words)
