"""Guard MPI's own methods against GPU memory that this MPI does not take: the table of methods, and what each does.

An MPI that does not take GPU memory dies of SIGSEGV. So a guarded method looks at its arguments first. Those in host
memory go on to mpi4py's method as they are. With GPU memory among them the method is passed on where MPI is known to
take it (``cuda/aware.py``); otherwise point-to-point is staged (``cuda/staging.py``), and the rest raises an error
on the calling rank, before MPI sees an address.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import BufferTypeError, FallbackError
from .cuda.buffers import device_parts, lies_on_device


class Ends(NamedTuple):
    """The arguments of a point-to-point method from which it sends and into which it receives, or nothing."""

    send: str
    recv: str


SEND, RECV = Ends("buf", ""), Ends("", "buf")
STAGED: dict[str, Ends] = {
    **dict.fromkeys(("Send", "Bsend", "Ssend", "Rsend", "Isend", "Ibsend", "Issend", "Irsend"), SEND),
    **dict.fromkeys(("Recv", "Irecv"), RECV),
    **dict.fromkeys(("Sendrecv", "Isendrecv"), Ends("sendbuf", "recvbuf")),
    **dict.fromkeys(("Sendrecv_replace", "Isendrecv_replace"), Ends("buf", "buf")),
}
_BLOCKS = ("Gather", "Scatter", "Allgather", "Alltoall")
_COLLECTIVES = (
    "Bcast", *_BLOCKS, *(f"{name}v" for name in _BLOCKS), "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter_block",
    "Reduce_scatter", "Scan", "Exscan", "Neighbor_allgather", "Neighbor_allgatherv", "Neighbor_alltoall",
    "Neighbor_alltoallv", "Neighbor_alltoallw",
)  # fmt: skip
PASSED: tuple[str, ...] = (  # to MPI, if it takes GPU memory; Communicator has some of the collectives of its own
    "Send_init", "Bsend_init", "Ssend_init", "Rsend_init", "Recv_init", "Psend_init", "Precv_init",
    *_COLLECTIVES, *(f"I{name.lower()}" for name in _COLLECTIVES), *(f"{name}_init" for name in _COLLECTIVES),
)  # fmt: skip
ON_HOST: tuple[str, ...] = ("Attach_buffer", "recv", "irecv", "sendrecv", "Iagree")  # which read it there themselves
NAMES: tuple[str, ...] = (*STAGED, *PASSED, *ON_HOST)


BUFFERS = ("buf", "sendbuf", "recvbuf", "flag")  # what mpi4py calls arguments that are buffers
TEMPLATE = """
def {name}({parameters}):
    if {on_gpu}:
        return with_gpu_memory(own, {{{pairs}}})
    return own({names})
"""
NO_ARRAY = "type({0}) is not ndarray and (type({0}) is not list or not {0} or type({0}[0]) is not ndarray)"


@cache
def guard(own: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``own`` of mpi4py, made safe for GPU memory; for host memory it stays what it is.

    It is written out with the method's own parameters: ``*args`` would cost every Send of a NumPy array three times as
    much as this.
    """
    parameters = inspect.signature(own).parameters
    if not set(BUFFERS) & set(parameters):  # Message.recv has no buffer argument, unlike Comm.recv
        return own
    defaults = {f"_{p.name}": p.default for p in parameters.values() if p.default is not p.empty}
    text = TEMPLATE.format(
        name=own.__name__,
        parameters=", ".join(f"{p}=_{p}" if f"_{p}" in defaults else p for p in parameters),
        on_gpu=" or ".join(f"({NO_ARRAY.format(p)} and on_gpu({p}))" for p in parameters if p in BUFFERS),
        pairs=", ".join(f"'{p}': {p}" for p in parameters),
        names=", ".join(parameters),
    )
    space = {
        **defaults,
        "own": own,
        "on_gpu": lies_on_device,
        "with_gpu_memory": _with_gpu_memory,
        "ndarray": np.ndarray,
    }
    exec(text, space)
    return wraps(own)(space[own.__name__])


def _with_gpu_memory(own: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Make a call with GPU memory among its arguments, which are all there, in their order."""
    name, of = own.__name__, arguments["self"]
    if name in ON_HOST:
        raise BufferTypeError(f"{name}: its buffer is used on the host, and lies in GPU memory; pass a NumPy array")
    from .cuda import staging
    from .cuda.aware import known

    takes, said = known(MPI)
    if takes:
        for argument in arguments.values():
            for buffer in device_parts(argument):
                staging.synchronize(buffer)
        return own(*arguments.values())
    if name not in STAGED:
        raise BufferTypeError(
            f"{name} of GPU memory is MPI's alone, and this MPI is not known to take it ({said}); pass NumPy copies, "
            f"or an MPI that takes it (BLINKMPI_CUDA_AWARE=1 if it does so and does not say it){_instead(of, name)}"
        )
    why = f"this MPI is not known to take it ({said})"
    if getattr(of, "strict", False):
        raise FallbackError(f"strict=True: {name} of GPU memory would go through host memory, because {why}")
    return staging.stage(own, arguments, STAGED[name], why)


def _instead(comm: Any, name: str) -> str:
    """What a plain communicator's collective could be instead."""
    plain = isinstance(comm, MPI.Intracomm) and not hasattr(comm, "explain")
    return f"; blinkmpi.Communicator(comm) may have a {name} of its own" if plain and name in _COLLECTIVES else ""
