"""Counters and stats: what is counted is what a program moves, each link alike on both sides, within bounded memory."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.call import call_of_bytes
from blinkmpi.program.ir import Program
from blinkmpi.program.partition import part_of
from blinkmpi.topology.machines import machine
from blinkmpi.transport.counters import LINE_BYTES, Count, Counters, counts_in, heading_of, is_counters, lines_for
from blinkmpi.transport.events import CALL, CHUNK, EventRing, TracedProgram
from blinkmpi.transport.host.traffic import traffic_of
from blinkmpi.transport.recorder import Recorder
from blinkmpi.transport.stats import Stats, stats_of
from blinkmpi.trees.tree import COLLECTIVES


def fresh(n: int = 4, lines: int | None = None) -> tuple[Any, Counters]:
    memory = np.zeros(LINE_BYTES * (lines or lines_for(n)), np.uint8)
    return memory, Counters(memory, n=n, rank=1, timed=True)


def program_of(name: str, collective: Any, nbytes: int = 1 << 20) -> Program:
    topology = machine(name)
    call = call_of_bytes(collective, topology.n, nbytes)
    plan = make_plan(topology, collectives=[collective], roots=[0])
    return program_for(plan, call, choose(plan, call))


def test_what_is_cleared_is_what_was_used() -> None:
    """There may be no memory for other lines yet, and whoever touches one would die of it."""
    memory, counters = fresh()
    counters.add(("link", 1, 3), Count(100, 1, 7))
    used = int(counters.words[0, 1])
    memory[used * LINE_BYTES :] = 1
    counters.clear()
    assert counts_in(memory) == {}
    assert (memory[used * LINE_BYTES :] == 1).all()


def test_what_is_added_is_read_again() -> None:
    memory, counters = fresh()
    assert is_counters(memory)
    assert heading_of(memory) == (1, 4, True)
    counters.add(("link", 1, 3), Count(100, 1, 7))
    counters.add(("link", 1, 3), Count(20, 1, 0))
    counters.add(("tree", "allreduce", -1, "lang:a scheme", 0), Count(5, 1, 0))
    assert counts_in(memory) == {
        ("link", 1, 3): Count(120, 2, 7),
        ("tree", "allreduce", -1, "lang:a scheme", 0): Count(5, 1, 0),
    }


def test_a_full_page_and_long_names_are_counted_with_the_others() -> None:
    memory, counters = fresh(lines=10)  # the heading, five kinds, four lines
    for target in range(20):
        counters.add(("link", 1, target), Count(1, 1, 0))
    counters.add(("tree", "allreduce", -1, "x" * 200, 0), Count(9, 1, 0))
    found = counts_in(memory)
    assert sum(count.bytes for name, count in found.items() if name[0] == "link") == 20
    assert found["link", "others"].bytes == 16
    assert found["tree", "others"].bytes == 9
    stats = stats_of(1, 4, found, timed=True)
    assert stats.links[-1].source == -1
    assert "others" in str(stats)


@pytest.mark.slow
@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
def test_both_ends_of_a_link_count_the_same(collective: str) -> None:
    program = program_of("dgx-1v", collective)
    n = program.call.n
    sent: dict[Any, int] = {}
    received: dict[Any, int] = {}
    trees = 0
    for rank in range(n):
        rows = [(stage, False) for stage in program.of(rank)]
        moved = traffic_of(part_of(program, range(n)), program, rank, {}, rows).moved
        for name, (nbytes, calls) in moved.items():
            assert calls == 1
            if name[0] == "link":
                (sent if name[1] == rank else received)[name] = nbytes
            trees += nbytes if name[0] == "tree" else 0
        assert moved["collective", collective] == (program.call.nbytes, 1)
    assert sent == received
    assert sum(sent.values()) == trees > 0
    if collective == "allreduce":  # up and down spanning trees: every edge carries its share both ways
        assert trees == 2 * (n - 1) * program.call.nbytes


def test_the_time_of_a_row_goes_to_its_links_and_tree() -> None:
    program = program_of("dgx-1v", "allreduce")
    rows = [(stage, False) for stage in program.of(3)]
    traffic = traffic_of(part_of(program, range(8)), program, 3, {}, rows)
    memory, counters = fresh(8)
    recorder = Recorder(counters, 8, 3, events=16)
    tally = recorder.tally(traffic.moved, traffic.times)

    class Timed:
        def __init__(self) -> None:
            self.busy_ns, self.wait_ns, self.done = [10] * len(rows), {5: 77, 3: 1}, 0

        def finished(self) -> None:
            self.done += 1

    timed = Timed()
    tally.add(timed)
    assert timed.done == 1
    found = counts_in(memory)
    expected: Counter[Any] = Counter()
    for stage, row in zip(program.of(3), traffic.rows, strict=True):
        assert row.nbytes == stage.count * 4
        ends = {("link", r, 3) for ranks, _ in row.ins for r in ranks}
        ends |= {("link", 3, r) for ranks, _ in row.outs for r in ranks}
        for end in ends:
            expected[end] += 10
        expected["tree", "allreduce", -1, program.scheme, stage.tree] += 10
    assert {name: count.ns for name, count in found.items() if count.ns and name[0] != "wait"} == expected
    assert found["wait", 5].ns == 77
    assert found["wait", "network"].ns == 1  # a rank's own flags are those of messages


def test_stats_are_a_document_and_a_table() -> None:
    memory, counters = fresh()
    Recorder(counters, 4, 1).completed("barrier()", "", 0, 1, 0)
    Recorder(counters, 4, 1).completed("allreduce(1 x int8, op sum)", "mpi", 64, 1, 0)
    counters.add(("link", 1, 0), Count(3 << 20, 1, 0))
    stats = stats_of(1, 4, counts_in(memory), timed=False)
    assert Stats.from_json(stats.to_json()) == stats
    assert (stats.calls, stats.sent_bytes, stats.received_bytes) == (2, 3 << 20, 0)
    assert stats.protocols[0].bytes is None
    assert stats.links[0].busy_s is None
    assert "not measured" in str(stats)
    assert "BLINKMPI_TIMES=1" in str(stats)


def test_a_ring_keeps_the_last_events_and_says_how_many_it_dropped() -> None:
    ring = EventRing(5, [0, 0])  # rounded up to 8
    for i in range(20):
        ring.record(CHUNK, i, i + 1, 1, 1, 0, i)
    assert ring.events()["number"].tolist() == list(range(12, 20))
    assert ring.dropped == 12
    ring.call("barrier()", 2, 30, 31)
    assert ring.events()["kind"].tolist()[-1] == CALL


def test_a_ring_forgets_programs_of_which_it_has_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkmpi.transport.events.PROGRAMS", 4)
    ring = EventRing(8, [0])
    kept = ring.add(TracedProgram("kept"))
    ring.record(CALL, 0, 1, 1, kept)
    for i in range(20):
        ring.add(TracedProgram(str(i)))
    assert ring.programs[kept].text == "kept"
    assert len(ring.programs) <= 5
