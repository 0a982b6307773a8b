"""Makes the calls of a campaign's steps on one rank, as a user would, and checks every result."""

import contextlib
import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import blinkmpi
from blinkmpi.program.reduction import dtype_of
from tests.campaign.kinds import KINDS
from tests.campaign.memory import Buffer, HostBuffer
from tests.campaign.record import Record
from tests.campaign.reference import changed, fill, prepare, wrong
from tests.campaign.steps import ON_GPU, Call, Mix, Step
from tests.conformance import Array

POLLS = 2000  # of Test, before a Wait
SCRIBBLE = 0xEE
COMPARED = 16  # of so many allreduces the ranks compare their bits in one


class Active:
    """A call with its buffers, from before it begins until it is checked."""

    def __init__(self, doer: "Doer", comm: blinkmpi.Communicator, call: Call) -> None:
        self.record, self.comm, self.call = doer.record, comm, call
        self.case, self.kind, self.rank = call.case, KINDS[call.case.collective], comm.rank
        self._on_gpu = call.memory in ON_GPU
        sends, receives = self.kind.sends(self.case, self.rank), self.kind.receives(self.case, self.rank)
        # a vector that lies in the receive buffer needs no send buffer
        inside = self.case.in_place and self.kind.own(self.case, self.rank) is not None
        sender = not self.kind.from_root or self.rank == self.case.root
        self.send = doer.buffer(comm, call, sends, 0) if sender and not inside else None
        receiver = bool(self.kind.parts(self.case, self.rank))
        self.recv = doer.buffer(comm, call, receives, 1) if receiver else None

    def ready(self, again: int = 0) -> None:
        """Write the numbers of a call's first or a later round into its buffers."""
        self.case = replace(self.call.case, salt=self.call.case.salt + again)
        dtype = dtype_of(self.case.dtype)
        if self.send is not None:
            count = self.kind.sends(self.case, self.rank)
            self._write(self.send, count, dtype, partial(fill, self.case, self.rank))
        if self.recv is not None:
            count = self.kind.receives(self.case, self.rank)
            self._write(self.recv, count, dtype, partial(prepare, self.case, self.rank))

    @staticmethod
    def _write(buffer: Buffer, count: int, dtype: np.dtype[Any], make: Callable[[Array], None]) -> None:
        if isinstance(buffer, HostBuffer):
            make(buffer.array)
        else:
            data = np.empty(count, dtype)
            make(data)
            buffer.write(data)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What mpi4py's method takes."""
        send = None if self.send is None else self.send.given
        recv = None if self.recv is None else self.recv.given
        return self.kind.arguments(self.case, self.rank, send, recv)

    def run(self, **keywords: Any) -> None:
        """Make the call, blocking."""
        getattr(self.comm, self.kind.method)(*self.arguments, **keywords)

    def made(self) -> None:
        """Count it."""
        self.record.made(self.call, self.rank, self.comm.size)

    def begin(self) -> MPI.Request:
        """Begin the call; the send buffer may be dropped at once, because the request keeps it."""
        request: MPI.Request = getattr(self.comm, "I" + self.kind.method.lower())(*self.arguments)
        if self.call.after == "drop":
            self.send = None
        self.made()
        return request

    def check(self, *, compare: bool = True) -> None:
        """Look at everything after the call, which must have returned.

        Args:
            compare: whether all ranks come here in one order and may compare their bits.
        """
        if self.call.after == "drop":
            self.send = None
        if self.call.after == "scribble" and isinstance(self.send, HostBuffer):
            self.send.array.view(np.uint8)[:] = SCRIBBLE  # the call has returned: nobody may read it any more
        if self.send is not None:
            if self.call.after == "check" and changed(self.case, self.rank, self.send.read()):
                self._mistake("the send buffer was changed")
            if not self.send.intact():
                self._mistake("memory beside the send buffer was changed")
        if self.recv is not None:
            if text := wrong(self.case, self.rank, self.recv.read(), behind=not self._on_gpu):
                self._mistake(text)
            if not self.recv.intact():
                self._mistake("memory beside the receive buffer was changed")

        alike = compare and self.case.collective == "allreduce" and self.case.salt % COMPARED == 0
        if alike and self.recv is not None:
            bits = self.comm.allgather(zlib.crc32(self.recv.read().tobytes()))
            if len(set(bits)) > 1:
                self._mistake("the ranks differ in their bits")

    def _mistake(self, text: str) -> None:
        self.record.mistake(f"{self.case}, {self.call}, communicator of {self.comm.size}: {text}")


class Doer:
    """Carries out steps on one rank.

    Args:
        comms: the communicators of the job; the last two are for threads.
    """

    def __init__(self, world: MPI.Intracomm, comms: Sequence[blinkmpi.Communicator], mix: Mix, record: Record) -> None:
        self.world, self.mix, self.record = world, mix, record
        self.comms, self.threads = comms[:-2], comms[-2:]
        self._pools: dict[int, Any] = {}
        self._stream: Any = None
        if mix.gpus:
            from tests.campaign.gpu_memory import Pool, Stream

            self._pools = {id(comm): Pool(comm) for comm in self.comms}
            self._stream = Stream()

    def buffer(self, comm: blinkmpi.Communicator, call: Call, count: int, which: int) -> Buffer:
        """Make the send (0) or receive (1) buffer of a call."""
        skew = call.skews[which]
        if call.memory not in ON_GPU:
            return HostBuffer(count, call.case.dtype, skew, call.memory)
        from tests.campaign.gpu_memory import GpuBuffer

        pool = self._pools.get(id(comm)) if call.memory == "registered" else None
        return GpuBuffer(count, call.case.dtype, skew, call.memory, pool)

    def _clear_pools(self) -> None:
        """Take back what was handed out of registered memory; no call on it is under way."""
        for pool in self._pools.values():
            pool.clear()

    def do(self, step: Step) -> None:
        """Carry out a step that is no fault."""
        self._clear_pools()
        if step.late and step.late[self.world.rank]:
            time.sleep(step.late[self.world.rank])
        comm = self.comms[step.comm % len(self.comms)]
        self.record.kinds["step"][step.what] += not self.world.rank
        match step.what:
            case "calls":
                self.calls(comm, step.groups[0])
            case "requests":
                self.requests(comm, step)
            case "joined":
                self.joined(comm, step)
            case "threads":
                self.in_threads(step)
            case "children":
                self.children(comm, step)
            case "graph":
                self.graph(comm, step)
            case _:
                raise ValueError(f"step {step.number} is {step.what!r}, which nobody knows")

    def calls(self, comm: blinkmpi.Communicator, some: Sequence[Call]) -> None:
        """Make calls one after another, each as often as it says."""
        for call in some:
            self._clear_pools()
            one = Active(self, comm, call)
            if call.how == "persistent":
                self._persistent(one)
                continue
            for again in range(call.times):
                one.ready(again)
                if call.how == "request":
                    one.begin().Wait()
                elif call.memory in ON_GPU and call.case.salt % 2:
                    one.run(stream=self._stream.stream)
                    self._stream.stream.synchronize()
                else:
                    one.run()
                if call.how != "request":
                    one.made()
                one.check()

    def _persistent(self, one: Active) -> None:
        """Start a call several times on the same buffers."""
        one.ready()
        request = getattr(one.comm, one.kind.method + "_init")(*one.arguments)
        one.call = replace(one.call, after="check")
        for again in range(one.call.times):
            one.ready(again)
            request.Start()
            request.Wait()
            one.made()
            one.check()
        request.Free()

    def requests(self, comm: blinkmpi.Communicator, step: Step) -> None:
        """Begin calls together; each rank completes them in an order and a way of its own."""
        own = random.Random(step.draw * 64 + self.world.rank)
        active = [Active(self, comm, call) for call in step.groups[0]]
        pending = []
        for one in active:
            one.ready()
            pending.append((one, one.begin()))
        if step.draw % 5 == 0:  # a blocking call waits for all that was begun before
            self.calls(comm, [replace(step.groups[0][0], how="blocking", times=1, memory="numpy")])
        own.shuffle(pending)
        way = own.choice(("wait", "test", "waitall"))
        if way == "waitall" and not self.mix.gpus:
            MPI.Request.Waitall([request for _, request in pending])
            for one, _ in pending:
                one.check(compare=False)
            return
        for one, request in pending:
            if way == "test":
                for _ in range(POLLS):
                    if request.Test():
                        break
                    time.sleep(0.0001)
                else:
                    request.Wait()
            else:
                request.Wait()
            one.check(compare=False)

    def joined(self, comm: blinkmpi.Communicator, step: Step) -> None:
        """Make calls as a group, as often as they say; on GPUs also on a stream."""
        active = [Active(self, comm, call) for call in step.groups[0]]
        apart = step.draw % 2 == 0 and all(call.memory in ON_GPU for call in step.groups[0])
        for again in range(step.groups[0][0].times):
            for one in active:
                one.ready(again)
            with comm.grouped(stream=self._stream.stream if apart else None):
                for one in active:
                    one.run()
            if apart:
                self._stream.stream.synchronize()
            for one in active:
                one.made()
                one.check()

    def in_threads(self, step: Step) -> None:
        """Two threads, each with a communicator of its own."""
        errors: list[BaseException] = []

        def work(comm: blinkmpi.Communicator, some: Sequence[Call]) -> None:
            try:
                self.calls(comm, some)
            except BaseException as error:
                errors.append(error)

        pairs = zip(self.threads, step.groups, strict=True)
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def children(self, comm: blinkmpi.Communicator, step: Step) -> None:
        """Make communicators of this one, which now and then plans again, call on them, and free them."""
        if step.draw % 7 == 0:
            comm.replan()
        colour = step.colours[self.world.rank]
        if set(step.colours) == {0}:
            child: Any = comm.Dup() if step.draw % 2 else comm.Create(comm.Get_group())
        else:
            key = -comm.rank if step.draw % 2 else comm.rank
            child = comm.Split(MPI.UNDEFINED if colour < 0 else colour, key)
        if child != MPI.COMM_NULL:
            self.calls(child, step.groups[colour])
            if step.draw % 3 == 0:
                grandchild = child.Dup()
                self.calls(grandchild, step.groups[colour])
                grandchild.Free()
            child.Free()

    def graph(self, comm: blinkmpi.Communicator, step: Step) -> None:
        """Capture calls on GPU memory into a CUDA graph, and replay it with other numbers each time."""
        some = [replace(call, memory="cupy", after="check") for call in step.groups[0] if call.memory == "cupy"]
        some += [replace(call, after="check") for call in step.groups[0] if call.memory == "registered"]
        active = [Active(self, comm, call) for call in some]
        if not active:
            return
        for one in active:
            one.ready()

        def enqueue(stream: Any) -> None:
            with comm.grouped(stream=stream) if step.draw % 3 == 0 else contextlib.nullcontext():
                for one in active:
                    one.run(stream=stream)

        launch = self._stream.captured(enqueue)
        for again in range(1 + step.draw % 4):
            for one in active:
                one.ready(again)
            launch()
            for one in active:
                one.made()
                one.check()
