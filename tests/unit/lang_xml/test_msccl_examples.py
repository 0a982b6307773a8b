"""The example programs of msccl-tools, with nothing changed but their import lines, from a folder of the user's.

``BLINKMPI_MSCCL_EXAMPLES=msccl-tools/examples/mscclang``; they are not part of this repository.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from blinkmpi.errors import PlanError
from blinkmpi.lang import Algorithm, msccl
from blinkmpi.lang.xml.check import judge
from blinkmpi.lang.xml.file import parse_xml

FOLDER = os.environ.get("BLINKMPI_MSCCL_EXAMPLES", "")
IMPORT = re.compile(r"^from msccl\.\S+ import .*$", re.MULTILINE)
RIGHT = [
    "allgather_a100_pcie 4 1", "allgather_allpairs 8 2", "allgather_recursive_doubling 8 1", "allgather_ring 8 4 2",
    "allreduce_1step 4 2", "allreduce_a100_allpairs 8 1", "allreduce_a100_allpairs_v2 8 1",
    "allreduce_a100_multinode_allpairs 4 1", "allreduce_a100_ncv4 4 2", "allreduce_a100_ncv4_v2 4 1",
    "allreduce_a100_ring 8 4 2", "allreduce_recursive_doubling_halving 8 2", "alltoall_a100_three_step 3 4 2",
    "alltoall_a100_three_step 3 2 2 --ib_connections 1", "alltoall_a100_two_step 2 4", "alltoall_allpairs 8 2",
    "alltonext_backward 2 1", "alltonext_forward 3 2", "hierarchical_allreduce 4 2 1",
    "hierarchical_allreduce 2 3 2 --schedule manual", "simple/allgather_ring", "simple/allreduce_ring 4 1",
    "simple/custom_collective",
]  # fmt: skip
# Two call themselves allreduce and have their Check() commented out; of the third, MSCCLang's Check() says the same.
WRONG = {
    "pipeline_a100_allpairs 4 1": r"rank 0: chunk \d+ of its output is .* \(from pipeline_a100_allpairs\.py:\d+\)",
    "pipeline_a100_ring 4 1 1": r"rank 0: chunk \d+ of its output is ",
    "allreduce_a100_pcie_hierarchical 8 1": r"_hierarchical\.py:\d+: rank 1's chunk 0 is folded twice",
}
# For an earlier language, or for fewer ranks than they name; they end with an error in MSCCLang, too.
BROKEN = {
    "allgather_a100_pcie 8 1": "'NoneType' object has no attribute 'copy'",
    "allreduce_a100_recursive_doubling_halving 1 1": r"rank 4; the program has ranks 0\.\.3",
    "allreduce_binomial_tree 8 1 1": "missing 1 required positional argument: 'index'",
    "allreduce_dgx1 2 1": "name 'dgx1' is not defined",
    "allreduce_ndv2 1": "unexpected keyword argument 'buffer'",
    "reducegather 4 2": "multiple values for argument 'sendtb'",
}


def run(words: str) -> str:
    """Run a program; what it prints."""
    if not FOLDER:
        pytest.skip("BLINKMPI_MSCCL_EXAMPLES names no folder with msccl-tools' examples/mscclang")
    name, *args = words.split()
    path = Path(FOLDER, f"{name}.py")
    text = IMPORT.sub("from blinkmpi.lang.msccl import *", path.read_text(encoding="utf-8"))
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [str(path), *args]), contextlib.redirect_stdout(out):
        exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
    return out.getvalue()


def programs(words: str) -> list[Algorithm]:
    """The algorithms of which a program prints XML."""
    found: list[Algorithm] = []

    def collect() -> None:
        found.append(msccl.current().algorithm())

    with mock.patch.object(msccl, "XML", collect):
        run(words)
    return found


@pytest.mark.parametrize("words", RIGHT)
def test_a_program_of_msccl_runs(words: str) -> None:
    texts = re.findall(r"<algo .*?</algo>", run(words), re.DOTALL)
    assert texts
    for text in texts:
        report, _ = judge(parse_xml(text))
        assert [fault.text for fault in report.faults] == []


@pytest.mark.parametrize("words", list(WRONG))
def test_a_wrong_program_of_msccl_is_refused(words: str) -> None:
    with pytest.raises(PlanError, match=WRONG[words]):
        run(words)


@pytest.mark.parametrize("words", list(BROKEN))
def test_a_broken_program_of_msccl_stops(words: str) -> None:
    with pytest.raises((PlanError, TypeError, NameError, AttributeError), match=BROKEN[words]):
        run(words)
