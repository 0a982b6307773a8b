"""What can be asked of an Algorithm: its file, its prediction, what it says of itself."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from blinkmpi import lang
from blinkmpi.errors import ArgumentError, BufferTypeError, FormatError, PlanError
from blinkmpi.lang import Algorithm, chunk, library
from blinkmpi.lang.flow import Node
from blinkmpi.program.check import Piece, check
from blinkmpi.program.interpreter import run
from blinkmpi.topology import machine
from blinkmpi.topology.model import Device, Link, Switch, Topology
from tests.unit.lang.algorithms import of_ranks

MINE = """
from blinkmpi import lang
from blinkmpi.lang import chunk

@lang.algorithm("broadcast", chunks=1, inplace=True)
def star(n, root=0):
    for r in range(n):
        if r != root:
            chunk(root, "input", 0).copy(r)
"""


def test_every_algorithm_comes_back_from_its_file(tmp_path: Path) -> None:
    for made in of_ranks(4):
        made.save(tmp_path / "it.json")
        assert lang.load(str(tmp_path / "it.json")) == made


def test_a_function_of_a_python_file_is_loaded_with_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    made = lang.load(f"{tmp_path}/mine.py:star", 4, root=2)
    assert (made.name, made.n, made.flow.goal.root) == ("star", 4, 2)
    assert made.flow.nodes[1].where == "mine.py:9"


@pytest.mark.parametrize(("source", "args", "match"), [
    ("it.txt", (), r"expected a file \(x.json.*\) alone"),
    ("mine.py", (4,), "a function of a Python file with its number of ranks"),
    ("mine.py:star", (), "a function of a Python file with its number of ranks"),
    ("mine.py:moon", (4,), "has no algorithm 'moon'"),
    ("none.py:star", (4,), "none.py': No such file"),
    ("none.json", (), "none.json': No such file"),
])  # fmt: skip
def test_what_is_no_algorithm_is_refused(tmp_path: Path, source: str, args: tuple[int, ...], match: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises((ArgumentError, FormatError), match=match):
        lang.load(f"{tmp_path}/{source}", *args)


NEXT = lang.custom(given=lambda n, rank: 1, wanted=lambda n, rank: [[((rank + 1) % n, 0)]])


@lang.algorithm(NEXT, chunks=1, name="backward")
def backward(n: int) -> None:
    for r in range(n):
        chunk((r + 1) % n, "input", 0).copy(r, "output", 0)


def test_what_no_result_needs_is_said_and_not_counted() -> None:
    @lang.algorithm(lang.custom(given=lambda n, r: 2, wanted=lambda n, r: [[(r - 1, 0)]] * 2 if r else []), chunks=1)
    def wasteful(n: int) -> None:
        for r in range(1, n):
            chunk(r - 1, "input", 0).copy(r, "output", 0).copy(r, "output", 1)
        chunk(1, "input", 1).copy(0, "junk", 0)

    lines = wasteful(3).explain().splitlines()
    assert lines[:2] == [
        "wasteful: custom of 3 ranks, 2 chunks given and 0-2 chunks wanted by each, proved",
        "  messages   2 of a chunk, 1 from the rank that sends the most",
    ]
    assert re.fullmatch(r"  unused     1 value that no result needs, the first of test_algorithms.py:\d+; none is sent",
                        lines[-1])  # fmt: skip
    assert all("unused" not in made.explain() for made in of_ranks(4))


def changed(**fields: Any) -> Algorithm:
    return msgspec.structs.replace(library.ring(2), **fields)


NODES = library.ring(2).nodes


@pytest.mark.parametrize(("wrong", "match"), [
    (changed(nodes=(Node(1, (~1,)), *NODES[1:])),
     r"ring: .*rank 1's chunk 1 is folded twice|ring: library.py:\d+: rank 0: chunk 0"),
    (changed(nodes=(Node(2, (~0,)), *NODES[1:])), "value 0 on rank 2"),
    (changed(nodes=(Node(0, (0,)), *NODES[1:])), "value 0 on rank 0 is made of"),
    (changed(nodes=(Node(0, ()), *NODES[1:])), "value 0 on rank 0 is made of"),
    (changed(nodes=(Node(0, (~9,)), *NODES[1:])), "chunk 9 of rank 0's input; it has 2 chunks"),
    (changed(outputs=((99, 0), (0, 0))), "value 99; there are"),
    (changed(outputs=((0, 0),)), "outputs of .* chunks; expected"),
    (changed(name=""), "name '', 0 to 0 bytes"),
    (changed(min_bytes=-1), "-1 to 0 bytes"),
    (changed(n=0), r"0 ranks; expected 1\.\.4096"),
    (changed(chunks=1 << 40), "1099511627776 chunks"),
    (changed(n=3), "outputs of"),
    (changed(collective="barrier"), "barrier: no collective that an algorithm can be written for"),
    (changed(collective="custom"), "a custom collective says what is given and wanted"),
    (changed(given=(2, 2)), "a custom collective says what is given and wanted"),
    (changed(root=1), "root 1: expected a rank as root of"),
    (msgspec.structs.replace(backward(3), given=(1, 1)), "given 2 and wanted 3"),
    (msgspec.structs.replace(backward(3), wanted=((((7, 0),),),) * 3), "rank 0 wants chunk 0 of rank 7 in chunk 0"),
    (msgspec.structs.replace(backward(3), given=(1, 1, 0)), "rank 1 wants chunk 0 of rank 2 in chunk 0 of its output"),
])  # fmt: skip
def test_a_file_is_proved_when_it_is_read(tmp_path: Path, wrong: Algorithm, match: str) -> None:
    path = tmp_path / "wrong.json"
    wrong.save(path)
    with pytest.raises((PlanError, FormatError), match=rf"wrong.json: .*({match})"):
        lang.load(str(path))


def test_a_custom_one_comes_back_from_its_file(tmp_path: Path) -> None:
    backward(3).save(tmp_path / "it.json")
    assert lang.load(str(tmp_path / "it.json")) == lang.load(tmp_path / "it.json") == backward(3)


def test_it_cannot_be_saved_where_nothing_can_be(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cannot write .*correct the path"):
        library.ring(2).save(tmp_path / "no" / "folder.json")


# ---------------------------------------------------------------- prediction


def test_a_long_ring_takes_the_time_of_its_bytes_on_the_links() -> None:
    links = [Link(r, (r + 1) % 4, "nvlink", 1, 25_000) for r in range(4)]
    ring = Topology("ring", tuple(Device("gpu", 0, r) for r in range(4)), (), tuple(links)).check()
    nbytes = 1 << 30
    least = 2 * 3 / 4 * nbytes / 25e9
    assert least <= library.ring(4).simulate(ring, nbytes).seconds < 1.05 * least
    with pytest.raises(PlanError, match="ring has no way from rank 0 to 2 but over other ranks"):
        library.one_step(4).simulate(ring, nbytes)


def test_chunks_take_the_direct_link_or_the_cheapest_way_over_switches() -> None:
    switches = (Switch("pcie", 0), Switch("pcie", 0))
    slow, fast = 3, 4
    pairs = [(0, 1, 5_000), *((r, slow, 1_000) for r in range(3)), *((r, fast, 20_000) for r in range(3))]
    links = [Link(*ends, "pcie", 1, mbps) for a, b, mbps in pairs for ends in ((a, b), (b, a))]
    box = Topology("box", tuple(Device("gpu", 0, r) for r in range(3)), switches, tuple(links)).check()
    busy = {(a, b) for a, b, _, _ in library.one_step(3).simulate(box, 1 << 20).busy}
    assert {(0, 1), (1, 0), (0, fast), (fast, 2)} <= busy
    assert not any(slow in ends for ends in busy)


def test_on_two_boxes_less_crosses_the_network_by_islands_than_by_all_pairs() -> None:
    boxes = machine("dgx-1v:2")
    straight, islands = (made.simulate(boxes, 64 << 20) for made in (library.all_pairs(16), library.islands(16, 8)))
    assert islands.seconds < straight.seconds
    net = [max(busy for _, _, kind, busy in price.busy if kind == "net") for price in (straight, islands)]
    assert net[0] == pytest.approx(8 * net[1])


@pytest.mark.parametrize("made", [library.one_step(4), library.ring(4), library.all_pairs(4)], ids=lambda it: it.name)
def test_ranks_that_share_a_memory_are_simulated_on_their_cores(made: Algorithm) -> None:
    cores = machine("cpu:4")
    found = made.simulate(cores, 64 << 20)
    assert {dst for _, dst, _, _ in found.busy} == {cores.memory_of(0)}
    assert found.seconds >= found.busiest > 0


def test_a_simulation_for_other_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="ring is for 3 ranks, pcie-8 has 8"):
        library.ring(3).simulate(machine("pcie-8"), 1 << 20)


# ---------------------------------------------------------------- words


def test_it_says_what_it_does() -> None:
    assert library.ring(8).explain().splitlines() == [
        "ring: allreduce of 8 ranks, 8 chunks, proved",
        "  messages   112 of a chunk, 14 from the rank that sends the most",
        "  bytes      that rank sends 7/4 of the vector",
        "  steps      14 messages follow one another",
        "  folds      56 of two operands",
    ]

    @lang.algorithm("scatter", chunks=2, root=1, min_bytes=1024, max_bytes=1 << 20)
    def straight(n: int) -> None:
        for r in range(n):
            chunk(1, "input", 2 * r, 2).copy(r, "output", 0)

    text = straight(3).explain()
    assert "scatter from rank 1 of 3 ranks, 2 chunks a block, proved" in text
    assert "vectors of at least 1 KiB, at most 1 MiB" in text
    assert "4 of a chunk, 4 from the rank" in text
    assert "steps      1 message\n" in text + "\n"
    assert "folds" not in text


# ---------------------------------------------------------------- on NumPy, by value


def test_a_custom_collective_runs_on_numpy() -> None:
    sums = lang.custom(
        given=lambda n, rank: 1, wanted=lambda n, rank: [[(rank, 0), ((rank + 1) % n, 0)]] if rank else []
    )

    @lang.algorithm(sums, chunks=1)
    def with_next(n: int) -> None:
        for r in range(1, n):
            chunk(r, "input", 0).copy(r, "output", 0).reduce(chunk((r + 1) % n, "input", 0))

    made = with_next(3)
    got = made.interpret([np.full(4, 10**r) for r in range(3)])
    assert [[list(part) for part in rank if part is not None] for rank in got] == [[], [[110] * 4], [[101] * 4]]
    assert made.simulate(machine("pcie-8").subset([0, 1, 2]), 1024).seconds > 0
    program = made.program(made.call_of_bytes(16, dtype="int64"))
    assert program.call.counts == (2, 1, 1, 1, 0, 1, 1)
    ran = run(program, [np.full(2, 10**r) for r in range(3)])
    assert [None if part is None else list(part) for part in ran] == [None, [110] * 2, [101] * 2]
    with pytest.raises(PlanError, match=r"what with_next#\w+ must receive is said by its algorithm"):
        check(program)
    wanted: list[list[Piece]] = [[], [(0, 2, ((1, 0), (2, 0)))], [(0, 2, ((0, 0), (1, 0)))]]
    with pytest.raises(PlanError, match=r"rank 2: elements 0..1 hold contributions .*, wanted"):
        check(program, wanted=wanted)


def test_interpreting_agrees_with_the_program() -> None:
    sends = [np.arange(12, dtype=np.int64) + r for r in range(4)]
    for made in of_ranks(4):
        if made.collective == "allreduce":
            for got in made.interpret(list(sends)):
                assert np.array_equal(np.concatenate([part for part in got if part is not None]), sum(sends))


@pytest.mark.parametrize(("sends", "match"), [
    ([np.zeros(4)], "1 arrays for 2 ranks"),
    ([np.zeros(4), None], "rank 1 gives 2 chunks: expected an array of 2 equal parts, got none"),
    ([np.zeros(4), np.zeros(3)], r"got one of shape \(3,\)"),
    ([np.zeros(4), np.zeros(6)], "expected one length and type on all ranks"),
])  # fmt: skip
def test_arrays_that_cannot_be_cut_are_refused(sends: list[np.ndarray], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        library.ring(2).interpret(sends)


def test_texts_are_not_folded() -> None:
    with pytest.raises(BufferTypeError, match=r"element type '[<>]U1' is not supported"):
        library.ring(2).interpret([np.array(["a", "b"])] * 2)
