"""``BlinkGroup``: the process group behind ``dist.init_process_group("blink")``.

torch (2.4 to 2.13, and newer ones still) takes a subclass of ``ProcessGroup`` as it is, in place of its own. What it
does not override, torch sends to the backend that is registered for the tensor's device: gloo's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import dispatcher_of, open_dispatcher
from ..errors import ArgumentError, BlinkError
from ..runtime.bootstrap import own_settings
from ..util.settings import log
from .collectives import TensorCollectives, explained
from .device_messages import DeviceMessages
from .messages import carrier, gloo
from .operands import Tensor, held, only, put
from .own_messages import OwnMessages
from .work import Work

CPU = torch.device("cpu")


class BlinkGroup(TensorCollectives, dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are a Communicator's.

    Args:
        store: torch's, of this group alone.
        timeout: of its calls, where they have none of their own.
        open_comm: makes the Communicator; collective, called by the first collective at the latest.
        name: torch's name of the group.
        ranks: its ranks in the job; none: as here.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        open_comm: Callable[[], Any],
        name: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, size)
        self.ranks = [] if list(ranks) == list(range(size)) else list(ranks)
        self.store, self.rank_here, self.timeout_s = store, rank, timeout.total_seconds()
        self._open, self._name, self._description, self._sequence = open_comm, name, "undefined", 0
        self._comm: Any = None
        self._own_messages, self.device_messages = OwnMessages(), DeviceMessages(rank, size)
        self._opening = Lock()  # of this group alone: another rank's threads may open groups in another order
        self._end: weakref.finalize[Any, Any] | None = None
        self._gloo = gloo(store, rank, size, timeout)
        if self._gloo is not None and not isinstance(self._gloo, Exception):
            self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)
            if hasattr(self, "_set_default_backend"):  # 2.15 asks it for the group's name; 2.4 has none
                self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    @property
    def comm(self) -> Any:
        """The Communicator; collective when it is first asked for."""
        if self._comm is None:
            with self._opening:
                if self._comm is None:
                    comm = self._open()
                    self._end = weakref.finalize(self, _forget, comm)
                    try:
                        self.device_messages.open(comm)
                    finally:
                        self._comm = comm
        return self._comm

    @property
    def opened(self) -> bool:
        """Whether it has a Communicator already."""
        return self._comm is not None

    # ---- who it is

    def getBackendName(self) -> str:
        """What ``dist.get_backend`` says."""
        return "blink"

    def setGroupName(self, name: str) -> None:
        """Torch's name of the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Torch's name of the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """What torch's user calls it."""
        self._description = description

    def getGroupDesc(self) -> str:
        """What torch's user calls it."""
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        """Torch counts calls by this; ours are counted by the Communicator."""

    def _get_sequence_number_for_group(self) -> int:
        dispatcher = open_dispatcher(self.comm) if self.opened else None
        return 0 if dispatcher is None else int(dispatcher.sequence.seq)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    # ---- point-to-point

    @explained
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Any:
        """Send a tensor to a rank: from GPU to GPU, or over gloo, one on a GPU by way of host memory."""
        tensor = only(tensors, "send")
        if peer == self.rank_here:
            return self._own_messages.send(tensor, tag)
        if tensor.is_cuda and (end := self.device_messages.next(peer, sends=True)):
            return self._noted(end.put(tensor, tag, self.timeout_s))
        return carrier(self._gloo).send([tensor.cpu() if tensor.is_cuda else tensor], peer, tag)

    @explained
    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Any:
        """Receive what a rank sends, into a tensor that lies where the sender's does: on a GPU, or in host memory."""
        tensor = only(tensors, "recv")
        if peer == self.rank_here:
            return self._own_messages.receive(tensor, tag, peer, self.timeout_s)
        if tensor.is_cuda and (end := self.device_messages.next(peer, sends=False)):
            return self._noted(end.put(tensor, tag, self.timeout_s))
        return self._received(tensor, lambda memory: carrier(self._gloo).recv([memory], peer, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        """Receive what any other rank sends, over gloo.

        Raises:
            ArgumentError: for a tensor on a GPU, where messages go from GPU to GPU.
        """
        tensor = only(tensors, "recv")
        if tensor.is_cuda and not self.device_messages.why_not:
            raise ArgumentError(
                "recv of a GPU tensor from any rank: messages go from GPU to GPU, and each is awaited from one rank; "
                "name the source, or send and receive tensors in host memory"
            )
        begun = self._received(tensor, lambda memory: carrier(self._gloo).recv_anysource([memory], tag))
        if isinstance(begun, Received):
            begun.tell = self.device_messages.count_received
        return begun

    def _received(self, tensor: Tensor, begin: Callable[[Tensor], Any]) -> Any:
        if not tensor.is_cuda:
            return begin(tensor)
        memory = torch.empty_like(tensor, device="cpu")
        return Received(begin(memory), tensor, memory)

    # ---- what torch asks of the backend for a device

    def _get_backend(self, device: Any) -> Any:
        """Gloo's for messages in host memory; for another device what answers torch's questions about it."""
        try:
            return super()._get_backend(device)
        except RuntimeError:  # none is registered
            return DeviceBackend(self, torch.device(device))

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Torch's own (2.14 and newer) would end the process: it wants a store that only C++ can give a group."""
        raise ArgumentError("dist.split_group: backend blink splits no groups; make one by dist.new_group(ranks)")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Meet within a time of this call's own. The error names all late ranks, with or without ``wait_all_ranks``."""
        self.comm.Barrier(timeout=self.timeout_s if timeout is None else timeout.total_seconds())

    # ---- the end

    def shutdown(self) -> None:
        """Free the Communicator; collective.

        Where that fails, since another rank does something else, the error is logged and not raised: it would keep
        torch from forgetting the group, and from making another one.
        """
        self.device_messages.close()
        if self._end is not None and self._end.detach() is not None:
            try:
                self.comm.Free()
            except BlinkError as error:
                log(own_settings(), "WARN", f"group {self._name}, while it was destroyed: {error}")

    def abort(self) -> None:
        """End the calls of all ranks at once, without waiting for them."""
        if self.opened:
            dispatcher_of(self.comm).sequence.die(BlinkError(f"rank {self.rank_here} aborted the group {self._name}"))


class DeviceBackend:
    """A group, where torch asks for its backend of a device: a group of a bound device (``device_id=``) is asked so."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, group: BlinkGroup, device: Any) -> None:
        self._group, self.device = group, device

    def name(self) -> str:
        """The backend's name."""
        return "blink"

    def rank(self) -> int:
        """This process."""
        return self._group.rank_here

    def size(self) -> int:
        """How many there are."""
        return int(self._group.size())

    def supports_tensor_alloc(self, device: Any = None) -> bool:
        """Whether it makes tensors for collectives; :func:`blinkmpi.torch.memory` does."""
        return False

    def abort(self) -> None:
        """As the group's."""
        self._group.abort()

    def shutdown(self) -> None:
        """The group is asked for this, too."""


def communicator(comm: Any, what: str) -> Any:
    """The Communicator that is meant: itself, or that of a process group; by default of the default group.

    Args:
        what: is called, for errors.

    Raises:
        ArgumentError: if there is none.
    """
    if comm is None or isinstance(comm, dist.ProcessGroup):
        if comm is None and not dist.is_initialized():
            raise ArgumentError(f"{what}: there is no process group; pass a Communicator, or call init_process_group")
        group = dist.distributed_c10d._get_default_group() if comm is None else comm
        if not isinstance(group, BlinkGroup):
            raise ArgumentError(f"{what}: this group's backend is {group.name()}, not blink; pass a Communicator")
        return group.comm
    if not hasattr(comm, "memory_pool"):
        raise ArgumentError(f"{what} of {comm!r}: expected a blinkmpi.Communicator or a group of backend blink")
    return comm


def same_ranks(comm: Any, group: dist.ProcessGroup, what: str) -> None:
    """Refuse a Communicator of other ranks than torch's group: its result would be theirs alone, and no error.

    Raises:
        ArgumentError: if their numbers of ranks, or this rank's numbers in them, differ.
    """
    if (comm.rank, comm.size) != (group.rank(), group.size()):
        raise ArgumentError(
            f"{what}: rank {group.rank()} of torch's group of {group.size()} is rank {comm.rank} of a Communicator of "
            f"{comm.size}; pass one of the same ranks. Under torchrun every process is an MPI of its own: pass "
            "torch.distributed.new_group(backend='blink')"
        )


class Received(Work):
    """A message for GPU memory that comes by way of host memory.

    Args:
        work: gloo's.
        tensor: where it shall be; copied there by ``wait``.
    """

    tell: Callable[[int], None] | None = None  # is told who has sent it, once

    def __init__(self, work: Any, tensor: Tensor, memory: Tensor) -> None:
        super().__init__([tensor])
        self._work, self._memory = work, memory

    def is_completed(self) -> bool:
        """Whether the message is here."""
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message and copy it, on the current stream."""
        self._work.wait(*(() if timeout is None else (timeout,)))
        if self.tell is not None:
            self.tell(self.source_rank())
            self.tell = None
        put(held(self.outputs[0]), self._memory)
        return True

    def source_rank(self) -> int:
        """Who sent it."""
        return int(self._work._source_rank())

    _source_rank = source_rank


def _forget(comm: Any) -> None:
    """A group that nobody has shut down: its peers may have gone, so nothing is waited for."""
    dispatcher = open_dispatcher(comm)
    if dispatcher is not None and dispatcher.sequence.dead is None:
        dispatcher.sequence.dead = BlinkError("its process group was forgotten; call dist.destroy_process_group()")
