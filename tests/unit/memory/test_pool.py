"""Pools of several ranks over a libcuda on host memory: what is mapped when, where arrays lie, growing and closing."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from blinkmpi.errors import ArgumentError, BlinkError, DeviceError, PoolExhausted, PoolInUse, RemoteError
from blinkmpi.runtime.cuda import memory
from blinkmpi.transport.cuda.memory.pool import MemoryPool
from blinkmpi.transport.cuda.regions import Regions
from blinkmpi.util.together import allgather
from tests.unit.memory.stub import MIB, Stub, StubGpu, library, make_stub
from tests.unit.memory.test_parts import seen
from tests.unit.topology.test_gather import on_ranks

ROOM = 16 * MIB


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> list[Stub]:
    return [Stub(make_stub(tmp_path_factory.mktemp(f"cuda{rank}"))) for rank in range(3)]


def each(stubs: list[Stub], work: Callable[[Any, MemoryPool, Regions], Any], room: int = ROOM) -> list[Any]:
    """What ``work(comm, pool, regions)`` gives on each rank, whose GPU is a stub of its own."""

    def one(comm: Any, _: Any) -> Any:
        stub, comm.size = stubs[comm.rank], len(stubs)
        gpu: Any = StubGpu(stub)
        before = stub.counts
        regions = Regions(gpu, comm.size, comm.rank, 0)
        pool = MemoryPool(comm, gpu, regions, library(), lambda what: comm.Barrier())
        pool.grow(room)
        try:
            return work(comm, pool, regions)
        finally:
            comm.Barrier()
            for region in list(regions.known.values()):
                regions.drop(region)
            comm.Barrier()
            pool.leave()
            if not pool.state.blocks:
                assert (stub.counts, gpu.opened) == (before, []), "all is given back"

    found = on_ranks([0] * len(stubs), one)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.mark.slow
def test_peers_reach_every_place_though_nobody_tells_them_of_it(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> None:
        opened = list(pool._gpu.opened)  # type: ignore[attr-defined]
        assert len(opened) == comm.size - 1
        for _ in range(comm.rank):  # the ranks' arrays lie at different places
            pool.malloc(MIB)
        at = pool.malloc(MIB + 1)
        ctypes.memset(at, 65 + comm.rank, MIB)
        refs = allgather(comm, regions.ref(at + 7, MIB - 7), int)
        assert all(refs)
        assert len(set(refs)) == comm.size
        for rank, ref in enumerate(refs):
            assert ctypes.string_at(seen(regions, ref, rank), MIB - 7) == bytes([65 + rank]) * (MIB - 7)
        assert pool._gpu.opened == opened, "malloc maps nothing"  # type: ignore[attr-defined]
        assert not regions.ref(at, ROOM + 1), "past its end"
        comm.Barrier()

    each(stubs, work)


@pytest.mark.slow
def test_one_rank_alone_may_allocate(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> None:
        at = pool.malloc(MIB) if comm.rank == 1 else 0
        ref = allgather(comm, regions.ref(at, MIB) if at else 0, int)[1]
        if at:
            ctypes.memset(at, 3, MIB)
        comm.Barrier()
        assert ctypes.string_at(seen(regions, ref, 1), MIB) == b"\3" * MIB
        comm.Barrier()

    each(stubs, work)


def test_what_is_added_is_mapped_by_all_before_anything_lies_in_it(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> None:
        full = pool.malloc(ROOM)
        with pytest.raises(PoolExhausted):
            pool.malloc(1)
        pool.grow((1 + comm.rank) * MIB)  # of another length on each rank, and whole granules
        assert pool.state.size == ROOM + (2 * MIB if comm.rank < 2 else 4 * MIB)
        at = pool.malloc(MIB)
        ctypes.memset(at, comm.rank, MIB)
        refs = allgather(comm, (regions.ref(at, MIB), regions.ref(full, ROOM)), tuple[int, int])
        for rank, (added, _) in enumerate(refs):
            assert ctypes.string_at(seen(regions, added, rank), MIB) == bytes([rank]) * MIB
        assert len({ref >> 48 for pair in refs for ref in pair}) == 2, "each chunk has one name on all ranks"
        comm.Barrier()

    each(stubs, work)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["room", "open", "synchronize", "argument"])
def test_where_one_rank_cannot_grow_no_rank_does(stubs: list[Stub], why: str) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> str:
        stub, gpu = stubs[comm.rank], pool._gpu
        counts, opened, known = stub.counts, list(gpu.opened), dict(regions.known)  # type: ignore[attr-defined]
        total = stub.total
        comm.Barrier()
        if comm.rank == 1:
            gpu.refuses = why  # type: ignore[attr-defined]
            stub.set("total", stub.allocated if why == "room" else total)
        with pytest.raises(BlinkError) as caught:
            pool.grow(-1 if comm.rank == 1 and why == "argument" else MIB)
        comm.Barrier()
        gpu.refuses = ""  # type: ignore[attr-defined]
        stub.set("total", total)
        assert (stub.counts, gpu.opened, regions.known) == (counts, opened, known)  # type: ignore[attr-defined]
        assert pool.state.size == ROOM
        pool.grow(MIB)
        assert pool.state.size == ROOM + 2 * MIB
        return f"{type(caught.value).__name__}: {caught.value}"

    found = each(stubs, work)
    wanted = {"room": "bytes on GPU 0", "open": "no open", "synchronize": "is captured", "argument": "-1 bytes"}
    own = "ArgumentError" if why == "argument" else "DeviceError"
    assert [text.split(":")[0] for text in found] == ["RemoteError", own, "RemoteError"]
    assert all(wanted[why] in text for text in found), found


@pytest.mark.slow
def test_memory_that_ends_says_what_helps(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> None:
        class OutOfMemoryError(RuntimeError):
            """As torch's and CuPy's are called."""

        at = pool.malloc(MIB)
        with pytest.raises(PoolExhausted) as full:
            pool.malloc(ROOM)
        text = (
            f"{ROOM} bytes were asked of the memory pool on GPU 0, which has {ROOM} bytes, of which {MIB} are in use "
            f"and at most {ROOM - MIB} are free in one place; drop arrays, or call comm.memory_pool().grow(bytes) on "
            "all ranks"
        )
        assert str(full.value) == text
        assert isinstance(full.value, MemoryError)

        def torch_empty() -> None:
            assert not pool.blocks.malloc(ROOM)
            raise OutOfMemoryError

        with pytest.raises(OutOfMemoryError) as caught, pool.explained():
            torch_empty()
        assert caught.value.__notes__ == [f"blinkmpi: {text}"]
        with pytest.raises(OutOfMemoryError) as other, pool.explained():
            raise OutOfMemoryError  # of other memory
        assert not hasattr(other.value, "__notes__")
        pool.free(at)

    each(stubs, work)


@pytest.mark.slow
def test_a_pool_is_closed_on_all_ranks_or_on_none(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> None:
        cached = [pool.malloc(MIB)]  # by a library, until it is told to give it back
        pool.releases.append(lambda: pool.free(cached.pop()) if cached else None)
        at = pool.malloc(MIB) if comm.rank == 2 else 0
        with pytest.raises(PoolInUse, match=r"rank 2 failed: PoolInUse: 1 blocks of 1048576 bytes .* are in use; drop"):
            pool.close()
        assert not cached
        again = pool.malloc(MIB)
        assert regions.ref(again, MIB), "the pool goes on"
        comm.Barrier()
        pool.free(again)
        if at:
            pool.free(at)
        pool.close()
        assert (pool.state.size, regions.known, pool._gpu.opened) == (0, {}, [])  # type: ignore[attr-defined]
        assert pool.closed
        for call in (pool.close, lambda: pool.malloc(1), lambda: pool.grow(MIB)):
            with pytest.raises(DeviceError, match="is closed; make another"):
                call()
        assert "is closed" in pool.why_full()

    each(stubs, work)


@pytest.mark.slow
def test_an_array_outlives_its_communicator(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> tuple[MemoryPool, int]:
        return pool, pool.malloc(MIB)

    allocated = [stub.allocated for stub in stubs]
    for rank, (pool, at) in enumerate(each(stubs, work)):
        ctypes.memset(at, 1, MIB)
        assert pool.state.size == ROOM
        pool.free(at)
        assert (pool.state.size, stubs[rank].allocated) == (0, allocated[rank])


@pytest.mark.slow
def test_what_peers_may_have_mapped_is_not_given_back(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> None:
        at = pool.malloc(MIB)
        pool.leave(mapped=True)
        pool.free(at)
        assert (pool.state.blocks, pool.state.size) == (0, ROOM)
        with pytest.raises(DeviceError, match="is closed"):
            pool.malloc(1)

    each(stubs, work)


@pytest.mark.slow
def test_parts_of_a_pool_can_be_registered_and_deregistered_too(stubs: list[Stub]) -> None:
    def work(comm: Any, pool: MemoryPool, regions: Regions) -> None:
        at, other = pool.malloc(MIB), pool._gpu.allocate(MIB)
        region = regions.register(comm, lambda: (at, 100))
        assert len(regions.known) == 1
        regions.deregister(comm, region, (at, at + 100))
        place = other if comm.rank == 1 else at
        region = regions.register(comm, lambda: (place, 100))  # outside of the pool on one rank
        ctypes.memset(place, 65 + comm.rank, 100)
        refs = allgather(comm, regions.ref(place, 100), int)
        for rank, ref in enumerate(refs):
            assert ctypes.string_at(seen(regions, ref, rank), 100) == bytes([65 + rank]) * 100
        comm.Barrier()
        regions.deregister(comm, region, (place, place + 100))
        assert regions.ref(at, MIB)
        pool._gpu.free(other)
        pool.free(at)

    each(stubs, work)


@pytest.mark.slow
def test_a_communicator_has_one_pool_which_is_made_before_it_is_used(
    stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(comm: Any, _: Any) -> list[str]:
        comm.size = 3
        gpu: Any = StubGpu(stubs[comm.rank])
        transport = SimpleNamespace(regions=Regions(gpu, 3, comm.rank, 0))
        gpus: Any = SimpleNamespace(comm=comm, gpu=gpu, transport=transport, pool=None)
        entered: list[str] = []

        def enter(what: str) -> None:
            entered.append(what)
            comm.Barrier()

        with pytest.raises(ArgumentError, match="has no memory pool; make one before"):
            memory.pool_of(gpus)
        pool = memory.make_pool(gpus, MIB, enter)
        assert memory.pool_of(gpus) is pool
        with pytest.raises(ArgumentError, match=r"there is a memory pool of 2097152 bytes.*grow"):
            memory.make_pool(gpus, MIB, enter)
        pool.close()
        with pytest.raises(ArgumentError, match="has no memory pool"):
            memory.pool_of(gpus)
        again = memory.make_pool(gpus, 3 * MIB, enter)
        assert again.state.size == 4 * MIB
        again.close()
        comm.Barrier()
        if comm.rank == 0:
            monkeypatch.setattr(memory, "built", lambda source, flags: (None, "no cc"))
        comm.Barrier()
        with pytest.raises((DeviceError, RemoteError), match="was not compiled: no cc; install a C compiler"):
            memory.make_pool(gpus, MIB, enter)
        assert gpus.pool is again
        return entered

    found = on_ranks([0] * 3, work)
    one = ["memory_pool()", "memory_pool().grow()"]
    closing = ["memory_pool().close()"]
    assert found == [[*one, "memory_pool()", *closing, *one, *closing, "memory_pool()"]] * 3, found
