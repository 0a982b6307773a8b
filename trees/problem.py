"""The problem that a method gets, and the solution that it returns; :mod:`.on_links` has the table of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import msgspec

from ..errors import ArgumentError
from .bounds.certify import certify, prices_certificate, quick
from .deadline import NEVER, Deadline
from .graph.boxes import Box, boxes_of, oriented
from .graph.cuts import MAX_VERTICES
from .graph.fabric import Arc, Fabric, Kept
from .graph.logical import Capacities, LogicalGraph, capacities_of, logical_graph
from .graph.tiers import families, tiers
from .tree import Certificate, Tree

MANY_RANKS = 64  # beyond, what comes this close to a bound that is cheap to compute is not searched further
CLOSE = Fraction(95, 100)
OUT_OF_TIME = "there was no time for it"
BACKWARDS = {"reduce": "broadcast", "reduce_scatter": "allgather", "gather": "scatter"}  # on reversed links


class MethodOptions(msgspec.Struct, frozen=True):
    """Options of the methods that are asked for by name; each reads its own.

    Attributes:
        epsilon: ``mwu`` stops within this fraction of the best rate.
        loss: the fraction of its rate that ``mwu+ilp`` may give up for fewer trees.
        max_trees, max_depth: limits of ``few``; the second is one of ``shallow`` too.
        quick: ``shallow`` leaves out what may take seconds, as for plans.
        nbytes, switch_seconds: the vector size that ``hybrid`` plans for, and the delay before its slow links start.
    """

    epsilon: Fraction = Fraction(1, 20)
    loss: Fraction = Fraction(1, 20)
    max_trees: int | None = None
    max_depth: int | None = None
    quick: bool = False
    nbytes: int = 0
    switch_seconds: Fraction = Fraction(0)

    def check(self) -> MethodOptions:
        """Return self if all values are possible.

        Raises:
            ArgumentError: naming the option.
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


_BOUNDS: Kept[tuple[str, int], Certificate] = Kept()  # by collective and root


class Problem(msgspec.Struct, frozen=True, dict=True):
    """Pack trees for ``collective`` from ``root`` into ``fabric``, on which trees for this collective exist."""

    fabric: Fabric
    collective: str
    root: int
    options: MethodOptions = MethodOptions()
    deadline: Deadline = NEVER

    def on(self, fabric: Fabric) -> Problem:
        """The same problem on other links, by the same time."""
        return Problem(fabric, self.collective, self.root, deadline=self.deadline)

    def while_others_wait(self, wait: bool) -> Problem:
        """The same problem, while other methods wait for what time is left, or not."""
        if self.deadline.others_wait == wait:
            return self
        made = msgspec.structs.replace(self, deadline=msgspec.structs.replace(self.deadline, others_wait=wait))
        made.__dict__.update(self.__dict__)  # what is worked out already
        return made

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.fabric.n

    @cached_property
    def oriented(self) -> Fabric:
        """The fabric in the direction in which the trees' edges point."""
        return oriented(self.fabric, self.collective)

    @cached_property
    def pairs_only(self) -> bool:
        """Whether this is an AllReduce on links that do not join the ranks by the same way there and back."""
        return self.collective == "allreduce" and len(self.oriented.reached(0) & set(range(self.n))) < self.n

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of a cluster; empty where the fabric is not one."""
        return boxes_of(self.fabric, self.collective)

    @cached_property
    def logical(self) -> LogicalGraph | None:
        """The graph between ranks, switches split away; None where switches are wired to switches."""
        return logical_graph(self.oriented) if self.oriented.flat else None

    @cached_property
    def capacities(self) -> Capacities:
        """The capacities that trees between ranks share, where there is a logical graph."""
        assert self.logical is not None
        return capacities_of(self.logical, -1 if self.collective == "allreduce" else self.root)

    @cached_property
    def likely(self) -> Certificate:
        """A bound that is cheap to compute; a packing that meets it proves that it is the best one."""
        small = len(self.fabric.vertices) <= MAX_VERTICES
        cheap = small or self.by_paths or self.collective == "alltoall"
        return self.certificate if cheap else quick(self.fabric, self.collective, self.root, self.groups)

    @cached_property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The groups of boxes below each tier of a network, as families of vertices, the largest groups first."""
        if self.n <= MANY_RANKS or not self.boxes:
            return ()
        return families(tiers(self.oriented, self.boxes), self.boxes)

    @property
    def certificate(self) -> Certificate:
        """The best bound of these links."""
        memo, key = _BOUNDS.of(self.fabric), (self.collective, self.root)
        if key in memo:
            return memo[key]
        found = certify(self.fabric, self.collective, self.root, self.deadline, self.groups)
        if not self.deadline.late():  # else more time may find a better one
            memo[key] = found
        return found

    def tighten(self, found: Certificate) -> None:
        """Use ``found`` as the certificate from now on if its bound is smaller."""
        if found.bound < self.bound:
            _BOUNDS.of(self.fabric)[self.collective, self.root] = found

    def tighten_by(self, prices: Mapping[Arc, int | Fraction]) -> None:
        """Use the bound of these prices of links from now on if it is smaller."""
        found = prices_certificate(self.fabric, self.collective, self.root, prices)
        if found is not None:
            self.tighten(found)

    @property
    def bound(self) -> Fraction:
        """The best bound in MB/s."""
        return self.certificate.bound

    def proof(self, rate: Fraction) -> Certificate:
        """The certificate for a packing of this ``rate``: the cheap one if the rate meets it, else the best.

        On more than :data:`MANY_RANKS` ranks the cheap one is enough where the rate comes close to it.
        """
        likely = self.likely
        enough = CLOSE if self.n > MANY_RANKS else 1
        return likely if rate >= enough * likely.bound else self.certificate

    def close(self, rate: Fraction) -> bool:
        """Whether a rate is so close to the bound that many ranks are not planned for any further."""
        proof = self.proof(rate)
        return rate >= CLOSE * proof.bound

    def met(self, rate: Fraction) -> bool:
        """Whether no schedule on these links is faster than ``rate``."""
        proof = self.proof(rate)
        return rate == proof.bound

    @property
    def by_paths(self) -> bool:
        """Whether this is Gather or Scatter, which take paths instead of trees."""
        return self.collective in ("gather", "scatter")


class Solution(NamedTuple):
    """Trees and their rate in MB/s.

    ``why`` and ``scheme`` replace the method's text and scheme, ``fabric`` the problem's fabric. With more time, one
    that is ``cut`` might be better.
    """

    trees: tuple[Tree, ...]
    rate: Fraction
    why: str = ""
    fabric: Fabric | None = None
    scheme: str = ""
    cut: bool = False


class Method(NamedTuple):
    """A planning method.

    ``fits`` says whether it can plan the problem; ``plan`` returns why there is no solution, in words, where it fails
    nevertheless. ``costly`` is the number of ranks from which on it may take seconds, 0 if it never does: there
    :func:`.packing.methods` lists it only where it is the automatic choice. An alltoall is only for methods that plan
    ``all_to_all``; an AllReduce on links that do not lead back is only for those that plan ``by_pairs`` of trees.
    """

    scheme: str
    why: str
    fits: Callable[[Problem], bool]
    plan: Callable[[Problem], Solution | str]
    costly: int = 0
    all_to_all: bool = False
    by_pairs: bool = False

    def can(self, problem: Problem) -> bool:
        """Whether the method can plan the problem."""
        if (problem.collective == "alltoall" and not self.all_to_all) or (problem.pairs_only and not self.by_pairs):
            return False
        return self.fits(problem)

    def is_costly(self, problem: Problem) -> bool:
        """Whether it may take seconds for trees on so many ranks; paths of a flow are found soon."""
        return 0 < self.costly <= problem.n and not problem.by_paths
