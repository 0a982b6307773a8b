"""The live machine, as the commands see it: collective."""

import socket
from typing import Any

from ..doctor.examination import own_gpu
from ..topology.gpu import GpuFacts
from ..topology.gpu_topology import from_gpus
from ..topology.live import gather, gather_gpus
from ..topology.measured import applied
from ..topology.model import Topology
from ..topology.network_rate import MessagingComm
from ..topology.probe import Nvml, probe, probe_all
from ..util.cache_folder import cache_dir
from ..util.settings import read
from ..util.together import Comm


def live_machine(world: MessagingComm, node: Comm) -> Topology:
    """The machine of a job: its GPUs, if every rank has one, else its CPU ranks; collective.

    One process alone sees all GPUs of the machine that NVML shows. BLINKMPI_GPU_DISABLE=1 leaves the CPU ranks.

    Raises:
        BlinkError: as ``topology.gather`` does.
    """
    shown = () if read().gpu_disable else Nvml().buses()
    alone = world.size == 1
    if shown and alone:
        facts = probe_all()
        found = from_gpus(facts, hosts=[socket.gethostname()] * len(facts))
        return applied(world, found, facts[0], cache_dir())
    _, own, machine = gathered(world, node)
    return machine if isinstance(own, str) else applied(world, machine, own, cache_dir())


def gathered(world: MessagingComm, node: Comm) -> tuple[Any, GpuFacts | str, Topology]:
    """This rank's GPU, its facts, and the machine; None for the GPU, and why, if some rank has none; collective."""
    gpu = own_gpu(node.rank) if not read().gpu_disable and Nvml().buses() else "NVML shows none"
    facts = gpu if isinstance(gpu, str) else probe(gpu.bus_id)
    found, reason = gather_gpus(world, node, facts, per_gpu=read().ranks_per_gpu)
    if found is None or isinstance(gpu, str):
        return None, reason, gather(world, node)
    return gpu, facts, found
