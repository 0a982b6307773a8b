"""Other tools' descriptions of a machine: NCCL's topology XML in and out, the text of ``nvidia-smi topo -m``."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from blinkmpi.errors import FormatError, TopologyError
from blinkmpi.topology import Topology, from_gpus, load, machine, names
from blinkmpi.topology.importers import on_gpus_of
from blinkmpi.topology.nccl import processor, read_xml, write_xml
from blinkmpi.topology.nvidia_smi import read_smi
from blinkmpi.trees import COLLECTIVES, pack
from tests.unit.topology.test_gpu_topology import nvlinks
from tests.unit.topology.test_probe import DATA, recorded

XML, SMI = DATA / "nccl-topo-h200x8.xml", DATA / "nvidia-smi-topo-m-h200x8.txt"
XEON = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\n\nprocessor\t: 1\n"


@pytest.mark.parametrize("path", [XML, SMI], ids=["xml", "smi"])
def test_an_hgx_read_from_another_tool_plans_as_the_catalogues(path: Path) -> None:
    made = load(str(path))
    assert path.name in made.source
    assert "PCIe assumed generation 3" in made.source, "neither tells the width"
    for collective in COLLECTIVES:
        assert pack(made, collective) == pack(machine("hgx-h200"), collective)


@pytest.mark.parametrize("name", ["nvml-h200x8", "nvml-dgx-1p", "nvml-dgx-1v", "nvml-pcie-8", "nvml-gb200x4"])
def test_what_is_written_for_nccl_reads_as_the_same_machine(name: str) -> None:
    made = from_gpus(recorded(name))
    again = read_xml(write_xml(made))
    assert again.fingerprint == made.fingerprint
    assert [d.bus for d in again.devices] == [d.bus for d in made.devices]


def test_what_is_written_is_what_nccl_dumps() -> None:
    """Element by element against NCCL's own dump; NCCL detects what we leave out (cores, vendors, network)."""
    xml = write_xml(from_gpus(recorded("nvml-h200x8")), processor(XEON, "x86_64"))
    ours, theirs = ET.fromstring(xml), ET.parse(XML).getroot()
    assert (ours.tag, ours.attrib) == (theirs.tag, theirs.attrib)
    for path in ("cpu", "cpu/pci", "cpu/pci/gpu", "cpu/pci/gpu/nvlink"):
        pairs = list(zip(ours.findall(path), theirs.findall(path), strict=True))
        assert pairs
        for one, other in pairs:
            shared = {k: v for k, v in other.attrib.items() if k in one.attrib and k != "link_width"}
            assert {k: v for k, v in one.attrib.items() if k != "link_width"} == shared


def test_every_socket_has_its_processor() -> None:
    """NCCL 2.28 looks at the socket of its own GPU alone, and ends with an error where another has none."""
    parts = machine("dgx-1v").subset([1, 4, 5, 6])
    told = ET.fromstring(
        write_xml(on_gpus_of(parts, from_gpus(recorded("nvml-h200x8")[:4])), processor(XEON, "x86_64"))
    )
    assert [cpu.attrib for cpu in told.findall("cpu")] == [
        {"numaid": n, "arch": "x86_64", "vendor": "GenuineIntel", "familyid": "6", "modelid": "207"} for n in "01"
    ]
    epyc = XEON.replace("GenuineIntel", "AuthenticAMD").replace("family\t: 6", "family\t: 23").replace("207", "49")
    assert processor(epyc, "x86_64") == {
        "arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "143", "modelid": "49",
    }  # fmt: skip
    assert processor("", "aarch64") == {"arch": "arm64"}
    assert set(processor()) >= {"arch"}


def test_nccl_can_be_told_that_a_box_is_another() -> None:
    """KERNELS.md's experiment: DGX-1's NVLinks between the PCI ids of H200s."""
    told = on_gpus_of(machine("dgx-1v"), from_gpus(recorded("nvml-h200x8")))
    read = read_xml(write_xml(told))
    assert {pair: mbps // 25_000 for pair, mbps in nvlinks(read).items()} == {
        pair: mbps // 25_000 for pair, mbps in nvlinks(machine("dgx-1v")).items()
    }
    assert [d.bus for d in read.devices] == [f.bus for f in recorded("nvml-h200x8")]
    assert [s.kind for s in read.switches] == [s.kind for s in machine("dgx-1v").switches]
    with pytest.raises(TopologyError, match="needs 16 GPUs"):
        on_gpus_of(machine("dgx-2"), from_gpus(recorded("nvml-h200x8")))


@pytest.mark.parametrize(
    ("spec", "said"),
    [("dgx-1v", "without a PCI id.*--on FILE"), ("dgx-a100:2", "one node"), ("cpu:2", "GPUs of one node")],
)
def test_what_nccl_cannot_be_told_is_refused(spec: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        write_xml(machine(spec))


@pytest.mark.parametrize(
    "name", [n for n in names() if n != "cpu" and "xgmi" not in machine(n).kinds() and machine(n).n <= 8]
)
def test_every_box_of_the_catalogue_can_be_told(name: str) -> None:
    """With stand-ins for PCI ids: NVLinks and PCIe switches come back as they were."""
    box, real = machine(name), from_gpus(recorded("nvml-h200x8"))
    read = read_xml(write_xml(on_gpus_of(box, real)))
    lanes = {(k.src, k.dst): k.lanes for k in box.links if k.kind == "nvlink"}
    assert {(k.src, k.dst): k.lanes for k in read.links if k.kind == "nvlink"} == lanes
    assert sum(s.kind == "pcie" for s in read.switches) == sum(s.kind == "pcie" for s in box.switches)


def test_a_subset_whose_switch_lost_its_socket_can_be_told() -> None:
    pair = from_gpus(recorded("nvml-pcie-8")).subset([0, 1])
    assert [s.kind for s in pair.switches] == ["pcie"]
    again = read_xml(write_xml(pair))
    assert [s.kind for s in again.switches] == ["pcie"]
    assert [k.mbps for k in again.links] == [k.mbps for k in pair.links]


GPU = '<pci busid="0000:01:00.0"><gpu dev="0" sm="90" rank="0">{}</gpu></pci>'


@pytest.mark.parametrize(("text", "said"), [
    ("<system", "not XML"),
    ("<graphs/>", "expected <system> outside, got <graphs>"),
    ("<system/>", "no <gpu>"),
    (f"<system><cpu>{GPU}</cpu></system>", "<cpu> has no numaid; add it"),
    ('<system><cpu numaid="0"><pci class="0x03"/></cpu></system>', '<pci class="0x03"> has no busid'),
    ('<system><cpu numaid="0"><pci busid="1"/></cpu></system>', "'1' is no PCI bus id"),
    ('<system><cpu numaid="zero"/></system>', "numaid='zero': expected a whole number"),
    (f'<system><cpu numaid="0">{GPU.format("<nvlink count=" + chr(34) + "1" + chr(34) + "/>")}</cpu></system>',
     "no target"),
])  # fmt: skip
def test_a_bad_file_of_nccl_names_element_and_attribute(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.xml"
    file.write_text(text)
    with pytest.raises(FormatError, match=said):
        load(str(file))


def smi(*rows: str) -> str:
    head = "\t" + "\t".join(f"GPU{i}" for i in range(len(rows))) + "\tCPU Affinity\tNUMA Affinity\n"
    return head + "\n".join(f"GPU{i}\t" + "\t".join(row.split()) + f"\t0-9\t{i // 2}" for i, row in enumerate(rows))


def test_smi_of_direct_links() -> None:
    made = read_smi(smi("X NV2 NV1 SYS", "NV2 X SYS NV1", "NV1 SYS X NV2", "SYS NV1 NV2 X"))
    found = {(k.src, k.dst): k.lanes for k in made.links if k.kind == "nvlink"}
    assert found == {(0, 1): 2, (1, 0): 2, (0, 2): 1, (2, 0): 1, (1, 3): 1, (3, 1): 1, (2, 3): 2, (3, 2): 2}
    assert [s.name for s in made.switches] == ["socket 0", "socket 1"]


def test_smi_of_a_switch_is_what_no_gpu_has_ports_for() -> None:
    direct = read_smi(smi("X NV4 NV4 NV4", "NV4 X NV4 NV4", "NV4 NV4 X NV4", "NV4 NV4 NV4 X"))
    assert "nvswitch" not in {s.kind for s in direct.switches}, "HGX A100 4-GPU: 12 ports, all direct"
    four = read_smi(smi(*["\t".join("X" if i == j else "NV18" for j in range(4)) for i in range(4)]))
    assert [s.kind for s in four.switches][:1] == ["nvswitch"]
    assert set(nvlinks(four).values()) == {450_000}


def test_smi_of_pcie_switches() -> None:
    made = read_smi(smi("X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PHB", "SYS SYS PHB X"))
    assert made.kinds() == ("host", "pcie")
    near = {(k.src, made.vertex_label(k.dst)) for k in made.links if k.kind == "pcie" and k.src < 4}
    assert near == {(0, "PCIe 0"), (1, "PCIe 0"), (2, "socket 1"), (3, "socket 1")}


@pytest.mark.parametrize(("text", "said"), [
    ("hello", "no line begins with GPU0"),
    (smi("X NV2", "NV2 X").replace("GPU1\tNV2", "CPU1\tNV2"), "no row of GPU1"),
    (smi("X NV?", "NV2 X"), r"row GPU0, column GPU1: 'NV\?'"),
    ("\tGPU0\tGPU1\nGPU0\tX\nGPU1\tX\tX\n", "row GPU0, column GPU1: ''"),
])  # fmt: skip
def test_a_matrix_that_cannot_be_read_says_where(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read_smi(text)


def test_the_content_decides_and_not_the_name(tmp_path: Path) -> None:
    for source in (XML, SMI):
        file = tmp_path / "machine"
        file.write_bytes(source.read_bytes())
        assert load(str(file)).n == 8
    file.write_text(machine("dgx-1v").to_json())
    assert isinstance(load(str(file)), Topology)
    with pytest.raises(TopologyError, match="cannot read topology file"):
        load(str(tmp_path / "absent.xml"))
