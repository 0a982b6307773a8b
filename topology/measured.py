"""Measured rates of links: the result of ``blinkmpi topo --measure``, its file, and the machine with these rates.

A file is valid for some GPUs (by UUID, in any order) under one driver. A machine takes from it the rates of links that
are far below others of their class; the others keep the table's rate, so that plans do not follow noise.
``blinkmpi.measure`` measures; here are the values, and rank 0's file.
"""

import hashlib
import statistics
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from ..errors import BlinkError, SettingsError, TopologyError
from ..util.cache_folder import read_kept
from ..util.codec import Document, Value
from ..util.text import brief, plural
from ..util.together import Comm, from_root
from .gpu import GpuFacts
from .model import Device, Link, Topology
from .network_rate import rounded

FORMAT_VERSION = 1
NOWHERE = -1  # the end of a row that is no device: the host's memory, or the network
UNDER_PERCENT = 85  # of the median of its class; a lower rate is marked
DIGITS = 3  # significant digits of a measured rate in a plan
FAST = ("nvlink", "xgmi")

MeasurementKind = Literal[
    "copy", "copy-both", "copy-all", "push", "push-both", "push-all", "flag", "host", "host-all",
    "memory", "memory-all", "net",
]  # fmt: skip


class LinkMeasurement(Value, frozen=True):
    """One direction: ``src`` sends to ``dst``. ``us`` is the round trip of a flag, ``mbps`` is for everything else."""

    src: int
    dst: int
    what: MeasurementKind
    mbps: int | None = None
    us: float | None = None


class Measured(Document, frozen=True):
    """What was measured between some devices; rows name them by their index in ``devices``.

    ``date`` is the day, ``driver`` that of the GPUs (empty for CPU ranks), ``missing`` what could not be measured, and
    why.
    """

    KIND: ClassVar = "measured"
    VERSION: ClassVar = FORMAT_VERSION
    machine: str
    devices: tuple[Device, ...]
    date: str
    driver: str
    versions: dict[str, str]
    rows: tuple[LinkMeasurement, ...]
    missing: tuple[str, ...] = ()

    def check(self) -> Self:
        """Return self if consistent.

        Raises:
            TopologyError: for a row of a device that is not there, a rate that is none, or a second row of its kind.
        """
        seen: set[tuple[int, int, str]] = set()
        for i, row in enumerate(self.rows):
            where = f"{self.machine}: rows[{i}] {row.what} {row.src}->{row.dst}"
            ends = {row.src, row.dst}
            if len(ends) < 2 or not ends <= {NOWHERE, *range(len(self.devices))}:
                raise TopologyError(f"{where}: expected two different of -1..{len(self.devices) - 1}; measure again")
            value = row.us if row.what == "flag" else row.mbps
            if value is None or value <= 0:
                raise TopologyError(f"{where}: {value}, expected more than 0; measure again")
            if (row.src, row.dst, row.what) in seen:
                raise TopologyError(f"{where}: a second row; measure again")
            seen.add((row.src, row.dst, row.what))
        return self

    _consistent = check


class SlowLink(NamedTuple):
    """A link whose rate is far below the median of its class, ``usual`` MB/s."""

    link: Link
    mbps: int
    usual: int


# ---- classes


def links_between(topology: Topology, src: int, dst: int) -> tuple[Link, ...]:
    """The links of a copy from one device to another: NVLinks if they join the two, else the fewest links."""
    for kinds in (FAST, topology.kinds()):
        onward: dict[int, list[Link]] = {}
        for link in sorted(topology.links, key=lambda k: (-k.mbps, k.dst)):
            if link.kind in kinds:
                onward.setdefault(link.src, []).append(link)
        came: dict[int, tuple[Link, ...]] = {src: ()}
        queue = [src]
        for v in queue:
            for link in onward.get(v, ()) if v == src or v >= topology.n else ():
                if link.dst not in came:
                    came[link.dst] = (*came[v], link)
                    queue.append(link.dst)
        if dst in came:
            return came[dst]
    return ()


def class_of(topology: Topology, row: LinkMeasurement) -> str:
    """The class of a row: rows of the same name and class are compared."""
    if NOWHERE in (row.src, row.dst):
        if row.what in ("host", "host-all"):
            device = max(row.src, row.dst)
            own = [k for k in topology.links if k.kind == "pcie" and k.src == device]
            rate = f"pcie {own[0].mbps / 1000:g} " if own else ""
            return rate + ("to the host" if row.dst == NOWHERE else "from the host")
        return "network" if row.what == "net" else "memory"
    links = links_between(topology, row.src, row.dst)
    if not links:
        return "unknown path"
    least = min(links, key=lambda k: k.mbps)
    through = "-".join(topology.switches[k.dst - topology.n].kind for k in links[:-1])
    return f"{least.kind} {least.lanes}x{least.lane_mbps / 1000:g}" + (f" by {through}" if through else "")


def usual(rates: Iterable[int]) -> int:
    """The median; the upper one of two, so that of two links the slow one is the odd one out."""
    return statistics.median_high(list(rates))


def is_under(mbps: int, median: int) -> bool:
    """Whether a rate is so low that it is marked."""
    return 100 * mbps < UNDER_PERCENT * median


def marked(topology: Topology, measured: Measured) -> dict[LinkMeasurement, int]:
    """Rows far below the median of their class, with that median; round trips are not judged."""
    groups: dict[tuple[str, str], list[LinkMeasurement]] = {}
    for row in measured.rows:
        if row.mbps is not None:
            groups.setdefault((row.what, class_of(topology, row)), []).append(row)
    found: dict[LinkMeasurement, int] = {}
    for rows in groups.values():
        median = usual(row.mbps or 0 for row in rows)
        found |= {row: median for row in rows if is_under(row.mbps or 0, median)}
    return found


# ---- links


def link_rates(topology: Topology, measured: Measured) -> dict[Link, int]:
    """MB/s of the links whose rate follows from the measurement.

    An NVLink gets the best rate of the pairs whose copies use it, so that one slow peer does not slow down the link of
    another GPU to the switch. The PCIe link of a GPU gets the rate to or from the host's memory.
    """
    found: dict[Link, int] = {}
    for row in measured.rows:
        links: Collection[Link] = ()
        if row.what == "copy":
            links = [k for k in links_between(topology, row.src, row.dst) if k.kind in FAST]
        elif row.what == "host":
            device, out = max(row.src, row.dst), row.dst == NOWHERE
            links = [k for k in topology.links if k.kind == "pcie" and max(k.src, k.dst) >= topology.n
                     and (k.src if out else k.dst) == device]  # fmt: skip
        for link in links:
            found[link] = max(found.get(link, 0), row.mbps or 0)
    return found


def slow_links(topology: Topology, measured: Measured) -> tuple[SlowLink, ...]:
    """Links more than 15 % below the median of their class: kind, lanes, table's rate, and to or from a switch."""
    groups: dict[tuple[object, ...], list[tuple[Link, int]]] = {}
    n = topology.n
    for link, mbps in link_rates(topology, measured).items():
        key = (link.kind, link.lanes, link.lane_mbps, link.src < n, link.dst < n)
        groups.setdefault(key, []).append((link, mbps))
    found = []
    for links in groups.values():
        median = usual(mbps for _, mbps in links)
        found += [SlowLink(link, mbps, median) for link, mbps in links if is_under(mbps, median)]
    return tuple(sorted(found, key=lambda s: (s.link.src, s.link.dst, s.link.kind)))


def with_measured(topology: Topology, measured: Measured) -> Topology:
    """The machine with the measured rates of its slow links, to three digits and never above the table's rate."""
    placed = here(measured, topology)
    slow = {s.link: s.mbps for s in slow_links(topology, placed)} if placed else {}
    if not slow:
        return topology
    rates = {k: min(k.lane_mbps, rounded(mbps // k.lanes, DIGITS)) for k, mbps in slow.items()}
    links = tuple(replace(k, lane_mbps=rates[k], origin="measured") if k in rates else k for k in topology.links)
    remark = f"{plural(len(slow), 'link')} far under their class: as measured {measured.date}"
    source = "; ".join(filter(None, [topology.source, remark]))
    return replace(topology, links=links, source=source).check()


def here(measured: Measured, topology: Topology) -> Measured | None:
    """The measurement with the ranks of ``topology``, matched by UUID; None if it has other devices."""
    theirs, ours = [d.uuid for d in measured.devices], [d.uuid for d in topology.devices]
    if not all(ours) or len(set(ours)) < len(ours) or sorted(theirs) != sorted(ours):
        return None
    place = {NOWHERE: NOWHERE, **{old: ours.index(uuid) for old, uuid in enumerate(theirs)}}
    rows = (replace(r, src=place[r.src], dst=place[r.dst]) for r in measured.rows)
    order = tuple(sorted(rows, key=lambda r: (r.what, r.src, r.dst)))
    return replace(measured, devices=topology.devices, rows=order)


# ---- files


def file_of(folder: Path, uuids: Iterable[str], driver: str) -> Path:
    """The file for the links of some GPUs under a driver."""
    digest = hashlib.sha256(msgspec.json.encode([sorted(uuids), driver])).hexdigest()[:12]
    return folder / f"links-{digest}.json"


def driver_of(facts: object) -> str:
    """The driver's version, as a GPU's facts have it."""
    return facts.driver if isinstance(facts, GpuFacts) and isinstance(facts.driver, str) else "unknown"


def kept(comm: Comm, topology: Topology, facts: object, folder: Path) -> Measured | None:
    """The measurement in rank 0's folder for these GPUs under this driver, with this machine's ranks; collective.

    Args:
        facts: of the calling rank's GPU.

    Raises:
        SettingsError: the same on all ranks, for a file that cannot be read.
    """

    def from_file() -> str:
        path = file_of(folder, (d.uuid for d in topology.devices), driver_of(facts))
        try:
            return Measured.from_json(read_kept(path), source=brief(str(path))).to_json()
        except FileNotFoundError:
            return ""  # nothing was measured
        except (OSError, BlinkError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise SettingsError(
                f"cannot use {brief(str(path))} ({why}); remove it, or blinkmpi topo --measure=again"
            ) from error

    text = from_root(comm, from_file, str, during="while the measured links were read", error=SettingsError)
    return here(Measured.from_json(text), topology) if text else None


def applied(comm: Comm, topology: Topology, facts: object, folder: Path) -> Topology:
    """The live machine of GPUs with the measured rates of its slow links; collective, raises as :func:`kept`."""
    found = kept(comm, topology, facts, folder)
    return topology if found is None else with_measured(topology, found)
