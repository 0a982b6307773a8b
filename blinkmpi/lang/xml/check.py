"""Judge MSCCL's XML: structure, order, races and results; what is proved is a :class:`~blinkmpi.lang.flow.Flow`.

``blinkmpi lang check`` prints the report. Each part needs the one before it: only a file of sound structure has an
order, only one that can end has values, and only one without races has one result. Pure functions.
"""

from typing import ClassVar

from ...errors import PlanError
from ...trees.tree import ROOTED
from ...util.codec import Document
from ...util.text import plural
from ..flow import Flow, Goal, several
from .file import SLOTS, XmlAlgorithm
from .order import cycle, cycle_text, order, slots_needed
from .values import Execution, XmlResults, custom_goal, results
from .wiring import Fault, Wiring, goal_of_file, wire

KINDS = ("structure", "deadlock", "race", "read", "result")  # of faults, in the order in which they are looked for


class XmlReport(Document, frozen=True):
    """What the checker found.

    Args:
        root: of a collective that has one: the file's, or the rank for which the fewest places are wrong.
        slots: messages that a connection is taken to hold.
        slots_needed: the fewest with which all steps can end; None if no number is enough, or the structure is wrong.
        slots_by_chunk: the fewest where chunks are so large that each takes a slot of its own. A file that needs more
            of these than ``slots`` may be proved all the same; it is for short vectors alone.
        unused: steps of which nothing reaches a result.
        computes: for a custom collective, what is in each place of the outputs.
    """

    KIND: ClassVar[str] = "lang_check"
    VERSION: ClassVar[int] = 1

    source: str
    name: str
    collective: str
    root: int
    ranks: int
    chunks: int
    protocol: str
    in_place: bool
    out_of_place: bool
    blocks: int
    steps: int
    slots: int
    slots_needed: int | None
    slots_by_chunk: int | None
    proved: bool
    faults: tuple[Fault, ...]
    unused: tuple[str, ...]
    computes: tuple[str, ...]


def judge(algorithm: XmlAlgorithm, *, source: str = "", slots: int | None = None) -> tuple[XmlReport, Flow | None]:
    """Check a file; the report, and what it computes if that is right.

    Args:
        source: the file's name, for the report.
        slots: messages that a connection holds; by default those of the protocol.
    """
    wiring, faults = wire(algorithm)
    allowed, needed = slots or SLOTS[algorithm.protocol], None
    found: list[tuple[bool, Execution, XmlResults]] = []
    root = algorithm.root
    if wiring is not None:
        needed = slots_needed(wiring)
        faults += _deadlock(wiring, allowed, needed)
        steps = order(wiring)
        if steps is not None and not faults:
            for in_place in [False] * algorithm.out_of_place + [True] * algorithm.in_place:
                found.append((in_place, *_executed(algorithm, wiring, steps, in_place=in_place)))
            faults += _faults(found)
            root = found[0][2].flow.goal.root
    unused: tuple[str, ...] = ()
    if wiring is not None and found and not any(fault.kind == "race" for fault in faults):
        used = frozenset[int]().union(*(r.used for _, _, r in found))
        unused = tuple(f.place for i, f in enumerate(wiring.steps) if i not in used and f.step.type != "nop")
    flow = found[0][2].flow.prove() if found and not faults else None
    report = XmlReport(
        source=source,
        name=algorithm.name,
        collective=algorithm.collective,
        root=root,
        ranks=len(algorithm.gpus),
        chunks=algorithm.chunks,
        protocol=algorithm.protocol,
        in_place=algorithm.in_place,
        out_of_place=algorithm.out_of_place,
        blocks=sum(len(gpu.blocks) for gpu in algorithm.gpus),
        steps=algorithm.steps,
        slots=allowed,
        slots_needed=needed,
        slots_by_chunk=None if wiring is None else slots_needed(wiring, by_chunk=True),
        proved=flow is not None,
        faults=tuple(faults),
        unused=unused,
        computes=_computes(flow.goal) if flow is not None and algorithm.collective == "custom" else (),
    )
    return report, flow


def flow_of(algorithm: XmlAlgorithm, *, source: str = "") -> Flow:
    """What a file computes, if it is right.

    Raises:
        PlanError: with the first thing that is wrong.
    """
    report, flow = judge(algorithm, source=source)
    if flow is None:
        more = f" (and {plural(len(report.faults) - 1, 'more fault')})" if len(report.faults) > 1 else ""
        raise PlanError(f"{source or algorithm.name}: {report.faults[0].text}{more}; see blinkmpi lang check")
    return flow


def _deadlock(wiring: Wiring, allowed: int, needed: int | None) -> list[Fault]:
    if needed is not None and needed <= allowed:
        return []
    found = cycle(wiring, None if needed is None else allowed)
    if needed is None:
        text = "steps wait for each other, whatever a connection holds: "
    else:
        text = (f"steps wait for each other where a connection holds {plural(allowed, 'message')}; with {needed} they "
                "do not: ")  # fmt: skip
    return [Fault("deadlock", text + cycle_text(wiring, found), tuple(wiring.steps[w.step].place for w in found))]


def _executed(
    algorithm: XmlAlgorithm, wiring: Wiring, steps: list[int], *, in_place: bool
) -> tuple[Execution, XmlResults]:
    """Run a file; where it does not say its root, for the rank for which the fewest places are wrong."""
    if algorithm.collective == "custom":
        execution = Execution(algorithm, wiring, steps, None, in_place=in_place)
        return execution, results(execution, custom_goal(algorithm, execution))
    roots = [algorithm.root]
    if algorithm.collective in ROOTED and algorithm.root < 0:
        roots = list(range(len(algorithm.gpus)))
    tried: list[tuple[Execution, XmlResults]] = []
    for root in roots:
        goal = goal_of_file(algorithm, root)
        assert goal is not None
        execution = Execution(algorithm, wiring, steps, goal, in_place=in_place)
        tried.append((execution, results(execution, goal)))
    return min(tried, key=lambda pair: len(pair[0].unwritten) + len(pair[1].faults))


def _faults(found: list[tuple[bool, Execution, XmlResults]]) -> list[Fault]:
    """What is wrong in the calls out of place and in place; results only where no race leaves them open."""
    faults: dict[Fault, list[bool]] = {}
    for in_place, execution, result in found:
        own = list(execution.faults())
        if not any(fault.kind == "race" for fault in own):
            own += result.faults
        for fault in own:
            faults.setdefault(fault, []).append(in_place)
    named = []
    for fault, calls in faults.items():
        only = "" if len(calls) == len(found) else "called in place: " if calls[0] else "called out of place: "
        named.append(Fault(fault.kind, only + fault.text, fault.steps))
    return sorted(named, key=lambda fault: KINDS.index(fault.kind))


def _computes(goal: Goal) -> tuple[str, ...]:
    return tuple(
        f"rank {rank}: chunk {chunk} of its output is {several(want)}"
        for rank, of in enumerate(goal.wanted)
        for chunk, want in enumerate(of)
        if want
    )
