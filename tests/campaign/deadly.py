"""Jobs that one fault ends: a rank is killed, raises, leaves or stops for good. What the others must see of it.

``python -m tests.campaign.deadly BOX SEED FAULT [cupy]`` is the program of a rank: calls of random kinds and lengths,
on host or GPU memory, amid which the fault strikes one of them. The others write the error that they raise, and how
long they waited for it. Where a rank is ``killed_then_shrink``, they go on without it, and now and then another one is
killed as they shrink, or soon after. Where it is ``killed_then_grow``, another one that MPI starts takes its place.
"""

import importlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("allreduce", "broadcast", "allgather", "request")
COUNTS = (1, 8, 1000, 40_000, 300_007, 2_000_003)
TIMEOUT_S = 1.5  # where the deadline must pass
SHRINK, GROW = "killed_then_shrink", "killed_then_grow"
GOES_ON = SHRINK, GROW
SECOND = 0.4  # of these jobs, in which another rank is killed, too
SECOND_S = 0.3  # after the first error, at most
AFTER_CALLS = 30  # that the ranks make which are left


@dataclass(frozen=True, slots=True)
class Deadly:
    """A fault that ends its job.

    Args:
        errors: one of which every survivor raises; nothing where the launcher ends the survivors.
        ft: whether the job runs under ``mpirun --with-ft ulfm``, where it outlives a rank.
        deadline: seconds that must pass before a survivor's call raises.
        fails: whether the job's exit status tells it.
    """

    errors: tuple[str, ...]
    ft: bool = False
    deadline: float = 0.0
    fails: bool = True


DEADLY: Mapping[str, Deadly] = {
    "killed": Deadly(()),
    "killed_at_start": Deadly(()),
    "killed_ulfm": Deadly(("PeerLost",), ft=True, fails=False),
    SHRINK: Deadly(("PeerLost",), ft=True, fails=False),
    GROW: Deadly(("PeerLost",), ft=True, fails=False),
    "exception": Deadly(()),
    "left": Deadly(("PeerLost",), fails=False),
    "stopped_for_good": Deadly(("CollectiveTimeout",), deadline=TIMEOUT_S),
}


def main(folder: str, seed: str, fault: str, memory: str = "numpy") -> None:
    """Be a rank."""
    own = random.Random(int(seed))  # the same on all ranks
    after = own.uniform(0.0, 0.08)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    victim = own.randrange(world.size)
    box = Path(folder)
    if fault == "killed_at_start" and world.rank == victim:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    import blinkmpi
    from blinkmpi.errors import BlinkError
    from tests.harness import NEVER_S, wait_until

    xp = importlib.import_module(memory)
    if fault == GROW and (joined := blinkmpi.Communicator.join(timeout=NEVER_S)) is not None:
        make_calls(joined, xp, int(seed))
        joined.Free()
        return
    algo = own.choice((None, "allreduce:^mpi;broadcast:^mpi"))
    comm = blinkmpi.Communicator(
        world, timeout=TIMEOUT_S if fault == "stopped_for_good" else NEVER_S,
        executor=own.choice(("auto", "auto", "numpy")), algo=None if memory == "cupy" else algo,
    )  # fmt: skip
    for count, kind in itertools.product(COUNTS, KINDS) if memory == "cupy" else ():  # kernels are compiled
        call(comm, kind, xp, xp.full(count, world.rank + 1.0), 0, timeout=NEVER_S)
    comm.Barrier()
    if world.rank == victim:
        (box / "begun").touch()
        if fault in ("killed", "killed_ulfm", *GOES_ON):
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if fault == "stopped_for_good":
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    strikes, since = time.monotonic() + after, time.monotonic()
    try:
        for i in range(1_000_000):
            if world.rank == victim and time.monotonic() > strikes:
                if fault == "exception":
                    raise ValueError("seven is not eight")
                if fault == "left":
                    return
            count, kind = own.choice(COUNTS), own.choice(KINDS)
            x = xp.full(count, world.rank + 1.0)
            since = time.monotonic()
            call(comm, kind, xp, x, i)
    except BlinkError as error:
        said: dict[str, Any] = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - since}
        if fault in GOES_ON:
            second = second_victim(int(seed), world.size, victim) if fault == SHRINK else (-1, 0.0)
            comm, said["shrunk"] = go_on(comm, xp, int(seed), *second)
        if fault == GROW:
            comm = comm.grow(1, [sys.executable, "-m", "tests.campaign.deadly", *sys.argv[1:]], timeout=NEVER_S)
            make_calls(comm, xp, int(seed))
            said["grown"] = comm.size
        (box / f"{world.rank}.draft").write_text(json.dumps(said))
        (box / f"{world.rank}.draft").rename(box / f"{world.rank}.json")
        # who leaves first may end the job
        left = comm.size - (fault == GROW) if fault in GOES_ON else world.size - 1
        wait_until(lambda: len(list(box.glob("[0-9].json"))) >= left, "the other survivors have said theirs")
        comm.Free()


def second_victim(seed: int, n: int, first: int) -> tuple[int, float]:
    """Who is killed as the others go on without ``first``, and when, in seconds from its error; -1: nobody."""
    own = random.Random(seed + 1)
    after, others = own.uniform(0.0, SECOND_S), [r for r in range(n) if r != first]
    return (own.choice(others) if own.random() < SECOND and n > 2 else -1), after


def make_calls(comm: Any, xp: Any, seed: int) -> None:
    """Make the calls of ranks that nobody kills."""
    own = random.Random(seed + comm.size)
    for i in range(AFTER_CALLS):
        x = xp.full(own.choice(COUNTS), comm.rank + 1.0)
        call(comm, own.choice(KINDS), xp, x, i)


def go_on(comm: Any, xp: Any, seed: int, second: int, after: float) -> tuple[Any, list[float]]:
    """Make calls among the ranks that are left; gives their communicator, and how long each ``shrink`` took.

    Args:
        second: who is killed meanwhile, so many seconds ``after``; -1: nobody.
    """
    from blinkmpi.errors import PeerLost

    if comm.rank == second:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    left = comm.size - 1 - (second >= 0)
    took: list[float] = []
    own: random.Random | None = None
    done = 0
    while own is None or done < AFTER_CALLS or comm.size > left:
        try:
            if own is None:  # the ranks are at different calls
                since = time.monotonic()
                comm = comm.shrink()
                took.append(time.monotonic() - since)
                done, own = 0, random.Random(seed + comm.size)
            x = xp.full(own.choice(COUNTS), comm.rank + 1.0)
            call(comm, own.choice(KINDS), xp, x, done)
            done += 1
        except PeerLost:
            own = None
    if comm.size != left:
        raise AssertionError(f"{comm.size} ranks are left, {left} live")
    return comm, took


def call(comm: Any, kind: str, xp: Any, x: Any, i: int, **keywords: float) -> None:
    """Make a call and look at its result. ``xp`` is the module that made ``x``."""
    from mpi4py import MPI

    total = comm.size * (comm.size + 1) / 2
    if kind == "allreduce":
        comm.Allreduce(MPI.IN_PLACE, x, **keywords)
        right = bool((x == total).all())
    elif kind == "request":
        comm.Iallreduce(MPI.IN_PLACE, x, **keywords).Wait()
        right = bool((x == total).all())
    elif kind == "broadcast":
        comm.Bcast(x, root=i % comm.size, **keywords)
        right = bool((x == i % comm.size + 1).all())
    else:
        whole = xp.empty(comm.size * x.size)
        comm.Allgather(x, whole, **keywords)
        right = bool((whole.reshape(comm.size, x.size) == xp.arange(1.0, comm.size + 1)[:, None]).all())
    if not right:
        raise AssertionError(f"{kind} of {x.size} elements, call {i}, is wrong")


def judge(fault: str, box: Path, n: int, seed: int, *, rc: int, output: str) -> list[str]:
    """Say what is not as promised, of a job that has ended by itself."""
    from tests.harness import PATIENCE_S  # not in a rank that is killed while it imports

    deadly, found = DEADLY[fault], []
    own = random.Random(seed)
    own.uniform(0.0, 0.08)
    victim = own.randrange(n)
    said = {int(path.stem): json.loads(path.read_text()) for path in sorted(box.glob("[0-9].json"))}
    if deadly.fails and rc == 0:
        found.append("the job's exit status is 0")
    if "AssertionError" in output:
        found.append("a call was wrong")
    victims = (victim, second_victim(seed, n, victim)[0] if fault == SHRINK else -1)
    for rank in range(n):
        if rank in victims or not deadly.errors:
            continue
        if rank not in said:
            found.append(f"rank {rank} raised nothing")
        elif said[rank]["error"] not in deadly.errors:
            found.append(f"rank {rank} raised {said[rank]['error']}: {said[rank]['text']}")
        elif fault in GOES_ON and not said[rank].get("shrunk"):
            found.append(f"rank {rank} did not go on: {said[rank]['text']}")
        elif fault in GOES_ON and max(said[rank]["shrunk"]) > PATIENCE_S:
            found.append(f"rank {rank} shrank in {max(said[rank]['shrunk']):.1f} s")
        elif fault == GROW and said[rank].get("grown") != n:
            found.append(f"rank {rank} is one of {said[rank].get('grown')} in the end, not of {n}")
        elif said[rank]["seconds"] > deadly.deadline + PATIENCE_S:
            found.append(f"rank {rank} raised {said[rank]['error']} after {said[rank]['seconds']:.1f} s")
    if fault == "exception" and "ValueError: seven is not eight" not in output:
        found.append("the exception was not shown")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
