"""NCCL's and RCCL's topology XML: read what ``NCCL_TOPO_DUMP_FILE`` wrote, and write what ``NCCL_TOPO_FILE`` reads.

The format is not documented; this follows NCCL 2.28 (src/graph/xml.cc, topo.cc), dumps of 8 H200 and of GB300, and
RCCL's models. The format has no rate of an NVLink or an xGMI link: NCCL takes it from the GPU's compute capability
(``sm``), RCCL from its architecture (``gcn``), and so does the reader here. NCCL detects whatever a file leaves out
(cores, ``sm`` of an unknown GPU) on the machine where it runs. But it detects only the processor above a rank's own
GPU, and another one without ``arch`` is an internal error: so we write all processors.

What the reader does not understand it names, with its line, in ``Topology.remarks``.
"""

import platform
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.text import brief, quoted
from ..util.xml_elements import Budget, Element, read_elements
from .gpu import GpuFacts, Nic, NvLink, PcieBridge, Unknown, XgmiLinks, bus_id, unknown_gpu
from .gpu_topology import NO_RATES, from_gpus
from .model import Topology
from .rates import NVLINK_OF_CAPABILITY, PCIE_X16, WITHOUT_NVLINK

BUDGET = Budget(4 << 20, 1 << 15, "a machine of 256 GPUs")  # with 64 links and bridges each half of it; NCCL reads 256
MOST_GPUS, MOST_NVLINKS, MOST_WIDTH = 256, 512, 32  # of a node, of a GPU, of a slot
MOST_NUMBER = 10**9
MOST_BRIDGES = 64  # above one GPU; each switch has two
MOST_LINES = 5  # that a remark names
SLOW_CARD = 10  # a card so many times slower than the fastest one is for the machine's own traffic
HIDDEN = "fffffff:ff:ff.0"  # what NCCL 2.28 calls a switch that a virtual machine hides
GPU_CLASS, BRIDGE_CLASS, NVSWITCH_CLASS = "0x030200", "0x060400", "0x068000"
SPEEDS = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe",
          6: "64.0 GT/s PCIe"}  # fmt: skip
GCN = {"910": "gfx90a", "gfx910": "gfx90a", "gfx940": "gfx942", "gfx941": "gfx942"}  # older words of RCCL
SM_OF_NAME = (("P100", 60), ("V100", 70), ("RTX 8000", 75), ("A100", 80), ("A6000", 86), ("A40", 86), ("3090", 86),
              ("H100", 90), ("H200", 90), ("GB300", 103), ("B300", 103), ("GB200", 100), ("B200", 100))  # fmt: skip


def read_xml(text: str | bytes, source: str = "NCCL topology", *, rates: Mapping[str, int] = NO_RATES) -> Topology:
    """Read a topology file of NCCL or RCCL: the GPUs in the order of their ranks, or of the file.

    A file with several ``host_hash`` is of so many nodes, whose NVSwitches are one NVLink domain: NCCL writes one file
    for nodes in no other case.

    Args:
        rates: MB/s of one link of a kind, where the user says it.

    Raises:
        FormatError: naming the element and the attribute that is missing or wrong.
    """
    system = read_elements(text, source, BUDGET)
    if system.tag != "system":
        raise FormatError(f"{source}: expected <system> outside, got <{brief(system.tag)}>; is it NCCL's topology?")
    reader = _Reader(source)
    for child in system.children:
        if child.tag == "cpu":
            host = child.attributes.get("host_hash", "")
            reader.below(child, _Place(host, _int(child, "numaid", source), ()))
        else:
            reader.unread(child, system)
    if not reader.gpus:
        raise FormatError(f"{source}: no <gpu> in any <cpu>; dump it again with NCCL_TOPO_DUMP_FILE")
    found = [gpu for _, gpu in sorted(enumerate(reader.gpus), key=lambda pair: (pair[1].rank, pair[0]))]
    reader.check(found)
    hosts = list(dict.fromkeys(gpu.place.host for gpu in found))
    several = len(hosts) > 1
    try:
        made = from_gpus(
            reader.with_cards(found),
            nodes=[hosts.index(gpu.place.host) for gpu in found],
            hosts=[brief(gpu.place.host, 40) if several else "" for gpu in found],
            rates=rates,
            one_domain=several,
        )
    except TopologyError as error:
        raise TopologyError(f"{source}: {brief(str(error))}") from error
    made = replace(made, source=f"{source}: NCCL's topology; {made.source}", remarks=tuple(reader.remarks()))
    return made.check()


class _Place(NamedTuple):
    """Where an element is: the host, the NUMA node of its processor, the bridges above it."""

    host: str
    numa: int
    path: tuple[PcieBridge, ...]

    @property
    def buses(self) -> tuple[str, ...]:
        """The PCI ids of the bridges above."""
        return tuple(dict.fromkeys(hop.bus for hop in self.path))


class _Gpu(NamedTuple):
    rank: int
    place: _Place
    element: Element
    bus: str
    facts: GpuFacts


class _Card(NamedTuple):
    place: _Place
    name: str
    mbps: int
    element: Element


class _Reader:
    """Collects GPUs and network cards, and what is not read."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.gpus: list[_Gpu] = []
        self.cards: list[_Card] = []
        self._remarks: dict[str, list[int]] = {}

    def remark(self, text: str, element: Element) -> None:
        """Say something about an element; the same about several is one remark."""
        self._remarks.setdefault(text, []).append(element.line)

    def unread(self, element: Element, parent: Element) -> None:
        """Say that an element is left out."""
        self.remark(f"<{brief(element.tag, 30)}> in <{brief(parent.tag, 30)}> is not understood and left out", element)

    def remarks(self) -> list[str]:
        """All remarks with their lines."""
        found = []
        for text, lines in self._remarks.items():
            more = f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
            which = ", ".join(map(str, lines[:MOST_LINES])) + more
            found.append(f"{self.source}: line{'s' if len(lines) > 1 else ''} {which}: {text}")
        return found

    def below(self, element: Element, place: _Place) -> None:
        """Collect what is below a processor or a bridge; a ``pci`` with further ``pci`` in it is a switch."""
        if len(place.path) > MOST_BRIDGES:
            raise FormatError(f"{self.source}: {element} is below more than {MOST_BRIDGES // 2} others; dump it again "
                              "with NCCL_TOPO_DUMP_FILE")  # fmt: skip
        for child in element.children:
            if child.tag == "pci":
                self._pci(child, place)
            elif child.tag == "nic":
                self._nic(child, place)
            elif not (child.tag == "gpu" and element.tag == "pci"):
                self.unread(child, element)

    def _pci(self, pci: Element, place: _Place) -> None:
        gen, width = _speed(pci, self.source)
        bus = _bus(pci, "busid", self.source)
        for gpu in pci.all("gpu"):
            self._gpu(gpu, place, {"bus": bus, "pcie_gen": gen, "pcie_width": width})
        if not pci.children:
            self.remark(f"<pci> without a GPU or a network card (class {brief(pci.attributes.get('class', '?'), 20)}) "
                        "is left out", pci)  # fmt: skip
        if pci.has("pci"):
            hop = PcieBridge(bus, gen, width)
            # Two bridges of a way make one switch (port up, port down), and the first of all is the root port.
            path = (*place.path, *((hop,) if place.path else (hop, hop)), hop)
            place = place._replace(path=path)
        self.below(pci, place)

    def _nic(self, nic: Element, place: _Place) -> None:
        """The network cards of an element; ``speed`` is in Mb/s."""
        for net in nic.children:
            if net.tag != "net":
                self.unread(net, nic)
                continue
            name = net.attributes.get("name") or f"net {net.attributes.get('dev', '')}".strip()
            speed = _int(net, "speed", self.source, most=MOST_NUMBER) if "speed" in net.attributes else 0
            if speed < 8:
                self.remark("<net> without a speed is left out", net)
            else:
                self.cards.append(_Card(place, brief(name, 40), speed // 8, net))

    def _gpu(self, gpu: Element, place: _Place, slot: dict[str, Any]) -> None:
        bus = slot["bus"]
        sm, gcn = gpu.attributes.get("sm", ""), gpu.attributes.get("gcn", "")
        architecture = GCN.get(gcn, gcn if gcn.startswith("gfx") else f"gfx{gcn}")
        nvlinks: list[NvLink] = []
        xgmi: list[XgmiLinks] = []
        c2c: tuple[int, int] | Unknown = Unknown("no <c2c> in NCCL's file")
        for link in gpu.children:
            if link.tag == "nvlink":
                nvlinks += self._nvlinks(link, bus, sm, len(nvlinks))
            elif link.tag == "xgmi":
                count = _int(link, "count", self.source, least=0, most=MOST_NVLINKS)
                xgmi.append(XgmiLinks(self._target(link, bus), count, brief(architecture, 20)))
            elif link.tag == "c2c":
                count = _int(link, "count", self.source, least=1, most=MOST_NVLINKS)
                c2c = count, _int(link, "bw", self.source, least=1)
            else:
                self.unread(link, gpu)
        dev = _int(gpu, "dev", self.source) if "dev" in gpu.attributes else Unknown("no dev in NCCL's file")
        name = (
            f"GPU {brief(architecture, 20)}" if gcn else f"GPU sm_{brief(sm)}" if sm else Unknown("no sm in the file")
        )
        facts = unknown_gpu(
            "not in NCCL's file", **slot, index=dev, name=name, path=place.path,
            numa=place.numa if place.numa >= 0 else Unknown("numaid -1"),
            nvlinks=tuple(nvlinks), peers=(), xgmi=tuple(xgmi), c2c=c2c,
        )  # fmt: skip
        rank = _int(gpu, "rank", self.source) if "rank" in gpu.attributes else len(self.gpus)
        self.gpus.append(_Gpu(rank, place, gpu, bus, facts))
        if len(self.gpus) > MOST_GPUS:
            raise FormatError(f"{self.source}: more than {MOST_GPUS} <gpu>; an NVLink domain has fewer, take out what "
                              "is not there")  # fmt: skip

    def _nvlinks(self, link: Element, bus: str, sm: str, first: int) -> list[NvLink]:
        target, what = _text(link, "target", self.source).lower(), _text(link, "tclass", self.source)
        remote = "gpu" if what.startswith("0x03") else "switch" if what == NVSWITCH_CLASS else "npu"
        hidden = remote == "switch" and set(target) <= set("f:.0")
        where = "" if hidden else self._target(link, bus)
        count = _int(link, "count", self.source, least=0, most=MOST_NVLINKS - first)
        if remote == "npu":
            self.remark(f"<nvlink> to what is neither a GPU nor a switch (tclass {brief(what, 20)}) is left out", link)
            return []
        number = int(sm) if re.fullmatch(r"[0-9]{1,4}", sm) else 0
        without = " (data sheets say that it has none)" if number in WITHOUT_NVLINK else ""
        said = f"of a GPU with sm {brief(sm) or 'not in the file'}{without}"
        version = NVLINK_OF_CAPABILITY.get(number) or Unknown(said)
        kind: Any = "hidden switch" if hidden else remote
        return [NvLink(first + i, True, version, kind, where) for i in range(count)]

    def _target(self, link: Element, bus: str) -> str:
        """The PCI id of the other end of a link of the GPU at ``bus``."""
        target = _bus(link, "target", self.source)
        if target == bus:
            raise FormatError(
                f"{self.source}: line {link.line}: {link} leads from the GPU to itself, as virtual machines write that "
                "hide the other end; write the PCI id of the GPU that it leads to, or take the line out to go by PCIe"
            )
        return target

    def check(self, found: list[_Gpu]) -> None:
        """Refuse a GPU that is there twice, and say which links lead to GPUs that are not there.

        Raises:
            FormatError: naming the two lines.
        """
        there: dict[tuple[str, str], _Gpu] = {}
        for gpu in found:
            first = there.setdefault((gpu.place.host, gpu.bus), gpu)
            if first is not gpu:
                raise FormatError(f"{self.source}: lines {first.element.line} and {gpu.element.line}: two <gpu> at "
                                  f"{gpu.bus}; correct the busid of one")  # fmt: skip
        for gpu in found:
            for link in (*gpu.element.all("nvlink"), *gpu.element.all("xgmi")):
                to_gpu = link.tag == "xgmi" or link.attributes.get("tclass", "").startswith("0x03")
                if to_gpu and (gpu.place.host, bus_id(link.attributes["target"])) not in there:
                    self.remark(f"<{link.tag}> to a GPU that is not in the file is left out", link)

    def with_cards(self, found: list[_Gpu]) -> list[GpuFacts]:
        """The facts of the GPUs, each with the network cards that are nearer to it than to those before it."""
        nics: list[list[Nic]] = [[] for _ in found]
        fastest = {host: max(c.mbps for c in self.cards if c.place.host == host) for host in
                   {c.place.host for c in self.cards}}  # fmt: skip
        names: Counter[tuple[str, str]] = Counter()
        for card in self.cards:
            host = card.place.host
            if card.mbps * SLOW_CARD < fastest[host]:
                self.remark(
                    f"<net> of {card.mbps * 8} Mb/s, beside one of {fastest[host] * 8}, is left out", card.element
                )
                continue

            def near(i: int, card: _Card = card) -> tuple[bool, int, int]:
                place = found[i].place
                shared = len(set(place.buses) & set(card.place.buses))
                return place.numa == card.place.numa, shared, -i

            mine = [i for i, gpu in enumerate(found) if gpu.place.host == host]
            if not mine:
                self.remark("<net> of a host without a GPU is left out", card.element)
                continue
            best = max(mine, key=near)
            same_cpu, shared, _ = near(best)
            if not same_cpu:
                self.remark(f"<net> on a processor without a GPU is taken to be on that of rank {best}", card.element)
            names[host, card.name] += 1
            name = card.name + (f" ({names[host, card.name]})" if names[host, card.name] > 1 else "")
            distance: Any = "PIX" if shared and same_cpu else "NODE" if same_cpu else "SYS"
            nics[best].append(Nic(name, distance, card.place.buses if same_cpu else (), card.mbps))
        return [replace(gpu.facts, nics=tuple(cards)) for gpu, cards in zip(found, nics, strict=True)]


def _text(element: Element, name: str, source: str) -> str:
    text = element.attributes.get(name)
    if text is None:
        raise FormatError(f"{source}: line {element.line}: {element} has no {name}; add it")
    return text


def _int(element: Element, name: str, source: str, *, least: int = -1, most: int = MOST_NUMBER) -> int:
    text = _text(element, name, source)
    if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
        what = f"{name}={quoted(text)}: expected a whole number of {least}..{most}"
        raise FormatError(f"{source}: line {element.line}: {element} {what}; correct it")
    return int(text)


def _bus(element: Element, name: str, source: str) -> str:
    try:
        return bus_id(_text(element, name, source))
    except FormatError as error:
        said = str(error).removeprefix(f"{source}: ").removeprefix(f"line {element.line}: ")
        raise FormatError(f"{source}: line {element.line}: {element} {name}: {said}; correct it") from error


def _speed(pci: Element, source: str) -> tuple[int | Unknown, int | Unknown]:
    """Generation and width; virtual machines write a width of 0."""
    speed = pci.attributes.get("link_speed", "")
    rates = {float(text.split()[0]): gen for gen, text in SPEEDS.items()}
    number = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})?", speed)
    gen = rates.get(float(number[0])) if number else None
    width = _int(pci, "link_width", source, most=MOST_WIDTH) if "link_width" in pci.attributes else 0
    return gen or Unknown(f"link_speed {quoted(speed)}"), width if width > 0 else Unknown(f"link_width {width}")


def processor(cpuinfo: str = "", arch: str = "") -> dict[str, str]:
    """A processor as NCCL names it: this machine's, or that of a text such as /proc/cpuinfo's.

    NCCL keeps CPUID's own fields: it adds the extended family shifted by four, Linux adds it as it is.
    """
    arch = {"aarch64": "arm64"}.get(arch or platform.machine(), arch or platform.machine())
    if arch != "x86_64":
        return {"arch": arch}
    text = cpuinfo or Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text.partition("\n\n")[0], re.MULTILINE))
    family = int(found.get("cpu family", 0))
    return {
        "arch": arch,
        "vendor": found.get("vendor_id", ""),
        "familyid": str(family if family < 15 else 15 + (family - 15 << 4)),
        "modelid": found.get("model", "0"),
    }


def write_xml(topology: Topology, cpu: Mapping[str, str] = MappingProxyType({})) -> str:
    """One node as a file for ``NCCL_TOPO_FILE``; NCCL finds its GPUs in it by PCI id.

    Args:
        cpu: what every socket has, as :func:`processor` gives it.

    Raises:
        TopologyError: for several nodes, a GPU without a PCI id, or what NCCL has no word for.
    """
    t = topology
    if len(t.nodes) > 1 or any(d.kind != "gpu" for d in t.devices):
        raise TopologyError(f"{t.name}: NCCL's file describes the GPUs of one node; take some with --gpus")
    if lost := [d.label for d in t.devices if not d.bus]:
        raise TopologyError(
            f"{t.name}: {', '.join(lost)} without a PCI id, by which NCCL finds its GPUs; take those of a real "
            "machine: --on FILE, with a file that `blinkmpi topo -o FILE` wrote there"
        )
    if "xgmi" in t.kinds():
        raise TopologyError(f"{t.name}: NCCL knows no xGMI; that is RCCL's")
    parent = _parents(t)
    hosts = [v for v in range(t.n, t.n + len(t.switches)) if t.switches[v - t.n].kind == "host"]
    system = ET.Element("system", version="1")
    elements: dict[int, ET.Element] = {}
    for number, host in enumerate(hosts or [-1]):
        named = re.search(r"\d+$", t.vertex_label(host)) if host >= 0 else None
        numa = str(int(named[0])) if named else "-1" if host >= 0 and len(hosts) == 1 else str(number)
        elements[host] = ET.SubElement(system, "cpu", {"numaid": numa, **cpu})
    bridge = 0
    for v in _downwards(t, parent, hosts):
        above, mbps = parent.get(v, ((hosts or [-1])[0], 0))
        switch = v >= t.n
        bus = f"ffff:{bridge:02x}:00.0" if switch else t.devices[v].bus
        bridge += switch
        facts = {"busid": bus, "class": BRIDGE_CLASS if switch else GPU_CLASS, **_link(mbps)}
        elements[v] = ET.SubElement(elements[above], "pci", facts)
    for rank, device in enumerate(t.devices):
        sm = next((sm for name, sm in SM_OF_NAME if name in device.name), None)
        gpu = ET.SubElement(elements[rank], "gpu", {"dev": str(device.index), **({"sm": str(sm)} if sm else {}),
                                                    "rank": str(rank)})  # fmt: skip
        for k in t.links:
            if k.src == rank and k.kind == "nvlink":
                switch = k.dst >= t.n
                target = HIDDEN if switch else t.devices[k.dst].bus
                what = NVSWITCH_CLASS if switch else GPU_CLASS
                ET.SubElement(gpu, "nvlink", {"target": target, "count": str(k.lanes), "tclass": what})
    ET.indent(system, "  ")
    return ET.tostring(system, encoding="unicode") + "\n"


def _parents(t: Topology) -> dict[int, tuple[int, int]]:
    """The PCIe switch or socket above every GPU and PCIe switch, with the MB/s of the link up."""
    near: dict[int, list[tuple[int, int]]] = {}
    for k in t.links:
        if k.kind == "pcie":
            near.setdefault(k.src, []).append((k.dst, k.mbps))
    tops = [v for v in near if v >= t.n and t.switches[v - t.n].kind == "host"]
    tops = tops or [v for v in near if v >= t.n][:1]
    parent: dict[int, tuple[int, int]] = {}
    queue = sorted(tops)
    for v in queue:
        for w, mbps in sorted(near.get(v, ())):
            if w not in parent and w not in tops:
                parent[w] = (v, mbps)
                if w >= t.n:
                    queue.append(w)
    if tops and t.switches[tops[0] - t.n].kind == "pcie":
        parent[tops[0]] = (-1, max(mbps for _, mbps in near[tops[0]]))
    return parent


def _downwards(t: Topology, parent: Mapping[int, tuple[int, int]], hosts: list[int]) -> list[int]:
    """PCIe switches and GPUs, each after what is above it, GPUs in rank order at each place."""

    def depth(v: int) -> int:
        above = parent.get(v, (-1, 0))[0]
        return 0 if above in hosts or above < 0 else 1 + depth(above)

    switches = [v for v in parent if v >= t.n]
    return sorted(switches, key=lambda v: (depth(v), v)) + list(range(t.n))


def _link(mbps: int) -> dict[str, str]:
    """Generation and width nearest to a rate; nothing for an unknown rate, so that NCCL probes it itself."""
    if not mbps:
        return {}
    widths = product(PCIE_X16.items(), (16, 8, 4, 2, 1))
    _, width, gen = min((abs(rate * width // 16 - mbps), -width, gen) for (gen, rate), width in widths)
    return {"link_speed": SPEEDS[gen], "link_width": str(-width)}
