"""What the CUDA transport works out on the host, without a GPU: what fits, which protocol is taken, which memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError, BufferTypeError, DeviceError, PlanError, SettingsError
from blinkmpi.measure.tune import choices, rows, winner
from blinkmpi.planning.plan import Plan, Rule
from blinkmpi.planning.selection import make_plan, program_for
from blinkmpi.program.call import BLOCKED, REDUCTIONS, Call
from blinkmpi.program.ir import Program
from blinkmpi.program.memory import DeviceArray, overlap
from blinkmpi.runtime import arguments as calls
from blinkmpi.runtime.buffers import on_device, parse
from blinkmpi.runtime.cuda_calls import gpu_key, stream_address
from blinkmpi.runtime.cuda_context import CudaContext
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.codegen import scale
from blinkmpi.transport.cuda.direct_segments import segment
from blinkmpi.transport.cuda.executor import fingerprint
from blinkmpi.transport.cuda.memory_layout import LINE, SYMMETRIC_BYTES, groups, most_stages, place
from blinkmpi.transport.cuda.packets import PROTOCOLS as PACKETS
from blinkmpi.transport.cuda.packets import fits
from blinkmpi.trees.tree import ROOTED, Collective
from tests.unit.transport.test_cuda_direct_segments import REAL

H200 = machine("hgx-h200")


def test_fingerprints_tell_calls_apart() -> None:
    texts = [f"slots allreduce({n} x float32, op sum)" for n in range(2000)]
    prints = {fingerprint(text) for text in texts}
    assert len(prints) == len(texts)
    assert all(0 < p < 1 << 32 for p in prints)


def test_moves_are_counted_in_bytes() -> None:
    assert scale(Call("broadcast", 2, (5,), "complex128", "", 0)) == 16
    assert scale(Call("allreduce", 2, (5,), "complex128", "sum")) == 1


# ---------------------------------------------------------------- groups and places


def program(collective: Collective, n: int, scheme: str, *, count: int = 1 << 20, chunk: int = 64 << 10) -> Program:
    topology = modify(H200, gpus=",".join(map(str, range(n))))
    counts = (count,) * (n if collective == "reduce_scatter" else 1)
    op, root = "sum" if collective in REDUCTIONS else "", 0 if collective in ROOTED else -1
    plan = make_plan(topology, collectives=(collective,), gpus="onehop")
    return program_for(plan, Call(collective, n, counts, "float32", op, root), Rule(collective, 0, scheme, chunk, 4))


@pytest.mark.parametrize("collective", REAL)
def test_groups_fill_a_gpu_and_no_more(collective: Collective) -> None:
    lowered = program(collective, 8, "onehop")
    stages = {r: [stage.tree for stage in lowered.of(r)] for r in range(8)}
    fewest = most_stages(lowered)
    assert fewest == max(map(len, stages.values()))
    for ctas in (fewest, 64, 132):
        taken = groups(lowered, ctas)
        used = {r: sum(taken[tree] for tree in trees) for r, trees in stages.items()}
        assert max(used.values()) <= ctas
        assert min(taken.values()) >= 1
        chunks = {t: max(-(-x.count // lowered.chunk_of(x)) for x in lowered.stages if x.tree == t) for t in taken}
        assert all(taken[tree] <= chunks[tree] for tree in taken), "a CTA without a chunk"
        full = {t for t in taken if any(t in trees and used[r] + trees.count(t) > ctas for r, trees in stages.items())}
        assert all(taken[tree] == chunks[tree] for tree in set(taken) - full), "room is left, and work"
    with pytest.raises(DeviceError, match=f"a rank has {fewest} stages .* the GPU room for {fewest - 1} groups"):
        groups(lowered, fewest - 1)


def test_short_calls_take_few_groups_and_the_host_path_more() -> None:
    short = program("allreduce", 4, "onehop", count=64)
    assert set(groups(short, 132).values()) == {1}
    lowered = program("broadcast", 4, "onehop", count=1 << 24)
    plain, hosted = groups(lowered, 132), groups(lowered, 132, [0])
    tree = lowered.channels[0].tree
    assert hosted[tree] > plain[tree]


def test_what_does_not_fit_is_said_with_its_size() -> None:
    lowered = program("allreduce", 8, "onehop", count=1 << 26, chunk=4 << 20)
    with pytest.raises(DeviceError, match=r"allreduce by onehop needs \d+ bytes of slots"):
        place(lowered, groups(lowered, 132), 4, 4, SYMMETRIC_BYTES)
    with pytest.raises(DeviceError, match="on the host"):
        place(lowered, groups(lowered, 132), 4, 4, 1 << 40, range(len(lowered.channels)))
    shared = make_plan(machine("cpu:4"), collectives=("broadcast",))
    call = Call("broadcast", 4, (1000,), "float32", "", 0)
    multicast = program_for(shared, call, Rule("broadcast", 0, "direct", 4096, 2))
    with pytest.raises(ArgumentError, match="does not multicast"):
        place(multicast, groups(multicast, 132), 4, 4, SYMMETRIC_BYTES)


@pytest.mark.parametrize("collective", REAL)
@pytest.mark.parametrize("n", [2, 8])
def test_the_largest_gpu_has_flags_enough(collective: Collective, n: int) -> None:
    """Each pair of ranks has a fixed number of flag lines, whatever the plan."""
    lowered = program(collective, n, "onehop", chunk=LINE)
    assert len(place(lowered, groups(lowered, 256), 4, 4, 1 << 40)) == len(lowered.channels)


# ---------------------------------------------------------------- the selection table


def planned(n: int, algo: str = "") -> Plan:
    return make_plan(modify(H200, gpus=",".join(map(str, range(n)))), gpus="onehop", algo=algo)


def rule_of(plan: Plan, call: Call, *, registered: bool) -> Rule:
    """The row that a call takes in a job with GPUs."""
    return CudaContext.rule(SimpleNamespace(plans=plan), call, registered=registered)  # type: ignore[arg-type]


def call_of_bytes(collective: Collective, n: int, nbytes: int) -> Call:
    """The call whose largest buffer has at most so many bytes."""
    counts = (max(1, nbytes // (n if collective in BLOCKED else 1)),) * (n if collective == "reduce_scatter" else 1)
    op, root = "sum" if collective in REDUCTIONS else "", 0 if collective in ROOTED else -1
    return Call(collective, n, counts, "int8", op, root)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "algo",
    ["", *(f"{c}:onehop/{p}_one_shot" for c in REAL for p in ("ll16", "ll128")), "allreduce:onehop/ll16_two_shot"],
)
def test_no_call_takes_packets_that_its_boxes_cannot_hold(n: int, algo: str) -> None:
    plan = planned(n, algo)
    for collective in REAL:
        for registered in (False, True):
            rows = [r for r in plan.rules if (r.collective, r.registered) == (collective, registered)]
            assert rows[0].min_bytes == 0
            assert [r.min_bytes for r in rows] == sorted({r.min_bytes for r in rows}), "ascending, each once"
            for nbytes in (1, 1 << 14, 1 << 30, *(r.min_bytes + d for r in rows for d in (-1, 0) if r.min_bytes)):
                call = call_of_bytes(collective, n, nbytes)
                rule = rule_of(plan, call, registered=registered)
                if rule.protocol in PACKETS:
                    assert fits(call, rule.protocol), (nbytes, rule)
                else:
                    assert registered or rule.protocol == "slots"
                    assert nbytes > 1 or not algo.startswith(collective)


def test_uneven_blocks_never_take_packets() -> None:
    for algo in ("", "reduce_scatter:onehop/ll16_one_shot"):
        rule = rule_of(planned(4, algo), Call("reduce_scatter", 4, (1, 2, 3, 4), "int8", "sum"), registered=False)
        assert (rule.scheme, rule.protocol) == ("onehop", "slots")


def test_registered_rows_are_for_registered_buffers() -> None:
    plan = planned(8)
    assert plan.rule("allreduce", 8 << 20).protocol != "direct"
    assert plan.rule("allreduce", 8 << 20, registered=True).protocol == "direct"
    assert (
        plan.rule("allreduce", 1024, registered=True).protocol
        == plan.rule("allreduce", 1024).protocol
        == "ll16_one_shot"
    )
    long = plan.rule("allreduce", 1 << 30, registered=True)
    assert (long.scheme, long.protocol) == ("chain", "rs_ag")
    assert plan.rule("allreduce", 1 << 30).protocol == "slots"
    assert planned(2).rule("allreduce", 1 << 30, registered=True).protocol != "rs_ag"
    forced = planned(4, "allreduce:chain/rs_ag")
    assert [forced.rule("allreduce", 1, registered=r).protocol for r in (True, False)] == ["rs_ag", "slots"]
    only = planned(8, "allreduce:chain")
    assert only.rule("allreduce", 1 << 30, registered=True).scheme == "chain", "no row of its own: as for any buffer"
    with pytest.raises(PlanError, match="no rule for allreduce"):
        Plan("m", "f", 2, (), ()).rule("allreduce", 1, registered=True)


def test_lines_go_where_nvlink_alone_leads() -> None:
    """A line of 128 bytes stays whole over NVLink; over PCIe it may not."""
    told = modify(H200, gpus="0,1,2,3")
    by_pcie = msgspec.structs.replace(
        told, links=tuple(msgspec.structs.replace(link, kind="pcie") for link in told.links)
    )
    for machine_, wanted in ((told, True), (by_pcie, False)):
        plan = make_plan(machine_, gpus="onehop")
        assert any(r.protocol.startswith("ll128") for r in plan.rules) is wanted
        assert {r.protocol for r in plan.rules if r.collective == "allreduce"} >= {"ll16_one_shot", "direct", "slots"}
    with pytest.raises(SettingsError, match="BLINKMPI_ALGO names onehop/ll128_one_shot"):
        make_plan(by_pcie, gpus="onehop", algo="allreduce:onehop/ll128_one_shot")


@pytest.mark.parametrize("protocol", [*PACKETS, "direct", "slots"])
def test_a_protocol_can_be_forced(protocol: str) -> None:
    plan = planned(4, f"allreduce:onehop/{protocol}")
    for nbytes in (0, 1 << 30):
        assert plan.rule("allreduce", nbytes, registered=True).protocol == protocol
        assert plan.rule("allreduce", nbytes).protocol == ("slots" if protocol == "direct" else protocol)
    assert plan.rule("broadcast", 0).protocol == "ll16_one_shot", "the others are as they were"
    assert {r.reason for r in plan.rules if r.collective == "allreduce"} == {"BLINKMPI_ALGO"}


@pytest.mark.parametrize("wanted", ["allreduce:onehop/cma", "allreduce:ring", "allreduce:trees/direct", "bcast:mpi"])
def test_what_cannot_be_is_a_settings_error(wanted: str) -> None:
    with pytest.raises(SettingsError, match=r"BLINKMPI_ALGO names .* it can be onehop, .*onehop/direct"):
        planned(4, wanted)


def test_a_rule_keeps_its_place_unless_another_is_faster_by_a_margin() -> None:
    one, other = Rule("reduce", 0, "onehop"), Rule("reduce", 0, "onehop", protocol="direct")
    hybrid = Rule("reduce", 0, "hybrid")
    assert winner({one: 1.0, other: 0.99}) == other
    assert winner({one: 1.0, other: 0.99}, one) == one
    assert winner({one: 1.0, other: 0.9}, one) == other
    assert winner({other: 0.9}, one) == other, "a rule that does not fit here any more"
    assert winner({one: 1.0, hybrid: 0.96}) == one
    assert winner({one: 1.0, hybrid: 0.96}, hybrid) == one
    assert winner({one: 1.0, hybrid: 0.9}) == hybrid


def test_tune_measures_between_sizes_with_different_winners() -> None:
    low, high, never = (Rule("reduce", 0, "onehop", chunk) for chunk in (1, 2, 3))
    asked: list[int] = []

    def measure(nbytes: int, among: Any = ()) -> dict[Rule, float]:
        asked.append(nbytes)
        times = {low: float(nbytes), high: 5000.0, never: 1e9}
        assert not among or among <= times.keys() - {never}
        return {rule: times[rule] for rule in times if not among or rule in among}

    found = choices([1 << 10, 1 << 14, 1 << 18], measure)
    assert [size for size, _ in found] == sorted(asked)
    assert dict(found) == {size: low if size < 5000 else high for size in asked}
    assert 1 << 12 in asked
    assert 1 << 13 in asked
    assert 1 << 16 not in asked, "alike on both sides"
    assert [(r.min_bytes, r.chunk_bytes) for r in rows(found, registered=False)] == [(0, 1), (int(2**12.5), 2)]


def test_emulated_and_irregular_machines_take_slots() -> None:
    for plan in (
        make_plan(machine("dgx-1v"), gpus="onehop", collectives=("allreduce",)),
        make_plan(H200, gpus="slots", collectives=("allreduce",)),
    ):
        assert [(r.min_bytes, r.protocol, r.registered) for r in plan.rules] == [(0, "slots", False)]


# ---------------------------------------------------------------- buffers


class Cai:
    """What has ``__cuda_array_interface__``."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", at: int = 4096, **more: Any) -> None:
        data = (at, more.pop("read_only", False))
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": data, "version": 3, **more}


class Data:
    """What CuPy's arrays say of their memory."""

    ptr = 1 << 30


def device(spec: Any, *, writable: bool = False, blocks: int = 1) -> DeviceArray:
    found = parse(spec, name="buf", writable=writable, blocks=blocks).array
    assert isinstance(found, DeviceArray)
    return found


def test_gpu_memory_is_read_from_its_interface() -> None:
    array = Cai((3, 4), stream=77, strides=(16, 4))
    found = device(array)
    assert (found.ptr, found.size, found.nbytes, found.stream, found.owner) == (4096, 12, 48, 77, array)
    assert device(Cai((2,), stream=1)).stream == 0, "1 is the default stream"
    assert device(Cai((0,), strides=(8,))).size == 0
    part = found[2:5]
    assert (part.ptr, part.size) == (4096 + 8, 3)
    with pytest.raises(ArgumentError, match="step 2"):
        found[::2]
    assert on_device(np.zeros(3), "buf", True) is None
    assert on_device(b"bytes", "buf", False) is None


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        (Cai((3, 4), strides=(32, 4)), ArgumentError, r"not contiguous \(shape \(3, 4\), strides"),
        (Cai((3,), read_only=True), ArgumentError, "read-only"),
        (Cai((3,), typestr="<U4"), BufferTypeError, "element type <U4 in GPU memory"),
        ((Cai((3,)), 4), ArgumentError, "elements 0 to 4 of an array that has 3"),
        ((Cai((3,)), MPI.DOUBLE), BufferTypeError, "holds float32 in GPU memory, the type says float64"),
    ],
)
def test_gpu_memory_that_cannot_be_used(array: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse(array, name="buf", writable=True)


def test_specifications_of_gpu_memory() -> None:
    assert device((Cai((12,)), MPI.FLOAT)).size == 12
    assert device([Cai((12,)), (2, 3), MPI.FLOAT], blocks=4).ptr == 4096 + 12
    assert device([Cai((12,)), 2], blocks=4).size == 8


def test_cupy_and_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(ptr=1234)
    fake = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: current))
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    kind = type("ndarray", (SimpleNamespace,), {"__module__": "cupy._core"})
    fake.ndarray = kind
    flags = SimpleNamespace(c_contiguous=True, f_contiguous=False)
    data, dtype = SimpleNamespace(ptr=256, device_id=0), np.dtype("int16")
    array = kind(flags=flags, _c_contiguous=True, data=data, size=5, dtype=dtype, shape=(5,))
    found = device(array)
    assert (found.ptr, found.itemsize, found.stream) == (256, 2, 1234)

    call = calls.allreduce, (MPI.IN_PLACE, array, MPI.SUM)
    key = gpu_key(*call, None)
    assert key == gpu_key(*call, None)
    assert key != gpu_key(*call, 99)
    assert key != gpu_key(calls.allreduce, (None, array, MPI.SUM), None)
    assert gpu_key(calls.allreduce, ([array, 5], array), None) is None
    current.ptr = 0
    assert key != gpu_key(*call, None), "another current stream is another call"
    flags.c_contiguous = array._c_contiguous = False
    assert gpu_key(*call, None) is None
    with pytest.raises(ArgumentError, match=r"cupy\.ascontiguousarray"):
        device(array)


def test_what_cupys_arrays_say_of_themselves() -> None:
    """``gpu_key`` asks them in a way that CuPy does not promise."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 20, 64, None, 0), 0)
    array = cupy.ndarray((4, 4), "float32", memory)
    assert array._c_contiguous is array.flags.c_contiguous is True
    assert array.T._c_contiguous is array.T.flags.c_contiguous is False
    assert gpu_key(calls.broadcast, (array, 0), 7) == (
        calls.broadcast, 1 << 20, 16, np.dtype("float32").num, 0, 7, False,
    )  # fmt: skip
    assert gpu_key(calls.broadcast, (array.T, 0), 7) is None


# ---------------------------------------------------------------- in place


@pytest.mark.parametrize("counts", [(5, 5, 5), (2, 1, 2), (1, 2, 3), (0, 0, 0), (0, 3, 2), (5, 0, 5)])
def test_a_reduce_scatter_in_place_is_copied_where_a_block_would_overlap_its_home(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everywhere else its result stands in the own block first, and goes to the front."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=lambda *_: SimpleNamespace(data=Data)))
    overlapping = any(0 < sum(counts[:r]) < counts[r] for r in range(3))
    whole, count = Cai((sum(counts),)), sum(counts)
    for rank in range(3):
        made = calls.reduce_scatter(rank, 3, MPI.IN_PLACE, whole, counts, "sum", lambda mine: (mine,))
        own = 4096 + 4 * sum(counts[:rank])
        home = DeviceArray(4096, counts[rank], 4, 0, whole, 0, -1)
        if overlapping:
            assert isinstance(made.send, DeviceArray)
            assert (made.send.ptr, made.send.copy_of, made.send.size) == (Data.ptr, 4096, count)
            assert (made.recv, made.home) == (home, None)
            continue
        moves = own > 4096 and counts[rank] > 0
        assert made.send == DeviceArray(4096, count, 4, 0, whole, 0, -1)
        assert made.recv == (DeviceArray(own, counts[rank], 4, 0, whole, 0, -1) if moves else home)
        assert made.home == (home if moves else None)


@pytest.mark.parametrize("gpus", ["0,1", "0,1,2,3", "0,1,2,3,4,5,6,7"])
def test_a_ranks_own_block_is_read_only_where_its_result_is_written(gpus: str) -> None:
    """By every scheme through slots; so the result may take the block's place while peers read the rest."""
    n = len(gpus.split(","))
    for topology in (modify(H200, gpus=gpus), *([machine("dgx-1v")] if n == 8 else [])):
        plan = make_plan(topology, collectives=("reduce_scatter",), gpus="onehop")
        for counts in ((1003,) * n, tuple(range(1000, 1000 + n))):
            call = Call("reduce_scatter", n, counts, "float32", "sum")
            for scheme in plan.schemes("reduce_scatter", -1):
                lowered = program_for(plan, call, Rule("reduce_scatter", 0, scheme, 1024, 4))
                for rank in range(n):
                    start, length = call.block(rank)
                    for stage in lowered.of(rank):
                        if stage.store is not None:
                            assert stage.local == start + stage.store, (scheme, rank, stage)
                        elif stage.local is not None:
                            assert stage.local + stage.count <= start or stage.local >= start + length, (scheme, stage)
    for r in range(n):  # by ``direct``
        sources, targets, src_at, dst_at, size = segment(Call("reduce_scatter", n, (1000,) * n, "float32", "sum"), r)
        assert (targets, src_at, dst_at) == (1 << r, r * size, 0)
        assert sources == (1 << n) - 1


def test_streams_are_addresses() -> None:
    assert stream_address(None) is None
    assert stream_address(5) == 5
    assert stream_address(SimpleNamespace(ptr=6)) == 6
    assert stream_address(SimpleNamespace(cuda_stream=7)) == 7
    with pytest.raises(ArgumentError, match="expected a CuPy or torch stream"):
        stream_address("default")


def test_both_buffers_lie_on_one_side() -> None:
    here, there = np.zeros(8, np.float32), Cai((8,))
    with pytest.raises(BufferTypeError, match="one buffer lies in GPU memory"):
        calls.allreduce(0, 2, here, there, MPI.SUM)
    ready = calls.allreduce(0, 2, MPI.IN_PLACE, there, MPI.SUM)
    assert ready.on_device
    assert ready.send is ready.recv
    with pytest.raises(ArgumentError, match="overlap"):
        calls.allreduce(0, 2, Cai((8,), at=4096 + 16), there, MPI.SUM)
    assert not overlap(device(Cai((8,))), device(Cai((8,), at=4096 + 32)))
    assert calls.allgather(1, 4, MPI.IN_PLACE, there).call.nbytes == 32
