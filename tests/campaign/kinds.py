"""The collectives that a campaign calls: for each its arguments, what every rank sends, and what must arrive where.

A further collective is a further row of :data:`KINDS`: the generator, the doer and the checker read nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from blinkmpi.runtime.buffers import OPS
from tests.conformance import Case

FOLDED = -1  # as a Part's source: the reduction of what the ranks sent


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` elements of what arrives: of rank ``source``'s vector (or of the fold), from ``start`` on."""

    source: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Kind:
    """A collective.

    Args:
        method: its name in mpi4py.
        sends: of case and rank: how many elements the rank sends.
        parts: of case and rank: what arrives, in order; nothing where nothing is received.
        arguments: of case, rank and the two buffers (None where there is none): the call's arguments.
        own: of case and rank, in place: where in the receive buffer the rank's own vector lies before the call;
            None if it lies in the send buffer all the same.
        folds: the collective of the conformance suite, element for element, that gives what FOLDED parts hold: another
            than ``allreduce`` where each rank has a fold of its own, as in a scan.
        reduces, rooted: whether it takes an operation, a root.
        blocked: whether the case's count is that of one rank's block in a longer vector.
        from_root: whether the root alone sends.
        persistent: whether the Communicator has a persistent form of its own.
        in_place: whether ``MPI.IN_PLACE`` has a meaning.
    """

    method: str
    sends: Callable[[Case, int], int]
    parts: Callable[[Case, int], tuple[Part, ...]]
    arguments: Callable[[Case, int, Any, Any], tuple[Any, ...]]
    own: Callable[[Case, int], int | None] = lambda _case, _rank: 0
    folds: str = "allreduce"
    reduces: bool = False
    rooted: bool = False
    blocked: bool = False
    from_root: bool = False
    persistent: bool = False
    in_place: bool = True

    def receives(self, case: Case, rank: int) -> int:
        """How many elements a rank's receive buffer has."""
        arriving = sum(part.count for part in self.parts(case, rank))
        own = self.own(case, rank) if case.in_place and self.in_place else None
        return arriving if own is None else max(arriving, own + self.sends(case, rank))


def _count(case: Case, _rank: int) -> int:
    return case.count


def _total(case: Case, _rank: int) -> int:
    return sum(case.counts())


def _at_root(what: Callable[[Case, int], int]) -> Callable[[Case, int], int]:
    return lambda case, rank: what(case, rank) if rank == case.root else 0


def _everybody(case: Case, _rank: int) -> tuple[Part, ...]:
    return tuple(Part(source, 0, case.count) for source in range(case.n))


def _fold(case: Case, _rank: int) -> tuple[Part, ...]:
    return (Part(FOLDED, 0, case.count),)


def _block_of_fold(case: Case, rank: int) -> tuple[Part, ...]:
    counts = case.counts()
    return (Part(FOLDED, sum(counts[:rank]), counts[rank]),)


def _own_count(case: Case, rank: int) -> int:
    return case.counts()[rank]


def _start(case: Case, rank: int) -> int:
    return sum(case.counts()[:rank])


def _blocks(case: Case, _rank: int) -> tuple[Part, ...]:
    return tuple(Part(source, 0, count) for source, count in enumerate(case.counts()))


def _scatterv_parts(case: Case, rank: int) -> tuple[Part, ...]:
    inside = case.in_place and rank == case.root
    return () if inside else (Part(case.root, _start(case, rank), case.counts()[rank]),)


def _only_root(parts: Callable[[Case, int], tuple[Part, ...]]) -> Callable[[Case, int], tuple[Part, ...]]:
    return lambda case, rank: parts(case, rank) if rank == case.root else ()


def _broadcast_parts(case: Case, rank: int) -> tuple[Part, ...]:
    return () if rank == case.root else (Part(case.root, 0, case.count),)


def _scatter_parts(case: Case, rank: int) -> tuple[Part, ...]:
    inside = case.in_place and rank == case.root  # its block stays where it lies
    return () if inside else (Part(case.root, rank * case.count, case.count),)


def _own_block(case: Case, rank: int) -> int | None:
    return rank * case.count


def _op(case: Case) -> MPI.Op | str:
    """An operation by MPI's name or by ours."""
    return OPS[case.op] if case.salt % 2 and case.op in OPS else case.op


def _source(case: Case, rank: int, send: Any) -> Any:
    """What to pass as the send buffer: of a rooted collective only the root is in place."""
    rooted = KINDS[case.collective].rooted
    return MPI.IN_PLACE if case.in_place and (not rooted or rank == case.root) else send


KINDS: dict[str, Kind] = {
    "broadcast": Kind(
        "Bcast", _at_root(_count), _broadcast_parts,
        lambda c, r, s, t: (s if r == c.root else t, c.root), rooted=True,
        from_root=True, persistent=True, in_place=False),
    "reduce": Kind(
        "Reduce", _count, _only_root(_fold), lambda c, r, s, t: (_source(c, r, s), t, _op(c), c.root),
        own=lambda c, r: 0 if r == c.root else None, reduces=True, rooted=True),
    "allreduce": Kind(
        "Allreduce", _count, _fold, lambda c, r, s, t: (_source(c, r, s), t, _op(c)), reduces=True, persistent=True),
    "gather": Kind(
        "Gather", _count, _only_root(_everybody), lambda c, r, s, t: (_source(c, r, s), t, c.root),
        own=lambda c, r: _own_block(c, r) if r == c.root else None, rooted=True, blocked=True),
    "scatter": Kind(
        "Scatter", _at_root(_total), _scatter_parts,
        lambda c, r, s, t: (s, MPI.IN_PLACE if c.in_place and r == c.root else t, c.root),
        own=lambda _c, _r: None, rooted=True, from_root=True, blocked=True),
    "allgather": Kind(
        "Allgather", _count, _everybody, lambda c, r, s, t: (_source(c, r, s), t),
        own=_own_block, blocked=True, persistent=True),
    "reduce_scatter_block": Kind(
        "Reduce_scatter_block", _total, _block_of_fold, lambda c, r, s, t: (_source(c, r, s), t, _op(c)),
        reduces=True, blocked=True, persistent=True),
    "reduce_scatter": Kind(
        "Reduce_scatter", _total, _block_of_fold, lambda c, r, s, t: (_source(c, r, s), t, list(c.counts()), _op(c)),
        reduces=True, blocked=True),
    "alltoall": Kind(
        "Alltoall", _total, lambda c, r: tuple(Part(s, r * c.count, c.count) for s in range(c.n)),
        lambda c, r, s, t: (_source(c, r, s), t), blocked=True),
    "scan": Kind(
        "Scan", _count, _fold, lambda c, r, s, t: (_source(c, r, s), t, _op(c)), folds="scan", reduces=True),
    "exscan": Kind(
        "Exscan", _count, lambda c, r: _fold(c, r) if r else (),
        lambda c, r, s, t: (_source(c, r, s), s if c.in_place and not r else t, _op(c)),
        own=lambda _c, r: 0 if r else None, folds="exscan", reduces=True),
    "gatherv": Kind(
        "Gatherv", _own_count, _only_root(_blocks),
        lambda c, r, s, t: (_source(c, r, s), [t, list(c.counts())] if r == c.root else None, c.root),
        own=lambda c, r: _start(c, r) if r == c.root else None, rooted=True, blocked=True),
    "scatterv": Kind(
        "Scatterv", _at_root(_total), _scatterv_parts,
        lambda c, r, s, t: ([s, list(c.counts())] if r == c.root else None,
                            MPI.IN_PLACE if c.in_place and r == c.root else t, c.root),
        own=lambda _c, _r: None, rooted=True, from_root=True, blocked=True),
    "allgatherv": Kind(
        "Allgatherv", _own_count, _blocks, lambda c, r, s, t: (_source(c, r, s), [t, list(c.counts())]),
        own=_start, blocked=True),
    "alltoallv": Kind(
        "Alltoallv", lambda c, r: sum(c.row(r)),
        lambda c, r: tuple(Part(s, sum(c.row(s)[:r]), c.row(s)[r]) for s in range(c.n)),
        lambda c, r, s, t: (_source(c, r, [s, list(c.row(r))]), [t, [c.row(s)[r] for s in range(c.n)]]), blocked=True),
}  # fmt: skip
