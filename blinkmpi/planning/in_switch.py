"""What sums in the switches (SHARP) would give beside a plan whose trees leave sums and copies to ranks.

For people: the bound, and what a packing of :mod:`..trees.in_switch` reaches. Nothing here executes such a packing.
"""

from typing import NamedTuple

from ..errors import ArgumentError, NoPackingError, TopologyError
from ..topology.model import Topology
from ..trees.answer import SHARP
from ..trees.bounds.certify import certify
from ..trees.deadline import NEVER
from ..trees.graph.fabric import choose_links, fabric
from ..trees.in_switch.packing import bound_in_switch, pack_in_switch
from ..trees.tree import Certificate, Packing

SECONDS = 1.0  # of CPU time for a bound; any cut that is found by then is one
NOT_RUN = "with sums in the switches (SHARP), not executed here"


class InSwitch(NamedTuple):
    """The bound of an AllReduce with sums in the switches, and a packing if one was asked for, or why there is none."""

    bound: Certificate
    packing: Packing | None = None
    why: str = ""

    @property
    def text(self) -> str:
        """One line: rate if there is a packing, bound, and why."""
        p = self.packing
        if p is None:
            missing = f" (not packed: {self.why})" if self.why else ""
            return f"at most {float(self.bound.bound / 1000):.4g} GB/s {NOT_RUN}{missing}: {self.bound.text}"
        part = "equal to" if p.optimal else f"{float(p.rate / p.bound):.1%} of"
        return f"{float(p.rate / 1000):.4g} GB/s over {p.links}, {part} its bound, {NOT_RUN}: {p.certificate.text}"


def sums_in_switches(packing: Packing, topology: Topology) -> bool:
    """Whether switches on the links of an AllReduce could make sums that this packing leaves to ranks."""
    if packing.collective != "allreduce" or packing.n == 1 or packing.multicast or packing.scheme == SHARP:
        return False
    vertices = fabric(topology, packing.links.split("+")).vertices
    return any(v in vertices for v in topology.sharp)


def beside(packing: Packing, topology: Topology, *, packed: bool) -> InSwitch | None:
    """What sums in the switches would give in place of a packing; None where no switch makes any.

    Args:
        packed: pack it, too, in a second at most.
    """
    if not sums_in_switches(packing, topology):
        return None
    why = ""
    if packed:
        try:
            found = pack_in_switch(topology, seconds=SECONDS)
        except NoPackingError as error:
            why = error.why
        else:
            return InSwitch(found.certificate, found)
    return InSwitch(bound_in_switch(fabric(topology, packing.links.split("+")), NEVER.within(SECONDS)), why=why)


def packing_in_switch(topology: Topology, collective: str, seconds: float | None) -> Packing:
    """The packing of an AllReduce with sums in the switches, as commands ask for it.

    Raises:
        ArgumentError: for another collective, or a machine without such switches.
    """
    if collective != "allreduce":
        raise ArgumentError(f"sums in the switches are for allreduce, not {collective}: the others are bounded by "
                            "cuts, which trees of copies reach; leave it out")  # fmt: skip
    return pack_in_switch(topology, seconds=seconds)


def allreduce_bounds(topology: Topology) -> tuple[tuple[str, str], ...]:
    """How fast an AllReduce can be at most on a machine with such switches: by trees of copies, and with their sums."""
    try:
        f = choose_links(topology, "allreduce", 0)
    except TopologyError as error:
        return (("allreduce", str(error)),)
    until = NEVER.within(SECONDS)
    copies = certify(f, "allreduce", 0, until)
    return (
        ("trees of copies", f"at most {float(copies.bound / 1000):.4g} GB/s: {copies.text}"),
        ("in switches", InSwitch(bound_in_switch(f, until)).text),
    )
