"""What ``pack`` answers: the packing of trees that were found, or why there is none."""

from fractions import Fraction
from typing import cast

from ..errors import ArgumentError, NoPackingError
from ..topology.model import Topology
from .tree import COLLECTIVES, ROOTED, Certificate, Collective, Packing, Tree

SHALLOW = "depth-"  # of the schemes of method ``shallow``, before the number of hops
UNPACKED = "so many ranks have no paths of their own for it, and a plan takes those of all scatters"
SHARP = "sharp"  # the scheme of AllReduces with sums in switches, which no plan of a job has
TIERS = "tiers"  # the scheme for very many ranks, whose trees are both fast and shallow
ProvedTrees = tuple[tuple[Tree, ...], Fraction, Certificate]  # with their rate


def packing_of(
    t: Topology, collective: str, root: int, name: str, links: str, proved: ProvedTrees, why: str, scheme: str = "",
    *, late: bool = False,
) -> Packing:  # fmt: skip
    """The packing of trees that method ``name`` found, of its scheme or one of its own; not yet verified.

    Args:
        late: whether the time for planning is over.
    """
    trees, rate, certificate = proved
    bound = certificate.bound
    reason = f"{name}: {why}"
    if certificate.kind != "trivial":
        reason += "; " + ("meets the bound" if rate == bound else f"{float(rate / bound):.1%} of the bound")
        reason += ", when the time for planning (BLINKMPI_PLAN_SECONDS) was over" if rate < bound and late else ""
    return Packing(
        collective=cast(Collective, collective), root=root if collective in ROOTED else -1, n=t.n,
        scheme=scheme or name, links=links, trees=trees, rate=rate, bound=bound,
        certificate=certificate, multicast=links == "memory", reason=reason,
    )  # fmt: skip


def nothing(collective: str, t: Topology, method: str, why: list[str]) -> NoPackingError:
    """The error where a method has no packing."""
    reasons = "; ".join(why)
    error = NoPackingError(f"{collective} on {t.name}: method {method!r} finds nothing ({reasons}); choose another")
    error.why = reasons
    return error


def checked(method: str, names: tuple[str, ...], collective: str, t: Topology) -> str:
    """``method`` if it is one of ``names``, or an empty text for ``auto``."""
    if method == "auto":
        return ""
    if method not in names:
        raise ArgumentError(
            f"method {method!r} cannot plan {collective} on {t.name}: expected auto, {', '.join(names)}; "
            "choose one of these"
        )
    return method


def check_call(t: Topology, collective: str, root: int) -> None:
    """Check what a packing is asked for.

    Raises:
        ArgumentError: for an unknown collective, or a root that is no rank. TopologyError: for one that is none.
    """
    if not t.__dict__.get("_checked"):
        t.check()
        t.__dict__["_checked"] = True
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}; choose one of these")
    if not 0 <= root < t.n:
        raise ArgumentError(f"root {root}: {t.name} has ranks 0..{t.n - 1}; choose one of these")


def is_shallow(packing: Packing) -> bool:
    """Whether a packing is of method ``shallow``."""
    return packing.scheme.startswith(SHALLOW)
