"""The language: what a program means, and that each mistake is named with its line."""

import linecache
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blinkmpi import lang
from blinkmpi.errors import ArgumentError, BlinkError, PlanError, SettingsError
from blinkmpi.lang import Buffer, chunk, trace
from blinkmpi.lang.library import ring


def line_of(error: pytest.ExceptionInfo[BlinkError]) -> str:
    """The source line that a message names first."""
    name, _, number = str(error.value).partition(" ")[0].rstrip(":").partition(":")
    assert __file__.endswith(name)
    return linecache.getline(__file__, int(number)).strip()


def refused(collective: str, body: Callable[[int], object], match: str, *, n: int = 2, chunks: int = 2,
            inplace: bool = True) -> pytest.ExceptionInfo[BlinkError]:  # fmt: skip
    with pytest.raises(PlanError, match=match) as error:
        lang.algorithm(collective, chunks=chunks, inplace=inplace)(body)(n)
    return error


# ---------------------------------------------------------------- what it means


def test_a_copy_and_a_fold_are_nodes_and_a_copy_on_one_rank_is_none() -> None:
    @lang.algorithm("reduce", chunks=1, root=1)
    def aside(n: int) -> None:
        theirs = chunk(0, Buffer.input, 0).copy(0, "aside").copy(1, "from 0")
        chunk(1, Buffer.input, 0).copy(1, Buffer.output, 0).reduce(theirs)

    made = aside(2)
    assert [(node.rank, node.operands) for node in made.flow.nodes] == [(0, (~0,)), (1, (0,)), (1, (~0, 1))]
    assert made.flow.outputs == ((None,), (2,))
    lines = [int(node.where.removeprefix("test_trace.py:")) for node in made.flow.nodes]
    assert [linecache.getline(__file__, line).strip()[:8] for line in lines] == ["theirs =", "theirs =", "chunk(1,"]


def test_reduce_returns_the_reference_itself_which_stays_valid() -> None:
    @lang.algorithm("allreduce", chunks=1, inplace=True)
    def star(n: int) -> None:
        own = chunk(0, "input", 0)
        for r in range(1, n):
            assert own.reduce(chunk(r, "input", 0)) is own
        for r in range(1, n):
            own.copy(r)

    assert star(5).flow.nodes[-1].operands == (7,)


def test_scratch_without_an_index_is_appended_to() -> None:
    @lang.algorithm("allgather", chunks=1)
    def gather_by_scratch(n: int) -> None:
        for r in range(n):
            for s in range(n):
                at = chunk(s, "input", 0).copy(r, "kept")
                assert (at.rank, at.buffer, at.index, at.size) == (r, "kept", s, 1)
            chunk(r, "kept", 0, n).copy(r, "output", 0)

    assert gather_by_scratch(3).n == 3


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_in_place_a_block_has_two_names(collective: str) -> None:
    @lang.algorithm(collective, chunks=2, inplace=True)
    def twice_named(n: int) -> None:
        if collective == "allgather":
            for r in range(n):
                for other in range(n):
                    if other != r:
                        chunk(r, "input", 0, 2).copy(other)  # the same places of the output
            assert chunk(1, "output", 2).get_origin_rank() == 1
        else:
            for r in range(n):
                for other in range(n):
                    if other != r:
                        chunk(r, "output", 0, 2).reduce(chunk(other, "input", 2 * r, 2))

    assert twice_named(3).collective == collective


def test_numbers_may_be_numpys() -> None:
    @lang.algorithm("broadcast", chunks=lambda n: np.int16(2))  # type: ignore[arg-type, return-value]
    def star(n: int) -> None:
        whole = chunk(np.int64(0), "input", np.uint8(0), np.int16(2))
        for r in np.arange(1, n):
            for i, part in enumerate(whole.split(np.int64(2))):  # type: ignore[arg-type]
                part.copy(r, "output", i)

    assert lang.Algorithm.from_json(star(3).to_json()) == star(3)
    assert lang.Algorithm.from_json(star(np.int32(3)).to_json()) == star(3)  # type: ignore[arg-type]


def test_split_group_and_where_a_chunk_belongs() -> None:
    @lang.algorithm("alltoall", chunks=2)
    def by_destination(n: int) -> None:
        for r in range(n):
            whole = chunk(r, "input", 0, 2 * n)
            parts = whole.split(n)
            assert [part.size for part in parts] == [2] * n
            assert repr(parts[0].group(parts[-1])) == f"chunk({r}, 'input', 0, {2 * n})"
            for one in whole.split(2 * n):
                assert (one.get_origin_rank(), one.get_origin_index()) == (r, one.index)
                one.copy(one.get_dst_rank(), "output", one.get_dst_index())

    assert by_destination(3).flow.goal.chunks == 2


def test_hints_are_taken_and_change_nothing() -> None:
    def body(n: int, hints: dict[str, int]) -> None:
        own = chunk(0, "input", 0).reduce(chunk(1, "input", 0), **hints)
        own.copy(1, **hints)

    plain, hinted = (
        lang.algorithm("allreduce", chunks=1, inplace=True, name="x")(body)(2, hints)
        for hints in ({}, {"sendtb": 1, "recvtb": 2, "ch": 3})
    )
    assert plain == hinted


def test_a_custom_collective_is_proved_and_interpreted() -> None:
    to_next = lang.custom(
        given=lambda n, rank: 2,
        wanted=lambda n, rank: [[(rank - 1, 0)], [(rank - 1, 1), (rank, 1)]] if rank else [],
    )

    def body(n: int, sums: bool) -> None:
        for r in range(1, n):
            chunk(r - 1, "input", 0).copy(r, "output", 0)
            if sums:
                chunk(r, "input", 1).copy(r, "output", 1).reduce(chunk(r - 1, "input", 1))

    made = lang.algorithm(to_next, chunks=2, name="to_next")(body)(3, True)
    assert made.collective == "custom"
    with pytest.raises(PlanError, match=r"rank 1: nothing writes chunk 1 of its output; wanted rank 0's chunk 1 \+"):
        lang.algorithm(to_next, chunks=2, name="to_next")(body)(3, False)
    stray = lang.custom(given=lambda n, rank: 1, wanted=lambda n, rank: [[(n, 0)]])
    with pytest.raises(PlanError, match="rank 0 wants chunk 0 of rank 3"):
        lang.algorithm(stray, chunks=1)(body)(3, False)


@pytest.mark.parametrize(("given", "wanted", "match"), [
    ("1", [], r"given\(2, 0\) is '1'; expected how many chunks"),
    (1, None, r"wanted\(2, 0\) is None; expected a list of \(rank, chunk\) for each chunk"),
    (1, [(0, 0)], r"wanted\(2, 0\) is \[\(0, 0\)\]; expected a list of"),
    (1, [[(0.5, 0)]], r"wanted\(2, 0\) is \[\[\(0.5, 0\)\]\]; expected"),
    (1, [[(0, 0), (0, 0)]], "rank 0 wants chunk 0 of rank 0 twice in chunk 0"),
    (10**12, [], "2000000000000 chunks are given"),
])  # fmt: skip
def test_a_custom_collective_that_says_nothing_clear_is_refused(given: Any, wanted: Any, match: str) -> None:
    unclear = lang.custom(given=lambda n, rank: given, wanted=lambda n, rank: wanted)
    with pytest.raises(BlinkError, match=match):
        lang.algorithm(unclear, chunks=1)(lambda n: None)(2)


def test_threads_and_programs_within_programs_do_not_meet() -> None:
    inside = []

    @lang.algorithm("allreduce", chunks=1, inplace=True)
    def outer(n: int) -> None:
        own = chunk(0, "input", 0).reduce(chunk(1, "input", 0))
        inside.append(ring(3))
        thread = threading.Thread(target=lambda: inside.append(ring(4)))
        thread.start()
        thread.join()
        own.copy(1)

    assert outer(2).n == 2
    assert inside == [ring(3), ring(4)]
    with pytest.raises(PlanError, match=r"test_trace.py:\d+: outside of an algorithm"):
        chunk(0, "input", 0)


# ---------------------------------------------------------------- what is wrong


def test_a_stale_reference_is_named_with_its_line_and_who_wrote_there() -> None:
    def body(n: int) -> None:
        old = chunk(0, "input", 0)
        chunk(1, "input", 0).copy(0)
        old.copy(1)

    error = refused("allreduce", body, r"stale reference: rank 0's input\[0\] was overwritten at test_trace.py:\d+")
    assert line_of(error) == "old.copy(1)"
    assert "take it again with chunk(0, 'input', 0)" in str(error.value)


def test_another_reference_to_a_place_is_stale_after_a_fold() -> None:
    def body(n: int) -> None:
        one, two = chunk(0, "input", 0), chunk(0, "input", 0)
        one.reduce(chunk(1, "input", 0))
        two.copy(1)

    assert line_of(refused("allreduce", body, "stale reference")) == "two.copy(1)"


def test_a_chunk_that_was_never_written_is_named() -> None:
    def body(n: int) -> None:
        chunk(1, "scratch", 0)

    error = refused("allreduce", body, r"rank 1's scratch\[0\] was never written; copy a chunk there first")
    assert line_of(error) == 'chunk(1, "scratch", 0)'

    def out_of_place(n: int) -> None:
        chunk(1, "output", 0)

    refused("allreduce", out_of_place, r"rank 1's output\[0\] was never written", inplace=False)


def test_a_contribution_that_is_folded_twice_is_named() -> None:
    def body(n: int) -> None:
        own = chunk(0, "input", 1).reduce(chunk(1, "input", 1))
        own.reduce(chunk(1, "input", 1))

    error = refused("allreduce", body, "rank 1's chunk 1 is folded twice on rank 0")
    assert line_of(error) == 'own.reduce(chunk(1, "input", 1))'


def test_folding_chunks_that_may_differ_in_length_is_refused() -> None:
    def body(n: int) -> None:
        chunk(0, "input", 0).reduce(chunk(1, "input", 1))

    error = refused("allreduce", body, "folds rank 1's chunk 1 into chunk 0: they may differ in length")
    assert line_of(error) == 'chunk(0, "input", 0).reduce(chunk(1, "input", 1))'


def test_a_fold_in_what_reduces_nothing_is_refused() -> None:
    def body(n: int) -> None:
        chunk(0, "input", 0).reduce(chunk(1, "input", 0))

    refused("allgather", body, "a reduction in allgather, which reduces nothing")


def test_a_missing_and_a_wrong_result_say_rank_chunk_got_and_wanted() -> None:
    def missing(n: int) -> None:
        for i in range(2):
            chunk(0, "input", i).copy(0, "output", i).reduce(chunk(1, "input", i))
        chunk(0, "output", 0).copy(1)

    refused("allreduce", missing, r"^missing: rank 1: nothing writes chunk 1 of its output; "
            r"wanted rank 0's chunk 1 \+ rank 1's chunk 1", inplace=False)  # fmt: skip

    def wrong(n: int) -> None:
        for i in range(2):
            chunk(0, "input", i).copy(1, "other")
            chunk(1, "input", i).copy(0)
            chunk(1, "other", i).copy(1, "input", i)

    error = refused("allreduce", wrong, r"rank 0: chunk 0 of its output is rank 1's chunk 0; "
                    r"wanted rank 0's chunk 0 \+ rank 1's chunk 0")  # fmt: skip
    assert line_of(error) == 'chunk(1, "input", i).copy(0)'

    def on_one_rank(n: int) -> None:
        for r in range(n):
            chunk(r, "input", 0, 4).copy(r, "output", 0)

    error = refused("alltoall", on_one_rank, "chunk 2 of its output is rank 0's chunk 2; wanted rank 1's chunk 0",
                    inplace=False)  # fmt: skip
    assert line_of(error) == 'chunk(r, "input", 0, 4).copy(r, "output", 0)'


def test_a_forgotten_broadcast_says_who_lacks_what_and_where_it_is() -> None:
    def reduced(n: int) -> None:
        for i in range(2):
            own = chunk(0, "input", i)
            own.reduce(chunk(1, "input", i)).reduce(chunk(2, "input", i))

    error = refused("allreduce", reduced, r"^reduced: rank 1: nothing writes chunk 0 of its output; wanted .* "
                    r"\(also missing: 3 more results of ranks 1-2\); rank 0's input\[0\] has it \(test_trace.py:\d+\): "
                    "copy it from there to rank 1$", n=3)  # fmt: skip
    assert isinstance(error.value, PlanError)

    def round_once(n: int) -> None:
        at = chunk(0, "input", 0)
        for r in range(1, n):
            at = chunk(r, "input", 0).reduce(at)

    refused("allreduce", round_once, r"^test_trace.py:\d+: rank 1: chunk 0 of its output is rank 0's chunk 0 \+ "
            r"rank 1's chunk 0; wanted .*; rank 3's input\[0\] has it \(test_trace.py:\d+", n=4, chunks=1)  # fmt: skip

    def halfway(n: int) -> None:
        chunk(0, "input", 0).copy(0, "sum", 0).reduce(chunk(1, "input", 0))
        chunk(0, "sum", 0).copy(0, "sum", 1)

    refused("allreduce", halfway, r"^halfway: rank 0: nothing .*; rank 0's sum\[0\] has 2 of these 3 "
            r"\(test_trace.py:\d+\): fold the others into it", n=3, chunks=1, inplace=False)  # fmt: skip


def test_a_scratch_buffer_that_nothing_reads_is_named_where_a_result_is_missing() -> None:
    def typo(n: int) -> None:
        for r in range(n):
            chunk(0, "input", 0).copy(0, "way", r).copy(r, "Ouput", 0)

    refused("broadcast", typo, r"^typo: rank 1: nothing writes chunk 0 of its output; wanted rank 0's chunk 0; nothing "
            r"reads the buffer 'Ouput', which test_trace.py:\d+ writes: probably a typo of 'output'$", chunks=1,
            inplace=False)  # fmt: skip

    def forgotten(n: int) -> None:
        chunk(0, "input", 0).copy(1, "work", 0)

    refused("broadcast", forgotten, r"nothing reads the buffer 'work', .*: copy what it has to \"output\"$", chunks=1,
            inplace=False)  # fmt: skip


@pytest.mark.parametrize(("use", "match"), [
    (lambda: chunk(0.5, "input", 0), r"rank 0.5; expected one of"),  # type: ignore[arg-type]
    (lambda: chunk(2, "input", 0), r"rank 2; expected one of 0\.\.1"),
    (lambda: chunk(0, "input", 2), "chunk 2 of rank 0's input, which has 2"),
    (lambda: chunk(0, "input", 1, 2), r"chunks 1\.\.2 of rank 0's input"),
    (lambda: chunk(0, "input", -1), "chunk -1, size 1; expected numbers"),
    (lambda: chunk(0, "input", 0, 0), "chunk 0, size 0"),
    (lambda: chunk(0, 7, 0), 'buffer 7; expected "input"'),  # type: ignore[arg-type]
    (lambda: chunk(0, "input", 0).copy(3), r"rank 3; expected one of 0\.\.1"),
    (lambda: chunk(0, "input", 0).copy(1, "output"), "a copy to output without an index"),
    (lambda: chunk(0, "input", 0).copy(1, "output", 5), "chunk 5 of rank 1's output"),
    (lambda: chunk(0, "input", 0, 2).split(3), "expected a divisor of 2"),
    (lambda: chunk(0, "input", 0).group(chunk(1, "input", 1)), "two references to one buffer of one rank"),
    (lambda: chunk(0, "input", 0).group(1), "two references to one buffer of one rank"),  # type: ignore[arg-type]
    (lambda: chunk(0, "scratch", 0, 10**12), "chunks 0.* of rank 0's scratch, which has 16777216"),
    (lambda: chunk(0, "input", 0, 2).reduce(chunk(1, "input", 1)), "expected a reference of 2 chunks"),
    (lambda: chunk(0, "input", 0).reduce(7), "expected a reference of 1 chunks"),  # type: ignore[arg-type]
    (lambda: chunk(0, "input", 0).reduce(chunk(1, "input", 0)).get_origin_rank(), "a fold of 2 contributions"),
    (lambda: chunk(0, "input", 0).get_dst_rank(), "belongs in 2 places of the results"),
])  # fmt: skip
def test_what_is_no_place_is_refused(use: Callable[[], object], match: str) -> None:
    error = refused("allreduce", lambda n: use(), match, inplace=False)
    assert "chunk(" in line_of(error)


def test_a_reference_of_another_program_is_refused() -> None:
    kept = []

    @lang.algorithm("broadcast", chunks=1, inplace=True)
    def first(n: int) -> None:
        kept.append(chunk(0, "input", 0).copy(1))

    first(2)
    refused("allreduce", lambda n: kept[0].copy(0), "this reference is of another program")


def test_what_no_program_is_for_is_refused() -> None:
    with pytest.raises(SettingsError, match="'gossip' is unknown"):
        lang.algorithm("gossip", chunks=1)

    def body(n: int, k: int) -> None:
        raise AssertionError

    with pytest.raises(ArgumentError, match=r"chunks=0; expected a number of at least 1"):
        lang.algorithm("allreduce", chunks=lambda n, k: n - k)(body)(2, 2)
    with pytest.raises(PlanError, match=r"body: 1000000000 chunks of 2 ranks; expected 1\.\.4194304"):
        lang.algorithm("allreduce", chunks=10**9)(body)(2, 2)
    with pytest.raises(PlanError, match=r"body: 1000000000 ranks; expected 1\.\.4096"):
        lang.algorithm("allreduce", chunks=1)(body)(10**9, 2)
    for root in (2, -1, "0", None):
        with pytest.raises(ArgumentError, match=r"body: root .*; expected one of 0\.\.1"):
            lang.algorithm("broadcast", chunks=1, root=root)(body)(2, 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"body\(3,\).*'k'; give its parameters"):
        lang.algorithm("allreduce", chunks=1)(body)(3)
    with pytest.raises(ArgumentError, match=r"body\(3\): expected a number of ranks of \[2, 4\]"):
        lang.algorithm("allreduce", chunks=1, ranks=(2, 4))(body)(3, 1)
    with pytest.raises(PlanError, match="no collective that an algorithm can be written for"):
        lang.algorithm("barrier", chunks=1)(body)(2, 1)


@pytest.mark.parametrize(("wrong", "match"), [
    ({"collective": 3}, r"collective 3; expected a name, or what lang.custom\(\) makes"),
    ({"ranks": 4}, "ranks=4; expected the numbers of ranks that it is for"),
    ({"name": 4}, "name 4; expected a text"),
    ({"min_bytes": "1M"}, "min_bytes='1M', max_bytes=None; expected numbers of bytes"),
    ({"min_bytes": -1}, "min_bytes=-1, max_bytes=None; expected numbers of bytes"),
    ({"min_bytes": 2048, "max_bytes": 1024}, "min_bytes=2048, max_bytes=1024; expected numbers of bytes"),
])  # fmt: skip
def test_an_option_that_means_nothing_is_refused_where_it_is_written(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        lang.algorithm(**{"collective": "allreduce", "chunks": 1, **wrong})(lambda n: None)


def test_a_program_without_end_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_VALUES", 1000)

    def body(n: int) -> None:
        at = chunk(0, "input", 0)
        while True:
            at = at.copy(1 - at.rank)

    error = refused("allreduce", body, "more than 1000 values; look for a loop without end")
    assert line_of(error) == "at = at.copy(1 - at.rank)"


def test_a_parameter_called_root_means_nothing_where_there_is_none() -> None:
    @lang.algorithm("allgather", chunks=1, inplace=True)
    def by_way_of(n: int, root: str) -> None:
        for r in range(n):
            for other in range(n):
                chunk(r, "input", 0).copy(other)

    assert by_way_of(3, "any").n == 3
