"""Switches that reduce and multicast: which machines have them, how files say it, and what is refused."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from blinkmpi.errors import FormatError, TopologyError
from blinkmpi.topology.diff import differences
from blinkmpi.topology.importers import load, modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Switch, Topology

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.mark.parametrize(("name", "sharp"), [
    ("dgx-1v", False), ("dgx-2", False), ("dgx-a100", False), ("mi300x", False), ("pcie-8", False), ("cpu:4", False),
    ("hgx-h100", True), ("hgx-h200", True), ("b200", True), ("gb200-nvl72", True),
])  # fmt: skip
def test_nvswitches_reduce_from_the_third_generation_on(name: str, sharp: bool) -> None:
    found = machine(name)
    assert bool(found.sharp) == sharp
    assert all(found.switches[v - found.n].kind == "nvswitch" for v in found.sharp)


def test_a_network_reduces_only_where_one_says_so() -> None:
    assert len(machine("hgx-h100:2").sharp) == 2
    both = modify(machine("hgx-h100:2"), sharp="nvswitch, net")
    assert [both.switches[v - both.n].kind for v in both.sharp] == ["nvswitch", "nvswitch", "net"]
    assert [both.switches[v - both.n].kind for v in modify(both, sharp="net").sharp] == ["net"]
    assert modify(both, sharp="none").sharp == ()


def test_parts_and_copies_of_a_machine_keep_what_their_switches_can_do() -> None:
    assert machine("hgx-h100").subset([0, 3, 5]).sharp == (3,)
    assert machine("hgx-h100:3").subset(range(8)).sharp == (8,)
    probed = load(str(DATA / "nccl-topo-h200x8.xml"))
    assert len(probed.sharp) == 1
    assert len(probed.boxes(3).sharp) == 3


@pytest.mark.parametrize("file", ["nccl-topo-h200x8.xml", "nvidia-smi-topo-m-h200x8.txt"])
def test_machines_that_others_describe_have_it_by_the_generation_of_their_links(file: str) -> None:
    assert len(load(str(DATA / file)).sharp) == 1


def test_a_file_says_it_of_a_switch_and_older_files_read_as_before() -> None:
    t = machine("hgx-h100")
    assert Topology.from_json(t.to_json()) == t
    old = json.loads(t.to_json())
    assert old["switches"] == [{"kind": "nvswitch", "node": 0, "name": "NVSwitch", "sharp": True}]
    del old["switches"][0]["sharp"]
    read = Topology.from_json(json.dumps(old))
    assert read.sharp == ()
    assert read == modify(t, sharp="none")
    assert "sharp" not in machine("dgx-a100").to_json()  # so that files of other machines are as they were


def test_plans_of_jobs_do_not_depend_on_it_so_the_fingerprint_does_not() -> None:
    assert machine("hgx-h100").fingerprint == modify(machine("hgx-h100"), sharp="none").fingerprint


def test_machines_that_differ_in_it_alone_differ() -> None:
    one, other = modify(machine("hgx-h100"), sharp="none"), machine("hgx-h100")
    assert [(d.what, d.one, d.other) for d in differences(one, other)] == [("sums in NVSwitch", "none", "SHARP")]


@pytest.mark.parametrize("kind", ["pcie", "host", "memory"])
def test_a_switch_without_such_hardware_is_refused_by_its_place_and_kind(kind: str) -> None:
    t = machine("hgx-h100")
    text = t.to_json().replace('"kind": "nvswitch"', f'"kind": "{kind}"')
    with pytest.raises(TopologyError, match=rf"switches\[0\] of kind {kind} is sharp; expected kind nvswitch or net"):
        Topology.from_json(text)
    with pytest.raises(TopologyError, match=r"switches\[0\]"):
        replace(t, switches=(Switch(kind, 0, "", True),)).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["3", '"yes"', "null", '["reduce"]'])
def test_a_value_that_is_no_truth_is_refused_by_its_path(value: str) -> None:
    text = machine("hgx-h100").to_json().replace('"sharp": true', f'"sharp": {value}')
    with pytest.raises(FormatError, match=r"switches\[0\]\.sharp|switches\[\.\.\.\]\.sharp"):
        Topology.from_json(text)


@pytest.mark.parametrize(("name", "kinds"), [("hgx-h100", "net"), ("dgx-1v", "nvswitch"), ("dgx-1v", "pcie"),
                                             ("hgx-h100", "NVSwitch"), ("hgx-h100", "")])  # fmt: skip
def test_kinds_that_a_machine_has_not_or_that_cannot_are_refused_with_those_that_can(name: str, kinds: str) -> None:
    with pytest.raises(TopologyError, match=r"no switch of kind .* of its kinds of switches these can: "):
        modify(machine(name), sharp=kinds)
