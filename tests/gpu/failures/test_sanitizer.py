"""compute-sanitizer over a small run of all collectives: memory errors on every protocol, races in shared memory.

This file is also the program of a rank: ``python tests/gpu/failures/test_sanitizer.py DTYPE...``.
"""

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import CollectiveTimeout
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.device import cupy
from blinkmpi.transport.cuda.kernel_layout import SEGMENT_ROOMS, SEGMENTS
from tests.conformance import COLLECTIVES, REDUCING, Case
from tests.gpu.helpers import DGX1, GPUS, Pools, at_least, run_all
from tests.harness import ROOT, run_command

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
N = 2
FOUND = 99  # the exit status where the tool has found something
COUNTS = (1, 37, 40_001)
GIVE_UP = "give-up"  # in place of types: calls to which a rank does not come
GROUPS = "groups"  # in place of types: groups of all collectives, of buckets and as they lie
MESSAGES = "messages"  # in place of types
UNFIT = ("Device not supported", "LibraryNotLoaded")  # what the tool says where it cannot work

pytestmark = [pytest.mark.gpu, at_least(N)]


@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed: it comes with the CUDA toolkit")
@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("memcheck", ["float32", "bfloat16"]), ("racecheck", ["float32"]), ("memcheck", [GIVE_UP]),
        ("memcheck", [GROUPS]), ("memcheck", [MESSAGES]), ("racecheck", [MESSAGES]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.timeout(260)
def test_sanitizer(tool: str, words: list[str]) -> None:
    assert TOOL is not None
    argv = [TOOL, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5"]
    if tool == "memcheck":
        argv += ["--report-api-errors", "no"]  # CuPy asks the driver for things that it may lack
    outcome = run_command(
        N, [*argv, sys.executable, __file__, *words], timeout=240, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT
    )
    for text in UNFIT:
        if text in outcome.output:
            pytest.skip(f"{Path(TOOL).name} does not work here: {text}")
    assert not outcome.timed_out, outcome.output[-4000:]
    assert outcome.output.count("all cases passed") == N, outcome.output[-4000:]
    assert outcome.rc == 0, outcome.output[-4000:]


def main(dtypes: list[str]) -> None:
    """Every collective on every protocol; the tool makes all of it slow, so with few sizes."""
    n = MPI.COMM_WORLD.size
    most = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")
    told = modify(machine("dgx-1v"), gpus=DGX1[n])  # whose links are paced
    ways: list[tuple[dict[str, Any], bool]] = [({}, False), ({"topology": told}, False)]
    for protocol in ("ll128_one_shot", "direct", "slots"):
        algo = ";".join(f"{name}:onehop/{protocol}" for name in most)
        ways.append(({"algo": algo}, protocol == "direct"))
    for keys, registered in ways:
        with blinkmpi.Communicator(MPI.COMM_WORLD, timeout=200, **keys) as ours:
            pools = Pools(ours, registered=registered)
            for collective in COLLECTIVES:
                for dtype in dtypes:
                    op = "sum" if collective in REDUCING else ""
                    chosen = [Case(collective, n, dtype, op, count, False, 0) for count in COUNTS]
                    run_all(ours, pools, chosen, skew=1 if registered else 0)
    print("all cases passed", flush=True)


def messages() -> None:
    """To and from the other rank at once, also at odd places; the longest fill all slots."""
    cp, rank = cupy(), MPI.COMM_WORLD.rank
    with blinkmpi.Communicator(MPI.COMM_WORLD, timeout=200) as ours:
        found = ours.context.gpus.transport.messages
        ends = [found.fifo(1 - rank, sends=sends) for sends in (True, False)]
        for nbytes, shift in itertools.product((0, 1, 1000, 40_001, 1 << 20, 9 << 20), (0, 1)):
            x, y = cp.full(nbytes + shift, rank + 1, "uint8"), cp.zeros(nbytes + shift + 1, "uint8")
            cp.cuda.Device().synchronize()
            for end, array in zip(ends, (x, y), strict=True):
                end.put(array.data.ptr + shift, nbytes, 3, 200.0)
            cp.cuda.Device().synchronize()
            ours.check()
            assert bool((y[shift : shift + nbytes] == 2 - rank).all())
            assert int(y[:shift].sum()) == int(y[shift + nbytes :].sum()) == 0
    print("all cases passed", flush=True)


def give_up() -> None:
    """On every protocol a call that the last rank does not make: the others' kernels leave a report, and all go on."""
    world, cp = MPI.COMM_WORLD, cupy()
    others = world.Split(world.rank == world.size - 1)
    for count, registered in ((100, False), (1 << 18, False), (3 << 20, False), (3 << 20, True)):
        comm = blinkmpi.Communicator(world, timeout=60)
        x, y = ((comm.empty if registered else cp.empty)(count, "float32") for _ in range(2))
        x[...] = 1
        comm.Allreduce(x, y)
        assert bool((y == world.size).all())
        if world.rank < world.size - 1:
            others.Barrier()
            with pytest.raises(CollectiveTimeout, match=rf"too long for rank {world.size - 1}"):
                comm.Allreduce(x, y, timeout=3)
        world.Barrier()
        comm._dispatcher().sequence.dead = comm._dispatcher().sequence.dead or RuntimeError("a rank did not come")
        comm.Free()
    print("all cases passed", flush=True)


def groups() -> None:
    """Groups of every collective, at odd places: of more tensors than a kernel takes, empty ones too, and of fewer."""
    world, cp = MPI.COMM_WORLD, cupy()
    n, many = world.size, [*range(SEGMENTS + 3), 40_001]
    with blinkmpi.Communicator(world, timeout=200) as ours:
        pool = cp.zeros(4 * n * sum(many) + 4, "float32")
        for skew, lengths in itertools.product((0, 1), (many, many[: SEGMENT_ROOMS[-1]])):
            for sends, receives in ((1, 1), (1, n), (n, 1), (n, n)):
                at, pairs = skew, []
                for length in lengths:
                    send, recv = (pool[at + k * n * length :][: b * length] for k, b in enumerate((sends, receives)))
                    pairs.append((send, recv))
                    at += 2 * n * length
                pool[...] = 1
                name = {(1, 1): "Allreduce", (1, n): "Allgather", (n, 1): "Reduce_scatter_block"}.get((sends, receives))
                getattr(ours, name or "Alltoall")(*(list(buffers) for buffers in zip(*pairs, strict=True)))
                want = n if name in ("Allreduce", "Reduce_scatter_block") else 1
                assert all(bool((recv == want).all()) for _, recv in pairs), (name, skew, len(lengths))
    print("all cases passed", flush=True)


if __name__ == "__main__":
    assert GPUS
    kinds = {GIVE_UP: give_up, GROUPS: groups, MESSAGES: messages}
    kinds[sys.argv[1]]() if sys.argv[1] in kinds else main(sys.argv[1:])
