"""The default rows of the selection table for GPUs: packets, ``direct`` and slots, on the fastest schemes."""

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from ...topology.model import Topology
from ...trees.tree import CARRIED, Collective, Packing
from ..default_tables import rows_of
from ..defaults import BY_MODEL, allowed_of, asked_for, choices_of, schemes_of
from ..plan import PACKETS, Plan, ProtocolName, Rule
from ..slots import Choice, Gpus, ctas_of, slots_of
from ..tuned_table import rows_from, with_few_ctas
from .kernel_times import Boundaries, boundaries

SLOTS: ProtocolName = "slots"
PROTOCOLS = (*PACKETS, "direct", "slots")  # between GPUs over one hop
EXPECTED = "default: expected from trials on fewer GPUs"
BY_KERNELS = "default: by what kernels cost, on fewer GPUs"
MOST_TRIED = 4  # GPUs of one machine
UNTRIED = "default: as a scatter, not tried on GPUs"
LL128: tuple[ProtocolName, ...] = (
    "ll128_one_shot",
    "ll128_two_shot",
)  # only over NVLink, which keeps a line of 128 bytes whole


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
    choices = choices_of(plan, topology, collective, [p.scheme for p in plan.packings])
    nvlink = by_nvlink(plan, topology, collective)
    protocols = [protocol for protocol in PROTOCOLS if nvlink or protocol not in LL128]
    (chunk, depth), ctas = slots_of(gpus, plan.n), ctas_of(gpus, plan.n, max_ctas)
    table = _table_rows(plan, topology, collective, nvlink) if gpus == "onehop" and "onehop" in there else []
    onehop = bool(table)
    whole = onehop and _meets_bound(plan, collective, "onehop")
    best = "onehop" if whole else choices[-1][0].scheme
    schemes = [best, *(s for s in there if s != best)]

    if whole:
        own = [row for some in _kinds(table) for row in _with_schemes(some, there)]
        by_root = {-1: [replace(row, ctas=row.ctas or ctas) if row.protocol == SLOTS else row for row in own]}
    else:
        usual = Rule(collective, 0, "", chunk, depth, protocol=SLOTS, ctas=ctas)
        by_root = {root: _with_choices(table, some, replace(usual, root=root)) for root, some in choices.items()}
    rows = [row for some in by_root.values() for row in (with_few_ctas(some, max_ctas) if onehop else some)]
    if not wanted:
        return rows
    rows = [row for row in rows if row.root == -1]
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
    return asked_for(forced)


def _table_rows(plan: Plan, topology: Topology, collective: Collective, nvlink: bool) -> list[Rule]:
    """The rows of the default table for GPUs that reach one another over one hop; none for one GPU alone."""
    rows = rows_of("nvlink" if nvlink else "other", plan.n, collective) if plan.n > 1 else []
    if not rows or not nvlink or plan.n <= MOST_TRIED:
        return rows
    end = boundaries(_one_hop_packing(plan, collective), topology)
    return [row for some in _kinds(rows) for row in _after_packets(some, end)]


def _kinds(rows: Sequence[Rule]) -> list[list[Rule]]:
    """The rows of a table for each kind of buffers and types."""
    return [[*some] for _, some in itertools.groupby(rows, key=lambda row: (row.registered, row.widened))]


def _with_schemes(rows: Sequence[Rule], there: Sequence[str]) -> list[Rule]:
    """The rows for one kind; if they name a scheme that is not there, one hop through slots after packets."""
    if all(row.scheme in there for row in rows):
        return [*rows]
    packets = [row for row in rows if row.protocol in PACKETS]
    return [*packets, replace(rows[len(packets)], scheme="onehop", protocol=SLOTS, ctas=0)]


def _after_packets(rows: Sequence[Rule], end: Boundaries) -> list[Rule]:
    """Packets as far as kernels make them the fastest, then the rows for one kind of buffers and types."""
    direct = any(row.protocol == "direct" for row in rows)
    starts: list[tuple[int, ProtocolName]] = [(0, "ll16_one_shot")]
    at = end.packets
    for limit, protocol in ((end.one_shot, LL128[0]), (end.two_shot, LL128[1])):
        below = min(limit, end.direct) if direct else limit
        if below > at:
            starts.append((at, protocol))
            at = below
    like = replace(rows[0], scheme="onehop", ctas=0, reason=BY_KERNELS)
    return [*(replace(like, min_bytes=start, protocol=protocol) for start, protocol in starts), *rows_from(rows, at)]


def _with_choices(table: Sequence[Rule], choices: Sequence[Choice], usual: Rule) -> list[Rule]:
    """The packets of the table, and for what they do not carry what the cost model chooses.

    Args:
        choices: those for the largest vectors first.
        usual: a row of slots for this collective and root.
    """
    packets = [row for row in table if row.protocol in PACKETS and not row.registered and not row.widened]
    end = table[len(packets)].min_bytes if table else 0
    why = UNTRIED if usual.collective in CARRIED else EXPECTED if table else BY_MODEL
    rows = [
        replace(row, root=usual.root, reason=BY_KERNELS if row.reason == BY_KERNELS else EXPECTED) for row in packets
    ]
    for i, choice in enumerate(choices):
        if not i or choices[i - 1].min_bytes > end:
            at, least = max(choice.min_bytes, end), min(choice.least_chunk_bytes, usual.chunk_bytes)
            rows.append(replace(usual, min_bytes=at, scheme=choice.scheme, reason=why, least_chunk_bytes=least))
    return rows


def _one_hop_packing(plan: Plan, collective: Collective) -> Packing:
    packed = plan.packed_as(collective)
    return next(p for p in plan.packings if (p.collective, p.scheme) == (packed, "onehop"))


def _meets_bound(plan: Plan, collective: Collective, scheme: str) -> bool:
    """Whether no packing for any root is faster than that of a scheme."""
    packed = plan.packed_as(collective)
    packings = [p for p in plan.packings if p.collective == packed]
    own = {p.root: p.rate for p in packings if p.scheme == scheme}
    return all(p.rate <= own.get(p.root, 0) for p in packings if p.scheme != "hybrid")
