"""Numbers that are not Python's ints wherever a call takes one, compared with mpi4py; and what MPI forbids is told.

Each collective is made with every value of VALUES in the place of each of its numbers, by mpi4py and by us. Who is
stricter, or laxer, is listed; another difference is a fault.
"""

import copy
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.collectives import Collectives, dispatcher_of
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, MismatchError, PeerLost, RemoteError
from tests.harness import mpi

VALUES = [
    0, 1, True, False, np.int64(1), np.uint8(1), np.int32(0), np.bool_(True), np.array(1), 1.0, np.float64(1), 0.5,
    None, "1", np.array([1]), 1 << 40, -1, np.int8(-1), float("nan"), b"\1",
]  # fmt: skip
ROOTED = ("Bcast", "Reduce", "Gather", "Scatter", "Gatherv", "Scatterv")
NUMBERS = {"root", "timeout"}  # parameters that are one
OTHERS = {"buf", "sendbuf", "recvbuf", "recvcounts", "op", "stream", "info", "self", "algorithm"}


def test_all_parameters_of_collectives_are_known() -> None:
    """A new one has to be added here, and to the tests below if it is a number."""
    for name, method in inspect.getmembers(Collectives, inspect.isfunction):
        if name[0].isupper():
            assert set(inspect.signature(method).parameters) <= NUMBERS | OTHERS, name
        if "root" in inspect.signature(method).parameters:
            assert name in ROOTED or name.removesuffix("_init") in ROOTED or f"{name[1:].capitalize()}" in ROOTED, name


def outcome(call: Callable[[], object]) -> type[BaseException] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


def rooted(comm: MPI.Intracomm, name: str, root: Any) -> Callable[[], object]:
    n = comm.size
    one, all_of_them = np.ones(2), np.ones(2 * n)
    arguments: dict[str, tuple[Any, ...]] = {
        "Bcast": (one,), "Reduce": (one, np.ones(2)), "Gather": (one, all_of_them), "Scatter": (all_of_them, one),
        "Gatherv": (one, all_of_them), "Scatterv": (all_of_them, one),
    }  # fmt: skip
    return lambda: getattr(comm, name)(*arguments[blocking(name)], root=root)


@mpi(ranks=(2,))
@pytest.mark.parametrize("name", [*ROOTED, *(f"I{name.lower()}" for name in ROOTED)])
def test_a_root_is_what_mpi4py_takes_for_a_number(comm: MPI.Intracomm, name: str) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for value in VALUES:
            takes, refused = True, value == 0.5 or isinstance(value, bytes)
            try:
                takes = 0 <= int(value) < comm.size and not isinstance(value, str)
                takes = takes and getattr(value, "shape", ()) == ()
            except (TypeError, ValueError):
                takes = False
            plain = outcome(lambda value=value: completed(rooted(comm, blocking(name), value)))  # type: ignore[misc]
            assert refused or (plain is None) == takes, (name, value, plain)  # mpi4py makes 0 of 0.5
            got = outcome(lambda value=value: completed(rooted(ours, name, value)))  # type: ignore[misc]
            if takes and not refused:
                assert got is None, (name, value, got)
            else:
                assert got is not None, (name, value)
                assert issubclass(got, BlinkError), (name, value, got)


def blocking(name: str) -> str:
    return name if name in ROOTED else name[1:].capitalize()


def completed(call: Callable[[], Any]) -> None:
    request = call()
    if request is not None:
        request.Wait()


@mpi(ranks=(2,))
def test_a_root_that_one_rank_alone_gets_wrong_is_heard_of_by_all(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for value in ("1", 0.5, None, 2, -1):
            x = np.full(3, float(comm.rank))
            with pytest.raises(ArgumentError if comm.rank else RemoteError, match="expected a rank, 0 to 1"):
                ours.Bcast(x, root=value if comm.rank else 1)
            assert (x == comm.rank).all()


@mpi(ranks=(2,))
def test_numpy_roots_are_the_same_call_as_ints(comm: MPI.Intracomm) -> None:
    """The ranks may mix them, and a call that was made before is found."""
    with blinkmpi.Communicator(comm, algo="broadcast:^mpi") as ours:
        for root in (np.argmax([0, 1]), 1, True, np.uint8(1), np.array(1)):
            for _ in range(3):
                x = np.full(1000, float(comm.rank))
                ours.Bcast(x, root=root if comm.rank else 1)
                assert (x == 1).all()


def counted(comm: MPI.Intracomm, place: str, value: Any) -> Callable[[], object]:
    n, x = comm.size, np.ones(8 * comm.size)
    y = np.zeros_like(x)
    return {
        "count": lambda: comm.Bcast([x, value, MPI.DOUBLE]),
        "count alone": lambda: comm.Allreduce([x, value], [y, value]),
        "displacement": lambda: comm.Bcast([x, 1, value, MPI.DOUBLE]),
        "displacement in a pair": lambda: comm.Bcast([x, (1, value), MPI.DOUBLE]),
        "counts": lambda: comm.Allgatherv([x, value, MPI.DOUBLE], [y, [value] * n, None, MPI.DOUBLE]),
        "displacements": lambda: comm.Allgatherv(x[:1], [y, [1] * n, [value] + [4 + i for i in range(1, n)], "d"]),
        "recvcounts": lambda: comm.Reduce_scatter([x, n, MPI.DOUBLE], [y, 1, MPI.DOUBLE], [value] * n),
    }[place]


PLACES = ("count", "count alone", "displacement", "displacement in a pair", "counts", "displacements", "recvcounts")


@mpi(ranks=(2,))
@pytest.mark.parametrize("place", PLACES)
def test_counts_and_displacements_are_what_mpi4py_takes(comm: MPI.Intracomm, place: str) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for value in VALUES:
            if place == "count alone" and isinstance(value, np.ndarray) and value.ndim:
                continue  # a list of two buffers
            if place == "recvcounts" and value is None:
                continue
            if place == "recvcounts" and is_whole(value) and value != 1:
                takes = False  # blocks of another length than the buffers'
            elif is_whole(value) and not 0 <= value <= 4:
                takes = False  # outside of the buffers, where MPI may look
            else:
                takes = outcome(counted(MPI.COMM_SELF, place, value)) is None and (place, value) != (
                    "displacements",
                    None,
                )
            got = outcome(counted(ours, place, value))
            assert (got is None) == takes, (place, value, takes, got)
            assert got is None or issubclass(got, BlinkError), (place, value, got)


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) or (isinstance(value, np.ndarray) and value.ndim == 0)


@mpi(ranks=(2,))
def test_times_to_wait(comm: MPI.Intracomm) -> None:
    x = np.ones(3)
    for seconds in (5, 5.0, np.float32(5), np.float64(5), np.int16(5), np.uint64(5)):
        with blinkmpi.Communicator(comm, timeout=seconds, max_ctas=np.int64(3)) as ours:  # type: ignore[arg-type]
            ours.Allreduce(MPI.IN_PLACE, x, timeout=seconds)  # type: ignore[arg-type]
            ours.Iallreduce(MPI.IN_PLACE, x, timeout=seconds).Wait()  # type: ignore[arg-type]
    with blinkmpi.Communicator(comm) as ours:
        for bad in ("5", 0, -1, float("nan"), float("inf"), np.array([5.0]), 5j, b"5"):
            with pytest.raises(ArgumentError, match="timeout="):
                ours.Allreduce(MPI.IN_PLACE, x, timeout=bad)  # type: ignore[arg-type]
    for bad in ("3", 0, -1, 1.5, np.array([3])):
        with pytest.raises(ArgumentError, match="max_ctas="):
            blinkmpi.Communicator(comm, max_ctas=bad)  # type: ignore[arg-type]


@mpi(ranks=(2,))
def test_numbers_of_what_plans_and_explains(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        assert ours.plan("broadcast", np.int64(1)).to_json() == ours.plan("broadcast", 1).to_json()
        for root, nbytes in ((np.uint8(1), np.int64(1 << 20)), (True, np.float64(1 << 20))):
            text = ours.explain("broadcast", nbytes, root=root)  # type: ignore[arg-type]
            assert text == ours.explain("broadcast", 1 << 20, root=1)
        assert ours.plan_line("broadcast", np.int64(1)) == ours.plan_line("broadcast", 1)
        for bad in ("1", None, 2, -1, 0.5):
            for call in (ours.plan, ours.plan_line, lambda name, root: ours.explain(name, root=root)):
                with pytest.raises(ArgumentError, match="root="):
                    call("broadcast", bad)
        for bad in ("1", None, -1, 0.5, 1 << 63):
            with pytest.raises(ArgumentError, match="nbytes="):
                ours.explain("broadcast", bad)


# ---- what one rank alone hands to MPI


def squares(a: Any, b: Any, _: MPI.Datatype) -> None:
    np.copyto(np.frombuffer(b), np.frombuffer(a) * np.frombuffer(b))


CASES: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "another operation": (
        lambda c, x, y: c.Allreduce(x, y, MPI.Op.Create(squares, commute=True)),
        lambda c, x, y: c.Allreduce(x, y),
    ),
    "another element type": (
        lambda c, x, y: c.Allreduce([x, 4, MPI.DOUBLE.Create_contiguous(1).Commit()], [y, 4, MPI.DOUBLE]),
        lambda c, x, y: c.Allreduce([x.view("f4"), 4], [y.view("f4"), 4]),
    ),
    "another length": (
        lambda c, x, y: c.Bcast([x, 3, MPI.DOUBLE.Create_contiguous(1).Commit()]),
        lambda c, x, y: c.Bcast([x, 4, MPI.DOUBLE]),
    ),
    "another root": (
        lambda c, x, y: c.Bcast([x, 4, MPI.DOUBLE.Create_contiguous(1).Commit()], root=0),
        lambda c, x, y: c.Bcast([x, 4, MPI.DOUBLE], root=1),
    ),
    "other operations of MPI's": (
        lambda c, x, y: c.Allreduce([x, 1, MPI.DOUBLE_INT], [y, 1, MPI.DOUBLE_INT], MPI.MAXLOC),
        lambda c, x, y: c.Allreduce([x, 1, MPI.DOUBLE_INT], [y, 1, MPI.DOUBLE_INT], MPI.MINLOC),
    ),
    "another length of a derived type": (
        lambda c, x, y: c.Allgather([x, 1, MPI.DOUBLE.Create_contiguous(2).Commit()], np.zeros(2 * c.size)),
        lambda c, x, y: c.Allgather([x, 1, MPI.DOUBLE.Create_contiguous(1).Commit()], np.zeros(c.size)),
    ),
    "the form with lengths": (
        lambda c, x, y: c.Allgather([x, 1, MPI.DOUBLE.Create_contiguous(1).Commit()], np.zeros(c.size)),
        lambda c, x, y: c.Allgatherv([x, 1, MPI.DOUBLE.Create_contiguous(1).Commit()], np.zeros(c.size)),
    ),
}


@mpi(ranks=(3,))
@pytest.mark.parametrize("case", CASES)
def test_what_mpi_must_find_equal_is_compared(comm: MPI.Intracomm, case: str) -> None:
    """Every rank raises, also those whose own call is ours, and nothing is written."""
    ours = blinkmpi.Communicator(comm, timeout=20)
    x, y = np.arange(1.0, 9.0), np.full(8, -1.0)
    with pytest.raises(MismatchError, match="the ranks disagree"):
        CASES[case][0 if comm.rank == 1 else 1](ours, x, y)
    assert (y == -1).all()
    assert (x == np.arange(1.0, 9.0)).all()
    ours.Allreduce(x, y)
    assert (y == comm.size * x).all()
    ours.Free()


@mpi(ranks=(3,), own_job=True)
def test_so_it_is_in_a_non_blocking_call(comm: MPI.Intracomm) -> None:
    """MPI has begun on one rank what never ends: the communicator is dead."""
    ours = blinkmpi.Communicator(comm, timeout=20)
    x, y = np.arange(1.0, 9.0), np.full(8, -1.0)
    request = ours.Iallreduce(x, y, *([MPI.Op.Create(squares, commute=True)] if comm.rank == 1 else []))
    with pytest.raises(MismatchError, match="the ranks disagree"):
        request.Wait()
    assert (y == -1).all()
    with pytest.raises((MismatchError, PeerLost), match="the ranks disagree"):  # which ranks 0 and 2 hear of now
        ours.Barrier()


@mpi(ranks=(3,))
def test_what_fits_is_made_by_mpi(comm: MPI.Intracomm) -> None:
    """Ranks may say in other words what is the same to MPI."""
    n = comm.size
    pair = MPI.DOUBLE.Create_contiguous(2).Commit()
    row = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    with blinkmpi.Communicator(comm) as ours:
        x = np.full(4, float(comm.rank))
        ours.Bcast([x, 2, pair] if comm.rank == 1 else x, root=np.int64(2))
        assert (x == 2).all()
        y = np.zeros(2 * n)
        ours.Allgather([np.arange(4.0), 1, row] if comm.rank == 1 else [np.array([0.0, 2.0]), 2], y)
        assert y.tolist() == [0, 2] * n
        ours.Gather([np.arange(4.0), 1, row] if comm.rank == 1 else np.array([0.0, 2.0]), y if comm.rank == 0 else None)
        z = np.zeros(2)
        ours.Scatter([y, 1, pair] if comm.rank == 0 else None, z, root=0)
        assert z.tolist() == [0, 2]
        ours.Scatter([y, 1, pair] if comm.rank == 0 else None, MPI.IN_PLACE if comm.rank == 0 else z, root=0)
        product = MPI.Op.Create(squares, commute=True)
        counts = [1] * n
        ours.Reduce_scatter(np.full(n, 2.0), z[:1], counts, product)
        assert z[0] == 2.0**n
        ours.Reduce_scatter_block(np.full(2 * n, 2.0), z, product)
        whole = np.full(2 * n, 2.0)
        ours.Reduce_scatter_block(MPI.IN_PLACE, whole, product)
        ours.Scan(np.full(2, 2.0), z, product)
        assert (z == 2.0 ** (comm.rank + 1)).all()
        ours.Alltoall([np.arange(2.0 * n), 1, pair], [np.zeros(2 * n), 1, pair])
        ours.Gatherv([x, 1, pair], [np.zeros(2 * n), [1] * n, None, pair] if comm.rank == 1 else None, root=1)
        product.Free()


@mpi(ranks=(3,))
def test_memory_of_what_mpi_makes_later_is_kept(comm: MPI.Intracomm) -> None:
    kind = MPI.DOUBLE.Create_contiguous(1000).Commit()
    with blinkmpi.Communicator(comm) as ours:
        for turn in range(30):
            product, got = MPI.Op.Create(squares, commute=True), np.zeros(1000)
            request = ours.Iallreduce([np.full(1000, 2.0 + turn), 1, kind], [got, 1, kind], product)
            others = [np.full(1000, -7.0) for _ in range(3)]  # in the memory of the operand, if nobody has kept it
            request.Wait()
            del others
            assert (got == (2.0 + turn) ** comm.size).all()
            product.Free()
        got = np.zeros(1000)
        product = MPI.Op.Create(squares, commute=True)
        held = ours.Allreduce_init([np.full(1000, 2.0), 1, kind], [got, 1, kind], product)
        others = [np.full(1000, -7.0) for _ in range(3)]
        for _ in range(3):
            held.Start()
            held.Wait()
            assert (got == 2.0**comm.size).all()
        held.Free()
        product.Free()
        del others


# ---- what a program cannot mean


@mpi(ranks=(2,))
def test_in_place_where_it_means_nothing(comm: MPI.Intracomm) -> None:
    x = np.ones(4)
    there: Any = MPI.IN_PLACE
    with blinkmpi.Communicator(comm) as ours:
        for call in (
            lambda: ours.Bcast(there),
            lambda: ours.Allgather(there, there),
            lambda: ours.Alltoall(there, there),
            lambda: ours.Allgatherv(there, there),
            lambda: ours.Alltoallv(there, there),
            lambda: ours.Allreduce(x, there),
            lambda: ours.Reduce(x, there, root=comm.rank),
            lambda: ours.Allreduce([there, 4, MPI.DOUBLE], x),
            lambda: ours.Scan(x, there),
            lambda: ours.Reduce_scatter_block(x, there),
        ):
            with pytest.raises((BufferTypeError, RemoteError), match=r"is MPI\.IN_PLACE, which stands for"):
                call()
        assert (x == 1).all()


@mpi(ranks=(1,))
def test_communicators_are_not_copied(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ArgumentError, match=r"Dup\(\)"):
                make(ours)


@mpi(ranks=(3,), own_job=True)
def test_two_threads_in_one_communicator_are_refused(comm: MPI.Intracomm) -> None:
    """Which calls of the ranks belong together is nobody's to know: all raise, and none waits."""
    ours, errors = blinkmpi.Communicator(comm, timeout=60), []

    def calls() -> None:
        x = np.ones(50_000)
        try:
            for _ in range(2000):
                ours.Allreduce(MPI.IN_PLACE, x)
                x[:] = 1
        except BlinkError as error:
            errors.append(error)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert any("two threads" in str(error) for error in errors)


@mpi(ranks=(2,))
def test_threads_may_take_turns(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for _ in range(20):
            x = np.ones(50)
            thread = threading.Thread(target=ours.Allreduce, args=(MPI.IN_PLACE, x))
            thread.start()
            thread.join()
            ours.Iallreduce(MPI.IN_PLACE, x).Wait()
            assert (x == 4).all()


@mpi(ranks=(2,), own_job=True)
def test_a_forked_child_ends_nothing_of_its_parents(comm: MPI.Intracomm) -> None:
    """Of an error that ended a communicator, say, whose frames hold what has threads in the parent alone."""
    told, tell = os.pipe()

    class Held:
        def __del__(self) -> None:
            os.write(tell, str(os.getpid()).encode())

    ours = blinkmpi.Communicator(comm, timeout=20)
    error = PeerLost("as a test wants it")
    error.held = Held()  # type: ignore[attr-defined]
    dispatcher_of(ours).sequence.die(error)
    del error
    child = os.fork()
    if child == 0:
        try:
            ours.Barrier()
        except PeerLost as refused:
            os._exit(0 if "forked" in str(refused) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.set_blocking(told, False)
    with pytest.raises(BlockingIOError):
        os.read(told, 9)


@mpi(ranks=(2,))
def test_free_beside_another_call_is_a_mismatch(comm: MPI.Intracomm) -> None:
    for first in (True, False):
        ours = blinkmpi.Communicator(comm, timeout=20)
        if first:
            ours.Allreduce(np.ones(3), np.zeros(3))
        with pytest.raises(MismatchError, match=r"free\(\)"):
            ours.Free() if comm.rank else ours.Allreduce(np.ones(3), np.zeros(3))


def test_free_after_the_end_of_mpi() -> None:
    program = (
        "from mpi4py import MPI; import blinkmpi; comm = blinkmpi.Communicator(MPI.COMM_WORLD); MPI.Finalize(); "
        "comm.Free(); comm.Free(); print('freed')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done
