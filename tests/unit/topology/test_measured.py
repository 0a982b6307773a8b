"""What was measured of links: classes, slow links, the machine that takes them, the file. Without GPUs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from blinkmpi.errors import FormatError, SettingsError, TopologyError
from blinkmpi.planning.planner import make_plan
from blinkmpi.topology import Topology, machine
from blinkmpi.topology import measured as measurements
from blinkmpi.topology.gpu import unknown_gpu
from blinkmpi.topology.measured import (
    NOWHERE,
    LinkMeasurement,
    Measured,
    class_of,
    link_rates,
    slow_links,
    with_measured,
)
from blinkmpi.util.cache_folder import keep
from tests.unit.topology.test_gather import on_ranks

DRIVER = "580.1"
FACTS = unknown_gpu("not asked", driver=DRIVER)


def named(name: str) -> Topology:
    """A machine of the catalogue with UUIDs."""
    topology = machine(name)
    devices = tuple(replace(d, uuid=f"GPU-{name}-{i}") for i, d in enumerate(topology.devices))
    return replace(topology, devices=devices)


def measured(topology: Topology, rows: Sequence[LinkMeasurement]) -> Measured:
    return Measured(topology.name, topology.devices, "2026-11-21", DRIVER, {"cupy": "14"}, tuple(rows)).check()


def copies(topology: Topology, rate: Callable[[int, int], int]) -> Measured:
    """Every pair that NVLinks join, at a rate."""
    pairs = [(a, b) for a in range(topology.n) for b in range(topology.n) if a != b]
    return measured(topology, [LinkMeasurement(a, b, "copy", rate(a, b)) for a, b in pairs])


# ---------------------------------------------------------------- classes and links


def test_paths_and_classes() -> None:
    hgx, dgx, pcie = machine("hgx-h200"), machine("dgx-1v"), machine("pcie-8")
    assert [(k.src, k.dst, k.kind) for k in measurements.links_between(hgx, 3, 5)] == [
        (3, 8, "nvlink"),
        (8, 5, "nvlink"),
    ]
    assert class_of(hgx, LinkMeasurement(3, 5, "copy", 1)) == "nvlink 18x25 by nvswitch"
    assert class_of(dgx, LinkMeasurement(0, 3, "copy", 1)) == "nvlink 2x25"
    assert class_of(dgx, LinkMeasurement(0, 1, "push", 1)) == "nvlink 1x25"
    assert class_of(dgx, LinkMeasurement(0, 5, "copy", 1)).startswith("pcie 1x15.75 by pcie-host-host-pcie")
    assert class_of(pcie, LinkMeasurement(0, 1, "copy", 1)) == "pcie 1x31.5 by pcie"
    assert class_of(dgx, LinkMeasurement(2, NOWHERE, "host", 1)) == "pcie 15.75 to the host"
    assert class_of(dgx, LinkMeasurement(NOWHERE, 2, "host-all", 1)) == "pcie 15.75 from the host"
    assert class_of(machine("cpu:2"), LinkMeasurement(0, NOWHERE, "memory", 1)) == "memory"
    assert measurements.usual([1, 2]) == 2


def test_a_gpus_link_to_the_switch_has_the_best_of_its_pairs() -> None:
    hgx = named("hgx-h200")
    found = copies(hgx, lambda a, b: 300_000 if a == 3 else 250_000 if b == 6 else 390_000 + a)
    rates = {(k.src, k.dst): mbps for k, mbps in link_rates(hgx, found).items()}
    assert rates[3, 8] == 300_000
    assert rates[8, 6] == 300_000, "from GPU 3; its best"
    assert rates[8, 3] == 390_007
    assert rates[6, 8] == 390_006
    slow = [(s.link.src, s.link.dst, s.mbps, s.usual) for s in slow_links(hgx, found)]
    assert slow == [(3, 8, 300_000, 390_004), (8, 6, 300_000, 390_007)]
    assert {(r.src, r.dst) for r in measurements.marked(hgx, found)} == {(a, b) for a in range(8) for b in range(8)
                                                            if a != b and (a == 3 or b == 6)}  # fmt: skip


def test_a_direct_link_is_compared_with_links_of_as_many_lanes() -> None:
    dgx = named("dgx-1v")
    lanes = {(k.src, k.dst): k.lanes for k in dgx.links if k.kind == "nvlink"}
    found = copies(dgx, lambda a, b: 15_000 if (a, b) == (4, 7) else 22_500 * lanes.get((a, b), 0) or 9_000)
    (slow,) = slow_links(dgx, found)
    assert (slow.link.src, slow.link.dst, slow.mbps, slow.usual) == (4, 7, 15_000, 45_000)
    made = with_measured(dgx, found)
    (link,) = [k for k in made.links if k.origin == "measured"]
    assert (link.src, link.dst, link.lanes, link.lane_mbps) == (4, 7, 2, 7_500)


def test_the_host_path_is_the_pcie_link_of_a_gpu() -> None:
    dgx = named("dgx-1v")
    rows = [LinkMeasurement(r, NOWHERE, "host", 6_000 if r == 2 else 12_000) for r in range(8)]
    rows += [LinkMeasurement(NOWHERE, r, "host", 11_000) for r in range(8)]
    (slow,) = slow_links(dgx, measured(dgx, rows))
    assert (slow.link.src, slow.link.kind, slow.mbps) == (2, "pcie", 6_000)
    assert slow.link.dst >= dgx.n
    (link,) = [k for k in with_measured(dgx, measured(dgx, rows)).links if k.origin == "measured"]
    assert link.mbps == 6_000


def test_a_plan_takes_the_measured_value_and_only_where_a_link_is_slow() -> None:
    hgx = named("hgx-h200")
    well = copies(hgx, lambda a, b: 392_000 - 10_000 * (a == 2))
    assert with_measured(hgx, well) is hgx, "less than 15 % is noise"
    made = with_measured(hgx, copies(hgx, lambda a, b: 200_000 if a == 3 else 392_000))
    (link,) = [k for k in made.links if k.origin == "measured"]
    assert (link.src, link.dst, link.lanes, link.lane_mbps) == (3, 8, 18, 11_100), "of 200 GB/s, to three digits"
    assert [k for k in made.links if k != link] == [k for k in hgx.links if (k.src, k.dst) != (3, 8)]
    assert made.source.endswith("1 link far under their class: as measured 2026-11-21")
    assert made.fingerprint != hgx.fingerprint
    ill, fine = (make_plan(m, collectives=["allreduce"], gpus="onehop") for m in (made, hgx))
    assert ill.check(made).packings[0].rate < fine.packings[0].rate


def test_a_slow_link_never_gets_more_than_the_table_gives() -> None:
    hgx = named("hgx-h200")
    made = with_measured(hgx, copies(hgx, lambda a, b: 600_000 if a == 3 else 900_000))
    assert {k.mbps for k in made.links if k.kind == "nvlink"} == {450_000}


def test_ranks_are_joined_by_uuid() -> None:
    hgx = named("hgx-h200")
    found = copies(hgx, lambda a, b: 200_000 if a == 3 else 392_000)
    order = [7, 6, 5, 4, 3, 2, 1, 0]
    (link,) = [k for k in with_measured(hgx.subset(order), found).links if k.origin == "measured"]
    assert link.src == 4
    part = hgx.subset([0, 1, 2, 3])
    assert with_measured(part, found) is part, "measured of other GPUs"
    nameless = machine("hgx-h200")
    assert with_measured(nameless, measured(nameless, found.rows)) is nameless


# ---------------------------------------------------------------- the document and its file


def test_the_document_comes_back_as_it_was() -> None:
    found = replace(copies(named("hgx-h200"), lambda a, b: 1 + a), missing=("rank 0 to 1: denied",))
    body = json.loads(found.to_json())
    assert (body["format"], body["version"]) == ("blinkmpi.measured", 1)
    assert Measured.from_json(found.to_json()) == found
    with pytest.raises(FormatError, match=r"rows\[0\]"):
        Measured.from_json(found.to_json().replace('"copy"', '"copied"', 1))


@pytest.mark.parametrize(("rows", "message"), [
    ([LinkMeasurement(0, 8, "copy", 1)], r"rows\[0\] copy 0->8: expected two different of -1\.\.7"),
    ([LinkMeasurement(1, 1, "copy", 1)], "two different"),
    ([LinkMeasurement(0, 1, "copy", 0)], "0, expected more than 0"),
    ([LinkMeasurement(0, 1, "flag", 5)], "None, expected more than 0"),
    ([LinkMeasurement(0, 1, "copy", 5), LinkMeasurement(0, 1, "copy", 6)], r"rows\[1\] copy 0->1: a second row"),
])  # fmt: skip
def test_a_document_that_cannot_be_is_refused(rows: list[LinkMeasurement], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        measured(named("hgx-h200"), rows)


def test_rank_0s_file_is_for_these_gpus_and_this_driver(tmp_path: Path) -> None:
    hgx = named("hgx-h200").subset([2, 0, 1])
    found = copies(hgx, lambda a, b: 200_000 if a == 0 else 392_000)
    assert on_ranks([0, 0, 0], lambda comm, node: measurements.kept(comm, hgx, FACTS, tmp_path)) == [None] * 3
    keep(measurements.file_of(tmp_path, (d.uuid for d in hgx.devices), DRIVER), found.to_json())

    def elsewhere(comm: Any) -> Path:
        return tmp_path if comm.rank == 0 else tmp_path / "not shared"

    turned = hgx.subset([1, 2, 0])
    answers = on_ranks([0, 0, 0], lambda comm, node: measurements.applied(comm, turned, FACTS, elsewhere(comm)))
    assert answers == [with_measured(turned, found)] * 3
    assert [k.src for k in answers[0].links if k.origin == "measured"] == [2]
    other = unknown_gpu("not asked", driver="590")
    assert on_ranks([0, 0, 0], lambda comm, node: measurements.applied(comm, turned, other, tmp_path)) == [turned] * 3
    part = hgx.subset([0, 1])
    assert on_ranks([0, 0], lambda comm, node: measurements.applied(comm, part, FACTS, tmp_path)) == [part] * 2


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    hgx = named("hgx-h200")
    measurements.file_of(tmp_path, (d.uuid for d in hgx.devices), DRIVER).write_text("{", encoding="utf-8")
    for error in on_ranks([0, 0], lambda comm, node: measurements.kept(comm, hgx, FACTS, tmp_path)):
        assert isinstance(error, SettingsError)
        assert str(error).endswith("remove it, or blinkmpi topo --measure=again")
    with pytest.raises(SettingsError, match="set BLINKMPI_CACHE_DIR"):
        keep(Path("/proc/nowhere/x.json"), copies(hgx, lambda a, b: 1).to_json())
