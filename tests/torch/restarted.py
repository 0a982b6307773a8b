"""A program for torchrun: in its first start rank 1 is killed, before or after the group is there; then all is well.

``restarted.py BACKEND WHEN``
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.harness import NEVER_S


def die() -> None:
    """End as a process does that is killed for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(backend: str, when: str) -> None:
    """Begin, and be killed the first time."""
    first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", int(os.environ["RANK"])
    if first and when == "early" and rank == 1:
        time.sleep(2)  # the other has written into the store
        die()
    dist.init_process_group(backend)
    x = torch.ones(4)
    dist.all_reduce(x)
    segments = set(re.findall(r"/dev/shm/sm_segment\S+", Path("/proc/self/maps").read_text()))
    assert not segments, "Open MPI's, which a killed process leaves"
    if first:
        if rank == 1:
            die()
        time.sleep(NEVER_S)  # torchrun ends it
    y = torch.zeros(2)
    if rank == 0:
        dist.send(x[:2], 1)
    else:
        dist.recv(y, 0)
        assert y.tolist() == [2, 2]
    dist.destroy_process_group()
    print("came back", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
