"""What a planning method is given and what it gives back; :mod:`.pack` holds the table of methods.

A method is one line of that table: a name, when it fits, and a function from :class:`Task` to :class:`Planned`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import msgspec

from .bound import certify
from .fabric import Fabric, Overlay, overlay
from .tree import AGAINST, ALONG, Certificate, Tree


class Task(msgspec.Struct, frozen=True, dict=True):
    """Plan ``collective`` for ``root`` on the links of ``fabric``; it serves the collective."""

    fabric: Fabric
    collective: str
    root: int

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.fabric.n

    @cached_property
    def oriented(self) -> Fabric:
        """The fabric in the direction in which the trees' edges point."""
        if self.collective in ALONG and self.collective in AGAINST:
            return self.fabric.two_way
        return self.fabric.backwards if self.collective in AGAINST else self.fabric

    @cached_property
    def logical(self) -> Overlay | None:
        """Arcs between ranks, switches split in closed form; nothing where switches are wired to switches."""
        return overlay(self.oriented) if self.oriented.flat else None

    @cached_property
    def certificate(self) -> Certificate:
        """The bound of these links."""
        return certify(self.fabric, self.collective, self.root)

    @property
    def bound(self) -> Fraction:
        """MB/s."""
        return self.certificate.capacity_mbps / self.certificate.divisor

    @property
    def by_paths(self) -> bool:
        """Gather and Scatter: paths, not trees."""
        return self.collective in ("gather", "scatter")


class Planned(NamedTuple):
    """Trees and their rate in MB/s; ``why`` replaces the method's text, ``fabric`` the task's links."""

    trees: tuple[Tree, ...]
    rate: Fraction
    why: str = ""
    fabric: Fabric | None = None


class Method(NamedTuple):
    """One way to plan.

    ``fits`` is 0 where the method cannot plan the task, else its turn: the automatic choice tries low turns first.
    One that is not ``auto`` is used where it is asked for by name.
    """

    scheme: str
    why: str
    fits: Callable[[Task], int]
    plan: Callable[[Task], Planned]
    auto: bool = True
