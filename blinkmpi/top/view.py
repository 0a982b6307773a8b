"""How a look at a communicator is shown: as tables, or as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..transport.stats import LinkStats, Stats, TreeStats, tree_text
from ..util.codec import plain
from ..util.text import amount_text, plural, time_text
from .look import Look

SHOWN = 12  # rows of a table at most
Key = tuple[Any, ...]


def rates(now: Look, before: Look | None) -> tuple[float, dict[int, Stats]]:
    """Seconds since an earlier look (0 without one), and what the ranks' stats were then."""
    if before is None:
        return 0.0, {}
    return now.seconds - before.seconds, {each.rank: each.stats for each in before.ranks}


def links_of(stats: Sequence[Stats]) -> dict[Key, LinkStats]:
    """The links of a job by their ends: the sender's bytes, else the receiver's; the longer of their busy times."""
    found: dict[Key, LinkStats] = {}
    for each in stats:
        for link in each.links:
            ends = link.source, link.target
            other = found.get(ends)
            if other is None:
                found[ends] = link
                continue
            sent = link if each.rank == link.source else other
            busy = None if link.busy_s is None or other.busy_s is None else max(link.busy_s, other.busy_s)
            found[ends] = LinkStats(*ends, sent.calls, sent.bytes, busy)
    return found


def trees_of(stats: Sequence[Stats]) -> dict[Key, TreeStats]:
    """The trees of a job: what all its ranks sent along them, and the longest busy time of a rank."""
    found: dict[Key, TreeStats] = {}
    for each in stats:
        for tree in each.trees:
            key = tree.collective, tree.root, tree.scheme, tree.tree
            other = found.get(key)
            if other is None:
                found[key] = tree
                continue
            busy = None if tree.busy_s is None or other.busy_s is None else max(tree.busy_s, other.busy_s)
            found[key] = TreeStats(*key, max(tree.calls, other.calls), tree.bytes + other.bytes, busy)
    return found


def frame(looks: Sequence[Look], before: Sequence[Look | None]) -> RenderableType:
    """All communicators as tables; rates are of the time since the looks before."""
    parts: list[RenderableType] = []
    for number, (now, then) in enumerate(zip(looks, before, strict=True)):
        parts += _communicator(number, now, then)
    return Group(*parts)


def _communicator(number: int, now: Look, then: Look | None) -> list[RenderableType]:
    seconds, old = rates(now, then)
    here = f", {len(now.ranks)} here" if len(now.ranks) < now.n else ""
    head = f"communicator {number}: {plural(now.n, 'rank')}{here}"
    aborted = f"; dead: {now.aborted} gave up" if now.aborted else ""
    parts: list[RenderableType] = [Text(head + aborted, style="bold red" if aborted else "bold")]
    ranks = _table("rank", "process", "state", "calls", "calls/s", "sent", "received", "in call", "waits for")
    for each in now.ranks[:SHOWN]:
        own, earlier = each.stats, old.get(each.rank)
        rate = f"{(own.calls - earlier.calls) / seconds:.3g}" if earlier and seconds else "-"
        call = f"{each.entered} {each.call}" if each.entered > each.finished else "none"
        ranks.add_row(str(each.rank), str(each.pid), each.state, str(own.calls), rate, amount_text(own.sent_bytes),
                      amount_text(own.received_bytes), call, each.waits or "-")  # fmt: skip
    parts.append(ranks)
    if len(now.ranks) > SHOWN:
        parts.append(Text(f"  and {len(now.ranks) - SHOWN} more ranks"))
    stats = [each.stats for each in now.ranks]
    links, earlier_links = links_of(stats), links_of(list(old.values()))
    table = _table("link", "bytes", "GB/s", "busy")
    for ends, link in sorted(links.items(), key=lambda item: (-item[1].bytes, item[0]))[:SHOWN]:
        past = earlier_links.get(ends)
        rate = f"{(link.bytes - past.bytes) / seconds / 1e9:.3g}" if past and seconds else "-"
        name = f"{ends[0]} -> {ends[1]}" if ends[0] >= 0 else "others"
        table.add_row(name, amount_text(link.bytes), rate, _time(link.busy_s))
    parts += _more(table, len(links), "links")
    trees = trees_of(stats)
    table = _table("tree", "bytes", "busy")
    for tree in sorted(trees.values(), key=lambda t: (-t.bytes, tree_text(t)))[:SHOWN]:
        table.add_row(tree_text(tree), amount_text(tree.bytes), _time(tree.busy_s))
    parts += _more(table, len(trees), "trees")
    waits = sorted(((w.wait_s, s.rank, w.rank) for s in stats for w in s.waits), reverse=True)
    table = _table("rank", "waited for", "time")
    for waited, rank, peer in waits[:SHOWN]:
        table.add_row(str(rank), f"rank {peer}" if peer >= 0 else "other nodes", time_text(waited))
    parts += _more(table, len(waits), "waits")
    if stats and not all(s.timed for s in stats):
        parts.append(Text("times are not measured; BLINKMPI_TIMES=1 measures them", style="dim"))
    return parts


def document(looks: Sequence[Look]) -> dict[str, Any]:
    """The same as JSON's values."""
    return {
        "format": "blinkmpi.top",
        "version": 1,
        "communicators": [
            {
                "n": each.n,
                "pids": list(each.pids),
                "aborted": each.aborted or None,
                "ranks": [
                    {"rank": r.rank, "pid": r.pid, "state": r.state, "entered": r.entered, "finished": r.finished,
                     "call": r.call, "waits_for": r.waits or None, "stats": plain(r.stats)}
                    for r in each.ranks
                ],
            }
            for each in looks
        ],
    }  # fmt: skip


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=head not in ("in call", "waits for"))
    return table


def _more(table: Table, rows: int, what: str) -> list[RenderableType]:
    """A table, and how much it leaves out; nothing for one without rows."""
    if not table.row_count:
        return []
    return [table, *([Text(f"  and {rows - SHOWN} more {what}")] if rows > SHOWN else [])]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else time_text(seconds)
