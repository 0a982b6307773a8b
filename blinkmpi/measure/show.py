"""What ``blinkmpi topo --measure`` prints: a summary by class, a matrix of each kind, the host's path, what is slow."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..topology.measured import (
    NOWHERE,
    LinkMeasurement,
    Measured,
    MeasurementKind,
    class_of,
    marked,
    slow_links,
    usual,
    with_measured,
)
from ..topology.model import Topology
from ..topology.show import table_of
from .links import WORDS

MATRICES: tuple[MeasurementKind, ...] = ("copy", "copy-both", "push", "push-both", "flag")
ORDER = tuple(WORDS)
ONE_END: tuple[MeasurementKind, ...] = ("host", "host-all", "copy-all", "push-all", "memory", "memory-all", "net")
BAND = 16  # columns of a matrix


def render(topology: Topology, measured: Measured, note: str) -> RenderableType:
    """Everything that was measured.

    Args:
        measured: by the ranks of ``topology``.
        note: where it comes from.
    """
    low = marked(topology, measured)
    under = f", driver {measured.driver}" if measured.driver else ""
    parts: list[RenderableType] = [Text(f"{topology.name}{under}", "bold"), Text(note, "dim"), Text()]
    parts.append(_summary(topology, measured))
    for what in MATRICES:
        rows = [r for r in measured.rows if r.what == what]
        if rows:
            parts += [_matrix(topology, rows, low), Text()]
    ends = _ends(topology, measured, low)
    if ends is not None:
        parts += [ends, Text()]
    parts += _verdict(topology, measured, low)
    parts += [Text(f"not measured: {reason}", "yellow") for reason in measured.missing]
    return Group(*parts)


def _summary(topology: Topology, measured: Measured) -> RenderableType:
    """Least, median and most of every class."""
    groups: dict[tuple[int, str], list[LinkMeasurement]] = {}
    for row in measured.rows:
        groups.setdefault((ORDER.index(row.what), class_of(topology, row)), []).append(row)
    table = table_of("measured", "over...", ">rows", ">least", ">median", ">most", "")
    for (kind, over), rows in sorted(groups.items()):
        if ORDER[kind] == "flag":
            times = sorted(r.us or 0 for r in rows)
            cells = [f"{x:.2f}" for x in (times[0], times[len(times) // 2], times[-1])]
        else:
            rates = [r.mbps or 0 for r in rows]
            cells = [_gbps(x) for x in (min(rates), usual(rates), max(rates))]
        table.add_row(WORDS[ORDER[kind]], over, str(len(rows)), *cells, "us" if ORDER[kind] == "flag" else "GB/s")
    return table


def _matrix(topology: Topology, rows: Sequence[LinkMeasurement], low: dict[LinkMeasurement, int]) -> RenderableType:
    """One kind: rows send, columns receive."""
    what = rows[0].what
    cells = {(r.src, r.dst): r for r in rows}
    ranks = range(topology.n)
    unit = "us" if what == "flag" else "GB/s"
    bands: list[RenderableType] = []
    for at in range(0, topology.n, BAND):
        title = f"{WORDS[what]}, {unit}" if not at else None
        table = Table(box=None, padding=(0, 0, 0, 1), title=title, title_justify="left", header_style="bold")
        table.add_column("rank", justify="right", no_wrap=True, style="bold")
        for b in ranks[at : at + BAND]:
            table.add_column(str(b), justify="right", no_wrap=True, min_width=5)
        for a in ranks:
            table.add_row(str(a), *(_cell(cells.get((a, b)), low, a == b) for b in ranks[at : at + BAND]))
        bands.append(table)
    return Group(*bands)


def _cell(row: LinkMeasurement | None, low: dict[LinkMeasurement, int], same: bool) -> Text:
    if row is None:
        return Text("·" if same else "-", style="dim")
    if row.mbps is None:
        return Text(f"{row.us:.2f}")
    return Text(_gbps(row.mbps) + "!", style="bold red") if row in low else Text(_gbps(row.mbps))


def _ends(topology: Topology, measured: Measured, low: dict[LinkMeasurement, int]) -> RenderableType | None:
    """What belongs to one device: to and from the host, to its neighbour with all at once, memory, network."""
    columns: dict[tuple[MeasurementKind, str], dict[int, LinkMeasurement]] = {}
    heads = {"host": "host alone", "host-all": "host, all", "copy-all": "copy to next, all",
             "push-all": "stores to next, all", "memory": "memory alone", "memory-all": "memory, all",
             "net": "network"}  # fmt: skip
    for what in ONE_END:
        for row in measured.rows:
            if row.what == what:
                way = "" if not what.startswith("host") else " to " if row.dst == NOWHERE else " from "
                column = columns.setdefault((what, f"{way.strip()} {heads[what]}".strip()), {})
                column[row.dst if row.src == NOWHERE else row.src] = row
    if not columns:
        return None
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="every rank, GB/s", title_justify="left")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for _, head in columns:
        table.add_column(head, justify="right")
    for rank in range(topology.n):
        cells = (_cell(rows.get(rank), low, False) for rows in columns.values())
        table.add_row(str(rank), topology.vertex_label(rank), *cells)
    return table


def _verdict(topology: Topology, measured: Measured, low: dict[LinkMeasurement, int]) -> list[RenderableType]:
    """What is far under its class, and what a plan takes for it."""
    taken = {(k.src, k.dst, k.kind): k.mbps for k in with_measured(topology, measured).links}
    found: list[RenderableType] = []
    for link, mbps, median in slow_links(topology, measured):
        ends = f"{topology.vertex_label(link.src)} -> {topology.vertex_label(link.dst)} ({link.kind})"
        plan = f"plans take {_gbps(taken[link.src, link.dst, link.kind])}"
        text = f"slow: {ends}: {_gbps(mbps)} GB/s, {_share(mbps, median)} of its class; {plan}"
        found.append(Text(text, "bold red"))
    if low:
        found.append(Text(f"! {len(low)} of {len(measured.rows)} rates are more than 15 % under the median of their "
                          "class"))  # fmt: skip
    return found or [Text("no rate is more than 15 % under the median of its class", "green")]


def _share(mbps: int, median: int) -> str:
    return f"{mbps / median:.0%} of the {_gbps(median)}"


def _gbps(mbps: int) -> str:
    return f"{mbps / 1000:.4g}" if mbps < 100_000 else f"{mbps / 1000:.1f}"
