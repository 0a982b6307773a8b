"""One machine from the facts of all ranks' GPUs: equal to the catalogue's where it is that machine."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from blinkmpi.errors import TopologyError
from blinkmpi.topology import GpuFacts, GpuMachine, Topology, from_gpus, gather_gpus, gpu_topology, machine
from blinkmpi.topology.gpu import PeerAccess, Unknown, known
from blinkmpi.trees import COLLECTIVES, pack
from tests.unit.topology.test_gather import HERE, on_ranks, one_error
from tests.unit.topology.test_probe import recorded


def nvlinks(t: Topology) -> dict[tuple[int, int], int]:
    return {(k.src, k.dst): k.mbps for k in t.links if k.kind == "nvlink"}


@pytest.mark.parametrize("name", ["dgx-1p", "dgx-1v"])
def test_a_probed_dgx1_is_the_catalogues(name: str) -> None:
    made = from_gpus(recorded(f"nvml-{name}"))
    assert made.fingerprint == machine(name).fingerprint
    assert Topology.from_json(made.to_json()) == made


@pytest.mark.parametrize("chosen", [range(8), [0, 1, 2, 3], [1, 3, 5, 6], [7, 0], [2]])
def test_probed_h200s_plan_as_the_catalogues_hgx(chosen: Sequence[int]) -> None:
    facts = recorded("nvml-h200x8")
    made, told = from_gpus([facts[i] for i in chosen]), machine("hgx-h200").subset(list(chosen))
    assert [d.index for d in made.devices] == list(chosen)
    assert [d.bus for d in made.devices] == [facts[i].bus for i in chosen]
    assert nvlinks(made) == nvlinks(told)
    if len(chosen) > 1:
        assert {k.mbps for k in made.links if k.kind == "nvlink"} == {450_000}
        assert {k.origin for k in made.links if k.kind == "nvlink"} == {"table"}
        assert {(k.mbps, k.origin) for k in made.links if k.kind == "pcie"} == {(63_000, "probe")}
    for collective in COLLECTIVES:
        assert pack(made, collective) == pack(told, collective)


def test_a_dead_nvlink_costs_its_gpu_one_lane() -> None:
    made = from_gpus(recorded("one-dead-nvlink"))
    assert [k.lanes for k in made.links if k.kind == "nvlink" and k.dst == 8] == [18, 18, 18, 17, 18, 18, 18, 18]
    assert "rank 3: NVLinks down: 5 of 18" in made.source
    assert pack(made, "broadcast", root=0).rate == 425_000


def test_a_gb200_tray() -> None:
    made = from_gpus(recorded("nvml-gb200x4"))
    assert {k.mbps for k in made.links if k.kind == "nvlink"} == {900_000}
    assert [s.name for s in made.switches] == ["NVSwitch", "socket 0", "socket 1"]


def test_a_pcie_box_has_its_tree() -> None:
    made, told = from_gpus(recorded("nvml-pcie-8")), machine("pcie-8")
    assert {(k.src, k.dst, k.mbps) for k in made.links if k.kind == "pcie"} == {
        (k.src, k.dst, k.mbps) for k in told.links if k.kind == "pcie"
    }
    assert [s.kind for s in made.switches] == [s.kind for s in told.switches]
    assert "between sockets 2 x 19.2 GB/s assumed" in made.source
    assert pack(made, "broadcast").rate == pack(told, "broadcast").rate


def test_without_nvml_pcie_is_left_and_the_reason_is_shown() -> None:
    made = from_gpus(recorded("driver-without-nvml"))
    assert made.kinds() == ("pcie",)
    assert "ranks 0-1: NVLinks unknown: NVMLError_LibraryNotFound" in made.source
    assert "PCIe assumed generation 3 x16" in made.source
    assert {k.origin for k in made.links} == {"table"}


def test_links_to_gpus_outside_the_job_are_not_used() -> None:
    facts = recorded("nvml-dgx-1v")
    made = from_gpus([facts[i] for i in (1, 4, 5, 6)])
    assert nvlinks(made) == nvlinks(machine("dgx-1v").subset([1, 4, 5, 6]))


def test_rank_order_is_device_order() -> None:
    facts = recorded("nvml-dgx-1v")
    order = [6, 0, 3, 7, 1, 2, 5, 4]
    made = from_gpus([facts[i] for i in order])
    assert nvlinks(made) == nvlinks(machine("dgx-1v").subset(order))


def changed(facts: GpuFacts, **fields: Any) -> GpuFacts:
    return replace(facts, **fields)


@pytest.mark.parametrize(("change", "said"), [
    (lambda f: [f[0], f[1], f[0]], "rank 0 .* and rank 2 are on the same GPU; give every rank its own"),
    (lambda f: [f[0], changed(f[1], bus=f[0].bus)], "rank 0 .* and rank 1 are on the same GPU"),
    (lambda f: [f[0], changed(f[1], mig=True)], "rank 1 .* MIG mode.*-mig 0"),
    (lambda f: [changed(f[0], nvlinks=tuple(changed(k, version=Unknown("new")) for k in f[0].nvlinks)), f[1]],
     r"rank 0 .*: NVLink 0: rate unknown for version new; .*BLINKMPI_TOPO_FILE"),
])  # fmt: skip
def test_what_no_plan_can_serve_is_refused(change: Callable[[Any], list[GpuFacts]], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        from_gpus(change(recorded("nvml-h200x8")))


def test_ranks_may_share_gpus_where_the_user_says_so() -> None:
    one, other = recorded("nvml-h200x8")[:2]
    made = from_gpus([one, other, one, other, one], per_gpu=3)
    assert {pair for pair in nvlinks(made) if max(pair) < 5} == set(), "through a switch alone"
    assert [s.name for s in made.switches if s.kind == "nvswitch"] == ["shared GPU memory"]
    assert [d.uuid for d in made.devices] == [
        one.uuid, other.uuid, f"{one.uuid}/1", f"{other.uuid}/1", f"{one.uuid}/2",
    ]  # fmt: skip
    assert "ranks 0, 2, 4: share NVIDIA H200 at " in made.source
    with pytest.raises(TopologyError, match=r"BLINKMPI_RANKS_PER_GPU allows 2; .* BLINKMPI_RANKS_PER_GPU=3"):
        from_gpus([one, other, one, other, one], per_gpu=2)


def test_equal_bus_ids_on_two_nodes_are_two_gpus() -> None:
    one, other = recorded("nvml-h200x8")[:2]
    made = from_gpus([one, changed(other, bus=one.bus)], nodes=[0, 1], hosts=["a", "b"])
    assert made.nodes == (0, 1)
    assert [d.host for d in made.devices] == ["a", "b"]
    assert nvlinks(made) == {}, "a switch with one GPU of its node leads nowhere"
    assert "net" in made.kinds()
    assert "1 GB/s assumed" in made.source


def test_nodes_meet_through_the_cards_near_their_gpus() -> None:
    facts = recorded("nvml-dgx-1v")
    made = from_gpus([*facts, *(changed(f, uuid=f"{f.uuid}b") for f in facts)], nodes=[0] * 8 + [1] * 8)
    told = machine("dgx-1v:2")
    ours, theirs = ([k.mbps for k in t.links if k.kind == "net"] for t in (made, told))
    assert ours == theirs == [12_500] * 16
    assert made.subset(range(8)).fingerprint == machine("dgx-1v").fingerprint


@pytest.mark.parametrize("state", ["not started", "in progress"])
def test_a_fabric_that_is_not_up_carries_nothing(state: str) -> None:
    made = from_gpus([changed(f, fabric=state) for f in recorded("nvml-h200x8")])
    assert made.kinds() == ("pcie",)
    assert f"NVSwitch fabric {state}; is nvidia-fabricmanager running?" in made.source


def test_active_links_are_not_connectivity_where_nvml_denies_it() -> None:
    facts = list(recorded("nvml-h200x8")[:4])
    for i, f in enumerate(facts):
        denied = [facts[j].bus for j in range(4) if i // 2 != j // 2]
        peers = [changed(p, nvlink="not supported") if p.bus in denied else p for p in known(f.peers) or ()]
        facts[i] = changed(f, peers=tuple(peers))
    made = from_gpus(facts)
    assert [s.name for s in made.switches] == ["NVSwitch 0", "NVSwitch 1", "host"]
    assert {(a, b) for a, b in nvlinks(made) if a < 4} == {(0, 4), (1, 4), (2, 5), (3, 5)}
    assert "NVML denies NVLink between them: not supported" in made.source

    one, other = recorded("nvml-dgx-1v")[:2]
    denies = PeerAccess(str(other.bus), "disabled by a registry key", "ok", "PIX")
    assert nvlinks(from_gpus([one, other])) == {(0, 1): 25_000, (1, 0): 25_000}
    assert nvlinks(from_gpus([changed(one, peers=(denies,)), other])) == {}


def test_isolated_ranks_that_see_their_own_gpu_alone_make_the_same_machine() -> None:
    """Slurm's cgroups: every rank's NVML counts one GPU, number 0, and knows no peer."""
    facts = recorded("nvml-h200x8")
    made = from_gpus([changed(f, index=0, peers=()) for f in facts])
    assert [d.index for d in made.devices] == list(range(8))
    assert made.fingerprint == from_gpus(facts).fingerprint


def test_two_ends_that_count_differently_use_what_both_see() -> None:
    one, other = (recorded("nvml-dgx-1v")[i] for i in (0, 3))
    links = tuple(changed(k, active=k.number != 2) for k in known(one.nvlinks) or ())
    made = from_gpus([changed(one, nvlinks=links), other])
    assert nvlinks(made) == {(0, 1): 25_000, (1, 0): 25_000}
    assert "counts 1 NVLinks to rank 1, which counts 2: 1 used" in made.source
    assert "rank 0: NVLinks down: 2 of 6" in made.source


# ---------------------------------------------------------------- over a communicator


def gathered(nodes: list[int], turns: Sequence[GpuFacts | Exception | str]) -> list[Any]:
    return on_ranks(nodes, lambda comm, node: gather_gpus(comm, node, turns[comm.rank]))


def test_all_ranks_get_one_machine() -> None:
    facts = recorded("nvml-h200x8")[:4]
    results = gathered([0] * 4, facts)
    assert results == [results[0]] * 4
    assert isinstance(results[0], GpuMachine)
    assert results[0].topology is not None
    assert results[0].topology.fingerprint == from_gpus(facts).fingerprint
    assert all(d.host for d in results[0].topology.devices)


def test_the_launchers_nodes_are_the_machines() -> None:
    (one, *_) = gathered([0, 1], recorded("nvml-h200x8")[:2])
    assert one.topology.nodes == (0, 1)


def test_a_rank_without_gpu_leaves_all_without_and_says_why() -> None:
    facts = recorded("nvml-h200x8")
    results = gathered([0] * 3, [facts[0], "CuPy is not installed", facts[1]])
    assert results == [GpuMachine(None, "rank 1 has no GPU: CuPy is not installed")] * 3
    results = gathered([0] * 3, ["one CUDA GPU, two ranks", facts[0], "as rank 0"])
    assert results == [GpuMachine(None, "ranks 0, 2 have no GPU: one CUDA GPU, two ranks")] * 3
    results = gathered([0] * 2, ["no driver", "no driver"])
    assert results == [GpuMachine(None, "no rank has a GPU: no driver")] * 2


def test_ranks_that_make_different_machines_of_the_same_facts_all_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*args: Any, **kwargs: Any) -> Topology:
        made = from_gpus(*args, **kwargs)
        return made if HERE.rank else made.scale("nvlink", 2)

    monkeypatch.setattr(gpu_topology, "from_gpus", own)
    for result in gathered([0] * 2, recorded("nvml-h200x8")[:2]):
        assert isinstance(result, TopologyError)
        assert "different machines of the same GPUs" in str(result)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_probe_fails_fails_all(rank: int) -> None:
    error = TopologyError("NVML is made of cheese")
    turns: list[GpuFacts | Exception | str] = [*recorded("nvml-h200x8")[:3]]
    turns[rank] = error
    turns[1] = "no GPU here"
    one_error(gathered([0] * 3, turns), rank, error)


def test_two_ranks_on_one_gpu_is_an_error_on_all() -> None:
    facts = recorded("nvml-h200x8")
    results = gathered([0] * 3, [facts[0], facts[1], facts[1]])
    for result in results:
        assert isinstance(result, TopologyError)
        assert "rank 1 (NVIDIA H200 at 0000:00:07.0) and rank 2 are on the same GPU" in str(result)
