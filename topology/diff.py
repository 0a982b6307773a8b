"""The differences between two machines: a file and the probe, yesterday's probe and today's. Pure data.

Devices are matched by UUID, else by PCI id, else by rank. Switches have no permanent names, so two are the same if they
have the same kind, node and devices; the others are paired in order.
"""

from collections.abc import Callable, Sequence

from ..util.codec import Value
from .model import Device, Link, Topology

SHARP = ("none", "SHARP")  # what a switch without and with it has


class Difference(Value, frozen=True):
    """One difference; an empty text means that the machine does not have it at all."""

    what: str
    one: str
    other: str


def differences(one: Topology, other: Topology) -> tuple[Difference, ...]:
    """How ``other`` differs from ``one``, sorted by device and switch; empty if plans for both are the same."""
    pairs = _devices(one, other)
    pairs += _switches(one, other, pairs)
    found: list[Difference] = []
    alike: dict[tuple[str, str, str], list[int]] = {}
    for a, b in pairs:
        if a is None or b is None:
            at, vertex = (other, b or 0) if a is None else (one, a)
            label = at.vertex_label(vertex)
            what = "device" if vertex < at.n else "switch"
            found.append(Difference(what, "" if a is None else label, "" if b is None else label))
        elif a < one.n:
            if a != b:
                found.append(Difference(f"rank of {one.vertex_label(a)}", str(a), str(b)))
            for field in ("kind", "node", "name"):
                mine, theirs = (str(getattr(d, field)) for d in (one.devices[a], other.devices[b]))
                if mine != theirs and mine and theirs:
                    alike.setdefault((field, mine, theirs), []).append(a)
        elif one.switches[a - one.n].sharp != other.switches[b - other.n].sharp:
            mine, theirs = (SHARP[t.switches[v - t.n].sharp] for t, v in ((one, a), (other, b)))
            found.append(Difference(f"sums in {one.vertex_label(a)}", mine, theirs))
    for (field, mine, theirs), ranks in alike.items():
        who = "every device" if len(ranks) == one.n > 1 else ", ".join(map(one.vertex_label, ranks))
        found.append(Difference(f"{field} of {who}", mine, theirs))
    there = {b: a for a, b in pairs if a is not None and b is not None}
    ours = {(k.src, k.dst, k.kind): k for k in one.links}
    theirs_by_ours = {(there[k.src], there[k.dst], k.kind): k for k in other.links if k.src in there and k.dst in there}
    shared = set(there.values())
    for key in sorted({*ours, *theirs_by_ours}, key=lambda key: (key[2], key[0], key[1])):
        mine_link, their_link = ours.get(key), theirs_by_ours.get(key)
        if (_text(mine_link) == _text(their_link)) or not {key[0], key[1]} <= shared:
            continue  # of a vertex that only one has, which is reported already
        reverse = (key[1], key[0], key[2])
        same_back = _text(ours.get(reverse)), _text(theirs_by_ours.get(reverse))
        symmetric = same_back == (_text(mine_link), _text(their_link))
        if symmetric and key[0] > key[1]:
            continue
        ends = f"{one.vertex_label(key[0])} {'-' if symmetric else '->'} {one.vertex_label(key[1])}"
        found.append(Difference(f"{key[2]} {ends}", _text(mine_link), _text(their_link)))
    return tuple(found)


Pairs = list[tuple[int | None, int | None]]


def _devices(one: Topology, other: Topology) -> Pairs:
    """Pairs of the same device; devices that only one machine has are paired with None."""
    keys: tuple[Callable[[int, Device], object], ...] = (
        lambda r, d: d.uuid, lambda r, d: (d.host, d.bus) if d.bus else "", lambda r, d: r,
    )  # fmt: skip
    for key in keys:
        mine = {key(r, d): r for r, d in enumerate(one.devices)}
        theirs = {key(r, d): r for r, d in enumerate(other.devices)}
        if "" not in mine and "" not in theirs and (mine.keys() & theirs.keys()):
            pairs: Pairs = [(r, theirs.get(k)) for k, r in mine.items()]
            return pairs + [(None, r) for k, r in theirs.items() if k not in mine]
    raise AssertionError("ranks are numbers from 0: some are the same")


def _switches(one: Topology, other: Topology, devices: Pairs) -> Pairs:
    same = {b: a for a, b in devices if a is not None and b is not None}

    def described(t: Topology, name: Callable[[int], object]) -> list[tuple[int, str, int, frozenset[object]]]:
        near: list[set[object]] = [set() for _ in t.switches]
        for k in t.links:
            if k.src >= t.n and k.dst < t.n:
                near[k.src - t.n].add(name(k.dst))
        return [(t.n + j, s.kind, s.node, frozenset(near[j])) for j, s in enumerate(t.switches)]

    mine = described(one, lambda r: r)
    theirs = described(other, lambda r: same.get(r, f"other {r}"))
    pairs: Pairs = []
    for alike in (slice(1, 4), slice(1, 3)):
        for a in list(mine):
            match = next((b for b in theirs if a[alike] == b[alike]), None)
            if match is not None:
                pairs.append((a[0], match[0]))
                mine.remove(a)
                theirs.remove(match)
    return pairs + [(a[0], None) for a in mine] + [(None, b[0]) for b in theirs]


def _text(link: Link | None) -> str:
    """``2 x 25 GB/s``."""
    return "" if link is None else f"{link.lanes} x {link.lane_mbps / 1000:g} GB/s"


def summary(found: Sequence[Difference]) -> str:
    """``no difference``, ``3 differences``."""
    return "no difference" if not found else f"{len(found)} difference{'s' if len(found) > 1 else ''}"
