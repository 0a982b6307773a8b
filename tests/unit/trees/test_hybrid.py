"""Two kinds of links at once: rates add, the vector is split so that both end together, switching shifts the split."""

from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError, PlanError
from blinkmpi.topology.machines import machine
from blinkmpi.trees import COLLECTIVES, pack, verify
from blinkmpi.trees.blink.hybrid import split
from blinkmpi.trees.graph.fabric import fabric
from blinkmpi.trees.pack import extra_methods
from blinkmpi.trees.problem import MethodOptions

DGX = machine("dgx-1v")
MOVING = tuple(c for c in COLLECTIVES if c != "barrier")
RATES = st.fractions(Fraction(1), Fraction(200_000))


@pytest.mark.parametrize("collective", MOVING)
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-1p"])
def test_rates_add(name: str, collective: str) -> None:
    t = machine(name)
    slow = msgspec.structs.replace(t, links=tuple(k for k in t.links if k.kind != "nvlink"))
    both = pack(t, collective, method="hybrid")
    assert both.rate == pack(t, collective).rate + pack(slow, collective).rate
    assert both.links == "host+nvlink+pcie"
    assert both.bound >= both.rate
    assert "% of the vector on nvlink" in both.reason
    kinds = {kind for k in t.links for kind in [k.kind]}
    assert set(both.links.split("+")) == kinds


@given(RATES, RATES, st.integers(1, 10**10), st.fractions(Fraction(0), Fraction(1, 10)))
def test_both_end_together(fast: Fraction, slow: Fraction, nbytes: int, wait: Fraction) -> None:
    parts = split(fast, slow, nbytes=nbytes, switch_seconds=wait)
    size = Fraction(nbytes, 10**6)
    assert parts.fast + parts.slow == 1
    assert parts.fast * size / fast == parts.seconds
    if parts.slow:
        assert parts.slow * size / slow + wait == parts.seconds
    else:
        assert parts.seconds <= wait


def test_switching_cost_shifts_the_split() -> None:
    rates = []
    for wait in ("0", "1/10000", "1/1000", "1"):
        options = MethodOptions(nbytes=100_000_000, switch_seconds=Fraction(wait))
        packing = pack(DGX, "broadcast", method="hybrid", options=options)
        rates.append(packing.rate)
        assert ("before the slow links start" in packing.reason) == (wait != "0")
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == Fraction(165_750)
    assert rates[-1] == pack(DGX, "broadcast").rate


def test_every_shared_link_is_counted_once() -> None:
    """PCIe at half its rate no longer carries what the plan for the whole machine puts on it."""
    both = pack(DGX, "allreduce", method="hybrid")
    with pytest.raises(PlanError, match="carries"):
        verify(both, DGX.scale("pcie", "1/2"))


def test_where_one_kind_is_missing() -> None:
    for t in (machine("pcie-8"), machine("dgx-a100"), DGX.subset([0, 5])):
        assert "hybrid" not in extra_methods(t, "broadcast")
        with pytest.raises(ArgumentError, match="hybrid"):
            pack(t, "broadcast", method="hybrid")
    assert fabric(DGX, ["nvlink"]).serves("allreduce", 0)
