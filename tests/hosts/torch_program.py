"""Programs for torchrun on several hosts. Nothing here imports mpi4py, or what imports it, before there is a group.

``torchrun ... -m tests.hosts.torch_program 60 train blink``: 60 s until the rank prints its stacks and exits, the
function, and its arguments.
"""

import faulthandler
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def say(text: str) -> None:
    """Print a line in one piece: the agents' pipes are shared."""
    os.write(1, f"{text}\n".encode())


def train(backend: str) -> None:
    """Train a small network by DDP and print each loss of this rank."""
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    own = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x, y = torch.randn(32, 64, generator=own), torch.randint(10, (32,), generator=own)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"loss {rank} {step} {loss.item():.9g}")
    dist.destroy_process_group()
    if backend == "gloo":
        os._exit(0)  # a thread of gloo's may outlive Python, and abort the process: with torch 2.13 in one run of six


def groups() -> None:
    """Groups of some ranks, messages by gloo, and a second default group after the first."""
    for _ in range(2):
        dist.init_process_group("blink")
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
        x = torch.full((5,), float(rank))
        dist.all_reduce(x, group=rows[rank % 2])
        assert x.tolist() == [float(sum(range(rank % 2, size, 2)))] * 5
        told: list[object] = [None] * size
        dist.all_gather_object(told, (rank, socket.gethostname()))
        assert [row[0] for row in told] == list(range(size))
        assert len({row[1] for row in told}) == 2
        y = torch.tensor([float(rank)])
        dist.send(y, (rank + 1) % size) if rank % 2 else dist.recv(y, (rank - 1) % size)
        assert y.item() == (rank if rank % 2 else (rank - 1) % size)
        dist.destroy_process_group()
    assert not [name for name in os.environ if name.startswith("PMI_")], "children would take this rank's part"
    say(f"groups are right on {rank}")


def conform(*collectives: str) -> None:
    """The conformance suite of these collectives, by a Communicator of MPI's world."""
    dist.init_process_group("blink")
    from mpi4py import MPI

    import blinkmpi
    from tests.conformance import cases
    from tests.mpi.test_conformance import run_all

    assert MPI.Get_library_version().startswith("MPICH")
    with blinkmpi.Communicator(MPI.COMM_WORLD) as comm:
        for collective in collectives:
            run_all(comm, list(cases(collective, comm.size, full=False)))
    dist.destroy_process_group()
    say("conforms")


def ends(how: str, victim: str) -> None:
    """Calls without end, until one rank ends: by SIGKILL, by an exception, or as if all were well."""
    dist.init_process_group("blink")
    rank, x = dist.get_rank(), torch.ones(1000)
    if not os.fork():  # as a DataLoader's worker: it must not keep the rank's connections open
        while not Path("/run/go").exists():  # which the test makes when the agents have ended
            time.sleep(0.05)
        os._exit(0)
    for call in range(10**9):
        dist.all_reduce(x)
        if call == 100:
            say(f"ready {rank}")
        if call == 100 and rank == int(victim):
            say(f"ends at {time.monotonic()}")
            if how == "raises":
                raise RuntimeError("this rank has had enough")
            if how == "exits":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)


def one_machine() -> None:
    """The ranks of several agents on one host share memory, and no MPI connects them."""
    dist.init_process_group("blink")
    rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(100_000)
    dist.all_reduce(x)
    assert x.eq(size).all()
    kind = type(dist.group.WORLD.comm).__name__
    local = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    dist.destroy_process_group()
    say(f"rank {rank} of {size}, {' of '.join(local)} of its agent: {kind}")


def restarted(victim: str) -> None:
    """One rank is killed in the first start of the job; the second start comes to its end."""
    dist.init_process_group("blink")
    rank, x = dist.get_rank(), torch.ones(4)
    dist.all_reduce(x)
    assert x.tolist() == [float(dist.get_world_size())] * 4
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank == int(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # the end of the job ends it
    dist.destroy_process_group()
    say(f"came back {rank}")


def refused(first: str) -> None:
    """What cannot be: the error is printed, and MPI and torch's gloo still serve."""
    if first == "imports":
        from mpi4py import MPI

        assert MPI.COMM_WORLD.size == 1
    try:
        dist.init_process_group("blink")
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == 1
    if first == "ports":  # which gloo needs, too
        return
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    globals()[sys.argv[2]](*sys.argv[3:])
