"""The gate: long calls wait for all ranks in one warp, before the kernel that takes many multiprocessors."""

import contextlib
import statistics
import time
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, CollectiveTimeout, MismatchError, PeerLost
from blinkmpi.program.reduction import DTYPES
from blinkmpi.transport.cuda.device import cupy
from tests.conformance import COLLECTIVES, cases
from tests.gpu import compile_ahead
from tests.gpu.calls.test_conformance import NAMES, SCANS, SOME, carries, chosen
from tests.gpu.helpers import DEVICES, Pools, Stress, at_least, run_all, sizes, spinner
from tests.harness import PATIENCE_S, mpi

RANKS = sizes(2, 4)[-1:]
BIG = 3 << 20  # elements: 12 MiB, past all packets
GATED = {"BLINKMPI_GATE_FROM": "0"}
DEADLINE_S = 3.0
LATE_US = 400_000  # of a rank: far longer than what the others do meanwhile
EDGE, REPEATS = 8192, 7  # of the matrices of a product; how often it is timed
BESIDE = 1.3  # times a product's own time, at most, beside a gate: one warp of the GPU is taken

pytestmark = [pytest.mark.gpu, at_least(2)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_ahead.compile_all([(RANKS[0], DTYPES)])


def call_until_error(
    ours: blinkmpi.Communicator, x: Any, y: Any, stream: Any, op: MPI.Op = MPI.SUM, many: int = 10, graph: Any = None
) -> None:
    """Make a call, or replay a graph, and ask what became of it."""
    for _ in range(many):
        if graph is None:
            ours.Allreduce(x, y, op, stream=stream)
        else:
            graph.launch(stream)
        stream.synchronize()
        ours.check()
        time.sleep(0.1)


@mpi(ranks=RANKS, timeout=240, env=GATED)
@pytest.mark.parametrize("protocol", ["slots", "direct"])
def test_results(comm: MPI.Intracomm, protocol: str) -> None:
    """Of every collective in place and not, of some types, and of an AllReduce of every type and operation."""
    names = [name for name in NAMES if name not in SCANS and (name, protocol) != ("alltoall", "direct")]
    with blinkmpi.Communicator(comm, algo=";".join(f"{name}:onehop/{protocol}" for name in names)) as ours:
        assert ours.context.cuda().transport.gated
        pools = Pools(ours, registered=protocol == "direct")
        for collective in COLLECTIVES:
            if collective not in SCANS or protocol == "slots":
                some = [c for c in chosen(collective, comm.size, SOME) if carries(protocol, c)]
                run_all(ours, pools, some)
                run_all(ours, pools, some, skew=1)
        longest = {(c.dtype, c.op): c for c in sorted(cases("allreduce", comm.size), key=lambda c: c.count)}
        run_all(ours, pools, list(longest.values()))


@mpi(ranks=RANKS, timeout=120, env=GATED)
def test_other_schemes(comm: MPI.Intracomm) -> None:
    """Chains and trees, and an AllReduce of two kernels, of which the first has the gate."""
    with blinkmpi.Communicator(comm) as ours:
        schemes = sorted(set(ours.plan("allreduce").schemes("allreduce", 0)) - {"onehop"})
    algos = [f"allreduce:{scheme}" for scheme in schemes]
    for algo in (*algos, *(["allreduce:chain/rs_ag"] if "chain" in schemes else [])):
        with blinkmpi.Communicator(comm, algo=algo) as ours:
            run_all(ours, Pools(ours, registered=True), chosen("allreduce", comm.size, SOME))


@mpi(ranks=RANKS, timeout=120, env={"BLINKMPI_GATE_FROM": str(8 << 20)})
def test_lengths_on_both_sides_of_the_border(comm: MPI.Intracomm) -> None:
    """By C and by Python, with and without a gate, one behind the other on one stream and on two."""
    cp, spin, n = cupy(), spinner(), comm.size
    with blinkmpi.Communicator(comm, stream="current", timeout=30) as ours:
        streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
        plain, registered = cp.empty(BIG, "float32"), ours.empty(BIG, "float32")
        for turn in range(60):
            stream = streams[turn // 7 % 2]
            count = (BIG, BIG // 2 + 1, BIG // 3, BIG - turn, 1 << 18)[turn % 5]
            memory = (plain, registered)[turn % 2]
            if turn % 6 == comm.rank:
                spin(stream, 2000)
            with stream:
                memory[:count] = comm.rank + turn
                ours.Allreduce(MPI.IN_PLACE, memory[:count])
            stream.synchronize()
            assert (memory[:count] == n * turn + n * (n - 1) / 2).all(), (turn, count)
        ours.check()


@mpi(ranks=RANKS, timeout=90, env=GATED)
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_the_deadline_names_who_is_late(comm: MPI.Intracomm, *, registered: bool, captured: bool) -> None:
    cp, late = cupy(), comm.size - 1
    ours = blinkmpi.Communicator(comm, stream="current", timeout=DEADLINE_S)
    stream = cp.cuda.Stream(non_blocking=True)
    x, y = ((ours.empty if registered else cp.empty)(BIG, "float32") for _ in range(2))
    cp.cuda.Device().synchronize()
    ours.Allreduce(x, y, stream=stream)
    stream.synchronize()
    stream.begin_capture()
    ours.Allreduce(x, y, stream=stream)
    graph = stream.end_capture()
    comm.Barrier()
    found: BlinkError | None = None
    began = time.monotonic()
    if comm.rank != late:
        with pytest.raises((CollectiveTimeout, PeerLost)) as caught:
            call_until_error(ours, x, y, stream, many=1, graph=graph if captured else None)
        found = caught.value
        assert time.monotonic() - began < DEADLINE_S + PATIENCE_S
    errors = comm.allgather((type(found).__name__, str(found)))
    said = [text for kind, text in errors if kind == "CollectiveTimeout"]
    assert said, errors
    assert all(f"for rank {late}, for its entry into the call" in text for text in said), said
    comm.Barrier()
    with pytest.raises(BlinkError):  # on the late rank as well, whose peers have given up
        call_until_error(ours, x, y, stream)
    comm.Barrier()
    with contextlib.suppress(BlinkError):
        ours.Free()
    with blinkmpi.Communicator(comm) as again:  # the GPU is as good as before
        z = cp.ones(BIG, "float32")
        again.Allreduce(MPI.IN_PLACE, z)
        assert (z == comm.size).all()


@mpi(ranks=RANKS, timeout=60, env=GATED)
def test_another_call_of_a_peer_is_found_by_the_gate(comm: MPI.Intracomm) -> None:
    cp = cupy()
    ours = blinkmpi.Communicator(comm, stream="current", timeout=30)
    stream = cp.cuda.Stream(non_blocking=True)
    x, y = (cp.ones(BIG, "float32") for _ in range(2))
    cp.cuda.Device().synchronize()
    for op in (MPI.SUM, MPI.MAX):
        ours.Allreduce(x, y, op, stream=stream)
    with stream:
        y[...] = -1
    stream.synchronize()
    began = time.monotonic()
    with pytest.raises((MismatchError, PeerLost)):
        call_until_error(ours, x, y, stream, MPI.SUM if comm.rank else MPI.MAX, many=1)
    assert time.monotonic() - began < PATIENCE_S
    assert (y.get() == -1).all(), "nothing was written"
    comm.Barrier()
    with contextlib.suppress(BlinkError):
        ours.Free()


def beside_a_late_peer(ours: blinkmpi.Communicator, spin: Any, x: Any) -> tuple[list[float], list[float], int]:
    """Milliseconds of a product alone, and while a call waits for the last rank; how many ran all the while it waited.

    On the last rank there is nothing to measure.
    """
    cp, late = cupy(), ours.size - 1
    calls, products = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    with products:
        a, b = (cp.ones((EDGE, EDGE), "float16") for _ in range(2))
        out = cp.matmul(a, b)  # loads its kernel
    ours.Allreduce(x, x.copy(), stream=calls)
    cp.cuda.Device().synchronize()

    def product() -> float:
        begin, end = (cp.cuda.Event() for _ in range(2))
        with products:
            begin.record()
            cp.matmul(a, b, out=out)
            end.record()
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(begin, end))

    alone, beside, meanwhile = [product() for _ in range(REPEATS)], list[float](), 0
    for _ in range(REPEATS):
        y = cp.empty_like(x)
        cp.cuda.Device().synchronize()
        ours.Barrier()
        if ours.rank == late:
            spin(calls, LATE_US)
        ours.Allreduce(x, y, stream=calls)
        if ours.rank != late:
            time.sleep(0.02)  # the kernels that wait have begun
            beside.append(product())
            meanwhile += not calls.done
        calls.synchronize()
        ours.check()
    return alone, beside, meanwhile


@pytest.mark.skipif(RANKS[0] > DEVICES, reason="of ranks that share a GPU, the late one's work runs on it, too")
@mpi(ranks=RANKS, timeout=120, env=GATED)
@pytest.mark.parametrize("registered", [False, True])
def test_a_late_peer_does_not_slow_down_a_product(comm: MPI.Intracomm, *, registered: bool) -> None:
    """On another stream of the same GPU, while a call of 64 MiB waits."""
    cp, spin = cupy(), spinner()
    with blinkmpi.Communicator(comm, stream="current", timeout=30) as ours:
        x = (ours.empty if registered else cp.empty)(16 << 20, "float32")
        x[...] = 0
        alone, beside, meanwhile = beside_a_late_peer(ours, spin, x)
    if comm.rank != comm.size - 1:
        times = f"alone {statistics.median(alone):.2f} ms, beside {statistics.median(beside):.2f} ms"
        print(times, flush=True)
        assert meanwhile == REPEATS, "the calls waited longer than the products took"
        assert statistics.median(beside) < BESIDE * statistics.median(alone), times


@mpi(ranks=RANKS, timeout=120, env=GATED)
def test_graphs_replayed(comm: MPI.Intracomm) -> None:
    """Plain, registered and in place, among ordinary calls, on two streams."""
    cp, spin, n = cupy(), spinner(), comm.size
    with blinkmpi.Communicator(comm, stream="current", timeout=30) as ours:
        streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
        work = Stress(comm, streams[0], n * BIG)
        kinds = [("allreduce", BIG), ("broadcast", BIG), ("allgather", BIG), ("reduce_scatter", BIG), ("gather", 999)]
        calls = []
        for kind, count in kinds:
            for make in (cp.empty, ours.empty):
                calls.append((kind, count, *work.ends(kind, count, *(make(n * count, "float32") for _ in range(2)))))

        def enqueue() -> None:
            for kind, _, send, recv in calls:
                work.do(ours, kind, send, recv, 0, "", stream=streams[0])

        x = cp.empty(BIG, "float32")
        for _ in range(3):
            enqueue()
        cp.cuda.Device().synchronize()
        streams[0].begin_capture()
        enqueue()
        graph = streams[0].end_capture()
        for i in range(20):
            if i % 5 == comm.rank:
                spin(streams[0], 2000)
            for _, _, send, recv in calls:
                work.fill(send, recv, i)
            with streams[1]:
                x[...] = comm.rank + i
            graph.launch(streams[0])
            ours.Allreduce(MPI.IN_PLACE, x, stream=streams[1])
            for kind, count, _, recv in calls:
                work.compare(recv, kind, count, 0, i)
            streams[1].synchronize()
            assert (x == n * i + n * (n - 1) / 2).all(), i
        assert work.wrong == 0
        ours.check()


@mpi(ranks=RANKS, timeout=120, env=GATED)
def test_two_communicators(comm: MPI.Intracomm) -> None:
    """Their calls keep one order, gates and kernels."""
    cp, spin, n = cupy(), spinner(), comm.size
    options = {"stream": "current", "timeout": 30}
    with blinkmpi.Communicator(comm, **options) as one, blinkmpi.Communicator(comm, **options) as other:
        pairs = [(ours, cp.cuda.Stream(non_blocking=True)) for ours in (one, other)]
        x = [cp.empty(BIG, "float32") for _ in pairs]
        for i in range(60):
            ours, stream = pairs[i % 2]
            if i % 7 == comm.rank:
                spin(stream, 2000)
            with stream:
                x[i % 2][...] = comm.rank + i
            ours.Allreduce(MPI.IN_PLACE, x[i % 2], stream=stream)
            if i % 2:
                for k, (_, each) in enumerate(pairs):
                    each.synchronize()
                    assert (x[k] == n * (i - 1 + k) + n * (n - 1) / 2).all(), (i, k)
        one.check()
        other.check()
