"""Programs on CPU ranks: shared memory in a node, messages between nodes, chunked and pipelined (Blink section 4).

Every rank runs its stages in one thread. A step runs as soon as its inputs have
arrived and its outputs have room; when nothing is ready the rank spins a
little, then yields its core, then sleeps, so more ranks than cores progress
smoothly. No wait is without a deadline; whoever gives up tells the others.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial

from mpi4py import MPI

from ...errors import BlinkError, MismatchError
from ...program.ir import Program
from ...program.memory import Spot, address
from ...program.reduction import Array
from ..announcement import announcement, short
from ..network.endpoints import Ends
from ..network.messages import Net
from . import native
from .capabilities import agree_on_cma, agree_on_executor
from .liveness import FOREIGN, Witness
from .loaded import ExecutorName, Loaded, Repeat, load
from .numpy_executor import Outcome, Turn, enter_numpy, step_numpy, turns
from .shared_window import ARENA_BYTES, CONTROL, LINE, SharedWindow
from .single_copy import Helper

SEQ_BITS = 24  # a flag is (sequence number << SEQ_BITS) + chunks
SPINS, CROWDED_SPINS = 64, 2  # polls before a core is yielded: where each rank has one, and where not
LOOK_SECONDS = 0.2
OUTCOMES = tuple(Outcome)  # by executor.c's numbers
OTHER = len(OUTCOMES)  # likewise, of blink_again
EXCHANGE = "reduce_scatter: block of "  # ranks that tell each other a number enter with this


class HostTransport:
    """Executes programs among the ranks of ``comm``.

    Args:
        comm: a communicator of our own: nobody else may use it.
        node: those of its ranks that share memory with this one, in the same order.
        executor: ``auto`` takes the C executor if every rank has it; ``c`` and ``numpy`` insist.
        cma: whether the ranks may read one another's memory, if they can (``no_cma`` says why not).
        say: told, at most once, of a call that cannot take the protocol ``cma``.

    Raises:
        ArgumentError: on every rank, if ``executor='c'`` and there is no C executor.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: MPI.Intracomm,
        *,
        executor: str = "auto",
        arena_bytes: int = ARENA_BYTES,
        cma: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.n, self.rank = comm.size, comm.rank
        self.native, self.executor_reason = agree_on_executor(comm, node, executor)
        self.executor: ExecutorName = "c" if self.native else "numpy"
        self.window = SharedWindow(comm, node, arena_bytes)
        self.net = Net(comm, self.window) if comm.allreduce(node.size, op=MPI.MIN) < comm.size else None
        self.no_cma = (
            agree_on_cma(comm, self.native, disabled=not cma) if self.net is None else "slots alone lead to other nodes"
        )
        self.helper = Helper(self.native, node.size)
        if self.net is not None:
            self.executor_reason += "; messages of MPI between nodes"
        else:
            how = f"no cma: {self.no_cma}" if self.no_cma else "ranks read one another's memory (cma)"
            self.executor_reason += f"; {how}"
        self._say = say
        self.arena_bytes = self.window.arena_bytes
        self.witness = Witness(self.window, comm.allgather(MPI.Get_processor_name()))
        self._spins = SPINS if node.size <= len(os.sched_getaffinity(0)) else CROWDED_SPINS
        self._meeting = native.Job()
        self._place(self._meeting)
        self._print_at = [self.window.address + self.window.record(0, turn) for turn in (0, 1)]
        self._prints = [self.window.column(self.window.record(0, turn) // 8) for turn in (0, 1)]
        self._said: list[tuple[str, int]] = [("", 0), ("", 0)]  # text and fingerprint of this rank's last two calls

    # ---- before a call

    def load(self, program: Program, protocol: str = "slots") -> Loaded:
        """Resolve a program's channels to addresses. Local and without waiting.

        Args:
            protocol: ``slots`` or ``cma``, the same on every rank; cma where ``no_cma`` is empty.
        """
        loaded = load(program, self.window, self.native, self.helper, by_cma=protocol == "cma" and not self.no_cma)
        self._place(loaded.job)
        if self.helper.why_not:
            self._say(f"one thread reads long vectors, because a second cannot be started: {self.helper.why_not}")
        return loaded

    def _place(self, job: native.Job) -> None:
        """Tell a job where the window's words are."""
        window = self.window
        job.n, job.rank, job.spins, job.stride = self.n, self.rank, self._spins, CONTROL // 8
        job.calls = window.address
        job.beat = window.address + self.rank * CONTROL + LINE
        job.pids = window.address + 2 * LINE
        job.abort = window.address + 3 * LINE

    # ---- a call

    def enter(self, seq: int, text: str, timeout_s: float) -> bool:
        """Wait until every rank has entered call ``seq``, and compare what they called; a call of its own.

        Returns whether the call is MPI's: some rank's text starts with :data:`FOREIGN`, and all name one collective.

        Raises:
            MismatchError: if the ranks' texts differ; names both sides, the same on every rank, and the transport lives
                on. RemoteError: if a rank's text starts with :data:`FAILED`. CollectiveTimeout, PeerLost.
        """
        mine = self._announce(seq, text)
        self._meet(seq, timeout_s)
        by_mpi = self._compare(seq, mine) or text.startswith(FOREIGN)
        self.window.done[self.rank] = seq
        return by_mpi

    def call(
        self,
        loaded: Loaded,
        seq: int,
        text: str,
        send: Array | Spot | None,
        recv: Array | Spot | None,
        timeout_s: float,
        *,
        begun: bool = False,
    ) -> bool:
        """Enter call ``seq`` and execute a program. Nothing is received before all ranks have entered the same call.

        Args:
            send, recv: 1-D contiguous arrays of the call's dtype, or None where the call has none; where they lie is
                enough for what the C executor executes.
            timeout_s: how long to wait without any progress.
            begun: whether :meth:`again` has begun it.

        Returns:
            True if the call is for MPI after all (see :meth:`enter`); then nothing has been received.

        Raises:
            As :meth:`enter`. After CollectiveTimeout or PeerLost, which name who waited for whom and for which chunk,
            the transport is dead.
        """
        loaded.base = base = seq << SEQ_BITS
        if loaded.executor == "c":
            if not begun:
                self._begin_c(loaded, seq, text, send, recv)
            mine = int(loaded.job.print)
            run = partial(self._run_c, loaded)
            outcome = self._guard(run, timeout_s, lambda: self._waits(loaded, seq), seq, begun=begun)
            if outcome is Outcome.DONE:
                return False
            if outcome is Outcome.REFUSED:  # on every rank
                if loaded.by_slots is None:
                    loaded.by_slots = self.load(loaded.whole)
                self._say(f"{short(text)}: slots, because a rank's buffer cannot be read by the others")
                return self.call(loaded.by_slots, seq, text, send, recv, timeout_s)
            if outcome is Outcome.FAULT:
                raise self._unread(loaded, seq)
        else:
            loaded.ends.start(base)
            mine = self._announce(seq, text)
            self._meet(seq, timeout_s)
        by_mpi = self._compare(seq, mine)
        if not by_mpi:
            for stage in loaded.steps:
                stage.start(base, send, recv)  # type: ignore[arg-type]
            left = [stage for stage in loaded.steps if stage.k < stage.chunks]
            run = partial(turns, self._moving(loaded, partial(step_numpy, left)), self.window)
            self._guard(run, timeout_s, lambda: self._waits(loaded, seq), seq)
        self.window.done[self.rank] = seq
        return by_mpi

    def _begin_c(
        self, loaded: Loaded, seq: int, text: str, send: Array | Spot | None, recv: Array | Spot | None
    ) -> None:
        """Tell the C executor of a call, and the others that this rank is in it."""
        job = loaded.job
        loaded.ends.start(loaded.base)
        job.send = 0 if send is None else address(send)
        job.recv = 0 if recv is None else address(recv)
        job.base, job.phase, job.seq, job.prints = loaded.base, 0, seq, self._print_at[seq & 1]
        if loaded.lent:
            self._lend(loaded, send, recv)
        job.print = self._announce(seq, text)

    def repeat(
        self, loaded: Loaded, text: str, send: Spot | None, recv: Spot | None, timeout_s: float
    ) -> Repeat | None:
        """A call that was made before, for :meth:`again`; None where more than the C executor is at work."""
        if loaded.executor != "c" or self.net is not None or self.window.fence is not None:
            return None
        again = self.native.code.blink_again  # type: ignore[union-attr]
        return Repeat(again, loaded, text, send, recv, self._print_at, min(LOOK_SECONDS, timeout_s))

    def again(self, made: Repeat, seq: int) -> bool | None:
        """Begin, and mostly end, a call that was made before.

        Returns:
            True if it is done; False if :meth:`call` has to go on with it (``begun``); None if it has not begun.
        """
        status = made.run(made.at, seq)
        return status == 0 or (None if status == OTHER else False)

    def carry(self, seq: int, ends: Ends | None) -> tuple[bool, bool]:
        """Move what can be moved between nodes in call ``seq``, which ``ends`` are in.

        Returns:
            Whether more is to come, and whether anything moved.

        Raises:
            PeerLost: if MPI cannot reach a rank.
        """
        if self.net is None:
            return False, False
        try:
            moved = self.net.turn(seq) | (ends is not None and self.net.move(ends))
        except MPI.Exception as error:
            raise self.witness.cut(seq, error) from error
        return not (self.net.met(seq) and (ends is None or ends.through)), moved

    def pass_by(self, seq: int, text: str) -> None:
        """Say that this rank is in call ``seq``, whose ranks meet elsewhere: on their GPUs."""
        self._announce(seq, text)
        self.window.done[self.rank] = seq

    def exchange(self, seq: int, count: int, timeout_s: float) -> tuple[int, ...]:
        """Every rank's ``count``, as call ``seq`` of its own.

        Raises:
            As :meth:`enter` does, where some rank does something else.
        """
        self._announce(seq, f"{EXCHANGE}{count}")
        self._meet(seq, timeout_s)
        texts = [self.witness.text(r, seq) for r in range(self.n)]
        self.window.done[self.rank] = seq
        if not all(text.startswith(EXCHANGE) for text in texts):
            raise self.witness.disagreement(seq, self._prints[seq & 1].tolist()) or MismatchError(
                f"call {seq}: {texts}"
            )
        return tuple(int(text.removeprefix(EXCHANGE)) for text in texts)

    def _lend(self, loaded: Loaded, send: Array | Spot | None, recv: Array | Spot | None) -> None:
        """Tell the others, before the call is announced, where the buffers are that they will read."""
        buffers = zip(loaded.lends, (send, recv), strict=True)
        lengths = [a.nbytes if lends and a is not None else 0 for lends, a in buffers]
        self.native.code.blink_lend(ctypes.addressof(loaded.job), *lengths)  # type: ignore[union-attr]

    def _announce(self, seq: int, text: str) -> int:
        """Say which call this rank enters; returns the fingerprint of ``text``."""
        window, turn = self.window, seq & 1
        said = self._said[turn]
        if said[0] is not text:
            mine, body = announcement(text)
            if said[1] != mine:
                at = window.record(self.rank, seq)
                window.words[at // 8] = mine
                window.write(at, body)
            self._said[turn] = said = (text, mine)
        if window.fence:
            window.fence()
        window.seqs[self.rank] = seq
        return said[1]

    def _meet(self, seq: int, timeout_s: float) -> None:
        """Wait until all ranks have announced call ``seq``."""
        self._guard(partial(self._enter_once, seq), timeout_s, lambda: self._absent(seq), seq)

    def _compare(self, seq: int, mine: int) -> bool:
        """Whether the announced call is MPI's for the sake of some rank; raises where the ranks' calls differ."""
        prints: list[int] = self._prints[seq & 1].tolist()
        if prints.count(mine) == self.n:
            return False
        error = self.witness.disagreement(seq, prints)
        if error is not None:
            self.window.done[self.rank] = seq
            raise error
        return True

    # ---- the end

    def abort(self, error: BaseException) -> None:
        """Tell the peers that this rank gave up, and why; they leave as soon as they wait. Safe to call twice."""
        window = self.window
        if not int(window.abort[0]):
            words = f"{type(error).__name__}: {error}".encode()
            window.write(window.last_words(self.rank), words)
            if window.fence:
                window.fence()
            window.abort[0] = 1 + self.rank
            if self.net:
                self.net.cry(words)

    def heed(self, seq: int) -> None:
        """Raise what another rank left, if one gave up: it may have come to call ``seq`` and gone again."""
        if int(self.window.abort[0]):
            raise self.witness.heard(seq)

    def part(self, timeout_s: float) -> list[int]:
        """Leave for good, and wait until the others have; returns those that did not."""
        window, end = self.window, time.monotonic() + timeout_s
        window.leave()
        if self.net:
            self.net.leave()
        while True:
            if self.net:
                self.net.hear()
            lives = {r: window.life(r) for r in range(self.n)}
            here = [r for r, life in lives.items() if life not in ("left", "gone")]
            if time.monotonic() > end or all(lives[r] == "stopped" for r in here):
                return here
            time.sleep(0.01)

    def close(self) -> None:
        """Free the shared memory; collective."""
        del self._prints
        self.helper.close()
        if self.net:
            self.net.close()
        self.window.close()

    # ---- waiting

    def _run_c(self, loaded: Loaded, slice_s: float) -> tuple[Outcome, bool]:
        if self.net is None:
            return self._turn_c(loaded, int(slice_s * 1e9))
        return turns(self._moving(loaded, lambda: self._turn_c(loaded, -1)), self.window, slice_s)

    def _turn_c(self, loaded: Loaded, timeout_ns: int) -> tuple[Outcome, bool]:
        job = loaded.job
        job.timeout_ns = timeout_ns
        status = self.native.code.blink_call(ctypes.addressof(job), loaded.code_at)  # type: ignore[union-attr]
        return OUTCOMES[status], bool(job.moved)

    def _moving(self, loaded: Loaded, turn: Turn) -> Turn:
        """Turns of a executor with those of the messages between nodes."""
        net, seq = self.net, loaded.base >> SEQ_BITS
        if net is None:
            return turn

        def both() -> tuple[Outcome, bool]:
            outcome, moved = turn()
            try:
                moved |= net.turn(seq)
                if loaded.executor != "c" or loaded.job.phase == 2:  # all have met in the same call
                    moved |= net.move(loaded.ends)
            except MPI.Exception as error:
                raise self.witness.cut(seq, error) from error
            if outcome is Outcome.DONE and not (net.met(seq) and loaded.ends.through):
                return Outcome.EXPIRED, moved
            return outcome, moved

        return both

    def _guard(
        self,
        attempt: Callable[[float], tuple[Outcome, bool]],
        timeout_s: float,
        waits: Callable[[], dict[int, str]],
        seq: int,
        *,
        begun: bool = False,
    ) -> Outcome:
        """Repeat ``attempt`` in slices (one is over if ``begun``); between two look after the peers waited for."""
        slice_s = min(LOOK_SECONDS, timeout_s)
        outcome, moved = attempt(slice_s)
        since = time.monotonic() - slice_s * (2 if begun and not moved else 1)
        while outcome in (Outcome.EXPIRED, Outcome.ABORTED):
            self.look(seq, waits, time.monotonic() - since, timeout_s)
            outcome, moved = attempt(slice_s)
            if moved:  # nothing did during the last slice
                since = time.monotonic() - slice_s
        return outcome

    def look(self, seq: int, waits: Callable[[], dict[int, str]], waited_s: float, timeout_s: float) -> None:
        """Look after the peers during a wait.

        Args:
            waits: gives what each rank that is waited for owes.

        Raises:
            CollectiveTimeout, PeerLost: if another rank gave up, one that is waited for is lost, or the time is over.
        """
        window = self.window
        if self.net:
            self.net.hear()
        self.heed(seq)
        window.beat()
        # first who has ended, then what is owed: whoever did its part before it left is not lost
        ended = [r for r in range(self.n) if r != self.rank and window.life(r) in ("left", "gone")]
        if not ended and waited_s < timeout_s:
            return
        owed = waits()
        lost = [r for r in ended if r in owed]
        if lost or waited_s >= timeout_s:
            raise self.witness.late(seq, owed, lost, waited_s)

    def _waits(self, loaded: Loaded, seq: int) -> dict[int, str]:
        """Peers that unfinished stages of this rank wait for, with the first chunk that each owes."""
        if loaded.executor == "c" and loaded.job.phase < 2:
            return self._absent(seq)
        found: dict[int, str] = {}
        words, places, depth = self.window.words, loaded.places, loaded.program.depth
        for stage, k, waits in loaded.progress():
            chunks = -(-stage.count // loaded.program.chunk_of(stage))
            if k >= chunks:
                continue
            where = f"chunk {k + 1} of {chunks} of tree {stage.tree}, way {stage.way}"
            want = loaded.base + k + 1
            for c in () if waits else stage.ins:
                at_once = c in loaded.lent and loaded.lent[c].buffer == "send"
                if not at_once and int(words[places.heads[c]]) < want:
                    found.setdefault(
                        loaded.far[c].rank if c in loaded.far else loaded.program.channels[c].writer, where
                    )
            for c in stage.outs:
                for near, tail in places.tails[c].items():
                    reader = loaded.far[c].rank if c in loaded.far else near
                    if waits and c in loaded.lent and int(words[tail]) < want:
                        found.setdefault(reader, f"its reading of {where}")
                    if not waits and c not in loaded.lent and k >= depth and int(words[tail]) < want - depth:
                        found.setdefault(reader, f"room for {where}")
        return found

    def _unread(self, loaded: Loaded, seq: int) -> BlinkError:
        """The error for memory that could not be read in the middle of a call: its process has ended, or freed it."""
        time.sleep(2 * LOOK_SECONDS)  # its end shows by then, and the launcher has heard of it, too
        self.heed(seq)
        return self.witness.unread(seq, self.rank, int(loaded.job.faulty), int(loaded.job.fault))

    def _enter_once(self, seq: int, slice_s: float) -> tuple[Outcome, bool]:
        window, net, job, native = self.window, self.net, self._meeting, self.native
        job.seq, job.timeout_ns = seq, int(slice_s * 1e9)
        if native is not None and (net is None or not net.leads):
            return OUTCOMES[native.code.blink_enter(ctypes.addressof(job))], False
        job.timeout_ns = -1

        def turn() -> tuple[Outcome, bool]:
            try:
                moved = net is not None and net.turn(seq)
            except MPI.Exception as error:
                raise self.witness.cut(seq, error) from error
            if native is None:
                outcome, _ = enter_numpy(window, seq)
            else:
                outcome = OUTCOMES[native.code.blink_enter(ctypes.addressof(job))]
            return (outcome if net is None or net.met(seq) else Outcome.EXPIRED), moved

        return turns(turn, window, slice_s)

    def peers(self, what: str) -> dict[int, str]:
        """All ranks that may still owe ``what``."""
        return {r: what for r in range(self.n) if r != self.rank and self.window.life(r) != "left"}

    def _absent(self, seq: int) -> dict[int, str]:
        return {r: f"its call {seq}" for r in range(self.n) if int(self.window.seqs[r]) < seq}
