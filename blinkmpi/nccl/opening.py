"""How the ranks of an unchanged program's communicator open their GPUs together, for :class:`.binder.Binder`.

They meet over a store that is a folder beside the page on which they signed in. Each step is one of all ranks: what
fails on one is an error on all, and who dies or does not come is noticed. Behind this, kinds are prepared by each rank
alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError, BlinkError, CollectiveTimeout, DeviceError, PeerLost
from ..planning import tuned_table
from ..planning.plan import Plan, Rule
from ..planning.selection import choose
from ..program.call import Call
from ..program.reduction import dtype_of
from ..runtime.bootstrap import Options, agree_on_plan, agree_on_settings, own_settings
from ..topology.gpu import GpuFacts
from ..topology.live import gather_gpus
from ..topology.measured import kept, with_measured
from ..topology.model import Topology
from ..topology.probe import probe
from ..transport.cuda.device import Gpu, device_with
from ..transport.cuda.kernels.compiler import kernels_digest
from ..transport.cuda.memory_layout import slots_at
from ..transport.cuda.packets import fits
from ..transport.cuda.transport import CudaTransport
from ..transport.network.bounded import Rendezvous
from ..transport.network.folder_store import shared_folder, sweep
from ..transport.network.store import StoreComm
from ..transport.slow_waits import SlowWaits
from ..trees.tree import ROOTED
from ..util.cache_folder import cache_dir
from ..util.together import from_root
from . import table
from .binder import COLLECTIVES, Group, Kind, Opened
from .library import nccl_version

SHM = Path("/dev/shm")
RULES = "BLINKMPI_NCCL"  # by which the user says which calls may be ours, whatever was measured
OPEN_S = 60.0  # that the ranks have to come


class Hardware(NamedTuple):
    """How a rank finds its GPU; tests have others."""

    gpu: Callable[[bytes], Gpu] = lambda uuid: Gpu(device_with(uuid))
    facts: Callable[[Gpu], GpuFacts] = lambda gpu: probe(gpu.bus_id)


def open_context(group: Group, *, hardware: Hardware | None = None, seconds: float = OPEN_S) -> Opened:
    """Open the GPUs of a communicator; all its ranks come here, each from a thread of its own.

    Args:
        seconds: that the other ranks have to come.

    Raises:
        BlinkError: why these calls stay NCCL's; on every rank that is left.
    """
    rendezvous = Rendezvous("opening the GPUs of NCCL's communicator", seconds, SlowWaits(own_settings()))
    rendezvous.remedy = "its calls stay NCCL's"

    def check() -> None:
        if (lost := group.lost()) == group.rank:
            raise PeerLost(f"the program ends, or has given the communicator back; {rendezvous.remedy}")
        if lost is not None:
            raise PeerLost(f"rank {lost} has not opened its GPU and will not; {rendezvous.remedy}", [lost])

    rendezvous.check = check
    prefix = f"blinkmpi-nccl-{os.getuid()}-"
    sweep(SHM, f"{prefix}*.store")
    with shared_folder(SHM / f"{prefix}{group.name}.store") as store:
        comm = StoreComm(store, group.rank, group.n, rendezvous)
        try:
            comm.introduce()
            found = _opened(comm, group, hardware or Hardware())
        except (PeerLost, CollectiveTimeout):  # who is lost leaves no store
            raise
        except BlinkError:
            comm.close()
            raise
        comm.close()
    return found


def _opened(comm: StoreComm, group: Group, hardware: Hardware) -> Opened:
    settings = agree_on_settings(comm, Options())
    if settings.gpu_disable:
        raise DeviceError("BLINKMPI_GPU_DISABLE is set; unset it")
    gpu: Gpu | None = None
    facts: GpuFacts | Exception
    try:
        gpu = hardware.gpu(group.gpu)
        facts = hardware.facts(gpu)
    except BlinkError as error:
        facts = error
    found, reason = gather_gpus(comm, comm, facts)
    if found is None or gpu is None:
        raise DeviceError(reason)
    measured = kept(comm, found, facts, cache_dir())
    machine = with_measured(found, measured) if measured else found
    name = gpu.name
    choice = from_root(comm, lambda: chosen(name, machine), table.Choice)
    if choice.why:
        raise DeviceError(choice.why)
    tuned = tuned_table.file_of(cache_dir(), name, machine)
    plans = agree_on_plan(comm, machine, Options(), settings, "onehop", tuned)
    roots = {name: range(group.n) if name in ROOTED else (0,) for name in COLLECTIVES}
    plans.with_parts((name, root) for name in COLLECTIVES for root in roots[name])  # now, as each rank binds alone
    context = PacketGpus(comm, gpu, plans.plan, settings.max_ctas)
    rows = choice.table
    if rows is None:
        return Opened(context)

    def declined(kind: Kind) -> str:
        return rows.why_not(kind.name, dtype_of(kind.dtype).itemsize, kind.size_class)

    return Opened(context, declined)


class PacketGpus:
    """The GPUs of a communicator for calls over packets: they have no slots, and nothing here imports MPI.

    Args:
        max_ctas: of a kernel, 0 for the default.

    Raises:
        DeviceError: on every rank, if some rank cannot map some other's memory.
    """

    def __init__(self, comm: StoreComm, gpu: Gpu, plan: Plan, max_ctas: int) -> None:
        self.gpu, self.rank, self._plan = gpu, comm.rank, plan
        self.transport = CudaTransport(comm, gpu, max_ctas=max_ctas, symmetric_bytes=slots_at(comm.size))

    def rule(self, call: Call, *, registered: bool) -> Rule:
        """The row of the plan's table that a call takes."""
        return choose(self._plan, call, registered=registered, fits=fits)

    def close(self, *, collectively: bool) -> None:
        """Give back what no peer looks at; peers may still write into this rank's memory, which stays."""
        if collectively:
            raise ArgumentError("PacketGpus.close(collectively=True): the ranks meet nowhere any more; pass False")
        self.gpu.use()
        self.transport.abort()
        self.transport.close(None)


def chosen(gpu: str, machine: Topology) -> table.Choice:
    """Which calls may be ours on these GPUs: what was measured, unless the user has said so; as rank 0 finds it.

    Raises:
        FormatError, SettingsError: for a table that cannot be read.
    """
    if os.environ.get(RULES):
        return table.Choice()
    path = table.file_of(cache_dir(), gpu, machine)
    found = table.read(path)
    remedy = f"mpirun -np {machine.n} blinkmpi tune --beside nccl, or set BLINKMPI_NCCL=all"
    if found is None:
        return table.Choice(None, f"no table says which calls are faster than NCCL's on {machine.n} {gpu}: {remedy}")
    stale = found.why_stale(nccl_version(), table.variables(), kernels_digest())
    return table.Choice(None, f"the table {path} does not hold: {stale}: {remedy}") if stale else table.Choice(found)
