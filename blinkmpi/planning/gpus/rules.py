"""The default rows of the selection table for GPUs: packets, ``direct`` and slots, on the fastest schemes."""

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from ...topology.model import Topology
from ...trees.tree import CARRIED, ROOTED, Collective, Packing
from ..defaults import BY_MODEL, KIB, MIB, allowed_of, choices_of, schemes_of
from ..plan import PACKETS, Plan, ProtocolName, Rule
from ..slots import Choice, Gpus, ctas_of, slots_of
from .kernel_times import boundaries
from .one_hop import LONG, LONG_WIDENED, PACKETS_BELOW, one_hop_rows, with_few_ctas

SLOTS: ProtocolName = "slots"
PROTOCOLS = (*PACKETS, "direct", "slots")  # between GPUs over one hop
TRIED, EXPECTED = "default: from trials on one machine", "default: expected from trials on fewer GPUs"
BY_KERNELS = "default: by what kernels cost, on fewer GPUs"
MOST_TRIED = 4  # GPUs of one machine
UNTRIED = "default: as a scatter, not tried on GPUs"
LL128 = ("ll128_one_shot", "ll128_two_shot")  # only over NVLink, which keeps a line of 128 bytes whole
# Between 2 GPUs, from runs on two H100: slots of vectors from so many bytes on, in calls without a root. With one they
# gain nothing, and all CTAs' slots lie at one reader, where more than 121 would find no room.
PAIR_LONG, PAIR_LONG_CHUNK = 128 * MIB, 128 * KIB


def by_nvlink(plan: Plan, topology: Topology, collective: Collective) -> bool:
    """Whether NVLink alone carries the one-hop trees of a collective."""
    kinds = {(link.src, link.dst): link.kind for link in topology.links}
    wanted = plan.packed_as(collective), "onehop"
    packings = [p for p in plan.packings if (p.collective, p.scheme) == wanted]
    paths = [edge.path for p in packings for tree in p.trees for edge in tree.edges]
    return all(kinds[hop] == "nvlink" for path in paths for hop in itertools.pairwise(path))


def gpu_rules(
    plan: Plan, topology: Topology, collective: Collective, wanted: tuple[str, ...], gpus: Gpus, max_ctas: int = 0
) -> list[Rule]:
    """The rows for one collective on GPUs: packets, then ``direct`` for registered buffers and slots for others.

    Args:
        max_ctas: CTAs that a kernel shall have; 0: as many as there may be.
    """
    there = schemes_of(plan, collective)
    by_root = choices_of(plan, topology, collective, [p.scheme for p in plan.packings])
    protocols = [protocol for protocol in PROTOCOLS if protocol not in LL128 or by_nvlink(plan, topology, collective)]
    (chunk, depth), ctas = slots_of(gpus, plan.n), ctas_of(gpus, plan.n, max_ctas)
    onehop = gpus == "onehop" and "onehop" in there and plan.n > 1 and collective in PACKETS_BELOW
    whole = onehop and _meets_bound(plan, collective, "onehop")
    own_widened = whole and plan.n > 2 and collective in LONG_WIDENED and plan.wire == "accumulator"
    lines = LL128[0] in protocols
    untried = onehop and lines and plan.n > MOST_TRIED
    modelled = boundaries(_one_hop_packing(plan, collective), topology) if untried else None
    best = "onehop" if whole else by_root[-1][0].scheme
    schemes = [best, *(s for s in there if s != best)]

    def rows_for(root: int, choices: Sequence[Choice]) -> list[Rule]:
        """With the fastest schemes for what packets do not carry; packets always take one hop."""
        rows = []
        kinds = itertools.product((False, True) if whole else (False,), (False, True) if own_widened else (False,))
        for registered, widened in kinds:
            found: list[tuple[int, str, ProtocolName, int, int, int]] = [
                (choice.min_bytes, choice.scheme, SLOTS, ctas, min(choice.least_chunk_bytes, chunk), chunk)
                for choice in choices
            ]
            if onehop:
                one_hop = one_hop_rows(
                    collective, plan.n, registered=registered, lines=lines, modelled=modelled, schemes=there,
                    widened=widened,
                )  # fmt: skip
                trials = [
                    (at, by, protocol, many or (ctas if protocol == SLOTS else 0), 0, size or chunk)
                    for at, by, protocol, many, size in one_hop
                ]
                packets = [row for row in trials if row[2] in PACKETS]
                end = trials[len(packets)][0]
                rest = [(max(row[0], end), *row[1:]) for i, row in enumerate(found) if not i or found[i - 1][0] > end]
                found = trials if whole else [*packets, *rest]
            for at, by, protocol, many, least, size in found:
                tried = whole and plan.n <= (2 if protocol in LL128 and collective not in LONG else MOST_TRIED)
                why = TRIED if tried or not onehop else BY_KERNELS if modelled and protocol in PACKETS else EXPECTED
                why = UNTRIED if collective in CARRIED else why if onehop else BY_MODEL
                rows.append(
                    Rule(collective, at, by, size, depth, why, protocol, many, registered, root, least, widened)
                )
            slots_last = rows[-1].protocol == SLOTS and rows[-1].min_bytes < PAIR_LONG
            if onehop and plan.n == 2 and collective not in ROOTED and slots_last:
                rows.append(replace(rows[-1], min_bytes=PAIR_LONG, chunk_bytes=PAIR_LONG_CHUNK))
        return with_few_ctas(rows, max_ctas) if onehop else rows

    rows = rows_for(-1, by_root[-1])
    if not wanted:
        return rows if whole else [row for root, choices in by_root.items() for row in rows_for(root, choices)]
    if collective == "alltoall":
        protocols = [protocol for protocol in protocols if protocol != "direct"]
    there = [*schemes, *(f"onehop/{protocol}" for protocol in protocols if onehop)]
    there += ["chain/rs_ag"] if onehop and collective == "allreduce" and "chain" in schemes else []
    first, _, protocol = allowed_of(topology, collective, wanted, there)[0].partition("/")
    forced = [r for r in rows if r.scheme == first and not protocol and r.protocol != "rs_ag"] or [
        Rule(collective, 0, first, chunk, depth, "", protocol or "slots", ctas, registered)  # type: ignore[arg-type]
        for registered in ((True,) if protocol in ("direct", "rs_ag") else (False, True))
    ]
    if protocol in ("direct", "rs_ag"):
        forced.append(Rule(collective, 0, first, chunk, depth))
    lowest: dict[tuple[bool, bool], int] = {}
    for r in forced:
        kind = r.registered, r.widened
        lowest[kind] = min(r.min_bytes, lowest.get(kind, r.min_bytes))
    return [
        replace(
            r, min_bytes=0 if r.min_bytes == lowest[r.registered, r.widened] else r.min_bytes, reason="BLINKMPI_ALGO"
        )
        for r in forced
    ]


def _one_hop_packing(plan: Plan, collective: Collective) -> Packing:
    packed = plan.packed_as(collective)
    return next(p for p in plan.packings if (p.collective, p.scheme) == (packed, "onehop"))


def _meets_bound(plan: Plan, collective: Collective, scheme: str) -> bool:
    """Whether no packing for any root is faster than that of a scheme."""
    packed = plan.packed_as(collective)
    packings = [p for p in plan.packings if p.collective == packed]
    own = {p.root: p.rate for p in packings if p.scheme == scheme}
    return all(p.rate <= own.get(p.root, 0) for p in packings if p.scheme != "hybrid")
