"""Order of the steps of MSCCL's XML: what must come before what, whether all can end, and in how few slots.

A connection has a few slots, so what is sent waits for the receipt of what was sent that many slots before. A message
takes one slot while its chunks are small together; where they are large, executors send it chunk by chunk, each in a
slot of its own (``maxAllowedCount`` in MSCCL's kernel), and more slots may be needed.

A file runs in parts of the user's buffer, one after another: all that a step waits for is in its own part or an earlier
one, and within a part all look alike, so a file that can end for one part ends for any number. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .wiring import Wiring

Waits = list[list[tuple[int, str]]]  # for each piece of a step, those that it waits for, and why


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that waits, for which other one, and why."""

    step: int
    other: int
    why: str


def order(wiring: Wiring) -> list[int] | None:
    """An order in which all steps can run, with slots enough; None if there is none."""
    found = _run(_waits(wiring, None, _sizes(wiring)))
    return found if len(found) == len(wiring.steps) else None


def slots_needed(wiring: Wiring, *, by_chunk: bool = False) -> int | None:
    """The fewest slots with which all steps can end; None if no number of them is enough.

    Args:
        by_chunk: each chunk of a message takes a slot of its own.
    """
    if order(wiring) is None:
        return None
    size = _sizes(wiring, by_chunk=by_chunk)
    low, high = 1, max((sum(size[i] for i in out) for out, _ in wiring.connections.values()), default=1)
    while low < high:
        middle = (low + high) // 2
        waits = _waits(wiring, middle, size)
        low, high = (low, middle) if len(_run(waits)) == len(waits) else (middle + 1, high)
    return low


def cycle(wiring: Wiring, slots: int | None) -> list[Waiting]:
    """Steps that wait for each other in a circle, each for the next one; empty if all can end.

    Args:
        slots: messages that a connection holds; None for any number.
    """
    waits = _waits(wiring, slots, _sizes(wiring))
    left = set(range(len(waits))) - set(_run(waits))
    if not left:
        return []
    path: list[Waiting] = []
    seen: dict[int, int] = {}
    at = min(left)
    while at not in seen:
        seen[at] = len(path)
        path.append(next(Waiting(at, other, why) for other, why in waits[at] if other in left))
        at = path[-1].other
    return path[seen[at] :]


def _sizes(wiring: Wiring, *, by_chunk: bool = False) -> list[int]:
    """In how many pieces each step is done."""
    return [f.step.count if by_chunk else 1 for f in wiring.steps]


def _waits(wiring: Wiring, slots: int | None, size: Sequence[int]) -> Waits:
    """What waits for what, where step ``i`` is done in ``size[i]`` pieces."""
    first = [0]
    for count in size:
        first.append(first[-1] + count)
    waits: Waits = [[] for _ in range(first[-1])]
    reasons = ((wiring.before, "the step before it"), (wiring.awaited, "named in depid and deps"))
    for i, count in enumerate(size):
        at = first[i]
        waits[at] += [(first[of[i] + 1] - 1, why) for of, why in reasons if of[i] >= 0]
        for k in range(1, count):
            waits[at + k].append((at + k - 1, "the chunk before it"))
        if wiring.sender[i] >= 0:
            sender = first[wiring.sender[i]]
            for k in range(count):
                waits[at + k].append((sender + k, "which sends its message"))
    for out, into in wiring.connections.values() if slots is not None else ():
        sent, received = ([first[i] + k for i in side for k in range(size[i])] for side in (out, into))
        for i, j in zip(sent[slots:], received, strict=False):
            waits[i].append((j, "whose receipt frees a slot"))
    return waits


def _run(waits: Waits) -> list[int]:
    """The pieces that can run, in an order in which they can."""
    after: list[list[int]] = [[] for _ in waits]
    missing = [len(w) for w in waits]
    for i, others in enumerate(waits):
        for other, _ in others:
            after[other].append(i)
    ready = [i for i, count in enumerate(missing) if not count]
    for i in ready:  # it grows
        for j in after[i]:
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
    return ready


def cycle_text(wiring: Wiring, found: Sequence[Waiting], most: int = 12) -> str:
    """One line for each step of a circle."""
    lines = [
        f"{wiring.steps[w.step].place} ({wiring.steps[w.step].step.type}) waits for "
        f"{wiring.steps[w.other].place}, {w.why}"
        for w in found[:most]
    ]
    if len(found) > most:
        lines.append(f"and {len(found) - most} more")
    return "; ".join(lines)
