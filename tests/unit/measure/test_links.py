"""Measuring links: what is timed together, what times say, all ranks together, what people see. Without GPUs."""

import argparse
import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from msgspec.structs import replace
from rich.console import Console

from blinkmpi.cli import main as cli
from blinkmpi.cli import topo as cli_topo
from blinkmpi.errors import ArgumentError, RemoteError
from blinkmpi.measure import links
from blinkmpi.measure.links import BATCH, Move, TrafficPattern, document, measure_gpus, seconds_of, traffic_patterns
from blinkmpi.measure.show import render
from blinkmpi.topology import Topology, machine
from blinkmpi.topology.measured import NOWHERE, LinkMeasurement, Measured
from blinkmpi.util.shared_memory import SHM
from tests.harness import mpi
from tests.unit.topology.test_gather import on_ranks
from tests.unit.topology.test_measured import DRIVER, copies, measured, named

# ---------------------------------------------------------------- what is timed together


@given(n=st.integers(0, 16))
def test_everybody_meets_everybody_once_and_one_at_a_time(n: int) -> None:
    made = links.rounds(n)
    pairs = [pair for some in made for pair in some]
    assert sorted(pairs) == [(a, b) for a in range(n) for b in range(a + 1, n)]
    assert sorted(pair for some in links.rounds(n, apart=True) for pair in some) == sorted(pairs)
    assert all(len(some) == 1 for some in links.rounds(n, apart=True))
    for some in made:
        ranks = [rank for pair in some for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(made) == (n - 1 + n % 2 if n > 1 else 0)


@given(n=st.integers(1, 9), apart=st.booleans(), data=st.data())
def test_in_a_stage_a_gpu_sends_once_and_receives_once(n: int, apart: bool, data: st.DataObject) -> None:
    moves = [(a, b) for a in range(n) for b in range(n) if a != b]
    lost = dict.fromkeys(data.draw(st.lists(st.sampled_from(moves), max_size=3)) if moves else [], "denied")
    made = traffic_patterns(n, lost, apart=apart)
    for what in ("copy", "push"):
        assert sorted(m for s in made if s.what == what for m in s.moves) == sorted(set(moves) - lost.keys())
        both = [m for s in made if s.what == f"{what}-both" for m in s.moves]
        assert sorted(both) == sorted(m for m in moves if not {m, m[::-1]} & lost.keys())
    for pattern in made:
        for end in (0, 1):
            ranks = [m[end] for m in pattern.moves if m[end] != NOWHERE]
            assert len(ranks) == len(set(ranks)), pattern
        if pattern.what.endswith("-both") or pattern.what == "flag":
            assert {m[::-1] for m in pattern.moves} == set(pattern.moves), "both or none"
        if pattern.what in ("copy", "push"):
            ranks = [rank for m in pattern.moves for rank in m]
            assert len(ranks) == len(set(ranks)), "one way alone"
        assert [m for rank in range(n) if (m := links.move_of(pattern, rank))] != []
        assert {m for rank in range(n) if (m := links.move_of(pattern, rank))} == set(pattern.moves)
    hosts = [m for s in made if s.what == "host" for m in s.moves]
    assert sorted(hosts) == sorted(m for r in range(n) for m in ((r, NOWHERE), (NOWHERE, r)))


def test_pairs_that_share_pcie_are_apart() -> None:
    assert not links.is_apart(machine("hgx-h200"), range(8))
    assert links.is_apart(machine("pcie-8"), range(8))
    assert links.is_apart(machine("dgx-1v"), range(8)), "some pairs have no NVLink"
    assert not links.is_apart(machine("dgx-1v"), (1, 2, 3))


def test_a_batch_is_short() -> None:
    assert links.batch_of([0.0005, 0.0007]) == BATCH
    assert links.batch_of([0.003, 0.001]) == 2
    assert links.batch_of([0.1]) == 1
    assert links.batch_of([0.0]) == BATCH


def test_the_seconds_of_a_move() -> None:
    one, other = (0, 1), (1, 0)
    repeats: list[dict[Move, float]] = [{one: 3.0, other: 1.0}, {one: 2.0, other: 2.5}, {one: 9.0, other: 9.0}]
    assert seconds_of(TrafficPattern("copy", (one, other)), repeats) == {one: 2.0, other: 1.0}
    assert seconds_of(TrafficPattern("push-both", (one, other)), repeats) == {one: 2.5, other: 2.5}, "of the longer one"
    assert seconds_of(TrafficPattern("copy-all", (one, other)), repeats) == {one: 3.0, other: 2.5}, "the median"


# ---------------------------------------------------------------- all ranks together


@dataclass
class Fake:
    """A GPU whose rates are told: a copy to ``peer`` at 100 + 10 me + peer GB/s, stores at half of that."""

    me: int
    n: int
    log: list[str] = field(default_factory=list)
    lost: tuple[Move, ...] = ()
    breaks: str = ""
    nbytes: int = 1_000_000_000
    host_bytes: int = 100_000_000

    def handle(self) -> bytes:
        return bytes([self.me])

    def connect(self, handles: Sequence[bytes]) -> dict[int, str]:
        assert handles == [bytes([i]) for i in range(self.n)]
        return {peer: "not supported" for rank, peer in self.lost if rank == self.me}

    def disconnect(self) -> None:
        self.log.append("disconnect")

    def close(self) -> None:
        self.log.append("close")

    def copy(self, peer: int, times: int) -> float:
        if self.breaks == "copy" and self.me == 1:
            raise OSError("the bus is on fire")
        return times / (100 + 10 * self.me + peer)

    def push(self, peer: int, times: int) -> float:
        return 2 * times / (100 + 10 * self.me + peer)

    def to_host(self, times: int) -> float:
        return 0.1 * times / (10 + self.me)

    def from_host(self, times: int) -> float:
        return 0.1 * times / (20 + self.me)

    def flag(self, peer: int) -> float:
        return 3e-6 + 1e-8 * peer


def measured_by(
    topology: Topology, nodes: Sequence[int] = (), *, make: Any = Fake, progress: Any = lambda comm, words: None
) -> list[Any]:
    """What ``measure_gpus`` gives each rank; all on one node unless told."""

    def work(comm: Any, node: Any) -> Any:
        return measure_gpus(comm, node, topology, make, lambda done, total, words: progress(comm, words))

    return on_ranks([*nodes] or [0] * topology.n, work)


def test_ranks_measure_together() -> None:
    hgx = named("hgx-h200").subset([0, 1, 2, 3])
    said: list[str] = []
    results = measured_by(hgx, progress=lambda comm, words: said.append(words) if comm.rank == 0 else None)
    assert all(r == results[0] for r in results)
    found = document(hgx, results[0], DRIVER, {})
    rates = {(r.what, r.src, r.dst): r.mbps or r.us for r in found.rows}
    for a in range(4):
        for b in range(4):
            if a != b:
                assert rates["copy", a, b] == pytest.approx((100 + 10 * a + b) * 1000, rel=1e-6)
                both = min(100 + 10 * a + b, 100 + 10 * b + a) * 1000
                assert rates["copy-both", a, b] == pytest.approx(both, rel=1e-6)
                assert rates["push", a, b] == pytest.approx((100 + 10 * a + b) * 500, rel=1e-6)
                assert rates["flag", a, b] == pytest.approx(3 + 0.01 * b)
        assert rates["copy-all", a, (a + 1) % 4] == rates["copy", a, (a + 1) % 4]
        assert rates["host", a, NOWHERE] == rates["host-all", a, NOWHERE] == (10 + a) * 1000
        assert rates["host", NOWHERE, a] == rates["host-all", NOWHERE, a] == (20 + a) * 1000
    assert not found.missing
    assert said[-1] == "done"


def test_nodes_measure_for_themselves_and_what_is_between() -> None:
    topology = named("dgx-a100:2").subset([0, 8, 1])
    results = measured_by(topology, [0, 1, 0])
    assert all(r == results[0] for r in results)
    rows = results[0][0]
    assert {(r.src, r.dst) for r in rows if r.what == "copy"} == {(0, 2), (2, 0)}
    assert {r.src for r in rows if r.what == "net"} == {0, 1}
    assert document(topology, results[0], DRIVER, {}).rows == rows


def test_what_cannot_be_reached_is_said() -> None:
    hgx = named("hgx-h200").subset([0, 1, 2])
    results = measured_by(hgx, make=partial(Fake, lost=((0, 2),)))
    rows, missing = results[2]
    assert missing == ("rank 0 to 2: not supported",)
    assert {(r.src, r.dst) for r in rows if r.what == "copy"} == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0)}
    assert not any({r.src, r.dst} == {0, 2} for r in rows if r.what in ("copy-both", "flag"))


def test_an_error_of_one_is_an_error_of_all_and_everything_is_given_back() -> None:
    hgx = named("hgx-h200").subset([0, 1, 2])
    logs: list[list[str]] = [[], [], []]
    for error in measured_by(hgx, make=lambda me, n: Fake(me, n, logs[me], breaks="copy")):
        assert isinstance(error, RemoteError)
        why = "on the node of rank 0: rank 1 failed while links were measured: OSError: the bus is on fire"
        assert why in str(error)
    assert logs == [["disconnect", "close"]] * 3

    def refuse(me: int, n: int) -> Fake:
        if me == 2:
            raise MemoryError("no room")
        return Fake(me, n, logs[me])

    for error in measured_by(hgx, make=refuse):
        assert "MemoryError: no room" in str(error)


def test_cpu_ranks_measure_their_memory_alone_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "copy_test", lambda slots, mine: lambda: 5_000 + 1_000 * mine)
    before = set(os.listdir(SHM))
    results = on_ranks([0, 0, 1], lambda comm, node: links.measure_memory(comm, node, lambda *_: None))
    assert all(r == results[0] for r in results)
    rows = results[0][0]
    assert [(r.src, r.mbps) for r in rows if r.what == "memory"] == [(0, 5_000), (1, 6_000), (2, 5_000)]
    assert [(r.src, r.mbps) for r in rows if r.what == "memory-all"] == [(0, 5_000), (1, 6_000), (2, 5_000)]
    assert [r.src for r in rows if r.what == "net"] == [0, 2]
    assert not {f for f in set(os.listdir(SHM)) - before if f.startswith("blinkmpi-")}


# ---------------------------------------------------------------- what people see


def printed(topology: Topology, found: Measured) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(render(topology, found, "measured now"))
    return console.export_text()


def test_slow_links_are_marked() -> None:
    hgx = named("hgx-h200")
    flags = [LinkMeasurement(a, b, "flag", us=2.5) for a in range(8) for b in range(8) if a != b]
    hosts = [LinkMeasurement(r, NOWHERE, "host", 54_000) for r in range(8)]
    rows = copies(hgx, lambda a, b: 300_000 if a == 3 else 392_000).rows
    text = printed(hgx, replace(measured(hgx, [*rows, *flags, *hosts]), missing=("rank 0 to 1: denied",)))
    assert "slow: GPU 3 -> NVSwitch (nvlink): 300.0 GB/s, 77% of the 392.0 of its class; plans take 300.6" in text
    assert text.count("300.0!") == 7
    assert "! 7 of 120 rates are more than 15 % under the median of their class" in text
    assert "not measured: rank 0 to 1: denied" in text
    assert "peer copies, GB/s" in text
    assert "to host alone" in text
    well = printed(hgx, copies(hgx, lambda a, b: 392_000))
    assert "no rate is more than 15 % under the median of its class" in well
    assert "!" not in well


def arguments(*words: str) -> argparse.Namespace:
    return cli.parsed(["topo", *words])


def test_measure_is_for_the_live_machine_as_it_is() -> None:
    with pytest.raises(ArgumentError, match=r"leave out TOPOLOGY"):
        cli_topo.topo(arguments("dgx-1v", "--measure"), machine("dgx-1v"))
    for words in (["--gpus", "0,1"], ["--drop-link", "0-1"], ["--diff", "dgx-1v"]):
        with pytest.raises(ArgumentError, match=f"leave out {words[0]}, or write"):
            cli_topo.measure(arguments(*words, "--measure"), None, None)  # type: ignore[arg-type]
    assert arguments("--measure").measure == "kept"
    assert arguments("--measure=again").measure == "again"
    assert arguments().measure is None


@pytest.mark.slow
@mpi(ranks=(1, 2), timeout=60)
def test_the_command_on_cpu_ranks(comm: MPI.Intracomm) -> None:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    text, errors = io.StringIO(), io.StringIO()
    off = mock.patch.dict(os.environ, {"BLINKMPI_GPU_DISABLE": "1"})
    with off, contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
        assert cli_topo.measure(arguments("--measure", "--json"), comm, node) == 0
    node.Free()
    if comm.rank:
        assert not text.getvalue()
        return
    found = Measured.from_json(text.getvalue())
    assert sorted((r.what, r.src) for r in found.rows) == sorted(
        (what, rank) for what in ("memory", "memory-all") for rank in range(comm.size)
    )
    assert found.driver == ""
    assert "measuring [##########]" in errors.getvalue()
