"""torch's group on GPUs that are none: tensors in host memory, and streams of a device without memory or kernels.

Within :func:`streams_of_nothing`, and within ``fake_gpus``, its collectives go the way of tensors on a GPU, through
torch_extension.cpp, down to the driver that launches nothing. Used by benchmarks/torch_host_time.py and by tests.
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

DEVICE = Path(__file__).with_name("no_device.cpp")
APART = 4  # the stream of calls for which nobody waits


class Streams:
    """The streams of this process.

    Attributes:
        device: the module of no_device.cpp.
        current: the current one's number.
    """

    def __init__(self, device: Any) -> None:
        self.device, self.current = device, 0

    def go_on(self, stream: int) -> None:
        """Make a stream the current one."""
        self.device.go_on(stream)
        self.current = stream


def modules() -> tuple[Any, Any]:
    """torch_extension.cpp, compiled to read tensors in host memory, and no_device.cpp."""
    from blinkmpi.torch.torch_extension import NAME, SOURCE, flags_of, loaded
    from blinkmpi.transport.host.native import built

    found = []
    for source, name, more in (SOURCE, f"in_host_memory.{NAME}", ["-DBLINK_DEVICE=CPU"]), (DEVICE, DEVICE.stem, []):
        path, why = built(source, [*flags_of()[0], *more])
        if path is None:
            raise RuntimeError(f"{source.name} does not compile: {why}")
        found.append(loaded(name, path))
    return found[0], found[1]


@contextlib.contextmanager
def streams_of_nothing() -> Iterator[Streams]:
    """torch's groups go by streams that are none."""
    import torch

    from blinkmpi.torch import fast_path, profiling, streams, work

    extension, device = modules()
    found = Streams(device)

    class Stream(torch.Stream):  # type: ignore[misc]
        """One that looks like CUDA's."""

        @property
        def cuda_stream(self) -> int:
            """Its address."""
            return int(self.stream_id)

    @cache
    def stream(number: int) -> Any:
        made = device.stream(number)
        return Stream(number, made.device_index, made.device_type)

    def nothing(_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capability(_: Any) -> tuple[int, int]:
        return 9, 0

    names: dict[str, Any] = {
        "extension": lambda **_: extension, "capturing": lambda: False,
        "current_stream": lambda _: stream(found.current), "communication_stream": lambda _: stream(APART),
        "communication_stream_here": lambda: (-1, stream(APART)),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module in (fast_path, profiling, streams, work):
            for name, value in names.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        for name, value in ("stream", nothing), ("get_device_capability", capability):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        device.go_on(0)
        yield found


def group_of(comm: Any, timeout_s: float = 60.0) -> Any:
    """The collectives of a group, by torch's names.

    Args:
        comm: a Communicator that was made within ``fake_gpus``, with ``stream="current"``.
    """
    from blinkmpi.torch.collectives import TensorCollectives

    group = TensorCollectives()
    group.comm, group.rank_here, group.timeout_s = comm, comm.rank, timeout_s
    return group
