"""Random torch programs with faults, with the door: no value is wrong, and nothing hangs that ends with plain NCCL.

A job is a seed and a fault (``campaign_rank.py``). What is wrong or hangs with the door runs again without, and counts
as the door's only if that ends well. ``python -m tests.nccl_clients.campaign kill 965274705 2`` is one job again, of
two ranks.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.jobs import meta
from tests.nccl_clients import ways
from tests.nccl_clients.ways import DOOR, PLAIN

MODULE = "tests.nccl_clients.campaign_rank"
HARMLESS = ("none", "destroy", "split", "fork")  # after which all ranks must come to their end
FAULTS = (*HARMLESS, "kill", "exit", "absent", "abort")  # by one rank, after which the others must end somehow
JOB_S = 100.0  # for a job, whose ranks wait 8 s for each other
QUICK = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}  # as it waits a minute for each
TAIL = 1500
MOST_JOBS = 1 << 14  # of days


class Ended(NamedTuple):
    """How a job ended: each rank's exit status (None: it hung), what the ranks wrote, their outputs, whose calls."""

    statuses: list[int | None]
    told: list[dict[str, Any]]
    output: str
    counts: dict[str, Any]


def run(by: str, fault: str, seed: int, n: int, seconds: float) -> Ended:
    """Run a job one way. The ranks are nobody's children but ours: no launcher ends those that are left."""
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        folder = Path(name)
        (folder / "status").mkdir()
        env = {**os.environ, **ways.environment(folder / "status", QUICK)}
        started = []
        for rank in range(n):
            words = [sys.executable, "-m", MODULE, name, str(seed), fault, str(rank), str(n)]
            with (folder / f"{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        ways.command(by, words), env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )  # fmt: skip
        until = time.monotonic() + seconds
        statuses = [ended(process, until) for process in started]
        told = [read(folder / f"rank-{rank}.json") for rank in range(n)]
        output = "\n".join((folder / f"{rank}.log").read_text(errors="replace")[-TAIL:] for rank in range(n))
        return Ended(statuses, told, output, ways.counts(ways.statuses(folder / "status")))


def ended(process: "subprocess.Popen[bytes]", until: float) -> int | None:
    """A process' exit status; None if it had to be killed."""
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def read(path: Path) -> dict[str, Any]:
    """What a rank wrote; nothing, if it wrote nothing."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def problems(fault: str, job: Ended) -> list[str]:
    """What may not be, whoever makes the calls."""
    found = [f"rank {rank} hung" for rank, status in enumerate(job.statuses) if status is None]
    found += [f"rank {rank}: {text}" for rank, one in enumerate(job.told) for text in one.get("wrong", ())]
    if fault in HARMLESS and not found:
        for rank, (status, one) in enumerate(zip(job.statuses, job.told, strict=True)):
            if status or not one.get("done"):
                found.append(f"rank {rank} ended by {one.get('error', f'exit status {status}')}")
    return found


def judged(fault: str, seed: int, n: int) -> dict[str, Any]:
    """Run a job with the door, and without where something was wrong."""
    began = time.monotonic()
    job = run(DOOR, fault, seed, n, JOB_S)
    bad = problems(fault, job)
    plain = problems(fault, run(PLAIN, fault, seed, n, JOB_S)) if bad else []
    row = {
        "fault": fault, "seed": seed, "ours": job.counts["ours"], "problems": bad, "plain": plain,
        "calls": sum(one.get("calls", 0) for one in job.told), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    if bad:
        row["output"] = meta.without_folders(job.output)
    return row


def campaign(seed: int, n: int, seconds: float, beside: int) -> tuple[dict[str, Any], list[str]]:
    """Run jobs until the time is over; the row of them, and what the door alone did wrong."""
    until = time.monotonic() + seconds
    rng = random.Random(seed)
    jobs = iter([(FAULTS[i % len(FAULTS)], rng.randrange(1 << 30)) for i in range(MOST_JOBS)])  # for all threads

    def work(_: int) -> list[dict[str, Any]]:
        rows = []
        while time.monotonic() < until:
            rows.append(judged(*next(jobs), n))
            print(f"    {told(rows[-1])}", flush=True)
        return rows

    with ThreadPoolExecutor(beside) as pool:
        rows = [row for some in pool.map(work, range(beside)) for row in some]
    failed = [
        f"{row['fault']}, seed {row['seed']}: {text}" for row in rows if not row["plain"] for text in row["problems"]
    ]
    sums = {name: sum(row[name] for row in rows) for name in ("calls", "ours")}
    found = {
        "part": "campaign", "name": f"campaign of seed {seed}", "processes": n, "jobs": len(rows), **sums,
        "faults": dict(Counter(row["fault"] for row in rows)), "bad": [row for row in rows if row["problems"]],
        "by both": sum(bool(row["plain"]) for row in rows), "seconds": round(sum(row["seconds"] for row in rows), 1),
    }  # fmt: skip
    return found, failed


def told(row: dict[str, Any]) -> str:
    """A job for people."""
    end = "; ".join(row["problems"]) or "right"
    return f"{row['fault']}, seed {row['seed']}, {row['seconds']} s, {row['ours']} calls ours: {end}" + (
        f" (plain NCCL: {'; '.join(row['plain'])})" if row["plain"] else "")  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    faults = ", ".join(f"{n} {fault}" for fault, n in row["faults"].items())
    return (f"{row['name']}: {row['jobs']} jobs ({faults}), {row['ours']} calls ours; {len(row['bad'])} jobs bad, "
            f"{row['by both']} of them also with plain NCCL")  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(judged(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), indent=1))
