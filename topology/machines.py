"""The catalogue of known machines as tables, each with the source of its numbers (Blink section 2, figure 1).

``machine("dgx-1v")`` is one box, ``machine("dgx-a100:4")`` four of them on a network.
Devices are numbered box after box, so ``Device.index`` says which GPU of its box it is.
Rates are per direction in MB/s, as the makers state them; nothing here was measured.

Simplified on purpose: several NVSwitch chips of one box are one switch vertex, since every GPU has the same number of
links to each chip. From H100 on that vertex is ``sharp``; networks are not unless one says so (``--sharp``). PCIe is
listed where it is the second path (DGX-1) or the only one (``pcie-8``). Network links exist in machines of two or more
boxes; the network itself is one switch without a limit of its own (full bisection).
"""

import difflib
import re
from typing import NamedTuple

from ..errors import TopologyError
from ..util.text import quoted
from .model import Connection, Device, Link, LinkKind, Switch, SwitchKind, Topology
from .rates import NVLINK_MBPS, NVLINK_SHARP, PCIE_X16, XGMI_MBPS

MAX_COUNT = 1024
NET_MBPS = 1000  # assumed between live nodes that are not measured: 10 Gb/s Ethernet, less its overhead
CPU_MBPS = 8000  # one core's copy rate between private memory and a shared slot; ordinary DDR4 and DDR5 servers

PCIE3_X16, PCIE4_X16, PCIE5_X16 = PCIE_X16[3], PCIE_X16[4], PCIE_X16[5]

# Xeon E5-2698 v4: two QPI links of 9.6 GT/s, 2 bytes wide; assumed where sockets were probed, too.
QPI_LANES, QPI_MBPS = 2, 19_200

# NVLinks between GPU pairs of a DGX-1 as "pair:links": the hybrid cube mesh.
DGX1_PAIRS = "0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 5-7:1 6-7:2"

# xGMI links between the 16 dies (GCDs) of eight MI250 packages as "pair:links".
MI250_PAIRS = (
    "0-1:4 0-4:2 0-8:1 1-5:1 1-9:1 1-10:1 2-3:4 2-6:1 2-9:1 2-10:1 3-7:2 3-11:1 4-5:4 4-6:1 "
    "5-6:1 5-7:1 6-7:4 8-9:4 8-12:2 9-13:1 10-11:4 10-14:1 11-15:2 12-13:4 12-14:1 13-14:1 13-15:1 14-15:4"
)


class Server(NamedTuple):
    """One box of a machine: what is in it, and its connections; their ends are ``("gpu", i)``, ``(switch, i)``, NET."""

    gpu: str
    gpus: int
    switches: tuple[tuple[str, SwitchKind, int], ...]  # name, kind, how many
    connections: tuple[Connection, ...]
    nics: tuple[Connection, ...]  # added from two boxes on; the switches of nic_switches too
    source: str
    nic_switches: tuple[tuple[str, SwitchKind, int], ...] = ()
    sharp: bool = False  # whether its NVSwitches reduce and multicast


NET = ("net", 0)


def _pairs(text: str, kind: LinkKind, lane_mbps: int, *, lanes: int | None = None) -> tuple[Connection, ...]:
    """The connections of a "pair:links" table, all with ``lanes`` links if that is given."""
    found = re.findall(r"(\d+)-(\d+):(\d+)", text)
    return tuple(Connection(("gpu", int(a)), ("gpu", int(b)), kind, lanes or int(k), lane_mbps) for a, b, k in found)


def _all_pairs(gpus: int) -> str:
    """One link between every two GPUs, as a table."""
    return " ".join(f"{a}-{b}:1" for b in range(gpus) for a in range(b))


def _star(
    count: int, hub: str, kind: LinkKind, lanes: int, lane_mbps: int, *, per_hub: int = 0, of: str = "gpu"
) -> tuple[Connection, ...]:
    """All GPUs, or switches of a name, wired to a hub, ``per_hub`` neighbours to the same one (0: all to one)."""
    hubs = [i // per_hub if per_hub else 0 for i in range(count)]
    return tuple(Connection((of, i), (hub, h), kind, lanes, lane_mbps) for i, h in enumerate(hubs))


def _ports(count: int, mbps: int, *, of: str = "gpu") -> tuple[Connection, ...]:
    """A network card on every GPU, or on every switch of a name."""
    return _star(count, NET[0], "net", 1, mbps, of=of)


def _dgx1(gpu: str, nvlinks: tuple[Connection, ...], nvlink_source: str) -> Server:
    """Eight GPUs in the cube mesh, and their PCIe tree: 2 GPUs a PLX switch, 2 PLX a socket, sockets on QPI."""
    plx = _star(8, "PLX", "pcie", 1, PCIE3_X16, per_hub=2)
    uplinks = _star(4, "socket", "pcie", 1, PCIE3_X16, per_hub=2, of="PLX")
    qpi = Connection(("socket", 0), ("socket", 1), "host", QPI_LANES, QPI_MBPS)
    nics = _ports(4, 12_500, of="PLX")  # single-port EDR InfiniBand cards of 100 Gb/s, one on each PLX switch
    source = (
        f"NVIDIA DGX-1 System Architecture, white paper WP-08437-001: {nvlink_source}; PCIe 3.0 x16, "
        "4 PLX switches, 2 x QPI 9.6 GT/s, 4 x 100 Gb/s InfiniBand"
    )
    switches: tuple[tuple[str, SwitchKind, int], ...] = (("PLX", "pcie", 4), ("socket", "host", 2))
    return Server(gpu, 8, switches, (*nvlinks, *plx, *uplinks, qpi), nics, source)


def _nvswitch_box(gpu: str, gpus: int, lanes: int, nic_mbps: int, source: str, *, version: str = "4.0") -> Server:
    """GPUs on NVSwitch with ``lanes`` links of a version each, and one network card per GPU."""
    wired = _star(gpus, "NVSwitch", "nvlink", lanes, NVLINK_MBPS[version])
    switches: tuple[tuple[str, SwitchKind, int], ...] = (("NVSwitch", "nvswitch", 1),)
    return Server(gpu, gpus, switches, wired, _ports(gpus, nic_mbps), source, sharp=version in NVLINK_SHARP)


def _pcie8() -> Server:
    plx = _star(8, "PLX", "pcie", 1, PCIE4_X16, per_hub=4)
    uplinks = _star(2, "socket", "pcie", 1, PCIE4_X16, per_hub=1, of="PLX")
    upi = Connection(("socket", 0), ("socket", 1), "host", 3, 22_400)
    source = (
        "a usual dual-root server, not one maker's: PCI Express Base Specification 4.0, x16 at 31.5 GB/s, "
        "2 switches of 4 GPUs, 2 sockets on 3 x UPI 11.2 GT/s (Intel Xeon, third generation), "
        "one 200 Gb/s card on each switch"
    )
    switches: tuple[tuple[str, SwitchKind, int], ...] = (("PLX", "pcie", 2), ("socket", "host", 2))
    return Server("PCIe GPU", 8, switches, (*plx, *uplinks, upi), _ports(2, 25_000, of="PLX"), source)


def _bridged(gpu: str, gpus: int, version: str, lanes: int, pcie: int, nics: int, nic_mbps: int, source: str) -> Server:
    """PCIe GPUs of one socket, every two of them joined by a bridge of ``lanes`` NVLinks; ``nics`` on the socket."""
    bridges = _pairs(_all_pairs(gpus), "nvlink", NVLINK_MBPS[version], lanes=lanes)
    wired = (*bridges, *_star(gpus, "socket", "pcie", 1, pcie))
    return Server(gpu, gpus, (("socket", "host", 1),), wired, (Connection(("socket", 0), NET, "net", nics, nic_mbps),),
                  source)  # fmt: skip


_HGX = _nvswitch_box(
    "H100-SXM5-80GB", 8, 18, 50_000, "NVIDIA DGX H100/H200 User Guide: 18 NVLinks (fourth generation) of 25 GB/s from "
    "each GPU to NVSwitch, 8 x 400 Gb/s InfiniBand for computing",
)  # fmt: skip
SERVERS: dict[str, Server] = {
    "dgx-1p": _dgx1("P100-SXM2-16GB", _pairs(DGX1_PAIRS, "nvlink", NVLINK_MBPS["1.0"], lanes=1),
                    "NVLink 1.0, 20 GB/s a link each way"),
    "dgx-1v": _dgx1("V100-SXM2-16GB", _pairs(DGX1_PAIRS, "nvlink", NVLINK_MBPS["2.0"]),
                    "NVLink 2.0, 25 GB/s a link each way"),
    "dgx-2": _nvswitch_box(
        "V100-SXM3-32GB", 16, 6, 12_500, "NVIDIA DGX-2 System User Guide: 6 NVLinks of 25 GB/s from each GPU to "
        "NVSwitch, 8 x 100 Gb/s InfiniBand, one on each PCIe switch of two GPUs (PCIe 3.0 x16)", version="2.0",
    )._replace(  # eight cards for sixteen GPUs: the pair's PCIe switch is what they share
        nic_switches=(("PLX", "pcie", 8),),
        nics=(*_star(16, "PLX", "pcie", 1, PCIE3_X16, per_hub=2), *_ports(8, 12_500, of="PLX")),
    ),
    "dgx-a100": _nvswitch_box(
        "A100-SXM4-40GB", 8, 12, 25_000, "NVIDIA DGX A100 User Guide: 12 NVLinks (third generation) of 25 GB/s from "
        "each GPU to NVSwitch, 8 x 200 Gb/s InfiniBand for computing", version="3.0",
    ),
    "hgx-h100": _HGX,
    "hgx-h200": _HGX._replace(gpu="H200-SXM5-141GB"),
    "pcie-8": _pcie8(),
    "mi250": Server(
        "MI250 GCD", 16, (), _pairs(MI250_PAIRS, "xgmi", XGMI_MBPS["gfx90a"]), _ports(16, 16_000),
        "ForestColl (Zhao et al. 2024), public topologies: 7 xGMI links of 50 GB/s a die, 16 GB/s of network a die; "
        "the same graph, under other numbers, as RCCL's topology model topo_16p1h",
    ),
    "mi300x": Server(
        "MI300X", 8, (), _pairs(_all_pairs(8), "xgmi", XGMI_MBPS["gfx942"]), _ports(8, 50_000),
        "AMD Instinct MI300X Platform data sheet: 7 xGMI links of 128 GB/s both ways from each GPU, one to every other "
        "GPU; 8 x 400 Gb/s for computing as in AMD's cluster reference guide",
    ),
    "b200": _nvswitch_box(
        "B200-SXM-180GB", 8, 18, 50_000, "NVIDIA DGX B200 data sheet and User Guide: 18 NVLinks (fifth generation) of "
        "50 GB/s from each GPU to NVSwitch, 8 x 400 Gb/s InfiniBand for computing", version="5.0",
    ),
    "gb200-nvl72": _nvswitch_box(
        "GB200", 72, 18, 50_000, "NVIDIA GB200 NVL72 data sheet: 72 GPUs of 18 trays in one NVLink domain, 130 TB/s "
        "both ways in all, which is 18 NVLinks of 50 GB/s a GPU; DGX GB200 User Guide: a 400 Gb/s card a GPU; the "
        "domain is taken as one box", version="5.0",
    ),
    "h200-nvl": _bridged(
        "H200-NVL-141GB", 4, "4.0", 6, PCIE5_X16, 2, 50_000, "NVIDIA H200 NVL data sheet: a 4-way bridge of 900 GB/s "
        "both ways a GPU, which is 6 NVLinks of 25 GB/s to each other GPU, PCIe 5.0 x16; a 400 Gb/s card for two GPUs "
        "as in NVIDIA's reference architecture 2-8-5-200; half such a server, on one socket",
    ),
    "a6000-pair": _bridged(
        "RTX-A6000-48GB", 2, "3.1", 4, PCIE4_X16, 1, 1_250, "NVIDIA RTX A6000 data sheet: a bridge of 112.5 GB/s both "
        "ways, which is 4 NVLinks of 14.06 GB/s, PCIe 4.0 x16; 10 Gb/s Ethernet assumed",
    ),
    "rtx-3090-pair": _bridged(
        "RTX-3090-24GB", 2, "3.1", 4, PCIE4_X16, 1, 1_250, "NVIDIA Ampere GA102 white paper: 4 NVLinks of 14.0625 GB/s "
        "each way between two RTX 3090, PCIe 4.0 x16; 10 Gb/s Ethernet assumed",
    ),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The machines of the catalogue, in order of age and kind."""
    return (*SERVERS, "cpu")


def machine(spec: str) -> Topology:
    """Build a machine of the catalogue from ``NAME`` or ``NAME:K``.

    ``K`` is a count of boxes, but for ``cpu``: ``cpu:K`` is K ranks on one node, which share its memory.

    >>> machine("dgx-a100:2").n, machine("cpu:4").n
    (16, 4)

    Raises:
        TopologyError: for an unknown name, with the nearest one, or a bad count.
    """
    name, colon, count = spec.partition(":")
    if name not in names():
        near = difflib.get_close_matches(name[:80].lower(), names(), n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise TopologyError(f"unknown machine {quoted(name)}; {hint}choose one of {', '.join(names())}")
    if colon and not (re.fullmatch(r"[0-9]{1,4}", count) and 1 <= int(count) <= MAX_COUNT):
        raise TopologyError(f"{quoted(spec)}: expected a count of 1..{MAX_COUNT} after the colon; write {name}:4, say")
    k = int(count) if colon else 1
    if name == "cpu":
        return cpu_node(k)
    return _several(name, SERVERS[name], k)


def cpu_node(ranks: int) -> Topology:
    """``ranks`` CPU processes of one node around the memory that they share, at the table's rate."""
    links = [Link(*ends, "memory", 1, CPU_MBPS) for r in range(ranks) for ends in ((r, ranks), (ranks, r))]
    return Topology(
        name=f"cpu:{ranks}" if ranks > 1 else "cpu",
        devices=tuple(Device("cpu", 0, i) for i in range(ranks)),
        switches=(Switch("memory", 0, "memory"),),
        links=tuple(links),
        source=f"assumed: one core copies {CPU_MBPS / 1000:g} GB/s; a live job measures it",
    ).check()


def _several(name: str, box: Server, boxes: int) -> Topology:
    """Lay out ``boxes`` copies of a box, joined by one network switch if there are several."""
    names_of = box.switches + (box.nic_switches if boxes > 1 else ())
    connections = box.connections + (box.nics if boxes > 1 else ())
    devices = tuple(Device("gpu", b, i, name=box.gpu) for b in range(boxes) for i in range(box.gpus))
    switches: list[Switch] = []
    vertex: dict[tuple[int, str, object], int] = {}
    for b in range(boxes):
        for i in range(box.gpus):
            vertex[b, "gpu", i] = b * box.gpus + i
        for label, kind, count in names_of:
            for i in range(count):
                vertex[b, label, i] = len(devices) + len(switches)
                text = label if count == 1 else f"{label} {i}"
                sharp = box.sharp and kind == "nvswitch"
                switches.append(Switch(kind, b, f"{text}@{b}" if boxes > 1 else text, sharp))
    if boxes > 1:
        for b in range(boxes):
            vertex[b, *NET] = len(devices) + len(switches)
        switches.append(Switch("net", -1, "network"))
    links = []
    for b in range(boxes):
        for c in connections:
            ends = vertex[b, *c.a], vertex[b, *c.b]
            for src, dst in (ends, ends[::-1]):
                links.append(Link(src, dst, c.kind, c.lanes, c.lane_mbps))
    return Topology(
        name=f"{name}:{boxes}" if boxes > 1 else name,
        devices=devices,
        switches=tuple(switches),
        links=tuple(links),
        source=box.source,
    ).check()
