"""``Predictor``: how long a call takes that goes by a row of the selection table. ``ByLinks`` predicts by links. Pure.

What kernels of GPUs cost predicts in :mod:`.gpus.kernel_times`, what timed steps of CPU ranks cost in ``forecast``,
above this package. No predictor is :mod:`..program.estimate`, by which the table is filled: it is asked for sizes
before there is a call, and calls of these sizes need not exist, as blocks have whole elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from ..program.call import Call
from ..program.cost_model import Price, price
from ..program.ir import Program
from ..topology.model import Topology
from .plan import ONE_SHOTS, Plan, Rule

Basis = Literal["links", "steps", "kernels"]  # rates of links or copies; timed steps of CPU ranks; kernels of GPUs


class Predictor(Protocol):
    """Predicts the time of calls; ``basis`` is what from."""

    @property
    def basis(self) -> Basis: ...

    def seconds(self, call: Call, rule: Rule) -> float | None:
        """Seconds of a call by a row of the table; None where this cannot say."""


@dataclass(frozen=True)
class ByLinks:
    """By a simulation at the rates of the machine's links, or of its ranks' copies.

    Args:
        program: makes the program of a call by a row; not asked for one of a user's algorithms.
    """

    plan: Plan
    topology: Topology
    program: Callable[[Call, Rule], Program]
    basis: ClassVar[Basis] = "links"

    def price(self, call: Call, rule: Rule) -> Price | None:
        """The time, and how long each link works; None for one shot between nodes, which follows no links of trees.

        Raises:
            PlanError: if the plan lacks the scheme.
        """
        made = self.plan.algorithm(call.collective, call.root, rule.scheme)
        if made is not None:
            return made.price(call, self.topology, chunk_bytes=rule.chunk_bytes, depth=rule.depth)
        packing = self.plan.packing(call.collective, call.root, rule.scheme)
        if rule.protocol in ONE_SHOTS and not packing.multicast:  # messages of MPI from node to node
            return None
        return price(self.program(call, rule), packing, self.topology)

    def seconds(self, call: Call, rule: Rule) -> float | None:
        """Those of :meth:`price`."""
        found = self.price(call, rule)
        return None if found is None else found.seconds
