"""One Topology from the facts of all ranks' GPUs (Blink section 3, "probe"). Pure: facts in, machine out.

The NVSwitches of a node are one switch, as in the catalogue. NVLinks between GPUs are matched by PCI id. PCIe switches
and CPU sockets come from /sys. Links to GPUs that are not in the job are not used. The number of links is probed, the
rate of an NVLink is the catalogue's, and PCIe's rate follows from generation and width.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from ..errors import TopologyError
from ..util.text import ranks_text
from .gpu import GpuFacts, NvLink, Unknown, known
from .machines import NET_MBPS, QPI_LANES, QPI_MBPS
from .model import Connection, Device, Link, LinkKind, NetworkCard, Origin, Switch, Topology, Unnumbered
from .rates import NVLINK_MBPS, NVLINK_SHARP, PCIE_X16, XGMI_MBPS

ASSUMED_GEN = 3
SHARED_MBPS = 100_000  # between ranks that share a GPU: a guess that nothing but tests depends on
NO_RATES: Mapping[str, int] = MappingProxyType({})
FAST_WORDS = {"nvlink": "NVLink", "xgmi": "xGMI"}
FABRIC_READY = ("completed", "not supported")  # before the third NVSwitch generation there is no fabric state


class TopologyBuilder:
    """Collects switches, connections and remarks; vertices are numbered at the end."""

    def __init__(self, facts: Sequence[GpuFacts], nodes: Sequence[int], rates: Mapping[str, int] = NO_RATES) -> None:
        self.facts, self.nodes, self.rates = facts, nodes, rates
        self.switches: dict[Unnumbered, Switch] = {}
        self.connections: list[Connection] = []
        self._joined: set[tuple[LinkKind, frozenset[Unnumbered]]] = set()
        self._remarks: dict[str, dict[int, None]] = {}

    def on(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [r for r, at in enumerate(self.nodes) if at == node]

    def connect(self, a: Unnumbered, b: Unnumbered, kind: LinkKind, lanes: int, mbps: int, origin: Origin) -> None:
        """Join two vertices once."""
        if (key := (kind, frozenset((a, b)))) not in self._joined:
            self._joined.add(key)
            self.connections.append(Connection(a, b, kind, lanes, mbps, origin))

    def remark(self, text: str, *ranks: int) -> None:
        """Add a remark about some ranks for the reader of ``blinkmpi topo``."""
        self._remarks.setdefault(text, {}).update(dict.fromkeys(ranks))

    @property
    def remarks(self) -> list[str]:
        """All remarks; the same remark about several ranks is one text."""
        return [f"{ranks_text(sorted(ranks))}: {text}" if ranks else text for text, ranks in self._remarks.items()]

    def who(self, rank: int) -> str:
        """``rank 3 (NVIDIA H200 at 0000:3d:00.0)``."""
        return f"rank {rank} ({self.facts[rank].label})"


def from_gpus(
    facts: Sequence[GpuFacts],
    *,
    nodes: Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
    per_gpu: int = 1,
    rates: Mapping[str, int] = NO_RATES,
    one_domain: bool = False,
) -> Topology:
    """One machine from the GPU of every rank, in rank order.

    Args:
        nodes: the node of each rank, numbered from 0 in order of appearance; None: all on one.
        hosts: the host name of each rank.
        per_gpu: how many ranks may share a GPU. The ranks of a node where they do are joined by its memory alone.
        rates: MB/s of one link of a kind, where the user says it.
        one_domain: whether the NVSwitches of all nodes are one NVLink domain.

    Raises:
        TopologyError: for more ranks on one GPU, a GPU in MIG mode, or an NVLink of unknown version.
    """
    at = list(nodes) if nodes is not None else [0] * len(facts)
    build = TopologyBuilder(facts, at, rates)
    _refuse(build, per_gpu)
    for node in sorted(set(at)):
        if any(len(ranks) > 1 for ranks in _gpus(build, build.on(node))):
            _shared(build, node)
        else:
            if not one_domain:
                _nvswitch(build, node, build.on(node))
            _direct(build, node)
    if one_domain:
        _nvswitch(build, -1, range(len(facts)))
    for node in sorted(set(at)):
        _pcie(build, node)
    cards = {node: _cards(build, node) for node in sorted(set(at))}
    if len(cards) > 1 and (any(cards.values()) or not one_domain):
        _network(build, cards)
    return _topology(build, hosts or [""] * len(facts), cards[at[0]] if len(cards) == 1 else {})


def _refuse(b: TopologyBuilder, per_gpu: int) -> None:
    """Raise TopologyError for GPUs that no plan can serve."""
    for rank, f in enumerate(b.facts):
        if f.mig is True:
            raise TopologyError(
                f"{b.who(rank)} is in MIG mode: its instances have neither NVLink nor peer access; "
                "switch it off (nvidia-smi -i ... -mig 0) or take another GPU"
            )
    for ranks in _gpus(b, range(len(b.facts))):
        if len(ranks) > per_gpu:
            allowed = f"; BLINKMPI_RANKS_PER_GPU allows {per_gpu}" if per_gpu > 1 else ""
            raise TopologyError(
                f"{b.who(ranks[0])} and {ranks_text(ranks[1:])} are on the same GPU{allowed}; give every rank its own "
                "(srun --gpus-per-task=1 --gpu-bind=none, or one rank per GPU in the launcher), or, for tests without "
                f"speed, set BLINKMPI_RANKS_PER_GPU={len(ranks)}"
            )


def _gpus(b: TopologyBuilder, among: Iterable[int]) -> list[list[int]]:
    """These ranks by GPU; a GPU of unknown id is taken for one of its own."""
    found: list[list[int]] = []
    seen: dict[object, list[int]] = {}
    for rank in among:
        uuid, bus = b.facts[rank].uuid, b.facts[rank].bus
        keys: list[object] = [uuid] if isinstance(uuid, str) else []
        keys += [(b.nodes[rank], bus)] if isinstance(bus, str) else []
        ranks = next((seen[key] for key in keys if key in seen), [])
        if not ranks:
            found.append(ranks)
        ranks.append(rank)
        seen.update(dict.fromkeys(keys, ranks))
    return found


def _shared(b: TopologyBuilder, node: int) -> None:
    """Connect the ranks of a node whose GPUs have several of them by one switch, in place of NVLinks."""
    key = ("nvswitch", (node, 0))
    b.switches[key] = Switch("nvswitch", node, "shared GPU memory")
    for rank in b.on(node):
        b.connect(("gpu", rank), key, "nvlink", 1, SHARED_MBPS, "table")
    for ranks in _gpus(b, b.on(node)):
        if len(ranks) > 1:
            where = b.facts[ranks[0]].label
            b.remark(f"share {where}, taking turns; {SHARED_MBPS / 1000:g} GB/s assumed, for tests", *ranks)


def _usable(b: TopologyBuilder, rank: int) -> list[NvLink]:
    """The active NVLinks of a rank's GPU."""
    links = b.facts[rank].nvlinks
    if isinstance(links, Unknown):
        b.remark(f"NVLinks unknown: {links.reason}", rank)
        return []
    for link in links:
        if isinstance(link.active, Unknown):
            b.remark(f"NVLink {link.number} not used: {link.active.reason}", rank)
        elif link.active and isinstance(link.remote, Unknown):
            b.remark(f"NVLink {link.number} not used: {link.remote.reason}", rank)
    down = [link.number for link in links if link.active is False]
    if down and len(down) < len(links):
        b.remark(f"NVLinks down: {_numbers(down)} of {len(links)}", rank)
    return [link for link in links if link.active is True]


def _rate(b: TopologyBuilder, rank: int, links: Iterable[NvLink]) -> int:
    """MB/s of one NVLink each way, as the user says, or from the table."""
    if "nvlink" in b.rates:
        return b.rates["nvlink"]
    rates = set()
    for link in links:
        version = link.version.reason if isinstance(link.version, Unknown) else link.version
        if version not in NVLINK_MBPS:
            raise TopologyError(
                f"{b.who(rank)}: NVLink {link.number}: rate unknown for version {version}; known are "
                f"{', '.join(NVLINK_MBPS)}: say it where a file is read (--rate nvlink=25, in GB/s), or describe the "
                "machine in a file (BLINKMPI_TOPO_FILE)"
            )
        rates.add(NVLINK_MBPS[version])
    return min(rates)


def _joined(b: TopologyBuilder, one: int, other: int) -> bool:
    """Whether NVML allows NVLink between two ranks' GPUs; it does where isolated ranks do not see each other's GPUs."""
    for a, z in ((one, other), (other, one)):
        for peer in known(b.facts[a].peers) or ():
            if peer.bus == b.facts[z].bus and isinstance(peer.nvlink, str) and peer.nvlink != "ok":
                b.remark(f"NVML denies NVLink between them: {peer.nvlink}", a, z)
                return False
    return True


def _nvswitch(b: TopologyBuilder, node: int, ranks: Iterable[int]) -> None:
    """Connect GPUs with links to switches to one NVSwitch, or to several where NVML denies NVLink between some.

    Args:
        node: where the switch is; -1 for one that joins nodes.
    """
    groups: list[list[int]] = []
    links: dict[int, list[NvLink]] = {}
    for rank in ranks:
        links[rank] = [link for link in _usable(b, rank) if link.remote in ("switch", "hidden switch")]
        fabric = b.facts[rank].fabric
        if not links[rank]:
            continue
        if isinstance(fabric, str) and fabric not in FABRIC_READY:
            b.remark(f"NVLinks not used: NVSwitch fabric {fabric}; is nvidia-fabricmanager running?", rank)
            continue
        compatible = [g for g in groups if all(_joined(b, rank, other) for other in g)]
        if compatible:
            compatible[0].append(rank)
        else:
            groups.append([rank])
    for number, group in enumerate(groups):
        key = ("nvswitch", (node, number))
        name = "NVSwitch" if len(groups) == 1 else f"NVSwitch {number}"
        sharp = all(link.version in NVLINK_SHARP for rank in group for link in links[rank])
        b.switches[key] = Switch("nvswitch", node, name, sharp)
        for rank in group:
            b.connect(("gpu", rank), key, "nvlink", len(links[rank]), _rate(b, rank, links[rank]), "table")


def _direct(b: TopologyBuilder, node: int) -> None:
    """Connect two GPUs of the job by as many NVLinks as both ends count."""
    rank_at = {bus: r for r in b.on(node) if isinstance(bus := b.facts[r].bus, str)}
    ports: Counter[tuple[int, int]] = Counter()
    kept: dict[tuple[int, int], list[NvLink]] = {}
    for rank in b.on(node):
        for link in known(b.facts[rank].nvlinks) or ():
            if link.active is True and link.remote == "gpu" and link.bus in rank_at:
                pair = (rank, rank_at[link.bus])
                ports[pair] += 1
                kept.setdefault(pair, []).append(link)
    for one, other, lanes in _agreed(b, ports, "NVLinks"):
        if _joined(b, one, other):
            b.connect(("gpu", one), ("gpu", other), "nvlink", lanes, _rate(b, one, kept[one, other]), "table")
    _xgmi(b, rank_at)


def _agreed(b: TopologyBuilder, counts: Counter[tuple[int, int]], links: str) -> Iterator[tuple[int, int, int]]:
    """Each two GPUs once, and as many links as both ends count, where that is one at least; else it is remarked."""
    for one, other in sorted(counts):
        if one > other and (other, one) in counts:
            continue  # seen from the other end
        lanes = min(counts[one, other], counts[other, one])
        if counts[one, other] != counts[other, one]:
            b.remark(f"{b.who(one)} counts {counts[one, other]} {links} to rank {other}, which counts "
                     f"{counts[other, one]}: {lanes} used")  # fmt: skip
        if lanes:
            yield one, other, lanes


def _xgmi(b: TopologyBuilder, rank_at: Mapping[str, int]) -> None:
    """Connect two GPUs of the job by as many xGMI links as both ends count."""
    counts: Counter[tuple[int, int]] = Counter()
    for rank in rank_at.values():
        for links in known(b.facts[rank].xgmi) or ():
            if links.bus in rank_at:
                counts[rank, rank_at[links.bus]] += links.count
    for one, other, lanes in _agreed(b, counts, "xGMI links"):
        rate = min(_xgmi_rate(b, one), _xgmi_rate(b, other))
        b.connect(("gpu", one), ("gpu", other), "xgmi", lanes, rate, "table")


def _xgmi_rate(b: TopologyBuilder, rank: int) -> int:
    """MB/s of one xGMI link each way, as the user says, or from the table."""
    if "xgmi" in b.rates:
        return b.rates["xgmi"]
    architecture = next(links.architecture for links in known(b.facts[rank].xgmi) or ())
    named = architecture.reason if isinstance(architecture, Unknown) else architecture
    if named not in XGMI_MBPS:
        raise TopologyError(f"{b.who(rank)}: rate of an xGMI link unknown for {named}; known are "
                            f"{', '.join(XGMI_MBPS)}: say it with --rate xgmi=64, in GB/s")  # fmt: skip
    return XGMI_MBPS[named]


def _pcie(b: TopologyBuilder, node: int) -> None:
    """Add the PCIe tree of a node: sockets by NUMA node, the switches that /sys shows, GPUs below them."""
    for rank in b.on(node):
        f = b.facts[rank]
        rate, origin = _lane_rate(f.pcie_gen, f.pcie_width)
        if isinstance(f.path, Unknown):
            b.remark(f"PCIe switches unknown: {f.path.reason}", rank)
        if origin == "table":
            b.remark(f"PCIe assumed generation {ASSUMED_GEN} x16: {_reason(f.pcie_gen, f.pcie_width)}", rank)
        # The path is the root port, then each switch's upstream and downstream port; the upstream port names it.
        below: Unnumbered = ("gpu", rank)
        for hop in reversed((known(f.path) or ())[1::2]):
            switch = ("pcie", (node, hop.bus))
            b.switches.setdefault(switch, Switch("pcie", node))
            b.connect(below, switch, "pcie", 1, rate, origin)
            own, probed = _lane_rate(hop.gen, hop.width)
            if probed == "probe":
                rate, origin = own, probed
            else:
                origin = "table"  # taken as fast as its GPU
                b.remark(f"PCIe switch at {hop.bus}: taken as fast as its GPU: {_reason(hop.gen, hop.width)}")
            below = switch
        b.connect(below, _socket(b, rank), "pcie", 1, rate, origin)
        if isinstance(f.c2c, tuple):
            b.connect(("gpu", rank), _socket(b, rank), "c2c", *f.c2c, "probe")
    sockets = [key for key in b.switches if key[0] == "host" and b.switches[key].node == node]
    for i, one in enumerate(sorted(sockets, key=str)):
        for other in sorted(sockets, key=str)[:i]:
            b.connect(other, one, "host", QPI_LANES, QPI_MBPS, "table")
    if len(sockets) > 1:
        b.remark(f"between sockets {QPI_LANES} x {QPI_MBPS / 1000:g} GB/s assumed, not probed")


def _socket(b: TopologyBuilder, rank: int) -> Unnumbered:
    """The CPU socket of a rank's GPU; one for all where the system names none."""
    node, numa = b.nodes[rank], b.facts[rank].numa
    key = ("host", (node, -1 if isinstance(numa, Unknown) else numa))
    b.switches.setdefault(key, Switch("host", node, "host" if isinstance(numa, Unknown) else f"socket {numa}"))
    return key


Cards = dict[str, tuple[Unnumbered, int]]  # by name: what each is on, and its MB/s


def _cards(b: TopologyBuilder, node: int) -> Cards:
    """The network cards near the GPUs of a node."""
    cards: Cards = {}
    for rank in b.on(node):
        for nic in known(b.facts[rank].nics) or ():
            shared = [("pcie", (node, bus)) for bus in nic.path if ("pcie", (node, bus)) in b.switches]
            if isinstance(nic.mbps, int):
                cards.setdefault(nic.name, (shared[-1] if shared else _socket(b, rank), nic.mbps))
    return cards


def _network(b: TopologyBuilder, cards: Mapping[int, Cards]) -> None:
    """Connect the nodes by one network, through the cards near their GPUs, or at an assumed rate."""
    net = ("net", 0)
    for node, mine in cards.items():
        total: Counter[Unnumbered] = Counter()
        for where, mbps in mine.values():
            total[where] += mbps
        for where, mbps in total.items():
            b.connect(where, net, "net", 1, mbps, "probe")
        if not total:
            b.connect(_socket(b, b.on(node)[0]), net, "net", 1, NET_MBPS, "table")
            b.remark(f"node {node}: no network card's rate known: {NET_MBPS / 1000:g} GB/s assumed")
    b.switches[net] = Switch("net", -1, "network")


def _topology(b: TopologyBuilder, hosts: Sequence[str], cards: Cards) -> Topology:
    """Number everything: GPUs in rank order, then switches by kind and place."""
    n = len(b.facts)
    order = {"nvswitch": 0, "pcie": 1, "host": 2, "net": 3}
    keys = sorted(b.switches, key=lambda k: (order[k[0]], str(k[1])))
    vertex: dict[Unnumbered, int] = {("gpu", rank): rank for rank in range(n)}
    vertex |= {key: n + i for i, key in enumerate(keys)}
    several = len(set(b.nodes)) > 1
    counts: Counter[tuple[str, int]] = Counter()
    switches = []
    for key in keys:
        switch = b.switches[key]
        name = switch.name or f"PCIe {counts['pcie', switch.node]}"
        counts[switch.kind, switch.node] += 1
        where = f"@{switch.node}" if several and switch.node >= 0 else ""
        switches.append(replace(switch, name=name + where))
    links = [
        Link(src, dst, c.kind, c.lanes, c.lane_mbps, c.origin)
        for c in sorted(b.connections, key=lambda c: (c.kind, *sorted((vertex[c.a], vertex[c.b]))))
        for ends in (sorted((vertex[c.a], vertex[c.b])),)
        for src, dst in (ends, ends[::-1])
    ]
    names = Counter(f.name if isinstance(f.name, str) else "GPU" for f in b.facts)
    name = " + ".join(f"{count} x {what}" if count > 1 else what for what, count in names.items())
    fast = sorted({c.kind for c in b.connections if c.kind in FAST_WORDS and c.kind not in b.rates})
    drivers = sorted({f.driver for f in b.facts if isinstance(f.driver, str)})
    head = f"probed: NVML of driver {', '.join(drivers)}" if drivers else "probed without NVML"
    found = Topology(
        name=name + (f" on {len(set(b.nodes))} nodes" if several else ""),
        devices=tuple(
            Device("gpu", node, index, _text(f.name), host, uuid, _text(f.bus))
            for f, node, host, index, uuid in zip(b.facts, b.nodes, hosts, _indices(b), _uuids(b), strict=True)
        ),
        switches=tuple(switches),
        links=tuple(links),
        source="; ".join([head, *(f"{FAST_WORDS[kind]} rates from the table" for kind in fast), *b.remarks]),
        cards=tuple(NetworkCard(name, vertex[at], mbps) for name, (at, mbps) in sorted(cards.items())),
    ).check()
    return found.subset(range(n)).check()  # without switches that lead nowhere


def _uuids(b: TopologyBuilder) -> list[str]:
    """The id of each rank's GPU; where ranks share one, ``/1`` follows that of the second, and so on."""
    found = [_text(f.uuid) for f in b.facts]
    for ranks in _gpus(b, range(len(b.facts))):
        for number, rank in enumerate(ranks[1:], 1):
            found[rank] += f"/{number}" if found[rank] else ""
    return found


def _indices(b: TopologyBuilder) -> list[int]:
    """NVML's number of each GPU, or, where ranks see only their own or no NVML, its place by PCI id on its node."""
    found = [0] * len(b.facts)
    for node in set(b.nodes):
        ranks = b.on(node)
        numbers = [known(b.facts[r].index) for r in ranks]
        if None in numbers or len(set(numbers)) < len(ranks):
            by_bus = sorted(ranks, key=lambda r: (str(known(b.facts[r].bus)), r))
            numbers = [by_bus.index(r) for r in ranks]
        for rank, number in zip(ranks, numbers, strict=True):
            found[rank] = number or 0
    return found


def _lane_rate(gen: int | Unknown, width: int | Unknown) -> tuple[int, Origin]:
    """MB/s of a PCIe link each way, from generation and width, or assumed."""
    if isinstance(gen, int) and isinstance(width, int) and gen in PCIE_X16:
        return PCIE_X16[gen] * width // 16, "probe"
    return PCIE_X16[ASSUMED_GEN], "table"


def _reason(*facts: int | Unknown) -> str:
    """Why a rate is not known, each reason once."""
    texts = (f.reason if isinstance(f, Unknown) else f"generation or width {f}" for f in facts)
    return ", ".join(dict.fromkeys(texts))


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _text(fact: str | Unknown) -> str:
    return fact if isinstance(fact, str) else ""
