"""Read what a user names: a machine of the catalogue, a file, this machine, and changes to it.

The texts are those of the command line: ``TOPOLOGY``, ``--gpus``, ``--drop-link``, ``--scale``, ``--rate``,
``--sharp``.
"""

import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.files import read_file
from ..util.text import DIGITS, brief, quoted
from .gpu_topology import NO_RATES
from .live import this_machine
from .machines import MAX_COUNT, machine, names
from .model import MOST_JSON_BYTES, MOST_MBPS, LinkKind, Topology
from .nccl import read_xml
from .nvidia_smi import looks_like_smi, read_smi
from .rocm_smi import looks_like_rocm, read_rocm

ENDINGS = (".json", ".xml", ".txt")
MOST_CHOSEN = 1 << 16  # devices in one list; more is a typing error
NO_SWITCH = "--switch is for the text of `nvidia-smi topo -m`; leave it out"
_BEGINNING = 4096  # bytes of a file that show what it is


_FACTOR = re.compile(rf"[0-9]{{1,{DIGITS}}}(\.[0-9]{{0,{DIGITS}}})?|\.[0-9]{{1,{DIGITS}}}"
                     rf"|[0-9]{{1,{DIGITS}}}/0*[1-9][0-9]{{0,{DIGITS}}}")  # fmt: skip


def load(spec: str | None, *, rates: Mapping[str, int] = NO_RATES, switch: bool = False) -> Topology:
    """Read a machine.

    Args:
        spec: a catalogue name such as ``dgx-1v`` or ``dgx-a100:4``, the path of a file (our JSON, NCCL's or RCCL's
            topology XML, the text of ``nvidia-smi topo -m`` or ``rocm-smi --showtopo``: the content decides), also with
            a number of boxes (``topo.xml:4``), or None for this machine seen from one process: a CPU rank on each core
            that it may use.
        rates: MB/s of one link of a kind, as :func:`parse_rates` reads them, in place of those of a file or the table.
        switch: whether NVLinks lead to a switch, where the text of ``nvidia-smi`` leaves it open.

    Raises:
        TopologyError: for an unknown name or an unreadable file.
        FormatError: for a malformed file, naming it and the path of the wrong field.
    """
    found = _load(spec, rates, switch=switch)
    for kind, mbps in rates.items():
        found = found.at_rate(kind, mbps)
    return found


def _load(spec: str | None, rates: Mapping[str, int], *, switch: bool) -> Topology:
    if spec is None:
        return this_machine()
    name, _, count = spec.rpartition(":")
    several = name and re.fullmatch(r"[0-9]{1,9}", count) and not os.path.exists(spec)
    file = name if several else spec
    path = Path(file)
    looks_like_path = path.suffix in ENDINGS or "/" in file
    if spec.partition(":")[0] in names() or not (looks_like_path or os.path.exists(path)):
        if switch:
            raise TopologyError(f"{quoted(spec)}: {NO_SWITCH}")
        return machine(spec)
    if not several:
        return _read(file, rates, switch=switch)
    if not 1 <= int(count) <= MAX_COUNT:
        raise TopologyError(f"{quoted(spec)}: expected a count of 1..{MAX_COUNT} after the colon; write {path.name}:4, "
                            "say")  # fmt: skip
    return _read(file, rates, switch=switch).boxes(int(count))


def _read(spec: str, rates: Mapping[str, int], *, switch: bool) -> Topology:
    """The machine that a file describes."""
    try:
        data = read_file(spec, most=MOST_JSON_BYTES)
    except OSError as error:
        raise TopologyError(
            f"cannot read topology file {quoted(spec)}: {error.strerror}; correct the path, or name a machine: "
            f"{', '.join(names())}"
        ) from error
    source = brief(Path(spec).name)
    start = data[:_BEGINNING].decode(errors="replace")
    is_json, is_xml = data.lstrip().startswith(b"{"), data.lstrip().startswith(b"<")
    is_smi = not (is_json or is_xml or looks_like_rocm(start)) and looks_like_smi(start)
    if switch and not is_smi:
        raise TopologyError(f"{source}: {NO_SWITCH}")
    if is_xml:
        return read_xml(data, source=source, rates=rates)
    if is_json:
        return Topology.from_json(data, source=brief(spec))
    text = data.decode(errors="replace")
    if looks_like_rocm(start):
        return read_rocm(text, source=source, rates=rates)
    if is_smi:
        return read_smi(text, source=source, rates=rates, switch=switch)
    raise FormatError(
        f"{source}: neither our JSON, nor NCCL's XML, nor what `nvidia-smi topo -m` or `rocm-smi --showtopo` prints: "
        f"it begins with {quoted(start[:20])}; write one with `blinkmpi topo -o FILE`"
    )


def parse_rates(texts: Sequence[str]) -> dict[str, int]:
    """Read ``nvlink=50``, in GB/s of one link and direction, as MB/s by kind.

    Raises:
        TopologyError: for an unknown kind, or what is no rate.
    """
    kinds = get_args(LinkKind)
    rates: dict[str, int] = {}
    for text in texts:
        kind, equals, rate = (part.strip() for part in text.partition("="))
        if not equals or kind not in kinds or not _FACTOR.fullmatch(rate):
            raise TopologyError(f"rate {quoted(text)}: expected KIND=GB/s of one link, KIND one of {', '.join(kinds)}; "
                                "write nvlink=50, for example")  # fmt: skip
        mbps = int(Fraction(rate) * 1000)
        if not 1 <= mbps <= MOST_MBPS:
            raise TopologyError(f"rate {quoted(text)}: expected 0.001 to {MOST_MBPS // 1000} GB/s; correct it")
        rates[kind] = mbps
    return rates


def modify(
    topology: Topology, *, gpus: str | None = None, drop_link: Sequence[str] = (), scale: Sequence[str] = (),
    sharp: str | None = None,
) -> Topology:  # fmt: skip
    """Apply the command line's changes: links are dropped, rates scaled, switches given SHARP, then devices chosen.

    All numbers mean the vertices of ``topology`` as given.

    Args:
        gpus: devices in rank order, ``1,4,5,6`` or with ranges, ``0-3,6``.
        drop_link: pairs of vertices such as ``0-3``.
        scale: link kinds with a factor, ``pcie=0.5`` or ``pcie=1/2``.
        sharp: the kinds of switches that reduce and multicast, ``nvswitch``, ``nvswitch,net`` or ``none``.

    Raises:
        TopologyError: for a text that cannot be read, or names what is not there.
    """
    for text in drop_link:
        pair = re.fullmatch(r"\s*([0-9]{1,9})\s*-\s*([0-9]{1,9})\s*", text)
        if pair is None:
            raise TopologyError(f"drop-link {quoted(text)}: expected two vertices; write 0-3, for example")
        topology = topology.drop_link(int(pair[1]), int(pair[2]))
    for text in scale:
        kind, equals, factor = text.partition("=")
        if not equals or not _FACTOR.fullmatch(factor.strip()):
            raise TopologyError(f"scale {quoted(text)}: expected KIND=FACTOR; write pcie=0.5, for example")
        topology = topology.scale(kind.strip(), Fraction(factor.strip()))
    if sharp is not None:
        topology = topology.with_sharp(() if sharp == "none" else [kind.strip() for kind in sharp.split(",")])
    return topology if gpus is None else topology.subset(parse_gpus(gpus))


def on_gpus_of(topology: Topology, real: Topology) -> Topology:
    """The links of ``topology`` with the PCI ids, numbers and names of the GPUs that ``real`` has, rank by rank.

    Raises:
        TopologyError: if ``real`` has too few GPUs.
    """
    if real.n < topology.n or any(d.kind != "gpu" for d in real.devices):
        raise TopologyError(
            f"{real.name} has {real.n} devices, {topology.name} needs {topology.n} GPUs; take a larger one"
        )
    pairs = zip(topology.devices, real.devices, strict=False)
    devices = tuple(replace(theirs, node=d.node) for d, theirs in pairs)
    return replace(topology, devices=devices, name=f"{topology.name} on {real.name}")


def parse_gpus(text: str) -> list[int]:
    """Read ``1,4,5,6`` or ``0-3,6`` as a list of devices in that order.

    Raises:
        TopologyError: for anything else.
    """
    chosen: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if ends is None or (ends[2] and int(ends[2]) < int(ends[1])):
            cannot = f"cannot read {quoted(part.strip())}"
            raise TopologyError(f"gpus {quoted(text)}: {cannot}; write 1,4,5,6 or 0-3, for example")
        chosen += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        if len(chosen) > MOST_CHOSEN:
            raise TopologyError(f"gpus {quoted(text)}: more than {MOST_CHOSEN} devices; correct the list")
    return chosen
