"""What planners remember about the links of a machine: each for itself, and for each machine apart."""

from blinkmpi.topology.machines import machine
from blinkmpi.trees.graph.fabric import Kept, fabric


def test_a_table_is_of_one_owner_and_of_one_fabric() -> None:
    one, other = (fabric(machine(name), ("nvlink",)) for name in ("dgx-1v", "dgx-1p"))
    mine: Kept[str, int] = Kept()
    theirs: Kept[str, int] = Kept()
    mine.of(one)["a"] = 1
    assert mine.of(one) == {"a": 1}
    assert theirs.of(one) == mine.of(other) == {}


def test_what_is_kept_is_made_once_also_if_it_is_nothing() -> None:
    f = fabric(machine("dgx-1v"), ("nvlink",))
    calls: list[int] = []
    kept: Kept[None, int | None] = Kept()
    for _ in range(3):
        assert kept.once(f, None, lambda: calls.append(1)) is None
    assert len(calls) == 1
