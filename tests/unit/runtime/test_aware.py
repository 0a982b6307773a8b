"""Who says that MPI takes GPU memory, and what the ranks settle on."""

from types import SimpleNamespace

import pytest

from blinkmpi.errors import SettingsError
from blinkmpi.runtime.cuda_aware import agree, claimed, ladder, words
from blinkmpi.util.settings import read
from tests.unit.topology.test_gather import on_ranks


class Info(dict[str, str]):
    def Free(self) -> None:
        self.clear()


def test_the_ladder_asks_every_rung_and_believes_none_blindly() -> None:
    mpi = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(Get_info=lambda: Info(mpi_memory_alloc_kinds="system,cuda:device"))
    )
    env = {"MV2_USE_CUDA": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"}
    assert dict(ladder(mpi, "/nowhere/libmpi.so", env)) == {
        "MV2_USE_CUDA": "no", "mpi_memory_alloc_kinds": "yes", "MPIX_Query_cuda_support": "absent",
        "MPICH_GPU_SUPPORT_ENABLED": "yes",
    }  # fmt: skip
    silent = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=Info))
    assert dict(ladder(silent, "", {})) == {
        "mpi_memory_alloc_kinds": "absent",
        "MPIX_Query_cuda_support": "absent",
    }


def test_the_users_word_is_above_all_others() -> None:
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=lambda: Info(mpi_memory_alloc_kinds="system,cuda")))
    assert claimed(ladder(mpi, "", {}))
    denied = ladder(mpi, "", {"BLINKMPI_CUDA_AWARE": "0"})
    assert not claimed(denied)
    assert words(denied).startswith("BLINKMPI_CUDA_AWARE: no; mpi_memory_alloc_kinds: yes")
    assert claimed((("BLINKMPI_CUDA_AWARE", "yes"), ("MPIX_Query_cuda_support", "no")))


def test_the_setting_is_yes_no_or_nothing() -> None:
    assert [read({"BLINKMPI_CUDA_AWARE": text}).cuda_aware for text in ("1", "0", "")] == [True, False, None]
    assert read({}).cuda_aware is None
    with pytest.raises(SettingsError, match=r"BLINKMPI_CUDA_AWARE='yes': expected 0 or 1"):
        read({"BLINKMPI_CUDA_AWARE": "yes"})


def test_all_ranks_must_know_it() -> None:
    answers = ["yes", "no", "yes"]

    def climbed(comm: object, node: object) -> object:
        rank: int = comm.rank  # type: ignore[attr-defined]
        return agree(comm, None, lambda: (("MPIX_Query_cuda_support", answers[rank]),))  # type: ignore[arg-type]

    why = "rank 1 knows of no MPI that takes GPU memory: MPIX_Query_cuda_support: no"
    assert on_ranks([0, 0, 1], climbed) == [(False, f"staged in pinned host memory ({why})")] * 3
    answers[1] = "yes"
    assert on_ranks([0, 0, 1], climbed) == [(True, "sent by MPI from GPU memory (MPIX_Query_cuda_support: yes)")] * 3


@pytest.mark.parametrize("asserted", [True, False])
def test_what_the_job_says_is_not_asked_again(asserted: bool) -> None:
    def never() -> object:
        raise AssertionError("asked")

    found = on_ranks([0, 1], lambda comm, node: agree(comm, asserted, never))  # type: ignore[arg-type]
    assert [yes for yes, _ in found] == [asserted] * 2
    assert f"(BLINKMPI_CUDA_AWARE: {'yes' if asserted else 'no'})" in found[0][1]
