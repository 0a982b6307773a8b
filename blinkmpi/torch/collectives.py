"""The collectives of torch's ``ProcessGroup``, each as a call of the Communicator.

torch has renamed some of them (2.13), so these have two names. C++ (the reducer of DDP, functional collectives) calls
them as Python does, but leaves out options; so all have a default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch

from ..collectives import dispatcher_of
from ..errors import ArgumentError, BlinkError
from ..runtime.entering import enter
from . import fast_path
from .compiler import hidden, hide
from .operands import (
    TYPES,
    After,
    Reduction,
    Tensor,
    clear_of,
    flat,
    gathered_into,
    listed,
    moved,
    nbytes,
    only,
    packed,
    parts_of,
    raw,
    typed,
    unpacking,
    writable,
)
from .operation import Operation
from .profiling import shown
from .work import Coalesced, HostWork, Several, Work, enqueue

NO_SECONDS = timedelta(0)


def explained(method: Callable[..., Work]) -> Callable[..., Work]:
    """A method whose errors name ranks as the whole job does, too."""

    @wraps(method)
    def wrapped(self: TensorCollectives, *args: Any, **keywords: Any) -> Work:
        try:
            return method(self, *args, **keywords)
        except BlinkError as error:
            self.explain(error)
            raise

    return wrapped


@hidden
@shown
class TensorCollectives:
    """What a group does with tensors; :class:`.group.BlinkGroup` says who the ranks are."""

    comm: Any  # the Communicator
    rank_here: int
    timeout_s: float
    ranks: Sequence[int] = ()  # who the ranks are in the job, where their numbers are others
    coalescing: list[tuple[Operation, Any, Coalesced]] | None = None  # calls to be made together
    coalesced_works: Sequence[Work] = ()  # of what was begun meanwhile: messages, and groups of calls
    quick_calls: Any = None  # what makes calls in C++: see fast_path.py

    # ---- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce everybody's tensor into everybody's."""
        work = fast_path.allreduce(self, tensors, opts)
        return work or self._make("allreduce", opts, lambda: _allreduce(only(tensors, "allreduce"), Reduction(opts)))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce some tensors in one call for each element type."""
        if work := fast_path.allreduces(self, tensors, opts):
            return self._noted(work)
        return self._make_all("allreduce", opts, [partial(_allreduce, one, Reduction(opts)) for one in tensors])

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce everybody's tensor into the root's; the others' stay as they are."""
        if work := fast_path.reduce(self, tensors, opts):
            return work
        root, rank = _root(opts), self.rank_here
        return self._make("reduce", opts, lambda: _reduce(only(tensors, "reduce"), rank == root, root, Reduction(opts)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors, one for each rank; each gets its own."""
        if work := fast_path.reduce_scatter_list(self, outputs, inputs, opts):
            return work
        what, n = "reduce_scatter", self.comm.size
        make = lambda: _reduce_scatter(only(outputs, what), listed(inputs, n, what), Reduction(opts))  # noqa: E731
        return self._make(what, opts, make)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce a tensor of one block for each rank; each gets its own."""
        work = fast_path.reduce_scatter(self, output, input, opts)
        return work or self._make("reduce_scatter", opts, lambda: self._reduce_blocks(output, input, opts))

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`reduce_scatter_single`, for some pairs of tensors."""
        if work := fast_path.reduce_scatters(self, outputs, inputs, opts):
            return self._noted(work)
        pairs = zip(outputs, inputs, strict=True)
        return self._make_all("reduce_scatter", opts, [partial(self._reduce_blocks, *p, opts) for p in pairs])

    def _reduce_blocks(self, output: Tensor, tensor: Tensor, opts: Any) -> Operation:
        return _reduce_blocks(output, tensor, self.rank_here, self.comm.size, Reduction(opts))

    # ---- what moves

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Send the root's tensor to all."""
        work = fast_path.broadcast(self, tensors, opts)
        return work or self._make("broadcast", opts, lambda: _broadcast(only(tensors, "broadcast"), _root(opts)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Collect everybody's tensor in a list; they may differ in shape."""
        if work := fast_path.allgather_list(self, outputs, inputs, opts):
            return work
        n = self.comm.size
        make = lambda: _allgather(listed(outputs, n, "all_gather"), only(inputs, "all_gather"))  # noqa: E731
        return self._make("allgather", opts, make)

    def allgather_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`allgather`, for some tensors: ``outputs[r][i]`` is tensor i of rank r."""
        rows = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self._make_all("allgather", opts, [partial(_allgather, list(row), one) for row, one in rows])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Collect everybody's tensor in one."""
        work = fast_path.allgather(self, output, input, opts)
        return work or self._make("allgather", opts, lambda: _allgather_blocks(output, input, self.rank_here))

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`all_gather_single`, for some pairs of tensors."""
        if work := fast_path.allgathers(self, outputs, inputs, opts):
            return self._noted(work)
        pairs = zip(outputs, inputs, strict=True)
        return self._make_all("allgather", opts, [partial(_allgather_blocks, *p, self.rank_here) for p in pairs])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Collect everybody's tensor in a list of the root's."""
        root, n = _root(opts), self.comm.size
        return self._make("gather", opts, lambda: _gather(outputs, only(inputs, "gather"), root, n))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give each rank its tensor of the root's list."""
        root, n = _root(opts), self.comm.size
        return self._make("scatter", opts, lambda: _scatter(only(outputs, "scatter"), inputs, root, n))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Give each rank a tensor of a list, and get one of each; they may differ in shape."""
        if work := fast_path.alltoall_list(self, outputs, inputs, opts):
            return work
        n, lists = self.comm.size, (outputs, inputs)
        return self._make("alltoall", opts, lambda: _alltoall(*(listed([one], n, "alltoall") for one in lists)))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """As :meth:`alltoall`, of parts of one tensor along its first dimension; without splits they are equal."""
        if work := fast_path.alltoall(self, output, input, output_splits, input_splits, opts):
            return work
        n = self.comm.size
        return self._make("alltoall", opts, lambda: _alltoall_parts(output, input, output_splits, input_splits, n))

    @explained
    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks have come, and on this one's GPU what is on the current stream is done.

        What went wrong in calls on that stream is raised.
        """
        if self.comm.gpu is not None and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
            self.comm.check()
        seconds = self._seconds(opts)
        if getattr(opts, "asyncOp", True):
            return HostWork((), self.comm.Ibarrier(timeout=seconds), None, self.explain)
        self.comm.Barrier(timeout=seconds)
        return Work(())

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- making calls

    @explained
    def _make(self, what: str, opts: Any, prepare: Callable[[], Operation]) -> Work:
        """Make a call; if this rank's arguments cannot be read, all ranks hear of it in the call."""
        comm = self.comm
        hide()
        (call,) = self._read(what, [prepare])
        if self.coalescing is not None:
            self.coalescing.append((call, opts, work := Coalesced(call.outputs)))
            return work
        seconds = self._seconds(opts)
        apart = getattr(opts, "asyncOp", True)
        if call.memory[0].is_cuda:
            put = partial(_put, getattr(comm, call.name), call.args, seconds)
            return enqueue(put, call.outputs, call.memory, call.after, apart=apart)
        if apart:
            request = getattr(comm, f"I{call.name.lower()}")(*call.args, timeout=seconds)
            return HostWork(call.outputs, request, call.after, self.explain)
        getattr(comm, call.name)(*call.args, timeout=seconds)
        if call.after is not None:
            call.after()
        return Work(call.outputs)

    @explained
    def _make_all(self, what: str, opts: Any, prepare: Sequence[Callable[[], Operation]]) -> Work:
        """Make some calls as a group."""
        return self._noted(self._group(self._read(what, prepare), opts))

    def _group(self, calls: Sequence[Operation], opts: Any) -> Work:
        outputs = [output for call in calls for output in call.outputs]
        sides: dict[bool, list[Operation]] = {}
        for call in calls:
            sides.setdefault(call.memory[0].is_cuda, []).append(call)
        works = [self._group_of(some, opts, on_gpu=on_gpu) for on_gpu, some in sides.items()]
        return works[0] if len(works) == 1 else Several(works, outputs)

    def _group_of(self, calls: Sequence[Operation], opts: Any, *, on_gpu: bool) -> Work:
        """Calls of tensors that all lie on the GPU, or all in host memory."""
        comm, apart, seconds = self.comm, getattr(opts, "asyncOp", True), self._seconds(opts)
        outputs = [output for call in calls for output in call.outputs]
        afters = [call.after for call in calls if call.after is not None]

        def put(stream: Any = None, *, begin: bool = False) -> Any:
            group = comm.grouped(stream=stream, timeout=seconds)
            group.begins = begin
            with group:
                for call in calls:
                    getattr(comm, call.name)(*call.args)
            return group.request

        def after() -> None:
            for bring in afters:
                bring()

        if on_gpu:
            memory = [tensor for call in calls for tensor in call.memory]
            return enqueue(put, outputs, memory, after, apart=apart)
        if apart:
            return HostWork(outputs, put(begin=True), after, self.explain)
        put()
        after()
        return Work(outputs)

    def _read(self, what: str, prepare: Sequence[Callable[[], Operation]]) -> list[Operation]:
        """Read calls' arguments; if that fails, all ranks hear of it."""
        try:
            return [read() for read in prepare]
        except Exception as error:
            wrong = error if isinstance(error, BlinkError) else ArgumentError(f"{what}: {error}")
            enter(dispatcher_of(self.comm).sequence, what, partial(_raise, wrong))
            raise AssertionError("unreachable") from error

    def _start_coalescing(self, device: Any = None) -> None:
        """Note calls until :meth:`_end_coalescing`."""
        self.coalescing, self.coalesced_works = [], ()

    @explained
    def _end_coalescing(self, device: Any = None) -> Work:
        """Make them together. Messages and groups were begun at once; the work waits for them, too."""
        noted, self.coalescing = self.coalescing or [], None
        works, self.coalesced_works = self.coalesced_works, ()
        outputs = [output for call, *_ in noted for output in call.outputs]
        if not noted:
            return Several(works, outputs)
        made = self._group([call for call, *_ in noted], noted[0][1])
        for *_, work in noted:
            work.made = made
        return Several([made, *works], outputs) if works else made

    def _noted(self, work: Work) -> Work:
        """What was begun at once, for which the end of a coalesced group waits, too."""
        if self.coalescing is not None:
            self.coalesced_works = [*self.coalesced_works, work]
        return work

    def explain(self, error: BlinkError) -> None:
        """Note on an error who the ranks of a part of the job are, which it numbers as the group does."""
        if self.ranks:
            who = ", ".join(f"{r} is the job's {rank}" for r, rank in enumerate(self.ranks))
            error.add_note(f"It counts ranks as their group does, in which rank {who}.")

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


# ---- from tensors to calls


def _allreduce(tensor: Tensor, reduction: Reduction) -> Operation:
    whole, after = writable(tensor)
    send = reduction.scaled(whole)
    own = None if send is whole or send.data_ptr() == whole.data_ptr() else typed(send)
    return Operation("Allreduce", (own, typed(whole), reduction.of(whole.dtype)), (whole, send), [tensor], after)


def _reduce(tensor: Tensor, here: bool, root: int, reduction: Reduction) -> Operation:
    whole, after = writable(tensor)
    send, op = reduction.scaled(whole), reduction.of(whole.dtype)
    same = here and send is whole
    args = (None if same else typed(send), typed(whole) if here else None, op, root)
    return Operation("Reduce", args, (whole, send), [tensor], after if here else None)


def _reduce_scatter(output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Operation:
    whole, after = writable(output)
    if any(one.dtype != output.dtype for one in inputs):
        raise ArgumentError(f"{[one.dtype for one in inputs]} into {output.dtype}: expected one element type")
    send = clear_of(reduction.scaled(packed(inputs).view(output.dtype)), whole)
    op, counts = reduction.of(output.dtype), [one.numel() for one in inputs]
    if len(set(counts)) == 1:
        args: tuple[Any, ...] = (typed(send), typed(whole), op)
        return Operation("Reduce_scatter_block", args, (whole, send), [output], after)
    return Operation("Reduce_scatter", (typed(send), typed(whole), counts, op), (whole, send), [output], after)


def _reduce_blocks(output: Tensor, tensor: Tensor, rank: int, n: int, reduction: Reduction) -> Operation:
    whole, after = writable(output)
    send = reduction.scaled(flat(tensor))
    own_place = whole.is_cuda and whole.data_ptr() == send.data_ptr() + rank * nbytes(whole)
    send = send if own_place and nbytes(send) == n * nbytes(whole) else clear_of(send, whole)
    args = typed(send), typed(whole), reduction.of(whole.dtype)
    return Operation("Reduce_scatter_block", args, (whole, send), [output], after)


def _broadcast(tensor: Tensor, root: int) -> Operation:
    whole, after = writable(tensor)
    return Operation("Bcast", (moved(whole), root), (whole,), [tensor], after)


def _allgather(outputs: Sequence[Tensor], tensor: Tensor) -> Operation:
    whole, after = unpacking(gathered_into(outputs, "all_gather"))
    own, sizes = flat(tensor), [nbytes(one) for one in outputs]
    send = clear_of(own, whole)
    if len(set(sizes)) == 1:
        return Operation("Allgather", (moved(send), moved(whole, own.dtype)), (whole, send), outputs, after)
    return Operation("Allgatherv", (raw(send), [raw(whole), sizes]), (whole, send), outputs, after)


def _allgather_blocks(output: Tensor, tensor: Tensor, rank: int) -> Operation:
    whole, after = writable(output)
    own = flat(tensor)
    own_place = own.data_ptr() == whole.data_ptr() + rank * nbytes(own)
    send = own if own_place else clear_of(own, whole)
    return Operation("Allgather", (None if own_place else moved(send), moved(whole)), (whole, send), [output], after)


def _gather(outputs: Any, tensor: Tensor, root: int, n: int) -> Operation:
    own, lists = flat(tensor), [one for one in outputs if one]
    if not lists:
        return Operation("Gather", (moved(own), None, root), (own,), ())
    whole, after = unpacking(gathered_into(listed(lists[:1], n, "gather"), "gather"))
    send = clear_of(own, whole)
    return Operation("Gather", (moved(send), moved(whole, own.dtype), root), (send, whole), lists[0], after)


def _scatter(output: Tensor, inputs: Any, root: int, n: int) -> Operation:
    whole, after = writable(output)
    lists = [one for one in inputs if one]
    send = clear_of(packed(listed(lists[:1], n, "scatter")), whole) if lists else None
    args = (None if send is None else moved(send, whole.dtype), moved(whole), root)
    return Operation("Scatter", args, (whole,) if send is None else (whole, send), [output], after)


def _alltoall(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    send, (whole, after) = packed(inputs), unpacking(outputs)
    mine, theirs = [nbytes(one) for one in inputs], [nbytes(one) for one in outputs]
    return _exchanged(clear_of(send, whole), mine, whole, theirs, outputs, after)


def _alltoall_parts(
    output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], n: int
) -> Operation:
    (whole, after), own = writable(output), flat(tensor)
    send = clear_of(own, whole)
    mine, theirs = parts_of(tensor, input_splits, n), parts_of(output, output_splits, n)
    item = output.element_size()
    if output.dtype == tensor.dtype and not output.is_cuda and output.dtype in TYPES:  # then errors count elements
        args: tuple[Any, ...] = moved(send), moved(whole)
        if input_splits or output_splits:
            args = [args[0], [part // item for part in mine]], [args[1], [part // item for part in theirs]]
            return Operation("Alltoallv", args, (whole, send), [output], after)
        return Operation("Alltoall", args, (whole, send), [output], after)
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
