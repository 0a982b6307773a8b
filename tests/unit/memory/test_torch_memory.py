"""What torch is given of a pool, with torch's functions on GPUs replaced; and who may ask for memory."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from blinkmpi.errors import ArgumentError, DeviceError

torch = pytest.importorskip("torch")


class FakePool:
    """A MemoryPool, as the front sees it."""

    device, library, functions = 3, "/a/library.so", ("blink_malloc_05", "blink_free_05")

    def __init__(self) -> None:
        self.fronts: dict[str, Any] = {}
        self.releases: list[Any] = []

    def explained(self) -> Any:
        return contextlib.nullcontext()


class FakeComm:
    """A communicator with a GPU that has a pool, or none."""

    def __init__(self, rank: int = 0, why_not: str = "") -> None:
        self.rank, self.pool, self.why_not = rank, FakePool(), why_not

    def memory_pool(self, nbytes: int | None = None) -> Any:
        if nbytes is not None:
            return f"a pool of {nbytes}"
        if self.why_not:
            raise ArgumentError(self.why_not)
        return self.pool


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch is asked for, in order."""
    seen: list[Any] = []

    class Pluggable:
        def __init__(self, *args: Any) -> None:
            seen.append(args)

        def allocator(self) -> str:
            return "the allocator"

    @contextlib.contextmanager
    def use(pool: Any, device: Any = None) -> Iterator[None]:
        seen.append(("in", pool, device))
        yield
        seen.append("out")

    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: ("pool of", allocator))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use, raising=False)
    return seen


def test_torch_has_one_pool_over_the_functions_of_the_communicators(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import blinkmpi.torch

    comm = FakeComm()
    for _ in range(2):
        with blinkmpi.torch.memory(comm):
            pass
    front = ("pool of", "the allocator")
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(comm.pool.fronts)))
    for release in list(comm.pool.releases):
        release()
    assert (emptied, comm.pool.releases) == ([0], []), "when the MemPool is gone"
    assert blinkmpi.torch.memory_pool(5, comm) == "a pool of 5"  # type: ignore[comparison-overlap]
    assert made == [("/a/library.so", "blink_malloc_05", "blink_free_05"), *[("in", front, 3), "out"] * 2]


def test_buffers_of_fsdp_come_from_the_pool_or_rank_0_says_once_why_not(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import blinkmpi.torch

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))
    for operation in (blinkmpi.torch.AllGather, blinkmpi.torch.ReduceScatter):
        made.clear()
        tensor = operation(FakeComm()).allocate((5,), dtype=torch.bfloat16, device="cuda")
        assert (tensor.shape, tensor.dtype) == ((5,), torch.bfloat16)
        assert made[-1] == "out"
        made.clear()
        for rank in range(2):
            lacking = operation(FakeComm(rank, "no pool; make one"))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                tensors = [lacking.allocate((5,), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            assert all(tensor.shape == (5,) for tensor in tensors)
            assert [str(one.message) for one in said] == ["FSDP's buffers are not registered: no pool; make one"][rank:]
        assert made == []
        assert lacking.allocate((5,), dtype=torch.int32, device="cpu").dtype == torch.int32


def test_who_has_no_pool_is_told_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    import blinkmpi.torch

    for wrong, text in ((None, "there is no process group"), (5, "memory of 5: expected a blinkmpi.Communicator")):
        with pytest.raises(ArgumentError, match=text), blinkmpi.torch.memory(wrong):
            pass
    monkeypatch.delattr(torch.cuda, "use_mem_pool", raising=False)
    with pytest.raises(DeviceError, match=r"take torch 2\.5 or newer"), blinkmpi.torch.memory(FakeComm()):
        pass
