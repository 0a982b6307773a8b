"""Several boxes of a file, joined by its network cards; and rates that the user says."""

from pathlib import Path

import pytest

from blinkmpi.errors import TopologyError
from blinkmpi.topology import Topology, load, machine
from blinkmpi.topology.importers import parse_rates
from blinkmpi.trees import pack
from tests.unit.topology.dumps import all_to_all, cpu, gpu, net, system, trays
from tests.unit.topology.test_importers import smi


def file_of(folder: Path, text: str, name: str = "topo.xml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_boxes_of_a_file_are_joined_by_its_cards(tmp_path: Path) -> None:
    file = file_of(tmp_path, all_to_all(4, 'gcn="gfx942"'))
    one, three = load(file), load(f"{file}:3")
    assert three.n == 3 * one.n
    assert three.name == f"{one.name}:3"
    assert [d.node for d in three.devices] == [b for b in range(3) for _ in range(one.n)]
    assert [s.kind for s in three.switches].count("net") == 1
    assert sum(k.mbps for k in three.links if k.kind == "net" and k.src == three.n + len(three.switches) - 1) == 600_000
    for box in range(3):
        part = three.subset(range(box * one.n, (box + 1) * one.n))
        assert part.links == one.links
    plan = pack(three, "broadcast")
    assert plan.optimal
    assert plan.rate == 200_000, "what the cards of a box take"
    assert load(f"{file}:1") == one


def test_a_catalogues_box_in_a_file_is_the_catalogues(tmp_path: Path) -> None:
    """The card of each A100, written into the file."""
    dgx = machine("dgx-a100")
    cards = [{"name": f"mlx5_{i}", "vertex": i, "mbps": 25_000} for i in range(8)]
    text = dgx.to_json().replace('"cards": []', f'"cards": {cards}'.replace("'", '"'))
    file = file_of(tmp_path, text, "a100.json")
    assert load(f"{file}:4").fingerprint == machine("dgx-a100:4").fingerprint
    assert load(file).subset([2, 3]).cards[2].vertex == 0, "GPU 2 is rank 0"


def test_cards_of_one_vertex_add_up(tmp_path: Path) -> None:
    file = file_of(tmp_path, system(cpu(gpu(0), gpu(1), net("a", 100_000), net("b", 100_000), net("c", 200_000))))
    assert {(k.lanes, k.lane_mbps) for k in load(f"{file}:2").links if k.kind == "net"} == {(1, 50_000)}
    file = file_of(tmp_path, system(cpu(gpu(0), gpu(1), net("a", 100_000), net("b", 100_000))))
    assert {(k.lanes, k.lane_mbps) for k in load(f"{file}:2").links if k.kind == "net"} == {(2, 12_500)}


@pytest.mark.parametrize(("text", "spec", "said"), [
    (system(cpu(gpu(0))), "topo.xml:2", r'no network card.*<nic><net name="eth0" speed="100000"/></nic> in a <cpu>'),
    (trays("0xaa", "0xbb"), "topo.xml:2", "it has 2 nodes already; give a description of one node"),
    (system(cpu(gpu(0))), "topo.xml:0", r"expected a count of 1\.\.1024 after the colon; write topo.xml:4"),
    (system(cpu(gpu(0))), "topo.xml:1025", r"expected a count of 1\.\.1024"),
    (system(cpu(gpu(0))), "other.xml:2", "cannot read topology file"),
])  # fmt: skip
def test_boxes_that_there_cannot_be(text: str, spec: str, said: str, tmp_path: Path) -> None:
    file_of(tmp_path, text)
    with pytest.raises(TopologyError, match=said):
        load(str(tmp_path / spec))


def test_a_file_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    assert load(file_of(tmp_path, system(cpu(gpu(0))), "topo:2")).n == 1


def test_a_rate_that_the_user_says_is_that_of_a_link(tmp_path: Path) -> None:
    rates = parse_rates(["nvlink=21", "pcie=12.5"])
    assert rates == {"nvlink": 21_000, "pcie": 12_500}
    made = load("dgx-1v", rates=rates)
    assert {(k.lane_mbps, k.origin) for k in made.links if k.kind == "nvlink"} == {(21_000, "given")}
    assert {(k.lane_mbps, k.origin) for k in made.links if k.kind == "host"} == {(19_200, "table")}
    assert Topology.from_json(made.to_json()) == made
    file = file_of(tmp_path, smi("X NV4", "NV4 X"), "a.txt")
    assert {k.mbps for k in load(file, rates=parse_rates(["nvlink=14.0625"])).links if k.kind == "nvlink"} == {56_248}
    with pytest.raises(TopologyError, match="no link of kind 'xgmi' to give a rate; it has host, nvlink, pcie"):
        load("dgx-1v", rates={"xgmi": 1})


@pytest.mark.parametrize("text", ["nvlink", "nvlink=", "=5", "wire=5", "nvlink=-1", "nvlink=1e3", "nvlink=0",
                                  "net=1e99", "pcie=0.0001",
                                  f"net={'9' * 200}", "nvlink=nan", "nvlink=1/0"])  # fmt: skip
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="rate '"):
        parse_rates([text])


@pytest.mark.slow
def test_two_racks_meet_the_bound() -> None:
    plan = pack(machine("gb200-nvl72:2"), "allreduce")
    assert plan.optimal
    assert "GPUs 1-71" in pack(machine("gb200-nvl72"), "broadcast").certificate.text
