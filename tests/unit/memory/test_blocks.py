"""blocks.c over a libcuda on host memory: cutting, joining, reuse, exhaustion, the end, threads, torch's functions."""

import ctypes
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import DeviceError
from blinkmpi.transport.cuda.memory import blocks
from blinkmpi.transport.cuda.memory.blocks import PoolBlocks
from tests.unit.memory.stub import MIB, Stub, StubGpu, library, make_stub

CHUNK = 8 * MIB


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(make_stub(tmp_path_factory.mktemp("cuda")))


def make(stub: Stub, *chunks: int, device: int = 0) -> PoolBlocks:
    gpu: Any = StubGpu(stub, device)
    made = PoolBlocks(library(), gpu)
    for nbytes in chunks:
        made.add(gpu.allocate(nbytes), nbytes)
    return made


@pytest.fixture
def pool(stub: Stub) -> Iterator[PoolBlocks]:
    """Two chunks; at the end no block may be in use."""
    before = stub.allocated
    made = make(stub, CHUNK, CHUNK)
    yield made
    stub.set("capturing", 0)
    assert (made.state.used, made.state.blocks) == (0, 0)
    made.leave()
    assert (made.state.size, stub.allocated) == (0, before), "all is given back"


def test_blocks_are_memory_of_their_own(pool: PoolBlocks) -> None:
    sizes = [1, 511, 513, MIB, 3 * MIB, 7 * MIB, 7]
    found = [pool.malloc(size) for size in sizes]
    assert all(at and at % 512 == 0 for at in found)
    for at, size in zip(found, sizes, strict=True):
        ctypes.memset(at, size % 251, size)
    for at, size in zip(found, sizes, strict=True):
        assert set(ctypes.string_at(at, size)) == {size % 251}
    assert pool.state.used == sum(-(-size // 512) * 512 for size in sizes)
    assert pool.state.blocks == len(sizes)
    for at in found:
        pool.free(at)
    assert pool.state.longest == CHUNK


def test_what_was_freed_is_used_again_after_a_wait(pool: PoolBlocks, stub: Stub) -> None:
    first, other = pool.malloc(CHUNK), pool.malloc(CHUNK)
    waits = stub.waits
    pool.free(first)
    assert stub.waits == waits, "free does not wait"
    assert pool.malloc(CHUNK) == first
    assert stub.waits == waits + 1
    for at in (first, other):
        pool.free(at)
    assert pool.malloc(CHUNK + 512) == 0, "no block lies over two chunks, wherever they are"


def test_while_its_stream_is_captured_nothing_is_waited_for(pool: PoolBlocks, stub: Stub) -> None:
    first = pool.malloc(CHUNK)
    pool.free(first)
    stub.set("capturing", 1)
    waits, other = stub.waits, pool.malloc(CHUNK)
    assert other not in (0, first)
    assert pool.malloc(CHUNK) == 0
    assert stub.waits == waits
    pool.free(other)


def test_a_gpu_that_cannot_be_waited_for_keeps_freed_blocks(pool: PoolBlocks, stub: Stub) -> None:
    both = [pool.malloc(CHUNK) for _ in range(2)]
    for at in both:
        pool.free(at)
    with stub.failing("cuCtxSynchronize"):
        assert pool.malloc(MIB) == 0
    at = pool.malloc(MIB)
    assert at in both
    pool.free(at)


def test_a_full_pool_counts_failures_and_knows_the_longest_stretch(pool: PoolBlocks) -> None:
    a, b, c = (pool.malloc(size) for size in (2 * MIB, MIB, CHUNK))
    assert pool.malloc(6 * MIB) == 0
    assert (pool.state.failures, pool.state.asked, pool.state.longest) == (1, 6 * MIB, 5 * MIB)
    pool.free(b)
    assert pool.state.longest == 6 * MIB, "freed and free neighbours count as one"
    b = pool.malloc(6 * MIB)
    assert b == a + 2 * MIB
    assert (pool.state.failures, pool.state.longest) == (1, 0)
    for at in (a, b, c):
        pool.free(at)


def test_what_was_never_given_cannot_be_freed(pool: PoolBlocks) -> None:
    at = pool.malloc(MIB)
    for wrong in (at + 512, 0, at - 512):
        pool.free(wrong)
    assert pool.state.used == MIB
    pool.free(at)
    pool.free(at)
    assert pool.state.used == 0


def test_the_best_fit_is_taken(pool: PoolBlocks) -> None:
    found = [pool.malloc(size) for size in (MIB, 3 * MIB, MIB, 2 * MIB, MIB)]
    rest = pool.malloc(CHUNK)
    for at in (found[1], found[3]):
        pool.free(at)
    last = pool.malloc(CHUNK)  # nothing so long; it waits for the freed ones
    assert last == 0
    fits = pool.malloc(2 * MIB)
    assert fits == found[3]
    for at in (found[0], found[2], found[4], rest, fits):
        pool.free(at)


def test_a_pool_that_is_left_lives_until_its_last_block_is_freed(stub: Stub) -> None:
    before = stub.allocated
    pool = make(stub, CHUNK, CHUNK)
    found = [pool.malloc(MIB) for _ in range(2)]
    pool.leave()
    assert pool.malloc(MIB) == 0
    ctypes.memset(found[0], 1, MIB)
    pool.free(found[0])
    assert (pool.state.size, stub.allocated) == (2 * CHUNK, before + 2 * CHUNK)
    pool.free(found[1])
    assert (pool.state.size, stub.allocated) == (0, before)
    pool.leave()


def test_at_the_end_of_a_process_the_gpu_is_gone_and_nothing_is_waited_for(stub: Stub) -> None:
    before = stub.allocated
    pool = make(stub, CHUNK)
    pool.free(pool.malloc(MIB))
    with stub.failing("cuCtxSynchronize"):
        pool.leave()
    assert stub.allocated == before


def test_a_sealed_pool_gives_nothing(pool: PoolBlocks) -> None:
    at = pool.malloc(MIB)
    assert not pool.seal()
    pool.free(at)
    assert pool.seal()
    assert pool.malloc(MIB) == 0
    pool.unseal()
    at = pool.malloc(MIB)
    assert at
    pool.free(at)


def test_torch_finds_the_functions_of_each_pool_by_name(stub: Stub) -> None:
    one, other = make(stub, CHUNK), make(stub, CHUNK, device=3)
    assert one.functions != other.functions
    loaded = ctypes.CDLL(str(one.path))
    for pool, device in ((one, 0), (other, 3)):
        malloc, free = (getattr(loaded, name) for name in pool.functions)
        malloc.restype = ctypes.c_void_p
        malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        at = malloc(2 * MIB, device, None)
        assert at
        assert pool.state.used == 2 * MIB
        assert malloc(2 * MIB, device + 1, None) is None, "memory of another GPU"
        free(at, 2 * MIB, device, None)
        assert (pool.state.blocks, pool.state.used) == (0, 0)
        pool.leave()


def test_threads_get_blocks_of_their_own(pool: PoolBlocks) -> None:
    wrong = []

    def work(number: int) -> None:
        chosen, held = random.Random(number), {}
        for turn in range(400):
            if held and chosen.random() < 0.5:
                at, size = held.popitem()
                if ctypes.string_at(at, size) != bytes([number]) * size:
                    wrong.append((number, turn))
                pool.free(at)
            else:
                size = chosen.randrange(1, 40000)
                at = pool.malloc(size)
                ctypes.memset(at, number, size)
                held[at] = size
        for at in held:
            pool.free(at)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 24), st.integers(1, 6)), min_size=1, max_size=25))
def test_blocks_never_overlap_and_free_memory_is_found(calls: list[tuple[bool, int, int]]) -> None:
    """Any order of calls: a malloc fails only if no stretch between the blocks of a chunk is long enough.

    A call frees one of the blocks, or takes one. All are drawn before: which of two free blocks of one length is taken
    depends on the examples before.
    """
    pool, begins = MODEL
    held: dict[int, int] = {}
    try:
        for frees, which, lines in calls:
            if held and frees:
                at = sorted(held)[which % len(held)]
                pool.free(at)
                del held[at]
            else:
                size = lines * 512
                at, room = pool.malloc(size), longest(begins, held)
                if at:
                    assert any(begin <= at and at + size <= begin + 16 * 512 for begin in begins)
                    assert all(at + size <= other or other + length <= at for other, length in held.items())
                    held[at] = size
                assert (at != 0) == (size <= room), (size, room, held)
            assert pool.state.longest == longest(begins, held)
            assert (pool.state.used, pool.state.blocks) == (sum(held.values()), len(held))
    finally:
        for at in held:
            pool.free(at)


def longest(begins: list[int], held: dict[int, int]) -> int:
    """The longest stretch of two chunks of 16 lines in which nothing lies."""
    found = 0
    for begin in begins:
        place = begin
        for at, length in sorted((at, n) for at, n in held.items() if begin <= at < begin + 16 * 512):
            found, place = max(found, at - place), at + length
        found = max(found, begin + 16 * 512 - place)
    return found


MODEL: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def model(stub: Stub) -> Iterator[None]:
    """A small pool that all examples use one after another, and where its chunks begin."""
    pool = make(stub, 16 * 512, 16 * 512)
    begins = [pool.malloc(16 * 512) for _ in range(2)]
    for at in begins:
        pool.free(at)
    MODEL[:] = [pool, begins]
    yield
    pool.leave()


def test_more_pools_than_there_is_room_for_are_an_error(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    class Full:
        def blink_memory_open(self, *_: Any) -> int:
            return -1

    monkeypatch.setattr(blocks, "_loaded", lambda path: ("any", Full()))
    gpu: Any = StubGpu(stub)
    with pytest.raises(DeviceError, match="64 memory pools"):
        PoolBlocks(Path("any"), gpu)
