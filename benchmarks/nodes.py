"""Ours and NCCL between virtual nodes of GPUs: ``python benchmarks/nodes.py 4 --out results-nodes --budget 90``.

The GPUs of one machine are split into nodes that share nothing: ours by ``BLINKMPI_NODES``, with an MPI that has TCP
over the loopback interface alone; NCCL by ``NCCL_HOSTID``, with its sockets on the same interface and nothing else. So
both carry what crosses through the same wire, which is this machine's memory and kernel and no network. ``blinkmpi
bench`` measures and checks; what NCCL took for nodes, and how its ranks are connected, is read from its log. A file for
each split goes into ``--out``; a table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.jobs import run_job  # noqa: E402
from blinkmpi.bench_document import write_new  # noqa: E402

SPLITS = {2: ((1, 1),), 4: ((2, 2), (1, 3)), 8: ((4, 4), (3, 5))}
LAUNCHER = ("mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,tcp",
            "--mca", "btl_tcp_if_include", "lo")  # fmt: skip
SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH",
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONUNBUFFERED": "1",
}
CALLS = 2  # in a block: a call of 256 MiB takes long enough
FEWEST_SECONDS = 10.0  # a job with less than this left is not started
TAIL_CHARACTERS = 3000  # of a failed job's output: bench prints each row as it is measured


def name_of(split: Sequence[int]) -> str:
    """``2+2``."""
    return "+".join(map(str, split))


def command(split: Sequence[int], high: str, file: Path) -> list[str]:
    """The mpirun of a split: a context for each node, with its own ``NCCL_HOSTID``."""
    bench = [sys.executable, "-m", "blinkmpi", "bench", "all_reduce", "-b", "1M", "-e", high, "-f", "4"]
    bench += ["-n", str(CALLS), "--predict", "--compare", "nccl", "-J", str(file)]
    words = list(LAUNCHER)
    for node, ranks in enumerate(split):
        words += [":"] if node else []
        words += ["-np", str(ranks), "-x", f"NCCL_HOSTID=node{node}", *bench]
    return words


def settings(split: Sequence[int], folder: Path) -> dict[str, str]:
    """The variables of all ranks."""
    log = {"NCCL_DEBUG_FILE": f"{folder}/log.%h.%p"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**SETTINGS, **log, "BLINKMPI_NODES": name_of(split), "PYTHONPATH": path}


def made_of(logs: Sequence[str]) -> dict[str, Any]:
    """What NCCL made of the nodes: how many it saw, and its connections by kind."""
    text = "\n".join(logs)
    nodes = sorted({int(count) for count in re.findall(r"nNodes (\d+)", text)})
    over = re.findall(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[send\])? via (\w+)(?:/(Socket|IB))?", text)
    kinds = ["/".join(filter(None, found)) for found in over]
    return {"nodes": nodes, "connections": {kind: kinds.count(kind) for kind in sorted(set(kinds))}}


def measured(split: Sequence[int], high: str, seconds: float) -> tuple[dict[str, Any] | None, list[str], str]:
    """Run the job of a split; (its document, what went wrong, its output)."""
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        folder = Path(name)
        why, said = run_job(command(split, high, folder / "result.json"), settings(split, folder), seconds)
        file = folder / "result.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        made = made_of([path.read_text(errors="replace") for path in sorted(folder.glob("log.*"))])
    failed = [why] if why else []
    if found is None:
        return None, failed or ["no result"], said
    if found["blinkmpi"]["memory"] != "gpu":
        return None, [*failed, "the ranks had no GPUs"], said
    if made["nodes"] != [len(split)]:
        failed.append(f"NCCL saw {made['nodes'] or 'no number of'} nodes, not {len(split)}")
    return {"nodes": {"virtual": True, "ranks": list(split), "nccl": made}, **found, "failed": failed}, failed, said


def table(documents: Sequence[dict[str, Any]]) -> str:
    """A line for each size: ours and NCCL's in ms, out of place and in place."""
    lines: list[str] = []
    for found in documents:
        made = found["nodes"]["nccl"]
        told = ", ".join(f"{count} {kind}" for kind, count in made["connections"].items())
        lines += ["", f"allreduce on virtual nodes of {name_of(found['nodes']['ranks'])} GPUs; NCCL saw "
                  f"{', '.join(map(str, made['nodes']))} nodes, connections: {told or 'unknown'}",
                  "MiB; ours ms, GB/s, NCCL ms, ratio; the same in place; predicted, bound; wrong"]  # fmt: skip
        for row in found["results"]:
            own, wrong = row["blinkmpi"], 0
            cells = [f"{row['size'] >> 20:4d}"]
            for place in ("out_of_place", "in_place"):
                theirs = own[place]["compare"]["nccl"]
                cells.append(f"{_ms(row[place]['time'])} {row[place]['alg_bw']:6.2f}")
                cells.append(f"{_ms(theirs['time'])} {theirs['ratio']:5.2f}")
                wrong += (row[place]["nwrong"] or 0) + (theirs["nwrong"] or 0)
            lines.append(" ".join([*cells, _ms(own["predicted_us"]), _ms(own["bound_us"]), f"{wrong:4d}"]))
    return "\n".join(lines).strip("\n")


def _ms(us: float | None) -> str:
    return f"{'-':>8}" if us is None else f"{us / 1e3:8.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of every split and write its file; 0 if all of them ended well."""
    parser = argparse.ArgumentParser(description="Ours and NCCL between virtual nodes of this machine's GPUs.")
    parser.add_argument("np", type=int, choices=sorted(SPLITS), help="ranks, one for each GPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results' files")
    parser.add_argument("--budget", type=float, default=90, metavar="SECONDS", help="for all jobs (default 90)")
    parser.add_argument("--max", default="256M", metavar="SIZE", help="largest size (default 256M)")
    parser.add_argument("--only", default="", metavar="SPLIT", help="only the splits whose names hold this, as 2+2")
    args = parser.parse_args(argv)
    todo = [split for split in SPLITS[args.np] if args.only in name_of(split)]
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    shown: list[dict[str, Any]] = []
    failed: list[str] = []
    for i, split in enumerate(todo):
        start = time.monotonic()
        seconds = (end - start) / (len(todo) - i)
        if seconds < FEWEST_SECONDS:
            failed.append(f"{name_of(split)}: not started, {seconds:.0f} s left")
            continue
        found, why, said = measured(split, args.max, seconds)
        failed += [f"{name_of(split)}: {text}" for text in why]
        print(f"{name_of(split)}: {'; '.join(why) or 'ok'}, {time.monotonic() - start:.1f} s", flush=True)
        if why:
            print("    " + "\n    ".join(said.strip()[-TAIL_CHARACTERS:].splitlines()), flush=True)
        if found is not None:
            file = args.out / f"nodes-gpu-{'-'.join(map(str, split))}.json"
            print(f"wrote {write_new(str(file), json.dumps(found, indent=1))}", flush=True)
            shown.append(found)
    print(table(shown))
    print("\n".join(["", "failed:", *failed]) if failed else "\nall jobs ended well")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
