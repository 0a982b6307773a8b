"""How a job becomes process groups: under mpirun and srun by MPI, under torchrun by torch's store."""

from __future__ import annotations

import socket
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from ..communicator import Communicator
from ..errors import START_AGAIN, ArgumentError, CollectiveTimeout
from ..runtime.ranks.mpi import copy_of
from ..transport.network.exchanges import TAGS
from ..util.text import quoted
from ..util.together import allgather, bcast, together
from .group import BlinkGroup
from .mixed import MixedGroup, beside
from .variables import of_attempt

_world: list[weakref.ref[BlinkGroup]] = []  # the default group, of which the others are parts


def create(options: Any, backend_options: Any = None) -> BlinkGroup:
    """A process group, for torch.

    Args:
        options: torch's: store, rank, size, timeout, name, ranks in the default group (none: it is that).
        backend_options: keyword arguments of the Communicator, as a dict, or None.
    """
    others = beside(options)
    given = _keywords(backend_options, mixed=others is not None)
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    ranks, store = list(options.global_ranks_in_group), of_attempt(options.store)
    keywords = keywords_of(given, timeout)
    by_mpi = started_by_mpi(rank, size) if not ranks else _by_mpi()
    if not by_mpi:
        open_comm: Callable[[], Any] = partial(by_store, store, rank, size, keywords)
    elif ranks:
        open_comm = partial(_part, ranks, str(options.group_id))
    else:
        open_comm = partial(_opened, partial(Communicator, MPI.COMM_WORLD, **keywords))
    arguments = store, rank, size, timeout, open_comm, str(options.group_id), ranks
    group = BlinkGroup(*arguments) if others is None else MixedGroup(*arguments, others=others)
    if not ranks:
        _world[:] = [weakref.ref(group)]
        assert group.comm is not None  # all ranks are here now
    return group


def keywords_of(options: Mapping[str, Any], timeout: timedelta) -> dict[str, Any]:
    """The keyword arguments of a group's Communicator, with those that the user gave."""
    # torch lets a blocking call meet others that are not, MPI's own collectives do not
    return {"timeout": timeout.total_seconds(), "stream": "current", **options, "deterministic": True}


def _keywords(backend_options: Any, *, mixed: bool) -> dict[str, Any]:
    """The Communicator's keyword arguments; in a mixed group torch passes what it has made for NCCL, too."""
    if backend_options is None or (mixed and not isinstance(backend_options, Mapping)):
        return {}
    if not isinstance(backend_options, Mapping):
        raise ArgumentError(
            f"pg_options={quoted(backend_options)}: expected a dict of the Communicator's keyword arguments for "
            "backend blink, such as {'algo': 'allreduce:trees'}; pass that, or leave it out"
        )
    return dict(backend_options)


def started_by_mpi(rank: int, size: int) -> bool:
    """Whether MPI knows all ranks of the job.

    Raises:
        ArgumentError: if it knows some, or in another order.
    """
    world = MPI.COMM_WORLD
    if (world.rank, world.size) == (rank, size):
        return True
    if world.size == 1:
        return False
    raise ArgumentError(
        f"torch says rank {rank} of {size}, MPI says rank {world.rank} of {world.size}; start a process for each rank "
        'by mpirun or srun and pass init_method="mpi://", or start the job by torchrun alone'
    )


def _by_mpi() -> bool:
    default = _default()
    return default is not None and isinstance(default.comm, Communicator)


def _default() -> BlinkGroup | None:
    return _world[0]() if _world else None


def _part(ranks: list[int], name: str) -> Any:
    """The Communicator of some ranks; collective for them. Threads may make several at once, told apart by names."""
    default = _default()
    if default is None:
        raise ArgumentError("the default group is gone; make groups of its ranks before dist.destroy_process_group()")
    world = default.comm.Get_group()
    members = world.Incl(ranks)
    try:
        return default.comm.Create_group(members, zlib.crc32(name.encode()) % TAGS)
    except CollectiveTimeout as error:
        error.add_note(
            "A group is opened by its first call: all its ranks make the first calls of groups in one order."
        )
        raise
    finally:
        members.Free()
        world.Free()


def by_store(store: Any, rank: int, size: int, keywords: Mapping[str, Any]) -> Any:
    """The communicator of processes that share a store, which is this group's alone; collective."""
    from ..store_communicator import StoreCommunicator

    return _opened(partial(StoreCommunicator, dist.PrefixStore("blinkmpi", store), rank, size, **keywords))


def _opened(make: Callable[[], Any]) -> Any:
    """A communicator whose errors do not say that a part of its ranks can go on: torch's groups keep their size."""
    comm = make()
    comm.context.say_of_loss(START_AGAIN)
    return comm


def rendezvous(url: str, *, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """``init_method="mpi://"``: rank and size are MPI's, and the store is one that rank 0 opens.

    Raises:
        CollectiveTimeout, PeerLost: if a rank does not come in time. RemoteError: if one does not reach the store.
    """
    seconds = None if timeout is None else timeout.total_seconds()
    world: Any = copy_of(MPI.COMM_WORLD, seconds, 'init_process_group(init_method="mpi://")')  # when all have come
    rank, size = world.rank, world.size
    host = socket.getfqdn() if _spread(world) else "localhost"
    port = 0
    store = None
    if rank == 0:
        store = dist.TCPStore(host, 0, size, True, wait_for_workers=False)
        port = store.port
    host, port = bcast(world, (host, port), tuple[str, int])
    # rank 0 goes on, and perhaps fails and takes the store along, when all have reached it
    store = together(world, lambda: dist.TCPStore(host, port, size, False) if store is None else store)
    world.Free()
    yield store, rank, size
    raise RuntimeError("a job that MPI started does not change its size")


def _spread(world: MPI.Intracomm) -> bool:
    """Whether the ranks are on several machines."""
    return len(set(allgather(world, socket.gethostname(), str))) > 1
