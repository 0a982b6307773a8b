"""What the tests on GPUs share: how many there are, calls as users make them, results compared on the device."""

import hashlib
import importlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.program.reduction import dtype_of
from blinkmpi.transport.cuda.device import cupy, device_count, why_none
from blinkmpi.util.settings import read
from tests.conformance import Array, Case, expected, inputs, mistakes
from tests.conformance_calls import before, call

DEVICES = device_count()
GPUS = DEVICES * read().ranks_per_gpu  # as many as there may be ranks; those of one GPU take turns on it
POOL_BYTES = 16 << 20
PERIOD = 251  # of the input of a Stress
DGX1 = {2: "0,3", 3: "0,3,4", 4: "1,4,5,6", 5: "0-4", 6: "0-5", 7: "0-6", 8: "0-7"}  # parts of a DGX-1V, by ranks


def at_least(n: int) -> pytest.MarkDecorator:
    """The mark of a test that takes this many GPUs."""
    return pytest.mark.skipif(n > GPUS, reason=needs(n))


def needs(n: int) -> str:
    """Why a test of ``n`` ranks on GPUs cannot run here, and what would let it."""
    if why_none():
        return f"needs {n} GPU{'s' * (n > 1)}, {GPUS} here: {why_none()}"
    share = -(-n // DEVICES)
    return f"needs {n} GPUs, {DEVICES} here; BLINKMPI_RANKS_PER_GPU={share} lets {share} ranks share one"


def sizes(*wanted: int) -> tuple[int, ...]:
    """Those of the numbers of ranks for which there are GPUs; the smallest, to be skipped, if there are none."""
    return tuple(n for n in wanted if n <= GPUS) or (min(wanted),)


# ---------------------------------------------------------------- the conformance suite


class Pools:
    """Memory of a test for the buffers of one case after another, registered or not."""

    def __init__(self, comm: blinkmpi.Communicator, *, registered: bool) -> None:
        self.registered = registered
        make = comm.empty if registered else cupy().empty
        self.pools = [make((POOL_BYTES,), "uint8") for _ in range(2)]

    def take(self, which: int, data: Array, skew: int) -> Any:
        """The data on the GPU, ``skew`` elements from where an allocation begins."""
        start = skew * data.itemsize
        part = self.pools[which][start : start + data.nbytes]
        part[...] = cupy().asarray(data.view(np.uint8))
        if data.dtype.name.startswith("float8"):  # which torch has, and CuPy has not
            torch = importlib.import_module("torch")
            return torch.from_dlpack(part).view(getattr(torch, data.dtype.name))
        return part.view(data.dtype)


def fetch(array: Any, dtype: str) -> Array:
    """A copy of a GPU array on the host."""
    if hasattr(array, "get"):
        return np.asarray(array.get())
    return np.asarray(array.view(importlib.import_module("torch").uint8).cpu().numpy().view(dtype_of(dtype)))


def run_all(
    comm: blinkmpi.Communicator, pools: Pools, chosen: list[Case], *, skew: int = 0, recv_skew: int | None = None
) -> None:
    """Run cases; raise on the first that is wrong, naming it.

    Args:
        skew: of this rank's buffers, in elements; ``recv_skew`` of its receive buffer, if that lies otherwise.
    """
    for case in chosen:
        sends = inputs(case)
        want = expected(case, comm.rank)
        start = before(case, sends[comm.rank], want, comm.rank)
        send = pools.take(0, sends[comm.rank], skew)
        recv = None if start is None else pools.take(1, start, skew if recv_skew is None else recv_skew)
        where = f"{case}, {'registered' if pools.registered else 'plain'} buffers, skew {skew}, rank {comm.rank}"
        try:
            got = call(comm, case, send, recv)
        except blinkmpi.BlinkError as error:
            raise AssertionError(where) from error
        if got is not None and want is not None:
            wrong = mistakes(case, fetch(got, case.dtype)[: want.size], want, comm.rank)
            assert wrong == 0, f"{where}: {wrong} of {want.size} elements wrong"
        assert fetch(send, case.dtype).tobytes() == sends[comm.rank].tobytes(), f"{where}: send buffer changed"
        if case.collective == "allreduce" and got is not None:
            prints = comm.allgather(hashlib.sha256(fetch(got, case.dtype).tobytes()).hexdigest())
            assert len(set(prints)) == 1, f"{where}: ranks differ in their bits"


# ---------------------------------------------------------------- many calls


def spinner() -> Any:
    """A function of (stream, microseconds) that keeps a stream busy without the host."""
    cp = cupy()
    code = r"""extern "C" __global__ void spin(long long ns) {
        long long began, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - began < ns);
    }"""
    kernel = cp.RawKernel(code, "spin")

    def spin(stream: Any, us: float) -> None:
        with stream:
            kernel((1,), (1,), (np.int64(1000 * us),))

    spin(cp.cuda.Stream.null, 1)  # compiles and loads it
    return spin


class Stress:
    """Collectives of whole numbers, right to the last bit, whose results are compared on the device.

    Nothing waits: input, call and comparison go one after another onto a stream, and ``wrong`` is counted there.
    Rank r sends ``i % PERIOD + r + salt`` in element i.

    Args:
        count: the most elements of a call's largest buffer.
    """

    KINDS = ("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "reduce_scatter")

    def __init__(self, comm: MPI.Intracomm, stream: Any, count: int) -> None:
        self.cp, self.rank, self.n, self.stream = cupy(), comm.rank, comm.size, stream
        with stream:
            self.base = (self.cp.arange(count) % PERIOD).astype("float32")
            self.ranks = self.cp.arange(self.n, dtype="float32")[:, None]
            self._wrong = self.cp.zeros((), "int64")
        stream.synchronize()

    @property
    def wrong(self) -> int:
        """Wrong elements so far; waits for the stream."""
        self.stream.synchronize()
        return int(self._wrong)

    def ends(self, kind: str, count: int, send: Any, recv: Any, root: int = 0) -> tuple[Any, Any]:
        """This rank's part of two buffers: what it sends and where it receives, None where it does not."""
        source: Any = send[: count * self.n if kind in ("scatter", "reduce_scatter") else count]
        target: Any = recv[: count * self.n if kind in ("allgather", "gather") else count]
        if self.rank != root:
            source = None if kind in ("broadcast", "scatter") else source
            return source, None if kind in ("reduce", "gather") else target
        return source, None if kind == "broadcast" else target

    def fill(self, source: Any, target: Any, salt: int) -> None:
        """Write this rank's input, and poison where it receives."""
        with self.stream:
            if source is not None:
                self.cp.add(self.base[: source.size], self.rank + salt, out=source)
            if target is not None:
                target[...] = -1

    def compare(self, got: Any, kind: str, count: int, root: int, salt: int) -> None:
        """Count what is wrong in a result, if this rank has one."""
        if got is None:
            return
        n, first = self.n, self.rank * count
        with self.stream:
            if kind in ("allreduce", "reduce"):
                want = n * (self.base[:count] + salt) + n * (n - 1) // 2
            elif kind == "reduce_scatter":
                want = n * (self.base[first : first + count] + salt) + n * (n - 1) // 2
            elif kind == "broadcast":
                want = self.base[:count] + (root + salt)
            elif kind == "scatter":
                want = self.base[first : first + count] + (root + salt)
            else:
                want = (self.base[None, :count] + self.ranks + salt).ravel()
            self._wrong += self.cp.count_nonzero(got != want)

    def do(self, comm: blinkmpi.Communicator, kind: str, send: Any, recv: Any, root: int, how: str, **keys: Any) -> Any:
        """The call; a request with ``how="I"``."""
        name = {"broadcast": "bcast", "reduce_scatter": "reduce_scatter_block"}.get(kind, kind)
        method = getattr(comm, how + name if how else name.capitalize())
        if kind == "broadcast":
            return method(send if recv is None else recv, root=root, **keys)
        if kind in ("reduce", "gather", "scatter"):
            return method(send, recv, root=root, **keys)
        return method(send, recv, **keys)
