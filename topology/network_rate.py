"""Measure the network rate of each node: the nodes' first ranks exchange messages in pairs (Blink section 3, "probe").

In each round every node has one partner. The best rate at which it receives from any of them counts as the rate of its
link to the network, in each direction. Nodes whose rates are almost equal get the same one: noise would make a
needlessly uneven plan that changes from run to run.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from ..util.together import Comm
from .model import Topology

ROUNDS = 8  # partners that a node tries at most
FIRST_BYTES, BYTES = 64 << 10, 4 << 20  # the message that opens a connection, the messages that are timed
ALIKE = 0.85  # rates within this factor of the fastest of a group are one


class MessagingComm(Comm, Protocol):
    """A communicator that also sends buffers, by mpi4py's method for them."""

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int, /) -> None:
        """Send one buffer and receive another."""


def net_rate(comm: MessagingComm, firsts: Sequence[int]) -> int | None:
    """MB/s of this rank's node to and from the network; None for ranks that are not the first of a node.

    Args:
        firsts: the first ranks of all nodes, ascending, all of which call this.
    """
    if comm.rank not in firsts or len(firsts) < 2:
        return None
    import numpy as np

    here, vector = firsts.index(comm.rank), np.ones(2 * BYTES, np.uint8)
    best = 0.0
    for peer in partners(here, len(firsts)):
        comm.Sendrecv(vector[:FIRST_BYTES], firsts[peer], 0, vector[BYTES : BYTES + FIRST_BYTES], firsts[peer], 0)
        for sends in (here < peer, here > peer):  # in turn: messages in both directions at once may disturb each other
            comm.Sendrecv(vector[:1], firsts[peer], 0, vector[BYTES : BYTES + 1], firsts[peer], 0)
            sent, received = (BYTES, 0) if sends else (0, BYTES)
            since = time.perf_counter()
            comm.Sendrecv(vector[:sent], firsts[peer], 0, vector[BYTES : BYTES + received], firsts[peer], 0)
            if received:  # a message that was only sent may still be under way
                best = max(best, BYTES / (time.perf_counter() - since) / 1e6)
    return max(1, round(best))


def partners(here: int, n: int) -> list[int]:
    """The partners of number ``here`` of ``n``, round by round; in a round everybody has at most one (circle method).

    >>> [partners(i, 4) for i in range(4)]
    [[3, 1, 2], [2, 0, 3], [1, 3, 0], [0, 2, 1]]
    """
    circle = n - 1 + n % 2  # an odd number; all but the last one sit in it
    found: list[int] = []
    for turn in range(min(circle, ROUNDS)):
        middle = turn * (circle + 1) // 2 % circle
        peer = middle if here == circle else circle if here == middle else (turn - here) % circle
        if peer < n:  # else no partner in this round
            found.append(peer)
    return found


def even_out(rates: Sequence[int]) -> list[int]:
    """Replace almost equal rates by their mean; all to two digits.

    >>> even_out([1021, 98, 103, 24])
    [1000, 100, 100, 24]
    """
    order = sorted(range(len(rates)), key=lambda i: -rates[i])
    found = list(rates)
    while order:
        group = [i for i in order if rates[i] >= ALIKE * rates[order[0]]]
        order = order[len(group) :]
        mean = rounded(sum(rates[i] for i in group) // len(group))
        for i in group:
            found[i] = mean
    return found


def rounded(mbps: int, digits: int = 2) -> int:
    """A rate with this many significant digits, at least 1 MB/s."""
    unit: int = 10 ** max(0, len(str(mbps)) - digits)
    return max(1, (mbps + unit // 2) // unit * unit)


def net_rates(topology: Topology) -> dict[int, int]:
    """MB/s of each node to the network, where that was measured."""
    found: Counter[int] = Counter()
    for link in topology.links:
        if link.kind == "net" and link.origin == "measured" and (node := topology.homes[link.src]) >= 0:
            found[node] += link.mbps
    return dict(found)


def with_net(topology: Topology, rates: Mapping[int, int]) -> Topology:
    """The machine with these rates between its nodes, divided evenly among the links of each node."""
    home = topology.homes
    ends = [(k, max(home[k.src], home[k.dst])) for k in topology.links]
    many = Counter(node for k, node in ends if k.kind == "net" and home[k.src] >= 0)
    links = [
        replace(k, lanes=1, lane_mbps=max(1, rates[node] // many[node]), origin="measured")
        if k.kind == "net" and node in rates
        else k
        for k, node in ends
    ]
    return replace(topology, links=tuple(links))
