"""What makes a communicator's calls in NCCL's place: kinds of calls become records, which the door launches by itself.

Only packets carry them so far: kinds whose calls take another protocol stay NCCL's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import ArgumentError, DeviceError
from ..planning.plan import Rule
from ..program.call import BLOCKED, Call
from ..program.reduction import dtype_of
from ..transport.announcement import COUNT, Called
from ..transport.cuda.device import Gpu
from ..transport.cuda.kernel_layout import buffers_at, common_words, fill_call, fingerprint_at
from ..transport.cuda.loaded_kernel import form_of
from ..transport.cuda.packets import PROTOCOLS
from ..transport.cuda.transport import CudaTransport
from ..transport.host.c_structs import fields
from .counts import OPS, TYPES

DOOR = Path(__file__).with_name("door")
COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall")
NEVER_NS = 1 << 60  # how long a kernel waits for its peers: as long as NCCL's
MOST_WORDS = 512  # of a kernel's arguments
FUNCTIONS = {
    "launch": "cuLaunchKernel", "current": "cuCtxGetCurrent", "enter": "cuCtxSetCurrent",
    "capturing": "cuStreamIsCapturing", "wait": "cuStreamWaitEvent", "mark": "cuEventRecordWithFlags",
    "copy": "cuMemcpyDtoDAsync_v2",
}  # fmt: skip


class Kind(NamedTuple):
    """Calls that one record makes, in NCCL's numbers; see ``door_kind_t`` of binder.h."""

    collective: int
    type: int
    op: int
    root: int
    size_class: int

    @property
    def name(self) -> str:
        """The collective's."""
        return COLLECTIVES[self.collective]

    @property
    def dtype(self) -> str:
        """The elements' type; of those with which nobody calculates, as they are moved."""
        return TYPES[self.type] if self.type < TYPES.index("float8_e4m3") else "uint8"

    def largest(self, n: int) -> Call:
        """The longest call of this kind among ``n`` ranks.

        Raises:
            ArgumentError: if there is none that has an element for each rank.
        """
        name, dtype = self.name, self.dtype
        blocks = n if name in BLOCKED else 1
        count = (1 << self.size_class) // (dtype_of(dtype).itemsize * blocks)
        if not count:
            raise ArgumentError(f"{name} of {dtype} among {n} ranks: no call has {1 << self.size_class} bytes at most")
        counts = (count,) * (n if name == "reduce_scatter" else 1)
        return Call(name, n, counts, dtype, OPS[self.op] if self.op >= 0 else "", self.root)  # type: ignore[arg-type]


class OpenGpus(Protocol):
    """The GPUs of a communicator, as one of its ranks has them. A CudaContext is one."""

    @property
    def transport(self) -> CudaTransport:
        """Loads kernels."""

    @property
    def gpu(self) -> Gpu:
        """This rank's."""

    @property
    def rank(self) -> int:
        """Its number."""

    def rule(self, call: Call, *, registered: bool) -> Rule:
        """The row of the selection table that a call takes."""

    def close(self, *, collectively: bool) -> None:
        """Give back what no peer looks at."""


class RecordStruct(ctypes.Structure):
    """``record_t`` of record.h."""

    _fields_ = fields(str(DOOR / "record.h"), "record_t")


class Record:
    """A kind of calls of one communicator as the door launches them; it keeps what that names.

    Args:
        event: the driver's, of all records of this process and GPU.

    Raises:
        DeviceError: if no protocol that the door launches carries the kind.
    """

    def __init__(self, context: OpenGpus, kind: Kind, event: int) -> None:
        call, n = kind.largest(context.transport.n), context.transport.n
        rule = context.rule(call, registered=False)
        if rule.protocol not in PROTOCOLS:
            raise DeviceError(f"{call.text} takes {rule.protocol}, which the door cannot launch yet")
        called = Called(f"nccl {call.text.replace(f'({call.counts[0]} x ', f'({COUNT} x ', 1)}", call.counts[0])
        protocol = PROTOCOLS[rule.protocol]
        kernel = context.transport.load_packets(call, rule.protocol, called, rule.ctas)
        if len(kernel.args) > MOST_WORDS:
            raise DeviceError(
                f"{call.text}: a kernel's {len(kernel.args)} arguments, the door has room for {MOST_WORDS}"
            )
        fill_call(kernel.args, n, NEVER_NS, (0,) * 6)
        self.kernel, self.called = kernel, called
        most = context.transport.packet_ctas(protocol.codec, rule.ctas)
        numbers = {
            **_functions(context.gpu.driver), "context": context.gpu.functions["context"], "event": event,
            "function": kernel.kernel.handle, "block": kernel.block, "most": most,
            "words": ctypes.addressof(kernel.args), "count": len(kernel.args), "fingerprint_at": fingerprint_at(n),
            "send_at": buffers_at(n), "recv_at": buffers_at(n) + 1, "packets_at": common_words(n),
            "form": form_of(rule.protocol, called.text), "n": n, "rank": context.rank, "collective": kind.collective,
            "root": kind.root, "item_bytes": dtype_of(call.dtype).itemsize, "two_shot": int(protocol.two_shot),
            "group": protocol.codec.group, "data": protocol.codec.data,
        }  # fmt: skip
        self._struct = RecordStruct(**numbers)
        self.address = ctypes.addressof(self._struct)


class GroupStruct(ctypes.Structure):
    """``door_group_t`` of binder.h."""

    _fields_ = fields(str(DOOR / "binder.h"), "door_group_t")


class KindStruct(ctypes.Structure):
    """``door_kind_t`` of binder.h."""

    _fields_ = fields(str(DOOR / "binder.h"), "door_kind_t")


ADDRESS = ctypes.c_void_p
IN_C = ("gpu", "launch", "abort", "wrong")  # which the door has itself
OPEN = ctypes.CFUNCTYPE(ADDRESS, ctypes.POINTER(GroupStruct), ADDRESS, ctypes.c_size_t)
BIND = ctypes.CFUNCTYPE(ADDRESS, ADDRESS, ctypes.POINTER(KindStruct), ADDRESS, ctypes.c_size_t)
CLOSE = ctypes.CFUNCTYPE(None, ADDRESS)


class BinderStruct(ctypes.Structure):
    """``door_binder_t`` of binder.h."""

    _fields_ = (
        ("gpu", ADDRESS), ("open", OPEN), ("bind", BIND), ("launch", ADDRESS), ("abort", ADDRESS), ("wrong", ADDRESS),
        ("close", CLOSE),
    )  # fmt: skip


class Group(NamedTuple):
    """A communicator: a name that no other one has, the UUID of this rank's GPU, and its ranks' processes.

    ``lost`` says while it is being opened which rank will not open it any more; None as far as is known.
    """

    n: int
    rank: int
    name: str
    gpu: bytes
    pids: tuple[int, ...]
    lost: Callable[[], int | None] = lambda: None


class Opened(NamedTuple):
    """A communicator's GPUs, and why calls of a kind stay NCCL's though they could be made; empty: they do not."""

    context: OpenGpus
    declined: Callable[[Kind], str] = lambda kind: ""


class Binder:
    """Makes records for the door: of each communicator's kinds, on GPUs that its ranks have opened together.

    The door calls Python from a thread of its own alone. What its callers need is in C: to tell the current GPU, to
    launch, to abort, and what kernels have reported.

    Args:
        open_context: opens the GPUs of a communicator, together with the other ranks' binders.
        gpu: a C function that stands for the door's own, by its address; 0: none.
    """

    def __init__(self, door: ctypes.CDLL, open_context: Callable[[Group], Opened], *, gpu: int = 0) -> None:
        self._door, self._open_context = door, open_context
        self._contexts: dict[int, Opened] = {}  # by what the door knows it by: where its kernels' report lies
        self._records: dict[int, list[Record]] = {}
        self._event = ctypes.c_void_p()
        own = {name: ctypes.cast(getattr(door, f"blinkmpi_door_{name}"), ADDRESS).value for name in IN_C}
        self._struct = BinderStruct(
            **own | {"open": OPEN(self._open), "bind": BIND(self._bind), "close": CLOSE(self._close)}
        )
        if gpu:
            self._struct.gpu = gpu

    def serve(self) -> None:
        """Let the door ask from now on, as long as the process lives.

        Raises:
            ArgumentError: if it has a binder.
        """
        if self._door.blinkmpi_door_serve(ctypes.byref(self._struct)):
            raise ArgumentError("the door has a binder; a process has one")

    def _open(self, group: Any, reason: int, nbytes: int) -> int | None:
        """Open a communicator's GPUs; by what the door knows it."""
        return _told(reason, nbytes, lambda: self._opened(group[0]))

    def _bind(self, at: int, kind: Any, reason: int, nbytes: int) -> int | None:
        return _told(reason, nbytes, lambda: self._bound(at, kind[0]))

    def _opened(self, group: Any) -> int:
        name = "".join(f"{getattr(group, f'name[{i}]'):016x}" for i in (0, 1))
        gpu = b"".join(getattr(group, f"gpu[{i}]").to_bytes(8, "little") for i in (0, 1))
        pids = tuple(getattr(group, f"pid[{rank}]") for rank in range(group.n))
        peers = ctypes.c_void_p(group.peers)

        def lost() -> int | None:
            found = int(self._door.blinkmpi_door_lost(peers))
            return None if not found else found - 1 if found > 0 else int(group.rank)

        opened = self._open_context(Group(group.n, group.rank, name, gpu, pids, lost))
        context = opened.context
        if not self._event:
            with context.gpu.entered():
                self._event = context.gpu.event()
        at = context.transport.memory.report_at
        self._contexts[at], self._records[at] = opened, []
        return at

    def _bound(self, at: int, kind: Any) -> int:
        numbers = (kind.collective, kind.type, kind.op, kind.root, kind.size_class)
        context, declined = self._contexts[at]
        if why := declined(Kind(*numbers)):
            raise DeviceError(why)
        with context.gpu.entered():
            record = Record(context, Kind(*numbers), self._event.value or 0)
        self._records[at].append(record)
        return record.address

    def _close(self, at: int) -> None:
        """Let the calls under way end, and give back what no peer looks at; the rest stays until the process ends."""
        context = self._contexts.pop(at).context
        with context.gpu.entered():
            context.gpu.runtime.deviceSynchronize()
            context.close(collectively=False)
        del self._records[at]


def _told(reason: int, nbytes: int, work: Callable[[], int]) -> int | None:
    """What some work gives. None if it fails in any way: this rank cannot make the calls, and the door says why."""
    try:
        return work()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".encode()[: nbytes - 1]
        ctypes.memmove(reason, text + b"\0", len(text) + 1)
        return None


def _functions(driver: Any) -> Mapping[str, int]:
    """Where the driver's functions lie."""
    return {name: ctypes.cast(getattr(driver, symbol), ADDRESS).value or 0 for name, symbol in FUNCTIONS.items()}
