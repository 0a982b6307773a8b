"""The rate of a link by what it is: one table, in MB/s of one link in one direction, as the makers state them.

Descriptions of machines count NVLinks and xGMI links and do not say how fast one is. These are numbers of data sheets.
What programs reach is less, and NCCL and RCCL plan with that (``src/graph/topo.h``): 18, 20 and 20.6 GB/s for NVLinks
of 20 and 25, 12 for 14.06, 40.1 for 50; 24, 36 and 48 for xGMI of 46, 50 and 64. Who knows better says so
(``--rate nvlink=21``) or measures (``blinkmpi topo --measure``).
"""

from typing import NamedTuple


class NvlinkGeneration(NamedTuple):
    """NVLinks of a version, as NVML names it, and the compute capabilities (``sm``) of the GPUs that have them."""

    version: str
    capabilities: tuple[int, ...]
    mbps: int
    source: str


NVLINK_GENERATIONS = (
    NvlinkGeneration("1.0", (60,), 20_000, "Tesla P100 white paper: 4 links, 160 GB/s both ways"),
    NvlinkGeneration("2.0", (70,), 25_000, "Tesla V100 data sheet: 6 links, 300 GB/s both ways"),
    NvlinkGeneration("2.2", (75,), 25_000, "Quadro RTX 8000 data sheet: 2 links, 100 GB/s both ways"),
    NvlinkGeneration("3.0", (80,), 25_000, "A100 data sheet: 12 links, 600 GB/s both ways"),
    NvlinkGeneration("3.1", (86,), 14_062, "GA102 white paper: 4 links, 112.5 GB/s both ways (RTX 3090, A6000, A40)"),
    NvlinkGeneration("4.0", (90,), 25_000, "H100 and H200 data sheets: 18 links, 900 GB/s both ways"),
    NvlinkGeneration("5.0", (100, 103), 50_000, "DGX B200 and GB300 data sheets: 18 links, 1.8 TB/s both ways"),
)
NVLINK_MBPS = {g.version: g.mbps for g in NVLINK_GENERATIONS}
# NVLinks whose switches reduce and multicast (NVLink SHARP): NVSwitch of the third generation, which came with NVLink 4
# ("Upgrading Multi-GPU Interconnectivity with the Third-Generation NVIDIA NVSwitch", developer.nvidia.com/blog), and of
# the fourth, with NVLink 5 (data sheets of DGX B200 and GB200 NVL72).
NVLINK_SHARP = ("4.0", "5.0")
NVLINK_OF_CAPABILITY = {sm: g.version for g in NVLINK_GENERATIONS for sm in g.capabilities}
WITHOUT_NVLINK = (89, 120, 121)  # Ada, and Blackwell for workstations: data sheets of L40S, RTX 6000 Ada, RTX PRO 6000

# AMD's data sheets, by architecture: MI50 and MI60 (2 links, 184 GB/s both ways), MI100 (3, 276), MI210 to MI250X (8 a
# package, 800), MI300X and MI325X (7, 896), MI350X and MI355X (7, 1075).
XGMI_MBPS = {"gfx906": 46_000, "gfx908": 46_000, "gfx90a": 50_000, "gfx942": 64_000, "gfx950": 76_800}

# PCI Express Base Specification, MB/s of 16 lanes each way by generation: 2.5 and 5 GT/s a lane with 8b/10b coding,
# 8, 16 and 32 GT/s with 128b/130b, 64 GT/s in flits of 256 bytes that carry 242.
PCIE_X16 = {1: 4_000, 2: 8_000, 3: 15_750, 4: 31_500, 5: 63_000, 6: 121_000}
