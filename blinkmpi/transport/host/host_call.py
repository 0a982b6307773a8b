"""A call on CPU ranks: a program bound to buffers and a deadline."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ...program.memory import address
from ..announcement import Called
from ..control_pages import SEQ_BITS
from .host_program import HostProgram, progress_of, resolve
from .native import RUNNING, TOLD, UNTOLD, CallStruct
from .numpy_executor import OUTCOMES, NumpyStage, Outcome, StepTrace, Turn, barrier_numpy, repeat, step_numpy
from .transport import HostTransport


@dataclass(frozen=True)
class HostBuffers:
    """What a rank sends from and receives into: 1-D contiguous arrays of the call's type, or None.

    ``final`` is where the result goes when it is complete, if ``recv`` is memory of our own. ``before`` and ``after``
    are pairs (to, from) of arrays that are copied before the call and after it; what is not the user's memory of them
    is ``send`` or ``recv``.
    """

    send: Any
    recv: Any
    final: Any = None
    before: Sequence[tuple[Any, Any]] = ()
    after: Sequence[tuple[Any, Any]] = ()

    def aside(self) -> HostBuffers:
        """What a call in place has by a program that overwrites what it has not sent: it sends a copy."""
        own = np.empty(self.recv.size, self.recv.dtype)
        return replace(self, send=own, before=[*self.before, (own, self.recv)])

    def unowned(self) -> HostBuffers:
        """Views of the same memory that do not keep it alive."""
        return HostBuffers(_unowned(self.send), _unowned(self.recv))


def _copies(pairs: Sequence[tuple[Any, Any]]) -> NDArray[np.int64]:
    """What ``memmove`` takes for each pair of arrays: to, from, bytes."""
    found = [(address(to), address(source), to.nbytes) for to, source in pairs]
    return np.array(found, np.int64).reshape(len(found), 3)


def _copy(pieces: NDArray[np.int64]) -> None:
    for piece in pieces.tolist():
        ctypes.memmove(*piece)


def _unowned(array: Any) -> Any:
    if array is None:
        return None
    memory: Any = MPI.memory.fromaddress(address(array), array.nbytes)
    return np.ndarray(array.shape, array.dtype, memory)


class HostCall:
    """A bound call: see :class:`..interface.BoundCall`.

    Args:
        owns: whether it keeps its buffers alive. A call that is to be made again must not: it is made again only on
            buffers at the same addresses.
        timeout_s: how long to wait without any progress.
    """

    made: Any = None  # the user's call, if C has begun it and could not end it

    def __init__(
        self,
        transport: HostTransport,
        program: HostProgram,
        called: Called,
        buffers: HostBuffers,
        timeout_s: float,
        *,
        owns: bool,
    ) -> None:
        self.transport, self.program, self.called, self.timeout_s = transport, program, called, timeout_s
        self.fingerprint, self.record = transport.records.encode(called)
        self.reusable = not owns
        buffers = buffers.aside() if program.aside else buffers
        self.buffers: HostBuffers | None = None
        if program.executor == "numpy":
            self.buffers = buffers if owns else buffers.unowned()
        final, recv = buffers.final, buffers.recv
        after = [*buffers.after, *([(final, recv)] if final is not None and recv is not None else [])]
        self._before, self._after = _copies(buffers.before), _copies(after)
        # memory that this call alone keeps alive
        self._own = (buffers.send if buffers.before else None, recv if after else None)
        self._rows = program.rows.ctypes.data
        self.struct = CallStruct.from_buffer_copy(program.struct)
        self._bind(buffers)
        self._at = ctypes.addressof(self.struct)
        native = transport.native
        one_call = program.executor == "c" and native is not None and transport.by_c_alone(program)
        self._run = native.code.blink_run if one_call and native is not None else None
        self.alone = self._run is not None and self.reusable  # whether C may make it again by itself
        # whether C may aim it at other buffers: all that it knows of them is in its structure
        self.aimable = self.reusable and program.executor == "c" and native is not None
        self.left: list[NumpyStage] = []  # what NumPy has still to do
        self.trace: StepTrace | None = None  # of a traced call of NumPy's

    def _bind(self, buffers: HostBuffers) -> None:
        struct, (sends, receives) = self.struct, self.program.exports
        send, recv = buffers.send, buffers.recv
        struct.send = 0 if send is None else address(send)
        struct.recv = 0 if recv is None else address(recv)
        struct.send_bytes = send.nbytes if sends and send is not None else 0
        struct.recv_bytes = recv.nbytes if receives and recv is not None else 0
        struct.fingerprint = self.fingerprint
        struct.body, struct.body_bytes = (
            ctypes.cast(ctypes.c_char_p(self.record), ctypes.c_void_p).value or 0,
            len(self.record),
        )
        struct.in_kernels = self.transport.records.in_kernels.ctypes.data
        struct.before, struct.befores = self._before.ctypes.data, len(self._before)
        struct.after, struct.afters = self._after.ctypes.data, len(self._after)
        struct.timeout_ns = int(self.transport.slice_of(self.timeout_s) * 1e9)

    def run(self, seq: int, timeout_s: float | None = None) -> None:
        """Make the call: mostly one call of C; under a deadline of its own, if there is one."""
        if timeout_s is not None:
            self._under(timeout_s, partial(self.run, seq))
        elif self._run is None:
            self.start(seq)
            self.wait()
        else:
            self.go_on(seq, self._run(self._at, self._rows, seq))

    def _under(self, timeout_s: float, work: Callable[[], None]) -> None:
        """Do a part of the call under another deadline."""
        usual, self.timeout_s = self.timeout_s, timeout_s
        self.struct.timeout_ns = int(self.transport.slice_of(timeout_s) * 1e9)
        try:
            work()
        finally:
            self.timeout_s = usual
            self.struct.timeout_ns = int(self.transport.slice_of(usual) * 1e9)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of its structure and of its rows."""
        return self._at, self._rows

    def go_on(self, seq: int, status: int, timeout_s: float | None = None) -> None:
        """Complete a call that C has begun, from its status on."""
        if timeout_s is not None:
            self._under(timeout_s, partial(self.go_on, seq, status))
            return
        if status == UNTOLD:  # the record holds another call than this one: write it
            self.transport.records.write(seq, self.fingerprint, self.record, self.timeout_s)
            status = self._run(self._at, self._rows, seq)  # type: ignore[misc]
        if status:
            self._finish(OUTCOMES[status], begun=True)

    def start(self, seq: int) -> None:
        """Announce the call."""
        _copy(self._before)
        self.program.endpoints.start(seq << SEQ_BITS)
        if self.program.executor == "numpy":
            self.transport.records.announce(seq, self.called, self.timeout_s)
            self.struct.seq, self.struct.base, self.struct.phase = seq, seq << SEQ_BITS, 0
            ring, number = self.transport.recorder.ring, int(self.struct.program)
            if ring is not None:
                self.trace = StepTrace(ring, self.transport.pages, self.program.steps, number, seq)
            return
        self.transport.records.write(seq, self.fingerprint, self.record, self.timeout_s)
        self.transport.native.code.blink_begin(self._at, seq)  # type: ignore[union-attr]
        if self.struct.one_shot:  # it is announced when its slots are full
            self._attempt(0.0)

    def test(self) -> bool:
        """Do what can be done now; returns whether the call has completed."""
        outcome, _ = self._attempt(0.0)
        if outcome in (Outcome.EXPIRED, Outcome.ABORTED):
            self.transport.look(int(self.struct.seq), dict, 0.0, self.timeout_s)
            return False
        self._finish(outcome, begun=False)
        return True

    def wait(self) -> None:
        """Return when the call has completed."""
        self._finish(Outcome.EXPIRED, begun=False)

    def _finish(self, outcome: Outcome, *, begun: bool) -> None:
        """Go on until the call has completed, or raise what became of it.

        Args:
            begun: whether a slice of the deadline has passed already.
        """
        transport, seq = self.transport, int(self.struct.seq)
        if outcome in (Outcome.EXPIRED, Outcome.ABORTED, Outcome.REMOTE_DIFFERS):
            outcome = transport.until_done(self._attempt, self.owed, seq, self.timeout_s, begun=begun)
        if outcome is Outcome.DIFFER:
            transport.compare(seq, self.fingerprint)
            self.lengths_differ(seq)
        if outcome is Outcome.UNREADABLE:  # on every rank
            self._through_slots().run(seq)
            return
        if outcome is Outcome.FAULT:
            raise transport.unreadable(seq, int(self.struct.faulty), int(self.struct.fault))
        if outcome is Outcome.NETWORK:
            raise transport.network_error(seq, MPI.Exception(int(self.struct.fault)))
        if self.program.executor == "numpy":  # executor.c has counted the others
            self.program.tally.add(self.trace)
        _copy(self._after)

    def lengths_differ(self, seq: int) -> NoReturn:
        """C found that something differs, and the announcements are the same."""
        raise AssertionError(f"call {seq}: C found that announcements differ, and they are the same")

    def owed(self) -> dict[int, str]:
        """Peers that this rank waits for, with what each owes."""
        return owed(self.transport, self)

    def _attempt(self, slice_s: float) -> tuple[Outcome, bool]:
        """Go on until nothing moved for ``slice_s``: how it is then, and whether anything moved."""
        if self.transport.by_c_alone(self.program) and self.struct.phase != TOLD:
            done = self._execute(int(slice_s * 1e9) or -1)
            if done[0] is not Outcome.REMOTE_DIFFERS:
                return done
        turn = partial(self._execute, -1) if self.program.executor == "c" else self._execute_numpy
        return repeat(self._with_messages(turn), self.transport.pages, slice_s)

    def _execute(self, timeout_ns: int) -> tuple[Outcome, bool]:
        self.struct.timeout_ns = timeout_ns
        status = self.transport.native.code.blink_execute(self._at, self._rows)  # type: ignore[union-attr]
        self.struct.timeout_ns = int(self.transport.slice_of(self.timeout_s) * 1e9)
        return OUTCOMES[status], bool(self.struct.moved)

    def _execute_numpy(self) -> tuple[Outcome, bool]:
        transport, struct, steps, buffers = self.transport, self.struct, self.program.steps, self.buffers
        pages = transport.pages
        if struct.phase < RUNNING:
            if barrier_numpy(pages, int(struct.seq)) is not Outcome.DONE:
                if self.trace is not None:
                    self.trace.late()
                return Outcome.EXPIRED, False
            if set(pages.fingerprints(int(struct.seq))) != {self.fingerprint}:
                return Outcome.DIFFER, False
            for step in steps:
                step.start(int(struct.base), buffers.send, buffers.recv)  # type: ignore[union-attr]
            self.left = [step for step in steps if step.k < step.chunks]
            struct.phase = RUNNING
            if self.trace is not None:
                self.trace.entered()
        outcome, moved = step_numpy(self.left, self.trace)
        if outcome is Outcome.DONE and pages.abort[0]:  # as executor.c does
            return Outcome.ABORTED, moved
        if outcome is Outcome.DONE and (transport.messages is None or self.program.endpoints.finished):
            pages.finished[transport.rank] = struct.seq
        return outcome, moved

    def _with_messages(self, turn: Turn) -> Turn:
        """Turns of an executor with those of the messages between nodes."""
        transport, messages = self.transport, self.transport.messages
        seq, endpoints = int(self.struct.seq), self.program.endpoints
        if messages is None:
            return turn

        def both() -> tuple[Outcome, bool]:
            outcome, moved = turn()
            moved |= transport.move_messages(seq, endpoints if self.struct.phase == RUNNING else None)
            if outcome is Outcome.DONE and not (messages.sent(seq) and endpoints.finished):
                return Outcome.EXPIRED, moved
            return outcome, moved

        return both

    def _through_slots(self) -> HostCall:
        """The same call by a program that reads nobody's buffers."""
        transport, program = self.transport, self.program
        if program.through_slots is None:
            program.through_slots = transport.load(program.make_through_slots or program.make)
        transport.say(f"{self.called}: slots, because a rank's buffer cannot be read by the others")
        call = HostCall(
            transport, program.through_slots, self.called, HostBuffers(None, None), self.timeout_s, owns=False
        )
        call.struct.send, call.struct.recv = self.struct.send, self.struct.recv
        call._after, call.struct.after, call.struct.afters = self._after, self.struct.after, self.struct.afters
        return call


def entry(transport: HostTransport, called: Called, timeout_s: float, *, counted: bool = True) -> HostCall | None:
    """A call without data that C makes alone; None where it cannot."""
    program = transport.nothing(called.text.partition("(")[0] if counted else "")
    if program is None:
        return None
    return HostCall(transport, program, called, HostBuffers(None, None), timeout_s, owns=False)


def owed(transport: HostTransport, call: HostCall) -> dict[int, str]:
    """Peers that unfinished stages of this rank wait for, with the first chunk that each owes."""
    struct, loaded = call.struct, call.program
    if struct.phase < RUNNING:
        return transport.peers.absent(int(struct.seq))
    resolved = resolve(loaded.make(), transport.window, transport.native, cma=loaded.cma)
    program, layout, exported, far = resolved.program, resolved.layout, resolved.exported, resolved.part.far
    found: dict[int, str] = {}
    words, depth = transport.pages.words, program.depth
    for at in progress_of(loaded, resolved, transport.window):
        stage, chunks = at.stage, -(-at.stage.count // program.chunk_of(at.stage))
        if at.chunk >= chunks:
            continue
        where = f"chunk {at.chunk + 1} of {chunks} of tree {stage.tree}, way {stage.way}"
        want = int(struct.base) + at.chunk + 1
        for c in () if at.waits else stage.ins:
            at_once = c in exported and exported[c].buffer == "send"
            if not at_once and int(words[layout.heads[c]]) < want:
                found.setdefault(far[c].rank if c in far else program.channels[c].writer, where)
        for c in stage.outs:
            for near, tail in layout.tails[c].items():
                reader = far[c].rank if c in far else near
                if at.waits and c in exported and int(words[tail]) < want:
                    found.setdefault(reader, f"its reading of {where}")
                if not at.waits and c not in exported and at.chunk >= depth and int(words[tail]) < want - depth:
                    found.setdefault(reader, f"room for {where}")
    return found
