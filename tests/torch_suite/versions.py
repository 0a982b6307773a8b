"""Run tests/torch with other versions of torch, each in an environment of its own, and write down how each test ended.

    python -m tests.torch_suite.versions 2.4.1 2.11.0 2.14.1 -o benchmarks/results
    python -m tests.torch_suite.versions --table

Environments stay beside ``.venv``. PyPI's torch comes with CUDA (several GB each), which the tests need not have. Each
version has a file of results, from which ``--table`` writes the table of docs/pytorch.md anew.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import jobs  # noqa: E402

RANKS = re.compile(r"\[np\d+-")  # in a test's name, with other parameters behind it
SECONDS = 1800  # for the tests of a version
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = "tests/torch/test_training.py"
PARTS = (  # each in a pytest of its own: files, and which of their tests
    (("tests/torch/test_backend.py", "tests/torch/test_own_messages.py"), ""),
    (("tests/torch/test_strangers.py", "tests/torch/test_examples.py"), ""),
    ((TRAINING,), "weights"),
    ((TRAINING,), "not weights"),
)
TOPICS = (  # a row of the table, and what the names of its tests begin with
    ("collectives, operations, types, layouts, groups, messages", ("test_every_", "test_several_", "test_operations_",
                                                                   "test_messages_", "test_setenv_")),
    ("errors, late ranks, threads, forks, groups destroyed early", ("test_errors_", "test_a_rank_", "test_what_",
                                                                    "test_destroyed_", "test_an_error_")),
    ("`torch.profiler`", ("test_the_profiler_",)),
    ("DDP", ("test_the_weights_are_those_of_gloo[ddp", "test_with_torchs_own_")),
    ("DDP compiled by `torch.compile`", ("test_the_weights_are_those_of_gloo[compiled_ddp", "test_torch_compile_")),
    ("ZeroRedundancyOptimizer", ("test_the_weights_are_those_of_gloo[zero",)),
    ("`Join`", ("test_the_weights_are_those_of_gloo[join",)),
    ("FSDP1", ("test_the_weights_are_those_of_gloo[fsdp1",)),
    ("FSDP2", ("test_the_weights_are_those_of_gloo[fsdp2",)),
    ("DTensor", ("test_the_weights_are_those_of_gloo[dtensor",)),
    ("checkpoints (DCP)", ("test_a_checkpoint",)),
    ("the hook for DDP beside gloo", ("test_the_hook_",)),
    ("FSDP2's collectives beside gloo", ("test_fsdp2_with_",)),
    ("under mpirun and torchrun, DDP", ("test_under_mpirun[train_torch", "test_under_torchrun[train_torch")),
    ("under mpirun and torchrun, FSDP2", ("test_under_mpirun[train_fsdp", "test_under_torchrun[train_fsdp")),
)  # fmt: skip


def environment(version: str) -> Path:
    """The Python of an environment with this torch and what the tests need."""
    folder = f".venv-torch-{version}"
    variables = f"VENV={folder}", f"TORCH=torch=={version}", "TORCH_INDEX=https://pypi.org/simple"
    subprocess.run(["make", *variables, f"{folder}/.has-test"], cwd=ROOT, check=True)
    return ROOT / folder / "bin" / "python"


def tested(version: str, through: Sequence[str], pattern: str) -> dict[str, Any]:
    """How each test of tests/torch ended."""
    python = environment(version)
    variables = {**os.environ, "PATH": os.pathsep.join((str(python.parent), os.environ["PATH"]))}
    rows: list[dict[str, str]] = []
    for files, some in PARTS:
        both = " and ".join(f"({one})" for one in (some, pattern) if one)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [*through, str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}",
                       "-k", both, *files]  # fmt: skip
            code = subprocess.run(command, cwd=ROOT, env=variables, timeout=SECONDS, check=False).returncode
            rows += outcomes(report) if report.exists() else [{"test": file, "outcome": "failed"} for file in files]
        if code and not any(row["outcome"] == "failed" for row in rows):
            rows.append({"test": " ".join(files), "outcome": "failed", "text": f"exit status {code}"})
    counts = Counter(row["outcome"] for row in rows)
    print(f"torch {version}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
    return {"torch": version, "counts": counts, "tests": rows}


def outcomes(report: Path) -> list[dict[str, str]]:
    """The tests of a report of pytest's: passed, skipped or failed, and why if not passed."""
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        row = {"test": case.get("name", ""), "outcome": "passed"}
        for found in case:
            if found.tag in ("failure", "error", "skipped"):
                row["outcome"] = "skipped" if found.tag == "skipped" else "failed"
                row["text"] = jobs.meta.without_folders((found.get("message") or "")[:300])
        rows.append(row)
    return rows


def table(documents: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the table: what works on which version, as the tests found."""
    found = sorted((document["results"][0] for document in documents), key=lambda row: number(row["torch"]))
    head = ["what", *(f"torch {row['torch']}" for row in found)]
    lines = [head, ["---"] * len(head)]
    lines += [[topic, *(cell(row["tests"], names) for row in found)] for topic, names in TOPICS]
    return ["| " + " | ".join(line) + " |" for line in lines]


def cell(rows: Sequence[dict[str, str]], names: tuple[str, ...]) -> str:
    """What a version's tests of a topic say: how many passed, or what did not."""
    counts = Counter(row["outcome"] for row in rows if RANKS.sub("[", row["test"]).startswith(names))
    if counts["failed"]:
        return f"{counts['failed']} of {counts.total()} fail"
    if counts["passed"]:
        return f"works ({counts['passed']})"
    return "torch has none" if counts["skipped"] else "not tried"


def number(version: str) -> tuple[int, ...]:
    """A version's numbers, to sort by."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def table_of_files() -> str:
    """The table as the files of results have it."""
    documents = [jobs.load(path) for path in sorted(RESULTS.glob("torch-versions-*.json"))]
    return "\n".join(table([document for document in documents if document is not None]))


def main() -> int:
    """Test each version; 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("-o", "--output", type=Path, help="a folder for torch-versions-VERSION.json")
    parser.add_argument("-k", dest="pattern", default="", help="which tests, as pytest has it")
    parser.add_argument("--through", default="", metavar="COMMAND", help="a command that runs each pytest")
    parser.add_argument("--table", action="store_true", help="print the table of docs/pytorch.md")
    options = parser.parse_args()
    failed = False
    for version in options.versions:
        began = datetime.now().astimezone()
        found = tested(version, shlex.split(options.through), options.pattern)
        failed = failed or bool(found["counts"].get("failed"))
        if options.output:
            head = {"torch_versions": {"torch": version, "tests": options.pattern or "all"}}
            name = options.output / f"torch-versions-{version}.json"
            jobs.write(name, jobs.document(head, [found], [], began))
    if options.table:
        print(table_of_files())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
