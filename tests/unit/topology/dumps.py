"""Small descriptions of machines with the traits of real dumps, for tests of their readers."""

from collections.abc import Iterable


def gpu(number: int, *inside: str, facts: str = 'sm="90"', rank: int | None = None, at: str = "") -> str:
    """A GPU on PCIe, as NCCL writes it."""
    rank_of = number if rank is None else rank
    return (f'<pci busid="{at or bus(number)}" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
            f'<gpu dev="{number}" {facts} rank="{rank_of}">\n{"".join(inside)}</gpu></pci>\n')  # fmt: skip


def bus(number: int) -> str:
    return f"0000:{number + 1:02x}:00.0"


def cpu(*inside: str, numa: int = 0, host: str = "") -> str:
    said = f' host_hash="{host}"' if host else ""
    return f'<cpu numaid="{numa}"{said}>\n{"".join(inside)}</cpu>\n'


def system(*inside: str) -> str:
    return f'<system version="1">\n{"".join(inside)}</system>\n'


def net(name: str, mbits: int) -> str:
    return f'<nic><net name="{name}" speed="{mbits}"/></nic>\n'


def bridge(number: int, *inside: str) -> str:
    """A PCIe switch."""
    return (f'<pci busid="0000:{number + 0xa0:02x}:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">'
            f'\n{"".join(inside)}</pci>\n')  # fmt: skip


def xgmi(to: Iterable[int], count: int = 1) -> str:
    return "".join(f'<xgmi target="{bus(i)}" count="{count}" tclass="0x120000"/>\n' for i in to)


SWITCH = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>\n'
C2C = '<c2c bw="44712" count="5"/>\n'


def all_to_all(n: int, facts: str) -> str:
    """AMD's GPUs, each joined to every other, with a network card of 400 Gb/s under the PCIe switch of each."""
    return system(cpu(*(
        bridge(i, gpu(i, xgmi(j for j in range(n) if j != i), facts=facts),
               f'<pci busid="0000:{i + 0x50:02x}:00.0" class="0x020700">{net(f"mlx5_{i}", 400_000)}</pci>\n')
        for i in range(n)
    )))  # fmt: skip


def trays(*hosts: str, cards: bool = False) -> str:
    """Nodes of one NVLink domain: two GPUs each, at the same PCI ids."""
    parts = (cpu(*(gpu(i, SWITCH, C2C, facts='sm="103"', rank=2 * k + i) for i in range(2)),
                 net("mlx5_0", 400_000) if cards else "", host=host) for k, host in enumerate(hosts))  # fmt: skip
    return system(*parts)


ROCM = """

============================ ROCm System Management Interface ============================
================================ Hops between two GPUs ===================================
       GPU0         GPU1         GPU2
GPU0   0            1            2
GPU1   1            0            1
GPU2   2            1            0
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         XGMI
GPU1   XGMI         0            XGMI
GPU2   XGMI         XGMI         0
======================================= Numa Nodes =======================================
GPU[0]		: (Topology) Numa Node: 0
GPU[1]		: (Topology) Numa Node: 0
GPU[2]		: (Topology) Numa Node: 1
================================== End of ROCm SMI Log ===================================
"""
