"""The libraries that ``bench --compare`` measures beside ours: MPI on host memory, NCCL and torch's symmetric memory.

A peer refuses what it cannot run, and otherwise makes a contender: buffers in its own layout, and the call. CuPy and
torch are imported when a peer is made, and never needed otherwise. No peer of ours turns NVLink multicast on. NCCL uses
it as ``NCCL_NVLS_ENABLE`` says, which is set to 0 if it is unset; a result tells what it was compared with.
"""

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..errors import ArgumentError
from ..program.call import REDUCTIONS, Call
from ..program.reduction import NARROW
from ..util.together import allgather, bcast, together
from .layout import Buffers, Layout
from .timing import METHODS, Contender

NVLS, WITHOUT_NVLS = "NCCL_NVLS_ENABLE", "0"
# ncclDataType_t and ncclRedOp_t of nccl.h, which are part of NCCL's ABI.
NCCL_TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
TRIALS = 10  # calls of each variant of a peer that has several, before its row

on_all_ranks = partial(together, error=ArgumentError)


class Peer(Protocol):
    """A library to compare with."""

    name: str
    facts: dict[str, Any]  # for the file: version and settings

    def refusal(self, call: Call) -> str | None:
        """Why the library cannot run ``call``, or None."""
        ...

    def contender(self, call: Call, buffers: Buffers, *, in_place: bool) -> Contender:
        """The call, on ``buffers`` or on memory of its own; collective."""
        ...

    def close(self) -> None:
        """Give everything back; collective."""
        ...


class MpiPeer:
    """MPI's own collectives, on host memory."""

    name = "mpi"

    def __init__(self, world: Any, mpi: Any) -> None:
        self.world, self.mpi = world, mpi
        self.facts: dict[str, Any] = {}

    def refusal(self, call: Call) -> str | None:
        """MPI lacks the average and 16-bit floats."""
        if call.op == "avg":
            return "MPI has no average"
        if call.collective in REDUCTIONS and call.dtype in NARROW:
            return "MPI has no reduction of 16-bit floats"
        return None

    def contender(self, call: Call, buffers: Buffers, *, in_place: bool) -> Contender:
        """The same buffers; what is only moved goes as bytes."""
        layout = Layout(call, self.world.Get_rank(), buffers, in_place=in_place, marker=self.mpi.IN_PLACE)
        keywords: dict[str, Any] = {"op": getattr(self.mpi, call.op.upper())} if call.op else {}
        if call.root >= 0:
            keywords["root"] = call.root
        arguments = layout.arguments
        if not call.op:
            arguments = tuple([a.view(np.uint8), self.mpi.BYTE] if isinstance(a, np.ndarray) else a for a in arguments)
        method = getattr(self.world, METHODS[call.collective])
        return Contender(layout, lambda: method(*arguments, **keywords))

    def close(self) -> None:
        """Nothing is held."""


class NcclPeer:
    """NCCL, called through CuPy on the same buffers and stream.

    Raises:
        ArgumentError: on every rank, if NCCL is missing or ``NCCL_NVLS_ENABLE`` is not the same on all.
    """

    name = "nccl"

    def __init__(self, world: Any, cupy: Any) -> None:
        self.rank, self.n = world.Get_rank(), world.Get_size()
        nvls = nvls_setting(world)
        self._nccl = on_all_ranks(world, lambda: nccl_module(cupy))
        unique = bcast(world, self._nccl.get_unique_id() if self.rank == 0 else None, bytes | tuple[int, ...])
        self._comm = on_all_ranks(world, lambda: self._nccl.NcclCommunicator(self.n, unique, self.rank))
        self.facts = {"version": version_text(self._nccl.get_version()), **nvls}

    def refusal(self, call: Call) -> str | None:
        """NCCL has no scans."""
        return "NCCL has no scans" if call.collective in ("scan", "exscan") else None

    def contender(self, call: Call, buffers: Buffers, *, in_place: bool) -> Contender:
        """In place as NCCL means it: a rank's block of a reduce-scatter stays where it lay.

        An alltoall of its sends and receives cannot be: it stands out of place in both columns.
        """
        in_place = in_place and call.collective != "alltoall"
        layout = Layout(call, self.rank, buffers, in_place=in_place, narrow=True)
        return Contender(layout, self._call(call, layout))

    def _call(self, call: Call, layout: Layout) -> Callable[[Any], None]:
        kind, count, root, comm = call.collective, call.counts[0], call.root, self._comm
        dtype, op = NCCL_TYPES[call.dtype], NCCL_OPS.get(call.op, 0)
        source, target = (0 if buffer is None else int(buffer.data.ptr) for buffer in (layout.source, layout.target))
        calls: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
            "allreduce": (comm.allReduce, (op,)),
            "reduce": (comm.reduce, (op, root)),
            "broadcast": (comm.broadcast, (root,)),
            "allgather": (comm.allGather, ()),
            "reduce_scatter": (comm.reduceScatter, (op,)),
        }
        if kind not in calls:
            return self._exchange(call, source, target)
        method, more = calls[kind]
        return lambda stream: method(source, target, count, dtype, *more, stream.ptr)

    def _exchange(self, call: Call, source: int, target: int) -> Callable[[Any], None]:
        """Gather, scatter and alltoall, of sends and receives in one group as nccl-tests has them."""
        nccl, comm, root, count, dtype = self._nccl, self._comm, call.root, call.counts[0], NCCL_TYPES[call.dtype]
        step = count * call.itemsize
        everyone = range(self.n) if self.rank == root else ()

        def gather(stream: Any) -> None:
            nccl.groupStart()
            comm.send(source, count, dtype, root, stream.ptr)
            for rank in everyone:
                comm.recv(target + rank * step, count, dtype, rank, stream.ptr)
            nccl.groupEnd()

        def scatter(stream: Any) -> None:
            nccl.groupStart()
            for rank in everyone:
                comm.send(source + rank * step, count, dtype, rank, stream.ptr)
            comm.recv(target, count, dtype, root, stream.ptr)
            nccl.groupEnd()

        def alltoall(stream: Any) -> None:
            nccl.groupStart()
            for rank in range(self.n):
                comm.send(source + rank * step, count, dtype, rank, stream.ptr)
                comm.recv(target + rank * step, count, dtype, rank, stream.ptr)
            nccl.groupEnd()

        if call.collective == "alltoall":
            return alltoall
        return gather if call.collective == "gather" else scatter

    def close(self) -> None:
        """Destroy the communicator."""
        self._comm.destroy()


def version_text(code: int) -> str:
    """NCCL's version from its number: 22809 is 2.28.9."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def nvls_setting(world: Any) -> dict[str, str]:
    """Whether NCCL may reduce in the NVSwitch (NVLS), for the file: as ``NCCL_NVLS_ENABLE`` says, set to 0 if unset."""
    values = set(allgather(world, os.environ.get(NVLS), str | None))
    if len(values) > 1:
        told = ", ".join(sorted("unset" if value is None else value for value in values))
        raise ArgumentError(f"--compare nccl: ranks have {NVLS} unlike ({told}); give it to all: mpirun -x {NVLS}=0")
    (value,) = values
    if value is not None:
        return {"nvls": value}
    os.environ[NVLS] = WITHOUT_NVLS
    return {"nvls": WITHOUT_NVLS, NVLS: "was not set; bench has set it to 0 (ours are without NVLS); 1 allows it"}


def nccl_module(cupy: Any) -> Any:
    """CuPy's NCCL module; where CuPy finds no library, with the one that torch brings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's warning says what our error says
        nccl = importlib.import_module("cupy.cuda.nccl")
    if nccl.available:
        return nccl
    try:
        importlib.import_module("torch")  # a library that is loaded already is found by its name
        return importlib.import_module("cupy_backends.cuda.libs.nccl")
    except ImportError as error:
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        raise ArgumentError(
            f"--compare nccl: CuPy finds no NCCL ({error}); pip install nvidia-nccl-cu{major}, or leave nccl out"
        ) from error


class SymmMemPeer:
    """torch's symmetric memory: one-shot and two-shot allreduce over peer pointers, never its multimem operations.

    It works on memory of its own (``symm_mem.empty``), which is filled and checked as ours is. A row takes the faster
    of the two, tried on all ranks before.

    Raises:
        ArgumentError: on every rank, without torch, on several hosts, or where torch would set multicast up.
    """

    name = "symm_mem"

    def __init__(self, world: Any, mpi: Any, cupy: Any, device: int, calls: Sequence[Call], *, hosts: int) -> None:
        self.world, self.mpi, self.cupy = world, mpi, cupy
        self.rank, self.n = world.Get_rank(), world.Get_size()
        self._torch = torch = on_all_ranks(world, lambda: _torch(hosts))
        self._group: str = ""
        self.buffers: Buffers | None = None
        self.facts: dict[str, Any] = {"version": str(torch.__version__), "multicast": "off"}
        self._stream: Any = None
        usable = [call for call in calls if self.refusal(call) is None]
        on_all_ranks(world, lambda: torch.cuda.set_device(device))
        self._join()
        if usable:
            self.buffers = on_all_ranks(world, lambda: self._allocate(usable, device))

    def _join(self) -> None:
        """The default process group of torch, over a store at rank 0; NCCL's backend starts nothing before a call."""
        dist = self._torch.distributed

        def store(port: int) -> Any:
            return dist.TCPStore("127.0.0.1", port, self.n, is_master=self.rank == 0, wait_for_workers=False)

        own: Any = on_all_ranks(self.world, lambda: store(0) if self.rank == 0 else None)
        port = bcast(self.world, own.port if self.rank == 0 else None, int)
        own = on_all_ranks(self.world, lambda: own if self.rank == 0 else store(port))
        on_all_ranks(self.world, lambda: dist.init_process_group("nccl", store=own, rank=self.rank, world_size=self.n))
        self._group = dist.group.WORLD.group_name

    def _allocate(self, calls: Sequence[Call], device: int) -> Buffers:
        """Buffers in symmetric memory, seen by CuPy; the tensors of torch stay beside them."""
        torch = self._torch
        import torch.distributed._symmetric_memory as symmetric

        self._tensors: list[Any] = []

        def allocate(nbytes: int) -> Any:
            tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
            symmetric.rendezvous(tensor, self._group)
            self._tensors.append(tensor)
            return self.cupy.from_dlpack(tensor)

        return Buffers(calls, xp=self.cupy, allocate=allocate)

    def refusal(self, call: Call) -> str | None:
        """Only what torch's operations take."""
        if call.collective != "allreduce":
            return "torch's symmetric memory has an allreduce, and no other collective into given buffers"
        if call.op != "sum" or call.dtype not in ("float32", "bfloat16"):
            return "torch's symmetric memory sums float32 and bfloat16 only"
        if self.n not in (2, 4, 8):
            return "torch's two-shot allreduce takes 2, 4 or 8 ranks"
        if call.nbytes % 16 or not call.nbytes:
            return "torch's symmetric memory takes multiples of 16 bytes"
        return None

    def contender(self, call: Call, buffers: Buffers, *, in_place: bool) -> Contender:
        """The faster of one-shot and two-shot; ``buffers`` are left alone."""
        assert self.buffers is not None
        layout = Layout(call, self.rank, self.buffers, in_place=in_place, narrow=True)  # it adds pairs of bfloat16
        send, recv = (self._view(tensor, call) for tensor in self._tensors)
        operations = self._torch.ops.symm_mem
        one, two, inside = (
            getattr(operations, name).default
            for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_out", "two_shot_all_reduce_")
        )
        out = ("sum", self._group)
        calls: dict[str, Callable[[], Any]]
        if in_place:  # one shot has no form in place: its result is copied back
            calls = {"one_shot": lambda: (one(recv, *out, send), recv.copy_(send))}
            calls["two_shot"] = lambda: inside(recv, *out)
        else:
            calls = {"one_shot": lambda: one(send, *out, recv), "two_shot": lambda: two(send, *out, recv)}
        variants = {name: partial(self._on_stream, call) for name, call in calls.items()}
        times = {name: self._try(layout, run) for name, run in variants.items()}
        best = min(times, key=lambda name: times[name])
        return Contender(layout, variants[best], best)

    def _view(self, tensor: Any, call: Call) -> Any:
        return tensor[: call.nbytes].view(getattr(self._torch, call.dtype))

    def _on_stream(self, call: Callable[[], Any], stream: Any) -> None:
        """Call torch with CuPy's stream as its current one, which it stays."""
        if self._stream is None or self._stream.cuda_stream != stream.ptr:
            self._stream = self._torch.cuda.ExternalStream(stream.ptr)
            self._torch.cuda.set_stream(self._stream)
        call()

    def _try(self, layout: Layout, run: Callable[[Any], None]) -> float:
        """Milliseconds of one call, of the slowest rank."""
        stream = self.cupy.cuda.get_current_stream()
        layout.calm()
        run(stream)
        stream.synchronize()
        self.world.Barrier()
        run(stream)
        start = stream.record()
        for _ in range(TRIALS):
            run(stream)
        end = stream.record()
        end.synchronize()
        spent = self.cupy.cuda.get_elapsed_time(start, end) / TRIALS
        return float(max(allgather(self.world, spent, float)))

    def close(self) -> None:
        """Leave torch's process group."""
        self.buffers = None
        self._tensors = []
        self._torch.distributed.destroy_process_group()


def _torch(hosts: int) -> Any:
    if hosts > 1:
        raise ArgumentError(f"--compare symm_mem: {hosts} hosts run, and its memory is shared on one; leave it out")
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        raise ArgumentError(
            "--compare symm_mem: torch would set up NVLink multicast, which these operations do not use and shared "
            "machines may not allow; set it aside: mpirun -x TORCH_SYMM_MEM_DISABLE_MULTICAST=1 ..."
        )
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise ArgumentError(f"--compare symm_mem: {error}; pip install torch, or leave symm_mem out") from error
    wanted = ("one_shot_all_reduce_out", "two_shot_all_reduce_out", "two_shot_all_reduce_")
    missing = [name for name in wanted if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        raise ArgumentError(
            f"--compare symm_mem: torch {torch.__version__} has no {', '.join(missing)}; take torch 2.11, or leave "
            "symm_mem out"
        )
    return torch
