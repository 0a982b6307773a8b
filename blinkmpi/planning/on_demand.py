"""A job's plan, of which rank 0 makes a part when a call first needs it: opening a communicator waits for no planning.

A part is what one collective needs for one root. All ranks take it in the same call, so they have the same plan at
every call. Rank 0 alone plans, because what is found depends on how fast the planner runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Self, cast

from ..topology.model import Topology
from ..trees.graph.automorphism import like_roots
from ..trees.tree import ROOTED, Collective
from ..util.lru import LRU
from ..util.together import Comm, from_root, together
from .plan import Plan, Turn

KEPT = 256
Part = tuple[Collective, int]  # -1: a collective without a root


@dataclass(frozen=True)
class Planned:
    """What is planned, for which parts in their order, and what has followed from it for calls.

    ``digest`` is of the parts as they came: where it is the same, the plan is.
    """

    plan: Plan
    parts: tuple[Part, ...] = ()
    digest: bytes = b""
    follows: LRU[tuple[object, ...], Any] = field(default_factory=lambda: LRU(KEPT))


@dataclass
class Latest:
    """What a communicator has planned so far, for whoever looks at it in another thread."""

    planned: Planned


class PlanOnDemand:
    """The plan of a communicator's calls, as far as they need it.

    Args:
        comm: of all ranks; for nothing else while a part is added.
        source: what plans for a collective and root (0 for those without), or a whole plan, to which nothing is added.
    """

    def __init__(self, comm: Comm, machine: Topology, source: Plan | Callable[[Collective, int], Plan]) -> None:
        self._comm, self._machine, self._source = comm, machine, source
        self._changes: list[Callable[[Plan], Plan]] = []
        self._asked: dict[Part, Plan] = {}
        nothing = Plan(machine.name, machine.fingerprint, machine.n, (), ())
        self.latest = Latest(Planned(source if isinstance(source, Plan) else nothing))

    @property
    def known(self) -> Planned:
        """What is planned so far, and for what."""
        return self.latest.planned

    @property
    def plan(self) -> Plan:
        """What is planned so far."""
        return self.latest.planned.plan

    @property
    def parts(self) -> tuple[Part, ...]:
        """For which collectives and roots."""
        return self.latest.planned.parts

    def lacks(self, collective: str, root: int) -> bool:
        """Whether a call of this collective and root has to wait for its part."""
        return not isinstance(self._source, Plan) and _part(collective, root) not in self.parts

    def add(self, collective: str, root: int) -> None:
        """Add the part for a collective and root, made by rank 0; collective, and on every rank an error if on one."""
        part = _part(collective, root)

        def taken() -> Plan:
            plan = Plan.from_json(text, source="plan from rank 0").check(self._machine)
            return self.plan.joined(self._changed(plan), *part)

        text = from_root(self._comm, lambda: self._made(part).to_json(), str)
        plan = together(self._comm, taken)
        digest = blake2b(self.known.digest + text.encode(), digest_size=8).digest()
        self.latest.planned = replace(self.known, plan=plan, parts=(*self.parts, part), digest=digest)

    def like(self, other: Planned) -> None:
        """Begin with the parts that another one has now; the same on every rank."""
        self.latest.planned = other

    def with_parts(self, parts: Iterable[tuple[str, int]]) -> Self:
        """With these parts, too; collective."""
        for part in parts:
            if self.lacks(*part):
                self.add(*part)
        return self

    def change(self, change: Callable[[Plan], Plan]) -> None:
        """Change the plan and the parts that are still to come."""
        self.latest.planned = replace(self.known, plan=change(self.plan))
        self._changes.append(change)

    def about(self, collective: str, root: int) -> Plan:
        """A plan to ask for a call that may never be made: the job's, or what this rank would have planned. Local."""
        part = _part(collective, root)
        if not self.lacks(*part):
            return self.plan
        if part not in self._asked:
            self._asked[part] = self._changed(self._made(part, alone=True))
        return self._asked[part]

    def _changed(self, plan: Plan) -> Plan:
        for change in self._changes:
            plan = change(plan)
        return plan

    def _made(self, part: Part, *, alone: bool = False) -> Plan:
        """The plan of one part; only the turn of a root like one that is there, unless ``alone``."""
        assert not isinstance(self._source, Plan), "a whole plan lacks nothing"
        (collective, root), machine = part, self._machine
        like, image = like_roots(machine, root).get(root, (root, ()))
        if alone or not image or (collective, like) not in self.parts:
            return self._source(collective, max(root, 0))
        return Plan(machine.name, machine.fingerprint, machine.n, (), (), turns=(Turn(root, like, image),))


def _part(collective: str, root: int) -> Part:
    return cast(Collective, collective), root if collective in ROOTED else -1
