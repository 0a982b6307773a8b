"""The ports by which copies leave and enter boxes: those of a number, or whichever has carried least for what it can.

Where ports are on several switches, a copy keeps to one switch, or else to one rail, if both boxes have a port there. A
port costs a copy what the network card takes, and what its rank takes to hand it on inside the box.
"""

from collections.abc import Sequence

from ..graph.boxes import Box
from ..graph.fabric import Arc

GRAIN = 10**9  # costs of a copy are integers: this over the MB/s of a link


class Ports:
    """What ports have carried.

    Args:
        both: trees are used both ways.
        turns: trees take the ports of their number where all ports are alike.
    """

    def __init__(self, boxes: Sequence[Box], *, both: bool, turns: bool) -> None:
        self.boxes, self.both = boxes, both
        speeds = {(p.out, p.into) for box in boxes for p in box.ports}
        self._places = [[(p.plane, box.vertices.index(p.rank)) for p in box.ports] for box in boxes]  # switch and rail
        rails = {tuple(rail for _, rail in some) for some in self._places}
        self.even = turns and len(speeds) == 1 and len(rails) == 1
        self._sent = [[0] * len(box.ports) for box in boxes]
        self._got = self._sent if both else [[0] * len(box.ports) for box in boxes]
        self._spread = [[0] * len(box.ports) for box in boxes]
        out = [[min(p.out, p.into) if both else p.out for p in box.ports] for box in boxes]
        self._out = [[int(GRAIN / c) if c else GRAIN for c in some] for some in out]
        self._into = self._out if both else [[int(GRAIN / p.into) if p.into else GRAIN for p in b.ports] for b in boxes]
        self._inside = [_inside(box) for box in boxes]
        self._pairs: dict[Arc, list[tuple[int, int]]] = {}

    def first(self, b: int, number: int) -> int:
        """The port at whose rank tree ``number`` begins in a box."""
        many = len(self._sent[b])
        if self.even:
            return number % many
        filled = self._filled(b)
        k = min(range(many), key=lambda i: (filled[i], (i - number) % many))
        self._spread[b][k] += 1
        return k

    def _filled(self, b: int) -> list[int]:
        """How full each port's rank would be of copies inside its box, if it handed on one more."""
        size, spread = self.boxes[b].m, self._spread[b]
        got = sum(spread) + 1 if self.both else 0  # where trees are used both ways, what ranks get counts, too
        return [
            (got + (size - 1 - self.both) * (x + 1)) * cost for x, cost in zip(spread, self._inside[b], strict=True)
        ]

    def between(self, a: int, b: int, number: int) -> tuple[int, int]:
        """The ports by which copy ``number`` leaves box ``a`` and enters box ``b``."""
        if self.even:
            return (number % len(self._sent[a]),) * 2
        sent, got, out, into = self._sent[a], self._got[b], self._out[a], self._into[b]
        if len(sent) == len(got) == 1:
            return 0, 0
        pairs = self._pairs.get((a, b))
        if pairs is None:
            self._pairs[a, b] = pairs = self._pairs_of(a, b)
        entering = [max((x + 1) * c, full) for x, c, full in zip(got, into, self._filled(b), strict=True)]
        if not pairs:
            j = min(range(len(sent)), key=lambda i: ((sent[i] + 1) * out[i], (i - number) % len(sent)))
            k = min(range(len(got)), key=lambda i: (entering[i], (i - number) % len(got)))
        else:
            at = number % len(pairs)
            j, k = min(
                (*pairs[at:], *pairs[:at]), key=lambda pair: max((sent[pair[0]] + 1) * out[pair[0]], entering[pair[1]])
            )
        sent[j] += 1
        got[k] += 1
        self._spread[b][k] += 1
        return j, k

    def _pairs_of(self, a: int, b: int) -> list[tuple[int, int]]:
        """The pairs of ports that lie nearest to each other: on one switch, else on one rail; none if all lie alike."""
        here, there = self._places[a], self._places[b]
        if len({plane for plane, _ in (*here, *there)}) == 1:
            return []
        for side in (0, 1):
            at: dict[int, list[int]] = {}
            for k, place in enumerate(there):
                at.setdefault(place[side], []).append(k)
            if pairs := [(j, k) for j, place in enumerate(here) for k in at.get(place[side], ())]:
                return pairs
        return [(j, k) for j in range(len(here)) for k in range(len(there))]


def _inside(box: Box) -> list[int]:
    """By port, what it costs its rank to hand a copy on inside its box."""
    room: dict[int, int] = {}
    for (u, _), mbps in box.inner.arcs.items():
        room[u] = room.get(u, 0) + mbps
    return [GRAIN // room.get(box.vertices.index(p.rank), GRAIN) for p in box.ports]
