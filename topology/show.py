"""Print a topology: a tree of nodes, devices and switches, a matrix as in ``nvidia-smi topo -m``, a legend.

Only this module of the package imports rich; everything it prints comes from the Topology.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..util.text import plural
from .model import Link, Topology

COLOURS = {
    "nvlink": "green",
    "xgmi": "red",
    "c2c": "bright_green",
    "pcie": "yellow",
    "host": "magenta",
    "memory": "cyan",
    "net": "blue",
}
SWITCH_COLOURS = {"nvswitch": "green", "pcie": "yellow", "host": "magenta", "memory": "cyan", "net": "blue"}
SHARP = "  reduces and multicasts (SHARP)"
BAND = 16  # columns of a matrix that fit beside their labels in 100 characters

# Classes of paths between two devices that cross no other device, best first: word, kinds of switch, colour, meaning.
PATH_CLASSES = (
    ("sw", {"nvswitch"}, "green", "through NVSwitch"),
    ("mem", {"memory"}, "cyan", "through the memory of the node"),
    ("pcie", {"pcie"}, "yellow", "through PCIe switches of one socket"),
    ("host", {"pcie", "host", "nvswitch", "memory"}, "magenta", "through the CPU sockets"),
    ("net", {"pcie", "host", "nvswitch", "memory", "net"}, "blue", "over the network"),
)
NO_PATH = ("-", "dim", "only through other devices, or not at all")


def table_of(*columns: str) -> Table:
    """A table without a frame; a column is ``name``, ``>name`` (to the right) or ``name...`` (which may wrap)."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        right, wrap = name.startswith(">"), name.endswith("...")
        made.add_column(name.strip(">."), justify="right" if right else "left", no_wrap=not wrap, overflow="fold")
    return made


def render(topology: Topology) -> RenderableType:
    """Everything about a machine that fits a terminal of 100 columns."""
    paths = PathLabels(topology)
    matrices = _matrices(topology, paths)
    return Group(_tree(topology), Text(), *matrices, _legend(topology, paths))


class PathLabels:
    """The best path between every two devices, as a word with its colour; remembers the words used for the legend."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.used: set[str] = set()
        self._direct: dict[tuple[int, int], list[Link]] = {}
        for link in topology.links:
            if link.src < topology.n and link.dst < topology.n:
                self._direct.setdefault((link.src, link.dst), []).append(link)
        self._reach = [self._reached(kinds) for _, kinds, _, _ in PATH_CLASSES]

    def __call__(self, src: int, dst: int) -> Text:
        """The cell of the matrix for one pair."""
        if src == dst:
            return Text("·", style="dim")
        if links := self._direct.get((src, dst)):
            best = max(links, key=lambda k: (k.mbps, k.kind))
            self.used.add("direct")
            return Text(f"{best.lanes}x{_gbps(best.lane_mbps)}", style=COLOURS[best.kind])
        for (word, _, colour, _), reach in zip(PATH_CLASSES, self._reach, strict=True):
            if dst in reach[src]:
                self.used.add(word)
                return Text(word, style=colour)
        self.used.add("-")
        return Text(NO_PATH[0], style=NO_PATH[1])

    def _reached(self, kinds: set[str]) -> list[set[int]]:
        """Per device, the devices that a path over switches of these kinds alone reaches."""
        n = self.topology.n
        onward: dict[int, list[int]] = {}
        for link in self.topology.links:
            ends = [v for v in (link.src, link.dst) if v >= n]
            if ends and all(self.topology.switches[v - n].kind in kinds for v in ends):
                onward.setdefault(link.src, []).append(link.dst)
        found = []
        for start in range(n):
            seen, queue = {start}, [start]
            for v in queue:
                fresh = [w for w in onward.get(v, ()) if w not in seen] if v == start or v >= n else []
                seen.update(fresh)
                queue += fresh
            found.append({v for v in seen if v < n})
        return found


def _tree(topology: Topology) -> Tree:
    """Nodes, their switches and the devices below them; equal neighbours share a line."""
    count = Counter(d.kind for d in topology.devices)
    kinds = " and ".join(plural(count[kind], kind.upper()) for kind in sorted(count))
    nodes = topology.nodes
    head = Text.assemble(
        (topology.name, "bold"),
        f"  {kinds} on {plural(len(nodes), 'node')}  ",
        (f"fingerprint {topology.fingerprint}", "dim"),
    )
    root = Tree(head, guide_style="dim")
    parent = _parents(topology)
    pictures = {node: _picture(topology, node, parent) for node in nodes}
    for run in _runs(nodes, lambda a, b: pictures[a] == pictures[b]):
        hosts = sorted({topology.devices[r].host for node in run for r in topology.ranks_of(node)} - {""})
        shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        branch = root.add(Text.assemble(_nodes(run), (f"  {shown}" if hosts else "", "dim")))
        places = [branch]  # the latest branch of each depth
        for depth, line in pictures[run[0]]:
            places[depth + 1 :] = [places[depth].add(line)]
    for j, switch in enumerate(topology.switches):
        if switch.node not in nodes:
            joined = len({k.src for k in topology.links if k.dst == topology.n + j})
            name = topology.vertex_label(topology.n + j), f"bold {SWITCH_COLOURS[switch.kind]}"
            root.add(Text.assemble(name, f"  joins {joined}", SHARP if switch.sharp else ""))
    return root


def _parents(topology: Topology) -> dict[int, int]:
    """The parent of every device and PCIe switch: a switch of its node, as near to a CPU socket as its links allow."""
    n, near = topology.n, _neighbours(topology)
    node_of = topology.homes
    kind_of = ["device"] * n + [s.kind for s in topology.switches]
    parent: dict[int, int] = {}
    placed: set[int] = set()

    def hang(roots: list[int]) -> None:
        placed.update(roots)
        queue = list(roots)
        for v in queue:
            for w in near[v]:
                if w not in placed and node_of[w] == node_of[v] and kind_of[w] in ("device", "pcie") and v >= n:
                    parent[w] = v
                    placed.add(w)
                    queue.append(w)

    hang([v for v in range(n, len(kind_of)) if kind_of[v] == "host"])
    for kind in ("pcie", "memory", "nvswitch"):
        for v in range(n, len(kind_of)):
            if kind_of[v] == kind and v not in placed:
                hang([v])
    return parent


def _neighbours(topology: Topology) -> list[list[int]]:
    near: list[set[int]] = [set() for _ in range(topology.n + len(topology.switches))]
    for link in topology.links:
        near[link.src].add(link.dst)
        near[link.dst].add(link.src)
    return [sorted(group) for group in near]


def _picture(topology: Topology, node: int, parent: dict[int, int]) -> list[tuple[int, Text]]:
    """The lines of one node with their depth."""
    n = topology.n
    mine = [n + j for j, s in enumerate(topology.switches) if s.node == node] + list(topology.ranks_of(node))
    lines: list[tuple[int, Text]] = []
    cards: dict[int, list[Text]] = {}
    for card in topology.cards:
        rate = Text(f"  net {_gbps(card.mbps)} GB/s", style=COLOURS["net"])
        cards.setdefault(card.vertex, []).append(Text.assemble((f"card {card.name}", "bold"), rate))

    def draw(vertices: list[int], depth: int) -> None:
        facts = {v: _facts(topology, v, parent) for v in vertices}
        switches, devices = [v for v in vertices if v >= n], [v for v in vertices if v < n]
        for v in switches:
            name = topology.vertex_label(v).partition("@")[0]
            kind = topology.switches[v - n].kind
            line = Text(name, style=f"bold {SWITCH_COLOURS[kind]}")
            if len(topology.nodes) == 1:  # --drop-link takes its number; with it, several nodes would not look alike
                line.append(f" (vertex {v})", style="dim")
            line.append(SHARP if topology.switches[v - n].sharp else "", style="")
            lines.append((depth, Text.assemble(line, facts[v])))
            draw([w for w in mine if parent.get(w) == v], depth + 1)
            lines.extend((depth + 1, line) for line in cards.get(v, ()))
        for run in _runs(devices, lambda a, b: facts[a] == facts[b]):
            who = f"{topology.devices[run[0]].kind.upper()} {_span([topology.devices[v].index for v in run])}"
            lines.append((depth, Text.assemble((who.ljust(7), "bold"), facts[run[0]])))
            lines.extend((depth + 1, line) for v in run for line in cards.get(v, ()))

    draw([v for v in mine if v not in parent], 0)
    return lines


def _facts(topology: Topology, vertex: int, parent: dict[int, int]) -> Text:
    """A device's model, and the links of each kind that leave a vertex, except those to its children."""
    text = Text()
    if vertex < topology.n and topology.devices[vertex].name:
        text.append(f"  {topology.devices[vertex].name}")
    leaving = [k for k in topology.links if k.src == vertex and parent.get(k.dst) != vertex]
    for kind in sorted({k.kind for k in leaving}):
        links = [k for k in leaving if k.kind == kind]
        ends = {k.dst for k in links} - {parent.get(vertex)}
        to = f" to {topology.vertex_label(ends.pop()).partition('@')[0]}" if len(ends) == 1 else ""
        text.append(f"  {kind} {_sum(links)}{to}", style=COLOURS[kind])
    return text


def _sum(links: Sequence[Link]) -> str:
    """``6 x 25 = 150 GB/s`` for some links, ``25 GB/s`` for one lane."""
    total, lanes, rates = _gbps(sum(k.mbps for k in links)), sum(k.lanes for k in links), {k.lane_mbps for k in links}
    if lanes == 1 or len(rates) > 1:
        return f"{total} GB/s"
    return f"{lanes} x {_gbps(rates.pop())} = {total} GB/s"


def _matrices(topology: Topology, paths: PathLabels) -> list[RenderableType]:
    """One matrix for up to 16 devices; else one for each different node, and how nodes reach each other."""
    if topology.n == 1:
        return []
    if topology.n <= BAND:
        return [_matrix(topology, paths, range(topology.n), "")]
    cells = {node: _cells(topology, paths, node) for node in topology.nodes}
    parts: list[RenderableType] = []
    for run in _runs(topology.nodes, lambda a, b: cells[a] == cells[b]):
        title = _nodes(run)
        uniform = {text for i, row in enumerate(cells[run[0]]) for j, text in enumerate(row) if i != j}
        if len(uniform) == 1 and len(cells[run[0]]) > BAND:
            parts.append(Text(f"{title}: every two devices: {uniform.pop()}\n"))
        else:
            parts.append(_matrix(topology, paths, topology.ranks_of(run[0]), title))
    if len(topology.nodes) > 1:
        first = topology.ranks_of(topology.nodes[0])[0]
        words = {paths(first, topology.ranks_of(node)[0]).plain for node in topology.nodes[1:]}
        parts.append(Text(f"between nodes: {', '.join(sorted(words))}\n"))
    return parts


def _cells(topology: Topology, paths: PathLabels, node: int) -> list[list[str]]:
    ranks = topology.ranks_of(node)
    return [[paths(a, b).plain for b in ranks] for a in ranks]


def _matrix(topology: Topology, paths: PathLabels, ranks: Sequence[int], title: str) -> RenderableType:
    """Rows send, columns receive; bands of columns where one does not fit."""
    bands: list[RenderableType] = []
    for at in range(0, len(ranks), BAND):
        columns = ranks[at : at + BAND]
        table = Table(box=None, padding=(0, 0, 0, 1), title=title or None, title_justify="left", header_style="bold")
        table.add_column("rank", justify="right", no_wrap=True, style="bold")
        table.add_column("", no_wrap=True, style="dim")
        for b in columns:
            table.add_column(str(b), justify="right", no_wrap=True, min_width=4 if len(columns) > 12 else 5)
        for a in ranks:
            table.add_row(str(a), topology.vertex_label(a), *(paths(a, b) for b in columns))
        bands += [table, Text()]
    return Group(*bands)


def _legend(topology: Topology, paths: PathLabels) -> RenderableType:
    """The words of the matrix that occur, the link kinds with their rates and origin, the source."""
    words = Table.grid(padding=(0, 2))
    if "direct" in paths.used:
        words.add_row(Text("2x25", style="bold"), "direct: 2 lanes of 25 GB/s each way (row sends to column)")
    for word, _, colour, meaning in PATH_CLASSES:
        if word in paths.used:
            words.add_row(Text(word, style=colour), meaning)
    if "-" in paths.used:
        words.add_row(Text(NO_PATH[0], style=NO_PATH[1]), NO_PATH[2])
    kinds = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    kinds.add_column("kind")
    for heading in ("links", "lanes", "GB/s a lane"):
        kinds.add_column(heading, justify="right")
    kinds.add_column("origin")
    for kind in topology.kinds():
        links = [k for k in topology.links if k.kind == kind]
        lanes, rates = {k.lanes for k in links}, {k.lane_mbps for k in links}
        spans, origins = (_range(sorted(lanes), str), _range(sorted(rates), _gbps)), sorted({k.origin for k in links})
        kinds.add_row(Text(kind, style=COLOURS[kind]), str(len(links)), *spans, ", ".join(origins))
    source = Text(f"source: {topology.source}", style="dim") if topology.source else Text()
    head: list[RenderableType] = [words, Text()] if words.row_count else []
    return Group(*head, kinds, Text("one link is one direction; rates are per direction", style="dim"), source)


def _runs(items: Iterable[int], alike: Callable[[int, int], bool]) -> list[list[int]]:
    """Group neighbours that are alike."""
    runs: list[list[int]] = []
    for item in items:
        if not runs or not alike(runs[-1][0], item):
            runs.append([])
        runs[-1].append(item)
    return runs


def _nodes(run: Sequence[int]) -> str:
    return f"node {run[0]}" if len(run) == 1 else f"nodes {_span(run)}, each"


def _span(numbers: Sequence[int]) -> str:
    """``0-7`` for neighbours, ``1,4,5`` otherwise."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _range(values: Sequence[int], text: Callable[[int], str]) -> str:
    """One value, or the least and the greatest."""
    return text(values[0]) if len(values) == 1 else f"{text(values[0])}-{text(values[-1])}"


def _gbps(mbps: int) -> str:
    """MB/s as GB/s without trailing zeros: 25, 12.5, 15.75."""
    return f"{mbps / 1000:.2f}".rstrip("0").rstrip(".")
