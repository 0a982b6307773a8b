"""NCCL's topology XML: read what ``NCCL_TOPO_DUMP_FILE`` wrote, and write what ``NCCL_TOPO_FILE`` reads.

The format is not documented; this follows NCCL 2.28 (src/graph/xml.cc, topo.cc) and a dump of 8 H200. The format has no
rate of an NVLink: NCCL takes it from the GPU's compute capability (``sm``), and so does the reader here. NCCL detects
whatever a file leaves out (cores, ``sm`` of an unknown GPU) on the machine where it runs. But it detects only the
processor above a rank's own GPU, and another one without ``arch`` is an internal error: so we write all processors.
"""

import platform
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.text import brief, quoted
from ..util.xml_text import parsed
from .gpu import GpuFacts, NvLink, PcieBridge, Unknown, bus_id, unknown_gpu
from .gpu_topology import from_gpus
from .machines import PCIE_X16
from .model import Topology

MOST_GPUS, MOST_NVLINKS, MOST_WIDTH = 256, 512, 32  # of a node, of a GPU, of a slot
MOST_NUMBER = 10**9
MOST_BRIDGES = 64  # above one GPU; each switch has two
HIDDEN = "fffffff:ff:ff.0"  # what NCCL 2.28 calls a switch that a virtual machine hides
GPU_CLASS, BRIDGE_CLASS, NVSWITCH_CLASS = "0x030200", "0x060400", "0x068000"
SPEEDS = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe",
          6: "64.0 GT/s PCIe"}  # fmt: skip
VERSION_OF_SM = {"60": "1.0", "70": "2.0", "72": "2.2", "80": "3.0", "86": "3.1", "90": "4.0"} | {
    "100": "5.0", "103": "5.0"}  # fmt: skip
SM_OF_NAME = (("P100", 60), ("V100", 70), ("A100", 80), ("H100", 90), ("H200", 90), ("GB200", 100), ("B200", 100))


def read_xml(text: str | bytes, source: str = "NCCL topology") -> Topology:
    """Read a topology file of NCCL: the GPUs in the order of their ranks, or of the file.

    Raises:
        FormatError: naming the element and the attribute that is missing or wrong.
    """
    try:
        system = parsed(text)
    except ValueError as error:
        raise FormatError(f"{source}: not XML: {brief(str(error))}; correct that line") from error
    if system is None:
        raise FormatError(f"{source}: it declares a document type, as NCCL never does; take <!DOCTYPE ...> out")
    if system.tag != "system":
        raise FormatError(f"{source}: expected <system> outside, got <{brief(system.tag)}>; is it NCCL's topology?")
    found: list[tuple[int, GpuFacts]] = []
    for cpu in system.iter("cpu"):
        _walk(cpu, (), _int(cpu, "numaid", source), found, source)
    if not found:
        raise FormatError(f"{source}: no <gpu> in any <cpu>; dump it again with NCCL_TOPO_DUMP_FILE")
    try:
        made = from_gpus([facts for _, facts in sorted(found, key=lambda pair: pair[0])])
        return replace(made, source=f"{source}: NCCL's topology; {made.source}").check()
    except TopologyError as error:
        raise TopologyError(f"{source}: {brief(str(error))}") from error


def _walk(
    element: ET.Element, path: tuple[PcieBridge, ...], numa: int, found: list[tuple[int, GpuFacts]], source: str
) -> None:
    """Collect the GPUs below an element; a ``pci`` with further ``pci`` in it is a switch."""
    if len(path) > MOST_BRIDGES:
        raise FormatError(f"{source}: <{element.tag}{_where(element)}> is below more than {MOST_BRIDGES // 2} others; "
                          "dump it again with NCCL_TOPO_DUMP_FILE")  # fmt: skip
    for pci in element.findall("pci"):
        gen, width = _speed(pci, source)
        bus = _bus(pci, "busid", source)
        gpu = pci.find("gpu")
        if gpu is None:
            hop = PcieBridge(bus, gen, width)
            # Two bridges of a way make one switch (port up, port down), and the first of all is the root port.
            _walk(pci, (*path, *((hop,) if path else (hop, hop)), hop), numa, found, source)
            continue
        sm = gpu.get("sm", "")
        links: list[NvLink] = []
        for link in gpu.findall("nvlink"):
            target, what = _text(link, "target", source).lower(), _text(link, "tclass", source)
            remote = "gpu" if what.startswith("0x03") else "switch" if what == NVSWITCH_CLASS else "npu"
            hidden = remote == "switch" and set(target) <= set("f:.0")
            where = "" if hidden else _bus(link, "target", source)
            for _ in range(_int(link, "count", source, least=0, most=MOST_NVLINKS - len(links))):
                version = VERSION_OF_SM.get(sm) or Unknown(f"of a GPU with sm {brief(sm) or 'not in the file'}")
                links.append(NvLink(len(links), True, version, "hidden switch" if hidden else remote, where))  # type: ignore[arg-type]
        facts = unknown_gpu(
            "not in NCCL's file",
            bus=bus,
            index=_int(gpu, "dev", source) if gpu.get("dev") is not None else Unknown("no dev in NCCL's file"),
            name=f"GPU sm_{brief(sm)}" if sm else Unknown("no sm in NCCL's file"),
            pcie_gen=gen,
            pcie_width=width,
            path=path,
            numa=numa if numa >= 0 else Unknown("numaid -1"),
            nvlinks=tuple(links),
            peers=(),
        )
        found.append((_int(gpu, "rank", source) if gpu.get("rank") is not None else len(found), facts))
        if len(found) > MOST_GPUS:
            raise FormatError(f"{source}: more than {MOST_GPUS} <gpu>; a node has fewer, take out what is not there")


def _text(element: ET.Element, name: str, source: str) -> str:
    text = element.get(name)
    if text is None:
        raise FormatError(f"{source}: <{element.tag}{_where(element)}> has no {name}; add it")
    return text


def _int(element: ET.Element, name: str, source: str, *, least: int = -1, most: int = MOST_NUMBER) -> int:
    text = _text(element, name, source)
    if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
        what = f"{name}={quoted(text)}: expected a whole number of {least}..{most}"
        raise FormatError(f"{source}: <{element.tag}{_where(element)}> {what}; correct it")
    return int(text)


def _bus(element: ET.Element, name: str, source: str) -> str:
    try:
        return bus_id(_text(element, name, source))
    except FormatError as error:
        said = str(error).removeprefix(f"{source}: ")
        raise FormatError(f"{source}: <{element.tag}{_where(element)}> {name}: {said}; correct it") from error


def _where(element: ET.Element) -> str:
    return "".join(f' {brief(k, 30)}="{brief(v, 40)}"' for k, v in list(element.items())[:2])


def _speed(pci: ET.Element, source: str) -> tuple[int | Unknown, int | Unknown]:
    """Generation and width; virtual machines write a width of 0."""
    speed = pci.get("link_speed", "")
    rates = {float(text.split()[0]): gen for gen, text in SPEEDS.items()}
    number = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})?", speed)
    gen = rates.get(float(number[0])) if number else None
    width = _int(pci, "link_width", source, most=MOST_WIDTH) if pci.get("link_width") is not None else 0
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
