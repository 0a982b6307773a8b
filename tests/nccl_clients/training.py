"""Programs that train by other libraries and one that decodes, with the door and without, in turn.

They lie in ``programs``, name NCCL as their users would, and are the same both ways. Their losses or tokens must be the
same; their steps' times are compared.
"""

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import meta
from tests.nccl_clients import ways
from tests.nccl_clients.ways import DOOR, PLAIN

PROGRAMS = Path(__file__).with_name("programs")
NAMES = {"hf_trainer": "transformers", "lightning_ddp": "lightning", "accelerate_loop": "accelerate", "decode": "torch"}
TURNS = 2  # of each way
NEARLY = 1e-3  # losses of more than two ranks, whose sums have an order
SLOWER = 0.99  # of plain NCCL's time: what is below is named
MARK = "RESULT "
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without which sums of cuBLAS have no order


def missing() -> dict[str, str]:
    """Programs whose package is not there."""
    return {name: package for name, package in NAMES.items() if importlib.util.find_spec(package) is None}


def result(output: str) -> dict[str, Any] | None:
    """What a program has printed on its line, if it has."""
    found = [text for text in output.splitlines() if MARK in text]
    return json.loads(found[-1].partition(MARK)[2]) if found else None


def once(name: str, by: str, n: int, steps: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run a program one way; its values, time of a step and counts, and what was wrong."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    words = [*torchrun, str(PROGRAMS / f"{name}.py"), "--steps", str(steps)]
    ran = ways.run(by, words, seconds, WORKSPACE)
    found = result(ran.output)
    wrong = [ran.wrong] if ran.wrong else [] if found else ["it printed no result"]
    if wrong:
        print(f"    {meta.without_folders(ran.output.strip()[-3000:])}", flush=True)
    return {**(found or {"values": [], "step_ms": math.nan}), "counts": ran.counts}, wrong


def alike(values: Sequence[Sequence[float]], n: int) -> bool:
    """Whether all runs came to the same values: in every bit where two ranks' sums have no order."""
    first = values[0]
    if not first or any(len(some) != len(first) for some in values):
        return False
    return all(some == first for some in values) if n == 2 else all(
        math.isclose(a, b, rel_tol=NEARLY) for some in values for a, b in zip(first, some, strict=True)
    )  # fmt: skip


def compared(name: str, n: int, steps: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run a program both ways in turn; its row, and what was wrong.

    Args:
        seconds: for all runs.
    """
    runs: dict[str, list[dict[str, Any]]] = {PLAIN: [], DOOR: []}
    failed = []
    for _ in range(TURNS):
        for by, some in runs.items():
            found, wrong = once(name, by, n, steps, seconds / TURNS / len(runs))
            some.append(found)
            failed += [f"{name}, {by}: {text}" for text in wrong]
    every = [*runs[PLAIN], *runs[DOOR]]
    equal = alike([one["values"] for one in every], n)
    counts = runs[DOOR][-1]["counts"]
    on_gpu = all(one.get("device") for one in every)
    if not failed and not equal:
        failed.append(f"{name}: values differ")
    if not failed and on_gpu and not counts["ours"]:
        failed.append(f"{name}: no call was ours: {counts['why']}")
    best = {by: min(one["step_ms"] for one in some) for by, some in runs.items()}
    ratio = round(best[PLAIN] / best[DOOR], 3) if not failed else None
    row = {
        "part": "training", "name": name, "processes": n, "steps": steps, "equal": equal, "ratio": ratio,
        "step_ms": {by: [one["step_ms"] for one in some] for by, some in runs.items()}, "counts": counts,
        "last": {by: some[-1]["values"][-4:] for by, some in runs.items()}, "slower": bool(ratio and ratio < SLOWER),
        "problems": failed,
    }  # fmt: skip
    return row, failed


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    ratio = "no ratio" if row["ratio"] is None else f"steps {row['ratio']:.3f} times as fast"
    slower = ", SLOWER" if row["slower"] else ""
    return f"{row['name']}: values equal: {row['equal']}, {ratio}{slower}, {ways.told(row['counts'])}"
