"""A rank of a random torch program, which names NCCL and knows nothing of a door: calls of a seed, and one fault.

    python -m tests.nccl_clients.campaign_rank FOLDER SEED FAULT RANK RANKS

All ranks draw the same. It writes into FOLDER what it did, and ends as a program of a user's would. FAULT is a method
of Program, and happens once. Without GPUs it runs over gloo, to be tried.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.nccl_door import COLLECTIVES, DTYPES, SIZES, Case

ON_GPU = torch.cuda.is_available()
KINDS, WARMUP, STEPS = 4, 150, 40  # of calls, rounds before the first step, and steps
PAUSE_S = 0.01  # between rounds, in which the door prepares the kinds
TIMEOUT_S = 8  # of the group
ABSENT_S = 4 * TIMEOUT_S
BURST = 12


class Program:
    """The program of one rank."""

    def __init__(self, folder: Path, seed: int, fault: str, rank: int, n: int) -> None:
        self.folder, self.fault, self.rank, self.n = folder, fault, rank, n
        self.rng = random.Random(seed)
        self.device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
        self.groups, self.calls, self.step, self.wrong = 0, 0, 0, list[str]()
        if ON_GPU:
            torch.cuda.set_device(self.device)
        self.join()
        drawn = [(self.rng.choice(COLLECTIVES), self.rng.choice(DTYPES), self.rng.choice(SIZES)) for _ in range(KINDS)]
        self.cases = [Case(torch, *one, device=str(self.device)) for one in drawn]
        self.victim, self.when = self.rng.randrange(n), self.rng.randrange(STEPS)

    def join(self) -> None:
        """Make the process group; again, after it was destroyed."""
        name = f"file://{self.folder}/group-{self.groups}"
        bound = {"device_id": self.device} if ON_GPU else {}
        dist.init_process_group(
            "nccl" if ON_GPU else "gloo", init_method=name, rank=self.rank, world_size=self.n,
            timeout=timedelta(seconds=TIMEOUT_S), **bound,
        )  # fmt: skip
        self.groups += 1

    def run(self) -> None:
        """Warm up, and take the steps."""
        for _ in range(WARMUP if ON_GPU else 1):
            for case in self.cases:
                self.call(case)
            self.settle()
            time.sleep(PAUSE_S)
        ways: list[Callable[[Case], None]] = [self.call, self.burst, self.group]
        ways += [self.on_stream, self.in_graph] if ON_GPU else []
        for self.step in range(STEPS):
            if self.step == self.when:
                getattr(self, self.fault)()
            case, salt, way = self.rng.choice(self.cases), self.rng.randrange(1000), self.rng.choice(ways)
            case.fill(salt)
            way(case)
            if wrong := case.wrong(salt):
                self.wrong.append(f"step {self.step}, {way.__name__} {case.name}: {wrong} elements are wrong")
        self.settle()

    def settle(self) -> None:
        """Wait for the GPU."""
        if ON_GPU:
            torch.cuda.synchronize()

    def call(self, case: Case) -> None:
        """One call."""
        case.call()
        self.calls += 1

    def burst(self, case: Case) -> None:
        """Others before it, with nothing between; the one that is looked at is not among them."""
        for other in self.rng.choices(self.cases, k=BURST):
            if other is not case:
                self.call(other)
        self.call(case)

    def group(self, case: Case) -> None:
        """A call of a group that is made for it, behind one of the world, and given back."""
        self.call(case)
        group = dist.new_group(range(self.n))
        ones = torch.ones(64, device=self.device)
        dist.all_reduce(ones, group=group)
        if not bool((ones == self.n).all()):
            self.wrong.append(f"step {self.step}: a sum of a new group is wrong")
        dist.destroy_process_group(group)

    def on_stream(self, case: Case) -> None:
        """A call on another stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call(case)
        torch.cuda.current_stream().wait_stream(stream)

    def in_graph(self, case: Case) -> None:
        """A captured call, replayed once, and a plain one of another kind beside it."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.call(case)
        graph.replay()

    # ---- the faults

    def none(self) -> None:
        """Nothing happens."""

    def destroy(self) -> None:
        """The group is destroyed with calls in flight, and made anew."""
        for case in self.cases:
            self.call(case)
        dist.destroy_process_group()
        self.join()

    def split(self) -> None:
        """Groups of every size are made while calls are in flight; some ranks are in none."""
        for size in range(1, self.n + 1):
            for case in self.cases:
                self.call(case)
            members = self.rng.sample(range(self.n), size)
            group = dist.new_group(members)
            if self.rank in members:
                dist.all_reduce(torch.ones(8, device=self.device), group=group)

    def fork(self) -> None:
        """A child that makes no call, and ends; its parent goes on meanwhile."""
        child = os.fork()
        if child == 0:
            time.sleep(0.1)
            os._exit(0)
        for case in self.cases:
            self.call(case)
        os.waitpid(child, 0)

    def kill(self) -> None:
        """A rank is killed with calls in flight."""
        for case in self.cases:
            self.call(case)
        if self.rank == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def exit(self) -> None:
        """A rank ends early, without a word."""
        if self.rank == self.victim:
            self.tell(done=True)
            sys.exit(0)

    def absent(self) -> None:
        """A rank does not come for longer than the others wait."""
        if self.rank == self.victim:
            time.sleep(ABSENT_S)

    def abort(self) -> None:
        """A rank aborts the group with calls in flight."""
        for case in self.cases:
            self.call(case)
        if self.rank == self.victim:
            dist.group.WORLD.abort()

    # ----

    def tell(self, **more: Any) -> None:
        """Write what this rank did."""
        found = {"calls": self.calls, "wrong": self.wrong[:8], **more}
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Be a rank."""
    folder, seed, fault, rank, n = sys.argv[1:]
    program = Program(Path(folder), int(seed), fault, int(rank), int(n))
    try:
        program.run()
    except Exception as error:
        program.tell(done=False, error=f"{type(error).__name__}: {error}"[:500])
        raise
    program.tell(done=True)
    dist.destroy_process_group()
    if not ON_GPU:
        os._exit(0)  # a thread of gloo's may outlive Python, and abort the process


if __name__ == "__main__":
    main()
