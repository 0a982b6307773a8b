"""``Stats``: what the calls of one rank have moved, by collective, protocol, tree, link and peer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..util.codec import Document, Value
from ..util.text import amount_text, time_text
from .counters import OTHERS, Count, Name

UNKNOWN = "not measured"


class CollectiveStats(Value, frozen=True):
    """Calls of a collective, and the bytes of their largest buffers."""

    collective: str
    calls: int
    bytes: int


class ProtocolStats(Value, frozen=True):
    """Calls by a protocol, and the bytes that this rank sent by it; None where that is not known."""

    protocol: str
    calls: int
    bytes: int | None


class TreeStats(Value, frozen=True):
    """Bytes that this rank sent along a tree of a plan, and the time of its steps for it."""

    collective: str
    root: int
    scheme: str
    tree: int
    calls: int
    bytes: int
    busy_s: float | None


class LinkStats(Value, frozen=True):
    """Bytes from one rank to another, one of which is this one, and the time of its steps that moved them.

    A step that serves several links counts for each.
    """

    source: int
    target: int
    calls: int
    bytes: int
    busy_s: float | None


class WaitStats(Value, frozen=True):
    """How long this rank waited for another in calls; -1 for messages from and to other nodes."""

    rank: int
    wait_s: float


class Stats(Document, frozen=True):
    """What the calls of ``rank`` have moved since the communicator was made.

    ``timed`` says whether times were measured: then ``busy_s`` are times and ``waits`` is complete.
    """

    KIND: ClassVar = "stats"
    VERSION: ClassVar = 1
    rank: int
    n: int
    timed: bool
    collectives: tuple[CollectiveStats, ...] = ()
    protocols: tuple[ProtocolStats, ...] = ()
    trees: tuple[TreeStats, ...] = ()
    links: tuple[LinkStats, ...] = ()
    waits: tuple[WaitStats, ...] = ()

    @property
    def calls(self) -> int:
        """Calls in all."""
        return sum(each.calls for each in self.collectives)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent to others."""
        return sum(each.bytes for each in self.links if each.source == self.rank)

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank got from others."""
        return sum(each.bytes for each in self.links if each.target == self.rank)

    def __str__(self) -> str:
        parts = [f"rank {self.rank} of {self.n}: {self.calls} calls, {amount_text(self.sent_bytes)} sent, "
                 f"{amount_text(self.received_bytes)} received"]  # fmt: skip
        parts.append(_table(("collective", "calls", "bytes"), [
            (c.collective, str(c.calls), amount_text(c.bytes)) for c in self.collectives
        ]))  # fmt: skip
        parts.append(_table(("protocol", "calls", "sent"), [
            (p.protocol, str(p.calls), UNKNOWN if p.bytes is None else amount_text(p.bytes)) for p in self.protocols
        ]))  # fmt: skip
        parts.append(_table(("link", "bytes", "busy"), [
            (_ends(k), amount_text(k.bytes), _time(k.busy_s)) for k in self.links
        ]))  # fmt: skip
        parts.append(_table(("tree", "sent", "busy"), [
            (tree_text(t), amount_text(t.bytes), _time(t.busy_s)) for t in self.trees
        ]))  # fmt: skip
        waits = [(f"rank {w.rank}" if w.rank >= 0 else "other nodes", _time(w.wait_s)) for w in self.waits]
        parts.append(_table(("waited for", "time"), waits))
        if not self.timed:
            parts.append("times are not measured; BLINKMPI_TIMES=1 or BLINKMPI_TRACE measures them")
        return "\n\n".join(part for part in parts if part)


def stats_of(rank: int, n: int, counts: Mapping[Name, Count], *, timed: bool) -> Stats:
    """The counters of a rank, in words."""
    found: dict[str, list[Any]] = {kind: [] for kind in ("collective", "protocol", "tree", "link", "wait")}
    for name, count in counts.items():
        kind, *what = name
        if not (count.calls or count.bytes or count.ns):  # of calls that might have
            continue
        others = what == [OTHERS]
        busy = count.ns / 1e9 if timed else None
        made: Any
        if kind == "collective":
            made = CollectiveStats(what[0], count.calls, count.bytes)
        elif kind == "protocol":
            made = ProtocolStats(what[0], count.calls, None if what[0] == "mpi" else count.bytes)
        elif kind == "tree":
            collective, root, scheme, tree = (OTHERS, -1, "", -1) if others else what
            made = TreeStats(collective, root, scheme, tree, count.calls, count.bytes, busy)
        elif kind == "link":
            source, target = (-1, -1) if others else (what[0], what[1])
            made = LinkStats(source, target, count.calls, count.bytes, busy)
        else:
            made = WaitStats(-1 if isinstance(what[0], str) else what[0], count.ns / 1e9)
        found[kind].append(made)
    return Stats(rank, n, timed, *(tuple(found[kind]) for kind in found))


def tree_text(tree: TreeStats) -> str:
    """Which tree it is, in words."""
    if tree.tree < 0:
        return "others"
    root = f" from rank {tree.root}" if tree.root >= 0 else ""
    return f"{tree.collective}{root}, {tree.scheme} {tree.tree}"


def _ends(link: LinkStats) -> str:
    return f"{link.source} -> {link.target}" if link.source >= 0 else "others"


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else time_text(seconds)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as they must be, the first to the left, the others to the right; nothing without rows."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
             for row in (heads, *rows)]  # fmt: skip
    return "\n".join("  ".join(line) for line in lines)
