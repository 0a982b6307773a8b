"""mpi4py's communicators and messages, whose methods are safe for GPU memory (``runtime/guard.py`` has the table).

A Communicator is one of them, and what it makes by mpi4py's own methods (``Create_cart``, ``Spawn``, ``Mprobe``, ...)
is, too. What MPI's static functions make (``MPI.Comm.Get_parent``, ``MPI.Message.Probe``) is mpi4py's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from mpi4py import MPI

from .runtime.guard import NAMES, guard

Kind = TypeVar("Kind", bound=type)
MAKERS = (
    "Create", "Create_group", "Split", "Split_type", "Sub", "Create_cart", "Create_graph", "Create_dist_graph",
    "Create_dist_graph_adjacent", "Create_intercomm", "Spawn", "Spawn_multiple", "Accept", "Connect", "Merge",
    "Mprobe", "Improbe", "mprobe", "improbe",
)  # fmt: skip  # methods that make plain objects of mpi4py's
GUARDED: dict[type, type] = {}  # by mpi4py's type


class _OnFirstUse:
    """A guarded method, which is written out when it is first looked up: a program uses few of them."""

    def __init__(self, kind: type, name: str, own: Callable[..., Any]) -> None:
        self._kind, self._name, self._own = kind, name, own

    def __get__(self, of: Any, kind: type | None = None) -> Any:
        method: Any = guard(self._own)
        setattr(self._kind, self._name, method)
        return method.__get__(of, kind)


def guarded(kind: Kind) -> Kind:
    """Guard the methods of a subclass of one of mpi4py's types."""
    for name in NAMES:
        if hasattr(kind, name):
            setattr(kind, name, _OnFirstUse(kind, name, getattr(kind, name)))
    for name in MAKERS:
        if hasattr(kind, name):
            setattr(kind, name, _adopting(getattr(kind, name)))
    GUARDED[kind.__base__] = kind  # type: ignore[index]
    return kind


def _adopting(own: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``own`` of mpi4py, which makes guarded objects."""

    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = own(self, *args, **kwargs)
        kind = GUARDED.get(type(made)) if made else None  # none for COMM_NULL
        return made if kind is None else kind(made)

    return method


@guarded
class GuardedIntracomm(MPI.Intracomm):
    """An intracommunicator whose own methods GPU memory cannot crash."""


@guarded
class GuardedCartcomm(MPI.Cartcomm):
    """A Cartesian grid of ranks, likewise."""


@guarded
class GuardedGraphcomm(MPI.Graphcomm):
    """A graph of ranks, likewise."""


@guarded
class GuardedDistgraphcomm(MPI.Distgraphcomm):
    """A distributed graph of ranks, likewise."""


@guarded
class GuardedIntercomm(MPI.Intercomm):
    """Two groups of ranks, likewise."""


@guarded
class GuardedMessage(MPI.Message):
    """A message that was probed, likewise."""
