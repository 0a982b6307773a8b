"""Read the text of ``nvidia-smi topo -m``: a matrix of how GPUs reach each other.

It names no GPU, no rate and no switch. ``NV18`` says "18 NVLinks", direct or through switches: more of them in a row
than a GPU has ports can only be switches. Where two GPUs have NVLink, the text hides how they meet on PCIe. Texts are
copied from terminals and web pages: with a prompt above, in a Markdown fence, a header in several lines.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.text import brief, plural, quoted, whole_number
from .gpu import GpuFacts, Nic, NvLink, PcieBridge, Unknown, unknown_gpu
from .gpu_topology import NO_RATES, from_gpus
from .model import Topology
from .rates import NVLINK_MBPS

MOST_GPUS, MOST_NVLINKS = 255, 512  # of a node, between two GPUs
MOST_SMI_BYTES = 1 << 20  # the matrix of 255 GPUs has a third of it
MOST_PORTS = 18  # of a GPU, up to NVLink 5
VERSION = "4.0"  # its rate is that of all versions from 2 to 4 but GA102's
GA102, GA102_LINKS = "3.1", 4  # no other GPUs are joined in pairs by four NVLinks
WORDS = ("X", "SYS", "NODE", "PHB", "PXB", "PIX")
OLD_WORDS = {"SOC": "SYS"}  # of drivers before 2017
ESCAPES = re.compile(r"(?:\x1b|\^\[)\[[0-9;?]*[A-Za-z]")  # nvidia-smi underlines its headings; cat -v shows them
_QUOTE = r"[ \t>|]*"  # before a line of a quoted text
_HEAD = re.compile(rf"{_QUOTE}GPU0\b", re.MULTILINE)
_CELL = r"(?:X|NV[0-9]+|SYS|SOC|NODE|PHB|PXB|PIX)"
_ROW = re.compile(rf"{_QUOTE}(\S+)\s+{_CELL}(?:\s|$)")
_AFFINITIES = re.compile(r"(?:CPU|NUMA) Affinity|GPU NUMA ID")


def looks_like_smi(text: str) -> bool:
    """Whether a line near the beginning is like the matrix's header."""
    return _HEAD.search(ESCAPES.sub("", text)) is not None


def read_smi(
    text: str, source: str = "nvidia-smi topo -m", *, rates: Mapping[str, int] = NO_RATES, switch: bool = False
) -> Topology:
    """Read the matrix.

    Args:
        rates: MB/s of one link of a kind, where the user says it; that of ``net`` is each network card's.
        switch: whether NVLinks lead to a switch, where the text leaves it open.

    Raises:
        FormatError: naming row and column of what cannot be read.
    """
    matrix = _matrix(text, source)
    cells, n = matrix.cells, len(matrix.cells)
    links = [[int(c[2:]) if c.startswith("NV") else 0 for c in row[:n]] for row in cells]
    version = GA102 if n == 2 and links[0][1] == GA102_LINKS and not switch else VERSION
    switched = [sum(row) > MOST_PORTS or (switch and any(row)) for row in links]
    if switch and not any(map(any, links)):
        raise FormatError(f"{source}: --switch: the text has no NV# that could lead to a switch; leave it out")
    switch_of = [min([i, *(j for j in range(n) if cells[i][j] in ("PIX", "PXB"))]) for i in range(n)]
    # A group is named by its lowest member. PIX is one switch; PXB is several switches below one, taken as one too.
    with_card = {s for i, s in enumerate(switch_of) if {"PIX", "PXB"} & set(cells[i][n:])}
    shared = {s for s in switch_of if switch_of.count(s) > 1} | with_card
    facts: list[GpuFacts] = []
    for i in range(n):
        ports: list[NvLink] = []
        for j in range(n):
            if not switched[i]:
                ports += [NvLink(len(ports) + k, True, version, "gpu", _bus(j)) for k in range(links[i][j])]
        if switched[i]:
            ports = [NvLink(k, True, VERSION, "hidden switch") for k in range(max(links[i]))]
        nothing = Unknown("not in nvidia-smi's text")
        hop = PcieBridge(f"ffff:{switch_of[i]:02x}:00.0", nothing, nothing)
        path = (hop, hop, hop) if switch_of[i] in shared else ()
        numa = matrix.sockets[i] if matrix.sockets[i] is not None else nothing
        nics = tuple(
            Nic(name, _word(word), (hop.bus,) if word in ("PIX", "PXB") else (), rates["net"])
            for column, (name, word) in enumerate(zip(matrix.cards, cells[i][n:], strict=True), n)
            if "net" in rates and _nearest(cells, column) == i
        )
        known: dict[str, Any] = {"bus": _bus(i), "index": i, "path": path, "numa": numa, "nvlinks": tuple(ports)}
        facts.append(unknown_gpu(nothing.reason, **known, nics=nics, peers=()))
    try:
        made = from_gpus(facts, rates=rates)
    except TopologyError as error:
        raise TopologyError(f"{source}: {brief(str(error))}") from error
    devices = tuple(replace(d, bus="") for d in made.devices)
    some = any(map(any, links))
    told = "" if "nvlink" in rates or not some else f"; NVLinks taken as {NVLINK_MBPS[version] / 1000:g} GB/s each"
    said = f"{source}: nvidia-smi topo -m: no names, no PCIe rates in it{told}; {made.source}"
    remarks = tuple(f"{source}: {remark}" for remark in _remarks(matrix, links, switched, rates, version))
    return replace(made, devices=devices, source=said, remarks=remarks).check()


class _Matrix(NamedTuple):
    """The cells of each GPU's row, GPUs first; the names of the network cards; each GPU's socket, where it is known."""

    cells: list[list[str]]
    cards: list[str]
    sockets: list[int | None]


def _remarks(
    matrix: _Matrix, links: list[list[int]], switched: list[bool], rates: Mapping[str, int], version: str
) -> list[str]:
    """What the text leaves open, and how to tell."""
    found = []
    n = len(links)
    counts = {links[i][j] for i in range(n) for j in range(n) if i != j}
    count = max(counts, default=0)
    if n > 2 and len(counts) == 1 and count and not any(switched):
        direct = count * (n - 1)
        found.append(
            f"NV{count} between every two GPUs is read as direct links, {direct} from each; behind a switch, as in a "
            f"DGX-2 or HGX of which {plural(n, 'GPU')} are visible, each has {count} in all: `nvidia-smi nvlink -s` "
            "counts a GPU's links, and --switch reads it so"
        )
    if "nvlink" not in rates and version == GA102:
        found.append(
            f"NV{GA102_LINKS} between two GPUs is read as the bridge of RTX 3090, A6000 or A40, "
            f"{NVLINK_MBPS[GA102] / 1000:.2f} GB/s a link; of two GPUs of an HGX A100 with four one is "
            f"{NVLINK_MBPS[VERSION] / 1000:g}: say so with --rate nvlink=GB/s"
        )
    elif "nvlink" not in rates and count:
        usual, small, fast = (NVLINK_MBPS[version] / 1000 for version in (VERSION, GA102, "5.0"))
        found.append(
            f"the text does not say which NVLinks these are: {usual:g} GB/s a link assumed; of RTX 3090, A6000 and A40 "
            f"one is {small:.2f}, of B200 {fast:g}: say it with --rate nvlink=GB/s"
        )
    if matrix.cards and "net" not in rates:
        found.append(
            f"{plural(len(matrix.cards), 'network card')} ({', '.join(matrix.cards[:4])}"
            f"{', ...' if len(matrix.cards) > 4 else ''}) without a rate left out: say it with --rate net=GB/s"
        )
    return found


def _word(word: str) -> Any:
    return word if word in WORDS[1:] else "SYS"


def _nearest(cells: Sequence[Sequence[str]], column: int) -> int:
    """The first of the GPUs that are nearest to a network card."""
    return max(range(len(cells)), key=lambda i: (WORDS.index(_word(cells[i][column])), -i))


def _bus(index: int) -> str:
    """A stand-in: the text has no PCI ids."""
    return f"ffff:ff:{index:02x}.0"


def _matrix(text: str, source: str) -> _Matrix:
    """The matrix of the text."""
    if len(text) > MOST_SMI_BYTES:
        raise FormatError(f"{source}: {len(text) >> 10} KiB of text; the matrix of {MOST_GPUS} GPUs has less than "
                          f"{MOST_SMI_BYTES >> 10}, give another file")  # fmt: skip
    lines = ESCAPES.sub("", text).splitlines()
    first = next((i for i, line in enumerate(lines) if _HEAD.match(line)), None)
    if first is None:
        raise FormatError(f"{source}: no line begins with GPU0; expected what `nvidia-smi topo -m` prints")
    # A header that a terminal has wrapped goes on until the first row, which is GPU0 and a cell.
    head = list(takewhile(lambda line: not _ROW.match(line), lines[first:]))
    titles = " ".join(head)
    affinities = _AFFINITIES.findall(titles)
    columns = _AFFINITIES.sub(" ", titles).replace(">", " ").split()
    names = list(dict.fromkeys(c for c in columns if re.fullmatch(r"GPU[0-9]{1,6}", c)))
    cards = [c for c in columns if not re.fullmatch(r"GPU[0-9]{1,6}|[`|]+", c)]
    if len(names) > MOST_GPUS:
        raise FormatError(f"{source}: line {first + 1}: {len(names)} GPUs; expected at most {MOST_GPUS} of one node")
    rows = _rows(lines[first + len(head) :], len(names) + len(cards))
    if extra := [name for name in rows if name.startswith("GPU") and name not in names]:
        raise FormatError(f"{source}: line {first + 1}: a row of {extra[0]}, and no column; copy the whole matrix")
    cells: list[list[str]] = []
    affinity: list[tuple[str, int | None]] = []
    for name in names:
        if name not in rows:
            raise FormatError(f"{source}: no row of {name}; copy the whole matrix")
        words, rest = rows[name]
        words = [OLD_WORDS.get(word, word) for word in words]
        wanted = [*names, *cards]
        for other, word in zip(wanted, [*words, *[""] * (len(wanted) - len(words))], strict=True):
            nvlinks = re.fullmatch(r"NV([0-9]{1,4})", word)
            if word not in WORDS and not (nvlinks and int(nvlinks[1]) <= MOST_NVLINKS):
                raise FormatError(
                    f"{source}: row {name}, column {other}: {quoted(word)}; expected one of {', '.join(WORDS)}, NV#"
                )
        cells.append(words)
        told = dict(zip(affinities, rest, strict=False))
        affinity.append((told.get("CPU Affinity", ""), whole_number(told.get("NUMA Affinity", ""))))
    return _Matrix(cells, cards, _sockets(cells, affinity))


def _rows(lines: Sequence[str], width: int) -> dict[str, tuple[list[str], list[str]]]:
    """The cells of each row, and what follows them: a row that a terminal has wrapped goes on in the next line."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    words: list[str] = []
    rest: list[str] = []
    for line in lines:
        fields = [field.strip() for field in re.sub(rf"^{_QUOTE}", "", line).split("\t")]
        found = _ROW.match(line)
        if found:
            words, rest = [], []
            rows[found[1]] = words, rest
            tokens = line.replace(">", " ").split()[1:]
        elif rows and len(words) < width and re.match(rf"{_QUOTE}{_CELL}(?:\s|$)", line):
            tokens = line.replace(">", " ").split()
        else:
            words = [""] * width  # the matrix is over, or interrupted
            continue
        more = width - len(words)
        words += tokens[:more]
        # Between tabs a field may be empty; between spaces none is.
        rest += fields[1 + width :] if found and len(fields) > width else tokens[more:]
    return rows


def _sockets(cells: list[list[str]], affinity: list[tuple[str, int | None]]) -> list[int | None]:
    """The socket of each GPU: its NUMA node, else by its cores, else by which GPUs only SYS joins."""
    n = len(cells)
    if any(numa is not None for _, numa in affinity):
        return [numa for _, numa in affinity]
    cores = list(dict.fromkeys(text for text, _ in affinity))
    if len(cores) > 1 and not any(text in ("", "N/A") for text in cores):
        return [cores.index(text) for text, _ in affinity]
    if not any(cells[i][j] == "SYS" for i in range(n) for j in range(n)):
        return [None] * n
    lowest = [min(j for j in range(n) if j == i or cells[i][j] in WORDS[2:]) for i in range(n)]
    ranked = list(dict.fromkeys(lowest))
    return [ranked.index(low) for low in lowest]
