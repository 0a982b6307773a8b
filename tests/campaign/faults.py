"""Faults that a job outlives: what happens to one rank, and what all ranks must see of it.

A method of :class:`Faults` for each name in ``steps.FAULTS``. It returns nothing where all is as promised, and raises
AssertionError where it is not. A fault that kills a communicator strikes a duplicate.
"""

import atexit
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import (
    ArgumentError,
    BlinkError,
    BufferTypeError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    RemoteError,
    TopologyError,
)
from blinkmpi.planning import tuned_table
from blinkmpi.transport.cuda.device import cupy
from tests.campaign.doer import Doer
from tests.campaign.steps import LINK, Step
from tests.harness import PATIENCE_S, wait_until

LINK_S = 60.0  # that whoever started the job has to answer
COUNT = 840  # which all numbers of ranks divide

Attempt = Callable[[], object]


class Faults:
    """The faults of a job.

    Args:
        box: a folder that all ranks and whoever started them share.
    """

    def __init__(self, doer: Doer, box: Path) -> None:
        self.doer, self.box = doer, box
        self.world, self.rank, self.n = doer.world, doer.world.rank, doer.world.size
        self.pids = self.world.allgather(os.getpid())
        machine, plans = doer.comms[0].machine, doer.comms[0].plan("allreduce")
        if self.rank == 0:
            (box / "topology").write_bytes(machine.to_json().encode())
            (box / "plan").write_bytes(plans.to_json().encode())
            table = tuned_table.TunedTable("a GPU", self.n, machine.name, "2026-11-22", {}, plans.rules)
            (box / "table").write_bytes(table.to_json().encode())
        self.world.Barrier()

    def do(self, step: Step) -> None:
        """Let it happen; then a call on the same communicator must still be right."""
        comm = self.doer.comms[step.comm % len(self.doer.comms)]
        own = random.Random(step.draw)  # the same on all ranks
        since = time.monotonic()
        try:
            getattr(self, step.fault)(comm, step.victim, own)
        except AssertionError as error:
            self.doer.record.mistake(f"fault {step.fault} of rank {step.victim} (draw {step.draw}): {error}")
        self.doer.record.fault(step.fault, time.monotonic() - since)
        self.doer.calls(comm, step.groups[0])

    # ---- wrong arguments, different calls

    def bad_argument(self, comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """One rank's argument is wrong: all raise, nothing is written, and the communicator lives on."""
        if self._on_gpu(own):
            self._bad_on_gpu(comm, victim, own)
            return
        n, mine, part = self.n, self.rank == victim, COUNT // self.n
        x, y = np.arange(float(COUNT)), np.full(COUNT, -1.0)
        locked = y.copy()
        locked.flags.writeable = False
        strided, objects = np.ones(2 * COUNT)[::2], np.array([None] * COUNT)
        root = own.randrange(n)

        def right() -> None:
            comm.Allreduce(x, y)

        def later() -> None:
            comm.Iallreduce(x, y).Wait()

        choices: tuple[tuple[type[BlinkError], Attempt, Attempt], ...] = (
            (ArgumentError, lambda: comm.Allreduce(strided, y), right),
            (ArgumentError, lambda: comm.Allreduce(x, locked), right),
            (BufferTypeError, lambda: comm.Allreduce(objects, y), right),
            (ArgumentError, lambda: comm.Bcast(y, root=n), lambda: comm.Bcast(y, root=root)),
            (ArgumentError, lambda: comm.Bcast(y, root=-1), lambda: comm.Bcast(y, root=root)),
            (ArgumentError, lambda: comm.Allreduce(x[:50], y), right),
            (ArgumentError, lambda: comm.Allreduce(x, y, op="median"), right),
            (ArgumentError, lambda: comm.Allreduce(y[:50], y[40:90]), right),
            (ArgumentError, lambda: comm.Allreduce(x, y, timeout=-1), right),
            (BufferTypeError, lambda: comm.Allreduce(x, y, op="band"), right),
            (ArgumentError, lambda: comm.Iallreduce(x, locked).Wait(), later),
            (ArgumentError, lambda: comm.Reduce_scatter(x, locked[:part]), lambda: comm.Reduce_scatter(x, y[:part])),
            (ArgumentError, lambda: comm.Reduce_scatter(x[: n * part], y[:part], [part] * (n + 1)),
             lambda: comm.Reduce_scatter(x[: n * part], y[:part], [part] * n)),
        )  # fmt: skip
        number = own.randrange(len(choices))
        kind, wrong, good = choices[number]
        error, seconds = attempt(wrong if mine else good)
        wanted = kind if mine else RemoteError
        assert isinstance(error, wanted), f"argument {number}: {wanted.__name__} was expected, {error!r} came"
        assert seconds < PATIENCE_S, f"argument {number}: {error!r} came after {seconds:.1f} s"
        assert (x == np.arange(float(COUNT))).all(), f"argument {number}: the send buffer was changed"
        assert (y == -1).all(), f"argument {number}: the receive buffer was changed"

    def _bad_on_gpu(self, comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """With GPU memory it kills the communicator, for the others' kernels may have begun."""
        cp, n, child = cupy(), self.n, comm.Dup()
        x, y = cp.arange(float(COUNT)), cp.full(COUNT, -1.0)
        cp.cuda.runtime.deviceSynchronize()
        choices: tuple[Attempt, ...] = (
            lambda: child.Allreduce(x[:50], y),
            lambda: child.Allreduce(x[::2], y[: COUNT // 2]),
            lambda: child.Allreduce(x, y, op="median"),
            lambda: child.Allreduce(x, y, op="band"),
            lambda: child.Allreduce(x, y, timeout=-1),
            lambda: child.Bcast(y, root=n),
        )
        number = own.randrange(len(choices))
        error, seconds = attempt(choices[number] if self.rank == victim else lambda: child.Allreduce(x, y))
        untouched = bool((x == cp.arange(float(COUNT))).all() and (y == -1).all())
        freed, _ = attempt(child.Free)  # the others may have left it, of which this rank hears here
        self.world.Barrier()
        assert freed is None or isinstance(freed, BlinkError), f"argument {number} on a GPU: Free raised {freed!r}"
        wanted = (ArgumentError, BufferTypeError) if self.rank == victim else (MismatchError, RemoteError, PeerLost)
        assert isinstance(error, wanted), f"argument {number} on a GPU: {error!r} came"
        assert seconds < PATIENCE_S, f"argument {number} on a GPU: {error!r} came after {seconds:.1f} s"
        assert untouched, f"argument {number} on a GPU: a buffer was changed"

    def mismatch(self, comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """One rank makes another call than the others: all raise a MismatchError."""
        on_gpu = self._on_gpu(own)
        if on_gpu:  # which it does not survive there
            comm = comm.Dup()
        xp = self._arrays(on_gpu)
        x, y = xp.ones(COUNT), xp.zeros(COUNT)
        root = own.randrange(self.n)
        choices: tuple[tuple[Attempt, Attempt], ...] = (
            (lambda: comm.Allreduce(x, y, MPI.MAX), lambda: comm.Allreduce(x, y)),
            (lambda: comm.Allreduce(x[:-1], y[:-1]), lambda: comm.Allreduce(x, y)),
            (lambda: comm.Allreduce(x.astype("f4"), xp.zeros(COUNT, "f4")), lambda: comm.Allreduce(x, y)),
            (lambda: comm.Bcast(y, root=(root + 1) % self.n), lambda: comm.Bcast(y, root=root)),
            (lambda: comm.Bcast(y), lambda: comm.Allreduce(x, y)),
            (lambda: comm.Barrier(), lambda: comm.Allreduce(x, y)),
            (lambda: comm.Ibarrier().Wait(), lambda: comm.Iallreduce(x, y).Wait()),
        )
        number = own.randrange(len(choices))
        error, seconds = attempt(choices[number][self.rank != victim])
        if on_gpu and error is None:  # a root waits for nobody there, and hears of it in its next call
            error, seconds = attempt(lambda: comm.Allreduce(x, y))
        wanted = (MismatchError, PeerLost) if on_gpu else MismatchError
        if on_gpu:
            freed, _ = attempt(comm.Free)
            self.world.Barrier()
            assert freed is None or isinstance(freed, BlinkError), f"calls {number}: Free raised {freed!r}"
        assert isinstance(error, wanted), f"calls {number}: a MismatchError was expected, {error!r} came"
        assert seconds < PATIENCE_S, f"calls {number}: {error!r} came after {seconds:.1f} s"
        assert not y.any(), f"calls {number}: the receive buffer was changed"

    # ---- slow ranks

    def late(self, _comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """One rank comes late, within the deadline: the call that follows waits for it."""
        seconds = own.choice((0.05, 0.2, 0.5, 1.0, 2.0))
        if self.rank == victim:
            time.sleep(seconds)

    def stopped(self, comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """One rank is stopped amid its calls and goes on within the deadline."""
        after, seconds = own.uniform(0.0, 0.03), own.uniform(0.05, 0.6)
        helper = self._stop(after, f"sleep {seconds:.3f}") if self.rank == victim else None
        xp = self._arrays(self._on_gpu(own))
        for i in range(own.randint(2, 12)):
            count = own.choice((1, 1000, 100_003, 1_000_003))
            x, y = xp.full(count, float(self.rank + i)), xp.empty(count)
            comm.Allreduce(x, y)
            assert (y == self.n * (self.n - 1) / 2 + self.n * i).all(), f"allreduce {i} of {count} is wrong"
        if helper is not None:
            helper.wait()

    def too_late(self, comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """One rank comes after the deadline: everybody raises a CollectiveTimeout, it too, and the others in time."""
        limit = own.uniform(0.3, 0.6)
        count = own.choice((8, 8, 300_000))
        with_request = own.random() < 0.3
        on_gpu = self._on_gpu(own)
        xp = self._arrays(on_gpu)
        x, y = xp.ones(count), xp.empty(count)
        child = comm.Dup()
        child.Allreduce(x, y)  # compiles the kernel, however long that takes
        y[...] = 0
        gone = self._files(own)
        if self.rank == victim:
            others = [path for rank, path in enumerate(gone) if rank != victim]
            wait_until(lambda: all(path.exists() for path in others), "the others give up")

        def call() -> None:
            if with_request:
                child.Iallreduce(x, y, timeout=limit).Wait()
            else:
                child.Allreduce(x, y, timeout=limit)

        error, seconds = attempt(call)
        gone[self.rank].touch()
        heard = on_gpu and self.rank == victim  # that its peers have given up, and perhaps not why
        # TCP waits longer and longer after a link was down: what they have sent is there, their error is still to come.
        unheard = LINK in self.doer.record.faults and self.rank == victim and error is None
        self._dead(child, unheard=unheard)
        if (heard or unheard) and error is None:  # what they had sent was there, and all it needs
            assert (y == self.n).all(), "an allreduce that came too late is wrong"
            return
        wanted = (CollectiveTimeout, PeerLost) if heard else CollectiveTimeout
        assert isinstance(error, wanted), f"a CollectiveTimeout was expected, {error!r} came"
        assert seconds < limit + PATIENCE_S, f"{error!r} came after {seconds:.1f} s, with a deadline of {limit:.1f} s"

    def stopped_too_long(self, comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """One rank is stopped amid calls until the others have given up: all raise, it too when it goes on."""
        limit = own.uniform(0.3, 0.6)
        count = own.choice((8, 10_000, 1_000_003))
        x = self._arrays(self._on_gpu(own)).ones(count)
        child = comm.Dup()
        child.Allreduce(MPI.IN_PLACE, x, MPI.MAX)  # opens it: who stops before that ends the job
        after, gone = own.uniform(0.0, 0.03), self._files(own)
        others = " ".join(f"'{path}'" for rank, path in enumerate(gone) if rank != victim)
        until_gone = f"for file in {others}; do until [ -e $file ]; do sleep 0.02; done; done"
        helper = self._stop(after, until_gone) if self.rank == victim else None
        error, seconds = None, 0.0
        until = time.monotonic() + PATIENCE_S
        while error is None and time.monotonic() < until:
            error, seconds = attempt(lambda: child.Allreduce(MPI.IN_PLACE, x, MPI.MAX, timeout=limit))
        gone[self.rank].touch()
        if helper is not None:
            helper.wait()
        self._dead(child)
        assert isinstance(error, CollectiveTimeout | PeerLost), f"a CollectiveTimeout was expected, {error!r} came"
        assert seconds < limit + PATIENCE_S, f"{error!r} came after {seconds:.1f} s, with a deadline of {limit:.1f} s"

    def _on_gpu(self, own: random.Random) -> bool:
        """Whether a fault strikes a call on GPU memory."""
        return self.doer.mix.gpus and own.random() < 0.6

    @staticmethod
    def _arrays(on_gpu: bool) -> Any:
        """What makes arrays."""
        return cupy() if on_gpu else np

    def _files(self, own: random.Random) -> list[Path]:
        """A file for each rank, by which it says something to the others: MPI may not read while it waits."""
        number = own.randrange(1 << 40)
        return [self.box / f"rank-{number}-{rank}" for rank in range(self.n)]

    def _stop(self, after: float, meanwhile: str) -> subprocess.Popen[bytes]:
        """Stop this process a little later, as long as a command of the shell takes."""
        pid = os.getpid()
        script = f"sleep {after:.3f}; kill -STOP {pid}; {meanwhile}; kill -CONT {pid}"
        return subprocess.Popen(["sh", "-c", script])

    def _dead(self, child: Any, *, unheard: bool = False) -> None:
        """A communicator that has failed says so at once, and can be freed; ``unheard``: here it has not failed yet."""
        error, seconds = attempt(child.Barrier)
        child.Free()
        self.world.Barrier()
        first = self.doer.mix.gpus or unheard  # whether the peers' error may be news, if there was none here
        wanted = (PeerLost, CollectiveTimeout) if first else PeerLost
        assert isinstance(error, wanted), f"after the error, a PeerLost was expected, {error!r} came"
        assert seconds < PATIENCE_S, f"a dead communicator said so after {seconds:.1f} s"

    # ---- children, files, shared memory, links

    def fork(self, _comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """One rank forks a child that ends as Python does, while the others wait in a call."""
        how = own.choice(("atexit", "exit", "exec"))
        if self.rank != victim:
            return
        if how == "exec":
            subprocess.run(["true"], check=True)
            return
        child = os.fork()
        if child == 0:
            if how == "atexit":
                atexit._run_exitfuncs()
            os._exit(0)
        until = time.monotonic() + PATIENCE_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, 9)
                os.waitpid(child, 0)
                raise AssertionError(f"the child, which ends by {how}, did not end within {PATIENCE_S:.0f} s")
            time.sleep(0.001)

    def truncated(self, _comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """A plan, machine or tuned table of which a part is lost or changed: an error on all ranks, or none."""
        what = own.choice(("topology", "plan", "table"))
        data = bytearray((self.box / what).read_bytes())
        if own.random() < 0.7:
            del data[own.randrange(len(data)) :]
        else:
            data[own.randrange(len(data))] = own.randrange(256)
        first = self.doer.comms[0]
        path = self.box / f"bad-{what}"
        if what == "table" and first.gpu is not None:
            path = tuned_table.file_of(self.box, first.gpu.name, first.machine)
        if self.rank == 0:
            path.write_bytes(bytes(data))
        self.world.Barrier()
        if what == "table" and first.gpu is None:  # nobody reads tables there
            attempt(
                lambda: tuned_table.taken(first.plans, tuned_table.TunedTable.from_json(bytes(data)), first.machine)
            )
            return
        files: dict[str, str | None] = {name: str(self.box / name) for name in ("topology", "plan")}
        files = dict.fromkeys(files) if what == "table" else files | {what: str(path)}
        made: list[blinkmpi.Communicator] = []
        cache = os.environ.get("BLINKMPI_CACHE_DIR")
        if what == "table":
            os.environ["BLINKMPI_CACHE_DIR"] = str(self.box)
        error, seconds = attempt(
            lambda: made.append(blinkmpi.Communicator(self.world, topology=files["topology"], plan=files["plan"]))
        )
        if what == "table":
            del os.environ["BLINKMPI_CACHE_DIR"]
            os.environ |= {"BLINKMPI_CACHE_DIR": cache} if cache else {}
        errors = self.world.allgather(type(error).__name__)
        for comm in made if not any(name != "NoneType" for name in errors) else ():
            x = np.full(10_007, self.rank + 1.0)
            comm.Allreduce(MPI.IN_PLACE, x)
            assert (x == self.n * (self.n + 1) / 2).all(), f"with a {what} of {len(data)} bytes an allreduce is wrong"
            comm.Free()
        assert len({name == "NoneType" for name in errors}) == 1, f"with a broken {what} some ranks raise: {errors}"
        assert seconds < PATIENCE_S, f"{error!r} came after {seconds:.1f} s"

    def shared_memory_full(self, comm: blinkmpi.Communicator, victim: int, own: random.Random) -> None:
        """/dev/shm has no room for a while: communicators that are there work, and so do new ones, by MPI.

        Those that are strict fail on all ranks, in their first call.

        Not between nodes, where MPI needs room, too: Open MPI's files get their pages as it uses them, and it dies of
        SIGBUS where there are none.
        """
        room = own.choice((0, 1 << 16, 1 << 20, 4 << 20))
        if len(comm.machine.nodes) > 1 or "BLINKMPI_NODES" in os.environ:  # of which a machine that is given has none
            return
        filler = Path("/dev/shm/filler")
        if self.rank == victim:
            free = os.statvfs("/dev/shm")
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_bsize - room))
        self.world.Barrier()
        child, y = comm.Dup(), np.full(300_007, self.rank + 1.0)
        error, seconds = attempt(lambda: child.Allreduce(MPI.IN_PLACE, y))
        x = np.full(300_007, self.rank + 1.0)
        comm.Allreduce(MPI.IN_PLACE, x)
        total = self.n * (self.n + 1) / 2
        right = bool((x == total).all()) and (error is not None or bool((y == total).all()))
        child.Free()
        self.world.Barrier()
        if self.rank == victim:
            filler.unlink()
        self.world.Barrier()
        assert right, "an allreduce is wrong while /dev/shm is full"
        assert error is None or (comm.strict and isinstance(error, TopologyError | RemoteError)), f"{error!r} came"
        assert seconds < PATIENCE_S, f"{error!r} came after {seconds:.1f} s"
        comm.Dup().Free()

    def link_down(self, comm: blinkmpi.Communicator, _victim: int, own: random.Random) -> None:
        """A host's link is down for a while, and calls that are under way wait for it."""
        seconds, number = own.uniform(0.05, 1.0), own.randrange(1 << 40)
        request, answer = self.box / f"link-{number}", self.box / f"link-{number}.done"
        if self.rank == 0:
            request.with_suffix(".draft").write_text(f"{seconds}")
            request.with_suffix(".draft").rename(request.with_suffix(".request"))
        until = time.monotonic() + LINK_S
        for i in range(10_000):
            x = np.full(own.choice((1, 100_003, 1_000_003)), float(self.rank + i))
            comm.Allreduce(MPI.IN_PLACE, x)
            assert (x == self.n * (self.n - 1) / 2 + self.n * i).all(), f"allreduce {i} is wrong"
            if self.world.bcast(answer.exists() or time.monotonic() > until):
                break
        assert answer.exists(), f"nobody took the link down and up within {LINK_S:.0f} s"


def attempt(call: Attempt) -> tuple[BlinkError | None, float]:
    """Make a call; give its error and how long it took."""
    since = time.monotonic()
    try:
        call()
    except BlinkError as error:
        return error, time.monotonic() - since
    return None, time.monotonic() - since
