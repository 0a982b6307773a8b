"""The collectives of torch's ``ProcessGroup``, each as a call of the Communicator.

torch has renamed some of them (2.13), so these have two names. C++ (the reducer of DDP, functional collectives) calls
them as Python does, but leaves out options; so all have a default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ..errors import ArgumentError, BlinkError
from ..runtime.entering import enter
from .compiler import hide
from .operands import After, Reduction, Tensor, flat, nbytes, only, packed, raw, typed, unpacking, writable
from .streams import enqueue
from .work import DeviceWork, HostWork, Several, Work

NO_SECONDS = timedelta(0)
WORKS = (Work, HostWork, DeviceWork, Several)


class Operation:
    """A call, ready to be made.

    Args:
        name: the Communicator's method.
        args: its arguments; tensors in host memory are NumPy arrays here.
        memory: the tensors that the call reads and writes.
        outputs: those that torch's user gets.
        after: what brings results from temporaries to their places.
    """

    __slots__ = ("after", "args", "memory", "name", "outputs")

    def __init__(
        self, name: str, args: tuple[Any, ...], memory: Sequence[Tensor], outputs: Sequence[Tensor], after: After = None
    ) -> None:
        self.name, self.args, self.memory, self.outputs, self.after = name, args, memory, outputs, after


class TensorCollectives:
    """What a group does with tensors; :class:`.group.BlinkGroup` says who the ranks are."""

    comm: Any  # the Communicator
    rank_here: int
    timeout_s: float

    # ---- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce everybody's tensor into everybody's."""
        return self._make("allreduce", opts, lambda: _allreduce(only(tensors, "allreduce"), Reduction(opts)))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce some tensors in one call for each element type."""
        groups = _by_type(tensors)
        works = [self._make("allreduce", opts, partial(_allreduce_some, group, opts)) for group in groups]
        return Several(works, tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce everybody's tensor into the root's; the others' stay as they are."""
        root = _root(opts)
        make = partial(_reduce, self.rank_here == root, root)
        return self._make("reduce", opts, lambda: make(only(tensors, "reduce"), Reduction(opts)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors, one for each rank; each gets its own."""
        return self._make(
            "reduce_scatter",
            opts,
            lambda: _reduce_scatter(only(outputs, "reduce_scatter"), only(inputs, "reduce_scatter"), Reduction(opts)),
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce a tensor of one block for each rank; each gets its own."""
        return self._make("reduce_scatter", opts, lambda: _reduce_blocks(output, input, Reduction(opts)))

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`reduce_scatter_single`, for some pairs of tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return Several([self.reduce_scatter_single(output, one, opts) for output, one in pairs], outputs)

    # ---- what moves

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Send the root's tensor to all."""
        root = _root(opts)
        return self._make("broadcast", opts, lambda: _broadcast(only(tensors, "broadcast"), root))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Collect everybody's tensor in a list; they may differ in shape."""
        return self._make("allgather", opts, lambda: _allgather(only(outputs, "allgather"), only(inputs, "allgather")))

    def allgather_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`allgather`, for some tensors: ``outputs[r][i]`` is tensor i of rank r."""
        rows = zip(*outputs, strict=True)
        works = [self.allgather([list(row)], [one], opts) for row, one in zip(rows, inputs, strict=True)]
        return Several(works, [tensor for row in outputs for tensor in row])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Collect everybody's tensor in one."""
        return self._make("allgather", opts, lambda: _allgather_blocks(output, input, self.rank_here))

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`all_gather_single`, for some pairs of tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return Several([self.all_gather_single(output, one, opts) for output, one in pairs], outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Collect everybody's tensor in a list of the root's."""
        root = _root(opts)
        return self._make("gather", opts, lambda: _gather(outputs, only(inputs, "gather"), root))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give each rank its tensor of the root's list."""
        root = _root(opts)
        return self._make("scatter", opts, lambda: _scatter(only(outputs, "scatter"), inputs, root))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Give each rank a tensor of a list, and get one of each; they may differ in shape."""
        return self._make("alltoall", opts, lambda: _alltoall(outputs, inputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """As :meth:`alltoall`, of parts of one tensor along its first dimension; without splits they are equal."""
        n = self.comm.size
        return self._make("alltoall", opts, lambda: _alltoall_parts(output, input, output_splits, input_splits, n))

    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks have come, and on this one's GPU what is on the current stream is done.

        What went wrong in calls on that stream is raised.
        """
        if self.comm.gpu is not None and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
            self.comm.check()
        self.comm.Barrier()
        return Work(())

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- making calls

    def _make(self, what: str, opts: Any, prepare: Callable[[], Operation]) -> Work:
        """Make a call; if this rank's arguments cannot be read, all ranks hear of it in the call."""
        comm = self.comm
        hide(TensorCollectives, *WORKS)
        try:
            call = prepare()
        except Exception as error:
            wrong = error if isinstance(error, BlinkError) else ArgumentError(f"{what}: {error}")
            enter(comm._dispatcher(), what, partial(_raise, wrong))
            raise AssertionError("unreachable") from error
        seconds = self._seconds(opts)
        apart = getattr(opts, "asyncOp", True)
        if call.memory[0].is_cuda:
            put = partial(_put, getattr(comm, call.name), call.args, seconds)
            return enqueue(put, call.outputs, call.memory, call.after, apart=apart)
        if apart:
            request = getattr(comm, f"I{call.name.lower()}")(*call.args, timeout=seconds)
            return HostWork(call.outputs, request, call.after)
        getattr(comm, call.name)(*call.args, timeout=seconds)
        if call.after is not None:
            call.after()
        return Work(call.outputs)

    def _seconds(self, opts: Any) -> float | None:
        """The deadline of a call that has one of its own."""
        timeout = getattr(opts, "timeout", NO_SECONDS)
        seconds = timeout.total_seconds() if timeout > NO_SECONDS else 0.0
        return seconds if seconds > 0 and seconds != self.timeout_s else None


def _raise(error: Exception) -> None:
    raise error


def _put(method: Callable[..., object], args: tuple[Any, ...], seconds: float | None, stream: Any) -> None:
    method(*args, stream=stream, timeout=seconds)


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts or 0))


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors by device and element type, in the order of these, which is the same on all ranks."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device.type, tensor.dtype), []).append(tensor)
    return list(groups.values())


# ---- from tensors to calls


def _allreduce(tensor: Tensor, reduction: Reduction) -> Operation:
    whole, after = writable(tensor)
    return _reduced(whole, [tensor], reduction, after)


def _allreduce_some(tensors: Sequence[Tensor], opts: Any) -> Operation:
    whole, after = unpacking(tensors)
    return _reduced(packed(tensors).view(tensors[0].dtype), tensors, Reduction(opts), after, whole)


def _reduced(
    operand: Tensor, outputs: Sequence[Tensor], reduction: Reduction, after: After, into: Tensor | None = None
) -> Operation:
    """An AllReduce of a flat tensor, in place or into bytes elsewhere."""
    op = reduction.of(operand.dtype)
    send = reduction.scaled(operand)
    recv = operand if into is None else into.view(operand.dtype)
    same = send.data_ptr() == recv.data_ptr()
    return Operation("Allreduce", (None if same else typed(send), typed(recv), op), (recv, send), outputs, after)


def _reduce(here: bool, root: int, tensor: Tensor, reduction: Reduction) -> Operation:
    whole, after = writable(tensor)
    send, op = reduction.scaled(whole), reduction.of(whole.dtype)
    same = here and send is whole
    args = (None if same else typed(send), typed(whole) if here else None, op, root)
    return Operation("Reduce", args, (whole, send), [tensor], after if here else None)


def _reduce_scatter(output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Operation:
    whole, after = writable(output)
    if any(one.dtype != output.dtype for one in inputs):
        raise ArgumentError(f"{[one.dtype for one in inputs]} into {output.dtype}: expected one element type")
    send = reduction.scaled(packed(inputs).view(output.dtype))
    op, counts = reduction.of(output.dtype), [one.numel() for one in inputs]
    if len(set(counts)) == 1:
        args: tuple[Any, ...] = (typed(send), typed(whole), op)
        return Operation("Reduce_scatter_block", args, (whole, send), [output], after)
    return Operation("Reduce_scatter", (typed(send), typed(whole), counts, op), (whole, send), [output], after)


def _reduce_blocks(output: Tensor, tensor: Tensor, reduction: Reduction) -> Operation:
    whole, after = writable(output)
    operand = flat(tensor)
    send = reduction.scaled(operand)
    if send is operand and _overlap(send, whole):
        send = operand.clone()
    args = typed(send), typed(whole), reduction.of(whole.dtype)
    return Operation("Reduce_scatter_block", args, (whole, send), [output], after)


def _broadcast(tensor: Tensor, root: int) -> Operation:
    whole, after = writable(tensor)
    return Operation("Bcast", (raw(whole), root), (whole,), [tensor], after)


def _allgather(outputs: Sequence[Tensor], tensor: Tensor) -> Operation:
    whole, after = unpacking(outputs)
    own, sizes = flat(tensor), [nbytes(one) for one in outputs]
    send = own.clone() if _overlap(own, whole) else own
    where = raw(whole) if len(set(sizes)) == 1 else [raw(whole), sizes]
    name = "Allgatherv" if isinstance(where, list) else "Allgather"
    return Operation(name, (raw(send), where), (whole, send), outputs, after)


def _allgather_blocks(output: Tensor, tensor: Tensor, rank: int) -> Operation:
    whole, after = writable(output)
    own = flat(tensor)
    own_place = own.data_ptr() == whole.data_ptr() + rank * nbytes(own)
    send = own if own_place or not _overlap(own, whole) else own.clone()
    return Operation("Allgather", (None if own_place else raw(send), raw(whole)), (whole, send), [output], after)


def _gather(outputs: Any, tensor: Tensor, root: int) -> Operation:
    own, lists = flat(tensor), [one for one in outputs if one]
    if not lists:
        return Operation("Gather", (raw(own), None, root), (own,), ())
    whole, after = unpacking(lists[0])
    return Operation("Gather", (raw(own), raw(whole), root), (own, whole), lists[0], after)


def _scatter(output: Tensor, inputs: Any, root: int) -> Operation:
    whole, after = writable(output)
    lists = [one for one in inputs if one]
    send = packed(lists[0]) if lists else None
    args = (None if send is None else raw(send), raw(whole), root)
    return Operation("Scatter", args, (whole,) if send is None else (whole, send), [output], after)


def _alltoall(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    send, (whole, after) = packed(inputs), unpacking(outputs)
    mine, theirs = [nbytes(one) for one in inputs], [nbytes(one) for one in outputs]
    return _exchanged(send, mine, whole, theirs, outputs, after)


def _alltoall_parts(
    output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], n: int
) -> Operation:
    (whole, after), own = writable(output), flat(tensor)
    send = own.clone() if _overlap(own, whole) else own
    mine, theirs = _parts(tensor, input_splits, n), _parts(output, output_splits, n)
    return _exchanged(send, mine, whole, theirs, [output], after, parts=bool(input_splits or output_splits))


def _exchanged(
    send: Tensor,
    mine: list[int],
    whole: Tensor,
    theirs: list[int],
    outputs: Sequence[Tensor],
    after: After,
    *,
    parts: bool = True,
) -> Operation:
    """An all-to-all of bytes; without ``parts``, all ranks know that they are equal."""
    if parts:
        args: tuple[Any, ...] = [raw(send), mine], [raw(whole), theirs]
        return Operation("Alltoallv", args, (whole, send), outputs, after)
    return Operation("Alltoall", (raw(send), raw(whole)), (whole, send), outputs, after)


def _parts(tensor: Tensor, splits: Sequence[int], n: int) -> list[int]:
    """The bytes of each rank's part of a tensor."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits and (len(splits) != n or sum(splits) != rows):
        raise ArgumentError(f"splits {list(splits)}: expected {n} numbers of rows, {rows} in all")
    if not splits and rows % n:
        raise ArgumentError(f"{rows} rows are no equal parts for {n} ranks; pass splits")
    row = nbytes(tensor) // rows if rows else 0
    return [int(part) * row for part in splits] or [rows // n * row] * n


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors share memory."""
    if not one.numel() or not other.numel():
        return False
    at, there = one.data_ptr(), other.data_ptr()
    return bool(at < there + nbytes(other) and there < at + nbytes(one))
