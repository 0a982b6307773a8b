"""The kernels of ``topo --measure`` compile for every GPU generation, and keep their values in registers."""

import pytest

from blinkmpi.transport.cuda.device import kernel_source
from blinkmpi.transport.cuda.link_rates import SOURCE
from tests.unit.transport.nvrtc import compiled


@pytest.mark.parametrize(("arch", "version"), [("sm_70", 12), ("sm_80", 13), ("sm_90", 13), ("sm_100", 13)])
def test_the_kernels_compile(arch: str, version: int) -> None:
    found = compiled(kernel_source(SOURCE), arch, version=version)
    assert set(found) == {"push", "flag"}
    for name, used in found.items():
        assert used.stack == used.spilled == 0, name
        assert used.registers <= 64, name
