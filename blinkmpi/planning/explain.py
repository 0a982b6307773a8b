"""Explain how a call runs and why: scheme, trees, rate against bound, prediction, and the schemes not chosen.

The plan and the topology are enough, so it works without the machine. Pure: it returns text and data, and prints
nothing.
"""

import textwrap
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, partial
from typing import ClassVar

import msgspec

from ..errors import PlanError
from ..lang.algorithms import SCHEME, Algorithm
from ..program.call import BLOCKED, Call
from ..program.cost_model import Price
from ..program.lower import slot_width
from ..topology.model import Topology
from ..trees.answer import SHARP
from ..trees.tree import Packing, Tree
from ..util.codec import Document, Value
from ..util.text import plural, size_text, time_text
from .defaults import rule_of
from .in_switch import beside, sums_in_switches
from .plan import ONE_SHOTS, PACKETS, PassedOver, Plan, Rule
from .predictor import Basis, ByLinks, Predictor
from .selection import choose, program_for
from .slots import LINK_SLOTS

FORMAT_VERSION = 2
WIDTH = 100
_LABEL = 12
BUSIEST = "the cores, by what steps of these kinds took here (blinkmpi tune)"  # of a prediction by steps
ELSE = {"steps": "by the rate of copies", "kernels": "by a simulation at the rates of the links"}
SHOTS = {"one_shot": "to all that need them, who reduce", "two_shot": "to a slice's owner, who reduces and sends on"}
ON_GPUS = {  # protocols of GPUs besides slots
    **{
        f"ll{n}_{name}": f"packets of {n} bytes, data and flags, {how}"
        for n in (16, 128)
        for name, how in SHOTS.items()
    },
    "direct": "a segment's owner loads it from all that have it, reduces, stores it to all that need it",
    "rs_ag": "a reduce-scatter through slots, then each block's owner stores it to all",
}


class PricedScheme(Value, frozen=True):
    """One scheme that could carry the call, with its prediction."""

    scheme: str
    links: str = ""
    trees: int = 0
    depth: int = 0
    rate_gbps: float = 0.0
    bound_gbps: float = 0.0
    optimal: bool = False
    chunk_bytes: int = 0
    slots: int = 0
    seconds: float = 0.0
    algbw: float = 0.0
    busbw: float = 0.0
    busiest: str = "none"
    reason: str = ""
    shares: tuple[str, ...] = ()
    certificate: str = ""
    protocol: str = "slots"
    bound_of: str = ""  # what the bound holds for
    written: str = ""  # what an algorithm says of itself
    basis: Basis = "links"


class Explanation(Document, frozen=True):
    """Everything there is to say about one call.

    ``scheme`` is what runs; ``mpi`` is MPI's own collective, and ``chosen`` is None then. ``others`` are the schemes
    that do not run, fastest prediction first, ``passed_over`` the methods that have no packing here. ``live`` are lines
    about the running job. ``renumbered`` says which GPUs the ranks are, where their numbers differ. ``in_switches`` is
    the bound where switches of the machine could make sums that run in ranks here.
    """

    KIND: ClassVar = "explanation"
    VERSION: ClassVar = FORMAT_VERSION
    machine: str
    collective: str
    ranks: int
    root: int
    nbytes: int
    dtype: str
    op: str
    scheme: str
    reason: str
    chosen: PricedScheme | None
    others: tuple[PricedScheme, ...]
    live: tuple[str, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()
    renumbered: str = ""
    in_switches: str = ""

    def text(self) -> str:
        """For a terminal of 100 columns."""
        what = f"{self.collective} of {size_text(self.nbytes)}, {self.dtype}{' ' + self.op if self.op else ''}"
        what = "barrier" if self.collective == "barrier" else what
        where = f", root {self.root}" if self.root >= 0 else ""
        lines = [f"{what}{where}, {plural(self.ranks, 'rank')} on {self.machine}", ""]
        lines += _field("ranks", self.renumbered.removeprefix("ranks ")) if self.renumbered else []
        if self.chosen is None:
            lines += _field("runs as", "MPI's own collective")
            lines += _field("why", self.reason or "the selection table sends calls of this size there")
        else:
            lines += self._chosen(self.chosen)
        lines += _field("in switches", self.in_switches) if self.in_switches else []
        for i, other in enumerate(self.others):
            lines += _field("not chosen" if i == 0 else "", self._other(other))
        for method, why in dict.fromkeys((one.method, one.why) for one in self.passed_over):
            lines += _field("no packing", f"{method}: {why}")
        for i, line in enumerate(self.live):
            lines += _field("this job" if i == 0 else "", line)
        return "\n".join(lines)

    def _chosen(self, it: PricedScheme) -> list[str]:
        shot = it.protocol in ONE_SHOTS  # by a program that is not of the scheme's trees
        across = shot and not it.slots
        how = "one message from node to node" if across else "whole vectors, read where they lie"
        lines = _field("runs as", f"one shot: {how}" if shot else f"{it.scheme}: {_what(it)}")
        lines += _field("why", "; ".join(filter(None, (self.reason, "" if shot else it.reason))))
        if it.algbw:
            if it.bound_gbps:
                gap = f"{gap_text(it.rate_gbps, it.bound_gbps, it.optimal)} of {it.bound_of}"
                lines += [] if shot else _field("rate", f"{it.rate_gbps:.4g} GB/s, {gap}")
                lines += _field("bound", f"{it.bound_gbps:.4g} GB/s: {it.certificate}")
            else:
                lines += _field("bound", it.certificate)
            if len(it.shares) > 1 and not shot:
                counts = Counter(share_text(Fraction(share)) for share in it.shares)
                lines += _field("shares", ", ".join(f"{k} x {s}" if k > 1 else s for s, k in counts.items()))
            if it.protocol in ON_GPUS:
                lines += _field("protocol", f"{it.protocol}: {ON_GPUS[it.protocol]}")
            if it.protocol not in ON_GPUS or it.protocol == "rs_ag":
                cma = it.protocol in ("cma", "one_shot_cma")  # longer chunks where nobody waits for a part
                through = "copied out of the writer's buffer (cma)" if cma else f"{it.slots} slots a channel"
                lines += _field("pipeline", f"chunks of {'at least ' * cma}{size_text(it.chunk_bytes)}, {through}")
            prediction = f"{time_text(it.seconds)}, algbw {it.algbw:.4g} GB/s, busbw {it.busbw:.4g} GB/s"
            lines += _field("predicted", prediction)
            lines += _field("busiest", it.busiest)
        elif across:
            lines += _field("predicted", "not at all: the cost model knows trees on links")
        else:
            lines += _field("predicted", f"{time_text(it.seconds)}: latency alone" if it.seconds else "nothing travels")
        return lines

    def _other(self, it: PricedScheme) -> str:
        text = f"{it.scheme}: {time_text(it.seconds)} predicted"
        if self.chosen is not None and self.chosen.basis != it.basis and self.chosen.basis != "links":
            by = self.chosen.basis
            return f"{text} {ELSE[by]}, which says little beside a time by {by}; {_what(it)}"
        if self.chosen is None or not self.chosen.seconds:
            return f"{text}, {_what(it)}" + (f", rate {it.rate_gbps:.4g} GB/s" if it.rate_gbps else "")
        ratio = it.seconds / self.chosen.seconds
        if ratio >= 1.005:
            return f"{text}, {ratio:.3g}x slower"
        if ratio > 0.995:
            return f"{text}, the same"
        return f"{text}, {1 / ratio:.3g}x faster in the model (the selection table decides)"


def explanation(
    plan: Plan, topology: Topology, call: Call, *, rule: Rule | None = None, live: Sequence[str] = (),
    predictor: Predictor | None = None,
) -> Explanation:  # fmt: skip
    """Look up how ``call`` runs by ``plan`` on ``topology``, and price every scheme that could run it.

    Args:
        rule: the row of the table that is taken, if not the one of the call's size.
        live: lines about the running job: which executor, which transport.
        predictor: predicts, where it can, in place of the simulator.
    """
    rule = rule or choose(plan, call)
    links = ByLinks(plan, topology, cache(partial(program_for, plan)))
    priced = {
        scheme: _priced(links, call, _rule_for(plan, topology, call, rule, scheme), predictor)
        for scheme in (*plan.schemes(call.collective, call.root), *plan.written(call.collective, call.root))
    }
    chosen = priced.pop(rule.scheme, None)
    if chosen is None and rule.scheme != "mpi":
        raise PlanError(f"the plan for {plan.machine} chooses {rule.scheme!r} for {call.collective} but has no packing "
                        f"for root {call.root}; plan again")  # fmt: skip
    others = tuple(sorted(priced.values(), key=lambda o: (o.seconds, o.scheme)))
    in_switch = None
    if call.collective == "allreduce" and topology.sharp:
        first = plan.schemes(call.collective, call.root)[0]
        in_switch = beside(plan.packing(call.collective, call.root, first), topology, packed=False)
    if call.widened and plan.wire == "operand":
        live = ("wire: partial results are rounded to the call's type on each hop (wire=operand)", *live)
    return Explanation(
        machine=topology.name, collective=call.collective, ranks=call.n, root=call.root, nbytes=call.nbytes,
        in_switches=in_switch.text if in_switch else "",
        dtype=call.dtype, op=call.op, scheme=rule.scheme, reason=rule.reason, chosen=chosen, others=others,
        live=tuple(live), passed_over=plan.passed_over_for(call.collective, call.root), renumbered=topology.renumbered,
    )  # fmt: skip


def _rule_for(plan: Plan, topology: Topology, call: Call, chosen: Rule, scheme: str) -> Rule:
    """How ``scheme`` would be run: as the table does elsewhere, or with the chunks that are the best ones for it."""
    if scheme == chosen.scheme:
        return chosen
    if scheme.startswith(SCHEME):
        return Rule(chosen.collective, 0, scheme, *LINK_SLOTS)
    if chosen.least_chunk_bytes:  # by the cost model
        return rule_of(plan.packing(call.collective, call.root, scheme), topology, call)
    rows = [r for r in plan.rules if r.collective == chosen.collective and r.chunk_bytes]
    row = next((r for r in reversed(rows) if r.scheme == scheme), None)
    if row is not None:
        return row
    row = rows[-1] if rows else Rule(chosen.collective, 0, scheme, chunk_bytes=128 << 10, depth=4)
    protocol = "slots" if row.protocol in (*PACKETS, "direct", "rs_ag") else row.protocol  # of another scheme
    return msgspec.structs.replace(row, scheme=scheme, protocol=protocol)


def _priced(links: ByLinks, call: Call, rule: Rule, predictor: Predictor | None) -> PricedScheme:
    """A scheme with its prediction: by the predictor if it can, else by links, which say how long each works, too."""
    cost = links.price(call, rule)
    if cost is None:
        return PricedScheme(rule.scheme, protocol=rule.protocol)  # messages of MPI, which follow no links
    seconds = predictor.seconds(call, rule) if predictor else None
    basis: Basis = predictor.basis if predictor and seconds else "links"
    if seconds:
        cost = Price(seconds, call.nbytes / seconds / 1e9, cost.busy)
    made = links.plan.algorithm(call.collective, call.root, rule.scheme)
    found = _algorithm(made, rule) if made is not None else _packing(links, call, rule)
    return msgspec.structs.replace(
        found, seconds=cost.seconds, algbw=cost.algbw, busbw=cost.algbw * call.bus_factor, basis=basis,
        busiest=BUSIEST if basis == "steps" else _busiest(cost, links.topology),
    )  # fmt: skip


def _packing(links: ByLinks, call: Call, rule: Rule) -> PricedScheme:
    """A scheme of trees, without its prediction."""
    packing, program = links.plan.packing(call.collective, call.root, rule.scheme), links.program(call, rule)
    return PricedScheme(
        packing.scheme, protocol=rule.protocol, links=packing.links, trees=len(packing.trees), depth=packing.depth,
        rate_gbps=float(packing.rate / 1000), bound_gbps=float(packing.bound / 1000), optimal=packing.optimal,
        chunk_bytes=program.chunk * slot_width(call, program.channels), slots=program.depth, reason=packing.reason,
        shares=tuple(map(str, shares(packing))), certificate=packing.certificate.text,
        bound_of=what_bounds(packing, links.topology),
    )  # fmt: skip


def _algorithm(made: Algorithm, rule: Rule) -> PricedScheme:
    """A scheme that is an algorithm of a user's, without its prediction."""
    return PricedScheme(
        rule.scheme, protocol=rule.protocol, chunk_bytes=rule.chunk_bytes, slots=rule.depth, written=made.summary(),
        certificate="none is worked out for what users write",
    )  # fmt: skip


def _what(it: PricedScheme) -> str:
    """What a scheme is made of."""
    return it.written or f"{trees_text(it.trees, it.depth)}{_over(it.links)}"


def _busiest(cost: Price, topology: Topology) -> str:
    if not cost.busy:
        return "none"
    src, dst, kind, seconds = max(cost.busy, key=lambda row: row[3])
    return f"{link_text(topology, src, dst, kind)}, {seconds / cost.seconds:.0%} of the time"


def plan_line(packing: Packing) -> str:
    """One line about a packing: collective, trees, links, rate, bound."""
    head = f"{packing.collective}: {trees_text(len(packing.trees), packing.depth)}{_over(packing.links)}"
    if packing.certificate.kind == "trivial":
        return f"{head}, {packing.certificate.text}"
    rate, bound = float(packing.rate / 1000), float(packing.bound / 1000)
    end = "= bound" if packing.optimal else f"{rate / bound:.1%} of the bound {bound:.4g}"
    return f"{head}, rate {rate:.4g} GB/s {end} ({packing.certificate.text})"


def shares(packing: Packing) -> tuple[Fraction, ...]:
    """The part of the vector that each tree carries; of its block's bytes, where the vector is made of blocks."""
    owners = [_owner(packing, tree) for tree in packing.trees]
    totals: dict[int, Fraction] = {}
    for owner, tree in zip(owners, packing.trees, strict=True):
        totals[owner] = totals.get(owner, Fraction(0)) + tree.weight
    return tuple(tree.weight / totals[owner] for owner, tree in zip(owners, packing.trees, strict=True))


def share_text(share: Fraction) -> str:
    """A part of the vector for people: ``12.5%``; what is exact is in the JSON."""
    percent = float(100 * share)
    return "<0.01%" if 0 < percent < 0.01 else f"{percent:.3g}%" if percent < 99.95 or share == 1 else f"{percent:.5g}%"


def _owner(packing: Packing, tree: Tree) -> int:
    """The rank whose block a tree carries; -1 where the vector goes as a whole."""
    if packing.collective not in BLOCKED:
        return -1
    if packing.collective == "alltoall" and tree.edges:
        return tree.root * packing.n + tree.edges[-1].dst
    if packing.collective in ("gather", "scatter") and tree.edges:
        return tree.edges[-1].dst
    return tree.root


def trees_text(count: int, depth: int) -> str:
    """``6 trees, depth 3``."""
    return f"{plural(count, 'tree')}, depth {depth}"


def gap_text(rate: float, bound: float, optimal: bool) -> str:
    """A rate in relation to its bound; :func:`what_bounds` says what that holds for."""
    return f"{'equal to' if optimal else f'{rate / bound:.1%} of'} the bound"


def what_bounds(packing: Packing, topology: Topology) -> str:
    """What the bound of a packing holds for: trees, at the rates that the machine has, by a measurement or a table."""
    kinds = packing.links.split("+")
    measured = {link.kind for link in topology.links if link.kind in kinds and link.origin == "measured"}
    if packing.certificate.kind == "copies":
        mbps = [link.mbps for link in topology.links if link.kind == "memory"]
        rates = " to ".join(dict.fromkeys(f"{rate / 1000:.4g}" for rate in (min(mbps), max(mbps))))
        return f"trees at the copy rate {'measured at opening' if measured else 'assumed'}, {rates} GB/s"
    rates = f"at the rates {'measured' if measured else 'listed'} for these links"
    if packing.scheme == SHARP:
        whose = "any schedule" if packing.certificate.kind == "cut" else "trees with sums in the switches"
    else:
        whose = "trees of copies" if sums_in_switches(packing, topology) else "trees"
    return f"{whose} {rates}"


def link_text(topology: Topology, src: int, dst: int, kind: str) -> str:
    """A link for people; a rank's link to shared memory is its core's work."""
    if kind == "memory":
        return f"the core of {topology.vertex_label(src)}"
    return f"{topology.vertex_label(src)} -> {topology.vertex_label(dst)} ({kind})"


def _over(links: str) -> str:
    return f" over {links}" if links else ""


def _field(label: str, text: str) -> list[str]:
    """One labelled entry, wrapped."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<{_LABEL}}", subsequent_indent=" " * (_LABEL + 2),
                         break_on_hyphens=False) or [f"  {label}"]  # fmt: skip
