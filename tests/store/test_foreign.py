"""A store that others may write: what they put there is data, is refused by a typed error, and never runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, FormatError, PeerLost
from blinkmpi.util.together import MOST_GATHERED
from tests.store.folder_store import FolderStore
from tests.store.processes import sharing_a_store

TURNS = (1, 2)
KINDS = ("pickle", "huge", "deep", "garbage", "longer than it is", "empty")


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def foreign(kind: str, folder: Path) -> bytes:
    """Give what somebody else writes."""
    return {
        "pickle": pickle.dumps(Runs(folder)),
        "huge": bytes(MOST_GATHERED + 1),
        "deep": b"\x91" * 200_000,
        "garbage": b"\xc1garbage",
        "longer than it is": b"\xdd\xff\xff\xff\xff",
        "empty": b"",
    }[kind]


class Overwritten(FolderStore):
    """Somebody else overwrites a key as soon as it is there."""

    def __init__(self, store: FolderStore, key: str, body: bytes) -> None:
        super().__init__(store.folder)
        self.key, self.body = key, body

    def set(self, key: str, value: bytes) -> None:
        super().set(key, self.body if key == self.key else value)


@pytest.mark.parametrize(
    ("kind", "turn"),
    [pytest.param(k, t, marks=[pytest.mark.long] if t == 2 and k != "pickle" else []) for t in TURNS for k in KINDS],
)
@sharing_a_store((2,))
def test_what_a_rank_seems_to_tell_is_not_run(
    store: Any, rank: int, size: int, kind: str, turn: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    written = Overwritten(store, f"blinkmpi/2/1/{turn}/1", foreign(kind, folder))
    with pytest.raises(FormatError, match=r"rank 1 .*let nobody else write into the store"):
        blinkmpi.StoreCommunicator(written, rank, size, timeout=20)
    assert not folder.exists()


@pytest.mark.parametrize("kind", KINDS)
@sharing_a_store((2,))
def test_what_rank_0_seems_to_pass_on_is_not_run(store: Any, rank: int, size: int, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    written = Overwritten(store, "blinkmpi/2/1/2/all", foreign(kind, folder))
    with pytest.raises(FormatError, match="let nobody else write into the store"):
        blinkmpi.StoreCommunicator(written, rank, size, timeout=20)
    assert not folder.exists()


@pytest.mark.parametrize("kind", KINDS)
@sharing_a_store((2,))
def test_what_a_rank_that_gave_up_seems_to_say_is_not_run(
    store: Any, rank: int, size: int, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for number in (1, 2):
        store.set(f"blinkmpi/2/{number}/given-up", foreign(kind, folder))
    with pytest.raises((FormatError, PeerLost)):
        blinkmpi.StoreCommunicator(store, rank, size, timeout=20)
    assert not folder.exists()


@sharing_a_store((2,))
def test_a_number_that_is_none_is_a_typed_error(store: Any, rank: int, size: int) -> None:
    store.set(f"blinkmpi/2/made/{rank}", b"no number")
    with pytest.raises(BlinkError):
        blinkmpi.StoreCommunicator(store, rank, size, timeout=5)


@sharing_a_store((2,))
def test_nothing_is_pickled(store: Any, rank: int, size: int) -> None:
    """Not even by mpi4py, whose pickle is taken away."""

    def refused(*_: object) -> bytes:
        raise AssertionError("something is pickled")

    MPI.pickle.__init__(refused, refused)  # type: ignore[misc]
    with blinkmpi.StoreCommunicator(store, rank, size, timeout=20) as comm:
        x = np.ones(5)
        comm.Allreduce(MPI.IN_PLACE, x)
        assert (x == size).all()
        assert len(comm.gather_stats()) == size
