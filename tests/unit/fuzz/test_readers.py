"""Whatever lies in a file, its reader returns a valid value or raises a typed error that names it, soon.

Mutations of real files find what nobody thought of; what they found is in ``test_findings.py``.
"""

import json
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi import lang
from blinkmpi.bench.sweep import file as sweep_file
from blinkmpi.bench.sweep import results
from blinkmpi.bench.sweep.file import Resources, Sweep, expand
from blinkmpi.errors import ArgumentError, BlinkError, FormatError, PlanError, SettingsError, TopologyError
from blinkmpi.forecast.rates import Hardware, StepCost, StepRates
from blinkmpi.forecast.rates import read as read_steps
from blinkmpi.lang import Algorithm, library
from blinkmpi.lang.algorithms import read_algorithm
from blinkmpi.lang.xml.check import judge
from blinkmpi.lang.xml.export import export
from blinkmpi.lang.xml.file import XmlAlgorithm, load_xml, parse_xml, write_xml
from blinkmpi.launch import hostfile
from blinkmpi.launch.hostfile import Host
from blinkmpi.nccl import table as nccl_table
from blinkmpi.nccl.table import Faster, FasterTable
from blinkmpi.planning import tuned_table
from blinkmpi.planning.algorithms import with_algorithms
from blinkmpi.planning.diff import plan_differences
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.planning.tuned_table import TunedTable, taken
from blinkmpi.program.call import Call, call_of_bytes
from blinkmpi.program.check import check
from blinkmpi.program.ir import Program
from blinkmpi.runtime.bootstrap import read_plan
from blinkmpi.topology import Topology, load, machine
from blinkmpi.topology.measured import Measured, with_measured
from blinkmpi.util.files import read_file, read_json
from tests.harness import ROOT
from tests.unit.fuzz.mutators import many, promised, spoilt, spoilt_json
from tests.unit.lang_xml.flows import halving_doubling, ring_allgather
from tests.unit.topology.dumps import ROCM, all_to_all, trays

RING = machine("dgx-1v").subset([0, 1, 2, 3])
PLAN = with_algorithms(
    make_plan(RING, roots=[0], collectives=["broadcast", "allreduce", "allgather"]), [library.bruck_allgather(4)], {}
)
CALL = Call("allreduce", 4, (1 << 16,), "float32", "sum")
PROGRAM = program_for(PLAN, CALL, choose(PLAN, CALL))
FORWARD = lang.algorithm(
    lang.custom(given=lambda n, rank: 1, wanted=lambda n, rank: [[(rank - 1, 0)]] if rank else []),
    chunks=1,
    name="next",
)(lambda n: [lang.chunk(r - 1, "input", 0).copy(r, "output", 0) for r in range(1, n)])
LONGEST = 60 << 20  # bytes of a file; 64 MiB are not read at all
HERE = Resources(nodes=2, slots=4, gpus=False)


class Reader(NamedTuple):
    """A reader of a file: real files, the errors that it documents, and what must hold of a value that it returns."""

    read: Callable[[str], Any]
    errors: tuple[type[BlinkError], ...]
    seeds: tuple[bytes, ...]
    holds: Callable[[Any], object]

    @property
    def documents(self) -> tuple[Any, ...]:
        return tuple(json.loads(seed) for seed in self.seeds if seed.startswith(b"{"))


def files(*patterns: str) -> tuple[bytes, ...]:
    found = tuple(path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern)))
    assert found
    return found


def good_machine(found: Topology) -> None:
    assert Topology.from_json(found.to_json()) == found.check()
    assert found.fingerprint


def good_hosts(found: tuple[Host, ...]) -> None:
    for dialect in ("openmpi", "hydra"):
        assert hostfile.parse(hostfile.write(found, dialect), dialect) == found  # type: ignore[arg-type]


def good_sweep(found: tuple[Sweep, ...]) -> None:
    ran = promised(lambda: expand(found, HERE, source="NAME"), FormatError, source="NAME")
    for run, seconds in ran if isinstance(ran, list) else ():
        assert run.words
        assert run.label()
        assert seconds > 0


def good_plan(found: Plan) -> None:
    assert Plan.from_json(found.to_json()) == found
    promised(lambda: found.check(RING), PlanError, line=False)
    plan_differences(found, PLAN)
    plan_differences(PLAN, found)


def read_program(path: str) -> Program:
    return Program.from_json(read_file(path), source=path)


def good_program(found: Program) -> None:
    assert Program.from_json(found.to_json()) == found
    promised(lambda: check(found), PlanError, line=False)


def good_algorithm(found: Algorithm) -> None:
    assert Algorithm.from_json(found.to_json()) == found.check()
    if found.collective == "custom":
        found.interpret([np.ones(count) for count in found.given])
        return
    found.explain()
    call = call_of_bytes(found.flow.goal.collective, found.n, 1000, root=found.root)  # type: ignore[arg-type]
    assert found.program(call).call == call


def good_table(found: TunedTable) -> None:
    assert TunedTable.from_json(found.to_json()) == found
    promised(lambda: taken(PLAN, found, RING), PlanError, line=False)


def good_faster(found: FasterTable) -> None:
    assert FasterTable.from_json(found.to_json()) == found
    assert found.joined(found).rows == found.rows
    found.why_stale("2.28.9", {}, "k")
    found.why_not("allreduce", 4, 12)


def read_measured(path: str) -> Measured:
    return Measured.from_json(read_file(path), source=path)


def good_measured(found: Measured) -> None:
    assert Measured.from_json(found.to_json()) == found.check()
    if len(found.devices) == 4:
        at = Topology("here", found.devices, (*machine("dgx-1v:2").switches[:1],), RING.links[:0])
        with_measured(at, found).check()


def good_steps(found: StepRates) -> None:
    assert StepRates.from_json(found.to_json()) == found
    for cost in found.costs:
        assert found.cost(cost.collective, cost.nbytes, cost.kind, in_place=cost.in_place) is not None
        found.fastest_pass(cost.nbytes)


def good_xml(found: XmlAlgorithm) -> None:
    assert parse_xml(write_xml(found)) == found
    report, flow = judge(found)
    assert (flow is None) == bool(report.faults)


def good_results(found: dict[str, Any]) -> None:
    results.tables(found["runs"])


TOPOLOGIES = (*(machine(name).to_json().encode() for name in ("dgx-1v", "hgx-h200", "cpu:3", "dgx-1p:2")),
              *files("tests/data/nccl-topo-h200x8.xml", "tests/data/nvidia-smi-topo-m-h200x8.txt"),
              all_to_all(3, 'gcn="gfx942"').encode(), trays("0xaa", "0xbb", cards=True).encode(),
              ROCM.encode())  # fmt: skip
ALGORITHMS = tuple(made.to_json().encode() for made in (library.ring(3), library.bruck_alltoall(4), FORWARD(3)))
TABLES, LINKS = files("benchmarks/tables/tuned-*.json"), files("benchmarks/tables/links-*.json")
CHUNKS = tuple(write_xml(export(flow, name="xml", in_place=True)).encode()
               for flow in (halving_doubling(4), ring_allgather(3)))  # fmt: skip
STEPS = StepRates(
    Hardware("a processor", 2, 4, "6.1", "C executor"), "2026-11-23", 8.5,
    tuple(StepCost(c, False, n, "sum of float32: 3cma+own > result", 150.5, 149.0, 160.25)
          for c in ("allreduce", "reduce_scatter") for n in (1 << 20, 1 << 26)),
)  # fmt: skip
FASTER = FasterTable(
    "NVIDIA H200", 2, "hgx-h200", "2026-11-30", "2.28.9", {"NCCL_NVLS_ENABLE": "0"}, "k", ("allreduce", "reduce"),
    tuple(Faster(c, "float32", n, 1.25) for c in ("allreduce", "reduce") for n in (1024, 2048)),
)  # fmt: skip
READERS = {
    "topology": Reader(load, (TopologyError, FormatError), TOPOLOGIES, good_machine),
    "hostfile": Reader(hostfile.read, (FormatError,), files("hostfiles/*"), good_hosts),
    "sweep": Reader(sweep_file.load, (ArgumentError, FormatError), files("benchmarks/sweeps/*.toml"), good_sweep),
    "plan": Reader(read_plan, (PlanError, FormatError), (PLAN.to_json().encode(),), good_plan),
    "program": Reader(read_program, (FormatError, PlanError), (PROGRAM.to_json().encode(),), good_program),
    "algorithm": Reader(read_algorithm, (FormatError, PlanError), ALGORITHMS, good_algorithm),
    "table": Reader(lambda path: tuned_table.read(Path(path)), (SettingsError, FormatError), TABLES, good_table),
    "nccl-table": Reader(
        lambda path: nccl_table.read(Path(path)),
        (SettingsError, FormatError),
        (FASTER.to_json().encode(),),
        good_faster,
    ),
    "xml": Reader(load_xml, (FormatError,), CHUNKS, good_xml),
    "steps": Reader(
        lambda path: read_steps(Path(path), STEPS.hardware),
        (SettingsError, FormatError),
        (STEPS.to_json().encode(),),
        good_steps,
    ),
    "measured": Reader(read_measured, (TopologyError, FormatError), LINKS, good_measured),
}
each = pytest.mark.parametrize("name", list(READERS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def keeps_its_promise(name: str, text: bytes, file: Path) -> None:
    reader = READERS[name]
    file.write_bytes(text)
    found = promised(lambda: reader.read(str(file)), *reader.errors, source=file.name)
    if not isinstance(found, BlinkError):
        reader.holds(found)


@each
def test_a_real_file_is_read(name: str, folder: Path) -> None:
    for seed in READERS[name].seeds:
        (folder / "FILE.txt").write_bytes(seed)
        READERS[name].holds(READERS[name].read(str(folder / "FILE.txt")))


@each
@many
@given(data=st.data())
def test_spoilt_bytes(name: str, data: st.DataObject, folder: Path) -> None:
    keeps_its_promise(name, data.draw(spoilt(READERS[name].seeds)), folder / "FILE.txt")


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.documents])
@many
@given(data=st.data())
def test_spoilt_values(name: str, data: st.DataObject, folder: Path) -> None:
    keeps_its_promise(name, data.draw(spoilt_json(READERS[name].documents)), folder / "FILE.txt")


@each
def test_a_file_that_ends_anywhere(name: str, folder: Path) -> None:
    for seed in READERS[name].seeds[:6]:
        for end in range(0, len(seed), max(1, len(seed) // 150)):
            keeps_its_promise(name, seed[:end], folder / "FILE.txt")


@each
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp500"])
def test_another_encoding(name: str, encoding: str, folder: Path) -> None:
    for seed in READERS[name].seeds:
        keeps_its_promise(name, seed.decode().encode(encoding), folder / "FILE.txt")


def longest(seed: bytes) -> Iterator[bytes]:
    """A real file as one of 60 MiB: each list of a document filled with its first item, elements, lines, one letter."""
    if seed.startswith(b"<"):
        yield seed.replace(b">", b">" + b"<a/>" * (LONGEST // 4), 1)
        yield seed.replace(b">", b">" + b"<a>" * (LONGEST // 3), 1)
        yield seed.replace(b">", b' a=""' * (LONGEST // 5) + b">", 1)
    elif not seed.startswith(b"{"):
        yield seed * (LONGEST // len(seed))
    document = json.loads(seed) if seed.startswith(b"{") else {}
    for key, value in document.items():
        if isinstance(value, list):
            item = json.dumps(value[0] if value else 0)
            text = json.dumps(document | {key: "HERE"})
            yield text.replace('"HERE"', f"[{','.join([item] * (LONGEST // (len(item) + 1)))}]").encode()
    if document:
        yield json.dumps(document | {"format": "HERE"}).replace('"HERE"', f"[{'[],' * (LONGEST // 3)}0]").encode()


def refused_with_little(name: str, text: bytes, folder: Path) -> str:
    """What a reader says of a file; it refuses it with few calls, and memory for the text and little else."""
    (folder / "FILE.txt").write_bytes(text)
    tracemalloc.start()
    try:
        found = promised(
            lambda: READERS[name].read(str(folder / "FILE.txt")),
            *READERS[name].errors,
            source="FILE.txt",
            calls=100_000,
        )
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found, BlinkError)
    assert most < 300 << 20, f"{most >> 20} MiB"
    return str(found)


@pytest.mark.slow
@each
def test_a_file_of_60_mib_is_refused_before_it_is_taken_apart(name: str, folder: Path) -> None:
    for seed in {seed[:1]: seed for seed in READERS[name].seeds}.values():  # one of each format
        for text in longest(seed):
            said = refused_with_little(name, text, folder)
            assert re.search("at most [0-9]+ are|it has more than|has at most|more than [0-9]+ (el|let)", said), said


@pytest.mark.slow
def test_results_of_60_mib_are_refused_before_they_are_taken_apart(folder: Path) -> None:
    (folder / "FILE.txt").write_text("[" + "[]," * (LONGEST // 3) + "0]")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="values; at most 1048576 are read"):
            read_json(folder / "FILE.txt")
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


RING3, NEXT3 = json.loads(ALGORITHMS[0]), json.loads(ALGORITHMS[2])
CHAIN = [{"rank": 0, "operands": [-1]}, *({"rank": 0, "operands": [i, -i - 2]} for i in range(20_000))]
HALF = CHUNKS[0].decode().replace('nchunksperloop="4"', 'nchunksperloop="131072"')


@pytest.mark.parametrize(("name", "document", "said"), [
    ("algorithm", RING3 | {"chunks": 1_000_000}, r"outputs of \[3, 3, 3\] chunks; expected 1000000 on each of 3 ranks"),
    ("algorithm", RING3 | {"chunks": 1, "n": 4096}, "expected 1 on each of 4096 ranks"),
    ("algorithm", RING3 | {"collective": "reduce_scatter", "n": 4096, "chunks": 1, "outputs": [[-1]] * 4096},
     "chunks of inputs are used; expected 16777216"),
    ("algorithm", RING3 | {"collective": "scan", "n": 4096, "chunks": 1, "nodes": [], "outputs": [[-1]] * 4096},
     "rank 1: chunk 0 of its output is rank 1's chunk 0; wanted rank 0's"),
    ("algorithm", NEXT3 | {"n": 1, "given": [20_001], "wanted": [[[[0, 0]]]], "outputs": [[0]], "nodes": CHAIN},
     "value [0-9]+: more than 4194304 contributions are folded until here"),
    ("plan", json.loads(PLAN.to_json()) | {"algorithms": [RING3 | {"chunks": 1_000_000}]}, "expected|not a valid plan"),
])  # fmt: skip
def test_a_small_file_of_something_large_is_refused_before_it_is_made(
    name: str, document: dict[str, Any], said: str, folder: Path
) -> None:
    assert re.search(said, refused_with_little(name, json.dumps(document).encode(), folder))


def test_xml_that_says_more_chunks_than_its_steps_can_fill_is_judged_at_once() -> None:
    report = judge(parse_xml(HALF))[0]
    assert [fault.text for fault in report.faults] == [
        "nchunksperloop=131072: allreduce of 4 GPUs moves 393216 chunks or more, and the steps move "
        f"{parse_xml(CHUNKS[0]).moves}"
    ]


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("program", "measured")])
@pytest.mark.parametrize("what", ["folder", "pipe", "loop", "unreadable", "endless", "no folder", "long", "no path"])
def test_what_is_no_file_is_said(name: str, what: str, tmp_path: Path) -> None:
    path = str(tmp_path / "FILE.txt")
    if name in ("table", "steps", "nccl-table") and what == "no folder":
        pytest.skip("no table is no error")
    if what == "folder":
        os.mkdir(path)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "loop":
        os.symlink(path, path)
    elif what in ("unreadable", "endless"):
        os.symlink("/proc/self/mem" if what == "unreadable" else "/dev/zero", path)
    else:
        path = {"no folder": f"{path}/x", "long": "/" + "FILE.txt" * 1000, "no path": f"{path}\0x"}[what]
    reader = READERS[name]
    found = promised(lambda: reader.read(path), *reader.errors, source="FILE.txt")
    assert isinstance(found, BlinkError), found
