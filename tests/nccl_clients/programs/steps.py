"""What the programs here have in common: their options, the times of their steps, and the line that they print."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

ON_GPU = torch.cuda.is_available()
BACKEND = "nccl" if ON_GPU else "gloo"


def asked(text: str | None) -> argparse.Namespace:
    """A program's options."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    return parser.parse_args()


def prepare() -> None:
    """The same numbers in every run."""
    torch.manual_seed(1)
    torch.set_num_threads(1)


def sum_in_order() -> None:
    """No algorithm whose order of sums is left open, from here on.

    To be called after the process group's start: torch sets NCCL_ALGO for a group that starts later.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)


class Steps:
    """Times of steps, each from its begin to the end of what it has put on the GPU."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def begin(self) -> None:
        """A step begins."""
        self.began = now()

    def end(self) -> None:
        """It has ended."""
        self.seconds.append(now() - self.began)

    def tell(self, values: Sequence[float]) -> None:
        """Print the values and the median time of the second half of the steps, on rank 0.

        Args:
            values: losses, or whatever else must be the same in every run.
        """
        if int(os.environ["RANK"]) == 0:
            half = self.seconds[len(self.seconds) // 2 :]
            found = {"values": list(values), "step_ms": round(1e3 * statistics.median(half), 4), "device": ON_GPU}
            print("RESULT " + json.dumps(found), flush=True)


def leave() -> None:
    """Give the default group back and end; over gloo at once, since a thread of gloo's may outlive Python and abort."""
    dist.destroy_process_group()
    if not ON_GPU:
        sys.stdout.flush()
        os._exit(0)


def now() -> float:
    """Seconds, once the GPU has done what was given to it."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()
