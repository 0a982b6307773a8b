"""Waiting for a call on GPU memory, with everything around it made up: what ends a wait, and how."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from blinkmpi.errors import BlinkError, CollectiveTimeout, MismatchError, PeerLost
from blinkmpi.program.call import Call
from blinkmpi.runtime import cuda_calls
from blinkmpi.runtime.arguments import Prepared
from blinkmpi.runtime.cuda_calls import CudaCall, CudaCalls
from blinkmpi.transport.announcement import Called


class Stage:
    """A stream that is through after some polls, and peers that are told what to be."""

    def __init__(self, busy: int) -> None:
        self.busy, self.gave_up, self.aborted = busy, False, False
        self.mismatch: BlinkError | None = None
        self.gone: list[int] = []
        peers = SimpleNamespace(
            mismatch_so_far=lambda seq, text: self.mismatch,
            ended=lambda: self.gone,
            states=lambda ranks, seq: f"ranks {ranks}",
        )
        context: Any = SimpleNamespace(gpu=self, transport=self, here=())
        host: Any = SimpleNamespace(peers=peers, raise_abort=lambda seq: None)
        calls = CudaCalls(context, host, SimpleNamespace())  # type: ignore[arg-type]
        ready = Prepared(Call("broadcast", 2, (1,), "int8", "", 0), None, None)
        self.call = CudaCall(calls, SimpleNamespace(), Called("a call"), ready, 0, None, None, 9.0)  # type: ignore[arg-type]

    def starter(self, *_: object) -> Callable[[], None]:
        return lambda: None

    def error(self, text: str) -> BlinkError:
        """What the kernel has left."""
        return CollectiveTimeout(text)

    def idle(self, on: object) -> bool:
        """Whether the kernel is through; one that is told to give up is so soon."""
        self.busy -= 1
        if self.aborted:
            self.gave_up, self.busy = True, 0
        return self.busy <= 0

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_calls, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(cuda_calls, "GRACE_S", 0.0)
    return iter([None])


def times(n: int) -> Callable[[], bool]:
    """Says n times that there is more."""
    left = iter(range(n))
    return lambda: next(left, None) is not None


def test_a_kernel_that_ends_ends_the_wait() -> None:
    stage = Stage(200)
    stage.call.wait()
    assert stage.busy == 0


def test_a_wait_goes_on_until_all_is_carried() -> None:
    stage, carry = Stage(3), times(500)
    stage.call.wait(carry)
    assert not carry()
    assert stage.busy < -400


def test_a_kernel_that_gave_up_is_told_of() -> None:
    stage = Stage(3)
    stage.gave_up = True
    with pytest.raises(CollectiveTimeout, match="a call"):
        stage.call.wait()


@pytest.mark.parametrize("busy", [10_000_000, 3])
def test_a_rank_that_makes_another_call_ends_the_kernel_and_the_wait(busy: int) -> None:
    """Also where the kernel is through and only messages to that rank's node are left."""
    stage = Stage(busy)
    stage.mismatch = MismatchError("rank 1 does something else")
    with pytest.raises(MismatchError, match="something else") as caught:
        stage.call.wait(lambda: True)
    assert stage.aborted
    assert caught.value is stage.mismatch


def test_a_process_that_is_gone_is_named() -> None:
    stage = Stage(10_000_000)
    stage.gone = [2]
    with pytest.raises(PeerLost, match=r"ranks \[2\]"):
        stage.call.wait()


def test_an_error_in_carrying_is_raised() -> None:
    def carry() -> bool:
        raise CollectiveTimeout("nothing went between the nodes")

    with pytest.raises(CollectiveTimeout, match="between the nodes"):
        Stage(10_000_000).call.wait(carry)
