"""Every kernel compiles, for every GPU generation that it is meant for, and keeps its values in registers.

``python tests/unit/transport/test_cuda_compile.py`` writes what they take to benchmarks/results/cuda/registers.json.
"""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # for the script; pytest does so itself

from blinkmpi.planning.plan import Rule  # noqa: E402
from blinkmpi.planning.selection import program_for  # noqa: E402
from blinkmpi.planning.slots import GPU_SLOTS  # noqa: E402
from blinkmpi.program.call import Call  # noqa: E402
from blinkmpi.program.reduction import DTYPES, accumulator_of, dtype_of  # noqa: E402
from blinkmpi.transport.cuda import codegen, failure_report, kernel_layout, memory_layout  # noqa: E402
from blinkmpi.transport.cuda.codegen import (  # noqa: E402
    MESSAGE_THREADS,
    STAGE_THREADS,
    WORKERS,
    StageKind,
    blocks_source,
    direct_source,
    gate_source,
    kinds_of,
    messages_source,
    packet_threads,
    packets_source,
    row_words,
    segments_source,
    stages_source,
)
from blinkmpi.transport.cuda.kernel_layout import COMMON, SEGMENT_ROOMS  # noqa: E402
from blinkmpi.transport.cuda.kernels.compiler import kernel_source  # noqa: E402
from blinkmpi.transport.cuda.link_rates import SOURCE  # noqa: E402
from blinkmpi.transport.cuda.packets import PROTOCOLS, Codec  # noqa: E402
from blinkmpi.transport.cuda.transport import GATE_THREADS  # noqa: E402
from blinkmpi.trees.tree import Collective  # noqa: E402
from tests.conformance import allowed  # noqa: E402
from tests.harness import long_but  # noqa: E402
from tests.unit.transport import table_emulator  # noqa: E402
from tests.unit.transport.nvrtc import Used, all_compiled, compiled  # noqa: E402
from tests.unit.trees.packings import even_call  # noqa: E402

GENERATIONS = {"sm_70": 12, "sm_80": 13, "sm_90": 13, "sm_100": 13}  # CUDA 13 knows no sm_70
MACHINES = [name for name in table_emulator.MACHINES if name != "hgx-h200 x 3"]
MOVES: tuple[Collective, ...] = ("broadcast", "allgather", "gather", "scatter")
FOLDS: tuple[Collective, ...] = ("allreduce", "reduce", "reduce_scatter")
LONG = 100_003  # elements: every tree of a plan carries some of them
REGISTERS = 64 << 10  # of a multiprocessor
SLACK = 16  # bytes: a register or two, once a chunk, in kernels of 16-bit sums with many kinds of stages


def kernels(
    name: str, collectives: Iterable[Collective], dtype: str, op: str = "", *, most: int = 99
) -> list[tuple[str, str]]:
    """(name, source) of the ``most`` largest kernels ``stages`` of a machine's ranks for some collectives, any scheme.

    The position of the own operand differs from rank to rank and changes little, so one of such kernels will do.
    """
    plan = table_emulator.plan_of(name)
    found: dict[frozenset[StageKind], tuple[str, str]] = {}
    for collective in collectives:
        call = even_call(collective, plan.n, LONG, dtype=dtype, op=op)
        for scheme in plan.schemes(collective, call.root):
            program = program_for(plan, call, Rule(collective, 0, scheme, *GPU_SLOTS))
            for rank in range(plan.n):
                kinds = kinds_of(program, rank)
                kind = frozenset(replace(s, own_at=min(s.own_at, 0)) for s in kinds)
                if kinds and kind not in found:
                    spans = kernel_layout.spans_for(len(program.of(rank)))
                    source = stages_source(call, kinds, row_words(program, rank), call.n, spans)
                    found[kind] = f"{collective} {scheme} rank {rank}", source
    largest = sorted(found, key=lambda kind: -sum(s.ins + s.outs for s in kind))
    return [found[kind] for kind in largest[:most]]


def onehop(call: Call) -> dict[str, tuple[str, dict[str, int]]]:
    """Source of each one-hop kernel, and its threads by the name it has there."""
    return {
        **{
            name: (packets_source(call, call.n, protocol), {"packets": packet_threads(call.n, protocol.codec)})
            for name, protocol in PROTOCOLS.items()
        },
        "direct": (direct_source(call, call.n), {"direct": WORKERS}),
    }


def of_groups(call: Call) -> dict[str, tuple[str, dict[str, int]]]:
    """Likewise, of the kernels over packets that read and write a group's buffers themselves."""
    return {
        f"{name}, {room} segments": (
            packets_source(call, call.n, protocol, room),
            {"packets": packet_threads(call.n, protocol.codec)},
        )
        for name, protocol in PROTOCOLS.items()
        for room in SEGMENT_ROOMS
    }


def check(where: str, threads: dict[str, int], found: dict[str, Used], *, slack: int = 0) -> None:
    """Everything is in registers but ``slack`` bytes, and there are enough registers for one CTA."""
    assert set(found) == set(threads), where
    for kernel, used in found.items():
        assert max(used.stack, used.spilled) <= slack, f"{where}: {kernel} {used}"
        assert used.registers * threads[kernel] <= REGISTERS, f"{where}: {kernel} {used}"


STAGES = {"stages": STAGE_THREADS}


ONE_HOP = [("bfloat16", "sum"), ("float32", "avg"), ("int8", "max"), ("float32", ""), ("int64", "avg"), ("int8", "avg")]
USUAL = [("sm_90", 3, *ONE_HOP[0]), ("sm_90", 2, *ONE_HOP[4])]
GRID = [(arch, n, *pair) for arch in GENERATIONS for n in ((2, 3, 8) if arch == "sm_90" else (8,)) for pair in ONE_HOP]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "n", "dtype", "op"), long_but(USUAL, GRID))
def test_one_hop_kernels(arch: str, n: int, dtype: str, op: str) -> None:
    call = Call("allreduce" if op else "allgather", n, (1000,), dtype, op)
    made = [(f"{arch} n={call.n} {kind}", *one) for kind, one in onehop(call).items()]
    found = all_compiled([source for _, source, _ in made], arch, version=GENERATIONS[arch])
    for (where, _, threads), used in zip(made, found, strict=True):
        check(where, threads, used)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "n"), long_but([("sm_90", 2)], [("sm_80", 4), ("sm_90", 2), ("sm_90", 8), ("sm_90", 16)])
)
def test_kernels_of_groups(arch: str, n: int) -> None:
    calls = [Call("allreduce", n, (1000,), "bfloat16", "sum"), Call("alltoall", n, (1000,), "float32")]
    made = [(kind, *one) for call in calls for kind, one in of_groups(call).items()]
    found = all_compiled([source for _, source, _ in made], arch, version=GENERATIONS[arch])
    for (where, _, threads), used in zip(made, found, strict=True):
        check(f"{arch} n={n} {where}", threads, used)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["hgx-h200 x 4"], MACHINES))
def test_stages_of_every_plan(name: str) -> None:
    folds, moves = kernels(name, FOLDS, "bfloat16", "sum", most=5), kernels(name, MOVES, "int8", most=3)
    found = all_compiled([source for _, source in (*folds, *moves)], "sm_90")
    for i, ((kernel, _), used) in enumerate(zip((*folds, *moves), found, strict=True)):
        check(f"{name} {kernel}", STAGES, used, slack=SLACK if i < len(folds) else 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", long_but(["bfloat16"], ["bfloat16", "float32"]))
@pytest.mark.parametrize("name", long_but(["hgx-h200 x 4"], ["hgx-h200 x 4", "dgx-1v x 8"]))
def test_scans_and_alltoalls(name: str, dtype: str) -> None:
    """Whose stages keep what they pass on as a partial result, and pass on for others."""
    made = [*kernels(name, ("scan", "exscan"), dtype, "sum", most=6), *kernels(name, ("alltoall",), dtype, most=2)]
    found = all_compiled([source for _, source in made], "sm_90")
    for (kernel, _), used in zip(made, found, strict=True):
        check(f"{name} {kernel}", STAGES, used, slack=SLACK)


@pytest.mark.slow
@pytest.mark.parametrize("arch", long_but(["sm_70"], [a for a in GENERATIONS if a != "sm_90"]))
@pytest.mark.parametrize("name", long_but(["hgx-h200 x 8"], ["hgx-h200 x 8", "dgx-1v x 8"]))
def test_stages_of_every_generation(arch: str, name: str) -> None:
    folds = kernels(name, FOLDS[:1], "float16", "avg", most=2)
    moves = kernels(name, MOVES[:1], "float32", most=2)
    found = all_compiled([source for _, source in (*folds, *moves)], arch, version=GENERATIONS[arch])
    for i, ((kernel, _), used) in enumerate(zip((*folds, *moves), found, strict=True)):
        check(f"{arch} {name} {kernel}", STAGES, used, slack=SLACK if i < len(folds) else 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", long_but(("bfloat16", "float32", "float8_e4m3fn", "int64"), DTYPES))
def test_every_operation_of_every_type(dtype: str) -> None:
    wide = accumulator_of(dtype) != dtype_of(dtype)
    kinds = [StageKind(2, 1, 1, stores=True, final=True, in_wide=3 if wide else 0, out_wide=False)]
    ops = allowed(dtype)
    calls = [Call("allreduce", 4, (1000,), dtype, op) for op in ops]
    found = all_compiled([stages_source(call, kinds, 64, 4) for call in calls], "sm_90")
    for op, used in zip(ops, found, strict=True):
        check(f"{dtype} {op}", STAGES, used)
        assert used["stages"].fused == 0, "docs/numerics.md: no fused multiply-add is used"


@pytest.mark.parametrize(("kernel", "module", "name", "wrong", "message"), [
    ("direct", kernel_layout, "COMMON", ("fingerprint", "report", *COMMON[2:]), "CommonArguments, fingerprint"),
    ("gate", kernel_layout, "COMMON", (*COMMON, "one_more"), "CommonArguments, one_more"),
    ("gate", memory_layout, "ANNOUNCED_AT", 128, "announced) == 128"),
    ("direct", kernel_layout, "REPORT", kernel_layout.REPORT[:-1], "sizeof(Report) == 56"),
    ("direct", kernel_layout, "DIRECT", kernel_layout.DIRECT[::-1], "DirectArguments, regions"),
    ("direct", failure_report, "MISMATCH", 4, "MISMATCH == 4"),
    ("direct", failure_report, "FINISH", -4, "FINISH == -4"),
    ("direct", memory_layout, "ANNOUNCED_AT", 128, "announced) == 128"),
    ("direct", memory_layout, "GIVEN_UP_AT", 128, "report_taken) == 128"),
    ("segments", kernel_layout, "SEGMENT_HEAD", ("bucket", "stride", "given_up"), "SegmentArguments, stride) == 8"),
    ("segments", kernel_layout, "SEGMENTS", 255, "sizeof(SegmentArguments) <= 4096"),
    ("direct", memory_layout, "LINE", 64, "sizeof(Announcement) == 64"),
    ("direct", memory_layout, "HEAD_BYTES", 32 << 10, "sizeof(SymmetricHeader) <= 32768"),
    ("direct", memory_layout, "MAX_CTAS", 1024, "sizeof(SymmetricHeader) <= 65536"),
    ("packets", kernel_layout, "PACKETS", (*kernel_layout.PACKETS, "one_more"), "one_more"),
    ("group", kernel_layout, "SEGMENT_ROOMS", (16, 248), "sizeof(PacketArguments) <= 4096"),
    ("packets", kernel_layout, "LL128", Codec("LL128", 8, 6, 16), "LL128::DATA == 6"),
    ("packets", memory_layout, "SETS", 3, "SETS == 3"),
    ("stages", kernel_layout, "STAGES", ("table", "row_words"), "StageArguments, row_words"),
    ("stages", kernel_layout, "ROW", kernel_layout.ROW[1:], "COUNT == 0"),
    ("stages", kernel_layout, "SPAN_WORDS", 5, "SPAN_WORDS == 5"),
    ("stages", kernel_layout, "CHANNEL", kernel_layout.CHANNEL[:5], "sizeof(Channel) == 40"),
    ("stages", kernel_layout, "BEFORE_CHANNELS", 15, "WORDS_BEFORE_CHANNELS == 15"),
    ("stages", codegen, "STAGE_THREADS", 480, "THREADS == 480"),
    ("messages", kernel_layout, "MESSAGE", kernel_layout.MESSAGE[::-1], "MessageArguments, tag"),
    ("messages", memory_layout, "MESSAGE_FLAGS", 3, "sizeof(FifoMemory) == "),
    ("blocks", kernel_layout, "BLOCKS", kernel_layout.BLOCKS[::-1], "BlockArguments, own_bytes"),
    ("blocks", kernel_layout, "BLOCK_END", ("sends", "peer", "at", "nbytes"), "BlockEnd, sends"),
    ("blocks", kernel_layout, "COUNTED", kernel_layout.COUNTED[::-1], "BlockArguments, places"),
    ("blocks", memory_layout, "BLOCK_LINES", 1, "sizeof(BlockMemory) == "),
    ("messages", failure_report, "RECEIVE", -6, "RECEIVE == -6"),
])  # fmt: skip
def test_a_kernel_of_another_layout_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, kernel: str, module: ModuleType, name: str, wrong: object, message: str
) -> None:
    """What Python knows of the kernels' structs is asserted when they are compiled."""
    call = Call("allreduce", 4, (1000,), "float32", "sum")
    kind = StageKind(2, 1, 1, stores=True, final=True, in_wide=0, out_wide=False)
    monkeypatch.setattr(module, name, wrong)
    source = {
        "direct": lambda: direct_source(call, 4),
        "packets": lambda: packets_source(call, 4, PROTOCOLS["ll128_two_shot"]),
        "group": lambda: packets_source(call, 4, PROTOCOLS["ll128_two_shot"], kernel_layout.SEGMENT_ROOMS[-1]),
        "stages": lambda: stages_source(call, [kind], 64, 4, 8),
        "segments": segments_source,
        "messages": lambda: messages_source(4),
        "gate": lambda: gate_source(4),
        "blocks": lambda: blocks_source(4, counted=True),
    }[kernel]()
    with pytest.raises(AssertionError, match=re.escape(message)):
        compiled(source, "sm_90")


@pytest.mark.parametrize("arch", GENERATIONS)
def test_kernels_that_measure_links(arch: str) -> None:
    found = compiled(kernel_source(SOURCE), arch, version=GENERATIONS[arch])
    assert set(found) == {"push", "flag"}
    for name, used in found.items():
        assert used.stack == used.spilled == 0, name
        assert used.registers <= 64, name


@pytest.mark.parametrize("arch", GENERATIONS)
def test_kernels_that_gather_and_scatter(arch: str) -> None:
    found = compiled(segments_source(), arch, version=GENERATIONS[arch])
    assert set(found) == {"gather", "scatter"}
    for name, used in found.items():
        assert used.stack == used.spilled == 0, name
        assert used.registers <= 64, (name, used)  # two CTAs on a multiprocessor


@pytest.mark.parametrize("n", [2, 8, memory_layout.MAX_RANKS])
@pytest.mark.parametrize("arch", GENERATIONS)
def test_messages(arch: str, n: int) -> None:
    found = compiled(messages_source(n), arch, version=GENERATIONS[arch])
    check(f"{arch} n={n}", {"messages": MESSAGE_THREADS}, found)


@pytest.mark.parametrize("n", [2, 8, memory_layout.MAX_RANKS])
@pytest.mark.parametrize("arch", GENERATIONS)
def test_a_gate_fits_beside_a_product_that_leaves_one_warp(arch: str, n: int) -> None:
    """384 threads of 168 registers leave 32 to each thread of it."""
    found = compiled(gate_source(n), arch, version=GENERATIONS[arch])
    check(f"{arch} n={n}", {"gate": GATE_THREADS}, found)
    assert found["gate"].registers <= (REGISTERS - 384 * 168) // GATE_THREADS


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("n", [2, 8, memory_layout.MAX_RANKS])
@pytest.mark.parametrize("arch", GENERATIONS)
def test_blocks(arch: str, n: int, counted: bool) -> None:
    found = compiled(blocks_source(n, counted=counted), arch, version=GENERATIONS[arch])
    check(f"{arch} n={n}", {"blocks": MESSAGE_THREADS}, found)


def test_the_compiler_is_heard() -> None:
    with pytest.raises(AssertionError, match=r"NVRTC 13 for sm_90: .*identifier \"nothing\" is undefined"):
        compiled('extern "C" __global__ void k() { nothing; }', "sm_90")
    spilled = compiled(
        'extern "C" __global__ void __launch_bounds__(1024) k(int* p, int n)'
        "{ int x[64]; for (int i = 0; i < n; i++) x[p[i] & 63] = i; for (int i = 0; i < n; i++) p[i] = x[p[i] & 63]; }",
        "sm_90",
    )
    assert spilled["k"].stack >= 256


RESULT = ROOT / "benchmarks" / "results" / "cuda" / "registers.json"


def counted() -> dict[str, dict[str, tuple[str, str]]]:
    """What the file counts, by row and kernel: source and name of 8 ranks' bfloat16 sums, and of float32 moves."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for collective, dtype, op in ((FOLDS[0], "bfloat16", "sum"), (MOVES[1], "float32", "")):
        call = even_call(collective, 8, LONG, dtype=dtype, op=op)
        one_hop = {kind: (source, name) for kind, (source, (name,)) in onehop(call).items()}
        found[f"{collective} {dtype}, one hop"] = one_hop
        for name in ("hgx-h200 x 8", "dgx-1v x 8"):
            made = kernels(name, (collective,), dtype, op, most=3)
            found[f"{collective} {dtype}, {name}"] = {kernel: (source, "stages") for kernel, source in made}
    found["before long calls"] = {"gate": (gate_source(8), "gate")}
    blocks = {"blocks": blocks_source(8), "blocks, counts in GPU memory": blocks_source(8, counted=True)}
    found["from rank to rank"] = {
        "messages": (messages_source(8), "messages"),
        **{kernel: (source, "blocks") for kernel, source in blocks.items()},
    }
    return found


def registers(arch: str, rows: dict[str, dict[str, tuple[str, str]]]) -> dict[str, dict[str, int]]:
    """Registers by row and kernel, for a generation."""
    version = GENERATIONS[arch]
    found = all_compiled([source for row in rows.values() for source, _ in row.values()], arch, version=version)
    made = iter(found)
    return {row: {kernel: next(made)[name].registers for kernel, (_, name) in of.items()} for row, of in rows.items()}


@pytest.mark.slow
def test_the_file_of_registers_is_of_these_kernels() -> None:
    """All names, and the registers of two kernels that are quickly compiled."""
    rows, remake = counted(), f"run python {Path(__file__).relative_to(ROOT)}"
    kept = json.loads(RESULT.read_text(encoding="utf-8"))["registers"]
    assert {arch: {row: set(of) for row, of in found.items()} for arch, found in kept.items()} == {
        arch: {row: set(of) for row, of in rows.items()} for arch in GENERATIONS
    }, remake
    for row, kernel in (("one hop", "direct"), ("hgx-h200 x 8", "allreduce onehop rank 0")):
        name = f"allreduce bfloat16, {row}"
        found = registers("sm_90", {name: {kernel: rows[name][kernel]}})
        assert found[name][kernel] == kept["sm_90"][name][kernel], remake


if __name__ == "__main__":
    RESULT.parent.mkdir(exist_ok=True)
    rows = counted()
    document = {"nvrtc": GENERATIONS, "registers": {arch: registers(arch, rows) for arch in GENERATIONS}}
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(RESULT.relative_to(ROOT))
