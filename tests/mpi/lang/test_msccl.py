"""Programs of MSCCLang on real ranks: by the shim, and as the XML that it prints, by the importer.

``BLINKMPI_MSCCL_EXAMPLES=msccl-tools/examples/mscclang`` runs msccl-tools' own, too, which are not in this repository.
"""

import tempfile
from pathlib import Path

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi import lang
from blinkmpi.lang import msccl
from tests.conformance import Case, cases
from tests.harness import mpi
from tests.mpi.test_conformance import run_all
from tests.unit.lang_xml.test_msccl_examples import FOLDER, RIGHT, programs

CALLS = {"allgather": ("allgather", "allgatherv"), "alltoall": ("alltoall", "alltoallv")}


def calls(collective: str, n: int, dtypes: tuple[str, ...]) -> list[Case]:
    """Of a few counts, in place and not."""
    found = [case for kind in CALLS.get(collective, (collective,)) for case in cases(kind, n, full=False)]
    return [case for case in found if case.dtype in dtypes and case.op != "min" and case.count >= 7]


def run_both_ways(comm: MPI.Intracomm, algorithm: lang.Algorithm, *dtypes: str) -> None:
    """As it is, and as MSCCL's XML; each must be what the collective says."""
    wanted = calls(algorithm.collective, comm.size, dtypes)
    assert wanted
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.xml")
        path.write_text(algorithm.to_xml(channels=2), encoding="utf-8")
        read = lang.load(str(path))
    for turn, made in enumerate((algorithm, read)):
        with blinkmpi.Communicator(comm, algorithms=[made], executor=("auto", "numpy")[turn]) as ours:
            assert f"lang:{made.name}" in ours.explain(made.collective, 1 << 20)
            run_all(ours, wanted)


def ring(n: int) -> None:
    for i in range(n):
        c = msccl.chunk((i + 1) % n, msccl.Buffer.input, i)
        for k in range(2, n + 1):
            c = msccl.chunk((i + k) % n, msccl.Buffer.input, i).reduce(c)  # type: ignore[union-attr]
        for k in range(1, n):
            c = c.copy((i + k) % n, msccl.Buffer.input, i)  # type: ignore[union-attr]


def through_scratch(n: int) -> None:
    for r in range(n):
        for d in range(n):
            c = msccl.chunk(r, msccl.Buffer.input, d).copy((r + d) % n, "staged", d)  # type: ignore[union-attr]
            c.copy(d, msccl.Buffer.output, r)


@mpi(ranks=(4,), long=(8,), timeout=150)
def test_programs_of_msccl(comm: MPI.Intracomm) -> None:
    n = comm.size
    for body, collective in ((ring, msccl.AllReduce(n, n, True)), (through_scratch, msccl.AllToAll(n, 1, False))):
        with msccl.MSCCLProgram(body.__name__, msccl.fully_connected(n), collective, 1) as program:
            body(n)
            algorithm = program.algorithm()
        run_both_ways(comm, algorithm, "float32", "bfloat16")


@pytest.mark.skipif(not FOLDER, reason="BLINKMPI_MSCCL_EXAMPLES names no folder with msccl-tools' examples/mscclang")
@pytest.mark.parametrize("words", RIGHT)
@mpi(ranks=(4, 8), timeout=300)
def test_msccls_own_examples(comm: MPI.Intracomm, words: str) -> None:
    found = [a for a in programs(words) if a.n == comm.size and a.collective != "custom"]
    if not found:
        pytest.skip(f"{words} is for other numbers of ranks, or custom")
    for algorithm in found:  # some fold in another order on each rank, so only exact types end alike on all
        run_both_ways(comm, algorithm, "int16", "int32")
