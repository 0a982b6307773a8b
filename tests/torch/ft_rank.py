"""A process of the tests of torchft: ``python ft_rank.py CASE ADDRESS RANK SIZE``; torchft's own checks of groups."""

import gc
import importlib
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import process_group as ft
from torchft import process_group_test as suite

from blinkmpi.errors import BlinkError
from blinkmpi.torch.ft import ProcessGroupBlink

STEPS = 10  # of a training
TIMES, WARM = 12, 4  # that a group is made anew, and after which all have what they keep


def make(group: Any, address: str, rank: int, size: int) -> None:
    """Make the group anew, as this torchft does it."""
    if hasattr(ft, "reconfigure_with_store"):
        ft.reconfigure_with_store(group, address, rank, size)
    else:
        group.configure(address, f"replica{rank}", rank, size)


def meet(address: str, name: str, size: int) -> None:
    """Wait for all ranks, in the store: who aborts a group ends what others still do in it."""
    store = ft.create_store_client(f"{address}/meet", timedelta(seconds=30))
    if store.add(name, 1) == size:
        store.set(f"{name} are here", "all")
    store.wait([f"{name} are here"], timedelta(seconds=30))


def check_all(group: Any, rank: int) -> None:
    """Every check of torchft's for several ranks."""
    for check in suite._COLLECTIVE_TO_FUNC.values():
        check(group, rank, torch.tensor([rank + 1]))


def until_it_fails(group: Any, rank: int) -> str:
    """Make calls until one fails; the error, in words."""
    try:
        while True:
            suite.run_allreduce_test(group, rank, torch.tensor([rank + 1]))
    except BlinkError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        return f"{type(error).__name__}: {error}"


def case_suite(address: str, rank: int, size: int) -> None:
    """torchft's checks: of each rank by itself, then of all."""
    group = ProcessGroupBlink(timedelta(seconds=30))
    assert group.errored() is None
    make(group, f"{address}/alone{rank}", 0, 1)
    done = suite._test_pg(group, torch.tensor([2]))
    assert len(done) == 10, "none of them is left out: torchft counts a call it skips as unsupported"
    make(group, f"{address}/all", rank, size)
    check_all(group, rank)
    meet(address, "checked", size)
    group.shutdown()


def case_killed(address: str, rank: int, size: int) -> None:
    """The last rank is killed; the others hear of it, and go on in a group of those that are left."""
    group = ProcessGroupBlink(timedelta(seconds=30))
    make(group, f"{address}/first", rank, size)
    check_all(group, rank)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = until_it_fails(group, rank)
    assert "PeerLost" in said
    assert "torchft's next quorum goes on" in said
    assert isinstance(group.errored(), BlinkError)
    make(group, f"{address}/second", rank, size - 1)
    assert group.errored() is None
    check_all(group, rank)
    meet(address, "checked", size - 1)
    group.shutdown()


def case_aborted(address: str, rank: int, size: int) -> None:
    """A rank that aborts ends the others' calls; all make the group anew."""
    group = ProcessGroupBlink(timedelta(seconds=30))
    make(group, f"{address}/first", rank, size)
    if rank == 0:
        group.abort()
        assert "aborted the group" in str(group.errored())
    else:
        assert "aborted" in until_it_fails(group, rank)
        assert group.errored() is not None
    make(group, f"{address}/second", rank, size)
    check_all(group, rank)
    meet(address, "checked", size)
    group.shutdown()


def case_late(address: str, rank: int, size: int) -> None:
    """Nobody else comes: an error within the timeout, and no hang."""
    group = ProcessGroupBlink(timedelta(seconds=2))
    opened: list[str] = []
    try:
        if hasattr(ft, "reconfigure_with_store"):
            suite._reconfigure_with_missing_peer(group)
        else:
            group.configure(f"{address}/late", "replica", 0, 2)
    except BlinkError as error:
        opened.append(type(error).__name__)
    assert opened == ["CollectiveTimeout"], opened


def case_many(address: str, rank: int, size: int) -> None:
    """Made anew again and again, it leaves nothing behind."""

    def held() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = len({line.split()[4] for line in maps if "/dev/shm" in line or "memfd" in line})
        return len(os.listdir("/proc/self/fd")), threading.active_count(), shared

    group, before = ProcessGroupBlink(timedelta(seconds=30)), (0, 0, 0)
    for time_ in range(TIMES):
        make(group, f"{address}/{time_}", rank, size)
        suite.run_allreduce_test(group, rank, torch.tensor([rank + 1]))
        meet(address, str(time_), size)
        if time_ == WARM:
            before = held()
    print(f"rank {rank}: {before} -> {held()}", flush=True)
    assert all(after <= old for after, old in zip(held(), before, strict=True)), (held(), before)
    meet(address, "counted", size)
    group.shutdown()


def case_manager(address: str, rank: int, size: int) -> None:
    """Replicas that torchft's Manager keeps in step; with VICTIM the last is killed amid a step, and the rest go on.

    All have the gradient of the same data, so the weights are those of a run that loses nobody.
    """
    from torchft.manager import Manager

    victim, torch_store = os.environ.get("VICTIM"), TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 1), torch.arange(12.0).reshape(3, 4) / 12
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group, soon = ProcessGroupBlink(timedelta(seconds=10)), timedelta(seconds=20)
    manager = Manager(
        pg=group, load_state_dict=model.load_state_dict, state_dict=model.state_dict, min_replica_size=1,
        use_async_quorum=False, timeout=timedelta(seconds=10), quorum_timeout=soon, rank=0, world_size=1,
        store_addr="localhost", store_port=torch_store.port, lighthouse_addr=os.environ["LIGHTHOUSE"],
        replica_id=f"replica{rank}", hostname="localhost",
    )  # fmt: skip
    meet(address, "managers", size)  # or the first one trains alone
    sizes = []
    while manager.current_step() < STEPS:
        manager.start_quorum()
        sizes.append(manager.num_participants())
        optimizer.zero_grad()
        ((model(x) - 1) ** 2).mean().backward()
        if victim and rank == size - 1 and manager.current_step() == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
    weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    print(f"rank {rank} has {weights} after sizes {sorted(set(sizes))}", flush=True)
    meet(address, "trained", size - bool(victim))
    manager.shutdown(wait=False)
    group.shutdown()


if __name__ == "__main__":
    case, address, rank, size = sys.argv[1:]
    importlib.import_module("mpi4py.MPI")  # in the main thread
    globals()[f"case_{case}"](address, int(rank), int(size))
    print(f"rank {rank} ended in order", flush=True)
