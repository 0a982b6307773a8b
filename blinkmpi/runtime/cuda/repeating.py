"""What C needs to launch a kept call again, with arrays at other addresses."""

from __future__ import annotations

import ctypes
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...errors import DeviceError
from ...program.template import Template
from ...transport.announcement import encode_counted
from ...transport.control_pages import BODY, CONTROL
from ...transport.cuda.blocks import OWN, ends_at, ends_of
from ...transport.cuda.kernel_layout import fingerprint_at
from ...transport.cuda.loaded_kernel import LoadedKernel, copied, form_of, moving
from ...transport.cuda.memory_layout import BLOCK_LANE
from ...transport.cuda.order import ORDER
from ...transport.host.launches import MOST_PARTS, MOST_WORDS, BlockLaunchStruct, LaunchStruct
from ...transport.host.repeated import RepeatedCalls
from ..foreign import EXCHANGE, imported, tensor_reader
from .buffers import tensor_types
from .call import CudaCall
from .context import CudaContext
from .history import CallHistory
from .in_flight import CallInFlight
from .operands import OperandsInFlight

RECENT = 64  # a count that was not used for so many others counts as new


class Launch:
    """A call on a stream as launches.h takes it; it keeps what that names, and nothing of the communicator's.

    ``holder`` keeps the stream alive.

    Args:
        call: which was made of buffers that others may stand for (:meth:`.calls.CudaCall.moves_to`), or a group's.
    """

    def __init__(self, call: CudaCall) -> None:
        transport, gpu, records, pages = call.context.transport, call.context.gpu, call.host.records, call.host.pages
        self.called, kernels, places = call.called, _kernels(call.kernel), call.places
        moved = moving(call.kernel, transport.n, call.registered) if places else ()
        moves = [(part, word, place.array) for part, word, which in moved if (place := places[which]) is not None]
        parts = [*call.around.gathers, *((k.kernel, k.grid, k.block, k.args) for k in kernels), *call.around.scatters]
        first = len(call.around.gathers)
        self._moves = np.array(moves, np.int64).reshape(len(moves), 3)
        self._words = [type(words).from_buffer_copy(words) for *_, words in parts]
        self._history: CallHistory = weakref.proxy(call.history)
        self._stream, self._timeout_s = call.stream, call.timeout_s
        self._transport, self.holder = transport, call.holder
        self._keep = (kernels, call.starts, records, pages, call.history.number, call.record)
        numbers: dict[str, int] = {
            **gpu.functions, "stream": call.stream, "order": ctypes.addressof(ORDER.state),
            "asks": int(transport.mixes or any(k.table for k in kernels)),
            "parts": len(parts), "first": first, "end": first + len(kernels),
            "fingerprint_at": fingerprint_at(transport.n), "moves": self._moves.ctypes.data, "moving": len(moves),
            "nbytes": call.nbytes, "n": pages.n, "rank": pages.rank, "stride": CONTROL // 8, "calls": pages.address,
            "records[0]": pages.address + pages.record(0, 0), "records[1]": pages.address + pages.record(0, 1),
            "fingerprint": call.fingerprint, "body": _at(call.record), "body_bytes": len(call.record),
            "in_kernels": records.in_kernels.ctypes.data, "report": ctypes.addressof(transport.report),
            "history": ctypes.addressof(call.history.number), "starts": ctypes.addressof(call.starts),
            "kernels": ctypes.addressof(transport.kernels_started), "of_blocks": int(call.blocks is not None),
        }  # fmt: skip
        if gate := transport.gate_of(call.kernel, transport.gate_from):  # C looks at the bytes of each call
            numbers |= {"gate": gate.handle, "gate_from": transport.gate_from}
        for i, (kernel, grid, block, words) in enumerate(parts):
            numbers |= {
                f"function[{i}]": kernel.handle, f"grid[{i}]": grid, f"block[{i}]": block,
                f"words[{i}]": ctypes.addressof(self._words[i]), f"count[{i}]": len(words),
            }  # fmt: skip
        self._struct = LaunchStruct(**numbers)
        self.address = ctypes.addressof(self._struct)

    @property
    def text(self) -> str:
        """The call as people read it."""
        return self.called.words

    def follow(self) -> None:
        """Let its stream follow the last call, where C cannot; who calls this holds the lock of all calls."""
        self._transport.begin(self._stream, self.holder)

    def go_on(self, seq: int, status: int) -> None:
        """Wait for a launch, or say what became of one that the driver has refused."""
        if status:
            raise DeviceError(
                f"launch of {self.text}, call {seq}: CUDA error {status}; this process must be started again"
            )
        began_ns = time.monotonic_ns()
        history = self._history
        if not history.context.gpu.capturing(self._stream):  # in a graph there is nothing to wait for
            CallInFlight(history, seq, self.text, self._timeout_s, self._stream).wait()
            if (ring := history.host.recorder.ring) is not None:
                ring.call(self.text, seq, began_ns, time.monotonic_ns())


class CountedLaunch(Launch):
    """Calls on a stream that differ in their counts alone; C has it fit the kernel to each new one.

    What names the call follows from the count in C (``fit_launch`` in launches.h).

    Args:
        counts: the least and the greatest.
        template: theirs, if they go through slots.
    """

    def __init__(self, call: CudaCall, counts: tuple[int, int], template: Template | None) -> None:
        super().__init__(call)
        self._kernel, self._call, protocol = copied(call.kernel), call.call, call.kernel.protocol
        self._starts = call.history.started.of_counts(call.call, protocol, template)
        self._recent: dict[int, None] = {}  # counts that it was fit to
        count, (least, most), (form, body) = call.call.counts[0], counts, encode_counted(call.called, BODY)
        self._body = ctypes.create_string_buffer(body, len(body))
        numbers = {
            "body": ctypes.addressof(self._body), "body_bytes": len(body), "form": form,
            "words[0]": ctypes.addressof(self._kernel.args), "starts": ctypes.addressof(self._starts.starts),
            "elements": count, "least": least, "most": most, "each_bytes": call.nbytes // count,
            "kernel_form": form_of(protocol, call.called.text),
        }  # fmt: skip
        for name, number in numbers.items():
            setattr(self._struct, name, number)

    @property
    def text(self) -> str:
        """The call of the count that it is of now, as people read it."""
        return replace(self.called, count=int(self._struct.elements)).words

    def fit(self, count: int) -> bool:
        """Be the call of another count from now on; not of one that comes again: C knows such a call by itself soon."""
        if count in self._recent:
            return False
        self._recent[count] = None
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        kernel, before = self._kernel, self._call
        self._call = call = replace(before, counts=(count,) * len(before.counts))
        assert kernel.fit is not None
        kernel.fit(kernel, call)
        setattr(self._struct, "grid[0]", kernel.grid)
        self._starts.turn_to(call)
        return True


class BlockLaunch(Launch):
    """Calls of blocks on a stream that differ in lengths and places alone: C fits the kernel to each.

    Args:
        call: one of them.
    """

    def __init__(self, call: CudaCall) -> None:
        from ...transport.host.block_call import blocks_of

        super().__init__(call)
        assert call.blocks is not None
        moves, n, rank, buffer = call.blocks.moves, call.call.n, call.context.rank, call.blocks.send or call.blocks.recv
        assert buffer is not None
        ends, first, (send_has, recv_has) = (
            ends_of(moves.collective, moves.root, rank, n),
            ends_at(n),
            blocks_of(moves, rank),
        )
        self._blocks = BlockLaunchStruct(
            n, rank, buffer.itemsize, moves.root, send_has, recv_has, first - len(OWN), first, len(ends),
            call.context.transport.block_lanes, BLOCK_LANE,
        )  # fmt: skip
        self._struct.blocks = ctypes.addressof(self._blocks)


class Repeating:
    """Makes the calls of a communicator known to C.

    Args:
        enqueues: whether calls without a stream go on the current one, and are not waited for.
        why: who executes programs on the host, which C's part comes with.
        say: logs a text once.
    """

    def __init__(
        self, repeated: RepeatedCalls, context: CudaContext, operands: OperandsInFlight, enqueues: bool,
        why: str, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._repeated, self._context, self._why, self._say = repeated, context, why, say
        self._quick: Any = None  # how C reads tensors once torch_extension.cpp is there
        ORDER.event(context.gpu)  # by which C orders calls
        self._own = (ORDER.lock.acquire, ORDER.lock.release, ORDER.holders, operands, int(enqueues), context.gpu.device)

    def keep(self, call: CudaCall, method: object, args: tuple[Any, ...], stream: Any) -> bool:
        """Let C make a call by itself from now on, that has just been made of these arguments; whether it can."""
        if any(len(kernel.args) > MOST_WORDS for kernel in _kernels(call.kernel)):
            return False
        if not self._repeated.launches:
            self._say(f"calls on streams are looked up in Python ({self._why})")
            return False
        launch = _launch_of(call)
        return self._repeated.keep_launch(launch, launch.address, method, args, stream, self._aim(args))

    def keep_blocks(self, call: CudaCall, method: object, args: tuple[Any, ...], stream: Any) -> bool:
        """Let C make calls of blocks of whatever lengths, as one that has just been made; whether it can."""
        if len(call.kernel.args) > MOST_WORDS or not self._repeated.launches:
            return False
        launch = BlockLaunch(call)
        return self._repeated.keep_launch(launch, launch.address, method, args, stream, self._aim(_flat(args)))

    def keep_counts(
        self, call: CudaCall, counts: tuple[int, int], template: Template | None,
        method: object, args: tuple[Any, ...], stream: Any,
    ) -> bool:  # fmt: skip
        """Let C make calls that differ in their counts alone from one that has just been made; whether it can."""
        if len(call.kernel.args) > MOST_WORDS or not self._repeated.launches:
            return False
        launch = CountedLaunch(call, counts, template)
        return self._repeated.keep_launch(launch, launch.address, method, args, stream, self._aim(args), counts=True)

    def keep_group(self, call: CudaCall, method: object, args: tuple[Any, ...], stream: Any) -> None:
        """Let C make a group of one launch again, that has just been made of these arguments, if it can be."""
        kernels = len(_kernels(call.kernel)) + len(call.around.gathers) + len(call.around.scatters)
        if call.repeats and kernels <= MOST_PARTS and not any(len(k.args) > MOST_WORDS for k in _kernels(call.kernel)):
            launch = _launch_of(call)
            self._repeated.keep_launched_group(launch, launch.address, method, args, stream, self._aim(_flat(args)))

    def _aim(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What C is told of the libraries, the process and the registered buffers: see ``set_launches`` there."""
        cupy, torch, tensors = imported("cupy"), imported("torch"), tensor_types()
        exchange = getattr(tensors[0], EXCHANGE, None) if tensors else None
        if exchange is None and any(type(arg) in tensors for arg in args):
            version = getattr(torch, "__version__", "")
            self._say(f"calls of torch's tensors are looked up in Python: torch {version} has no {EXCHANGE}")
        if exchange is not None and (quick := tensor_reader()) is not None:
            exchange = self._quick = self._quick or quick.exchange(exchange)
        array, stream = (cupy.ndarray, cupy.cuda.get_current_stream) if cupy is not None else (None, None)
        parts = b"".join(struct.pack("QQq", *part) for part in self._context.transport.regions.parts())
        return array, stream, tensors, exchange, *self._own, parts


def _flat(args: Sequence[Any]) -> list[Any]:
    """Arguments, and in place of lists and tuples what is in them."""
    return [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]


def _launch_of(call: CudaCall) -> Launch:
    """A call as C makes it again."""
    launch = call.launch if isinstance(call.launch, Launch) else Launch(call)
    call.launch = launch
    return launch


def _kernels(loaded: LoadedKernel) -> list[LoadedKernel]:
    return [loaded, loaded.then] if loaded.then else [loaded]


def _at(memory: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(memory), ctypes.c_void_p).value or 0
