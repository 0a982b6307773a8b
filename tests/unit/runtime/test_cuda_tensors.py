"""torch's tensors, as arguments are read in Python."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError
from blinkmpi.runtime import arguments, call_keys
from blinkmpi.runtime.buffers import parse
from tests.unit.runtime.test_cuda_calls import device

COUNT = 1 << 19


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
