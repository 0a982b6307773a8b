"""The command line of a campaign: ``python -m tests.campaign --seconds 600 --faults -o FILE``."""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blinkmpi.bench.environment import commit, hardware, versions
from blinkmpi.transport.cuda.device import device_count
from blinkmpi.util.settings import read
from tests.campaign import jobs
from tests.campaign.deadly import DEADLY, GROW
from tests.campaign.jobs import Result
from tests.campaign.steps import Mix, settings
from tests.harness import ENVIRONMENT

JOB_S, GPU_JOB_S = 45.0, 120.0  # that a job makes calls, at most: on GPUs it takes longer to start
CROWDED_S = 15.0  # that ranks call which share GPUs
CROWDS = (3, 8)
RANKS = (2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
CALLS_FAULTS = 0.08  # of the steps, with --faults
DEADLY_SHARE = 0.3  # of the time, with --faults
BETWEEN_HOSTS = 4 << 20  # bytes of a call at most
LAYOUTS = ((2, 2), (1, 2), (3, 1), (1, 1))  # ranks of each host


def plan(seed: int, args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Draw jobs without end: (what, its seed, its number of ranks)."""
    rng = random.Random(seed)
    while args.fault:
        yield args.fault, rng.randrange(1 << 30), max(args.ranks) if args.gpus else rng.choice((2, 3, 4))
    while True:
        ranks = rng.choice(args.ranks)
        yield ("hosts" if args.hosts else "calls"), rng.randrange(1 << 30), ranks
        if args.gpus and args.seconds > 2 * JOB_S:  # among more ranks than GPUs, whose kernels take long to compile
            yield "crowded", rng.randrange(1 << 30), rng.choice(CROWDS)
        for _ in range(64 if args.faults and not args.hosts else 0):
            known = [fault for fault in DEADLY if fault != GROW or not args.gpus]  # no rank joins on GPUs
            yield rng.choice(known), rng.randrange(1 << 30), ranks if args.gpus else rng.choice((2, 2, 3, 4))


def run(seed: int, args: argparse.Namespace) -> list[Result]:
    """Run jobs until the time is over; deadly ones get their share of it."""
    began, spent = time.monotonic(), 0.0
    results: list[Result] = []
    mount = jobs.may_mount() if args.faults and not args.gpus else False
    if args.faults and not args.gpus and not mount:
        print("namespaces are forbidden here, so /dev/shm is never full", flush=True)
    share = 1.0 if args.fault else DEADLY_SHARE if args.faults else 0.0
    for what, one, ranks in plan(seed, args):
        left = args.seconds - (time.monotonic() - began)
        if left < 2.0 and results:
            break
        if what in DEADLY:
            if spent > share * (time.monotonic() - began):
                continue
            result = jobs.deadly(what, one, ranks, "cupy" if args.gpus else "numpy")
            spent += result.seconds
        elif what == "crowded":
            result = jobs.crowded(one, ranks, min(CROWDED_S, left))
        else:
            most = GPU_JOB_S if args.gpus else JOB_S
            result = calls(what, one, ranks, min(most, args.seconds / 4, left), mount, args)
        results.append(result)
        say(result)
    return results


def calls(what: str, seed: int, ranks: int, seconds: float, mount: bool, args: argparse.Namespace) -> Result:
    """Run a job that makes calls."""
    layout = LAYOUTS[seed % len(LAYOUTS)]
    small = mount and what == "calls" and seed % 3 == 0
    mix = Mix(ranks, CALLS_FAULTS if args.faults else 0.0, small_shm=small)
    if what == "hosts":
        mix = replace(mix, n=sum(layout), hosts=True, most_bytes=BETWEEN_HOSTS)
        result = jobs.hosts(seed, seconds, layout, mix)
    elif args.gpus:
        from tests.campaign.gpu_memory import memories

        result = jobs.calls(seed, seconds, replace(mix, memories=memories()), steps=args.steps)
    else:
        result = jobs.calls(seed, seconds, mix, steps=args.steps, env=settings(seed, ranks))
    again = " ".join(f"--{name}" for name in ("gpus", "hosts", "faults") if getattr(args, name))
    result.again = f"python -m tests.campaign --job {seed} --ranks {ranks} --seconds {args.seconds:.0f} {again}".strip()
    return result


def say(result: Result) -> None:
    """Print a line about a job, and what was wrong."""
    what = f"{result.calls} calls, {sum(result.faults.values())} faults" if result.calls else result.name
    what += f", {' '.join(f'{k}={v}' for k, v in result.settings.items())}" if result.settings else ""
    state = f"{len(result.wrong)} wrong, {len(result.hung)} hung" if result.wrong or result.hung else "right"
    print(f"seed {result.seed}, {result.ranks} ranks, {result.seconds:.1f} s: {what}: {state}", flush=True)
    for text in (*result.wrong, *result.hung):
        print(f"  {text}\n  again: {result.again}", flush=True)


def document(args: argparse.Namespace, results: list[Result], seconds: float, head: dict[str, Any]) -> dict[str, Any]:
    """What is written: sums, and the seeds of the jobs. ``head`` is the commit."""
    kinds: dict[str, dict[str, int]] = {}
    faults: dict[str, int] = {}
    slowest: dict[str, float] = {}
    for result in results:
        jobs.add(faults, result.faults)
        for name, counts in result.kinds.items():
            jobs.add(kinds.setdefault(name, {}), counts)
        for name, took in result.slowest.items():
            slowest[name] = round(max(took, slowest.get(name, 0.0)), 2)
    bad = [{"seed": r.seed, "ranks": r.ranks, "job": r.name, "again": r.again, "text": text}
           for r in results for text in r.wrong]  # fmt: skip
    hung = [{"seed": r.seed, "ranks": r.ranks, "job": r.name, "again": r.again, "text": text}
            for r in results for text in r.hung]  # fmt: skip
    return {
        "calls": sum(r.calls for r in results), "steps": sum(r.steps for r in results),
        "kinds": {name: dict(sorted(found.items())) for name, found in sorted(kinds.items())},
        "faults": sum(faults.values()), "fault_kinds": dict(sorted(faults.items())), "slowest_s": slowest,
        "wrong": bad, "hung": hung, "seed": args.seed,
        "seeds": [{"job": r.name, "seed": r.seed, "ranks": r.ranks, "settings": r.settings}
                  for r in results if r.calls],
        "seconds": round(seconds, 1), "options": {k: v for k, v in sorted(vars(args).items()) if k != "o"},
        "devices": sorted({r.device for r in results if r.device}), **head, "hardware": hardware(),
        "host": platform.node(), "versions": versions(mpi_library(), None, gpu=args.gpus),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def mpi_library() -> str:
    """What MPI calls itself."""
    os.environ.update(ENVIRONMENT)
    import mpi4py

    mpi4py.rc.initialize = False  # the name needs no MPI_Init, which would make this process a rank
    from mpi4py import MPI

    from blinkmpi.bench.environment import mpi_library as name

    return name(MPI)


def main() -> int:
    """Run a campaign; the exit status is 1 if anything was wrong or hung."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    several = "numbers of ranks to draw from, as 2,4 (default: 2 to 8, or the number of GPUs)"
    parser.add_argument("--ranks", type=lambda text: tuple(map(int, text.split(","))), help=several)
    parser.add_argument("--gpus", action="store_true", help="on GPU memory")
    parser.add_argument("--hosts", action="store_true", help="on two hosts, made of namespaces")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--fault", choices=DEADLY, help="only jobs that this fault ends")
    parser.add_argument("--job", type=int, help="only the job of this seed, which a campaign has printed")
    parser.add_argument("--steps", type=int, default=1 << 60, help="of a job, at most")
    parser.add_argument("-o", metavar="FILE", help="write what was done as JSON")
    args = parser.parse_args()
    room = device_count() * read().ranks_per_gpu
    args.ranks = args.ranks or ((room,) if args.gpus else RANKS)
    if args.gpus and not 2 <= max(args.ranks) <= room:
        parser.error(f"{max(args.ranks)} ranks need as many GPUs, or BLINKMPI_RANKS_PER_GPU; there is room for {room}")
    print(f"seed {args.seed}", flush=True)
    began, head = time.monotonic(), commit()
    if args.job is None:
        results = run(args.seed, args)
    else:
        mount = args.faults and not args.gpus and jobs.may_mount()
        results = [calls("hosts" if args.hosts else "calls", args.job, args.ranks[0], args.seconds, mount, args)]
        say(results[0])
    done = document(args, results, time.monotonic() - began, head)
    if args.o:
        Path(args.o).write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    print(f"{done['calls']} calls, {done['faults']} faults, {len(done['wrong'])} wrong, {len(done['hung'])} hung "
          f"in {done['seconds']:.0f} s")  # fmt: skip
    return int(bool(done["wrong"] or done["hung"]))


if __name__ == "__main__":
    sys.exit(main())
