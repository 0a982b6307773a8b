"""torch's tensors, and calls of buffers at other addresses: made of earlier ones, just as binding them anew would."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError
from blinkmpi.runtime import arguments, call_keys
from blinkmpi.runtime.buffers import parse
from blinkmpi.runtime.call_keys import Signature, signature_of
from blinkmpi.runtime.cuda.call import CudaCall
from blinkmpi.runtime.cuda.calls import CudaCalls
from blinkmpi.runtime.cuda.context import CudaContext
from tests.unit.runtime.test_cuda_calls import device
from tests.unit.runtime.test_cuda_new_counts import CountingGpu, _launches, with_calls  # noqa: F401

N, COUNT = 4, 1 << 19
ALGOS = ["onehop/ll16_one_shot", "onehop/ll128_two_shot", "onehop/direct", "trees", "chain/rs_ag"]
A, B, C, D = (i << 32 for i in range(1, 5))


class Tensor:
    """What is asked of torch's tensors."""

    is_cuda, layout, dtype = True, "strided", "torch.float32"
    contiguous, negative, conjugate = True, False, False

    def __init__(self, at: int = 256, count: int = COUNT, **facts: Any) -> None:
        self.at, self.count = at, count
        self.__dict__ |= facts

    @property
    def nbytes(self) -> int:
        return 4 * self.count

    @property
    def shape(self) -> tuple[int]:
        return (self.count,)

    def is_contiguous(self) -> bool:
        return self.contiguous

    def is_neg(self) -> bool:
        return self.negative

    def is_conj(self) -> bool:
        return self.conjugate

    def data_ptr(self) -> int:
        return self.at

    def numel(self) -> int:
        return self.count

    def get_device(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is asked of torch; ``streams`` has the current one of each device."""
    fake = SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(Parameter=Tensor), strided="strided", streams=[5])
    fake._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: fake.streams[device])
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    return fake


Args = tuple[Any, ...]


def own_block(at: int, rank: int = 1) -> Tensor:
    """A rank's block of the tensor at an address."""
    return Tensor(at + rank * 4 * COUNT // N, COUNT // N)


def signature(prepare: Any, args: Args) -> Signature:
    key = call_keys.key_of(prepare, args, None, 0b11)
    assert key is not None
    found = signature_of(key, args)
    assert found is not None
    return found


def bound(calls: CudaCalls, prepare: Any, args: Args) -> CudaCall:
    """A call of rank 1 that others may be made of."""
    ready = prepare(1, N, *args)
    made = calls.bind(ready, None, 60.0, signature(prepare, args))
    assert isinstance(made, CudaCall)
    return made


def launched(call: CudaCall) -> list[Any]:
    """All that differs between launches."""
    parts = [call.kernel, call.kernel.then] if call.kernel.then else [call.kernel]
    return [(p.kernel.handle, p.grid, p.block, list(p.args), p.text) for p in parts] + [call.stream, call.nbytes]


CALLS = {
    "out of place": (arguments.allreduce, lambda x, y: (Tensor(x), Tensor(y), MPI.SUM)),
    "in place": (arguments.allreduce, lambda x, y: (MPI.IN_PLACE, Tensor(y), MPI.SUM)),
    "the same twice": (arguments.allreduce, lambda x, y: (t := Tensor(x), t, "sum")),
    "to its root": (arguments.reduce, lambda x, y: (Tensor(x), Tensor(y), MPI.SUM, 1)),
    "to another root": (arguments.reduce, lambda x, y: (Tensor(x), None, MPI.SUM, 0)),
    "from its root": (arguments.broadcast, lambda x, y: (Tensor(x), 1)),
    "from another root": (arguments.broadcast, lambda x, y: (Tensor(x), 2)),
    "blocks": (arguments.allgather, lambda x, y: (Tensor(x, COUNT // N), Tensor(y))),
    "into the own block": (arguments.reduce_scatter_block, lambda x, y: (Tensor(x), own_block(x), "sum")),
    "from the own block": (arguments.allgather, lambda x, y: (own_block(x), Tensor(x))),
    "all blocks in place": (arguments.allgather, lambda x, y: (MPI.IN_PLACE, Tensor(x))),
    "from its root in place": (arguments.gather, lambda x, y: (MPI.IN_PLACE, Tensor(x), 1)),
    "blocks of its root in place": (arguments.scatter, lambda x, y: (Tensor(x), MPI.IN_PLACE, 1)),
}


@pytest.mark.parametrize(("name", "algo"), [
    (name, algo) for name, (prepare, _) in CALLS.items()
    for algo in (ALGOS if prepare is arguments.allreduce else [""])
])  # fmt: skip
def test_what_is_launched_is_what_binding_it_anew_would_give(name: str, algo: str) -> None:
    prepare, args = CALLS[name]

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        bound(calls, prepare, args(A, B)).start(7)  # whose number must not be in what is made of it
        made = gpu.made
        moved = calls.rebound(signature(prepare, args(C, D)))
        assert moved is not None
        assert gpu.made == made, "nothing is made anew"
        calls.by_signature.clear()
        assert launched(moved) == launched(bound(calls, prepare, args(C, D)))
        again = calls.rebound(signature(prepare, args(A, B)))
        assert again is not None
        assert launched(again)[0] != launched(moved)[0], "each has arguments of its own"

    with_calls(work, N, algo=f"allreduce:{algo}" if algo else "")


def test_what_is_not_alike_is_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    allreduce, args = CALLS["out of place"]

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        bound(calls, allreduce, args(A, B))
        other = Tensor(C), Tensor(D, COUNT), MPI.MAX
        assert calls.rebound(signature(allreduce, other)) is None, "another operation"
        assert calls.rebound(signature(allreduce, (Tensor(C, 9), Tensor(D, 9), MPI.SUM))) is None, "another count"
        integers = Tensor(C, dtype="torch.int32"), Tensor(D, dtype="torch.int32"), MPI.SUM
        assert calls.rebound(signature(allreduce, integers)) is None, "another type of as many bytes"
        assert calls.rebound(signature(allreduce, CALLS["in place"][1](C, D))) is None
        assert calls.rebound(signature(allreduce, (same := Tensor(C), same, MPI.SUM))) is None
        assert calls.rebound(signature(allreduce, args(C, C + 4))) is None, "they overlap, which is an error"
        assert calls.rebound(signature(allreduce, args(C, C + 4 * COUNT))) is not None, "side by side"
        scatter, within = CALLS["into the own block"]
        bound(calls, scatter, within(A, B))
        for at in (own_block(C, 0), own_block(C + 4)):
            assert calls.rebound(signature(scatter, (Tensor(C), at, "sum"))) is None, "another overlap"
        assert calls.rebound(signature(scatter, (Tensor(C), own_block(D), "sum"))) is not None, "apart"
        context.transport.regions.ref = lambda at, nbytes: 1 << 48 if at >= D else 0  # type: ignore[method-assign]
        assert calls.rebound(signature(allreduce, args(C, D))) is None, "one of them is registered, the first one's not"
        assert calls.rebound(signature(allreduce, args(B, C))) is not None
        monkeypatch.setattr(gpu, "why_not_here", lambda at: "it lies on GPU 7" if at == C else "")
        assert calls.rebound(signature(allreduce, args(B, C))) is None, "on another GPU, which is an error"

    with_calls(work, N)


def test_a_tensor_is_found_again_by_what_it_shows(torch: SimpleNamespace) -> None:
    """A tensor is found again by its address, which a view of its negative or conjugate has, too."""
    call = arguments.allreduce, (MPI.IN_PLACE, Tensor(), MPI.SUM)
    key = call_keys.key_of(*call, None, 0b11)
    assert key is not None
    assert key == call_keys.key_of(arguments.allreduce, (MPI.IN_PLACE, Tensor(), MPI.SUM), None, 0b11)
    for other in (Tensor(512), Tensor(dtype="torch.bfloat16")):
        assert key != call_keys.key_of(arguments.allreduce, (MPI.IN_PLACE, other, MPI.SUM), None, 0b11)
    assert key != call_keys.key_of(*call, 5, 0b11), "told to enqueue it there is another call"
    torch.streams[0] = 0
    assert key != call_keys.key_of(*call, None, 0b11), "another current stream is another call"
    found = device(Tensor())
    assert (found.ptr, found.size, found.itemsize, found.stream) == (256, COUNT, 4, 0)
    for facts, remedy in (
        ({"contiguous": False}, r"pass buf\.contiguous"), ({"layout": "sparse"}, "not contiguous"),
        ({"negative": True}, r"resolve_neg\(\)"), ({"conjugate": True}, r"resolve_conj\(\)"),
    ):  # fmt: skip
        odd = Tensor(**facts)
        assert call_keys.key_of(arguments.allreduce, (MPI.IN_PLACE, odd, MPI.SUM), None, 0b11) is None
        with pytest.raises(ArgumentError, match=remedy):
            device(odd)
    assert call_keys.key_of(arguments.allreduce, (MPI.IN_PLACE, Tensor(is_cuda=False), MPI.SUM), None, 0b11) is None
    del torch._C._cuda_getCurrentRawStream
    torch.cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=77))
    assert device(Tensor()).stream == 77


@pytest.mark.parametrize("facts", [{"negative": True}, {"conjugate": True}])
@pytest.mark.usefixtures("torch")
def test_a_view_in_host_memory_that_shows_other_values_is_refused(facts: dict[str, bool]) -> None:
    with pytest.raises(ArgumentError, match=r"buf is a conjugate or negative view; pass buf\.resolve_conj"):
        parse(Tensor(is_cuda=False, **facts), name="buf", writable=False)
