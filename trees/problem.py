"""What a planning method is given and what it gives back; :mod:`.pack` holds the table of methods.

A method is one line of that table: a name, when it fits, and a function from :class:`Problem` to :class:`Solution`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, cast

import msgspec

from ..errors import ArgumentError
from .bounds.certify import certify, quick
from .cluster.boxes import Box, boxes_of, oriented
from .graph.cuts import MAX_VERTICES
from .graph.fabric import Fabric
from .graph.logical import LogicalGraph, logical_graph
from .tree import Certificate, Tree


class MethodOptions(msgspec.Struct, frozen=True):
    """What the methods that are asked for by name can be told; each reads its own.

    Attributes:
        epsilon: ``mwu`` stops within this part of the best rate.
        loss: the part of its rate that ``mwu+ilp`` may give up for fewer trees.
        max_trees, max_depth: limits of ``few``.
        nbytes, switch_seconds: ``hybrid`` moves a vector of this size, and pays this long before its slow links start.
    """

    epsilon: Fraction = Fraction(1, 20)
    loss: Fraction = Fraction(1, 20)
    max_trees: int | None = None
    max_depth: int | None = None
    nbytes: int = 0
    switch_seconds: Fraction = Fraction(0)

    def check(self) -> MethodOptions:
        """Return self if all values are possible.

        Raises:
            ArgumentError: naming the knob.
        """
        for name, value in (("epsilon", self.epsilon), ("loss", self.loss)):
            if not 0 <= value < 1 or (name == "epsilon" and not value):
                raise ArgumentError(f"{name} is {value}, expected a part of the rate below 1; 1/20 is a usual value")
        for name, limit in (("max_trees", self.max_trees), ("max_depth", self.max_depth)):
            if limit is not None and limit < 1:
                raise ArgumentError(f"{name} is {limit}, expected at least 1; leave it out for no limit")
        if self.nbytes < 0 or self.switch_seconds < 0:
            raise ArgumentError(
                f"nbytes is {self.nbytes} and switch_seconds {self.switch_seconds}, expected 0 or more; correct them"
            )
        return self


class Problem(msgspec.Struct, frozen=True, dict=True):
    """Plan ``collective`` for ``root`` on the links of ``fabric``; it serves the collective."""

    fabric: Fabric
    collective: str
    root: int
    options: MethodOptions = MethodOptions()

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.fabric.n

    @cached_property
    def oriented(self) -> Fabric:
        """The fabric in the direction in which the trees' edges point."""
        return oriented(self.fabric, self.collective)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of a cluster, none where the fabric is no cluster."""
        return boxes_of(self.fabric, self.collective)

    @cached_property
    def logical(self) -> LogicalGraph | None:
        """Arcs between ranks, switches split in closed form; nothing where switches are wired to switches."""
        return logical_graph(self.oriented) if self.oriented.flat else None

    @cached_property
    def likely(self) -> Certificate:
        """A bound that takes no search; the best one where a packing meets it."""
        small = len(self.fabric.vertices) <= MAX_VERTICES
        return self.certificate if small or self.by_paths else quick(self.fabric, self.collective, self.root)

    @property
    def certificate(self) -> Certificate:
        """The best bound of these links."""
        memo, key = self.fabric.memo, ("bound", self.collective, self.root)
        if key not in memo:
            memo[key] = certify(self.fabric, self.collective, self.root)
        return cast(Certificate, memo[key])

    def tighten(self, found: Certificate) -> None:
        """Use ``found`` from now on, if it is a smaller bound."""
        if found.capacity_mbps / found.divisor < self.bound:
            self.fabric.memo["bound", self.collective, self.root] = found

    @property
    def bound(self) -> Fraction:
        """MB/s."""
        return self.certificate.capacity_mbps / self.certificate.divisor

    def proof(self, rate: Fraction) -> Certificate:
        """The certificate to put beside ``rate``: the likely one if it is met, else the best."""
        likely = self.likely
        return likely if rate == likely.capacity_mbps / likely.divisor else self.certificate

    def met(self, rate: Fraction) -> bool:
        """No schedule on these links is faster."""
        proof = self.proof(rate)
        return rate == proof.capacity_mbps / proof.divisor

    @property
    def by_paths(self) -> bool:
        """Gather and Scatter: paths, not trees."""
        return self.collective in ("gather", "scatter")


class Solution(NamedTuple):
    """Trees and their rate in MB/s; ``why`` replaces the method's text, ``fabric`` the task's links."""

    trees: tuple[Tree, ...]
    rate: Fraction
    why: str = ""
    fabric: Fabric | None = None


class Method(NamedTuple):
    """One way to plan.

    ``fits`` is 0 where the method cannot plan the task, else its turn: the automatic choice tries low turns first.
    ``plan`` gives nothing where it finds out too late. One that is not ``auto`` is used where it is asked for by name;
    one that is ``costly`` is offered to callers who plan everything only where it is the automatic choice.
    """

    scheme: str
    why: str
    fits: Callable[[Problem], int]
    plan: Callable[[Problem], Solution | None]
    auto: bool = True
    costly: bool = False
