"""MSCCLang's names: programs as people write them run, are proved, print XML that is proved; wrong ones are refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from blinkmpi.errors import PlanError
from blinkmpi.lang import msccl
from blinkmpi.lang.flow import Flow
from blinkmpi.lang.msccl import (
    XML,
    AllGather,
    AllReduce,
    AllToAll,
    Buffer,
    Check,
    Chunk,
    Collective,
    MSCCLProgram,
    ReduceChunk,
    ReduceScatter,
    ThreadblockPolicy,
    chunk,
    fully_connected,
)
from blinkmpi.lang.xml.check import XmlReport, judge
from blinkmpi.lang.xml.file import parse_xml


def program(collective: Any, body: Callable[[], None], instances: int = 1, **options: Any) -> MSCCLProgram:
    """Run a program, and check and print it."""
    made = MSCCLProgram("mine", fully_connected(collective.num_ranks), collective, instances, **options)
    with made:
        body()
        assert Check() is True
        XML()
    return made


def printed(capsys: pytest.CaptureFixture[str]) -> XmlReport:
    """The verdict on the XML that was printed."""
    report, flow = judge(parse_xml(capsys.readouterr().out))
    assert [fault.text for fault in report.faults] == []
    assert isinstance(flow, Flow)
    return report


def here(text: str) -> str:
    """This file's line that ends with ``# text``."""
    for number, line in enumerate(open(__file__, encoding="utf-8"), start=1):  # noqa: SIM115
        if line.rstrip().endswith(f"# {text}"):
            return f"test_msccl.py:{number}"
    raise AssertionError(text)


def ring(n: int) -> None:
    for i in range(n):
        for k in range(n - 1):
            chunk((i + k + 1) % n, Buffer.input, i).reduce(chunk((i + k) % n, Buffer.input, i), ch=i % 2)
        for k in range(n - 1, 2 * n - 2):
            chunk((i + k) % n, Buffer.input, i).copy((i + k + 1) % n, Buffer.input, i, sendtb=0, recvtb=0, ch=i % 2)


def all_pairs(n: int) -> None:
    for r in range(n):
        for i in range(n):
            if i != r:
                chunk(r, Buffer.input, i * n, size=n).copy(i, "scratch")
    for i in range(n):
        for k in range(n * (n - 1)):
            chunk(i, Buffer.input, i * n + k % n).reduce(chunk(i, "scratch", k))
        for r in range(n):
            if r != i:
                chunk(i, Buffer.input, i * n, size=n).copy(r, Buffer.input, i * n)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("instances", [1, 3])
def test_a_ring(capsys: pytest.CaptureFixture[str], instances: int, in_place: bool) -> None:
    def body() -> None:
        ring(4)
        if not in_place:
            for r in range(4):
                chunk(r, Buffer.input, 0, 4).copy(r, Buffer.output, 0)

    program(AllReduce(4, 4, in_place), body, instances, protocol="LL128", threadblock_policy=ThreadblockPolicy.manual)
    report = printed(capsys)
    assert (report.collective, report.in_place, report.protocol) == ("allreduce", in_place, "LL128")
    assert report.chunks == 4 * instances


def test_scratch_grows_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    program(AllReduce(3, 9, True), lambda: all_pairs(3), dependence_nop=True, interleaved_replication=False)
    assert printed(capsys).proved


def test_the_wrong_program_that_msccl_accepts_is_right_by_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Line by line it is right: rank 1's scratch is reduced into rank 0's input. MSCCLang's compiler makes a step of it
    that reads rank 0's own scratch, which nobody wrote; its Check() says True, and so do we, but of a right file.
    """

    def body() -> None:
        chunk(1, Buffer.input, 0).copy(1, "scratch", 0)
        chunk(0, Buffer.input, 0).reduce(chunk(1, "scratch", 0)).copy(1, Buffer.input, 0)

    made = program(AllReduce(2, 1, True), body)
    text = capsys.readouterr().out
    assert judge(parse_xml(text))[0].proved
    assert 'type="rrcs" srcbuf="i"' in text
    assert 'srcbuf="s"' not in text
    assert made.flow().prove().goal.collective == "allreduce"


@pytest.mark.parametrize("in_place", [True, False])
def test_allgather(capsys: pytest.CaptureFixture[str], in_place: bool) -> None:
    def body() -> None:
        n = 3
        for r in range(n):
            c = chunk(r, Buffer.input, 0, 2)
            assert c is not None
            c = c if in_place else c.copy(r, Buffer.output, r * 2)
            for k in range(1, n):
                assert c is not None
                c = c.copy((r + k) % n, Buffer.output, r * 2)

    program(AllGather(3, 2, in_place), body)
    assert printed(capsys).in_place == in_place


@pytest.mark.parametrize("in_place", [True, False])
def test_reduce_scatter(capsys: pytest.CaptureFixture[str], in_place: bool) -> None:
    def body() -> None:
        n = 3
        for block in range(n):
            for k in range(1, n):
                at = chunk((block + k + 1) % n, Buffer.input, block)
                assert at is not None
                at.reduce(chunk((block + k) % n, Buffer.input, block))
            if not in_place:
                chunk(block, Buffer.input, block).copy(block, Buffer.output, 0)

    program(ReduceScatter(3, 1, in_place), body)
    assert printed(capsys).proved


def test_alltoall_goes_where_chunks_say(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        for r in range(4):
            for i in range(8):
                c = chunk(r, Buffer.input, i)
                assert c is not None
                assert (c.get_origin_rank(), c.get_origin_index()) == (r, i)
                via = c.copy(c.get_dst_rank(), f"from {r}")
                assert via is not None
                via.copy(via.get_dst_rank(), Buffer.output, via.get_dst_index())

    program(AllToAll(4, 2, False), body)
    assert printed(capsys).proved


def test_split_and_group() -> None:
    with MSCCLProgram("", fully_connected(2), AllReduce(2, 6, True), 1):
        whole = chunk(0, Buffer.input, 0, 6)
        assert whole is not None
        parts = whole.split(3)
        assert [(p.index, p.size) for p in parts] == [(0, 2), (2, 2), (4, 2)]
        assert parts[0].group(parts[2]) == parts[2].group(parts[0]) == whole
        with pytest.raises(PlanError, match=r"split of 6 chunks into 4 parts; expected a divisor"):
            whole.split(4)
        with pytest.raises(PlanError, match=r"group of input of rank 0 and input of rank 1; expected one buffer"):
            whole.group(chunk(1, Buffer.input, 0))
        assert whole.copy(0) is None
        assert whole.copy(1) == chunk(1, Buffer.input, 0, 6)


def test_a_stale_reference_reads_the_new_content() -> None:
    with MSCCLProgram("", fully_connected(2), AllReduce(2, 2, True), 1) as made:
        c = chunk(0, Buffer.input, 0)
        assert c is not None
        chunk(1, Buffer.input, 1).copy(0, Buffer.input, 0)
        assert (c.get_origin_rank(), c.get_origin_index()) == (1, 1)
        assert chunk(0, Buffer.output, 0) == c
        assert chunk(0, "never", 0) is None
        assert made.buffers[0][Buffer.output] is made.buffers[0][Buffer.input]


class ToOthers(Collective):
    """Rank 0's chunks to all."""

    def init_buffers(self) -> list[dict[Any, list[Any]]]:
        size, ranks = self.chunk_factor, range(self.num_ranks)
        inputs = [[Chunk(0, c, -1, c) if r == 0 else None for c in range(size)] for r in ranks]
        return [{Buffer.input: of, Buffer.output: [None] * size} for of in inputs]

    def check(self, prog: MSCCLProgram) -> bool:
        places = [prog.buffers[r][Buffer.output][c] for r in range(1, self.num_ranks) for c in range(self.chunk_factor)]
        return all(p is not None and p.origin_rank == 0 for p in places)


def test_a_custom_collective_is_checked_by_its_own_check(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        c = chunk(0, Buffer.input, 0, 2)
        assert chunk(1, Buffer.input, 0) is None
        for r in (1, 2):
            assert c is not None
            c = c.copy(r, buffer=Buffer.output, index=0, ch=r)

    program(ToOthers(3, 2, inplace=False), body)
    report = printed(capsys)
    assert report.collective == "custom"
    assert report.computes[0] == "rank 1: chunk 0 of its output is rank 0's chunk 0"
    with MSCCLProgram("half", fully_connected(3), ToOthers(3, 2, inplace=False), 1):
        chunk(0, Buffer.input, 0, 2).copy(1, Buffer.output, 0)
        with pytest.raises(PlanError, match="half: the check of ToOthers says that it is wrong"):
            Check()
        with pytest.raises(PlanError, match="says that it is wrong"):
            XML()
    assert capsys.readouterr().out == ""


def test_chunks_start_in_the_input() -> None:
    class Elsewhere(Collective):
        def init_buffers(self) -> list[dict[Any, list[Any]]]:
            return [{Buffer.input: [None], Buffer.output: [Chunk(r, 0)]} for r in range(self.num_ranks)]

    with pytest.raises(PlanError, match=r"Elsewhere has a chunk in output\[0\] of rank 0 at the start"):
        MSCCLProgram("", fully_connected(2), Elsewhere(2, 1, False), 1)


def test_a_copy_in_place_goes_to_the_senders_block(capsys: pytest.CaptureFixture[str]) -> None:
    """As in MSCCLang: the input of an allgather in place is a block of the output, and the sender says which one."""

    def body() -> None:
        for r in range(2):
            chunk(r, Buffer.input, 0).copy(1 - r, Buffer.input, 0)

    program(AllGather(2, 1, True), body)
    assert printed(capsys).proved


def test_reduced_chunks_compare_by_what_is_in_them() -> None:
    one, other = Chunk(0, 1), Chunk(1, 1)
    assert one.reduce(-1, other) == other.reduce(2, one) == ReduceChunk(7, [other, one])
    assert hash(one.reduce(0, other)) == hash(other.reduce(0, one))
    assert one.reduce(0, other) != one.reduce(0, other).reduce(0, one)
    assert one == Chunk(0, 1, 5, 5)
    assert one != other
    assert repr(other.reduce(0, one)).startswith("ReduceChunk([Chunk(origin_rank=0")


# ---------------------------------------------------------------- refused


def test_a_wrong_result_names_place_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    with MSCCLProgram("", fully_connected(2), AllReduce(2, 1, True), 1):
        chunk(0, Buffer.input, 0).copy(1, Buffer.input, 0)  # the copy
        for refused in (Check, XML):
            with pytest.raises(PlanError) as caught:
                refused()
            assert str(caught.value) == ("rank 0: chunk 0 of its output is rank 0's chunk 0; "
                                         "wanted rank 0's chunk 0 + rank 1's chunk 0")  # fmt: skip
        chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))  # the fold
        with pytest.raises(
            PlanError, match=f"^{re.escape(here('the fold'))}: rank 0's chunk 0 is folded twice on rank 0"
        ):
            XML()
    assert capsys.readouterr().out == ""


def test_what_was_overwritten_is_not_wrong() -> None:
    """A value that is folded twice and that nobody uses."""
    with MSCCLProgram("", fully_connected(2), AllReduce(2, 1, True), 1):
        chunk(0, Buffer.input, 0).copy(1, "s", 0)
        chunk(1, "s", 0).reduce(chunk(1, "s", 0))
        chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0)).copy(0, Buffer.input, 0)
        assert Check() is True


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: chunk(5, Buffer.input, 0), "rank 5; the program has ranks 0..1"),
    (lambda: chunk(0, Buffer.input, 0).copy(2), "rank 2; the program has ranks 0..1"),
    (lambda: chunk(0, Buffer.input, 0).copy(1, Buffer.input, 7), "rank 1 has no input[7]; its chunks are 0..1"),
    (lambda: chunk(0, Buffer.input, 0).copy(1, Buffer.output), "copy to output without index; say which chunk"),
    (lambda: chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0, 2)), "reduce of 2 chunks into 1"),
    (lambda: chunk(0, Buffer.input, 0).reduce(chunk(1, "none", 0)), "reduce of a NoneType; expected what chunk"),
    (lambda: chunk(0, Buffer.input, 0, 2).reduce(chunk(1, Buffer.input, 1, 2)),
     "reduce reads input[2] of rank 1, where nothing was written"),
    (lambda: MSCCLProgram("x", fully_connected(2), AllReduce(2, 2, True), 1).__enter__(),
     "a program inside of another one; end 'mine' first"),
    (lambda: MSCCLProgram("x", fully_connected(3), AllReduce(2, 2, True), 1), "2 ranks on a topology of 3"),
    (lambda: MSCCLProgram("x", fully_connected(2), AllReduce(2, 2, True), 1, "TCP"), "protocol 'TCP'; expected one of"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_mistakes_name_the_line(wrong: Callable[[], object], message: str) -> None:
    with MSCCLProgram("mine", fully_connected(2), AllReduce(2, 2, True), 1), pytest.raises(PlanError) as caught:
        wrong()
    assert re.match(r"test_msccl\.py:\d+: ", str(caught.value))
    assert message in str(caught.value)


def test_a_folded_chunk_has_no_origin() -> None:
    with MSCCLProgram("", fully_connected(2), AllReduce(2, 1, True), 1):
        c = chunk(0, Buffer.input, 0)
        assert c is not None
        c.reduce(chunk(1, Buffer.input, 0))
        with pytest.raises(PlanError, match=r"input\[0\] of rank 0, where several chunks are folded"):
            c.get_dst_rank()


def test_links_that_are_not_there_are_not_used() -> None:
    class Line:
        def num_nodes(self) -> int:
            return 3

        def link(self, src: int, dst: int) -> int:
            return int(abs(src - dst) == 1)

    with MSCCLProgram("", Line(), AllReduce(3, 1, True), 1):
        chunk(0, Buffer.input, 0).copy(1, "s")
        with pytest.raises(PlanError, match="the topology has no link from rank 0 to rank 2"):
            chunk(0, Buffer.input, 0).copy(2, "s")
        with pytest.raises(PlanError, match="the topology has no link from rank 2 to rank 0"):
            chunk(0, Buffer.input, 0).reduce(chunk(2, Buffer.input, 0))


def test_outside_of_a_program_there_is_nothing() -> None:
    for call in (Check, XML, lambda: chunk(0, Buffer.input, 0)):
        with pytest.raises(PlanError, match="outside of a program; write it in a block of with MSCCLProgram"):
            call()


def test_a_program_that_fails_is_left() -> None:
    with pytest.raises(KeyError), MSCCLProgram("", fully_connected(2), AllReduce(2, 1, True), 1):
        raise KeyError
    with MSCCLProgram("", fully_connected(2), AllReduce(2, 1, True), 1):
        assert chunk(0, Buffer.input, 0) is not None


def test_a_star_import_gives_the_names() -> None:
    names = {"MSCCLProgram", "chunk", "Buffer", "AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Collective",
             "Chunk", "ReduceChunk", "XML", "Check", "ThreadblockPolicy", "fully_connected"}  # fmt: skip
    assert set(msccl.__all__) == names
    assert all(hasattr(msccl, name) for name in names)
