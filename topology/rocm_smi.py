"""Read the text of ``rocm-smi --showtopo``: matrices of the kind of link, the hops and the NUMA node of AMD's GPUs.

It names no GPU and no rate, and does not count links: one is taken between two GPUs that are one hop apart.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.text import brief, quoted
from .gpu import GpuFacts, Unknown, XgmiLinks, unknown_gpu
from .gpu_topology import NO_RATES, from_gpus
from .model import Topology
from .nvidia_smi import ESCAPES
from .rates import XGMI_MBPS

MOST_GPUS = 255  # of a node
MOST_ROCM_BYTES = 1 << 20  # the matrices of 64 GPUs have a fifth of it
ARCHITECTURE = "gfx90a"  # whose rate is taken
LINKS, HOPS = "link type between", "hops between"
_TITLE = re.compile(r"^[=\s]*=([^=]+?)=[=\s]*$")
_NUMA = re.compile(r"GPU\[([0-9]{1,6})\].*Numa Node:\s*([0-9]{1,6})")


def looks_like_rocm(text: str) -> bool:
    """Whether the text has the title of the matrix that is needed."""
    return LINKS in text.lower()


def read_rocm(text: str, source: str = "rocm-smi --showtopo", *, rates: Mapping[str, int] = NO_RATES) -> Topology:
    """Read the matrices.

    Args:
        rates: MB/s of one link of a kind, where the user says it.

    Raises:
        FormatError: naming row and column of what cannot be read.
    """
    if len(text) > MOST_ROCM_BYTES:
        raise FormatError(f"{source}: {len(text) >> 10} KiB of text; the matrices of 64 GPUs have less than "
                          f"{MOST_ROCM_BYTES >> 10}, give another file")  # fmt: skip
    parts = _parts(ESCAPES.sub("", text))
    kinds = _matrix(next((lines for title, lines in parts.items() if LINKS in title), []), source)
    hops = next((_matrix(lines, source) for title, lines in parts.items() if HOPS in title), [])
    n = len(kinds)
    if hops and len(hops) != n:
        raise FormatError(f"{source}: {n} GPUs have links and {len(hops)} have hops; copy the whole text")
    numa = {int(gpu): int(node) for gpu, node in _NUMA.findall(text)}
    facts: list[GpuFacts] = []
    far, other = [], set()
    for i, row in enumerate(kinds):
        links = []
        for j, kind in enumerate(row):
            if i == j or kind == "PCIE":
                continue
            if kind != "XGMI":
                other.add(kind)
            elif hops and hops[i][j] != "1":
                far.append((i, j))
            else:
                links.append(XgmiLinks(_bus(j), 1, ARCHITECTURE))
        nothing = Unknown("not in rocm-smi's text")
        known: dict[str, Any] = {
            "bus": _bus(i),
            "index": i,
            "path": (),
            "nvlinks": (),
            "xgmi": tuple(links),
            "peers": (),
        }
        facts.append(unknown_gpu(nothing.reason, **known, numa=numa.get(i, nothing)))
    if unknown := sorted(other - {"N/A"}):
        raise FormatError(f"{source}: link type {quoted(unknown[0])}; expected XGMI or PCIE, correct the text")
    try:
        made = from_gpus(facts, rates=rates)
    except TopologyError as error:
        raise TopologyError(f"{source}: {brief(str(error))}") from error
    remarks = []
    if "xgmi" in made.kinds():
        if "xgmi" not in rates:
            remarks.append(
                f"the text does not say which GPUs these are, nor how many links join two: one xGMI link of "
                f"{XGMI_MBPS[ARCHITECTURE] / 1000:g} GB/s assumed, as of MI200; one of MI300X is "
                f"{XGMI_MBPS['gfx942'] / 1000:g}: say what joins two GPUs with --rate xgmi=GB/s"
            )
        if not hops:
            remarks.append("no matrix of hops: XGMI is read as a direct link between every two GPUs that have it")
    if far:
        remarks.append(f"XGMI over several hops, as between GPUs {far[0][0]} and {far[0][1]}, is no direct link")
    if "N/A" in other:
        remarks.append("link type N/A is read as no link")
    devices = tuple(replace(d, bus="") for d in made.devices)
    said = f"{source}: rocm-smi --showtopo: no names, no rates in it; {made.source}"
    return replace(made, devices=devices, source=said, remarks=tuple(f"{source}: {r}" for r in remarks)).check()


def _bus(index: int) -> str:
    """A stand-in: the text has no PCI ids."""
    return f"ffff:ff:{index:02x}.0"


def _parts(text: str) -> dict[str, list[str]]:
    """The lines below each title, by the title in small letters."""
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if title := _TITLE.match(line):
            lines = parts.setdefault(title[1].strip().lower(), [])
        else:
            lines.append(line)
    return parts


def _matrix(lines: list[str], source: str) -> list[list[str]]:
    """The cells of a square matrix of GPUs."""
    rows = [words for line in lines if (words := line.split()) and re.fullmatch(r"GPU[0-9]{1,6}", words[0])]
    names, rows = (rows[0], rows[1:]) if rows else ([], [])
    if not names or len(names) > MOST_GPUS:
        raise FormatError(f"{source}: {len(names)} GPUs in the header of a matrix; expected 1..{MOST_GPUS}, copy the "
                          "whole text")  # fmt: skip
    found = {row[0]: row[1:] for row in rows}
    for name in names:
        if (width := len(found.get(name, ()))) != len(names):
            raise FormatError(
                f"{source}: row {name} has {width} cells, there are {len(names)} GPUs; copy the whole text"
            )
    return [found[name] for name in names]
