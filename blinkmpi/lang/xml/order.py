"""Order of the steps of MSCCL's XML: what must come before what, whether all can end, and in how few slots.

A connection has a few slots for messages, so send ``k`` waits for receive ``k - slots``. A file runs in parts of the
user's buffer, one after another: all that a step waits for is in its own part or an earlier one, and within a part all
look alike, so a file that can end for one part ends for any number. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .wiring import Wiring


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that waits, for which other one, and why."""

    step: int
    other: int
    why: str


def order(wiring: Wiring, slots: int | None = None) -> list[int] | None:
    """An order in which all steps can run; None if there is none.

    Args:
        slots: messages that a connection holds; None for any number.
    """
    found = _run(_waits(wiring, slots))
    return found if len(found) == len(wiring.steps) else None


def slots_needed(wiring: Wiring) -> int | None:
    """The fewest slots with which all steps can end; None if no number of them is enough."""
    if order(wiring) is None:
        return None
    low, high = 1, max((len(out) for out, _ in wiring.connections.values()), default=1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if order(wiring, middle) is not None else (middle + 1, high)
    return low


def cycle(wiring: Wiring, slots: int | None) -> list[Waiting]:
    """Steps that wait for each other in a circle, each for the next one; empty if :func:`order` finds an order."""
    waits = _waits(wiring, slots)
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


def _waits(wiring: Wiring, slots: int | None) -> list[list[tuple[int, str]]]:
    """For each step, the steps that it waits for, and why."""
    reasons = (
        (wiring.before, "the step before it"),
        (wiring.awaited, "named in depid and deps"),
        (wiring.sender, "which sends its message"),
    )
    waits = [[(of[i], why) for of, why in reasons if of[i] >= 0] for i in range(len(wiring.steps))]
    for out, into in wiring.connections.values() if slots is not None else ():
        for i, j in zip(out[slots:], into, strict=False):
            waits[i].append((j, "whose receipt frees a slot"))
    return waits


def _run(waits: Sequence[Sequence[tuple[int, str]]]) -> list[int]:
    """The steps that can run, in an order in which they can."""
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
