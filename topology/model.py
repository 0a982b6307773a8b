"""The machine as a value: devices, switches, directed links (Blink section 3, "topology").

Vertices are integers. Device ``i`` is vertex ``i`` and rank ``i`` (``0..n-1``); switch ``j`` is vertex ``n + j``. Links
are directed. A switch forwards bytes; it neither copies nor computes, with two exceptions. A switch of kind ``memory``
is the memory that the CPU ranks of a node share, which one rank writes and all can read. A ``sharp`` switch adds what
comes in over several links, and sends copies on over several.

Pure data: no MPI, no GPU, no I/O. Capacities are integer MB/s (1 MB = 10^6 bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import compress, count
from typing import ClassVar, Literal, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from ..errors import FormatError, TopologyError
from ..util.codec import Document, Value
from ..util.text import brief, controls, quoted

FORMAT_VERSION = 1
MOST_DEVICES = 1 << 16
MOST_MBPS = 10**12  # of a link: an exabyte a second
# 65,536 devices, each with four links to switches, are 330,000 objects of some 110 bytes and 7 values.
MOST_JSON_BYTES, MOST_JSON_OBJECTS, MOST_JSON_VALUES = 48 << 20, 1 << 19, 1 << 22
DeviceKind = Literal["gpu", "cpu"]
SwitchKind = Literal["nvswitch", "pcie", "host", "memory", "net"]
SHARP_KINDS: tuple[SwitchKind, ...] = ("nvswitch", "net")  # switches that are built with SHARP: NVLink's, InfiniBand's
LinkKind = Literal["nvlink", "xgmi", "c2c", "pcie", "host", "memory", "net"]
Origin = Literal["table", "probe", "measured", "given"]
Unnumbered = tuple[str, object]  # a vertex before it has a number: ("gpu", rank) or a switch's key


class Device(Value, frozen=True):
    """One GPU or CPU process; its rank is its position in ``Topology.devices``.

    Attributes:
        kind: ``gpu`` or ``cpu``.
        node: the number of its machine, from 0.
        index: its number on its own machine, which a subset keeps, so that people read "GPU 4" whatever its rank is.
        name: the model, such as ``V100-SXM2-16GB``; empty where it is not known, as all that follow.
        host: the machine's name.
        uuid: the GPU's, as the driver says it.
        bus: the GPU's PCI id.
    """

    kind: DeviceKind
    node: int
    index: int
    name: str = ""
    host: str = ""
    uuid: str = ""
    bus: str = ""

    @property
    def label(self) -> str:
        """A readable name, such as ``GPU 4`` or ``CPU 0``."""
        return f"{self.kind.upper()} {self.index}"


class Switch(Value, frozen=True, omit_defaults=True):
    """A vertex that forwards bytes between devices, but never copies them (except ``memory``, and with ``sharp``).

    Attributes:
        kind: ``nvswitch``, ``pcie``, ``host`` (a socket), ``memory`` (what the CPU ranks of a node share) or ``net``.
        node: the number of its machine; -1 for a switch between the nodes.
        name: what people call it, such as ``PLX 0``.
        sharp: whether it reduces and multicasts by itself: NVLink SHARP or InfiniBand SHARP. Such machines are planned
            for and simulated; what runs here takes trees in which switches only forward.
    """

    kind: SwitchKind
    node: int
    name: str = ""
    sharp: bool = False


class Link(Value, frozen=True):
    """One direction of a connection: ``lanes`` units of ``lane_mbps`` MB/s each.

    Attributes:
        src: the vertex at its beginning: a rank, or n + j for switch j.
        dst: the vertex at its end.
        kind: ``nvlink``, ``xgmi``, ``c2c`` (NVLink between GPU and CPU), ``pcie``, ``host`` (between sockets),
            ``memory`` or ``net``.
        lanes: parallel units, at least 1.
        lane_mbps: MB/s of one of them, an integer of at least 1.
        origin: where the rate comes from: ``table``, ``probe``, ``measured`` or ``given`` (by the user).
    """

    src: int
    dst: int
    kind: LinkKind
    lanes: int
    lane_mbps: int
    origin: Origin = "table"

    @property
    def mbps(self) -> int:
        """Capacity in MB/s."""
        return self.lanes * self.lane_mbps


class NetworkCard(Value, frozen=True):
    """A network card of a machine of one node: it joins boxes, and nothing inside one.

    Attributes:
        name: as the system calls it, such as ``mlx5_0``.
        vertex: the PCIe switch, socket or GPU that it is on.
        mbps: MB/s each way, an integer of at least 1.
    """

    name: str
    vertex: int
    mbps: int


class Connection(NamedTuple):
    """A connection that is equally fast both ways, while a topology is built: its ends have no numbers yet."""

    a: Unnumbered
    b: Unnumbered
    kind: LinkKind
    lanes: int
    lane_mbps: int
    origin: Origin = "table"


class Topology(Document, frozen=True, dict=True):
    """A machine, or the part of it that a job has; ``to_json`` and ``from_json`` write and read its file.

    >>> from blinkmpi.topology import machine
    >>> part = machine("dgx-1v").subset([1, 4, 5, 6])
    >>> part.name, part.n, part.kinds()
    ('dgx-1v[1,4,5,6]', 4, ('host', 'nvlink', 'pcie'))

    Attributes:
        name: in messages and pictures.
        devices: n of them; their position is their rank.
        switches: switch j is vertex n + j.
        links: each direction for itself.
        source: where all this comes from, for people.
        cards: the network cards of one box, which :meth:`boxes` joins to a network.
        remarks: what a reader did not understand or had to guess, a sentence each.
    """

    KIND: ClassVar = "topology"
    VERSION: ClassVar = FORMAT_VERSION
    name: str
    devices: tuple[Device, ...]
    switches: tuple[Switch, ...] = ()
    links: tuple[Link, ...] = ()
    source: str = ""
    cards: tuple[NetworkCard, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> Self:
        """Read what :meth:`to_json` wrote, if it is no larger than the description of a machine can be."""
        data = text.encode() if isinstance(text, str) else text
        objects = data.count(b"{")
        if len(data) > MOST_JSON_BYTES or objects > MOST_JSON_OBJECTS or data.count(b",") > MOST_JSON_VALUES:
            raise FormatError(f"{source or cls.KIND}: {len(data) >> 10} KiB with {objects} objects; {MOST_DEVICES} "
                              f"devices with their links have at most {MOST_JSON_BYTES >> 20} MiB and "
                              f"{MOST_JSON_OBJECTS} objects, give another file")  # fmt: skip
        return super().from_json(text, source)

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that hold devices, ascending."""
        return tuple(sorted({d.node for d in self.devices}))

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The node of every vertex; -1 for a switch between nodes."""
        switches = (-1 if s.kind == "net" else s.node for s in self.switches)
        return (*(d.node for d in self.devices), *switches)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Ranks on ``node``, ascending."""
        return tuple(r for r, d in enumerate(self.devices) if d.node == node)

    def vertex_label(self, vertex: int) -> str:
        """Human name of a device or switch vertex."""
        if vertex < self.n:
            several = len(self.nodes) > 1
            device = self.devices[vertex]
            return f"{device.label}@{device.node}" if several else device.label
        switch = self.switches[vertex - self.n]
        return switch.name or f"{switch.kind} {vertex - self.n}"

    @property
    def renumbered(self) -> str:
        """Which devices the ranks are, where their numbers differ, as in ``ranks 0 to 2 are GPU 0, GPU 1, GPU 4``."""
        if len(self.nodes) > 1 or all(d.index == r for r, d in enumerate(self.devices)):
            return ""
        names = ", ".join(d.label for d in self.devices)
        return f"ranks 0 to {self.n - 1} are {names}" if self.n > 1 else f"rank 0 is {names}"

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over what plans of jobs depend on, which is kinds, nodes and links; not names or ``sharp``."""
        facts = (
            [(d.kind, d.node, d.index) for d in self.devices],
            [(s.kind, s.node) for s in self.switches],
            sorted((k.src, k.dst, k.kind, k.lanes, k.lane_mbps) for k in self.links),
        )
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]

    @property
    def sharp(self) -> tuple[int, ...]:
        """The vertices of the switches that reduce and multicast, ascending."""
        return tuple(self.n + j for j, s in enumerate(self.switches) if s.sharp)

    def kinds(self) -> tuple[LinkKind, ...]:
        """The link kinds present, sorted."""
        return tuple(sorted({k.kind for k in self.links}))

    def memory_of(self, node: int) -> int | None:
        """The vertex of the memory that ``node``'s CPU ranks share, if there is one."""
        shared = (self.n + j for j, s in enumerate(self.switches) if s.kind == "memory" and s.node == node)
        return next(shared, None)

    def check(self) -> Self:
        """Return self if consistent.

        Raises:
            TopologyError: for a bad vertex, self-loop, repeated link, non-positive capacity, or a name that has control
                characters, as names are printed.
        """
        top = self.n + len(self.switches)
        if controls("".join(self._texts())):
            name = next(filter(controls, self._texts()))
            raise TopologyError(f"{brief(self.name)}: the name {quoted(name)} has a control character; leave it out")
        if not self.devices:
            raise TopologyError(f"{self.name}: no devices; a machine needs at least one")
        if self.n > MOST_DEVICES:
            raise TopologyError(f"{self.name}: {self.n} devices; expected at most {MOST_DEVICES}, take a part of them")
        seen: set[tuple[int, int, str]] = set()
        for i, k in enumerate(self.links):
            where = f"{self.name}: links[{i}] {k.src}->{k.dst}"
            if not (0 <= k.src < top and 0 <= k.dst < top):
                raise TopologyError(f"{where}: vertices are 0..{top - 1}; correct the link")
            if k.src == k.dst:
                raise TopologyError(f"{where}: a link joins two different vertices; remove it")
            if k.lanes < 1 or k.lane_mbps < 1:
                raise TopologyError(
                    f"{where}: capacity {k.lanes} x {k.lane_mbps} MB/s; both must be at least 1, or leave the link out"
                )
            if k.lanes > MOST_MBPS or k.mbps > MOST_MBPS:
                raise TopologyError(f"{where}: capacity {k.lanes} x {k.lane_mbps} MB/s; expected at most {MOST_MBPS} "
                                    "MB/s in all, correct it")  # fmt: skip
            if (k.src, k.dst, k.kind) in seen:
                raise TopologyError(f"{where}: a second {k.kind} link on this pair; add its lanes to the first")
            seen.add((k.src, k.dst, k.kind))
        for j, switch in enumerate(self.switches):
            if switch.sharp and switch.kind not in SHARP_KINDS:
                raise TopologyError(
                    f"{self.name}: switches[{j}] of kind {switch.kind} is sharp; expected kind "
                    f"{' or '.join(SHARP_KINDS)}, which have hardware for it: leave sharp out, or correct the kind"
                )
        for i, card in enumerate(self.cards):
            if not (0 <= card.vertex < top and 1 <= card.mbps <= MOST_MBPS):
                raise TopologyError(
                    f"{self.name}: cards[{i}] at vertex {card.vertex} with {card.mbps} MB/s: vertices are 0..{top - 1} "
                    f"and rates 1..{MOST_MBPS} MB/s; correct the card"
                )
        return self

    _consistent = check

    def _texts(self) -> Iterator[str]:
        """All that people gave a name to."""
        yield self.name
        for d in self.devices:
            yield from (d.name, d.host, d.uuid, d.bus)
        yield from (switch.name for switch in self.switches)
        yield from (card.name for card in self.cards)

    def only(self, kinds: Iterable[str]) -> Topology:
        """The same devices with only the links of these kinds, and the switches that they reach."""
        wanted = set(kinds)
        return self._rebuild(range(self.n), [k for k in self.links if k.kind in wanted], self.name)

    def subset(self, indices: Sequence[int]) -> Topology:
        """The machine with only these devices, given by their ranks here, in this order.

        Raises:
            TopologyError: for an unknown or repeated device, or an empty list.
        """
        bad = [i for i in indices if not 0 <= i < self.n]
        if bad or not indices or len(set(indices)) != len(indices):
            raise TopologyError(
                f"{self.name}: cannot take devices {quoted(list(indices))}: expected different numbers of "
                f"0..{self.n - 1}, at least one; correct the list"
            )
        name = self.name if list(indices) == list(range(self.n)) else f"{self.name}[{','.join(map(str, indices))}]"
        return self._rebuild(indices, self.links, name)

    def drop_link(self, a: int, b: int) -> Topology:
        """The same machine without the direct links between vertices ``a`` and ``b``, both ways, all kinds.

        Raises:
            TopologyError: if there is none.
        """
        kept = tuple(k for k in self.links if {k.src, k.dst} != {a, b})
        if len(kept) == len(self.links):
            raise TopologyError(f"{self.name}: no link between {a} and {b}; `blinkmpi topo` lists the links")
        return replace(self, links=kept, name=f"{self.name}-{a}-{b}")

    def scale(self, kind: str, factor: Fraction | float | str) -> Topology:
        """The same machine with every link of ``kind`` at ``factor`` of its rate.

        Raises:
            TopologyError: for a kind that is not there, or a factor that leaves nothing.
        """
        f = Fraction(factor)
        if kind not in self.kinds():
            raise TopologyError(
                f"{self.name}: has no link of kind {quoted(kind)}; it has {', '.join(self.kinds()) or 'none'}"
            )
        if f <= 0:
            said = f"factor {brief(str(factor))} for {kind}"
            raise TopologyError(f"{self.name}: {said}; expected more than 0, or use drop_link")
        slower = (replace(k, lane_mbps=max(1, int(k.lane_mbps * f))) if k.kind == kind else k for k in self.links)
        return replace(self, links=tuple(slower), name=f"{self.name}*{kind}={brief(str(f))}").check()

    def at_rate(self, kind: str, mbps: int) -> Topology:
        """The same machine with every link of ``kind``, and for ``net`` every network card, at ``mbps`` a lane.

        Raises:
            TopologyError: for a kind that is not there, or an impossible rate.
        """
        if kind not in self.kinds() and not (kind == "net" and self.cards):
            has = ", ".join(self.kinds()) or "none"
            raise TopologyError(f"{self.name}: has no link of kind {quoted(kind)} to give a rate; it has {has}")
        links = (replace(k, lane_mbps=mbps, origin="given") if k.kind == kind else k for k in self.links)
        cards = tuple(replace(card, mbps=mbps) for card in self.cards) if kind == "net" else self.cards
        return replace(self, links=tuple(links), cards=cards).check()

    def with_sharp(self, kinds: Collection[str]) -> Topology:
        """The same machine whose switches of these kinds reduce and multicast, and no others.

        Raises:
            TopologyError: for a kind of which it has no switch, or that has no hardware for it.
        """
        there = {s.kind for s in self.switches}
        for kind in kinds:
            if kind not in SHARP_KINDS or kind not in there:
                able = " and ".join(k for k in SHARP_KINDS if k in there) or "none"
                raise TopologyError(
                    f"{self.name}: no switch of kind {quoted(kind)} that can reduce and multicast (SHARP); of its "
                    f"kinds of switches these can: {able}"
                )
        return replace(self, switches=tuple(replace(s, sharp=s.kind in kinds) for s in self.switches)).check()

    def boxes(self, count: int) -> Topology:
        """So many copies of this machine, joined by their network cards; the network has no limit of its own.

        Raises:
            TopologyError: if it has no cards, or several nodes and their network already.
        """
        if count == 1:
            return self
        if len(self.nodes) > 1:
            raise TopologyError(f"{self.name}: cannot take {count} of it: it has {len(self.nodes)} nodes already; give "
                                "a description of one node")  # fmt: skip
        if not self.cards:
            raise TopologyError(
                f"{self.name}: cannot join {count} of it: it has no network card whose rate is known; add one to the "
                'file (NCCL\'s XML: <nic><net name="eth0" speed="100000"/></nic> in a <cpu>, JSON: "cards")'
            )
        if self.n * count > MOST_DEVICES:
            raise TopologyError(f"{self.name}:{count} has {self.n * count} devices; expected at most {MOST_DEVICES}")
        n, m = self.n, len(self.switches)
        net = count * (n + m)

        def at(box: int, vertex: int) -> int:
            return box * n + vertex if vertex < n else count * n + box * m + vertex - n

        rates: dict[int, list[int]] = {}
        for card in self.cards:
            rates.setdefault(card.vertex, []).append(card.mbps)
        ports = [(v, len(r), r[0]) if len(set(r)) == 1 else (v, 1, sum(r)) for v, r in sorted(rates.items())]
        links: list[Link] = []
        for box in range(count):
            links += [replace(k, src=at(box, k.src), dst=at(box, k.dst)) for k in self.links]
            for vertex, lanes, mbps in ports:
                ends = at(box, vertex), net
                links += [Link(*pair, "net", lanes, mbps) for pair in (ends, ends[::-1])]
        names = [self.vertex_label(v) for v in range(n, n + m)]
        named = [*zip(self.switches, names, strict=True)]
        switches = (replace(s, node=box, name=f"{name}@{box}") for box in range(count) for s, name in named)
        return Topology(
            name=f"{self.name}:{count}",
            devices=tuple(replace(d, node=box) for box in range(count) for d in self.devices),
            switches=(*switches, Switch("net", -1, "network")),
            links=tuple(links),
            source=self.source,
            remarks=self.remarks,
        ).check()

    def _rebuild(self, indices: Sequence[int], links: Sequence[Link], name: str) -> Topology:
        """Renumber to ``indices``, with these links, and drop switches that no longer lie between two devices.

        The switches of nodes that are left out go with them, and the network when one node is left of several.
        """
        left = {self.devices[i].node for i in indices}
        out = set(self.nodes) - left
        alone = bool(out) and len(left) == 1
        kept = (s.node not in out and not (s.kind == "net" and alone) for s in self.switches)
        alive = {*indices, *compress(count(self.n), kept)}
        while True:  # remove switches with fewer than two neighbours left
            near: dict[int, set[int]] = {v: set() for v in alive}
            for k in links:
                if k.src in alive and k.dst in alive:
                    near[k.src].add(k.dst)
                    near[k.dst].add(k.src)
            least = {v: 1 if self.switches[v - self.n].kind == "memory" else 2 for v in alive if v >= self.n}
            lonely = {v for v, count in least.items() if len(near[v]) < count}
            if not lonely:
                break
            alive -= lonely
        switches = sorted(v for v in alive if v >= self.n)
        number = {old: new for new, old in enumerate([*indices, *switches])}
        inside = (k for k in links if k.src in number and k.dst in number)
        cards = (replace(card, vertex=self._nearest(card.vertex, alive)) for card in self.cards)
        return Topology(
            name=name,
            devices=tuple(self.devices[i] for i in indices),
            switches=tuple(self.switches[v - self.n] for v in switches),
            links=tuple(replace(k, src=number[k.src], dst=number[k.dst]) for k in inside),
            source=self.source,
            cards=tuple(replace(card, vertex=number[card.vertex]) for card in cards),
            remarks=self.remarks,
        )

    def _nearest(self, start: int, alive: Collection[int]) -> int:
        """The vertex that is left nearest to ``start``, where a card goes whose own place is left out."""
        queue = {start: None}
        for v in (todo := list(queue)):
            if v in alive:
                return v
            fresh = [k.dst for k in self.links if k.src == v and k.dst not in queue]
            queue |= dict.fromkeys(fresh)
            todo += fresh
        return min(alive)
