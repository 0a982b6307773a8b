"""What differs between two machines and two plans, and how the commands show it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blinkmpi.cli import live as cli_live
from blinkmpi.planning.diff import plan_differences
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.plot.machine import draw_machine
from blinkmpi.topology import from_gpus, machine, names
from blinkmpi.topology.diff import Difference, differences
from blinkmpi.topology.model import Topology
from blinkmpi.topology.probe import probe
from blinkmpi.trees.tree import Collective
from tests.unit.cli.conftest import blink as blink
from tests.unit.topology.test_gather import on_ranks
from tests.unit.topology.test_probe import DATA, recorded, recording
from tests.unit.topology.test_topology import topologies


@given(topologies())
def test_a_machine_does_not_differ_from_itself(made: Any) -> None:
    assert differences(made, made) == ()


@given(topologies(), st.integers(0, 99))
def test_one_changed_link_is_one_difference(made: Any, at: int) -> None:
    if made.links:
        k = made.links[at % len(made.links)]
        links = tuple(replace(x, lanes=x.lanes + 1) if x is k else x for x in made.links)
        (found,) = differences(made, replace(made, links=links))
        assert found.one == f"{k.lanes} x {k.lane_mbps / 1000:g} GB/s"
        assert found.other == f"{k.lanes + 1} x {k.lane_mbps / 1000:g} GB/s"


def test_a_dead_nvlink_is_found() -> None:
    found = differences(from_gpus(recorded("nvml-h200x8")), from_gpus(recorded("one-dead-nvlink")))
    assert found == (Difference("nvlink GPU 3 - NVSwitch", "18 x 25 GB/s", "17 x 25 GB/s"),)


def test_a_dropped_link_and_both_its_directions_are_one_line() -> None:
    full = machine("dgx-1v")
    assert differences(full, full.drop_link(0, 3)) == (Difference("nvlink GPU 0 - GPU 3", "2 x 25 GB/s", ""),)
    one_way = tuple(k for k in full.links if (k.src, k.dst) != (0, 3))
    assert differences(full, replace(full, links=one_way)) == (Difference("nvlink GPU 0 -> GPU 3", "2 x 25 GB/s", ""),)


def test_devices_are_joined_by_uuid_and_switches_by_what_hangs_on_them() -> None:
    facts = recorded("nvml-dgx-1v")
    order = list(range(8))
    random.Random(3).shuffle(order)
    one, other = from_gpus(facts), from_gpus([facts[i] for i in order])
    found = differences(one, other)
    assert {d.what.partition(" of ")[0] for d in found} == {"rank"}
    assert len(found) == sum(i != at for at, i in enumerate(order))


def test_what_one_alone_has_is_said() -> None:
    found = differences(machine("dgx-1v"), machine("dgx-1v").subset(range(6)))
    assert Difference("device", "GPU 7", "") in found
    found = differences(machine("hgx-h200"), from_gpus(recorded("nvml-h200x8")))
    assert Difference("switch", "", "host") in found


# ---------------------------------------------------------------- plans


def plan_of(spec: str, **change: Any) -> Plan:
    made = machine(spec)
    return trees_of(made.drop_link(*change["drop"]) if "drop" in change else made, "broadcast", roots=[0])


def trees_of(made: Topology, collective: Collective, **options: Any) -> Plan:
    """A plan of one scheme, whose table has one row."""
    plan = make_plan(made, collectives=[collective], algo=f"{collective}:trees", **options)
    rules = tuple(replace(rule, min_bytes=0, root=-1) for rule in plan.rules[-1:])
    return replace(plan, packings=tuple(p for p in plan.packings if p.scheme == "trees"), rules=rules)


def test_equal_plans_do_not_differ() -> None:
    assert plan_differences(plan_of("dgx-1v"), plan_of("dgx-1v")) == ()


def test_a_plan_for_less_says_rate_trees_and_links() -> None:
    found = {d.what: (d.one, d.other) for d in plan_differences(plan_of("dgx-1v"), plan_of("dgx-1v", drop=(0, 3)))}
    assert found["trees: rate"] == ("150 GB/s", "100 GB/s")
    assert found["trees: trees"] == ("4", "3")
    assert found["load 0>3"] == ("50 GB/s", "")
    assert found["machine"] == ("dgx-1v", "dgx-1v-0-3")
    trees = [pair for what, pair in found.items() if what.startswith("tree ")]
    assert len([one for one, _ in trees if one]) == 4
    assert all(one != other for one, other in found.values())


def test_another_scheme_and_another_table_are_said() -> None:
    one, other = plan_of("dgx-1v"), plan_of("dgx-1v")
    rules = tuple(replace(r, chunk_bytes=2 * r.chunk_bytes) for r in other.rules)
    (found,) = plan_differences(one, replace(other, rules=rules))
    assert (found.collective, found.what) == ("broadcast", "from 0 bytes")
    (lost, *_) = plan_differences(one, replace(other, packings=()))
    assert (lost.collective, lost.what, lost.other) == ("broadcast from 0", "trees", "")


# ---------------------------------------------------------------- commands


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("nvml-h200x8", "one-dead-nvlink"):
        (tmp_path / f"{name}.json").write_text(from_gpus(recorded(name)).to_json())
    (tmp_path / "a.json").write_text(plan_of("dgx-1v").to_json())
    (tmp_path / "b.json").write_text(plan_of("dgx-1v", drop=(0, 3)).to_json())
    return tmp_path


def test_topo_diff_shows_and_its_exit_code_says_so(blink: Any, files: Path) -> None:
    whole, dead = files / "nvml-h200x8.json", files / "one-dead-nvlink.json"
    code, out, _ = blink(f"topo {whole} --diff {dead}")
    assert code == 1
    assert "nvlink GPU 3 - NVSwitch   18 x 25 GB/s      17 x 25 GB/s" in out
    code, out, _ = blink(f"topo {whole} --diff {dead} --json")
    body = json.loads(out)
    assert (body["format"], len(body["differences"]), code) == ("blinkmpi.topology-diff", 1, 1)
    code, out, _ = blink(f"topo {whole} --diff {whole}")
    assert (code, "no difference" in out) == (0, True)


def test_plan_diff_needs_no_machine(blink: Any, files: Path) -> None:
    code, out, _ = blink(f"plan --diff {files / 'a.json'} {files / 'b.json'}")
    assert code == 1
    assert "trees: rate    150 GB/s" in out
    assert "load 0>3" not in out
    code, out, _ = blink(f"plan --diff {files / 'a.json'} {files / 'b.json'} --trees")
    assert "load 0>3" in out
    code, out, _ = blink(f"plan --diff {files / 'a.json'} {files / 'b.json'} --json")
    body = json.loads(out)
    assert body["format"] == "blinkmpi.plan-diff"
    assert {"collective": "broadcast from 0", "what": "load 0>3", "one": "50 GB/s", "other": ""} in body["differences"]
    code, _, err = blink(f"plan dgx-1v --diff {files / 'a.json'} {files / 'b.json'}")
    assert (code, "leave out TOPOLOGY" in err) == (2, True)


@pytest.mark.slow
def test_plan_diff_says_equal_roots_once(blink: Any, tmp_path: Path) -> None:
    for name, made in (("a", machine("dgx-1v")), ("b", machine("dgx-1v").scale("nvlink", 0.5))):
        (tmp_path / name).write_text(trees_of(made, "reduce").to_json())
    _, out, _ = blink(f"plan --diff {tmp_path / 'a'} {tmp_path / 'b'}")
    assert "reduce from 0,1,2,3,4,5,6,7   trees: rate" in out


def test_topo_writes_for_nccl(blink: Any, files: Path) -> None:
    target = files / "told.xml"
    assert blink(f"topo dgx-1v --on {files / 'nvml-h200x8.json'} -o {target}")[0] == 0
    assert 'busid="0000:00:06.0"' in target.read_text()
    code, _, err = blink(f"topo dgx-1v -o {target}")
    assert (code, "--on FILE" in err) == (2, True)
    code, out, _ = blink(f"topo {DATA / 'nccl-topo-h200x8.xml'}")
    assert (code, "8 x GPU sm_90" in out) == (0, True)


@pytest.mark.parametrize("name", [*names(), "dgx-1v:2", "cpu:4"])
def test_every_machine_can_be_drawn(name: str, tmp_path: Path) -> None:
    target = tmp_path / "machine.svg"
    draw_machine(machine(name), str(target))
    text = target.read_text()
    for kind in machine(name).kinds():
        assert f"{kind}: " in text
    for device in machine(name).devices:
        assert f">{device.index}</text>" in text


def test_topo_draws(blink: Any, files: Path) -> None:
    target = files / "machine.png"
    assert blink(f"topo {files / 'nvml-h200x8.json'} --plot {target}")[:2] == (0, "")
    assert target.read_bytes().startswith(b"\x89PNG")
    code, _, err = blink(f"topo dgx-1v --plot {files / 'machine.jpg'}")
    assert (code, ".svg, .png, .pdf" in err) == (2, True)


# ---------------------------------------------------------------- the live machine


class Card:
    """A rank's GPU, as CUDA names it."""

    def __init__(self, bus_id: str) -> None:
        self.bus_id = bus_id


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_live_machine_is_its_gpus(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    source = recording("nvml-h200x8")
    monkeypatch.setattr(cli_live, "Nvml", lambda: source)
    monkeypatch.setattr(cli_live, "probe_all", lambda: recorded("nvml-h200x8"))
    monkeypatch.setattr(cli_live, "probe", lambda bus: probe(bus, source=source))
    monkeypatch.setattr(cli_live, "own_gpu", lambda local: Card(f"0000:00:{local + 6:02X}.0"))
    machines = on_ranks([0] * ranks, cli_live.live_machine)
    expected = from_gpus(recorded("nvml-h200x8")[: ranks if ranks > 1 else 8])
    assert {m.fingerprint for m in machines} == {expected.fingerprint}
    assert all(d.host for d in machines[0].devices)
    monkeypatch.setenv("BLINKMPI_GPU_DISABLE", "1")
    assert on_ranks([0] * ranks, cli_live.live_machine)[0].kinds() == ("memory",)


def test_a_rank_without_a_device_leaves_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_live, "Nvml", lambda: recording("nvml-h200x8"))
    monkeypatch.setattr(cli_live, "own_gpu", lambda local: "CuPy is missing")
    assert [m.kinds() for m in on_ranks([0, 0], cli_live.live_machine)] == [("memory",)] * 2
