"""The simulator: results against NumPy, prices against what the links can carry."""

import random
from fractions import Fraction
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError, BufferTypeError, PlanError
from blinkmpi.planning.plan import Rule, chunk_for
from blinkmpi.program import cost_model
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.check import check
from blinkmpi.program.cost_model import LATENCY, Price, price
from blinkmpi.program.interpreter import run
from blinkmpi.program.lower import lower
from blinkmpi.program.reduction import DTYPES, Array
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import methods, pack
from blinkmpi.trees.tree import CARRIED, COLLECTIVES, Collective, Edge, Packing, Tree, carried, depth_of
from tests.conformance import allowed
from tests.effort import Effort
from tests.unit.trees.packings import call_of, machine_of, packing, random_packing, reference, sends_of, tree

MIB = 1 << 20
GIB = 1 << 30


def same(got: list[Array | None], want: list[Array | None]) -> bool:
    return len(got) == len(want) and all(
        (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("collective", [*COLLECTIVES, *CARRIED])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_results_equal_numpy_for_every_op_type_and_count(collective: Collective, n: int) -> None:
    rng, data = random.Random(n), np.random.default_rng(n)
    for count in (0, 1, 7, 1003):
        for dtype in DTYPES:
            for op in allowed(dtype) if collective in REDUCTIONS else [""]:
                if op == "avg" and collective in ("scan", "exscan"):  # of how many?
                    continue
                call = call_of(collective, n, count, dtype=dtype, op=op, root=n - 1, uneven=rng.random() < 0.5)
                found = random_packing(collective, n, rng, root=n - 1)
                found = msgspec.structs.replace(found, multicast=rng.random() < 0.5)
                program = check(lower(found, call, chunk_bytes=256, depth=2))
                sends = sends_of(call, data)
                assert same(run(program, sends), reference(call, sends)), (collective, n, count, dtype, op)


def test_partial_sums_of_a_scan_are_rounded_only_where_they_are_kept() -> None:
    """In the order of ranks, though the way from rank 1 to rank 2 leads through rank 0."""
    scatters = [packing("scatter", 3, [tree(r, "0-1" if r == 0 else "1-0 0-2")], root=r) for r in range(3)]
    sends = [np.random.default_rng(r).standard_normal(1000).astype(np.float16) for r in range(3)]
    a, b, c = (s.astype(np.float32) for s in sends)
    for kind, want in (("scan", [a, a + b, (a + b) + c]), ("exscan", [None, a, a + b])):
        call = Call(kind, 3, (1000,), "float16", "sum")  # type: ignore[arg-type]
        program = check(lower(carried(call.collective, scatters), call, chunk_bytes=64, depth=2))
        for got, right in zip(run(program, list(sends)), want, strict=True):
            assert (got is None) == (right is None)
            assert got is None or right is None or got.tobytes() == right.astype(np.float16).tobytes(), kind


def test_sums_of_halves_are_rounded_once_and_fold_in_rank_order() -> None:
    call = Call("reduce", 4, (1000,), "float16", "sum", 2)
    star = lower(packing("reduce", 4, [tree(2, "2-0 2-1 2-3")], root=2), call, chunk_bytes=64, depth=2)
    sends = [np.random.default_rng(r).standard_normal(1000).astype(np.float16) for r in range(4)]
    a, b, c, d = (s.astype(np.float32) for s in sends)
    got = run(star, list(sends))
    assert got[2] is not None
    assert got[2].tobytes() == (((a + b) + c) + d).astype(np.float16).tobytes()
    assert got[0] is got[1] is got[3] is None


def test_the_order_of_the_stages_in_the_file_does_not_matter() -> None:
    call = call_of("allreduce", 5, 1003)
    program = lower(random_packing("allreduce", 5, random.Random(3)), call, chunk_bytes=256, depth=2)
    sends = [np.random.default_rng(r).standard_normal(1003).astype(np.float32) for r in range(5)]
    backwards = msgspec.structs.replace(program, stages=program.stages[::-1])
    assert same(run(program, list(sends)), run(backwards, list(sends)))


def test_bad_buffers_are_errors_that_name_the_rank() -> None:
    program = lower(packing("allreduce", 2, [tree(0, "0-1")]), call_of("allreduce", 2, 8), chunk_bytes=64, depth=1)
    good = np.zeros(8, np.float32)
    with pytest.raises(ArgumentError, match=r"rank 1 sends float64 of shape \(8,\), wanted float32 of shape \(8,\)"):
        run(program, [good, good.astype(np.float64)])
    with pytest.raises(ArgumentError, match=r"rank 0 sends nothing"):
        run(program, [None, good])
    with pytest.raises(ArgumentError, match=r"3 send arrays for 2 ranks"):
        run(program, [good] * 3)
    call = msgspec.structs.replace(program.call, op="median")
    with pytest.raises(BufferTypeError, match="median"):
        run(msgspec.structs.replace(program, call=call), [good, good])


def priced(
    found: Packing, topology: Topology, nbytes: int, *, depth: int = 4, dtype: str = "float32", slot: int = 128 << 10
) -> Price:
    size = {"float32": 4, "float16": 2}[dtype]
    blocks = topology.n if found.collective in ("allgather", "gather", "scatter", "alltoall") else 1
    counts: tuple[int, ...] = (nbytes // size // blocks,)
    if found.collective == "reduce_scatter":
        counts = (nbytes // size // topology.n,) * topology.n
    call = Call(
        found.collective, topology.n, counts, dtype, "sum" if found.collective in REDUCTIONS else "", found.root
    )
    chunk = chunk_for(found, call, Rule(found.collective, 0, found.scheme, slot, depth))
    program = lower(found, call, chunk_bytes=chunk, depth=depth)
    return price(program, found, topology)


def test_one_chunk_over_one_link_takes_its_bytes_and_the_latency() -> None:
    line = machine_of(2, "0-1", mbps=10_000)
    found = packing("broadcast", 2, [tree(0, "0-1", 10_000)], root=0)
    got = priced(found, line, 4000)
    assert got.seconds == pytest.approx(4000 / 10e9 + LATENCY["nvlink"])
    assert [row[:3] for row in got.busy] == [(0, 1, "nvlink")]
    assert got.busiest == pytest.approx(4000 / 10e9)
    assert got.algbw == pytest.approx(4000 / got.seconds / 1e9)


def test_a_reduce_goes_against_the_edges_and_partial_sums_of_halves_travel_as_float32() -> None:
    """Rank 2 sends its operand as it is, rank 1 what it has folded."""
    line = machine_of(3, "0-1 1-2", mbps=10_000)
    found = packing("reduce", 3, [tree(0, "0-1 1-2", 10_000)], root=0)
    whole, halves = (priced(found, line, MIB, dtype=dtype).busy for dtype in ("float32", "float16"))
    assert [row[:2] for row in whole] == [(1, 0), (2, 1)]
    assert [row[3] for row in halves] == pytest.approx([2 * whole[0][3], whole[1][3]])


def test_a_path_through_a_switch_is_cut_through_and_its_slowest_link_decides() -> None:
    links = (Link(0, 2, "pcie", 1, 10_000), Link(2, 1, "pcie", 1, 5_000))
    topology = Topology("two", (Device("gpu", 0, 0), Device("gpu", 0, 1)), (Switch("pcie", 0),), links)
    found = packing("broadcast", 2, [Tree(0, (Edge(0, 1, (0, 2, 1)),), Fraction(5000))], root=0)
    got = priced(found, topology, 4000)
    assert got.seconds == pytest.approx(4000 / 5e9 + LATENCY["pcie"])
    assert [row[3] for row in got.busy] == [pytest.approx(4000 / 10e9), pytest.approx(4000 / 5e9)]


def test_too_few_slots_stall_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one CTA: each has slots of its own."""
    monkeypatch.setattr(cost_model, "CTAS", 1)
    line = machine_of(3, "0-1 1-2")
    found = packing("broadcast", 3, [tree(0, "0-1 1-2", 10_000)], root=0)
    one, four = (priced(found, line, 64 * MIB, depth=d) for d in (1, 4))
    assert one.seconds > 1.8 * four.seconds


UNEQUAL = [tree(0, "0-1 1-2 2-3", 20_000), tree(3, "3-0 0-1 1-2", 10_000)]


@pytest.mark.parametrize("collective", ["broadcast", "allreduce"])
def test_trees_of_unequal_weight_share_their_links_in_proportion(collective: Collective) -> None:
    topology = machine_of(4, "0-1 0-1 0-1 1-2 1-2 1-2 2-3 2-3 3-0")
    trees = UNEQUAL if collective == "allreduce" else [tree(0, "0-1 1-2 2-3", 20_000), tree(0, "0-3 0-1 1-2", 10_000)]
    found = packing(collective, 4, trees, root=0 if collective == "broadcast" else -1)
    got = priced(found, topology, 256 * MIB)
    assert 1.0 <= got.seconds / (256 * MIB / (float(found.rate) * 1e6)) < 1.03


EXACT = [
    *((name, None) for name in ("dgx-1v", "dgx-1p", "dgx-a100", "pcie-8")),
    ("dgx-1v", "1,4,5,6"),
    ("dgx-1v", "0-6"),
]


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allreduce", "allgather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize(("name", "gpus"), EXACT)
def test_large_vectors_approach_the_rate_and_never_beat_the_bound(
    name: str, gpus: str | None, collective: Collective
) -> None:
    topology = modify(machine(name), gpus=gpus)
    for method in methods(topology, collective):
        found = pack(topology, collective, root=0, method=method)
        for nbytes in (256 * MIB, GIB):
            # One chain on NVSwitch needs so many slots, and such long ones that messages cost less than bytes.
            slot = (512 if found.scheme == "chain" else 128) << 10
            seconds = priced(found, topology, nbytes, depth=16, slot=slot).seconds
            assert seconds >= nbytes / (float(found.bound) * 1e6) * (1 - 1e-4), (method, nbytes)
            if found.optimal:
                assert seconds <= 1.10 * nbytes / (float(found.rate) * 1e6), (method, nbytes)


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_that_share_a_memory_are_priced_by_the_work_of_their_cores(collective: Collective, n: int) -> None:
    topology = machine(f"cpu:{n}")
    nbytes = 64 * MIB
    for method in methods(topology, collective):
        found = pack(topology, collective, root=0, method=method)
        got = priced(found, topology, nbytes)
        assert got.seconds >= nbytes / (float(found.bound) * 1e6) * (1 - 1e-4), method
        assert all(kind == "memory" for *_, kind, _ in got.busy)
        if found.optimal:
            assert got.seconds <= 1.10 * nbytes / (float(found.rate) * 1e6), method


def test_one_rank_alone_moves_nothing() -> None:
    topology = machine("cpu:1")
    assert priced(pack(topology, "allreduce"), topology, MIB) == Price(0.0, 0.0, ())


def test_extrapolation_agrees_with_the_line_through_larger_simulations() -> None:
    topology = machine("dgx-1v")
    found = pack(topology, "allreduce", root=0)
    quarter, half, whole = (priced(found, topology, GIB // k).seconds for k in (4, 2, 1))
    assert whole - half == pytest.approx(2 * (half - quarter), rel=0.02)


@pytest.mark.slow
def test_a_gibibyte_on_eight_gpus_is_priced_with_little_work() -> None:
    """A part of its chunks is simulated, and the others follow from it."""
    topology = machine("dgx-1v")
    found = pack(topology, "allreduce", root=0)
    with Effort() as effort:
        priced(found, topology, GIB)
    assert effort.ours < 400_000


def test_a_barrier_costs_latency_alone() -> None:
    found = packing("barrier", 3, [tree(0, "0-1 1-2")])
    program = lower(found, Call("barrier", 3, (0,), "int8"), chunk_bytes=64, depth=1)
    got = price(program, found, machine_of(3, "0-1 1-2"))
    assert (got.seconds, got.algbw, got.busy) == (4 * LATENCY["nvlink"], 0.0, ())
    assert run(program, [None] * 3) == [None] * 3


def test_a_program_that_does_not_fit_is_refused() -> None:
    found = packing("broadcast", 3, [tree(0, "0-1 1-2", 10_000)], root=0)
    program = lower(found, call_of("broadcast", 3, 100), chunk_bytes=64, depth=1)
    with pytest.raises(PlanError, match=r"no link 1->2, which tree 0 uses"):
        price(program, found, machine_of(3, "0-1 0-2"))
    other = packing("broadcast", 3, [tree(0, "0-1 0-2", 10_000)], root=0)
    with pytest.raises(PlanError, match=r"sends from rank 1 to 2 on tree 0, which has no such edge"):
        price(program, other, machine_of(3, "0-1 0-2 1-2"))


@given(seed=st.integers(0, 2**32), n=st.integers(2, 6), nbytes=st.sampled_from([64, 10_000, 10 * MIB]))
@settings(max_examples=40, deadline=None)
def test_no_price_is_below_the_busiest_link_or_the_longest_path(seed: int, n: int, nbytes: int) -> None:
    topology = machine_of(n, " ".join(f"{a}-{b}" for a in range(n) for b in range(a)))
    found = random_packing("allreduce", n, random.Random(seed))
    got = priced(found, topology, nbytes)
    rising = (depth_of(t.root, ((e.dst, e.src) for e in reversed(t.upward))) for t in found.trees)
    hops = [up + depth_of(t.root, ((e.src, e.dst) for e in t.edges)) for up, t in zip(rising, found.trees, strict=True)]
    assert got.seconds >= got.busiest
    assert got.seconds >= min(hops) * LATENCY["nvlink"]


@pytest.mark.parametrize("seed", [16, 25])
def test_the_line_is_drawn_where_the_pipeline_is_steady(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On irregular machines the first chunks are slower or faster than the others for long."""
    rng = random.Random(seed)
    n = rng.choice((16, 24, 32))
    arcs = {(rng.randrange(v), v): rng.randint(1, 4) for v in range(1, n)}
    arcs |= {pair: rng.randint(1, 4) for pair in combinations(range(n), 2) if rng.random() < 3 / n}
    links = tuple(Link(a, b, "nvlink", c, 25_000) for (u, v), c in arcs.items() for a, b in ((u, v), (v, u)))
    irregular = Topology("irregular", tuple(Device("gpu", 0, r) for r in range(n)), (), links)
    found = pack(irregular, "allreduce")
    program = lower(found, call_of("allreduce", n, 1 << 24), chunk_bytes=128 << 10, depth=4)
    guessed = price(program, found, irregular).seconds
    monkeypatch.setattr(cost_model, "EVENTS", 1 << 30)
    monkeypatch.setattr(cost_model, "MAX_CHUNKS", 1 << 30)
    assert guessed == pytest.approx(price(program, found, irregular).seconds, rel=0.015)
