"""What explain says of calls that were slower than plain mpi4py's."""

from typing import Any

import pytest

from blinkmpi.planning import beside_mpi
from blinkmpi.planning.beside_mpi import slower
from blinkmpi.program.call import Call
from tests.unit.trees.packings import even_call

TABLE = {
    "machines": {"4x1": "a processor, 2 cores"},
    "goal": 0.97,
    "rows": {"4x1": {"broadcast": [[64, 0.5], [4096, 1.4], [65536, 0.9]], "barrier": [[0, 0.8]]}},
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_mpi, "measured", lambda: TABLE)


@pytest.mark.parametrize(("elements", "said"), [
    (16, "64 bytes"), (32, "64 bytes"), (64, ""), (1024, ""), (16384, "64 KiB"), (8192, "64 KiB"), (8191, ""),
    (1 << 20, ""),
])  # fmt: skip
def test_the_nearest_measured_size_is_named_where_it_was_slower(elements: int, said: str) -> None:
    text = slower(even_call("broadcast", 4, elements, root=0), 1)
    assert (f"a broadcast of {said} of 4 ranks on 1 host ran at 0." in text) == bool(said)
    assert bool(text) == bool(said)


def test_a_barrier_has_no_size_and_what_was_not_measured_is_not_judged() -> None:
    assert "a barrier of 4 ranks on 1 host ran at 0.80 of its speed" in slower(Call("barrier", 4, (0,), ""), 1)
    call = even_call("broadcast", 4, 16, root=0)
    assert "a processor, 2 cores" in slower(call, 1)
    assert not slower(call, 2)
    assert not slower(even_call("broadcast", 3, 16, root=0), 1)
    assert not slower(even_call("allreduce", 4, 16), 1)


def test_the_kept_table_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found: Any = beside_mpi.measured()
    assert found["goal"] < 1
    assert set(found["machines"]) == set(found["rows"])
    for rows in found["rows"].values():
        for sizes in rows.values():
            assert sizes == sorted(sizes)
            assert all(size >= 0 and ratio > 0 for size, ratio in sizes)
