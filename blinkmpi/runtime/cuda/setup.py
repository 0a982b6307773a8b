"""Take a GPU for each rank, if every rank has one, and find together the machine that they make up.

What only ranks with GPUs need is imported when they are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpi4py import MPI

from ...errors import BlinkError, DeviceError, RemoteError, TopologyError
from ...planning.on_demand import PlanOnDemand
from ...topology.live import gather_gpus
from ...topology.model import Topology
from ...topology.network_rate import MessagingComm
from ...transport.cuda.device import Gpu, cupy, device_count, why_none
from ...util.cache_folder import cache_dir
from ...util.settings import Settings, log
from ...util.together import Comm, allgather

if TYPE_CHECKING:
    from ...planning.gpus.kernel_times import KernelCosts
    from ...topology.gpu import GpuFacts
    from .context import CudaContext

CHOSEN: list[int] = []  # the GPU of this process, when it has one


_probed: dict[int, GpuFacts] = {}  # by device


def open_gpus(
    comm: MessagingComm,
    node: Comm,
    place: tuple[int, int],
    given: Topology | None,
    net: Callable[[Topology], Topology],
    plan: Callable[[Topology, Gpu, bool], PlanOnDemand],
    settings: Settings,
    say: Callable[[Callable[[], str], str], None],
    max_ctas: int,
    *,
    again: bool = False,
) -> tuple[CudaContext | None, str]:
    """Take a GPU per rank, if every rank has one: find their machine, plan, map their memory; collective.

    Args:
        node: the ranks of this node; kept, where there are several.
        place: this rank's number on its machine, and how many there are.
        given: the machine that the user named, to be emulated unless it is made of these very GPUs.
        net: puts into a machine what was measured between nodes.
        plan: makes the plan of all ranks, from machine, GPU and whether it is emulated.
        max_ctas: of a kernel, 0 for the default.
        again: what was found out about this rank's GPU before still holds: to probe it takes 20 ms.

    Returns:
        The GPUs, or why there are none.
    """
    gpu: Gpu | None = None
    facts: GpuFacts | Exception | str = "BLINKMPI_GPU_DISABLE is set" if settings.gpu_disable else why_none()
    if not facts:
        from ...topology.probe import probe

        try:
            device = choose_device(*place, settings.ranks_per_gpu)
            if not again or device not in _probed:
                gpu = Gpu(device)
                _probed[device] = probe(gpu.bus_id)
            facts = _probed[device]
        except BlinkError as error:
            gpu, facts = None, str(error)
    try:
        found, reason = gather_gpus(comm, node, facts, per_gpu=settings.ranks_per_gpu)
    except TopologyError as error:  # raised on all ranks, for example for two of them on one GPU
        found, reason = None, str(error)
    if isinstance(facts, str) or found is None:
        if comm.rank == 0:
            log(settings, "INFO", f"no GPUs: {reason}")
        return None, reason
    from ...transport.cuda.memory_layout import default_max_ctas
    from .aware import agree, answers_of, library_path
    from .context import CudaContext

    gpu = gpu or Gpu(device)
    found, costs = as_measured(comm, found, facts)
    found = net(found)
    machine = given or found
    emulated = [d.uuid for d in machine.devices] != [d.uuid for d in found.devices]
    several = node.size < comm.size
    aware, crossing = (
        agree(comm, settings.cuda_aware, lambda: answers_of(MPI, library_path())) if several else (False, "")
    )
    here = tuple(allgather(node, comm.rank, int)) if several else ()
    plans = plan(machine, gpu, emulated)
    context, refused = None, ""
    sharing = max(Counter((d.host, d.bus) for d in found.devices).values())
    if sharing > 1 and not max_ctas:
        max_ctas = max(1, default_max_ctas(gpu.sms) // sharing)  # the kernels of all ranks must fit on the GPU at once
    try:
        context = CudaContext(
            node if several else comm, gpu, machine, plans, emulated=emulated, say=say, here=here, aware=aware,
            crossing=crossing, mixes=settings.graph_mixing, max_ctas=max_ctas,
            gate_from=settings.gate_from, costs=costs,
        )  # fmt: skip
    except (DeviceError, RemoteError) as error:  # on all ranks of a node
        refused = f"the ranks cannot share GPU memory ({error})"
    refusals = [text for text in (allgather(comm, refused, str) if several else [refused]) if text]
    if context is None or refusals:
        if context is not None:
            context.close(collectively=False)
        if comm.rank == 0:
            log(settings, "WARN", f"no GPUs: {refusals[0]}")
        return None, refusals[0]
    if comm.rank == 0:
        if several and settings.gate_from is not None:
            log(settings, "WARN", "BLINKMPI_GATE_FROM: calls between nodes have no gate; unset it")
        what = f"{comm.size} GPUs, {machine.name}{' (emulated)' if emulated else ''}"
        across = f"; between nodes chunks are {crossing}" if crossing else ""
        log(settings, "INFO", f"{what}, {gpu.name}, {gpu.versions}{across}")
    return context, ""


def as_measured(comm: Comm, found: Topology, facts: object) -> tuple[Topology, KernelCosts]:
    """The machine with what was measured of its links, and what calls on it cost; collective, raises SettingsError.

    Args:
        facts: of this rank's GPU.
    """
    from ...planning.gpus.kernel_times import costs_of
    from ...topology.measured import kept, with_measured

    measured = kept(comm, found, facts, cache_dir())
    return (with_measured(found, measured) if measured else found), costs_of(found, measured)


def choose_device(local_rank: int, local_size: int, per_gpu: int) -> int:
    """Which of the GPUs that this process sees is its own: by its place on the node, unless the user chose one.

    Raises:
        DeviceError: if there are fewer GPUs than ranks.
    """
    if not CHOSEN:
        count, current = device_count(), int(cupy().cuda.runtime.getDevice())
        if count == 1 or current:  # isolated by the launcher, or chosen by the user
            CHOSEN.append(current)
        elif local_size <= count * per_gpu:
            CHOSEN.append(local_rank % count)
        else:
            raise DeviceError(f"{local_size} ranks on a node, of whose GPUs this process sees {count}; "
                              "start one rank per GPU, or, for tests without speed, set "
                              f"BLINKMPI_RANKS_PER_GPU={-(-local_size // count)}")  # fmt: skip
    return CHOSEN[0]
