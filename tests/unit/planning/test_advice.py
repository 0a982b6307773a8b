"""Advice lists every set of GPUs once, with the rates that planning for that set gives."""

from collections import Counter
from itertools import combinations
from math import comb
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError, TopologyError
from blinkmpi.planning.advice import _counts, advise, like, ways
from blinkmpi.planning.subsets import survey
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack
from tests.unit.trees.packings import machine_of


def one_by_one(t: Topology, take: int) -> Counter[Any]:
    """The rates of every set, planned for alone, and how often they occur."""
    found: Counter[Any] = Counter()
    for ranks in combinations(range(t.n), take):
        part = t.subset(ranks)
        try:
            rates = tuple(pack(part, c).rate for c in ("allreduce", "broadcast"))
        except TopologyError:
            found[None] += 1
            continue
        found[rates] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "take"), [("dgx-1v", 3), ("dgx-1p", 4), ("pcie-8", 3), ("mi250", 2)])
def test_every_set_counts_once_at_its_own_rates(name: str, take: int) -> None:
    t = machine(name)
    found = advise(t, take)
    told: Counter[Any] = Counter({None: found.apart} if found.apart else {})
    for choice in found.choices:
        assert len(choice.gpus) == take
        told[choice.rates] += choice.alike
    assert told == one_by_one(t, take)
    assert sum(told.values()) == comb(t.n, take)
    order = [choice.rates for choice in found.choices]
    assert order == sorted(order, reverse=True)


def test_sets_on_nvlink_are_the_unique_subsets() -> None:
    t = machine("dgx-1v")
    known = {s.gpus: s for s in survey(t.subset([0, 1, 2, 3, 4, 5])) if len(s.gpus) == 4}
    found = {c.gpus: c for c in advise(t, 4, range(6)).choices if c.links == "nvlink"}
    assert set(found) == set(known)
    for gpus, choice in found.items():
        assert (choice.alike, choice.rates) == (known[gpus].allocations, known[gpus].rates[1::-1])
        if known[gpus].rings:
            assert choice.rings == known[gpus].baseline[1::-1]
        else:
            assert choice.ring_links == "host+pcie"


def test_gpus_on_one_switch_are_all_alike_and_boxes_are_not_searched_one_by_one() -> None:
    (only,) = advise(machine("dgx-2"), 8).choices
    assert (only.gpus, only.alike) == (tuple(range(8)), comb(16, 8))
    found = advise(machine("dgx-a100:2"), 8)
    assert [c.alike for c in found.choices] == [2, comb(8, 4) ** 2, 2 * comb(8, 5) * comb(8, 3), 2 * 28**2, 2 * 8 * 8]
    assert sum(c.alike for c in found.choices) == comb(16, 8)
    assert like(machine("pcie-8")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert like(machine("dgx-1v")) == [[r] for r in range(8)]


@pytest.mark.slow
def test_the_machine_may_be_degraded() -> None:
    whole, hurt = (advise(t, 4) for t in (machine("dgx-1v"), modify(machine("dgx-1v"), drop_link=["0-3"])))
    assert whole.choices[0].gpus == (0, 1, 2, 3)
    assert hurt.choices[0].gpus == (4, 5, 6, 7)
    assert hurt.choices[0].rates == whole.choices[0].rates


EDGES = [(a, b) for a in range(5) for b in range(a)]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=10, max_size=10), st.integers(2, 4))
def test_on_any_machine(lanes: list[int], take: int) -> None:
    edges = " ".join(f"{a}-{b}" for (a, b), k in zip(EDGES, lanes, strict=True) for _ in range(k))
    t = machine_of(5, edges)
    expected = one_by_one(t, take)
    if set(expected) <= {None}:
        with pytest.raises(TopologyError, match="joined by links"):
            advise(t, take)
        return
    found = advise(t, take)
    told: Counter[Any] = Counter({None: found.apart} if found.apart else {})
    for choice in found.choices:
        told[choice.rates] += choice.alike
    assert told == expected


@given(st.lists(st.integers(1, 4), max_size=5), st.integers(0, 8))
def test_ways_to_take_some_of_each_group(sizes: list[int], take: int) -> None:
    found = list(_counts(sizes, take))
    assert len(found) == len(set(found)) == ways(sizes, take)
    assert all(sum(some) == take and all(k <= s for k, s in zip(some, sizes, strict=True)) for some in found)


def test_what_cannot_be_advised_says_why() -> None:
    t = machine("dgx-1v")
    with pytest.raises(ArgumentError, match="cannot take 9 GPUs: dgx-1v has 8 GPUs to choose from; take 2 to 8"):
        advise(t, 9)
    with pytest.raises(ArgumentError, match="cannot take 1 GPU"):
        advise(t, 1)
    with pytest.raises(ArgumentError, match="there must be two at least"):
        advise(t, 2, [3, 3])
    with pytest.raises(ArgumentError, match="CPU ranks"):
        advise(machine("cpu:4"), 2)
    with pytest.raises(ArgumentError, match="12870 sets of 8 GPUs"):
        advise(machine("mi250"), 8)
    with pytest.raises(TopologyError, match="expected different numbers of"):
        advise(t, 2, [0, 8])
