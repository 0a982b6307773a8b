"""Read what a user names: a machine of the catalogue, a file, this machine, and changes to it.

The texts are those of the command line: ``TOPOLOGY``, ``--gpus``, ``--drop-link``, ``--scale``.
"""

import os
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.files import read_file
from ..util.text import DIGITS, brief, quoted
from .live import this_machine
from .machines import machine, names
from .model import Topology
from .nccl import read_xml
from .nvidia_smi import MOST_SMI_BYTES, looks_like_smi, read_smi

ENDINGS = (".json", ".xml", ".txt")
MOST_CHOSEN = 1 << 16  # devices in one list; more is a typing error
_BEGINNING = 4096  # bytes of a file that show what it is


_FACTOR = re.compile(rf"[0-9]{{1,{DIGITS}}}(\.[0-9]{{0,{DIGITS}}})?|\.[0-9]{{1,{DIGITS}}}"
                     rf"|[0-9]{{1,{DIGITS}}}/0*[1-9][0-9]{{0,{DIGITS}}}")  # fmt: skip


def load(spec: str | None) -> Topology:
    """Read a machine.

    Args:
        spec: a catalogue name such as ``dgx-1v`` or ``dgx-a100:4``, the path of a file (our JSON, NCCL's topology
            XML, the text of ``nvidia-smi topo -m``: the content decides), or None for this machine seen from one
            process: a CPU rank on each core that it may use.

    Raises:
        TopologyError: for an unknown name or an unreadable file.
        FormatError: for a malformed file, naming it and the path of the wrong field.
    """
    if spec is None:
        return this_machine()
    path = Path(spec)
    looks_like_path = path.suffix in ENDINGS or "/" in spec
    if spec.partition(":")[0] in names() or not (looks_like_path or os.path.exists(path)):
        return machine(spec)
    try:
        text = read_file(path)
    except OSError as error:
        raise TopologyError(
            f"cannot read topology file {quoted(spec)}: {error.strerror}; correct the path, or name a machine: "
            f"{', '.join(names())}"
        ) from error
    source = brief(path.name)
    if text.lstrip().startswith(b"<"):
        return read_xml(text, source=source)
    if looks_like_smi(text[:_BEGINNING].decode(errors="replace")):
        if len(text) > MOST_SMI_BYTES:
            raise FormatError(f"{source}: {len(text)} bytes; what `nvidia-smi topo -m` prints has at most "
                              f"{MOST_SMI_BYTES}, give that alone")  # fmt: skip
        return read_smi(text.decode(errors="replace"), source=source)
    if not text.lstrip().startswith(b"{"):
        raise FormatError(
            f"{source}: neither our JSON, nor NCCL's XML, nor what `nvidia-smi topo -m` prints: it begins with "
            f"{quoted(text[:20].decode(errors='replace'))}; write one with `blinkmpi topo -o FILE`"
        )
    return Topology.from_json(text, source=brief(spec))


def modify(
    topology: Topology, *, gpus: str | None = None, drop_link: Sequence[str] = (), scale: Sequence[str] = ()
) -> Topology:
    """Apply the command line's changes: links are dropped, then rates scaled, then devices chosen.

    All numbers mean the vertices of ``topology`` as given.

    Args:
        gpus: devices in rank order, ``1,4,5,6`` or with ranges, ``0-3,6``.
        drop_link: pairs of vertices such as ``0-3``.
        scale: link kinds with a factor, ``pcie=0.5`` or ``pcie=1/2``.

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
