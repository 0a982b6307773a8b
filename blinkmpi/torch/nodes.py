"""torchrun on several nodes: one world of MPI's, made of processes that no launcher of MPI's has started.

Ranks on several hosts need messages between them, which are MPI's. MPICH takes its ranks from any launcher that speaks
PMI-1, so here rank 0 starts a server of it (:mod:`...launch.pmi`), the ranks tell each other by torch's store where it
is, and each hands MPICH a connection to it. From then on all is as under ``mpiexec``: the group's Communicator is one
of ``MPI.COMM_WORLD``. MPI can start once in a process, so this comes before mpi4py's ``MPI`` is imported.

A rank that ends before MPI_Finalize ends all others at once, on every host: the server tells them on their lifelines.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import torch.distributed as dist

from ..errors import CollectiveTimeout, PeerLost, TopologyError
from ..launch import pmi
from ..runtime.bootstrap import first_deadline, own_settings
from ..runtime.foreign import imported
from ..topology.live import this_process
from ..transport.network.bounded import Rendezvous
from ..transport.network.store import StoreComm
from ..transport.slow_waits import SlowWaits
from ..util.launcher import launched_rank, launched_size, library_name
from ..util.singleton import remove_segment
from ..util.together import from_root, gathered, together
from .variables import of_attempt

INSTALL = "pip install 'blinkmpi[mpich]' in an environment without another MPI"
BY_MPIRUN = "start the job with mpirun or srun"
START_S = 60.0  # that the server may take to start, on a busy machine
CONNECT_S = 10.0  # that a rank tries each address of the server
_kept: list[object] = []  # the server's process and the lifeline, until this process ends


class Address(msgspec.Struct, frozen=True):
    """Where the server is, and what it wants to hear; hosts to try, in this order."""

    hosts: list[str]
    port: int
    secret: str


def open_world(options: Any) -> None:
    """Make MPI's world of the ranks of the default group, if they are on several hosts and MPI has not started them.

    Args:
        options: torch's, of the group that is being made.

    Raises:
        TopologyError: on every rank, if they are, and MPI cannot be made to start there.
        CollectiveTimeout, PeerLost: if a rank does not come. RemoteError: if another rank fails.
    """
    rank, size = int(options.group_rank), int(options.group_size)
    if size == 1 or list(options.global_ranks_in_group) or _known_to_mpi(rank, size):
        return
    deadline_s = first_deadline(options.timeout.total_seconds())
    rendezvous = Rendezvous('init_process_group("blink")', deadline_s, SlowWaits(own_settings()))
    store = dist.PrefixStore("blinkmpi", of_attempt(options.store))
    ranks = StoreComm(store, rank, size, rendezvous, name="nodes")
    try:
        ranks.introduce()
        places = gathered(ranks, _place, tuple[str, str])
        if len({place for place, _ in places}) > 1:
            _make_world(ranks, places, _store_host(options.store))
    except (CollectiveTimeout, PeerLost):
        raise  # a rank is missing: who waits for it in the store waits in vain
    except BaseException:
        ranks.close()
        raise
    ranks.close()


def _known_to_mpi(rank: int, size: int) -> bool:
    """Whether MPI has a world already, or its launcher will give it one.

    Under ``srun torchrun`` the launcher's variables are the agent's.
    """
    if (known := imported("mpi4py.MPI")) is not None and known.Is_initialized() and known.COMM_WORLD.size > 1:
        return True
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return not by_torchrun and launched_rank(os.environ) == rank and launched_size(os.environ) == size


def _place() -> tuple[str, str]:
    """What names the memory that this process shares, and its host."""
    process = this_process()
    return process.place, process.host


def _make_world(ranks: StoreComm, places: Sequence[tuple[str, str]], store_host: str) -> None:
    """Have all ranks start MPI as one job; collective."""
    nodes, hosts = [place for place, _ in places], [host for _, host in places]
    for rank, why in enumerate(gathered(ranks, _why_not, str)):
        if why:
            _start_alone()
            other = next(r for r, node in enumerate(nodes) if node != nodes[0])
            raise TopologyError(
                f"rank {other} on {hosts[other]} shares no memory with rank 0 on {hosts[0]} (boot id, or device of "
                f"/dev/shm), so the ranks need MPI, and rank {rank} {why}, or {BY_MPIRUN}"
            )
    with ExitStack() as undone:
        undone.callback(_start_alone)
        server = from_root(
            ranks, lambda: _start_server(nodes, hosts, store_host, ranks.rendezvous.timeout_s, undone), Address
        )
        lifeline, connection = together(ranks, lambda: _connected(server, ranks.rank, hosts, undone))
        _initialize(ranks.rank, ranks.size, lifeline, connection)
        undone.pop_all()  # nothing is
    world = imported("mpi4py.MPI").COMM_WORLD
    if (world.rank, world.size) != (ranks.rank, ranks.size):
        raise TopologyError(
            f"torch says rank {ranks.rank} of {ranks.size}, MPI has made it rank {world.rank} of {world.size}: "
            f"it does not take its ranks by PMI-1; {INSTALL}, or {BY_MPIRUN}"
        )
    ranks.Barrier()  # then all ranks of a node have mapped MPICH's shared memory
    remove_segment(os.getpid())


def _why_not() -> str:
    """Why this process cannot become a rank of MPI's, and the remedy, as the end of a sentence; else empty.

    MPI is imported here, and does not start.
    """
    if imported("mpi4py.MPI") is not None:
        return "has imported mpi4py's MPI before init_process_group, and is a job of its own; import it later"
    import mpi4py

    rc = mpi4py.rc
    before = rc.initialize, rc.finalize
    rc.initialize, rc.finalize = False, True
    try:
        from mpi4py import MPI
    except RuntimeError as error:
        if "MPI library" not in str(error):
            raise
        return f"finds no MPI; {INSTALL}"
    finally:
        rc.initialize, rc.finalize = before
    library = library_name(MPI.Get_library_version())
    if library.startswith("MPICH"):
        return ""
    return f"has {library}, and MPICH alone starts without a launcher of its own; {INSTALL}"


def _start_alone() -> None:
    """Start MPI as it would have been by its import: whoever catches the error may still use it."""
    known = imported("mpi4py.MPI")
    if known is not None and not known.Is_initialized():
        known.Init_thread(_thread_level(known))
        if launched_rank(os.environ) is None:
            remove_segment(os.getpid())


def _thread_level(mpi: Any) -> int:
    """What mpi4py would ask of MPI when it is imported."""
    rc = imported("mpi4py").rc
    return int(getattr(mpi, f"THREAD_{rc.thread_level.upper()}")) if rc.threads else int(mpi.THREAD_SINGLE)


# ---- the server, on rank 0


def _start_server(
    nodes: Sequence[str], hosts: Sequence[str], store_host: str, deadline_s: float, undone: ExitStack
) -> Address:
    """Start the server as a process of its own, which ends with the last rank."""
    mapping = pmi.process_mapping(nodes)
    if len(mapping) > pmi.VALUE_BYTES:
        raise TopologyError(
            f"the ranks lie on {len(set(nodes))} nodes in so many pieces that MPICH cannot be told ({len(mapping)} "
            f"bytes, at most {pmi.VALUE_BYTES}); number them node by node, as torchrun does, or {BY_MPIRUN}"
        )
    name, secret = f"blinkmpi-{uuid.uuid4().hex}", secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-I", pmi.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    _kept.append(process)
    undone.callback(process.wait)
    undone.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pmi.described(name, secret, hosts, {pmi.MAPPING: mapping}, deadline_s))
    process.stdin.flush()
    told = process.stdout.readline().strip() if _readable(process.stdout.fileno(), START_S) else b""
    process.stdout.close()
    if not told.isdigit():
        raise TopologyError(
            f"the server by which the ranks start MPI did not start on {hosts[0]} within {START_S:.0f} s "
            f"(it said {told!r}); look at its messages, or {BY_MPIRUN}"
        )
    return Address(_addresses(store_host), int(told), secret)


def _readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read within a time, or the end. (select takes no descriptors above 1023.)"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _store_host(store: Any) -> str:
    """The host of torch's store, as its clients name it; empty where it is no TCPStore."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _addresses(store_host: str) -> list[str]:
    """Where others may reach this host: on its way to the store, as the store's host (which it mostly is), by name."""
    found = []
    for family, kind, _, _, address in socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM) if store_host else ():
        with socket.socket(family, kind) as way, suppress(OSError):  # a name may have addresses of no use here
            way.connect(address)  # sends nothing
            found.append(str(way.getsockname()[0]))
    names = [store_host, socket.getfqdn(), socket.gethostname()]
    known = [address for address in dict.fromkeys((*found, *names)) if address]
    return [a for a in known if not a.startswith(("127.", "::1", "localhost"))] or known


# ---- every rank


def _connected(
    server: Address, rank: int, hosts: Sequence[str], undone: ExitStack
) -> tuple[socket.socket, socket.socket]:
    """The lifeline, and the connection for MPICH."""
    failed = []
    for address in server.hosts:
        try:
            made = []
            for kind in ("lifeline", "pmi"):
                made.append(_greeted((address, server.port), f"{server.secret} {kind} {rank}"))
                undone.callback(made[-1].close)
            return made[0], made[1]
        except OSError as error:
            failed.append(f"{address}: {error}")
    raise TopologyError(
        f"rank {rank} on {hosts[rank]} reaches the store, but not rank 0's host on port {server.port} "
        f"({'; '.join(failed)}); let the hosts of the job connect to each other on every port, or {BY_MPIRUN}"
    )


def _greeted(address: tuple[str, int], line: str) -> socket.socket:
    """A connection on which the server has been told who comes."""
    connection = socket.create_connection(address, CONNECT_S)
    try:
        pmi.keep_alive(connection)
        connection.sendall(f"{line}\n".encode())
        with connection.makefile("rb") as answers:
            answer = answers.readline()  # all that the server says before it is asked
        if answer != f"{pmi.WELCOME}\n".encode():
            raise ConnectionError(f"what listens there does not know this job: {answer!r}")
    except BaseException:
        connection.close()
        raise
    return connection


def _initialize(rank: int, size: int, lifeline: socket.socket, connection: socket.socket) -> None:
    """Start MPI, and from then on end this process with its job."""
    from mpi4py import MPI

    connection.settimeout(None)
    lifeline.settimeout(None)
    descriptor = connection.detach()  # open until the very end, behind MPI_Finalize
    _kept.append(lifeline)
    inherited = ExitStack()  # by a child, which would hold both open when this process has gone
    inherited.callback(lifeline.close)
    inherited.callback(os.close, descriptor)
    os.register_at_fork(after_in_child=inherited.close)  # a child's own children have nothing left to close
    told = {"PMI_FD": str(descriptor), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    with _environment(told), _ended_by_kernel(lifeline):  # Python's lock is held while MPI starts
        MPI.Init_thread(_thread_level(MPI))
    from ..runtime.process_exit import end_with_job

    end_with_job(lambda: _last_words(lifeline), lambda: _let_kernel_end(lifeline))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Have these variables, and none of another launcher's: those of ``srun torchrun`` are the agent's."""
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("PMI_", "PMIX_"))}
    os.environ.update(variables)
    try:
        yield
    finally:  # child processes may begin a job of MPI's
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _ended_by_kernel(lifeline: socket.socket) -> Iterator[None]:
    """While Python's threads cannot run: SIGIO ends this process when the lifeline brings something, or is closed."""
    _let_kernel_end(lifeline)
    try:
        yield
    finally:
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)


def _let_kernel_end(lifeline: socket.socket) -> None:
    """From now on: threads need not run for it."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _readable(lifeline.fileno(), 0.0):  # it came before
        os.kill(os.getpid(), signal.SIGIO)


def _last_words(lifeline: socket.socket) -> str:
    """Wait for the job's end, and say why it ends."""
    said = b""
    try:
        while part := lifeline.recv(4096):
            said += part
    except OSError as error:
        return f"its connection to the server on rank 0's host has failed: {error}"
    return said.decode("utf-8", "replace").strip() or "the server on rank 0's host, by which the ranks met, has ended"
