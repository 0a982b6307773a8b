"""The machine: devices, switches and links as a value, and everything that describes or finds one.

``model``         the value types
``machines``      the catalogue of known machines; ``rates`` says what one link of a kind carries
``importers``     a user's words to a topology; ``nccl`` reads and writes XML, ``nvidia_smi`` and
                  ``rocm_smi`` read texts
``probe``         asks NVML and /sys about a GPU; ``gpu`` holds the facts, ``gpu_topology`` makes a machine of them
``visible``       which GPUs of the live machine a process may take
``live``          finds the live machine over a communicator; ``network_rate`` measures the network between nodes
``measured``      what ``blinkmpi topo --measure`` found out about the links
``diff, show``    compare two machines; print one

Nothing here plans, or communicates without a communicator that is passed in. Import ``show`` (needs rich) and ``probe``
(looks at this machine) explicitly.
"""

from typing import TYPE_CHECKING

from ..util.lazy import lazily

if TYPE_CHECKING:
    from .gpu import GpuFacts
    from .gpu_topology import from_gpus
    from .importers import load, modify, parse_gpus
    from .live import GpuMachine, ProcessInfo, exchange, gather, gather_gpus, this_machine
    from .machines import cpu_node, machine, names
    from .model import Device, Link, Switch, Topology
else:
    __getattr__, __dir__ = lazily(__name__, {
        "gpu": ("GpuFacts",),
        "gpu_topology": ("from_gpus",),
        "importers": ("load", "modify", "parse_gpus"),
        "live": ("GpuMachine", "ProcessInfo", "exchange", "gather", "gather_gpus", "this_machine"),
        "machines": ("cpu_node", "machine", "names"),
        "model": ("Device", "Link", "Switch", "Topology"),
    })  # fmt: skip

__all__ = [
    "Device", "GpuFacts", "GpuMachine", "Link", "ProcessInfo", "Switch", "Topology", "cpu_node", "exchange",
    "from_gpus", "gather", "gather_gpus", "load", "machine", "modify", "names", "parse_gpus", "this_machine",
]  # fmt: skip
