"""How a program's slots are best written, found while it runs.

Where two ranks' cores share a cache, a slot is read from it. Where they do not
(other sockets, other core complexes, many virtual machines), fetching a line
that another core has just written is slow, and a slot written past the caches
is read faster from memory. What is best changes with the size and, seen on a
virtual machine, within minutes (its cores may have been moved; that was not
established). So every program times its own calls and tries the other way now
and then. Each rank chooses for the slots that it writes; results do not depend
on it.
"""

from __future__ import annotations

AGAIN = 64  # every so many calls a program tries the other way
FIRST = (1, 1, 0, 0)  # its first calls; each way twice, because a first call finds nothing warm


class SlotStyle:
    """The choice for one program: what its calls took lately, through the caches [0] and past them [1]."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        self.spent_ns: list[float] = [0.0, 0.0]

    def next(self) -> int:
        """1 to write past the caches in the next call, 0 to write through them; the same until one was learned from."""
        if self.count < len(FIRST):
            self.last = FIRST[self.count]
        else:
            self.last = int(self.spent_ns[1] < self.spent_ns[0]) ^ (self.count % AGAIN == 0)
        return self.last

    def learn(self, spent_ns: int) -> None:
        """What the call took. A trial counts in full, as things may have changed since the last."""
        trial = self.count < len(FIRST) or self.count % AGAIN == 0
        share = 1.0 if trial else 0.25
        self.spent_ns[self.last] += share * (spent_ns - self.spent_ns[self.last])
        self.count += 1
