"""Read the text of ``nvidia-smi topo -m``: a matrix of how GPUs reach each other.

It names no GPU, no rate and no switch. ``NV18`` says "18 NVLinks", direct or through switches: more of them in a row
than a GPU has ports can only be switches. Where two GPUs have NVLink, the text hides how they meet on PCIe.
"""

import re
from collections.abc import Sequence

from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.text import brief, quoted, whole_number
from .gpu import NvLink, PcieBridge, Unknown, unknown_gpu
from .gpu_topology import from_gpus
from .model import Topology

MOST_GPUS, MOST_NVLINKS = 255, 512  # of a node, between two GPUs
MOST_SMI_BYTES = 1 << 20  # of a matrix of so many GPUs, four times over
MOST_PORTS = 18  # of a GPU, up to NVLink 5
VERSION = "4.0"  # its rate, 25 GB/s a link, is the same for all versions from 2 to 4
WORDS = ("X", "SYS", "NODE", "PHB", "PXB", "PIX")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its headings


def looks_like_smi(text: str) -> bool:
    """Whether the text begins like the matrix."""
    return re.match(r"\s*GPU0\b", ESCAPES.sub("", text)) is not None


def read_smi(text: str, source: str = "nvidia-smi topo -m") -> Topology:
    """Read the matrix.

    Raises:
        FormatError: naming row and column of what cannot be read.
    """
    cells, numas = _matrix(text, source)
    n = len(cells)
    links = [[int(c[2:]) if c.startswith("NV") else 0 for c in row] for row in cells]
    switched = [sum(row) > MOST_PORTS for row in links]
    # A group is named by its lowest member. PIX is one switch; PXB is several switches below one, taken as one too.
    switch_of = [min([i, *(j for j in range(n) if cells[i][j] in ("PIX", "PXB"))]) for i in range(n)]
    shared = {s for s in switch_of if switch_of.count(s) > 1}
    facts = []
    for i in range(n):
        ports: list[NvLink] = []
        for j in range(n):
            if not switched[i]:
                ports += [NvLink(len(ports) + k, True, VERSION, "gpu", _bus(j)) for k in range(links[i][j])]
        if switched[i]:
            ports = [NvLink(k, True, VERSION, "hidden switch") for k in range(max(links[i]))]
        nothing = Unknown("not in nvidia-smi's text")
        hop = PcieBridge(f"ffff:{switch_of[i]:02x}:00.0", nothing, nothing)
        path = (hop, hop, hop) if switch_of[i] in shared else ()
        numa = numas[i] if numas[i] is not None else nothing
        known = {"bus": _bus(i), "index": i, "path": path, "numa": numa, "nvlinks": tuple(ports), "peers": ()}
        facts.append(unknown_gpu(nothing.reason, **known))
    try:
        made = from_gpus(facts)
    except TopologyError as error:
        raise TopologyError(f"{source}: {brief(str(error))}") from error
    devices = tuple(replace(d, bus="") for d in made.devices)
    remarks = "no names, no PCIe rates in it" + "; NVLinks taken as 25 GB/s each" * any(map(any, links))
    return replace(made, devices=devices, source=f"{source}: nvidia-smi topo -m: {remarks}; {made.source}").check()


def _bus(index: int) -> str:
    """A stand-in: the text has no PCI ids."""
    return f"ffff:ff:{index:02x}.0"


def _matrix(text: str, source: str) -> tuple[list[list[str]], list[int | None]]:
    """The cells between GPUs, and each GPU's NUMA node where the text has one."""
    lines = ESCAPES.sub("", text).splitlines()
    head = next((i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b", line)), None)
    if head is None:
        raise FormatError(f"{source}: no line begins with GPU0; expected what `nvidia-smi topo -m` prints")
    names = list(dict.fromkeys(re.findall(r"GPU[0-9]{1,6}", lines[head])))
    if len(names) > MOST_GPUS:
        raise FormatError(f"{source}: line {head + 1}: {len(names)} GPUs; expected at most {MOST_GPUS} of one node")
    columns = [c.strip() for c in lines[head].split("\t")]
    numa_at = columns.index("NUMA Affinity") if "NUMA Affinity" in columns else None
    rows = {found[1]: line for line in lines[head + 1 :] if (found := re.match(r"\s*(GPU[0-9]{1,6})\s", line))}
    cells: list[list[str]] = []
    numas: list[int | None] = []
    for name in names:
        if name not in rows:
            raise FormatError(f"{source}: no row of {name}; copy the whole matrix")
        words = rows[name].split()[1 : len(names) + 1]
        for other, word in zip(names, [*words, *[""] * (len(names) - len(words))], strict=True):
            nvlinks = re.fullmatch(r"NV([0-9]{1,4})", word)
            if word not in WORDS and not (nvlinks and int(nvlinks[1]) <= MOST_NVLINKS):
                raise FormatError(
                    f"{source}: row {name}, column {other}: {quoted(word)}; expected one of {', '.join(WORDS)}, NV#"
                )
        cells.append(words)
        fields: Sequence[str] = [c.strip() for c in rows[name].split("\t")]
        numa = fields[numa_at] if numa_at is not None and numa_at < len(fields) else ""
        numas.append(whole_number(numa))
    return cells, numas
