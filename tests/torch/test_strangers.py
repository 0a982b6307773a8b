"""What people pass and do that nobody had in mind: tensors of all kinds, unlike ranks, threads, forks, early ends."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

from tests.harness import PATIENCE_S, mpi
from tests.store.processes import sharing_a_store
from tests.torch.test_backend import job

torch = pytest.importorskip("torch")
dist = torch.distributed
SHORT = timedelta(seconds=2)
TELLS = pytest.mark.skipif(torch.__version__ < (2, 7), reason="before 2.7 torch does not tell a group that it ends")


@pytest.mark.parametrize("first", ["blinkmpi.torch", "torch", "torch.distributed"])
def test_the_order_of_imports_is_free(first: str) -> None:
    program = f"import {first}, blinkmpi.torch, torch.distributed as dist; print(dist.Backend.BLINK)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("blink\n", "")


def tensors_that_lie_apart_in_memory(rank: int, n: int) -> None:
    """A column, steps, one element many times: their flat views are no memory to read or write in a row."""
    total = n * (n + 1) / 2
    for asynchronous in (False, True):
        table = torch.zeros(4, 5)
        column, rest = table[:, 1], table[:, [0, 2, 3, 4]].clone()
        column += rank + 1
        work = dist.all_reduce(column, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert (column == total).all()
        assert torch.equal(table[:, [0, 2, 3, 4]], rest)
    one = torch.tensor([float(rank)]).expand(5)
    found = [torch.empty(5) for _ in range(n)]
    dist.all_gather(found, one)
    assert all((x == r).all() for r, x in enumerate(found))
    whole = torch.zeros(2 * n, 3)[:, 0]
    dist.all_gather_into_tensor(whole, torch.full((2, 7), float(rank))[:, 3])
    assert torch.equal(whole, torch.arange(float(n)).repeat_interleave(2))
    steps = torch.full((9,), float(rank))[::3]
    dist.broadcast(steps, src=n - 1)
    assert (steps == n - 1).all()
    parts = torch.empty(n, 2)[:, 1]
    dist.all_to_all_single(parts, torch.full((n, 2), float(rank))[:, 0])
    assert torch.equal(parts, torch.arange(float(n)))
    memory = torch.frombuffer(bytearray(41), dtype=torch.float32, offset=1, count=10)
    dist.all_reduce(memory.fill_(rank + 1))
    assert (memory == total).all()


def tensors_without_memory_of_their_own(rank: int, n: int) -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed import tensor

    from blinkmpi.errors import BufferTypeError

    for wrong in (torch.ones(1).expand(4), torch.empty(4, device="meta")):
        for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
            with pytest.raises(BufferTypeError, match="expected memory"):
                call(wrong)
    awaited = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    dist.all_reduce(awaited)
    assert (awaited == n * n).all()
    if hasattr(tensor, "Shard"):
        mesh = dist.device_mesh.init_device_mesh("cpu", (n,))
        spread = tensor.distribute_tensor(torch.ones(2 * n), mesh, [tensor.Shard(0)])
        with pytest.raises(BufferTypeError, match="to_local"):
            dist.all_reduce(spread)
        dist.all_reduce(spread.to_local())
        assert (spread.full_tensor() == n).all()
    weight = torch.nn.Parameter(torch.full((4,), float(rank)))
    dist.broadcast(weight, src=1)
    assert weight.tolist() == [1.0] * 4
    assert weight.requires_grad


def unlike_element_types(rank: int, n: int) -> None:
    """Also where nothing is computed, and the bytes are as many."""
    from blinkmpi.errors import MismatchError

    last = rank == n - 1
    kind = torch.int32 if last else torch.float32
    x, whole = torch.ones(4, dtype=kind), torch.empty(4 * n, dtype=kind)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, src=0),
        lambda: dist.all_gather(list(whole.chunk(n)), x),
        lambda: dist.all_gather_into_tensor(whole, x),
        lambda: dist.gather(x, list(whole.chunk(n)) if last else None, dst=n - 1),
        lambda: dist.scatter(x, list(whole.chunk(n)) if last else None, src=n - 1),
    )
    for call in calls:
        with pytest.raises(MismatchError, match="int32"):
            call()
    dist.barrier()


def lists_of_a_wrong_length(rank: int, n: int) -> None:
    from blinkmpi.errors import ArgumentError

    for call in (
        lambda: dist.all_gather([torch.empty(3 * n)], torch.ones(3)),
        lambda: dist.all_gather([], torch.ones(3)),
        lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(3 * n)]),
        lambda: dist.all_to_all([torch.ones(3)], [torch.ones(3)]),
        lambda: dist.all_to_all([], []),
    ):
        with pytest.raises(ArgumentError, match=f"expected {n}, one for each rank"):
            call()
    with pytest.raises(ArgumentError, match="float32 against"):
        dist.all_gather_into_tensor(torch.empty(3 * n, dtype=torch.int32), torch.ones(3))
    dist.barrier()


def a_barrier_for_which_nobody_waits_yet(rank: int, n: int) -> None:
    x = torch.zeros(3)
    if rank == 0:
        work = dist.barrier(async_op=True)
        dist.send(x + 1, 1)
        work.wait()
    else:
        dist.recv(x, 0)
        dist.barrier()
        assert (x == 1).all()


@TELLS
@mpi(ranks=(2,), timeout=60)
def test_destroyed_while_others_call(comm: MPI.Intracomm) -> None:
    """The rank that leaves does so, and may begin anew; the one that waits hears of it."""
    from blinkmpi.errors import BlinkError

    with job():
        if comm.rank == 0:
            with pytest.raises(BlinkError, match=r"free\(\)"):
                dist.all_reduce(torch.ones(3))
    assert not dist.is_initialized()
    with job():
        dist.all_reduce(x := torch.ones(3))
        assert (x == 2).all()


def splitting(rank: int, n: int) -> None:
    """Refused: by torch before 2.14, which wants an accelerator, else by us; its own crashed, or waited for ever."""
    from blinkmpi.errors import ArgumentError

    dist.new_group(list(range(n))).monitored_barrier()
    if hasattr(dist, "split_group"):
        with pytest.raises((RuntimeError, ArgumentError), match="split"):
            dist.split_group(split_ranks=[list(range(n))])


def groups_in_threads(rank: int, n: int) -> None:
    """Each thread opens a group of its own by its first call, on one rank in another order than on another."""
    groups = [dist.new_group(list(range(n))) for _ in range(3)]
    errors: list[BaseException] = []

    def calls(i: int) -> None:
        try:
            time.sleep(0.1 * (i if rank else 2 - i))
            for k in range(20):
                x = torch.full((100 * (i + 1),), float(rank + k))
                dist.all_reduce(x, group=groups[i])
                assert (x == n * k + n * (n - 1) / 2).all(), (i, k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors


def threads_that_wait_for_one_call(rank: int, n: int) -> None:
    """MPI's request is one thread's; the others wait for that one, and get the same result or error."""
    from blinkmpi.errors import MismatchError

    for k in range(30):
        wrong = k % 10 == 9
        column = torch.full((1000 + rank * wrong, 3), rank + 1.0)[:, 1]
        work = dist.all_reduce(column, async_op=True)
        errors: list[BaseException] = []
        wait = partial(_wait_in_a_thread, work, errors)
        threads = [threading.Thread(target=wait, args=(polls,), daemon=True) for polls in (True, True, False, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert [type(error) for error in errors] == [MismatchError] * (4 * wrong), errors
        assert wrong or (column == n * (n + 1) / 2).all()


def _wait_in_a_thread(work: Any, errors: list[BaseException], polls: bool) -> None:
    try:
        while polls and not work.is_completed():
            time.sleep(1e-4)
        work.wait()
    except Exception as error:
        errors.append(error)


def a_call_that_nobody_waits_for(rank: int, n: int) -> None:
    """What is not written, because nobody waited, is said; but with torch before 2.7, for which we keep the call."""
    from blinkmpi.torch import work

    with mock.patch.object(work, "log") as log:
        dist.all_reduce(torch.ones(4, 3)[:, 1], async_op=True)
        dist.all_reduce(torch.ones(4), async_op=True)
        dist.barrier()
        gc.collect()
    assert [("call wait()" in call.args[2]) for call in log.call_args_list] == [True] * (not work.OLDER)


def a_child(rank: int, n: int) -> None:
    """A forked child may not take its parent's place in a call, whose results would then be wrong."""
    x = torch.ones(3)
    dist.all_reduce(x)
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(x)
        except Exception as error:
            os._exit(3 if "forked" in str(error) else 4)
        os._exit(5)
    until, status = time.monotonic() + PATIENCE_S, None
    while status is None and time.monotonic() < until:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.02)
    if status is None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == 3, f"{status}; below 0: a signal"
    dist.all_reduce(x)
    assert (x == n * n).all()


def results_over_their_operands(rank: int, n: int) -> None:
    """Blocks of one tensor, in their places or across them."""

    def made(r: int, rows: int = n) -> Any:
        return torch.arange(5.0 * rows).reshape(rows, 5) * (r + 1)

    total = n * (n + 1) / 2
    for to in (rank, (rank + 1) % n):
        table = made(rank)
        dist.reduce_scatter(table[to], list(table))
        assert torch.equal(table[to], made(0)[rank] * total), to
    for place in (slice(5 * rank, 5 * rank + 5), slice(2, 7)):
        table = made(rank, n + 1)
        mine = table.view(-1)[place]
        dist.scatter(mine, list(table[:n]) if rank == 0 else None, src=0)
        assert torch.equal(mine, made(0)[rank]), place
        table = made(rank, n + 1)
        dist.gather(table.view(-1)[place], list(table[:n]) if rank == 0 else None, dst=0)
        places = [place if place.start == 2 else slice(5 * r, 5 * r + 5) for r in range(n)]
        wanted = [made(r, n + 1).view(-1)[places[r]] for r in range(n)]
        assert rank or torch.equal(table[:n], torch.stack(wanted)), place
    for first in (0, 1):
        table = made(rank, n + 1)
        dist.all_to_all(list(table[first : first + n]), list(table[:n]))
        assert torch.equal(table[first : first + n], torch.stack([made(r)[rank] for r in range(n)])), first


def inference_that_has_ended(rank: int, n: int) -> None:
    """A call began in inference mode, which whoever waits has left."""
    with torch.inference_mode():
        column, rows = torch.full((4, 3), rank + 1.0)[:, 1], [torch.empty(3, 2).t() for _ in range(n)]
        works = [dist.all_reduce(column, async_op=True)]
        works.append(dist.all_gather(rows, torch.full((2, 3), float(rank)), async_op=True))
    for work in works:
        work.wait()
    assert (column == n * (n + 1) / 2).all()
    assert all((row == r).all() for r, row in enumerate(rows))


def multiples_of_whole_numbers(rank: int, n: int) -> None:
    from blinkmpi.errors import BufferTypeError

    half = dist._make_nccl_premul_sum(0.5)
    with pytest.raises(BufferTypeError, match="PREMUL_SUM of torch"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), half)
    dist.all_reduce(x := torch.ones(3, dtype=torch.bfloat16), dist._make_nccl_premul_sum(torch.tensor([0.5])))
    assert (x == n / 2).all()


PASSED = (
    results_over_their_operands,
    inference_that_has_ended,
    multiples_of_whole_numbers,
    tensors_that_lie_apart_in_memory,
    tensors_without_memory_of_their_own,
    unlike_element_types,
    lists_of_a_wrong_length,
)
DONE = (
    splitting,
    a_barrier_for_which_nobody_waits_yet,
    groups_in_threads,
    threads_that_wait_for_one_call,
    a_call_that_nobody_waits_for,
    a_child,
)


@mpi(ranks=(2,), timeout=60)
def test_what_people_pass(comm: MPI.Intracomm) -> None:
    for body in PASSED:
        with job():
            body(comm.rank, comm.size)


@mpi(ranks=(2,), timeout=60)
def test_what_people_do(comm: MPI.Intracomm) -> None:
    for body in DONE:
        with job(timeout=timedelta(seconds=20)):
            body(comm.rank, comm.size)


@mpi(ranks=(3,), timeout=60)
def test_errors_of_a_part_of_the_job_say_who_its_ranks_are(comm: MPI.Intracomm) -> None:
    from blinkmpi.errors import MismatchError

    with job():
        part = dist.new_group([0, 2])
        if comm.rank != 1:
            for call in (
                lambda: dist.all_reduce(torch.ones(5 + comm.rank), group=part),
                lambda: dist.all_reduce(torch.ones(5 + comm.rank), group=part, async_op=True).wait(),
            ):
                with pytest.raises(MismatchError, match="rank 1") as caught:
                    call()
                assert caught.value.__notes__[0].endswith("in which rank 0 is the job's 0, 1 is the job's 2.")


@mpi(ranks=(2,), timeout=60, own_job=True)
def test_a_rank_that_does_not_come_to_the_rendezvous_is_named(comm: MPI.Intracomm) -> None:
    from blinkmpi.errors import CollectiveTimeout

    if comm.rank == 0:
        with (
            pytest.raises(CollectiveTimeout, match=r"^init_process_group\(.* rank 1 .*has not come"),
            job(timeout=SHORT),
        ):
            pass
    comm.Barrier()


@mpi(ranks=(2,), timeout=60, own_job=True)  # whose exchanges stay open
def test_groups_that_are_opened_in_other_orders(comm: MPI.Intracomm) -> None:
    """Each rank waits for the other in another group: an error, and no hang."""
    from blinkmpi.errors import CollectiveTimeout

    with job(timeout=SHORT):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        with pytest.raises(CollectiveTimeout, match="has not come") as caught:
            dist.all_reduce(torch.ones(3), group=groups[comm.rank])
        assert "in one order" in caught.value.__notes__[0]


@sharing_a_store((2,))
def test_what_people_do_without_mpi(store: Any, rank: int, size: int) -> None:
    import blinkmpi.torch  # noqa: F401

    torch.set_num_threads(1)
    for body in DONE:
        shared = dist.FileStore(str(store.folder / body.__name__), size)
        dist.init_process_group("blink", store=shared, rank=rank, world_size=size)
        try:
            body(rank, size)
        finally:
            dist.destroy_process_group()
