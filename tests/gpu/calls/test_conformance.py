"""The conformance suite on GPUs: real ranks, peers mapped by CUDA IPC, every protocol.

Cases are looped inside a few jobs, for every job costs seconds; a failure names its case. A kernel is compiled for each
type and operation, which costs more than all the calls: every pair runs on the most ranks, the default protocol only.
"""

import itertools

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.program.call import Call
from blinkmpi.program.reduction import DTYPES
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.device import cupy
from blinkmpi.transport.cuda.packets import PROTOCOLS as PACKETS
from blinkmpi.transport.cuda.packets import fits
from tests.conformance import COLLECTIVES, PLANNED, VARIANTS, Case, cases
from tests.gpu import compile_ahead
from tests.gpu.helpers import DGX1, Pools, at_least, run_all, sizes, spinner
from tests.harness import mpi

SIZES = sizes(1, 2, 3, 4, 8)
PROTOCOLS = (*PACKETS, "direct", "slots")
SOME = (("float32", "sum"), ("bfloat16", "sum"), ("float32", "avg"), ("int16", "min"), ("bool", "lor"))
FEW = SOME[:2]
MOVED = ("float32", "bool", "complex128")  # where bytes only move, all types are one kernel
NAMES = list(dict.fromkeys(PLANNED.get(c, c) for c in COLLECTIVES))  # as BLINKMPI_ALGO has them
SCANS = ("scan", "exscan")  # which go through slots, whatever their length

pytestmark = [pytest.mark.gpu, at_least(1)]


def chosen(collective: str, n: int, pairs: tuple[tuple[str, str], ...]) -> list[Case]:
    """The cases of these types and operations."""
    return [c for c in cases(collective, n) if (c.dtype, c.op) in pairs or (not c.op and c.dtype in MOVED)]


def carries(protocol: str, case: Case) -> bool:
    """Whether a protocol carries a case: packets not all of them."""
    if protocol == "direct" and case.planned == "alltoall":
        return False
    uneven = case.planned == "reduce_scatter" or case.collective in VARIANTS
    call = Call(case.planned, case.n, case.counts() if uneven else (case.count,), case.dtype, case.op)  # type: ignore[arg-type]
    return protocol not in PACKETS or (case.collective != "alltoallv" and fits(call, protocol))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """What all ranks call, before they do: most of the time would go there."""
    compile_ahead.compile_all([(SIZES[-1], DTYPES), *((n, {dtype for dtype, _ in SOME}) for n in SIZES[1:-1])])


@mpi(ranks=SIZES[-1:], timeout=200)
def test_every_type_and_operation(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None, ours.context.why_no_gpus
        plain, registered = (Pools(ours, registered=r) for r in (False, True))
        for collective in COLLECTIVES:
            uneven = collective == "reduce_scatter"  # goes through slots, a kernel more for each pair; or direct
            found = [c for c in cases(collective, comm.size) if not (uneven and c.in_place)]
            run_all(ours, registered if uneven else plain, found)


@at_least(2)
@mpi(ranks=SIZES[-1:], timeout=200)
def test_every_type_and_operation_through_slots(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, algo="allreduce:onehop/slots") as ours:
        found = [c for c in cases("allreduce", comm.size) if not c.in_place]
        longest = {(c.dtype, c.op): c for c in sorted(found, key=lambda c: c.count)}
        run_all(ours, Pools(ours, registered=False), list(longest.values()))


@mpi(ranks=SIZES, timeout=120)
def test_collectives(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None, ours.context.why_no_gpus
        plain, registered = (Pools(ours, registered=r) for r in (False, True))
        for collective in COLLECTIVES:
            some = chosen(collective, comm.size, FEW if collective == "reduce_scatter" else SOME)
            run_all(ours, plain, some)
            run_all(ours, plain, some, skew=3)
            run_all(ours, registered, some)
            run_all(ours, registered, some, skew=1)


@at_least(2)
@mpi(ranks=sizes(2, 3, 4, 8), timeout=200)
def test_protocols_and_schemes(comm: MPI.Intracomm) -> None:
    pairs = FEW if comm.size == SIZES[-1] else FEW[:1]
    some = {c: chosen(c, comm.size, pairs) for c in COLLECTIVES}
    with blinkmpi.Communicator(comm) as ours:
        schemes = {name: ours.plan(name).schemes(name, 0) for name in NAMES}
    for protocol in PROTOCOLS:
        names = [name for name in NAMES if name not in SCANS and (name, protocol) != ("alltoall", "direct")]
        with blinkmpi.Communicator(comm, algo=";".join(f"{name}:onehop/{protocol}" for name in names)) as ours:
            pools = Pools(ours, registered=protocol == "direct")
            for collective in (c for c in COLLECTIVES if c not in SCANS or protocol == "slots"):
                run_all(ours, pools, [c for c in some[collective] if carries(protocol, c)])
    if "chain" in schemes["allreduce"]:
        with blinkmpi.Communicator(comm, algo="allreduce:chain/rs_ag") as ours:
            assert ours.context.cuda().plans.rule("allreduce", 1, registered=True).protocol == "rs_ag"
            pools = Pools(ours, registered=True)
            for skew in (0, 1):
                run_all(ours, pools, some["allreduce"], skew=skew)
    for scheme in sorted({s for found in schemes.values() for s in found} - {"onehop"}):
        names = [name for name in NAMES if scheme in schemes[name]]
        with blinkmpi.Communicator(comm, algo=";".join(f"{name}:{scheme}" for name in names)) as ours:
            pools = Pools(ours, registered=False)
            for collective in COLLECTIVES:
                if PLANNED.get(collective, collective) in names:
                    run_all(ours, pools, some[collective])


@at_least(2)
@mpi(ranks=sizes(2, 3, 4, 8), timeout=120)
def test_a_reduce_scatter_in_place(comm: MPI.Intracomm) -> None:
    """On every protocol, blocks of one length and of several, while some rank is late and the others wait for it."""
    cp, n = cupy(), comm.size
    blinkmpi.Communicator(comm).Free()  # chooses this rank's GPU
    spin, stream = spinner(), cp.cuda.Stream(non_blocking=True)
    lengths = [(count,) * n for count in (1, 999, 40_001, 1 << 18, 500_003)]
    lengths += [tuple(5000 - 100 * r for r in range(n)), tuple(5000 + 100 * r for r in range(n)), (0,) * (n - 1) + (7,)]
    most = max(map(sum, lengths)) + 1
    for algo in ("", "direct", "slots"):
        with blinkmpi.Communicator(comm, algo=f"reduce_scatter:onehop/{algo}" if algo else None) as ours:
            pools = [ours.empty(most), cp.empty(most, "float32")]
            base = cp.arange(most, dtype="float32") % 251
            cp.cuda.runtime.deviceSynchronize()
            for pool, counts, late in itertools.product(pools, lengths, range(n)):
                start = sum(counts[: comm.rank])
                want = n * base[start : start + counts[comm.rank]] + n * (n - 1) // 2
                for skew in (0, 1):
                    vector = pool[skew : skew + sum(counts)]
                    with stream:
                        vector[...] = base[: vector.size] + comm.rank
                    spin(stream, 200 if late == comm.rank else 0)
                    ours.Reduce_scatter(MPI.IN_PLACE, vector, counts, stream=stream)
                    with stream:
                        got = vector[: want.size].copy()
                    stream.synchronize()
                    where = f"{algo}, registered {pool is pools[0]}, blocks {counts}, rank {late} late, skew {skew}"
                    assert (got == want).all(), where


@at_least(2)
@mpi(ranks=sizes(2, 3, 4, 8), timeout=120)
def test_an_emulated_machine(comm: MPI.Intracomm) -> None:
    """Another machine's trees with its links' rates, the host path's too."""
    told = modify(machine("dgx-1v"), gpus=DGX1[comm.size])
    with blinkmpi.Communicator(comm, topology=told) as ours:
        assert ours.context.cuda().emulated
        hybrid = [name for name in NAMES if "hybrid" in ours.plan(name).schemes(name, 0)]
        pools = Pools(ours, registered=False)
        for collective in COLLECTIVES:
            run_all(ours, pools, chosen(collective, comm.size, FEW[:1]), skew=1)
    assert "allreduce" in hybrid
    with blinkmpi.Communicator(comm, topology=told, algo="allreduce:hybrid") as ours:
        run_all(ours, Pools(ours, registered=False), chosen("allreduce", comm.size, FEW[:1]))
