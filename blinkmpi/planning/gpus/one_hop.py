"""Which protocol carries a call of which size among GPUs that reach one another over one hop: the defaults.

The numbers come from trials (docs/design.md tells which); ``blinkmpi tune`` measures better ones.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from ..plan import PACKETS, ProtocolName, Rule
from ..slots import FEW_CTAS
from .kernel_times import Boundaries

KIB, MIB = 1 << 10, 1 << 20
LongRow = tuple[int, str, ProtocolName, int, int]
# Between GPUs that reach one another over one hop: bytes of the whole vector where the next protocol begins, for at
# most 2, at most 4, and more ranks. From trials on two H100 and four H200; beyond, from those and the rate of the
# links. Of more than 4 GPUs on NVLink, which were never tried, kernel_times.py says it. `blinkmpi tune` measures.
# Packets of 16 bytes in one shot carry vectors below the first size, lines of 128 in one shot those below the second,
# in two shots those below the third.
_BLOCKS = ((192 * KIB, 8 * MIB, 0), (256 * KIB, 3 * MIB, 0), (256 * KIB, 3 * MIB, 0))
PACKETS_BELOW = {
    "allreduce": ((96 * KIB, 768 * KIB, 3 * MIB), (24 * KIB, 384 * KIB, 6 * MIB), (32 * KIB, 96 * KIB, 6 * MIB)),
    "broadcast": ((160 * KIB, 4352 * KIB, 0), (48 * KIB, 384 * KIB, 6 * MIB), (64 * KIB, 96 * KIB, 6 * MIB)),
    "reduce": ((160 * KIB, 4352 * KIB, 0), (96 * KIB, 1440 * KIB, 6 * MIB), (64 * KIB, 96 * KIB, 6 * MIB)),
    "allgather": (_BLOCKS[0], (12 * KIB, 6 * MIB, 0), _BLOCKS[2]),
    "reduce_scatter": (_BLOCKS[0], (192 * KIB, 6 * MIB, 0), _BLOCKS[2]),
    "gather": _BLOCKS,
    "scatter": _BLOCKS,
    "alltoall": (_BLOCKS[0], (192 * KIB, 6 * MIB, 0), _BLOCKS[2]),
}
DIRECT_FROM = {  # at the latest, where buffers are registered
    "allreduce": (3 * MIB, 1536 * KIB, 6 * MIB),
    "broadcast": (8 * MIB, 6 * MIB, 1536 * KIB),
    "allgather": (3 * MIB, 3 * MIB, 3 * MIB),
    "reduce_scatter": (6 * MIB, 6 * MIB, 3 * MIB),
}
TWO_SHOT_BELOW = 384 * KIB  # allreduce of more than 2 ranks, where lines of 128 bytes may not stay whole
DIRECT_BELOW: dict[str, tuple[int | None, int | None, int | None]] = {  # registered; then slots again
    "allreduce": (32 * MIB, 32 * MIB, 32 * MIB),
    "reduce": (None, 0, 0),
    "reduce_scatter": (None, 24 * MIB, 24 * MIB),
    "alltoall": (0, 0, 0),
}
# CTAs with which `direct` is about as fast between 2 GPUs as with all; the others are left to the model. Where a kernel
# shall have fewer than FEW_CTAS, `direct` carries long reductions too, for which slots need many: so the user may say,
# and calls that are not waited for run beside the model's kernels. From runs on two H100.
ENOUGH_CTAS = {"allreduce": 64, "allgather": 64, "reduce_scatter": 32, "broadcast": 24, "reduce": 64}
LONG_BY_FEW = ("allreduce", "reduce_scatter")
# What carries long vectors among more than 2 GPUs, in place of the rows above: from how many bytes, scheme, protocol,
# CTAs (0: as many as there may be) and bytes of a slot (0: the usual), for buffers that are not registered and for
# those that are. As `blinkmpi tune` found on four H200 (benchmarks/tables).
Long = dict[str, tuple[tuple[LongRow, ...], tuple[LongRow, ...]]]
LARGE = 128 * KIB
LONG: Long = {
    "allreduce": (
        ((6 * MIB, "onehop", "slots", 0, 0), (48 * MIB, "chain", "slots", 0, LARGE)),
        ((1536 * KIB, "onehop", "direct", 0, 0), (48 * MIB, "chain", "rs_ag", 0, LARGE)),
    ),
    "broadcast": (
        ((6 * MIB, "chain", "slots", 64, 0), (12 * MIB, "onehop", "slots", 64, 0), (48 * MIB, "onehop", "slots", 0, 0)),
        ((6 * MIB, "onehop", "direct", 16, 0),),
    ),
    "reduce": (
        ((6 * MIB, "onehop", "slots", 64, 0), (48 * MIB, "onehop", "slots", 0, 0),
         (768 * MIB, "chain", "slots", 0, LARGE)),
        ((6 * MIB, "onehop", "direct", 16, 0), (12 * MIB, "onehop", "slots", 64, 0),
         (48 * MIB, "onehop", "slots", 0, 0), (768 * MIB, "chain", "slots", 0, LARGE)),
    ),
    "allgather": (
        ((6 * MIB, "trees", "slots", 0, 0), (48 * MIB, "chain", "slots", 0, LARGE)),
        ((3 * MIB, "onehop", "direct", 32, 0), (12 * MIB, "onehop", "direct", 64, 0),
         (192 * MIB, "chain", "slots", 0, LARGE)),
    ),
    "reduce_scatter": (
        ((6 * MIB, "onehop", "slots", 0, 0), (48 * MIB, "chain", "slots", 0, LARGE)),
        ((6 * MIB, "onehop", "direct", 0, 0), (48 * MIB, "chain", "slots", 0, LARGE)),
    ),
    "alltoall": (
        ((6 * MIB, "onehop", "slots", 0, 0), (12 * MIB, "onehop", "slots", 0, LARGE)),
        ((6 * MIB, "onehop", "slots", 0, 0), (48 * MIB, "onehop", "slots", 0, LARGE)),
    ),
}  # fmt: skip
# Likewise for calls whose partial results travel widened, where each rank sends its own operands and no sums of them.
LONG_WIDENED: Long = {
    "allreduce": (
        ((6 * MIB, "onehop", "slots", 0, 0),),
        ((1536 * KIB, "onehop", "direct", 0, 0), (96 * MIB, "onehop", "rs_ag", 0, 0)),
    ),
    "reduce": (
        ((6 * MIB, "onehop", "slots", 64, 0),),
        ((6 * MIB, "onehop", "direct", 16, 0), (12 * MIB, "onehop", "direct", 32, 0),
         (768 * MIB, "onehop", "direct", 0, 0)),
    ),
    "reduce_scatter": (
        ((6 * MIB, "onehop", "slots", 0, 0),),
        ((6 * MIB, "onehop", "direct", 0, 0), (192 * MIB, "onehop", "direct", 32, 0)),
    ),
}  # fmt: skip


def one_hop_rows(
    collective: str, n: int, *, registered: bool, lines: bool, modelled: Boundaries | None, schemes: Sequence[str],
    widened: bool = False,
) -> list[LongRow]:  # fmt: skip
    """(from how many bytes, scheme, protocol, CTAs, bytes of a slot) for GPUs that reach one another over one hop.

    Args:
        modelled: where packets end, if not as the trials say.
        widened: for calls whose partial results travel in a type of more bytes than their elements have.
    """
    size = 0 if n <= 2 else 1 if n <= 4 else 2
    end, one, two = modelled[:3] if modelled else PACKETS_BELOW[collective][size]
    rows: list[LongRow] = [(0, "onehop", "ll16_one_shot", 0, 0)]
    more: list[tuple[int, ProtocolName]] = [(one, "ll128_one_shot"), (two, "ll128_two_shot")]
    if not lines:
        more = [(TWO_SHOT_BELOW, "ll16_two_shot")] if collective == "allreduce" and n > 2 else []
    for below, protocol in more:
        if registered and modelled and DIRECT_BELOW.get(collective, (None,))[0] != 0:
            below = min(below, modelled.direct)
        elif registered and collective in DIRECT_FROM:
            below = min(below, DIRECT_FROM[collective][size])
        if below > end:
            rows.append((end, "onehop", protocol, 0, 0))
            end = below
    until = 0 if not registered else DIRECT_BELOW.get(collective, (None, None, None))[size]
    if until is None or until > end:
        rows.append((end, "onehop", "direct", ENOUGH_CTAS.get(collective, 0) if n <= 2 else 0, 0))
    if until is not None:
        rows.append((max(end, until), "onehop", "slots", 0, 0))
    long = (LONG_WIDENED if widened else LONG).get(collective, ((), ()))[registered] if n > 2 else ()
    if long and {scheme for _, scheme, *_ in long} <= {*schemes}:
        rows = [row for row in rows if row[0] < max(end, long[0][0])]
        starts = [max(end, at) for at, *_ in long]
        rows += [
            (at, *row[1:]) for i, (at, row) in enumerate(zip(starts, long, strict=True)) if at not in starts[i + 1 :]
        ]
    return rows


def with_few_ctas(rules: Sequence[Rule], max_ctas: int) -> list[Rule]:
    """The rows for kernels of at most ``max_ctas``: between registered buffers those by ``direct`` have no more.

    With fewer than :data:`FEW_CTAS` they also carry long AllReduces and ReduceScatters, for which slots need many.
    """
    if not 0 < max_ctas < FEW_CTAS:
        return [*rules]
    kept: list[Rule] = []
    before: dict[tuple[str, int, bool], Rule] = {}  # the row for shorter vectors, of a collective, root and type
    for row in sorted(rules, key=lambda row: row.min_bytes):
        kind = row.collective, row.root, row.widened
        last = before.get(kind) if row.registered else None
        direct = last is not None and last.protocol == "direct"
        if row.registered and row.protocol == "direct":
            row = replace(row, ctas=min(row.ctas or max_ctas, max_ctas))
            if last is not None and replace(last, min_bytes=row.min_bytes) == row:
                continue
        elif direct and row.protocol not in PACKETS and row.collective in LONG_BY_FEW:
            continue
        kept.append(row)
        if row.registered:
            before[kind] = row
    return kept
