"""torch_extension.cpp as tests of it have it: for this torch, for host memory, and a device that has no memory."""

from typing import Any

import pytest

from benchmarks.fake.torch_group import DEVICE
from blinkmpi.transport.host.native import build, built


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of what is compiled may wait for a compiler, which takes long beside others."""
    for item in items:
        if "quick" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="module")
def quick() -> Any:
    """The module, as a job gets it."""
    if build()[0] is None:
        pytest.skip("no C compiler")
    pytest.importorskip("torch")
    from blinkmpi.torch import torch_extension

    found = torch_extension.wait()
    assert not torch_extension.why_none()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def device(quick: Any) -> Any:
    """A device without memory."""
    pytest.importorskip("torch")
    from blinkmpi.torch import torch_extension

    path, why = built(DEVICE, torch_extension.flags_of()[0])
    assert path is not None, why
    return torch_extension.loaded(DEVICE.stem, path)


@pytest.fixture(scope="module")
def on_cpu(quick: Any) -> Any:
    """The module, compiled to read tensors in host memory."""
    pytest.importorskip("torch")
    from blinkmpi.torch import torch_extension

    path, why = built(torch_extension.SOURCE, [*torch_extension.flags_of()[0], "-DBLINK_DEVICE=CPU"])
    assert path is not None, why
    return torch_extension.loaded(f"in_host_memory.{torch_extension.NAME}", path)  # another module by its name
