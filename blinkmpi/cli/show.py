"""What the commands print with rich: plans, simulations, subsets, differences (``topology.show`` shows machines)."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..doctor.report import Report
from ..planning.advice import Advice
from ..planning.explain import gap_text, share_text, shares, what_bounds
from ..planning.in_switch import InSwitch
from ..planning.subsets import Spread, Subset, by_size, summary
from ..topology.model import Topology
from ..topology.show import table_of
from ..trees.tree import Packing, Tree
from ..util.text import plural, spans, time_text

BAR = 30


def packings(
    found: Sequence[tuple[Packing, float]], topology: Topology, left_out: Iterable[str] = (),
    in_switch: InSwitch | None = None,
) -> RenderableType:  # fmt: skip
    """One row for each collective, then the certificates."""
    table = table_of("collective", "scheme", ">trees", ">depth", ">rate GB/s", ">bound GB/s", "optimal")
    proofs = Table.grid(padding=(0, 2))
    for p, _ in found:
        name = p.collective + (f" from {p.root}" if p.root >= 0 else "")
        trivial = p.certificate.kind == "trivial"
        rates = ["-" if trivial else f"{float(mbps / 1000):.4g}" for mbps in (p.rate, p.bound)]
        optimal = Text("yes", "green") if p.optimal else Text(f"{float(p.rate / p.bound):.1%}", "yellow")
        table.add_row(name, p.scheme, str(len(p.trees)), str(p.depth), *rates, optimal)
        proofs.add_row(f" {name}", p.certificate.text)
    links = sorted({p.links for p, _ in found} - {""})
    total = sum(seconds for _, seconds in found)
    title = Text(f"{topology.name}, {plural(topology.n, 'rank')}, over {', '.join(links) or 'no links'}", "bold")
    rest = [Text(f" not by this method: {', '.join(left_out)}", "dim")] if left_out else []
    why, end = Text(" What bounds the rates of trees", "bold"), Text(f"\n planned in {time_text(total)}", "dim")
    sums = [Text("\n In the switches", "bold"), Text(f" allreduce  {in_switch.text}")] if in_switch else []
    return Group(title, table, *rest, why, proofs, *sums, end)


def packing(p: Packing, seconds: float, topology: Topology, in_switch: InSwitch | None = None) -> RenderableType:
    """One collective with all its trees."""
    rate, bound = float(p.rate / 1000), float(p.bound / 1000)
    head = Table.grid(padding=(0, 2))
    if topology.renumbered:
        head.add_row("ranks", topology.renumbered.removeprefix("ranks "))
    head.add_row("scheme", f"{p.scheme}: {p.reason.partition(': ')[2] or p.reason}")
    if p.certificate.kind != "trivial":
        gap = f"{gap_text(rate, bound, p.optimal)} of {what_bounds(p, topology)}"
        head.add_row("rate", Text(f"{rate:.4g} GB/s, {gap}", "green" if p.optimal else "yellow"))
        head.add_row("bound", f"{bound:.4g} GB/s: {p.certificate.text}")
    if in_switch is not None:
        head.add_row("in switches", in_switch.text)
    head.add_row("links", p.links or "none")
    head.add_row("planned in", time_text(seconds))
    what, names = "rank", [str(r) for r in range(p.n)]
    if topology.renumbered:  # as pictures and the bound name them
        what, names = topology.devices[0].kind.upper(), [str(d.index) for d in topology.devices]
    names += [topology.vertex_label(v) for v in range(p.n, p.n + len(topology.switches))]  # where these make sums
    table = table_of(">tree", ">share", ">GB/s", ">depth", f">root {what}", f"edges between {what}s, from the root...")
    for i, (tree, share) in enumerate(zip(p.trees, shares(p), strict=True)):
        weight = "-" if p.certificate.kind == "trivial" else f"{float(tree.weight / 1000):.4g}"
        table.add_row(str(i), share_text(share), weight, str(tree.depth), names[tree.root], edges_text(tree, names))
    where = f" from {what} {names[p.root]}" if p.root >= 0 else ""
    title = Text(f"{p.collective}{where}, {plural(p.n, 'rank')} on {topology.name}\n", "bold")
    return Group(title, head, Text(), table)


def facts(title: str, rows: Sequence[tuple[str, str]]) -> RenderableType:
    """A title, and a line for each fact."""
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(f" {name}", text)
    return Group(Text(f"\n{title}", "bold"), table)


def front(found: Sequence[Packing], best: Packing, topology: Topology) -> RenderableType:
    """Packings that no other one beats in trees, depth and rate."""
    table = table_of(">trees", ">depth", ">GB/s", ">of the bound", "shares...")
    for p in found:
        part = Text("all", "green") if p.optimal else Text(f"{float(p.rate / p.bound):.1%}")
        row = str(len(p.trees)), str(p.depth), f"{float(p.rate / 1000):.4g}"
        table.add_row(*row, part, _counted(map(share_text, shares(p))))
    where = f" from rank {best.root}" if best.root >= 0 else ""
    title = Text(f"{best.collective}{where}, {plural(best.n, 'rank')} on {topology.name}: few, shallow, fast", "bold")
    chosen = f"method {best.reason.partition(': ')[0]} takes {len(best.trees)} trees, depth {best.depth}, "
    rate = f"{float(best.rate / 1000):.4g} of {float(best.bound / 1000):.4g} GB/s"
    return Group(title, table, Text(f" {chosen}{rate}", "dim"))


def subsets(found: Sequence[Subset], topology: Topology, pcie_mbps: int) -> RenderableType:
    """One row for each unique subset, then what those of a size have in common."""
    names = ("broadcast", "allreduce", "allgather")
    table = table_of("GPUs", ">alike", ">rings", ">trees", *(cell for name in names for cell in (f">{name}", ">x")))
    sizes = by_size(found)
    for some in sizes.values():
        for i, s in enumerate(some):
            pairs = zip(s.rates, s.speedups, strict=True)
            cells = [cell for rate, times in pairs for cell in (f"{float(rate / 1000):.4g}", _times(float(times)))]
            trees = f"{s.trees}" if s.fewest else f"<={s.trees}"
            facts = str(s.allocations), str(s.rings) if s.rings else Text("PCIe", "yellow"), trees
            table.add_row(",".join(map(str, s.gpus)), *facts, *cells, end_section=i == len(some) - 1)
    sums = table_of(">size", ">unique", ">alike", ">no ring", ">trees", *(f">{name}" for name in names))
    groups = [(str(size), some) for size, some in sizes.items()]
    larger = [s for s in found if len(s.gpus) > 2]
    if larger:
        groups.append((f"3-{max(sizes)}", larger))
    for name, some in groups:
        k = summary(some)
        counts = k.unique, k.allocations, k.without_ring, k.most_trees
        sums.add_row(name, *map(str, counts), *map(_spread, k.speedups))
    title = f"{topology.name}: connected subsets that differ, rates of trees in GB/s, and times those of rings"
    below = f" Speed-up of trees over rings; over PCIe at {pcie_mbps / 1000:g} GB/s without: min / mean / max"
    note = " alike: choices of GPUs that look the same; rings: one-way, no two share a lane; mean: geometric"
    return Group(Text(title, "bold"), table, Text(below, "bold"), sums, Text(note, "dim"))


def advice(found: Advice, topology: Topology, why: str) -> RenderableType:
    """One row for each class of sets, the best first."""
    table = table_of("GPUs", ">alike", ">allreduce", ">of best", ">rings", ">broadcast", ">rings", "over...")
    best = found.choices[0].rates[0]
    for c in found.choices:
        (reduce, cast), (around, along) = (
            [f"{float(r / 1000):.4g}" for r in mbps] or ["-", "-"] for mbps in (c.rates, c.rings)
        )
        part = Text(f"{float(c.rates[0] / best):.0%}", "green" if c.rates[0] == best else "")
        links = c.links if c.ring_links in ("", c.links) else f"{c.links}; rings {c.ring_links}"
        table.add_row(gpus_text(c.gpus, topology), str(c.alike), reduce, part, around, cast, along, links)
    head = f"{found.take} of {plural(len(found.free), 'GPU')} of {topology.name}: the best sets first, GB/s"
    notes = [
        f" chosen from {gpus_text(found.free, topology)}" + (f" ({why})" if why else ""),
        " alike: sets whose links look the same; the first of them is shown; rings: as NCCL builds them",
    ]
    if found.apart:
        notes.append(f" {plural(found.apart, 'set')} more that no links join")
    return Group(Text(head, "bold"), table, *(Text(note, "dim") for note in notes))


def gpus_text(ranks: Sequence[int], topology: Topology) -> str:
    """GPUs by the numbers that they have on their nodes: ``1,4,5,6``, or, of several nodes, ``0-3@0 0-3@1``."""
    if len(topology.nodes) == 1:
        return ",".join(str(topology.devices[r].index) for r in ranks)
    nodes = groupby(ranks, key=lambda r: topology.devices[r].node)
    return " ".join(f"{','.join(spans(topology.devices[r].index for r in some))}@{node}" for node, some in nodes)


def compared(names: Sequence[str], heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> RenderableType:
    """One row for each difference; a dash stands for what a side lacks."""
    if not rows:
        return Text.assemble((f"{names[0]} and {names[1]}: ", "bold"), ("no difference", "green"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in (*heads, *names):
        table.add_column(head, overflow="fold")
    last = ""
    for *about, one, other in rows:
        shown = ["" if len(about) > 1 and about[0] == last else about[0], *about[1:]]
        sides = [Text(text or "-", colour if text else "dim") for text, colour in ((one, "red"), (other, "green"))]
        table.add_row(*shown, *sides)
        last = about[0]
    return Group(Text(f"{names[0]} and {names[1]}: {plural(len(rows), 'difference')}\n", "bold"), table)


STATES = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red"), "n/a": ("n/a", "dim")}


def doctor(report: Report) -> RenderableType:
    """One row for each finding, with its remedy below; the verdict last."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for line in report.findings:
        word, colour = STATES[line.state]
        text = Text(line.evidence, "dim" if line.state == "n/a" else "")
        table.add_row(Text(word, colour), line.check, text)
        if line.remedy:
            table.add_row("", "", Text(f"-> {line.remedy}", "cyan"))
    counts = {state: sum(line.state == state for line in report.findings) for state in STATES}
    words = {"fail": "failed", "warn": "to look at"}
    found = ", ".join(f"{counts[state]} {word}" for state, word in words.items() if counts[state])
    verdict = Text("a job would not run well here", "bold red")
    if report.healthy:
        verdict = Text("a job would run here", "bold green")
    tail = Text(f" ({found})" if found else "", "")
    return Group(Text(f"blinkmpi doctor, {plural(report.ranks, 'rank')}\n", "bold"), table, Text(), verdict + tail)


def _counted(words: Iterable[str]) -> str:
    """``50%, 2 x 25%``."""
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return ", ".join(word if times == 1 else f"{times} x {word}" for word, times in runs)


def _times(factor: float) -> Text:
    return Text(f"{factor:.2f}", "green" if factor > 1 else "")


def _spread(s: Spread) -> str:
    return f"{s.least:.3g} / {s.mean:.3g} / {s.most:.3g}"


def edges_text(tree: Tree, names: Sequence[str]) -> str:
    """``0>1,3  1>5``: each parent with its children; ``up 5>1  1,3>0``: each parent with those that send to it.

    Args:
        names: of the ranks.
    """
    parents = groupby(tree.edges, key=lambda e: e.src)
    down = "  ".join(f"{names[src]}>{','.join(names[e.dst] for e in edges)}" for src, edges in parents) or "none"
    parents = groupby(tree.up, key=lambda e: e.dst)
    up = "  ".join(f"{','.join(names[e.src] for e in edges)}>{names[dst]}" for dst, edges in parents)
    return f"{down}  up {up}" if up else down


def simulation(facts: Mapping[str, str], rows: Sequence[tuple[str, float]], more: int) -> RenderableType:
    """Facts as a list, links as bars."""
    head = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        head.add_row(name, value)
    if not rows:
        return head
    bars = table_of("busiest...", ">busy", "...")
    for name, part in rows:
        bars.add_row(name, f"{part:.0%}", ProgressBar(total=1.0, completed=part, width=BAR))
    rest = [Text(f"and {more} more", "dim")] if more > 0 else []
    return Group(head, Text(), bars, *rest)
