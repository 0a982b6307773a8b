"""A job that torchrun starts on two hosts beside the same job under ``mpiexec``: short calls, and rates.

``python benchmarks/torchrun_hosts.py --mpich FOLDER -o torchrun-hosts.json``, where FOLDER is one into which MPICH's
wheel was installed by ``pip install --prefix FOLDER mpich``. The hosts are namespaces of this machine, joined by
unshaped virtual links, with a rank each. Both launchers run the same program in turn, ``--rounds`` times; it times
torch's collectives on backend blink, each call between two barriers. A time is that of the slowest rank, the median
over the calls of a job; a row's ratio is the median over the rounds of mpiexec's time through torchrun's, so above 1
torchrun's job is faster. Needs root or user namespaces, iproute2, torch and the test extras.
"""

import argparse
import faulthandler
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from tests.hosts.agents import Agents  # noqa: E402
from tests.hosts.world import SCRIPT, World, forbidden, missing  # noqa: E402

LAUNCHERS = ("torchrun", "mpiexec")
RANKS = (1, 1)
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes
CALLS = {size: 200 if size <= 64 << 10 else 20 for size in SIZES}
WARMUP = 5
JOB_S = 120.0

Times = dict[str, float]  # by what was called: microseconds


# ---------------------------------------------------------------- a rank


def rank(launcher: str, to: str) -> None:
    """Measure on all ranks; rank 0 writes the times, and what says that all is as wanted."""
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(JOB_S, exit=True)
    dist.init_process_group("blink", init_method="mpi://" if launcher == "mpiexec" else "env://")
    from mpi4py import MPI

    world, times, wrong = MPI.COMM_WORLD, dict[str, float](), 0
    for size in SIZES:
        x = torch.ones(size // 4)
        for name, call, wanted in (
            ("all_reduce", lambda x: dist.all_reduce(x), float(world.size)),
            ("broadcast", lambda x: dist.broadcast(x, 0), 1.0),
        ):
            x.fill_(1)
            call(x)
            wrong += int((x != wanted).sum())
            x.zero_()
            taken = []
            for _ in range(WARMUP + CALLS[size]):
                world.Barrier()
                begin = time.perf_counter()
                call(x)
                taken.append(world.allreduce(time.perf_counter() - begin, MPI.MAX))
            times[f"{name} {size}"] = median(taken[WARMUP:]) * 1e6
    group = dist.group.WORLD.comm
    found = {"times": times, "wrong": wrong, **jobs.rank_facts(MPI, group), "source": group.machine.source}
    if world.rank == 0:
        Path(to).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


# ---------------------------------------------------------------- the jobs


def run(world: World, launcher: str, mpich: Path, folder: Path) -> dict[str, Any]:
    """Run the job once; gives what its rank 0 wrote.

    Raises:
        RuntimeError: if it does not end well.
    """
    to = folder / "found.json"
    to.unlink(missing_ok=True)
    program = [str(Path(__file__).resolve()), "--rank", launcher, "-o", str(to)]
    env = {**jobs.SETTINGS, "MPI4PY_LIBMPI": str(mpich / "lib" / "libmpi.so.12"), "PYTHONPATH": jobs.python_path()}
    if launcher == "torchrun":
        with Agents(world, RANKS, program, env=env) as agents:
            ended = agents.wait(JOB_S)
        failed, said = any(ended.statuses), ended.output
    else:
        remote = folder / "remote"  # what mpiexec takes for ssh
        remote.write_text(f'#!/bin/bash\nexec bash {shlex.quote(str(SCRIPT))} agent "$@"\n', encoding="utf-8")
        remote.chmod(0o700)
        places = ",".join(f"{host}:{ranks}" for host, ranks in zip(world.names, RANKS, strict=True))
        line = [str(mpich / "bin" / "mpiexec"), "-launcher", "ssh", "-launcher-exec", str(remote), "-hosts", places,
                "-n", str(sum(RANKS)), "-genvlist", ",".join((*env, "PATH")), sys.executable, *program]  # fmt: skip
        done = subprocess.run(world.command(world.names[0], line), env={**os.environ, **env}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=JOB_S, check=False)  # fmt: skip
        failed, said = done.returncode != 0, done.stdout + done.stderr
    if failed or not to.exists():
        raise RuntimeError(f"{launcher}: the job did not end well:\n{said[-2000:]}")
    found: dict[str, Any] = json.loads(to.read_text(encoding="utf-8"))
    return found


def rows_of(rounds: Sequence[dict[str, Times]]) -> list[dict[str, Any]]:
    """A row for each call: every round's times, the medians, and the median of the rounds' ratios."""
    rows = []
    for what in rounds[0][LAUNCHERS[0]]:
        name, size = what.split()
        us = {launcher: [times[launcher][what] for times in rounds] for launcher in LAUNCHERS}
        ratios = [theirs / ours for ours, theirs in zip(us["torchrun"], us["mpiexec"], strict=True)]
        rows.append({
            "collective": name, "size": int(size), "us": us, "median_us": {key: median(us[key]) for key in us},
            "ratio": median(ratios), "least": min(ratios), "most": max(ratios),
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = ["collective        bytes   torchrun us    mpiexec us  ratio (least to most)"]
    for row in rows:
        ours, theirs = (row["median_us"][launcher] for launcher in LAUNCHERS)
        ratio = f"{row['ratio']:5.2f} ({row['least']:.2f} to {row['most']:.2f})"
        lines.append(f"{row['collective']:12} {row['size']:10} {ours:13.1f} {theirs:13.1f}  {ratio}")
    return "\n".join(lines)


def main() -> None:
    """Run all rounds, show the table, write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mpich", type=Path, help="the folder of MPICH's wheel (pip install --prefix FOLDER mpich)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each launcher (%(default)s)")
    parser.add_argument("-o", "--output", required=True, help="the file to write, or one beside it if taken")
    parser.add_argument("--rank", choices=LAUNCHERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.output)
        return
    if options.mpich is None or not (options.mpich / "bin" / "mpiexec").exists():
        parser.error("--mpich: expected a folder with bin/mpiexec; pip install --prefix FOLDER mpich")
    if why := missing() or forbidden():
        parser.error(why)
    began, rounds, facts = datetime.now().astimezone(), list[dict[str, Times]](), dict[str, Any]()
    with World(len(RANKS)) as world, tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        for number in range(options.rounds):
            times = {}
            for launcher in LAUNCHERS if number % 2 == 0 else reversed(LAUNCHERS):
                found = run(world, launcher, options.mpich.resolve(), Path(folder))
                if found.pop("wrong"):
                    raise SystemExit(f"{launcher}: wrong values")
                times[launcher], facts = found.pop("times"), found
            rounds.append(times)
            print(f"round {number + 1} of {options.rounds}", flush=True)
    rows = rows_of(rounds)
    print(table(rows))
    head = {"torchrun_hosts": {"ranks": list(RANKS), "rounds": options.rounds}, "env": facts.pop("env")}
    jobs.write(options.output, jobs.document(head, rows, [], began, ranks=sum(RANKS), memory="host", **facts))


if __name__ == "__main__":
    main()
