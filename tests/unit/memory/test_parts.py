"""Registering memory that has no IPC handle: torch's expandable segments, which lie in several mapped parts."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.errors import BlinkError, DeviceError
from blinkmpi.transport.cuda.memory import descriptors
from blinkmpi.transport.cuda.memory.descriptors import exchange, listen
from blinkmpi.transport.cuda.regions import OFFSET_BITS, Regions
from blinkmpi.util.together import allgather, bcast
from tests.unit.memory.stub import MIB, Stub, StubGpu, make_stub
from tests.unit.topology.test_gather import on_ranks

PART = 4 * MIB
WIDE = 2 * PART + MIB  # of a buffer that lies in three parts


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> list[Stub]:
    return [Stub(make_stub(tmp_path_factory.mktemp(f"cuda{rank}"))) for rank in range(2)]


def each(stubs: list[Stub], work: Callable[[Any, StubGpu, int, Regions], Any]) -> list[Any]:
    """What ``work(comm, gpu, at, regions)`` gives on each rank; at ``at`` lie three parts that others have made."""

    def one(comm: Any, _: Any) -> Any:
        stub, comm.size = stubs[comm.rank], 2
        gpu: Any = StubGpu(stub)
        at = stub.segment([PART] * 3)
        before = stub.counts
        comm.Barrier()
        files = open_files(comm)
        regions = Regions(gpu, 2, comm.rank, 0)
        found = work(comm, gpu, at, regions)
        comm.Barrier()
        assert (stub.counts, gpu.opened) == (before, []), "all is given back"
        comm.Barrier()
        assert open_files(comm) == files, "no descriptor is left"
        return found

    results = on_ranks([0, 0], one)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def open_files(comm: Any) -> int:
    """Of both ranks, which are threads; one counts, because that opens one."""
    return bcast(comm, len(os.listdir("/proc/self/fd")) if comm.rank == 0 else None, int)


def seen(regions: Regions, ref: int, rank: int) -> int:
    """Where a rank's buffer is mapped here, as the kernel finds it by what the rank announces."""
    return regions.known[(ref >> OFFSET_BITS) - 1].peers[rank] + (ref & (1 << OFFSET_BITS) - 1)


def test_a_buffer_in_several_parts_is_mapped_by_the_peers(stubs: list[Stub]) -> None:
    def work(comm: Any, gpu: StubGpu, at: int, regions: Regions) -> None:
        wide = at + comm.rank * MIB  # its place differs from rank to rank
        region = regions.register(comm, lambda: (wide, WIDE))
        ctypes.memset(wide, 65 + comm.rank, WIDE)
        refs = allgather(comm, regions.ref(wide, WIDE), int)
        comm.Barrier()
        other = 1 - comm.rank
        assert ctypes.string_at(seen(regions, refs[other], other), WIDE) == bytes([65 + other]) * WIDE
        assert not regions.ref(wide - 512, 100), "what was not registered"
        regions.deregister(comm, region, (wide, wide + WIDE))
        assert not regions.ref(wide + MIB, 100)

    each(stubs, work)


def test_one_rank_may_bring_memory_of_cuda_malloc(stubs: list[Stub]) -> None:
    def work(comm: Any, gpu: StubGpu, at: int, regions: Regions) -> None:
        own = gpu.allocate(MIB) if comm.rank else 0
        at = own or at
        region = regions.register(comm, lambda: (at, MIB))
        assert (len(gpu.opened), len(region.peers)) == (1 - comm.rank, 2)
        if comm.rank == 0:
            ctypes.memset(at, 7, MIB)
        ref = allgather(comm, regions.ref(at, MIB), int)[0]
        if comm.rank == 1:
            assert ctypes.string_at(seen(regions, ref, 0), MIB) == b"\7" * MIB
        regions.deregister(comm, region, (at, at + MIB))
        if own:
            gpu.free(own)

    each(stubs, work)


@pytest.mark.parametrize("what", ["cuMemExportToShareableHandle", "cuMemRetainAllocationHandle", "cuMemMap"])
def test_what_one_rank_cannot_share_or_map_no_rank_registers(stubs: list[Stub], what: str) -> None:
    def work(comm: Any, gpu: StubGpu, wide: int, regions: Regions) -> str:
        comm.Barrier()
        with stubs[comm.rank].failing(what if comm.rank else ""), pytest.raises(BlinkError) as caught:
            regions.register(comm, lambda: (wide, WIDE))
        comm.Barrier()
        assert not regions.known
        assert isinstance(caught.value, DeviceError) == bool(comm.rank)
        region = regions.register(comm, lambda: (wide, WIDE))
        regions.deregister(comm, region, (wide, wide + WIDE))
        return str(caught.value)

    here, there = each(stubs, work)
    assert there in here
    wanted = {
        "cuMemExportToShareableHandle": r"was not made to be shared by file descriptors",
        "cuMemRetainAllocationHandle": "cudaIpcGetMemHandle",
        "cuMemMap": "cuMemMap on GPU 0: CUDA_ERROR_NOT_SUPPORTED",
    }
    assert wanted[what] in there


def test_ranks_exchange_descriptors(tmp_path: Path) -> None:
    ends = [listen() for _ in range(3)]

    def work(rank: int) -> list[list[str]]:
        own = []
        for i in range(rank):
            (tmp_path / f"{rank}-{i}").write_text(f"{rank}-{i}")
            own.append(os.open(tmp_path / f"{rank}-{i}", os.O_RDONLY))
        found = exchange(ends[rank][0], [address for _, address in ends], rank, own, 5)
        return [[os.pread(file, 9, 0).decode() for file in files] for files in found]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, range(3)))
    assert [[len(files) for files in got] for got in found] == [[0, 1, 2], [0, 0, 2], [0, 1, 0]]
    assert found[0] == [[], ["1-0"], ["2-0", "2-1"]]
    with pytest.raises(BlinkError, match="could not exchange"):
        exchange(listen()[0], [b"", b"\0nobody"], 0, [], 0.1)


def test_processes_of_other_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [listen() for _ in range(2)]
    monkeypatch.setattr(descriptors.os, "getuid", lambda: os.geteuid() + 1)
    with ThreadPoolExecutor(2) as threads:
        addresses = [address for _, address in ends]
        found = [threads.submit(exchange, ends[rank][0], addresses, rank, [], 5) for rank in range(2)]
        said = [str(one.exception()) for one in found]
    assert any("another user's process" in text for text in said)
    assert all("another user's" in text or "could not exchange" in text for text in said), "one may hear it first"


KNOCKS = """
import os, socket, sys, time
os.setuid(65534)
for address in sys.argv[1:]:
    knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    knocking.connect(bytes.fromhex(address))
    knocking.send(b"\\1\\0\\0\\0\\0\\0\\0\\0")
    print("knocked", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of other users")
def test_who_is_of_another_user_is_not_heard_and_stops_nobody() -> None:
    ends = [listen() for _ in range(2)]
    argv = [sys.executable, "-c", KNOCKS, ends[0][1].hex()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as other, ThreadPoolExecutor(2) as threads:
        assert other.stdout is not None
        assert other.stdout.readline() == b"knocked\n"
        addresses = [address for _, address in ends]
        found = [threads.submit(exchange, ends[rank][0], addresses, rank, [], 5) for rank in range(2)]
        assert [one.result() for one in found] == [[[], []], [[], []]]
        other.kill()
