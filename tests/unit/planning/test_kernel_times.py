"""What calls take on GPUs, by the closed form: what it says of protocols, and what it takes from a measurement."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from blinkmpi.planning.gpus.kernel_times import H200, boundaries, costs_of, seconds
from blinkmpi.planning.plan import PACKETS, Plan, Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.call import Call, call_of_bytes
from blinkmpi.runtime import inspection
from blinkmpi.topology import Topology, machine, modify
from blinkmpi.topology.measured import LinkMeasurement, Measured
from blinkmpi.transport.cuda.packets import fits

MIB = 1 << 20


def gpus(n: int) -> tuple[Topology, Plan]:
    topology = modify(machine("hgx-h200"), gpus=",".join(map(str, range(n))))
    return topology, make_plan(topology, gpus="onehop")


TWO, PLAN_OF_TWO = gpus(2)


def call_of(collective: str, nbytes: int, *, n: int = 2) -> Call:
    op = "sum" if "reduce" in collective else ""
    return call_of_bytes(collective, n, nbytes, op=op, root=0)  # type: ignore[arg-type]


def of(collective: str, nbytes: int, protocol: str, *, ctas: int = 0, **more: Any) -> float:
    call = call_of(collective, nbytes)
    rule = Rule(call.collective, 0, "onehop", 32 << 10, 4, protocol=protocol, ctas=ctas)  # type: ignore[arg-type]
    program = program_for(PLAN_OF_TWO, call, rule)
    packing = PLAN_OF_TWO.packing(call.collective, call.root, "onehop")
    return seconds(call, rule, program, packing, TWO, **more)


def test_long_vectors_take_as_long_as_the_wire_and_packets_longer() -> None:
    bound = (256 * MIB) / 450e9
    slots, direct = of("allreduce", 256 * MIB, "slots"), of("allreduce", 256 * MIB, "direct")
    assert slots == pytest.approx(bound * (H200.wire + H200.back), rel=0.03)
    assert direct < slots
    assert of("allreduce", 256 * MIB, "ll128_two_shot") == pytest.approx(slots * 8 / 7, rel=0.03)
    assert of("allreduce", 256 * MIB, "ll16_one_shot") == pytest.approx(slots * 2, rel=0.03)
    one_way = of("broadcast", 256 * MIB, "direct")
    assert one_way == pytest.approx(bound * H200.wire, rel=0.03), "nothing comes back"


def test_short_vectors_take_hops() -> None:
    times = [of("allreduce", 1024, protocol) for protocol in ("ll16_one_shot", "ll128_one_shot", "direct", "slots")]
    assert times == sorted(times)
    assert of("broadcast", 1024, "ll16_one_shot") == pytest.approx(H200.launch_s + H200.hop_s, rel=0.01)
    assert of("allreduce", 1024, "ll16_one_shot", graph=False) == pytest.approx(times[0] + H200.gap_s)


def test_few_ctas_are_slower_than_the_link() -> None:
    by_ctas = [of("allreduce", 64 * MIB, "direct", ctas=ctas) for ctas in (4, 8, 128)]
    assert by_ctas[0] > 1.9 * by_ctas[1] > 1.9 * by_ctas[2]
    assert by_ctas[2] == of("allreduce", 64 * MIB, "direct")


def test_in_place_a_reduce_scatter_moves_its_result() -> None:
    for collective, more in (("reduce_scatter", 32 * MIB / H200.copy_bytes_s), ("allreduce", 0.0)):
        plain, in_place = (of(collective, 64 * MIB, "slots", in_place=place) for place in (False, True))
        assert in_place - plain == pytest.approx(more)


def test_a_measured_machine_has_its_own_link_and_flag() -> None:
    rows = []
    for a, b in ((0, 1), (1, 0)):
        rows += [LinkMeasurement(a, b, "push", mbps=300_000), LinkMeasurement(a, b, "flag", us=2.6)]
    found = Measured(TWO.name, TWO.devices, "2026-11-24", "1", {}, tuple(rows))
    costs = costs_of(TWO, found)
    assert costs.wire == pytest.approx(1.5)
    assert costs.hop_s == pytest.approx(2 * H200.hop_s)
    assert "measured here on 2026-11-24" in costs.basis
    assert of("broadcast", 256 * MIB, "direct", costs=costs) > 1.2 * of("broadcast", 256 * MIB, "direct")
    for nothing in (None, replace(found, rows=()), replace(found, rows=tuple(rows[::2]))):
        assert costs_of(TWO, nothing) == H200


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather"])
def test_more_gpus_than_were_tried_change_protocols_where_their_times_meet(collective: str) -> None:
    topology, plan = gpus(8)
    packing = plan.packing(collective, -1 if collective != "broadcast" else 0, "onehop")
    found = boundaries(packing, topology)
    names = ["ll128_two_shot" if found.two_shot else "ll128_one_shot", "direct"]

    def both(nbytes: int) -> list[float]:
        call = call_of(collective, nbytes, n=8)
        rules = [Rule(call.collective, 0, "onehop", 32 << 10, 4, protocol=name) for name in names]  # type: ignore[arg-type]
        return [seconds(call, r, program_for(plan, call, r), packing, topology) for r in rules]

    lines, direct = both(found.direct)
    assert lines == pytest.approx(direct, rel=0.02)
    rules = plan.rows(collective, packing.root)[True]
    taken = min(r.min_bytes for r in rules if r.protocol == "direct")
    assert taken == found.direct
    assert {r.reason for r in rules if r.protocol in PACKETS} == {"default: by what kernels cost, on fewer GPUs"}


@pytest.mark.parametrize("protocol", ["ll16_one_shot", "ll128_two_shot", "direct", "slots"])
def test_partial_results_of_16_bits_travel_as_float32_through_slots_alone(protocol: str) -> None:
    topology, plan = gpus(4)
    times = []
    for dtype in ("float32", "bfloat16"):
        call = call_of_bytes("reduce", 4, 4 * MIB, dtype=dtype, op="sum", root=0)
        rule = Rule("reduce", 0, "onehop", 32 << 10, 4, protocol=protocol)  # type: ignore[arg-type]
        packing = plan.packing("reduce", 0, "onehop")
        times.append(seconds(call, rule, program_for(plan, call, rule), packing, topology))
    assert times[1] > 1.2 * times[0] if protocol == "slots" else times[1] == times[0]


def test_other_data_for_each_of_several_peers_takes_longer() -> None:
    def time(n: int, exchange: float) -> float:
        topology, plan = gpus(n)
        call = call_of("reduce_scatter", 4 * MIB, n=n)
        rule = Rule("reduce_scatter", 0, "onehop", 32 << 10, 4, protocol="ll128_one_shot")
        program, packing = program_for(plan, call, rule), plan.packing("reduce_scatter", -1, "onehop")
        return seconds(call, rule, program, packing, topology, replace(H200, exchange=exchange))

    assert time(2, 0.2) == time(2, 0.0)
    assert time(3, 0.2) > time(3, 0.0)
    more = [time(n, 0.2) / time(n, 0.0) for n in (4, 8)]
    assert 1.2 < more[0] < 1.4, "two peers but the first"
    assert more[1] == pytest.approx(more[0], rel=0.05), "as with three, among more"


# ---- what a job says


def job(*, forecasts: bool = True, max_ctas: int = 132, n: int = 2) -> Any:
    """What `inspection` asks of a job of two GPUs, or of more."""
    topology, planned = gpus(n) if n > 2 else (TWO, PLAN_OF_TWO)
    own = SimpleNamespace(
        planned=SimpleNamespace(about=lambda *_: planned), machine=topology, costs=H200, forecasts=forecasts, here=(),
        emulated=not forecasts, gpu=SimpleNamespace(name="NVIDIA H200"),
        transport=SimpleNamespace(max_ctas=max_ctas),
        rule=lambda call, registered=True, plan=None: choose(plan, call, registered=registered, fits=fits),
        program=lambda call, rule, plan: program_for(plan, call, rule),
    )  # fmt: skip
    return SimpleNamespace(
        gpus=own, main=own, n=n, step_rates=None, forecasts=False, emulated=not forecasts, one_node=True, executor="C"
    )


def test_a_job_on_gpus_predicts_by_kernels_and_says_so() -> None:
    direct, bound = inspection.predict(job(), "allreduce", 16 * MIB)
    slots, _ = inspection.predict(job(), "allreduce", 16 * MIB, registered=False)
    assert direct == pytest.approx(of("allreduce", 16 * MIB, "direct"))
    assert slots == pytest.approx(of("allreduce", 16 * MIB, "slots"))
    assert bound is not None
    assert direct is not None
    assert bound < direct
    later, _ = inspection.predict(job(), "allreduce", 16 * MIB, graph=False)
    assert later == pytest.approx(direct + H200.gap_s)
    text = " ".join(inspection.explain(job(), "allreduce", 16 * MIB, dtype="float32", op="sum", root=0).split())
    assert f"predicted {direct * 1e6:.3g} us" in text
    assert f"predictions are by what kernels cost, in graphs: {H200.basis}" in text
    how = [inspection.choice(job(), "allreduce", 16 * MIB, registered=r)["protocol"] for r in (True, False)]
    assert how == ["direct", "slots"]


def test_two_kernels_are_predicted_by_their_own_trees() -> None:
    """Of bfloat16 by stars, which send operands; an AllReduce along the trees of float32 would send sums as float32.

    In its reduce-scatter each rank sends other operands to each of three peers, in a chain to one.
    """
    four, found = job(n=4), []
    for dtype, scheme in (("float32", "chain"), ("bfloat16", "onehop")):
        how = inspection.choice(four, "allreduce", 256 * MIB, dtype=dtype)
        assert (how["scheme"], how["protocol"]) == (scheme, "rs_ag")
        found.append(inspection.predict(four, "allreduce", 256 * MIB, dtype=dtype)[0])
    chain, stars = found
    assert chain is not None
    of_half = 2 * H200.exchange_long  # the reduce-scatter's: it takes half of the time, and has two peers but one
    assert stars == pytest.approx(chain * (1 + of_half / 2), rel=0.01)


def test_the_ctas_shown_are_those_that_run() -> None:
    planned, here = (inspection.choice(job(max_ctas=most), "allreduce", 16 * MIB)["ctas"] for most in (132, 8))
    assert here == 8 < planned


def test_emulated_links_are_simulated() -> None:
    assert "simulation" in inspection.rests_on(job(forecasts=False))
    kernels, _ = inspection.predict(job(), "allreduce", 16 * MIB)
    simulated, _ = inspection.predict(job(forecasts=False), "allreduce", 16 * MIB)
    assert kernels != simulated
