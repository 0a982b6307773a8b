"""Calls of ever new counts: nothing is allocated, freed or compiled for them, and few functions are called."""

import importlib
import statistics
from collections import Counter
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.transport.cuda.device import cupy
from tests.effort import Effort
from tests.gpu.helpers import DEVICES, at_least, sizes
from tests.harness import mpi

RANKS = sizes(2, 4, 8)
COUNTS = 10_000
FIRST = {"slots": 30_000, "ll16_one_shot": 1, "ll128_one_shot": 1, "direct": 30_000}
PERIOD = 7  # of the input; sums of all ranks are whole numbers that bfloat16 has
CALLS = 300  # Python functions that a new count enters: 204 by `direct` between two GPUs; planning enters thousands

pytestmark = [pytest.mark.gpu, at_least(2)]


class Asked:
    """The CUDA runtime, with a count of what it is asked for."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.times: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.times[name] += 1
        return getattr(self._runtime, name)


class Arrays:
    """Input, output and what the output should be, by CuPy or by torch; nothing of it allocates after the beginning."""

    def __init__(self, ours: blinkmpi.Communicator, dtype: str, count: int, *, registered: bool) -> None:
        cp, n = cupy(), ours.size
        if dtype == "float32":
            self.module = cp
            make = ours.empty if registered else cp.empty
            self.x, self.y = make((count,), dtype), make((count,), dtype)
            self.x[...] = cp.arange(count) % PERIOD + ours.rank
            self.want = (cp.arange(count) % PERIOD * n + n * (n - 1) // 2).astype(dtype)
            self.poison, self.diff, self.bad = cp.full(1, -1, dtype), cp.zeros(count, "?"), cp.zeros(count, "?")
        else:
            self.module = torch = importlib.import_module("torch")
            kind = getattr(torch, dtype)
            index = torch.arange(count, device="cuda") % PERIOD
            self.x, self.y = (index + ours.rank).to(kind), torch.empty(count, dtype=kind, device="cuda")
            self.want = (index * n + n * (n - 1) // 2).to(kind)
            self.poison = torch.full((1,), -1, dtype=kind, device="cuda")
            self.diff, self.bad = (torch.zeros(count, dtype=torch.bool, device="cuda") for _ in range(2))
        self._differ = self.module.not_equal

    def clear(self, count: int) -> None:
        """Poison the output, and one element more."""
        self.y[: count + 1] = self.poison

    def compare(self, count: int) -> None:
        """Note which elements are wrong, on the device."""
        self._differ(self.y[:count], self.want[:count], out=self.diff[:count])
        self._differ(self.y[count : count + 1], self.poison, out=self.diff[count : count + 1])
        self.bad[: count + 1] |= self.diff[: count + 1]

    @property
    def wrong(self) -> int:
        return int(self.bad.sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("protocol", FIRST)
@mpi(ranks=RANKS, timeout=180)
def test_ten_thousand_counts(comm: MPI.Intracomm, protocol: str, dtype: str) -> None:
    cp = cupy()
    if dtype == "bfloat16":
        if protocol == "direct":
            pytest.skip("torch tensors are registered elsewhere; float32 says the same")
        pytest.importorskip("torch")
    first = FIRST[protocol]
    counts = range(first, first + COUNTS)
    algo = f"allreduce:onehop/{protocol}"
    with blinkmpi.Communicator(comm, algo=algo) as ours:
        gpu = ours.gpu
        assert gpu is not None
        arrays = Arrays(ours, dtype, counts[-1] + 2, registered=protocol == "direct")
        stream = cp.cuda.Stream.null

        def make(count: int) -> int:
            """Make a call; the functions of ours that it has entered."""
            arrays.clear(count)
            send, recv = arrays.x[:count], arrays.y[:count]
            with Effort() as effort:
                ours.Allreduce(send, recv, stream=stream)
            arrays.compare(count)
            return effort.ours

        # the first of their size, and of their row in the selection table, make a table and compile a kernel
        for count in (*range(first, first + COUNTS, 100), *range(1024, first + COUNTS, 1024), counts[-1]):
            make(count)
        stream.synchronize()
        assert arrays.wrong == 0  # which allocates when it is first asked for
        free = cp.cuda.runtime.memGetInfo()[0]
        asked = Asked(gpu.runtime)
        gpu.runtime = asked
        new = []
        for i, count in enumerate(counts):
            new.append(make(count))
            if i % 100 == 0:
                stream.synchronize()
        stream.synchronize()
        gpu.runtime = asked._runtime
        assert arrays.wrong == 0
        assert not {"deviceSynchronize", "malloc", "free", "hostAlloc"} & set(asked.times), asked.times
        if comm.size <= DEVICES:  # or others share the device and its time
            assert cp.cuda.runtime.memGetInfo()[0] >= free, "less of the device is free"
        if comm.rank == 0:
            print(f"{protocol} {dtype}, {comm.size} GPUs: {statistics.median(new)} functions for a new count")
        assert statistics.median(new) < CALLS


@mpi(ranks=RANKS, timeout=120)
def test_uneven_blocks_while_a_graph_holds_a_table(comm: MPI.Intracomm) -> None:
    """Through slots; some blocks have no elements."""
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(
        comm, algo=";".join(f"{c}:onehop/slots" for c in ("allreduce", "reduce_scatter"))
    ) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        x, y = (cp.zeros(20_000, "float32") for _ in range(2))
        cp.cuda.runtime.deviceSynchronize()
        ours.Allreduce(x[:1000], y[:1000], stream=stream)
        stream.synchronize()
        with stream:
            stream.begin_capture()
            ours.Allreduce(x[:1000], y[:1000], stream=stream)
            graph = stream.end_capture()
        for count in range(1, 600):
            counts = [(count * (r + 3)) % 61 if (count + r) % 5 else 0 for r in range(n)]
            total = sum(counts)
            with stream:
                x[:total] = cp.arange(total) + comm.rank
                y[:count] = -1
            mine = counts[comm.rank]
            ours.Reduce_scatter(x[:total], y[:mine], counts, MPI.SUM, stream=stream)
            with stream:
                start = sum(counts[: comm.rank])
                want = (start + cp.arange(mine)) * n + n * (n - 1) / 2
                assert (y[:mine] == want).all(), (count, counts)
            if count % 50 == 0:
                with stream:
                    x[:1000] = comm.rank + count
                graph.launch(stream)
                with stream:
                    assert (y[:1000] == n * count + n * (n - 1) / 2).all()
