"""A rank of an unchanged program, in whose Python the door finds blinkmpi: opened_client.py LIBRARY ID RANKS RANK.

LIBRARY is what it opens by name; empty: it calls what a program calls that is linked with NCCL.

Its GPU is one of an H200 machine that somebody recorded, and nothing is launched. It prints how many of its calls were
ours and what was launched, or why there were none. ``DIES=RANK:NAME``: that rank is killed when it comes to a step of
``opening``. ``FAILS=RANK:NAME``: the step raises. ``LEAVES=1``: it ends at once. ``COMMS=2``: it has two communicators.
``AT_END=LIBRARY``: it keeps the communicator, and the library makes calls of it when Python has ended. ``WAITS=1``: it
prints "ready" and waits for a line before it ends.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from blinkmpi.nccl.status import CommunicatorStatus, of_process

SIZE, FLOAT, CALLS = ctypes.c_size_t, 7, 20
PATIENCE_S = 60


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def prepare(rank: int, n: int) -> Any:
    """Let ``opening`` find a GPU that is none; the driver, which knows what was launched."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from benchmarks.fake.gpu import FakeDriver, FakeGpu
    from blinkmpi.errors import DeviceError
    from blinkmpi.nccl import opening
    from blinkmpi.transport.cuda.kernel_layout import common_words
    from tests.unit.topology.test_probe import recorded

    with tempfile.TemporaryDirectory() as folder:
        driver = FakeDriver(folder)
    driver["words"] = common_words(n) + 1
    hardware = opening.Hardware(lambda uuid: FakeGpu(driver), lambda gpu: recorded("nvml-h200x8")[rank])  # type: ignore[arg-type, return-value]
    opening.Hardware = lambda: hardware  # type: ignore[assignment, misc]

    def dies(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fails(*_: Any, **__: Any) -> NoReturn:
        raise DeviceError("a test wants it so")

    for variable, work in (("DIES", dies), ("FAILS", fails)):
        who, _, name = os.environ.get(variable, "").partition(":")
        if who == str(rank):
            assert hasattr(opening, name)
            setattr(opening, name, work)
    return driver


def wait() -> None:
    """Wait for a line, if that is wanted."""
    if "WAITS" in os.environ:
        print("ready", flush=True)
        sys.stdin.readline()


def main(path: str, name: str, n: int, rank: int) -> None:
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    driver = prepare(rank, n) if "FAKE" in os.environ else None
    door = ctypes.CDLL(path or None)
    door.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    comms = [ctypes.c_void_p() for _ in range(int(os.environ.get("COMMS", "1")))]
    for number, comm in enumerate(comms):
        assert door.ncclCommInitRank(ctypes.byref(comm), n, UniqueId(f"{name}-{number}".encode()), rank) == 0
    send, recv = (ctypes.create_string_buffer(1 << 16) for _ in range(2))

    def call(count: int) -> None:
        for comm in comms:
            assert door.ncclAllReduce(send, recv, SIZE(count), FLOAT, 0, comm, None) == 0

    def status() -> Sequence[CommunicatorStatus]:
        told = of_process(os.getpid())
        assert told is not None
        return told.communicators

    def settled(c: CommunicatorStatus) -> bool:
        return c.state == "NCCL's" or any(kind.whose != "not settled" for kind in c.kinds)

    if "LEAVES" in os.environ:
        call(1000)
        wait()
        for comm in comms:
            door.ncclCommDestroy(comm)
        return
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not all(map(settled, status())):  # each call is decided alike on all ranks
        call(1000)
        time.sleep(0.01)
    for count in range(900, 900 + CALLS):
        call(count)
    found = status()[-1]
    launched = [driver.last(back)[:2] for back in range(CALLS)] if driver and found.ours else []
    words = {"state": found.state, "why": found.why, "ours": found.ours, "nccls": found.nccls, "launched": launched}
    words["all"] = [(c.state, c.ours > CALLS) for c in status()]
    wait()
    if end := os.environ.get("AT_END"):
        at_end = ctypes.CDLL(end).at_end
        at_end(comms[0], *(ctypes.cast(f, ctypes.c_void_p) for f in (door.ncclAllReduce, door.ncclCommGetAsyncError)))
        print("kept", flush=True)
        return
    kinds = [[kind.call, kind.dtype, kind.op, kind.most_bytes, kind.whose] for kind in found.kinds]
    for comm in comms:
        door.ncclCommDestroy(comm)
    print(json.dumps({**words, "kinds": kinds}))


if __name__ == "__main__":
    main(os.environ.get(sys.argv[1], sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
