"""Dumps of real kinds of machines, small: links of all kinds, hosts, cards; and what is not read is said."""

import re
from pathlib import Path

import pytest

from blinkmpi.errors import FormatError, TopologyError
from blinkmpi.topology import Topology, load
from blinkmpi.topology.nccl import BUDGET, read_xml
from blinkmpi.topology.nvidia_smi import MOST_SMI_BYTES, read_smi
from blinkmpi.topology.rocm_smi import MOST_ROCM_BYTES, read_rocm
from blinkmpi.trees import pack
from blinkmpi.util.xml_elements import read_elements
from tests.effort import Effort
from tests.unit.topology.dumps import (
    ROCM,
    SWITCH,
    all_to_all,
    bridge,
    bus,
    cpu,
    gpu,
    net,
    system,
    trays,
    xgmi,
)
from tests.unit.topology.test_gpu_topology import nvlinks
from tests.unit.topology.test_importers import smi


def rates(topology: Topology, kind: str) -> dict[tuple[int, int], int]:
    return {(k.src, k.dst): k.mbps for k in topology.links if k.kind == kind}


@pytest.mark.parametrize(("facts", "mbps"), [
    ('sm="304" gcn="gfx942"', 64_000), ('sm="104" gcn="910"', 50_000), ('sm="120" gcn="908"', 46_000),
])  # fmt: skip
def test_rccls_models_go_by_xgmi(facts: str, mbps: int) -> None:
    made = read_xml(all_to_all(8, facts))
    assert rates(made, "xgmi") == {(a, b): mbps for a in range(8) for b in range(8) if a != b}
    assert made.remarks == ()
    plan = pack(made, "allreduce")
    assert plan.links == "xgmi"
    assert plan.optimal
    assert plan.rate == 7 * mbps * 8 / 14, "the bound over the 7 links of each GPU"


def test_xgmi_links_that_two_ends_count_differently_are_said() -> None:
    made = read_xml(system(cpu(gpu(0, xgmi([1], 4), facts='gcn="gfx90a"'), gpu(1, xgmi([0], 2), facts='gcn="gfx90a"'))))
    assert rates(made, "xgmi") == {(0, 1): 100_000, (1, 0): 100_000}
    assert "counts 4 xGMI links to rank 1, which counts 2: 2 used" in made.source


def test_an_architecture_without_a_rate_names_the_remedy() -> None:
    text = all_to_all(2, 'gcn="gfx1234"')
    with pytest.raises(TopologyError, match=r"gfx1234; known are gfx906.*--rate xgmi=64"):
        read_xml(text)
    assert set(rates(read_xml(text, rates={"xgmi": 32_000}), "xgmi").values()) == {32_000}


def test_network_cards_are_where_the_file_has_them() -> None:
    made = read_xml(all_to_all(3, 'gcn="gfx942"'))
    near = {(k.dst, k.src) for k in made.links if k.kind == "pcie" and k.src < made.n}
    assert [(c.name, (c.vertex, i) in near, c.mbps) for i, c in enumerate(made.cards)] == [
        (f"mlx5_{i}", True, 50_000) for i in range(3)
    ]


def test_a_slow_card_beside_fast_ones_is_left_out_and_said() -> None:
    made = read_xml(system(cpu(gpu(0), gpu(1), net("mlx5_0", 400_000), net("eth0", 1000), net("veth", 0))))
    assert [(c.name, c.mbps) for c in made.cards] == [("mlx5_0", 50_000)]
    assert "eth0" not in made.to_json()
    assert [r.partition(": ")[2] for r in made.remarks] == [
        "line 9: <net> without a speed is left out",
        "line 8: <net> of 1000 Mb/s, beside one of 400000, is left out",
    ]


def test_nodes_of_one_nvlink_domain_are_on_one_switch() -> None:
    """host_hash tells GPUs with the same PCI id apart."""
    made = read_xml(trays("0xaa", "0xbb", "0xcc"))
    assert [d.node for d in made.devices] == [0, 0, 1, 1, 2, 2]
    assert [d.host for d in made.devices] == ["0xaa", "0xaa", "0xbb", "0xbb", "0xcc", "0xcc"]
    assert [(s.kind, s.node) for s in made.switches][:1] == [("nvswitch", -1)]
    assert set(rates(made, "nvlink").values()) == {18 * 50_000}
    assert len(rates(made, "nvlink")) == 12
    assert set(rates(made, "c2c").values()) == {5 * 44_712}
    assert "net" not in made.kinds()
    plan = pack(made, "allreduce")
    assert (plan.links, plan.optimal) == ("nvlink", True)
    assert read_xml(trays("0xaa", "0xbb", cards=True)).kinds() == ("c2c", "net", "nvlink", "pcie")


def test_a_gpu_that_is_there_twice_is_named_with_its_lines() -> None:
    with pytest.raises(FormatError, match=f"lines 3 and 5: two <gpu> at {bus(0)}"):
        read_xml(system(cpu(gpu(0), gpu(1, at=bus(0)))))


def test_a_gpu_that_targets_itself_is_named_with_its_line() -> None:
    text = system(cpu(gpu(0), gpu(1, f'<nvlink target="{bus(1)}" count="12" tclass="0x030200"/>\n')))
    with pytest.raises(
        FormatError, match=f'line 6: <nvlink target="{bus(1)}" count="12"> leads from the GPU to itself'
    ):
        read_xml(text, "vm.xml")
    with pytest.raises(FormatError, match="line 6: <xgmi target"):
        read_xml(system(cpu(gpu(0), gpu(1, xgmi([1])))))


def test_nothing_is_left_out_in_silence() -> None:
    made = read_xml(system(
        cpu(
            gpu(0, '<nvlink target="0000:77:00.0" count="2" tclass="0x030200"/>\n', '<pcilink target="1"/>\n'),
            gpu(1, '<nvlink target="0000:78:00.0" count="3" tclass="0x068001"/>\n', '<pcilink target="1"/>\n'),
            bridge(3), "<nic><collnet/></nic>\n", "<thing/>\n",
        ),
        "<other/>\n", cpu(net("eth1", 10_000), numa=1),
    ), "f.xml")  # fmt: skip
    assert sorted(made.remarks) == [
        "f.xml: line 11: <pci> without a GPU or a network card (class 0x060400) is left out",
        "f.xml: line 13: <collnet> in <nic> is not understood and left out",
        "f.xml: line 14: <thing> in <cpu> is not understood and left out",
        "f.xml: line 16: <other> in <system> is not understood and left out",
        "f.xml: line 18: <net> on a processor without a GPU is taken to be on that of rank 0",
        "f.xml: line 4: <nvlink> to a GPU that is not in the file is left out",
        "f.xml: line 8: <nvlink> to what is neither a GPU nor a switch (tclass 0x068001) is left out",
        "f.xml: lines 5, 9: <pcilink> in <gpu> is not understood and left out",
    ]
    assert Topology.from_json(made.to_json()).remarks == made.remarks


@pytest.mark.parametrize(("sm", "gbps"), [
    ("60", 20), ("70", 25), ("75", 25), ("80", 25), ("86", 14.062), ("90", 25), ("100", 50), ("103", 50),
])  # fmt: skip
def test_an_nvlink_is_as_fast_as_its_capability_says(sm: str, gbps: float) -> None:
    made = read_xml(system(cpu(gpu(0, SWITCH, facts=f'sm="{sm}"'), gpu(1, SWITCH, facts=f'sm="{sm}"'))))
    assert {k.lane_mbps for k in made.links if k.kind == "nvlink"} == {int(gbps * 1000)}


@pytest.mark.parametrize("sm", ["89", "120"])
def test_gpus_without_nvlink_have_no_rate_of_one(sm: str) -> None:
    text = system(cpu(gpu(0, SWITCH, facts=f'sm="{sm}"')))
    with pytest.raises(TopologyError, match=rf"sm {sm} \(data sheets say that it has none\).*--rate nvlink=25"):
        read_xml(text)
    assert set(nvlinks(read_xml(system(cpu(gpu(0, SWITCH, facts=f'sm="{sm}"'), gpu(1, SWITCH, facts=f'sm="{sm}"'))),
                                rates={"nvlink": 30_000})).values()) == {18 * 30_000}  # fmt: skip


FOUR = smi(*["\t".join("X" if i == j else "NV18" for j in range(4)) for i in range(4)])
PROMPT = "root@node2:~# nvidia-smi topo -m\n"


@pytest.mark.parametrize("text", [
    PROMPT + FOUR,
    f"Here it is:\n```\n{FOUR}\n```\n",
    "".join(f"> {line}\n" for line in FOUR.splitlines()),
    FOUR.replace("GPU0\tGPU1", "\x1b[4mGPU0\tGPU1", 1).replace("Affinity\n", "Affinity\x1b[0m\n", 1),
    FOUR.replace("GPU0\tGPU1", "^[[4mGPU0\tGPU1", 1).replace("Affinity\n", "Affinity^[[0m\n", 1),
    FOUR.replace("\tGPU0\tGPU1", "        GPU0\nGPU1", 1).replace("\t", "    "),
    FOUR.replace("NV18\t0-9", "\nNV18\t0-9", 1),
], ids=["prompt", "fence", "quote", "escapes", "written escapes", "wrapped header", "wrapped row"])  # fmt: skip
def test_a_copied_matrix_reads_as_the_printed_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    made, printed = load(str(tmp_path / "a.txt")), read_smi(FOUR)
    assert made.n == 4
    assert made.links == printed.links
    assert [s.name for s in made.switches] == [s.name for s in printed.switches]


def test_a_row_without_a_column_is_an_error() -> None:
    with pytest.raises(FormatError, match="a row of GPU1, and no column; copy the whole matrix"):
        read_smi("\tGPU0\tCPU Affinity\nGPU0\tX\tNV18\t0-9\nGPU1\tNV18\tX\t0-9\n")


def test_old_drivers_say_soc() -> None:
    """GPUs that only SOC joins are on two sockets, which their cores tell."""
    rows = ("X PHB SOC SOC", "PHB X SOC SOC", "SOC SOC X PHB", "SOC SOC PHB X")
    text = smi(*rows).replace("\tNUMA Affinity", "")
    cores = re.sub(r"\t0-9\t(\d)", lambda m: f"\t{int(m[1]) * 6}-{int(m[1]) * 6 + 5}", text)
    bare = re.sub(r"\t0-9\t\d", "", text).replace("\tCPU Affinity", "")
    for given in (cores, bare):
        made = read_smi(given)
        assert [s.name for s in made.switches] == ["socket 0", "socket 1"]
        assert {(k.src, made.vertex_label(k.dst)) for k in made.links if k.src < 4} == {
            (0, "socket 0"), (1, "socket 0"), (2, "socket 1"), (3, "socket 1")}  # fmt: skip


def test_a_box_of_which_few_gpus_are_visible_may_have_a_switch() -> None:
    """A DGX-2 with 4 of 16 GPUs: 3 x NV6 would fit the ports of an H100, too."""
    text = smi(*["\t".join("X" if i == j else "NV6" for j in range(4)) for i in range(4)])
    direct, switched = read_smi(text), read_smi(text, switch=True)
    assert set(nvlinks(direct).values()) == {150_000}
    assert "nvswitch" not in {s.kind for s in direct.switches}
    assert "`nvidia-smi nvlink -s` counts a GPU's links, and --switch reads it so" in direct.remarks[0]
    assert switched.switches[0].kind == "nvswitch"
    assert set(nvlinks(switched).values()) == {150_000}
    assert pack(direct, "allgather").rate == 3 * pack(switched, "allgather").rate
    assert not any("--switch" in remark for remark in switched.remarks)


@pytest.mark.parametrize("rows", [("X NV4", "NV4 X"), ("X NV2 NV1", "NV2 X NV2", "NV1 NV2 X"),
                                  ("X NV18 NV18", "NV18 X NV18", "NV18 NV18 X")])  # fmt: skip
def test_what_is_not_ambiguous_is_not_called_so(rows: tuple[str, ...]) -> None:
    assert not any("--switch" in remark for remark in read_smi(smi(*rows)).remarks)


def test_a_matrix_does_not_say_how_fast_a_link_is() -> None:
    twelve = read_smi(smi("X NV12", "NV12 X"))
    assert "25 GB/s a link assumed; of RTX 3090, A6000 and A40 one is 14.06, of B200 50" in twelve.remarks[0]
    assert set(nvlinks(twelve).values()) == {300_000}


def test_four_links_between_two_gpus_are_the_bridge_of_ga102() -> None:
    text = smi("X NV4", "NV4 X")
    read = read_smi(text)
    assert set(nvlinks(read).values()) == {4 * 14_062}
    assert (
        "is read as the bridge of RTX 3090, A6000 or A40, 14.06 GB/s a link; of two GPUs of an HGX" in read.remarks[0]
    )
    said = read_smi(text, rates={"nvlink": 14_062})
    assert said.remarks == ()
    assert set(nvlinks(said).values()) == {4 * 14_062}
    assert "25 GB/s" not in said.source


def test_a_matrix_has_network_cards_and_the_user_their_rate(tmp_path: Path) -> None:
    lines = ["\tGPU0\tGPU1\tmlx5_0\tNIC1\tCPU Affinity\tNUMA Affinity",
             "GPU0\tX\tSYS\tPIX\tSYS\t0-9\t0", "GPU1\tSYS\tX\tSYS\tNODE\t10-19\t1", "mlx5_0\tPIX\tSYS\tX"]  # fmt: skip
    text = "\n".join(lines)
    assert (
        "2 network cards (mlx5_0, NIC1) without a rate left out: say it with --rate net=GB/s"
        in read_smi(text).remarks[0]
    )
    file = tmp_path / "a.txt"
    file.write_text(text)
    made = load(str(file), rates={"net": 12_500})
    assert [(c.name, made.vertex_label(c.vertex), c.mbps) for c in made.cards] == [
        ("NIC1", "socket 1", 12_500), ("mlx5_0", "PCIe 0", 12_500)]  # fmt: skip
    assert load(f"{file}:2", rates={"net": 12_500}).n == 4


def test_rocm_smi(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text(f"$ rocm-smi --showtopo\n{ROCM}")
    made = load(str(file))
    assert rates(made, "xgmi") == dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1)], 50_000)
    assert [s.name for s in made.switches] == ["socket 0", "socket 1"]
    assert [remark.removeprefix("a: ")[:60] for remark in made.remarks] == [
        "the text does not say which GPUs these are, nor how many lin",
        "XGMI over several hops, as between GPUs 0 and 2, is no direc",
    ]
    assert set(rates(load(str(file), rates={"xgmi": 64_000}), "xgmi").values()) == {64_000}
    assert read_rocm(ROCM.replace("XGMI", "PCIE")).kinds() == ("host", "pcie")


@pytest.mark.parametrize(("text", "said"), [
    (ROCM.replace("GPU1   XGMI         0            XGMI\n", ""), "row GPU1 has 0 cells, there are 3 GPUs"),
    (ROCM[: ROCM.index("Link Type between") + len("Link Type between")], "0 GPUs in the header"),
    (ROCM.replace("XGMI         0            XGMI", "XGMI 0 WIRE"), "link type 'WIRE'; expected XGMI or PCIE"),
    (ROCM.replace("GPU0         GPU1         GPU2\nGPU0   0            XGMI", ""), "0 GPUs|cells"),
])  # fmt: skip
def test_a_text_of_rocm_smi_that_cannot_be_read_says_where(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read_rocm(text)


def test_the_switch_flag_is_for_one_kind_of_text(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for text in (system(cpu(gpu(0))), ROCM):
        file.write_text(text)
        with pytest.raises(TopologyError, match="--switch is for the text of `nvidia-smi topo -m`"):
            load(str(file), switch=True)
    with pytest.raises(TopologyError, match="--switch is for the text"):
        load("dgx-1v", switch=True)
    with pytest.raises(FormatError, match="no NV# that could lead to a switch"):
        read_smi(smi("X SYS", "SYS X"), switch=True)


def test_a_large_file_is_refused_before_it_is_expanded() -> None:
    """XML and JSON of 60 MiB took 5 s and 1.5 GB."""
    with Effort() as effort:
        with pytest.raises(FormatError, match=f"more than {BUDGET.elements} elements; a machine of 256 GPUs has fewer"):
            read_elements("<a>" + "<b/>" * (BUDGET.elements + 1), "f", BUDGET)
        with pytest.raises(FormatError, match="KiB of XML; a machine of 256 GPUs takes less than 4 MiB"):
            read_xml(b" " * (BUDGET.nbytes + 1))
        with pytest.raises(FormatError, match="KiB of text; the matrix of 255 GPUs has less than 1024"):
            read_smi("GPU0" + " " * MOST_SMI_BYTES)
        with pytest.raises(FormatError, match="KiB of text; the matrices of 64 GPUs"):
            read_rocm(" " * (MOST_ROCM_BYTES + 1))
        link = '{"src": 0, "dst": 1, "kind": "net", "lanes": 1, "lane_mbps": 1}'
        many = f'{{"format": "blinkmpi.topology", "links": [{", ".join([link] * (1 << 19))}]}}'
        with pytest.raises(FormatError, match=r"f: \d+ KiB with 524289 objects; 65536 devices with their links have"):
            Topology.from_json(many, "f")
        with pytest.raises(FormatError, match="have at most 48 MiB"):
            Topology.from_json('{"format": [' + "1," * ((1 << 22) + 1) + "1]}")
        with pytest.raises(FormatError, match="have at most 48 MiB"):
            Topology.from_json(" " * ((48 << 20) + 1))
    assert effort.ours < 300_000
