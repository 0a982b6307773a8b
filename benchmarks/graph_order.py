"""What the order of graphs costs, on one GPU: ``python benchmarks/graph_order.py -o FILE``.

Once a call has been captured, calls and graphs are chained by an event (``transport/cuda/order.py``). Kernels that only
keep a stream busy stand for the calls here, so no second GPU is needed: graphs of them are replayed with the chain's
nodes and without, and calls outside of graphs are made with the chain's two functions of the driver and without. Then
graphs and calls are launched on several streams in drawn orders; with the chain none may begin before the one before it
has ended.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from blinkmpi.transport.cuda.device import Gpu, cupy  # noqa: E402
from blinkmpi.transport.cuda.order import Order  # noqa: E402

CALLS, BUSY_NS = 100, (0, 5_000, 20_000)  # of a graph, and how long each takes
ROUNDS, REPLAYS, HOST_CALLS = 31, 5, 1000
STREAMS, GRAPHS, DRAWN, DRAWN_NS = 4, 12, 60, 50_000
SOURCE = r"""extern "C" __global__ void busy(unsigned long long* at, unsigned long long ns) {
  unsigned long long began, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - began < ns);
  at[0] = began, at[1] = now;
}"""


class Calls:
    """Calls that are kernels of one thread, put on streams by an order of their own."""

    def __init__(self, gpu: Gpu, *, mixes: bool) -> None:
        self.cp, self.gpu, self.mixes, self.order = cupy(), gpu, mixes, Order()
        self.kernel = self.cp.RawKernel(SOURCE, "busy")
        self.streams = [self.cp.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]

    def call(self, stream: Any, at: Any, ns: int) -> None:
        """Put a call on a stream, which leaves the times of its begin and end ``at`` two words."""
        with stream, self.order.lock:
            self.order.begin(self.gpu, stream.ptr, stream, mixes=self.mixes)
            self.kernel((1,), (1,), (at, self.cp.uint64(ns)))
            self.order.end(self.gpu, stream.ptr, mixes=self.mixes)

    def graph(self, stream: Any, at: Any, ns: int) -> Any:
        """A graph of a call for each row of ``at``."""
        with stream:
            stream.begin_capture()
            for row in at:
                self.call(stream, row, ns)
            return stream.end_capture()


def us_of(run: Callable[[], object], wait: Callable[[], object], times: int) -> float:
    """The median time of ``run``, which is called so often in a row, in microseconds."""
    found = []
    for _ in range(ROUNDS):
        wait()
        began = time.perf_counter()
        for _ in range(times):
            run()
        wait()
        found.append((time.perf_counter() - began) / times * 1e6)
    return median(found)


def replays(gpu: Gpu) -> list[dict[str, Any]]:
    """A row for each length of a call: the time of a replay without and with the chain."""
    rows = []
    for ns in BUSY_NS:
        us: dict[str, float] = {}
        for name, mixes in (("apart", False), ("mixed", True)):
            calls = Calls(gpu, mixes=mixes)
            stream, at = calls.streams[0], calls.cp.zeros((CALLS, 2), "u8")
            graph = calls.graph(stream, at, ns)
            us[name] = us_of(lambda g=graph, s=stream: g.launch(s), stream.synchronize, REPLAYS)  # type: ignore[misc]
        rows.append({"what": "replay", "calls": CALLS, "busy_us": ns / 1000, "us": us})
    return rows


def host_calls(gpu: Gpu) -> dict[str, Any]:
    """What a call outside of graphs costs the host, from Python, without the chain and with it."""
    us: dict[str, float] = {}
    for name, mixes in (("apart", False), ("mixed", True)):
        calls = Calls(gpu, mixes=mixes)
        stream, at = calls.streams[0], calls.cp.zeros(2, "u8")
        calls.graph(stream, at.reshape(1, 2), 0)

        def run(calls: Calls = calls, stream: Any = stream, at: Any = at) -> None:
            for _ in range(HOST_CALLS):
                calls.call(stream, at, 0)

        us[name] = us_of(run, stream.synchronize, 1) / HOST_CALLS
    return {"what": "call", "us": us}


def drawn(gpu: Gpu, *, mixes: bool) -> int:
    """How many of the graphs and calls, launched in drawn orders, began before the one before them had ended."""
    rng, calls = random.Random(5), Calls(gpu, mixes=mixes)
    at = calls.cp.zeros((GRAPHS + STREAMS, 3, 2), "u8")
    graphs = [calls.graph(calls.streams[i % STREAMS], at[i, : 1 + i % 3], DRAWN_NS) for i in range(GRAPHS)]
    early = 0
    for _ in range(DRAWN):
        order = rng.sample(range(GRAPHS + STREAMS), GRAPHS + STREAMS)
        for i in order:
            stream = rng.choice(calls.streams)
            if i < GRAPHS:
                graphs[i].launch(stream)
            else:
                calls.call(stream, at[i, 0], DRAWN_NS)
        calls.cp.cuda.Device().synchronize()
        times = at.get()
        ends = [(times[i, 0, 0], times[i, (i % 3 if i < GRAPHS else 0), 1]) for i in order]
        early += sum(int(b[0] < a[1]) for a, b in pairwise(ends))
    return early


def main() -> int:
    """Measure, print and write; 0 if with the chain nothing began too early."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args()
    began, gpu = datetime.now().astimezone(), Gpu(0)
    gpu.use()
    rows = [*replays(gpu), host_calls(gpu)]
    early = {name: drawn(gpu, mixes=mixes) for name, mixes in (("apart", False), ("mixed", True))}
    for row in rows:
        what = (
            f"{row['calls']} calls of {row['busy_us']:g} us" if row["what"] == "replay" else "a call outside of graphs"
        )
        print(f"{what}: {row['us']['apart']:.2f} us, chained {row['us']['mixed']:.2f} us")
    print(f"of {DRAWN * (GRAPHS + STREAMS - 1)} that follow another one, began too early: {early}")
    if options.output:
        about = {"graph_order": {"rounds": ROUNDS, "graphs": GRAPHS, "streams": STREAMS, "rounds_drawn": DRAWN}}
        facts = {
            "versions": {"python": sys.version.split()[0], **gpu.versions},
            "gpu": {"name": gpu.name},
            "early": early,
        }
        jobs.write(options.output, jobs.document(about, rows, [], began, **facts))
    return int(early["mixed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
