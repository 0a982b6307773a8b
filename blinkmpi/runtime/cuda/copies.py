"""What is copied on a call's stream before its kernel and behind it, and the buckets of groups.

Copies of a call are copies of the driver's, one for each piece. A launch of a group has many pieces: one kernel gathers
them all, another one scatters the results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import DeviceError, RemoteError
from ...program.memory import DeviceArray, Segments, address
from ...transport.cuda.codegen import segments_source
from ...transport.cuda.device import Kernel, cupy
from ...transport.cuda.kernel_layout import SEGMENT_THREADS, segment_launches
from ...transport.cuda.loaded_kernel import ONE
from ...transport.cuda.memory_layout import GIVEN_UP_AT
from ..arguments import Copy, Prepared
from ..entering import enter

if TYPE_CHECKING:
    from ..sequence import CallSequence
    from .context import CudaContext

LEAST_BUCKET = 2 << 20  # bytes: the driver's smallest allocation


class CopiesAround:
    """The copies of one call, with all arguments converted; valid while its buffers are.

    Args:
        stream: of the call.
        holder: keeps the stream alive.

    Attributes:
        gathers, scatters: kernels before and behind the call's: each with its CTAs, their threads and its arguments.
        plain: whether there are copies of the driver's.
    """

    def __init__(self, context: CudaContext, ready: Prepared, stream: int, holder: object) -> None:
        gpu = context.gpu
        self._before: list[Callable[[], None]] = [partial(gpu.copy, *piece, stream) for piece in _before(ready)]
        self._after: list[Callable[[], None]] = [partial(gpu.copy, *piece, stream) for piece in _copies(ready.after)]
        self.plain = bool(self._before or self._after)
        self.gathers, self.scatters = (
            (_kernels(context, part, name) for part, name in zip(ready.segments, ("gather", "scatter"), strict=True))
            if ready.segments
            else ([], [])
        )
        if ready.segments:
            # other streams use the bucket, too: keep their order
            follow = partial(context.transport.follow, stream, holder)
            self._before += [follow, *(_launcher(kernel, "gather", stream) for kernel in self.gathers)]
            self._after += [_launcher(kernel, "scatter", stream) for kernel in self.scatters]
            self._after.append(partial(context.transport.followed, stream))
        self.any = bool(self._before or self._after)

    def before(self) -> None:
        """Enqueue what comes before the kernel."""
        for start in self._before:
            start()

    def after(self) -> None:
        """Enqueue what comes behind it."""
        for start in self._after:
            start()


CopyingKernel = tuple[Kernel, int, int, Any]  # (kernel, CTAs, threads of each, arguments)


def _kernels(context: CudaContext, segments: Segments, name: str) -> list[CopyingKernel]:
    """The kernels that copy some segments."""
    if not segments.pieces:
        return []
    kernel, given_up = context.gpu.compile(segments_source(), name), context.transport.memory.own + GIVEN_UP_AT
    return [
        (kernel, ctas, SEGMENT_THREADS, (ctypes.c_uint64 * len(words))(*words))
        for ctas, words in segment_launches(segments, given_up)
    ]


def _launcher(copying: CopyingKernel, name: str, stream: int) -> Callable[[], None]:
    """What puts such a kernel on the stream."""
    kernel, ctas, threads, words = copying
    params = ONE(ctypes.addressof(words))
    return partial(_start, kernel.launcher(ctas, threads, stream, params, f"{name} of a group"), (words, params))


def _start(launch: Callable[[], None], _arguments: Any) -> None:
    launch()


def _before(ready: Prepared) -> list[tuple[int, int, int]]:
    """(to, from, bytes) of what is copied before a call."""
    send, copies = ready.send, _copies(ready.before)
    if isinstance(send, DeviceArray) and send.copy_of:
        copies.insert(0, (send.ptr, send.copy_of, send.nbytes))
    return copies


def _copies(copies: Sequence[Copy]) -> list[tuple[int, int, int]]:
    """(to, from, bytes) of copies that have any."""
    return [(address(to), address(source), to.nbytes) for to, source in copies if to.nbytes]


class Buckets:
    """Memory of our own in which groups are gathered: registered, of doubling sizes, kept until ``Free``.

    Graphs may name it, so it is never given back before. Ranks that make the same groups ask for the same sizes.
    """

    def __init__(self, sequence: CallSequence) -> None:
        self._sequence = sequence
        self._made: dict[int, tuple[int, Any]] = {}  # by bytes: the address and the array

    def room(self, nbytes: int) -> int:
        """The address of so many bytes, aligned for whatever; all ranks come together if there is no such bucket yet.

        Raises:
            BlinkError: on every rank, if there is no room or some rank does not come.
        """
        size = LEAST_BUCKET
        while size < nbytes:
            size *= 2
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size][0]

    def _make(self, size: int) -> tuple[int, Any]:
        context = self._sequence.context.cuda()
        enter(self._sequence, f"making room for groups of {size} bytes", lambda: None)
        with context.gpu.entered():
            try:
                array = context.empty(size, "uint8")
            except (DeviceError, RemoteError) as error:  # on every rank
                text = f"groups of up to {size} bytes are gathered in memory that is not registered: {error}"
                self._sequence.context.log_once(text)
                array = cupy().empty(size, "uint8")
        return int(array.data.ptr), array
