"""Maximum flow in exact integers (Dinic 1970), its minimum cut, and the paths that it consists of.

Python integers, so capacities scaled by any rational stay exact. Arcs are visited in the order in which they were
added, so the result is the same on every rank.
"""

from collections.abc import Iterator


class MaxFlow:
    """A flow network on vertices ``0..size-1``; arc ``2i`` goes forward, ``2i + 1`` is its residual arc."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._head: list[int] = []
        self._left: list[int] = []
        self._out: list[list[int]] = [[] for _ in range(size)]

    def arc(self, u: int, v: int, capacity: int) -> int:
        """Add an arc and return its number."""
        number = len(self._head)
        self._head += [v, u]
        self._left += [capacity, 0]
        self._out[u].append(number)
        self._out[v].append(number + 1)
        return number

    def used(self, number: int) -> int:
        """The flow on arc ``number``."""
        return self._left[number ^ 1]

    def run(self, source: int, sink: int) -> int:
        """Push as much as fits and return the amount; a second call returns what it adds."""
        total = 0
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return total
            at = [0] * self.size
            while amount := self._augment(source, sink, level, at):
                total += amount

    def source_side(self, source: int) -> set[int]:
        """After :meth:`run`: the source's side of the minimum cut nearest to the source."""
        level = self._levels(source)
        return {v for v in range(self.size) if level[v] >= 0}

    def _levels(self, source: int) -> list[int]:
        level = [-1] * self.size
        level[source] = 0
        queue = [source]
        for u in queue:
            for a in self._out[u]:
                v = self._head[a]
                if self._left[a] and level[v] < 0:
                    level[v] = level[u] + 1
                    queue.append(v)
        return level

    def _augment(self, source: int, sink: int, level: list[int], at: list[int]) -> int:
        """Push along one shortest path; ``at`` remembers which arcs of this phase are spent."""
        path: list[int] = []
        u = source
        while u != sink:
            while at[u] < len(self._out[u]):
                a = self._out[u][at[u]]
                if self._left[a] and level[self._head[a]] == level[u] + 1:
                    break
                at[u] += 1
            else:  # dead end: step back, and never take that arc again in this phase
                if not path:
                    return 0
                u = self._head[path.pop() ^ 1]
                at[u] += 1
                continue
            path.append(a)
            u = self._head[a]
        amount = min(self._left[a] for a in path)
        for a in path:
            self._left[a] -= amount
            self._left[a ^ 1] += amount
        return amount

    def paths(self, source: int, sink: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Decompose the flow into simple paths with their amounts; cycles are dropped."""
        while True:
            walk: list[int] = []
            seen = {source: 0}
            u = source
            while u != sink:
                a = next((a for a in self._out[u] if not a & 1 and self.used(a)), None)
                if a is None:
                    return
                u = self._head[a]
                walk.append(a)
                if u in seen:  # a cycle carries nothing to the sink
                    self._take_away(walk[seen[u] :])
                    walk = walk[: seen[u]]
                    seen = {v: i for v, i in seen.items() if i <= len(walk)}
                seen[u] = len(walk)
            yield (source, *(self._head[a] for a in walk)), self._take_away(walk)

    def _take_away(self, arcs: list[int]) -> int:
        """Lower the flow on ``arcs`` until one of them carries none; return by how much."""
        amount = min(self.used(a) for a in arcs)
        for a in arcs:
            self._left[a] += amount
            self._left[a ^ 1] -= amount
        return amount
