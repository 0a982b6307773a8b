"""A rank whose calls are launched by the door on a GPU that is none: bound_client.py DOOR ID RANKS RANK.

It prints what was launched: function, grid, block, stream, bytes of a stream of packets, and what tells the call.
"""

import ctypes
import json
import os
import sys
import tempfile

from benchmarks.fake.gpu import FakeDriver
from blinkmpi.nccl.binder import Binder, Group, Opened
from blinkmpi.transport.cuda.kernel_layout import common_words, fingerprint_at
from tests.unit.nccl.door.fakes import fake_context
from tests.unit.nccl.door.python_client import UniqueId

SIZE, FLOAT, EACH = ctypes.c_size_t, 7, 8


def process_as_gpu(words):  # type: ignore[no-untyped-def]
    words[0], words[1] = os.getpid(), 0
    return 0


def main(path: str, name: str, n: int, rank: int) -> None:
    door, comm = ctypes.CDLL(path), ctypes.c_void_p()
    with tempfile.TemporaryDirectory() as folder:
        driver = FakeDriver(folder)
    driver["words"] = common_words(n) + 1
    gpu = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))(process_as_gpu)
    address = ctypes.cast(gpu, ctypes.c_void_p).value or 0

    def open_context(group: Group) -> Opened:
        assert (group.gpu, group.pids[rank]) == (os.getpid().to_bytes(16, "little"), os.getpid())
        return Opened(fake_context(driver, group.rank, group.n))

    binder = Binder(door, open_context, gpu=address)
    binder.serve()
    door.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    assert door.ncclCommInitRank(ctypes.byref(comm), n, UniqueId(name.encode()), rank) == 0
    told = []

    def take() -> bool:
        """Note what was launched since, if anything was."""
        if driver["launches"] == len(told):
            return False
        function, grid, block, stream, words = driver.last()
        told.append((function, grid, block, stream, words[common_words(n)], words[fingerprint_at(n)]))
        return True

    send, recv = (ctypes.create_string_buffer(1 << 16) for _ in range(2))
    calls = (
        lambda count: door.ncclAllReduce(send, recv, SIZE(count), FLOAT, 0, comm, None),
        lambda count: door.ncclAllGather(send, recv, SIZE(count), FLOAT, comm, None),
        lambda count: door.ncclReduceScatter(send, recv, SIZE(count), FLOAT, 0, comm, None),
        lambda count: door.ncclBcast(recv, SIZE(count), FLOAT, 1, comm, None),
    )
    for call in calls:
        while not take():
            assert call(1000) == 0
        for count in range(900, 900 + EACH):  # one kind, other counts
            assert call(count) == 0
            assert take()
    door.ncclCommDestroy(comm)
    print(json.dumps(told))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
