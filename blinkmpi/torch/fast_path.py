"""The fast path: calls on GPUs as DDP and FSDP make them, of contiguous tensors.

Their arguments are read in C++, and C makes those again that it knows. Between two such calls the model's own work has
taken the processor's caches, so that there Python takes many times as long as in a loop of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from ..collectives import dispatcher_of
from ..errors import BlinkError
from ..runtime.collectives import ALLGATHER, ALLREDUCE, ALLTOALL, ALLTOALLV, BCAST, BLOCKS, REDUCE, CollectiveMethod
from ..runtime.grouping.launches import NotedCall
from .compiler import hide
from .operands import Tensor
from .streams import capturing, communication_stream, communication_stream_here, current_stream
from .torch_extension import extension
from .work import Work, work_on

MILLI = 1e3
GROUPS = "allreduces", "allgathers", "reduce_scatters"
METHODS = ALLREDUCE, BCAST, REDUCE, ALLGATHER, BLOCKS, ALLTOALL, ALLTOALLV  # in the order in which C++ takes them


class Group(Protocol):
    """What a group has that is asked here."""

    comm: Any  # its Communicator
    timeout_s: float
    coalescing: list[Any] | None  # calls that are made together with others
    quick_calls: Any  # see :func:`quick_calls`; None at first

    def explain(self, error: BlinkError) -> None:
        """Note on an error who the ranks are."""


def allreduce(group: Group, tensors: Any, opts: Any) -> Work | None:
    """The Work of such a call; here and below None for another call, and where there is no torch_extension.cpp (yet).

    Raises:
        BlinkError: as the call by any other way.
    """
    return _made(group, "allreduce", ALLREDUCE, (tensors, opts), tensors, tensors)


def broadcast(group: Group, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    return _made(group, "broadcast", BCAST, (tensors, opts), tensors, tensors)


def allgather(group: Group, output: Any, tensor: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    return _made(group, "allgather", ALLGATHER, (output, tensor, opts), [output], [output, tensor])


def reduce_scatter(group: Group, output: Any, tensor: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    return _made(group, "reduce_scatter", BLOCKS, (output, tensor, opts), [output], [output, tensor])


def reduce(group: Group, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    return _made(group, "reduce", REDUCE, (tensors, opts), tensors, tensors)


def alltoall(
    group: Group, output: Any, tensor: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
) -> Work | None:
    """As :func:`allreduce`; with splits, of whatever lengths."""
    method = ALLTOALLV if output_splits or input_splits else ALLTOALL
    given = output, tensor, output_splits, input_splits, opts
    return _made(group, "alltoall", method, given, [output], [output, tensor])


def allgather_list(group: Group, outputs: Any, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`, into a list of tensors of equal lengths."""
    return _made(group, "allgather_list", ALLGATHER, (outputs, tensors, opts), outputs[0] if outputs else (), tensors)


def reduce_scatter_list(group: Group, outputs: Any, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`, of a list of tensors of equal lengths."""
    return _made(group, "reduce_scatter_list", BLOCKS, (outputs, tensors, opts), outputs, outputs)


def alltoall_list(group: Group, outputs: Any, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`, of two lists of tensors of whatever lengths."""
    return _made(group, "alltoall_list", ALLTOALLV, (outputs, tensors, opts), outputs, tensors)


def allreduces(group: Group, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`, of some calls that are made as one group; None, too, for a group that C does not know."""
    return _made(group, "allreduces", ALLREDUCE, (tensors, opts), tensors, tensors)


def allgathers(group: Group, outputs: Any, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduces`."""
    return _made(group, "allgathers", ALLGATHER, (outputs, tensors, opts), outputs, tensors)


def reduce_scatters(group: Group, outputs: Any, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduces`."""
    return _made(group, "reduce_scatters", BLOCKS, (outputs, tensors, opts), outputs, tensors)


def quick_calls(comm: Any) -> Any:
    """What makes a communicator's calls in C++ (``QuickCalls`` there); None while there is no torch_extension.cpp."""
    if (quick := extension()) is None:
        return None
    device, stream = communication_stream_here()
    here = partial(current_stream, stream.device)
    return quick.QuickCalls(
        dispatcher_of(comm).repeated, METHODS, NotedCall, stream, here, capturing, device, comm.rank, comm.size
    )


def average(comm: Any, quick: Any, buffer: Tensor) -> Any:
    """A future of a bucket of gradients that C has averaged in place; as ``QuickCalls.average`` if C has not.

    Args:
        quick: of :func:`quick_calls`.
    """
    try:
        return quick.average(buffer)
    except BaseException as interrupt:
        dispatcher_of(comm).sequence.die(interrupt)
        raise


def _made(
    group: Group, name: str, method: CollectiveMethod, given: tuple[Any, ...],
    outputs: Sequence[Tensor], memory: Sequence[Tensor],
) -> Work | None:  # fmt: skip
    hide()
    if group.coalescing is not None and name not in GROUPS:
        return None
    quick = group.quick_calls
    if quick is None:
        if extension() is None:
            return None
        quick = group.quick_calls = quick_calls(group.comm)
    try:
        found = getattr(quick, name)(*given, group.timeout_s * MILLI)
    except BaseException as interrupt:  # a signal's, in the middle of the call; and in average
        dispatcher_of(group.comm).sequence.die(interrupt)
        raise
    return _put(group, method, found, outputs, memory) if type(found) is tuple else found


def _put(
    group: Group, method: CollectiveMethod, found: tuple[Any, ...],
    outputs: Sequence[Tensor], memory: Sequence[Tensor],
) -> Work:  # fmt: skip
    """Put a call on a stream that C++ has read and not made."""
    (args, apart, begun), device, quick = found, outputs[0].device, extension()
    try:
        dispatcher = dispatcher_of(group.comm)
        if apart and not capturing():
            stream = communication_stream(device)
            quick.follow(stream)
            dispatcher.go_on(method, args, stream, begun)
            return work_on(stream, outputs, memory, apart=True)
        stream = current_stream(device)
        dispatcher.go_on(method, args, stream, begun)
    except BlinkError as error:
        group.explain(error)
        raise
    return work_on(stream, outputs, (), apart=False)
