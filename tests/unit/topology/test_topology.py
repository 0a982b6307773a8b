"""Topology values: JSON, checks, subsets and changes, the texts of the command line, the picture."""

import io
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from blinkmpi.errors import FormatError, TopologyError
from blinkmpi.topology import Device, Link, Switch, Topology, load, machine, modify, names, parse_gpus
from blinkmpi.topology.model import LinkKind, NetworkCard
from blinkmpi.topology.show import render


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any consistent machine, connected or not."""
    nodes = draw(st.integers(1, 3))
    node = st.integers(0, nodes - 1)
    device, switch = st.sampled_from(("gpu", "cpu")), st.sampled_from(("nvswitch", "pcie", "host", "memory", "net"))
    devices = draw(st.lists(st.builds(Device, device, node, st.integers(0, 9)), min_size=1, max_size=6))
    switches = draw(st.lists(st.builds(Switch, switch, node), max_size=4))
    vertex = st.integers(0, len(devices) + len(switches) - 1)
    kind: st.SearchStrategy[LinkKind] = st.sampled_from(("nvlink", "xgmi", "pcie", "host", "memory", "net"))
    ends = st.tuples(vertex, vertex, kind).filter(lambda e: e[0] != e[1])
    links = [
        Link(a, b, k, draw(st.integers(1, 8)), draw(st.integers(1, 10**6)))
        for a, b, k in (draw(st.lists(ends, unique=True, max_size=12)) if len(devices) + len(switches) > 1 else [])
    ]
    name = draw(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=5))
    return Topology(name, tuple(devices), tuple(switches), tuple(links)).check()


@given(topologies())
def test_json_keeps_everything(made: Topology) -> None:
    again = Topology.from_json(made.to_json())
    assert again == made
    assert again.fingerprint == made.fingerprint
    assert again.to_json() == made.to_json()


@pytest.mark.slow
@given(topologies(), st.randoms())
def test_a_subset_keeps_the_direct_links_between_its_devices(made: Topology, chance: object) -> None:
    order = list(range(made.n))
    chance.shuffle(order)  # type: ignore[attr-defined]
    chosen = order[: max(1, made.n // 2)]
    part = made.subset(chosen).check()
    assert part.devices == tuple(made.devices[i] for i in chosen)
    new = {old: at for at, old in enumerate(chosen)}
    direct = {(new[k.src], new[k.dst], k.kind, k.mbps) for k in made.links if k.src in new and k.dst in new}
    assert {(k.src, k.dst, k.kind, k.mbps) for k in part.links if max(k.src, k.dst) < part.n} == direct
    for j, switch in enumerate(part.switches):
        near = {v for k in part.links for v in (k.src, k.dst) if part.n + j in (k.src, k.dst)} - {part.n + j}
        assert len(near) >= (1 if switch.kind == "memory" else 2), "a switch that leads nowhere"


@pytest.mark.slow
@given(topologies())
def test_every_machine_can_be_shown(made: Topology) -> None:
    assert text_of(made)


def text_of(made: Topology, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render(made))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_subset_numbers_anew_in_the_given_order() -> None:
    part = machine("dgx-1v").subset([4, 1, 6, 5])
    assert [d.index for d in part.devices] == [4, 1, 6, 5]
    lanes = {(k.src, k.dst): k.lanes for k in part.links if k.kind == "nvlink"}
    assert lanes == {
        (0, 2): 1, (2, 0): 1, (0, 3): 1, (3, 0): 1, (1, 3): 2, (3, 1): 2, (2, 3): 2, (3, 2): 2,
    }  # fmt: skip
    assert [s.name for s in part.switches] == ["PLX 0", "PLX 2", "PLX 3", "socket 0", "socket 1"]


def test_a_subset_in_one_box_leaves_the_other_boxes_and_the_network() -> None:
    part = machine("dgx-1v:3").subset(range(8, 16))
    assert part.links == machine("dgx-1v").links
    assert {s.node for s in part.switches} == {1}
    apart = machine("dgx-1v:3").subset([0, 8])
    assert "net" in apart.kinds()
    assert {s.node for s in apart.switches} == {0, 1, -1}


@pytest.mark.parametrize("chosen", [[], [0, 0], [8], [-1]])
def test_an_impossible_subset_is_refused(chosen: list[int]) -> None:
    with pytest.raises(TopologyError, match=r"0\.\.7"):
        machine("dgx-1v").subset(chosen)


def test_dropping_a_link_takes_both_directions() -> None:
    full = machine("dgx-1v")
    less = full.drop_link(3, 0)
    assert set(full.links) - set(less.links) == {k for k in full.links if {k.src, k.dst} == {0, 3}}
    assert less.fingerprint != full.fingerprint
    with pytest.raises(TopologyError, match="no link between 0 and 7"):
        full.drop_link(0, 7)


def test_scaling_touches_one_kind() -> None:
    full = machine("dgx-1v")
    half = full.scale("pcie", Fraction(1, 2))
    assert [(k.lane_mbps * 2 if k.kind == "pcie" else k.lane_mbps) for k in half.links] == [
        k.lane_mbps for k in full.links
    ]
    with pytest.raises(TopologyError, match="no link of kind 'xgmi'; it has host, nvlink, pcie"):
        full.scale("xgmi", 2)
    with pytest.raises(TopologyError, match="more than 0"):
        full.scale("pcie", 0)


def test_the_fingerprint_sees_links_but_not_names() -> None:
    full = machine("dgx-1v")
    renamed = replace(full, name="x", source="y", devices=tuple(replace(d, uuid="u", host="h") for d in full.devices))
    assert renamed.fingerprint == full.fingerprint
    assert replace(full, links=full.links[::-1]).fingerprint == full.fingerprint
    alike: dict[str, list[str]] = {}
    for name in names():
        alike.setdefault(machine(name).fingerprint, []).append(name)
    same = [group for group in alike.values() if len(group) > 1]
    assert same == [["hgx-h100", "hgx-h200"], ["a6000-pair", "rtx-3090-pair"]], "these differ by name only"


@pytest.mark.parametrize(("links", "said"), [
    ([Link(0, 9, "nvlink", 1, 1)], r"links\[0\] 0->9: vertices are 0..1"),
    ([Link(0, 1, "nvlink", 1, 1), Link(1, 1, "nvlink", 1, 1)], r"links\[1\] 1->1: .* two different"),
    ([Link(0, 1, "nvlink", 0, 1)], "capacity 0 x 1"),
    ([Link(0, 1, "nvlink", 1, -1)], "capacity 1 x -1"),
    ([Link(0, 1, "nvlink", 1, 1)] * 2, "a second nvlink link"),
])  # fmt: skip
def test_check_names_the_wrong_link(links: list[Link], said: str) -> None:
    pair = Topology("two", (Device("gpu", 0, 0), Device("gpu", 0, 1)), links=tuple(links))
    with pytest.raises(TopologyError, match=said):
        pair.check()
    with pytest.raises(TopologyError, match=said):
        Topology.from_json(pair.to_json())


def test_a_machine_needs_a_device() -> None:
    with pytest.raises(TopologyError, match="no devices"):
        Topology("none", ()).check()


def test_load_takes_a_name_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(machine("dgx-2").to_json())
    assert load(str(file)) == load("dgx-2") == machine("dgx-2")
    (tmp_path / "noending").write_text(machine("pcie-8").to_json())
    assert load(str(tmp_path / "noending")).name == "pcie-8"


def test_load_without_a_name_sees_this_machine() -> None:
    made = load(None)
    assert {d.kind for d in made.devices} == {"cpu"}
    assert {k.origin for k in made.links} == {"measured"}
    assert made.memory_of(0) == made.n


@pytest.mark.parametrize(("field", "value", "path"), [
    ("name", 3, r"\$\.name"),
    ("links", [{"src": 0, "dst": 1, "kind": "rope", "lanes": 1, "lane_mbps": 1}], r"\$\.links\[0\]\.kind"),
    ("devices", [{"kind": "gpu", "node": "a", "index": 0}], r"\$\.devices\[0\]\.node"),
    ("extra", 1, "extra"),
    ("format", "other", "expected format 'blinkmpi.topology' version 1"),
    ("version", 99, "version 99"),
])  # fmt: skip
def test_a_malformed_file_is_named_with_its_wrong_field(tmp_path: Path, field: str, value: object, path: str) -> None:
    body = json.loads(machine("dgx-1v").to_json())
    body[field] = value
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(body))
    with pytest.raises(FormatError, match=path) as caught:
        load(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(FormatError, match=r"broken\.json"):
        load(str(file))


@pytest.mark.parametrize("letter", ["\x1b", "\x9b", "\x7f", "\n", "\0"])
def test_no_name_has_control_characters(letter: str) -> None:
    """They would be printed; a file that has them is refused, wherever they are, and so is a value."""
    made = replace(machine("pcie-8"), cards=(NetworkCard("mlx5_0", 8, 12_500),)).check()
    whole = json.loads(made.to_json())
    tried = 0
    for part in (whole, *whole["devices"], *whole["switches"], *whole["cards"]):
        for key in {"name", "host", "uuid", "bus"} & part.keys():
            was, part[key] = part[key], f"a{letter}[2J"
            for text in (json.dumps(whole), json.dumps(whole, ensure_ascii=False)):
                with pytest.raises((FormatError, TopologyError)) as caught:
                    Topology.from_json(text)
                assert letter not in str(caught.value)
            part[key] = was
            tried += 1
    assert tried > 20
    assert Topology.from_json(json.dumps(whole)) == made
    with pytest.raises(TopologyError, match="control character") as caught:
        replace(made, devices=(replace(made.devices[0], host=f"a{letter}b"), *made.devices[1:])).check()
    assert letter not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"nowhere\.json.*No such file"):
        load(str(tmp_path / "nowhere.json"))
    with pytest.raises(TopologyError, match="Is a directory"):
        load(str(tmp_path))


def test_modify_means_the_numbers_of_the_machine_as_given() -> None:
    made = modify(machine("dgx-1v"), gpus="3,0, 4-6", drop_link=["0-3"], scale=["pcie=0.5", "nvlink=1/5"])
    assert [d.index for d in made.devices] == [3, 0, 4, 5, 6]
    assert not [k for k in made.links if {k.src, k.dst} == {0, 1}]
    assert {k.lane_mbps for k in made.links if k.kind == "pcie"} == {7_875}
    assert {k.lane_mbps for k in made.links if k.kind == "nvlink"} == {5_000}
    assert modify(machine("dgx-1v")) == machine("dgx-1v")


def test_gpus_are_read_in_order() -> None:
    assert parse_gpus("1,4,5,6") == [1, 4, 5, 6]
    assert parse_gpus("6-7,0") == [6, 7, 0]


@pytest.mark.parametrize(
    "change",
    [{"gpus": t} for t in ("", "a", "1,,2", "3-1", "1;2", "-1", "1.5", "0-999999")]
    + [{"drop_link": [t]} for t in ("", "0", "0-", "a-b", "0-3-4", "0-7")]
    + [{"scale": [t]} for t in ("", "pcie", "pcie=", "pcie=x", "pcie=-1", "pcie=0", "pcie=1/0", "rope=1", "pcie=nan")],
)  # fmt: skip
def test_texts_that_cannot_be_read_are_typed_errors(change: dict[str, object]) -> None:
    with pytest.raises(TopologyError):
        modify(machine("dgx-1v"), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [*names(), "cpu:4", "cpu:40", "dgx-a100:2", "dgx-2:2", "dgx-1v:4", "mi250:2"])
def test_the_picture_fits_100_columns(spec: str) -> None:
    wide, text = text_of(machine(spec), 200), text_of(machine(spec))
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text, "something was cut"
    assert machine(spec).fingerprint in text
    facts = [line for line in wide.splitlines() if not line.startswith("source")]
    assert all(line.rstrip() in text for line in facts), "at 100 columns a line breaks"


def test_the_matrix_shows_lanes_and_roads() -> None:
    rows = [line.split() for line in text_of(machine("dgx-1v")).splitlines()]
    assert ["0", "GPU", "0", "·", "1x25", "1x25", "2x25", "2x25", "host", "host", "host"] in rows
    rows = [line.split() for line in text_of(machine("dgx-a100:2").subset([0, 1, 8])).splitlines()]
    assert ["2", "GPU", "0@1", "net", "net", "·"] in rows
    rows = [line.split() for line in text_of(machine("cpu:2")).splitlines()]
    assert ["1", "CPU", "1", "mem", "·"] in rows
    one_way = Topology("one way", (Device("gpu", 0, 0), Device("gpu", 0, 1)), links=(Link(0, 1, "nvlink", 1, 12_500),))
    rows = [line.split() for line in text_of(one_way).splitlines()]
    assert ["0", "GPU", "0", "·", "1x12.5"] in rows
    assert ["1", "GPU", "1", "-", "·"] in rows
