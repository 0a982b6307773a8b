"""Probing: NVML's answers, recorded or from a stub library, and /sys become facts or named reasons."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.errors import FormatError, TopologyError
from blinkmpi.topology.gpu import GpuFacts, Unknown, bus_id, facts_of, known
from blinkmpi.topology.probe import Nvml, Recording, probe, probe_all, sys_report

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data"
RECORDED = ("nvml-h200x8", "nvml-dgx-1p", "nvml-dgx-1v", "nvml-pcie-8", "nvml-gb200x4", "one-dead-nvlink")
LOST = "NVMLError_LibraryNotFound"


def recording(name: str) -> Recording:
    """A machine of tests/data."""
    return Recording(json.loads((DATA / f"{name}.json").read_text()))


def recorded(name: str) -> tuple[GpuFacts, ...]:
    """The facts of all its GPUs."""
    return probe_all(source=recording(name))


@pytest.mark.parametrize("name", [*RECORDED, "driver-without-nvml"])
def test_json_keeps_every_fact_and_every_reason(name: str) -> None:
    for facts in recorded(name):
        assert GpuFacts.from_json(facts.to_json()) == facts
        numbers = {f: getattr(facts, f) for f in facts.__struct_fields__ if f not in ("index", "numa")}
        assert not [f for f, value in numbers.items() if value == "" or (type(value) is int and value == 0)]


def test_an_h200_behind_hidden_switches() -> None:
    facts = recorded("nvml-h200x8")[0]
    assert (facts.bus, facts.name, facts.mig, facts.fabric) == ("0000:00:06.0", "NVIDIA H200", False, "completed")
    assert (facts.pcie_gen, facts.pcie_width, facts.capability) == (5, 16, (9, 0))
    links = known(facts.nvlinks)
    assert links is not None
    assert [(k.number, k.active, k.version, k.remote, k.bus) for k in links] == [
        (i, True, "4.0", "hidden switch", "") for i in range(18)
    ], "ports past the last, which NVML refuses with InvalidArgument, are none"
    assert facts.path == facts.numa == Unknown("not in the report")


def test_a_gb200_has_18_links_though_nvml_counts_to_36() -> None:
    for facts in recorded("nvml-gb200x4"):
        links = known(facts.nvlinks)
        assert links is not None
        assert len(links) == 18
        assert {(k.version, k.remote) for k in links} == {("5.0", "hidden switch")}


def test_a_v100_names_its_peers() -> None:
    facts = recorded("nvml-dgx-1v")[0]
    links, peers = known(facts.nvlinks), known(facts.peers)
    assert links is not None
    assert peers is not None
    assert [k.bus for k in links] == [
        "0000:07:00.0", "0000:0a:00.0", "0000:0b:00.0", "0000:0b:00.0", "0000:85:00.0", "0000:85:00.0",
    ]  # fmt: skip
    assert {k.remote for k in links} == {"gpu"}
    assert {p.bus: p.nvlink for p in peers}["0000:86:00.0"] == "not supported"
    assert {p.bus: p.ancestor for p in peers}["0000:07:00.0"] == "PIX"
    assert facts.confidential == Unknown("NVMLError_FunctionNotFound: Function Not Found")


def test_a_gpu_without_nvlink_has_none_which_is_a_fact() -> None:
    assert {facts.nvlinks for facts in recorded("nvml-pcie-8")} == {()}
    assert {facts.pcie_gen for facts in recorded("nvml-pcie-8")} == {4}, "idle links go down to generation 1"


def test_a_lost_gpu_gives_its_reason() -> None:
    error = {"nvml_error": "NVMLError_GpuIsLost: GPU is lost"}
    facts = facts_of({"nvlinks": [{"link": 0, "state": error}], "pci": {"busId": "00000000:01:00.0"}})
    assert facts.nvlinks == Unknown("NVMLError_GpuIsLost: GPU is lost")
    some = facts_of({"nvlinks": [{"link": 0, "state": 1}, {"link": 1, "state": error}]}).nvlinks
    assert [k.active for k in known(some) or ()] == [True, Unknown("NVMLError_GpuIsLost: GPU is lost")]


@pytest.mark.parametrize(("kind", "pci", "expected"), [
    (2, "FFFFFFFF:FF:FF.0", ("hidden switch", "")),
    (2, "00000000:00:00.0", ("hidden switch", "")),
    (255, "00000000:00:00.0", ("hidden switch", "")),
    (255, "", ("hidden switch", "")),
    (None, None, ("hidden switch", "")),
    (2, "00000000:C1:00.0", ("switch", "0000:c1:00.0")),
    (0, "00000000:0F:00.0", ("gpu", "0000:0f:00.0")),
    (0, "00000000:FF:00.0", ("gpu", "0000:ff:00.0")),
    (1, "00000004:04:00.1", ("npu", "0004:04:00.1")),
    (0, "00000000:00:00.0", (Unknown("NVML says gpu and no PCI id"), "")),
    (255, "00000000:0A:00.0", (Unknown("NVML does not say what is at 0000:0a:00.0"), "0000:0a:00.0")),
])  # fmt: skip
def test_what_an_nvlink_leads_to(kind: int | None, pci: str | None, expected: tuple[Any, str]) -> None:
    refused = {"nvml_error": "NVMLError_NotSupported: Not Supported"}
    link = {"link": 0, "state": 1, "version": 6, "remote_type": refused if kind is None else kind,
            "remote_pci": refused if pci is None else {"busId": pci}}  # fmt: skip
    (found,) = known(facts_of({"nvlinks": [link]}).nvlinks) or ()
    assert (found.remote, found.bus) == expected


def test_numbers_that_nobody_knows_yet_are_reasons() -> None:
    link = {"link": 0, "state": 9, "version": 77, "remote_type": 2, "remote_pci": {"busId": ""}}
    facts = facts_of({"nvlinks": [link], "fabric": {"state": 42}, "p2p": {"1": {"read": 6, "nvlink": 6}}})
    (found,) = known(facts.nvlinks) or ()
    assert found.active == Unknown("NVML says state 9")
    assert found.version == Unknown("NVML says NVLink version 77")
    assert facts.fabric == Unknown("NVML says fabric state 42")
    (peer,) = known(facts.peers) or ()
    assert peer.nvlink == Unknown("NVML says P2P status 6")


# ---------------------------------------------------------------- which GPU


@pytest.mark.parametrize("text", ["0000:3D:00.0", "00000000:3D:00.0", "0000:3d:00.0", "3d:00.0", " 0000:3D:00 "])
def test_bus_ids_of_all_dialects(text: str) -> None:
    assert bus_id(text) == "0000:3d:00.0"


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_a_bus_id_is_its_own_form(domain: int, bus: int, device: int, function: int) -> None:
    text = bus_id(f"{domain:08X}:{bus:02X}:{device:02X}.{function}")
    assert bus_id(text) == text
    assert int(text.partition(":")[0], 16) == domain


@pytest.mark.parametrize("text", ["", "0", "0000:3D:00.9", "GPU-1", "0000-3D-00.0"])
def test_what_is_no_bus_id_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"expected one such as 0000:3d:00\.0"):
        bus_id(text)


def test_a_gpu_is_found_by_what_cuda_calls_it_and_never_by_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")  # CUDA's device 0 is NVML's 5
    source = recording("nvml-h200x8")
    by_bus = probe("0000:00:0B.0", source=source)
    assert by_bus.index == 5
    assert probe(None, "GPU-00000000-0000-0000-0000-000000000005", source=source) == by_bus
    with pytest.raises(TopologyError, match="PCI bus id or its UUID"):
        probe(None, None, source=source)


def test_a_gpu_that_nvml_does_not_show_has_reasons_for_facts() -> None:
    facts = probe("0000:99:00.0", source=recording("nvml-h200x8"))
    assert facts.bus == "0000:99:00.0"
    assert isinstance(facts.nvlinks, Unknown)
    assert facts.nvlinks.reason.startswith("NVMLError_NotFound")


def test_without_a_driver_there_is_no_gpu_and_one_that_is_asked_for_has_reasons() -> None:
    assert recorded("no-driver") == ()
    facts = probe("0000:06:00.0", source=recording("no-driver"))
    assert facts.bus == "0000:06:00.0"
    for fact in (facts.name, facts.nvlinks, facts.mig, facts.fabric, facts.driver):
        assert isinstance(fact, Unknown)
        assert fact.reason.startswith(LOST)


def test_a_driver_without_nvml_leaves_what_sys_says() -> None:
    facts = recorded("driver-without-nvml")[0]
    assert isinstance(facts.nvlinks, Unknown)
    assert [h.bus for h in known(facts.path) or ()] == ["0000:00:02.0", "0000:04:00.0", "0000:05:04.0"]
    assert facts.numa == 0


# ---------------------------------------------------------------- /sys


def made_sys(root: Path, devices: dict[str, dict[str, str]], classes: dict[str, str]) -> Path:
    """A /sys of devices by their path under /sys/devices, and network classes that point at some."""
    links = root / "bus/pci/devices"
    links.mkdir(parents=True)
    for place, files in devices.items():
        folder = root / "devices" / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")
        (links / folder.name).symlink_to(folder)
    for name, place in classes.items():
        card = root / "class" / name
        card.mkdir(parents=True)
        if place:
            (card / "device").symlink_to(root / "devices" / place)
    return root


PLX = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
LINK = {"max_link_speed": "16.0 GT/s PCIe", "current_link_width": "16", "max_link_width": "16"}


def test_sys_tells_the_way_to_the_cpu_and_the_cards_on_it(tmp_path: Path) -> None:
    card, far = f"{PLX}/0000:3c:08.0/0000:3e:00.0", "pci0000:80/0000:80:01.0/0000:81:00.0"
    root = made_sys(
        tmp_path,
        {
            "pci0000:3a/0000:3a:00.0": LINK,
            PLX: LINK,
            f"{PLX}/0000:3c:04.0": LINK,
            f"{PLX}/0000:3c:04.0/0000:3d:00.0": {**LINK, "current_link_width": "8", "numa_node": "1"},
            card: {"numa_node": "1"},
            far: {"numa_node": "0"},
        },
        {"infiniband/mlx5_0": card, "infiniband/mlx5_9": far, "net/ib0": card, "net/lo": ""},
    )
    (root / "class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (root / "class/infiniband/mlx5_0/ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
    facts = facts_of({"sys": sys_report("0000:3d:00.0", root), "nvml_error": f"{LOST}: gone"})
    assert [(h.bus, h.gen, h.width) for h in known(facts.path) or ()] == [
        ("0000:3a:00.0", 4, 16), ("0000:3b:00.0", 4, 16), ("0000:3c:04.0", 4, 16),
    ]  # fmt: skip
    assert (facts.numa, facts.pcie_gen, facts.pcie_width, facts.pcie_width_max) == (1, 4, 8, 16)
    assert [(n.name, n.distance, n.mbps) for n in known(facts.nics) or ()] == [("mlx5_0", "PIX", 12_500)]


@pytest.mark.parametrize(("card", "numa", "distance"), [
    (f"{PLX}/0000:3c:08.0/0000:3e:00.0", "1", "PIX"),
    (f"{PLX}/0000:3c:08.0/0000:3e:00.0/0000:3f:00.0/0000:40:00.0", "1", "PXB"),
    ("pci0000:3a/0000:3a:02.0/0000:50:00.0", "1", "PHB"),
    ("pci0000:60/0000:60:00.0/0000:61:00.0", "1", "NODE"),
    ("pci0000:60/0000:60:00.0/0000:61:00.0", "0", "SYS"),
    ("pci0000:60/0000:60:00.0/0000:61:00.0", "-1", "SYS"),
])  # fmt: skip
def test_distances_are_nvidia_smis(tmp_path: Path, card: str, numa: str, distance: str) -> None:
    gpu = f"{PLX}/0000:3c:04.0/0000:3d:00.0"
    root = made_sys(tmp_path, {gpu: {"numa_node": "1"}, card: {"numa_node": numa}}, {"net/eth0": card})
    report = sys_report("0000:3d:00.0", root)
    assert [n["distance"] for n in report["nics"]] == [distance]


def test_a_virtual_machine_says_little_and_that_is_said(tmp_path: Path) -> None:
    quiet = {"numa_node": "-1", "max_link_speed": "Unknown", "current_link_width": "0"}
    root = made_sys(
        tmp_path,
        {"pci0000:00/0000:00:06.0": quiet, "pci0000:00/0000:00:03.0": {}},
        {"net/eth0": "pci0000:00/0000:00:03.0/virtio1"},
    )
    facts = facts_of({"sys": sys_report("0000:00:06.0", root)})
    assert facts.path == ()
    assert facts.numa == Unknown("the system names no NUMA node (-1)")
    assert isinstance(facts.pcie_gen, Unknown)
    assert "cannot read it" in facts.pcie_gen.reason
    assert isinstance(facts.pcie_width, Unknown)
    assert "the system says 0" in facts.pcie_width.reason
    absent = sys_report("0000:00:07.0", root)
    assert "0000:00:07.0: No such file" in absent["error"]


# ---------------------------------------------------------------- a real library, if a small one


ASK = """
from blinkmpi.topology.probe import Nvml, probe
print(Nvml().why_not())
print(probe("0000:3D:00.0").to_json())
print("---")
print(probe("0000:77:00.0").to_json())
"""


def answers_of(env: dict[str, str]) -> tuple[str, GpuFacts, GpuFacts]:
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, env={**os.environ, **env}, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    why, _, rest = done.stdout.partition("\n")
    one, other = rest.split("---\n")
    return why, GpuFacts.from_json(one), GpuFacts.from_json(other)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_nvml_is_asked_rightly_through_a_stub_library(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, DATA / "nvml-stub.c"], check=True)
    why, facts, absent = answers_of({"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1"})
    assert why == ""
    assert (facts.bus, facts.index, facts.name) == ("0000:3d:00.0", 1, "Stub GPU")
    links = known(facts.nvlinks)
    assert links is not None
    assert [(k.active, k.version, k.remote) for k in links] == [
        (True, "4.0", "hidden switch"), (False, "4.0", "hidden switch"), (True, "4.0", "hidden switch"),
    ]  # fmt: skip
    for fact in (facts.uuid, facts.driver, facts.mig, facts.fabric, facts.confidential):
        assert isinstance(fact, Unknown)
        assert fact.reason.startswith("NVMLError_FunctionNotFound")
    assert isinstance(absent.nvlinks, Unknown)
    assert absent.nvlinks.reason.startswith("NVMLError_NotFound")


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_nvml_says_who_computes_on_a_gpu_or_why_not(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, DATA / "nvml-stub.c"], check=True)
    ask = "from blinkmpi.topology.probe import Nvml; print(Nvml().users())"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    refused = "Unknown(reason='NVMLError_NotSupported: Not Supported')"
    assert done.stdout == f"{{'0000:1a:00.0': {refused}, '0000:3d:00.0': 2}}\n", done.stderr
    assert Nvml().users() == {} or not Nvml().why_not()


def test_a_library_that_cannot_be_loaded_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("this is no library")
    why, facts, _ = answers_of({"LD_LIBRARY_PATH": str(tmp_path)})
    assert why.startswith(LOST)
    assert isinstance(facts.name, Unknown)
    assert facts.name.reason == why


def test_without_nvidia_ml_py_the_reason_is_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml().why_not().startswith("NotInstalled")
    assert "pip install nvidia-ml-py" in Nvml().why_not()
    assert Nvml().buses() == []
