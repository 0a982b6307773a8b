"""Thousands of calls of all kinds, sizes and protocols, with ranks that are late at random; every result is compared.

``BLINK_TORTURE_CALLS`` says how many (10,000). The comparison is on the device, so that nothing waits for it.
"""

import os
import random
import time

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.transport.cuda.device import cupy
from tests.campaign import torture
from tests.gpu.helpers import Stress, at_least, sizes, spinner
from tests.harness import mpi

CALLS = int(os.environ.get("BLINK_TORTURE_CALLS") or 10_000)
SECONDS = 60.0 * max(1.0, CALLS / 10_000)
COUNTS = (1, 5, 127, 1024, 4099, 20_000, 100_003, 250_001)
LOOK = 250  # calls between two looks at the clock and at the results
SLOTS = ";".join(f"{c}:onehop/slots" for c in ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"))
LINES = SLOTS.replace("slots", "ll128_one_shot")  # at every size that fits
TWICE = LINES.replace("one_shot", "two_shot")

pytestmark = [pytest.mark.gpu, at_least(2)]


@mpi(ranks=sizes(2, 3, 4, 8)[-1:], timeout=SECONDS + 60)
def test_torture(comm: MPI.Intracomm) -> None:
    cp, spin, n = cupy(), spinner(), comm.size
    alike, own = random.Random(20), random.Random(comm.rank)  # what all ranks do, and what each does to the others
    most = n * max(COUNTS) + 8
    with (
        blinkmpi.Communicator(comm, timeout=30) as usual,
        blinkmpi.Communicator(comm, timeout=30, algo=SLOTS) as slots,
        blinkmpi.Communicator(comm, timeout=30, algo=SLOTS.replace("onehop/slots", "chain")) as chain,
        blinkmpi.Communicator(comm, timeout=30, algo=LINES) as lines,
        blinkmpi.Communicator(comm, timeout=30, algo=TWICE) as twice,
    ):
        stream = cp.cuda.Stream(non_blocking=True)
        work = Stress(comm, stream, most)
        with stream:
            plain = [cp.empty(most, "float32") for _ in range(2)]
        symmetric = [usual.empty(most) for _ in range(2)]
        began, done, pending = time.monotonic(), 0, []
        for i in range(CALLS):
            ours = alike.choices((usual, slots, chain, lines, twice), (6, 2, 1, 4, 2))[0]
            send, recv = symmetric if ours is usual and alike.random() < 0.4 else plain
            skew = alike.choice((0, 0, 0, 1, 4))
            kind, count, root = alike.choice(Stress.KINDS), alike.choice(COUNTS), alike.randrange(n)
            how = alike.choices(("stream", "wait", "request"), (90, 5, 5))[0]
            late = own.random()
            if late < 0.01:
                time.sleep(own.uniform(0.0001, 0.004))
            elif late < 0.03:
                spin(stream, own.uniform(10, 3000))
            keys = {} if how == "wait" else {"stream": stream}
            source, target = work.ends(kind, count, send[skew:], recv[skew:], root)
            with stream:
                work.fill(source, target, i % 97)
                made = work.do(ours, kind, source, target, root, "I" if how == "request" else "", **keys)
                work.compare(target, kind, count, root, i % 97)
            if how == "request":
                pending.append(made)
            if len(pending) > 8 or i % LOOK == LOOK - 1:
                for request in pending:
                    request.Wait()
                pending.clear()
            done += 1
            if i % LOOK == LOOK - 1:
                assert work.wrong == 0, f"after {done} calls, the last {kind} of {count} from root {root}"
                if comm.bcast(time.monotonic() - began > SECONDS):
                    break
        for request in pending:
            request.Wait()
        assert work.wrong == 0
        seconds = time.monotonic() - began
        if comm.rank == 0:
            print(f"{done} calls in {seconds:.1f} s")
        assert done >= LOOK


@mpi(ranks=sizes(2, 3, 4, 8)[-1:], timeout=240)
def test_every_protocol_at_every_length(comm: MPI.Intracomm) -> None:
    """Vectors for which threads send more than once: in a later round threads that waited for peers stood alone."""
    calls, ours = torture.several_gpus(comm, (63, 8192, 500_009, 2_097_152))
    done = calls.run(30, seed=7, replays=20)
    ours.Free()
    assert not any(done["wrong"]), done["first_wrong"][:8]
    assert done["calls"] > 0


@mpi(ranks=(3, 4, 8), timeout=240)
def test_packets_whose_threads_are_late(comm: MPI.Intracomm) -> None:
    with torture.late_threads():
        calls = torture.shared_gpus(comm, (63, 8192, 500_009))
        done = calls.run(20, seed=comm.size, replays=4)
    calls.transport.close(comm)
    assert not any(done["wrong"]), done["first_wrong"][:8]
