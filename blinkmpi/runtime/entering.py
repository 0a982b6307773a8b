"""A barrier with a deadline before collective operations that have none, such as MPI's ``Split``.

MPI's own ``Split`` and its like have no form with a deadline, and what ranks register or plan anew has no number of its
own. So all ranks first make a call that moves nothing, as ``Free`` does: who does not come is named, ranks that are
about to do different things are told, and a rank whose arguments are bad is heard. ``CallSequence.meet`` is the same
where there are no arguments to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from ..planning.on_demand import Part
from ..planning.plan import Plan
from ..program.call import collective_named
from ..transport.announcement import Called
from ..transport.network.bounded import Rendezvous
from ..transport.network.exchanges import Members
from ..util.numbers import rank_of, whole
from ..util.together import attempt, result_of
from .calls_without_program import EntryCall, RefusedCall
from .sequence import CallSequence, Fatal

T = TypeVar("T")


def enter(sequence: CallSequence, what: str, prepare: Callable[[], T], timeout_s: float | None = None) -> T:
    """Wait, as a call of its own, until all ranks are about to do ``what``.

    Args:
        prepare: looks at this rank's arguments; if that fails on a rank, no rank goes on.
        timeout_s: that the ranks have to come (default: the communicator's).

    Returns:
        What ``prepare`` gave here.
    """
    done, context = attempt(prepare), sequence.context
    deadline = context.timeout_s if timeout_s is None else timeout_s
    if isinstance(done, Exception):
        call: EntryCall = RefusedCall(context.host, done, deadline)
    else:
        call = EntryCall(context.host, Called(what), deadline)
    sequence.launch(call)
    sequence.wait(call)
    context.rendezvous.what, context.rendezvous.met = what, True
    return result_of(done)


def plan(sequence: CallSequence, collective: str, root: int) -> Plan:
    """Plan for the calls of a collective and root before the first; collective."""
    context = sequence.context

    def asked() -> Part:
        return collective_named(collective), rank_of(root, context.n)

    return context.main.planned.with_parts([enter(sequence, f"plan({collective!r}, {whole(root)})", asked)]).plan


def enter_group(sequence: CallSequence, what: str, group: MPI.Group, tag: int) -> None:
    """As :func:`enter`, for the ranks of ``group``, of which this is one, and that pass ``tag``."""
    sequence.check_alive()
    context, mine = sequence.context, sequence.context.mpi.public.Get_group()
    ranks = [int(r) for r in MPI.Group.Translate_ranks(group, list(range(group.size)), mine)]
    mine.Free()
    if MPI.UNDEFINED in ranks or context.rank not in ranks:
        return  # MPI refuses it
    with Fatal(sequence):
        Members(context.mpi.private, Rendezvous(what, context.timeout_s, context.slow), ranks, tag).Barrier()
