"""``HostTransport`` runs programs on CPU ranks: over shared memory in a node, by messages between nodes.

Loading, waiting and errors are here. ``host_call.py`` binds a program to buffers; its steps run in ``executor.c`` or
``numpy_executor.py``.

Every rank executes its stages in one thread. A step runs as soon as its inputs have arrived and its outputs have room;
when nothing is ready the rank spins a little, then yields its core, then sleeps, so that more ranks than cores progress
smoothly. No wait is without a deadline, and a rank that aborts tells the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from ...errors import BlinkError, MismatchError
from ...program.ir import Program
from ...util.lru import LRU
from ...util.together import allgather
from ..announcement import Announcement, Numbers, encode_failure
from ..control_pages import BODY
from ..counters import Counters
from ..interface import PeerDelegates, Refused
from ..liveness import AWAY, Peers
from ..network.bounded import Bounded
from ..network.endpoints import Endpoints
from ..network.messages import NodeMessages
from ..recorder import Recorder
from ..slow_waits import SlowWaits
from . import native
from .capabilities import Host, Known, agree_on_cma, agree_on_executor, cores_of, open_shots, own_host
from .host_program import HostProgram, load, nothing_to_move, of_blocks
from .host_program import place as tell_places
from .numpy_executor import OUTCOMES, Outcome, barrier_numpy, repeat
from .outlook import HostOutlook
from .own_records import OwnRecords
from .shared_window import ARENA_BYTES, Place, SharedWindow
from .shots import NodeShots
from .single_copy import Helper

if TYPE_CHECKING:
    from ...program.blocks import BlockMoves
    from .block_memory import BlockMemory

SPINS, CROWDED_SPINS = 64, 2  # polls before a core is yielded: where each rank has one, and elsewhere
LOOK_SECONDS = 0.2  # how often a wait looks after the peers
BLOCK_PROGRAMS = 1024  # calls of blocks that are kept, by their lengths
LEAVE_SECONDS = 60.0  # at its end a rank waits so long for the others, if the communicator is dead


class HostTransport(HostOutlook):
    """Executes programs among the ranks of ``comm``.

    Args:
        comm: a communicator of our own: nobody else may use it.
        node: those of its ranks that share memory with this one, in the same order.
        executor: ``auto`` takes the C executor if every rank has it; ``c`` and ``numpy`` insist.
        cma: whether the ranks may read one another's memory, if they can (``no_cma`` says why not).
        cma_threads: how many threads read long vectors where half of the ranks only wait.
        say: told, at most once, of a call that cannot take the protocol ``cma``.
        slow: when to warn of a wait.
        events: how many events of calls are kept for a trace; 0: none.
        strict: whether it is an error that /dev/shm has no room.
        known: what is known of these ranks, if they are some of another communicator's.
        place: where they have room in its memory.

    Raises:
        ArgumentError: on every rank, if ``executor='c'`` and there is no C executor.
    """

    window: SharedWindow

    def __init__(
        self,
        comm: Bounded,
        node: Bounded,
        *,
        executor: str = "auto",
        arena_bytes: int = ARENA_BYTES,
        cma: bool = True,
        cma_threads: int = 2,
        say: Callable[[str], None] = lambda _: None,
        slow: SlowWaits | None = None,
        events: int = 0,
        strict: bool = False,
        known: Known | None = None,
        place: Place | None = None,
    ) -> None:
        self.n, self.rank, self.say = comm.size, comm.rank, say
        self.native, how = agree_on_executor(comm, node, executor) if known is None else (known.native, known.executor)
        self.executor = "c" if self.native else "numpy"
        self.executor_reason = self._why_executor = how
        self.window = window = SharedWindow(comm, node, arena_bytes, strict=strict, place=place)
        self.pages = window.pages
        start = window.counter_places[self.rank]
        counters = Counters(
            window.counters, n=self.n, rank=self.rank, timed=bool(events), reserve=partial(window.keep, start)
        )
        self.recorder = Recorder(counters, self.n, self.rank, events)
        self.records = OwnRecords(self.pages, self.until_done)
        several = len(window.nodes) > 1
        self.messages = NodeMessages(comm, self.pages) if several else None
        self.shots: NodeShots | None = None  # messages of calls in one shot
        if self.messages is not None:
            self.no_cma = "slots alone lead to other nodes"
            self.shots, shots = open_shots(comm, self.native, self.messages, window)
            self.executor_reason += f"; messages of MPI between nodes{shots}"
        else:
            found = known.no_cma if known is not None else None
            self.no_cma = agree_on_cma(comm, self.native, disabled=not cma) if found is None else found
            how = f"no cma: {self.no_cma}" if self.no_cma else "ranks read one another's memory (cma)"
            self.executor_reason += f"; {how}"
        self.has_shots, self._may_read = self.shots is not None, cma
        self.helper = Helper(self.native if cma_threads > 1 else None, node.size)
        self.arena_bytes = window.arena_bytes
        self._hosts = allgather(comm, own_host(), Host) if known is None else list(known.hosts)
        self.peers = Peers(self.pages, [host.name for host in self._hosts], slow, comm.processes())
        self._barrier = native.CallStruct()
        self.crowded = cores_of([self._hosts[r] for r in self.pages.here]) < node.size
        self._barrier.spins = self._spins = CROWDED_SPINS if self.crowded or several else SPINS
        tell_places(self._barrier, window)
        self._nothing: dict[str, HostProgram] = {}  # by collective: programs of calls without elements
        self._blocks: LRU[tuple[object, ...], HostProgram] = LRU(BLOCK_PROGRAMS)

    @property
    def known(self) -> Known:
        """What holds for a part of these ranks, too."""
        holds = self.messages is None and (not self.no_cma or self.native is None or not self._may_read)
        no_cma = self.no_cma if holds else None
        return Known(self.native, self._why_executor, no_cma, self.has_shots, self._hosts)

    # ---- before a call

    def load(self, make: Callable[[], Program], protocol: str = "slots") -> HostProgram:
        """Resolve a program's channels to addresses. Local and without waiting.

        Args:
            make: gives the program; it is asked again for what is said of a call that fails.
            protocol: that of the plan's rule, the same on every rank; cma where ``no_cma`` is empty.
        """
        cma = protocol in ("cma", "one_shot_cma") and not self.no_cma
        loaded = load(make, self.window, self.native, self.helper, self.recorder, self.shots, cma=cma)
        loaded.struct.spins = self._spins
        self._say_helper()
        return loaded

    def nothing(self, collective: str) -> HostProgram | None:
        """The program of a call without data that C makes alone; None where it cannot.

        Without a collective it is a meeting that is not counted, and that C cannot make where calls are traced.
        """
        if self.native is None or (self.messages is not None and self.shots is None):
            return None
        if not collective and self.recorder.ring is not None:
            return None
        if collective not in self._nothing:
            self._nothing[collective] = nothing_to_move(self.window, self.recorder, collective, self.shots)
            self._nothing[collective].struct.spins = self._spins
        return self._nothing[collective]

    @cached_property
    def block_memory(self) -> BlockMemory | None:
        """Where blocks lie in calls of blocks, whose ranks need not know all lengths; None where none can be made.

        So it is on every rank, or on none.
        """
        if self.native is None or self.messages is not None:
            return None
        from .block_memory import BlockMemory

        memory = BlockMemory(self.window, reads=not self.no_cma, crowded=self.crowded)
        return memory if memory.fits else None

    def load_blocks(self, moves: BlockMoves) -> HostProgram:
        """The program of a call of blocks, whatever their places.

        Raises:
            NoRoom: if the window has no room for it.
        """
        assert self.block_memory is not None
        found = self._blocks.find(moves.lengths)
        if found is None:
            for slots, one_shot in self.block_memory.takes(moves):
                self.window.need(self.n, self.n, slots, one_shot=one_shot)
            found = of_blocks(moves, self.block_memory, self.window, self.helper, self.recorder)
            found.struct.spins = self._spins
            self._blocks.put(moves.lengths, found)
            self._say_helper()
        return found

    def _say_helper(self) -> None:
        if self.helper.failure:
            self.say(f"one thread reads long vectors, because a second cannot be started: {self.helper.failure}")

    def by_c_alone(self, program: HostProgram) -> bool:
        """Whether C executes a program, and sends what it sends to other nodes."""
        return program.executor == "c" and (self.messages is None or bool(program.struct.one_shot))

    # ---- calls without a program

    def barrier(self, seq: int, announcement: Announcement, timeout_s: float) -> None:
        """Wait until every rank has announced call ``seq``, and compare what they announced; a call of its own.

        Raises:
            Refused: MismatchError if the announcements differ, the same on every rank; RemoteError if a rank failed.
            PeerDelegates: if MPI must do the call. CollectiveTimeout, PeerLost: the transport is dead.
        """
        self.records.announce(seq, announcement, timeout_s)
        self.wait_for_all(seq, timeout_s)

    def wait_for_all(self, seq: int, timeout_s: float) -> None:
        """The second half of :meth:`barrier`."""
        self._wait(seq, timeout_s)
        self.compare(seq, self.records.fingerprint(seq))
        self.pages.finished[self.rank] = seq

    def exchange(self, seq: int, said: Numbers, timeout_s: float) -> tuple[tuple[int, ...], ...]:
        """Every rank's numbers, at most NUMBERS each, as call ``seq`` of its own; raises as :meth:`barrier`."""
        self.records.announce(seq, said, timeout_s)
        self._wait(seq, timeout_s)
        found = [self.peers.announced(r, seq) for r in range(self.n)]
        numbers = [a.values for a in found if isinstance(a, Numbers) and a.collective == said.collective]
        if len(numbers) < self.n or len(set(map(len, numbers))) > 1:
            self._differ(seq, self.pages.fingerprints(seq))
        self.pages.finished[self.rank] = seq
        return tuple(numbers)

    def compare(self, seq: int, fingerprint: int) -> None:
        """Raise, as :meth:`barrier` does, unless all ranks announced the same call."""
        fingerprints = self.pages.fingerprints(seq)
        if fingerprints.count(fingerprint) == self.n:
            return
        self._differ(seq, fingerprints)

    def _differ(self, seq: int, fingerprints: list[int]) -> NoReturn:
        """Raise what follows from announcements that differ: a refusal, unless a rank waits in a kernel by now."""
        error, kernels = self.peers.mismatch_error(seq, fingerprints), self.peers.in_kernels(seq)
        self.pages.finished[self.rank] = seq  # the records are read
        if isinstance(error, MismatchError) and kernels and self.messages is None:  # between nodes kernels start later
            raise error
        if error is not None:
            raise Refused(error)
        raise PeerDelegates

    def _wait(self, seq: int, timeout_s: float) -> None:
        self.until_done(partial(self._barrier_slice, seq), lambda: self.peers.absent(seq), seq, timeout_s)
        self.peers.raise_abort(seq)  # the others may have given it up before this rank came

    def _barrier_slice(self, seq: int, slice_s: float) -> tuple[Outcome, bool]:
        struct, messages = self._barrier, self.messages
        struct.seq, struct.timeout_ns = seq, int(slice_s * 1e9)
        if self.native is not None and (messages is None or not messages.leads):
            return OUTCOMES[self.native.code.blink_barrier(native.address(struct))], False
        struct.timeout_ns = -1

        def turn() -> tuple[Outcome, bool]:
            moved = self.move_messages(seq)
            if self.native is None:
                outcome = barrier_numpy(self.pages, seq)
            else:
                outcome = OUTCOMES[self.native.code.blink_barrier(native.address(struct))]
            return (outcome if messages is None or messages.sent(seq) else Outcome.EXPIRED), moved

        return repeat(turn, self.pages, slice_s)

    # ---- messages between nodes

    def progress(self, seq: int, endpoints: Endpoints) -> tuple[bool, bool]:
        """Move what can be moved between nodes in call ``seq``: whether more is to come, whether anything moved."""
        if self.messages is None:
            return False, False
        moved = self.move_messages(seq, endpoints)
        return not (self.messages.sent(seq) and endpoints.finished), moved

    def move_messages(self, seq: int, endpoints: Endpoints | None = None) -> bool:
        """Move what can be moved in call ``seq``, and on its channels; whether anything moved."""
        if self.messages is None:
            return False
        try:
            return self.messages.progress(seq) | (endpoints is not None and self.messages.move(endpoints))
        except MPI.Exception as error:
            raise self.network_error(seq, error) from error

    def network_error(self, seq: int, error: MPI.Exception) -> BlinkError:
        """The error for a rank of another node that MPI cannot reach any more."""
        if self.messages is not None:
            self.messages.poll_aborts()
        return self.peers.network_error(seq, error)

    # ---- waiting

    @staticmethod
    def slice_of(timeout_s: float) -> float:
        """Seconds between two looks after the peers."""
        return min(LOOK_SECONDS, timeout_s)

    def until_done(
        self,
        attempt: Callable[[float], tuple[Outcome, bool]],
        owed: Callable[[], dict[int, str]],
        seq: int,
        timeout_s: float,
        *,
        begun: bool = False,
    ) -> Outcome:
        """Repeat ``attempt`` in slices (one has passed if ``begun``); between two, look after the peers."""
        slice_s = self.slice_of(timeout_s)
        outcome, moved = attempt(slice_s)
        since = time.monotonic() - slice_s * (2 if begun and not moved else 1)
        while outcome in (Outcome.EXPIRED, Outcome.ABORTED):
            self.look(seq, owed, time.monotonic() - since, timeout_s)
            outcome, moved = attempt(slice_s)
            if moved:  # the last slice was without progress, so that ended before it
                since = time.monotonic() - slice_s
        return outcome

    def look(self, seq: int, owed: Callable[[], dict[int, str]], waited_s: float, timeout_s: float) -> None:
        """Look after the peers during a wait.

        Args:
            owed: gives what each rank that is waited for owes.

        Raises:
            CollectiveTimeout, PeerLost: if another rank aborted, one that is waited for is lost, or the time is over.
        """
        self.raise_abort(seq)
        self.pages.beat()
        # first who has ended, then what is owed: a rank that did its part before it left is not lost
        ended = self.peers.ended()
        if not ended and waited_s < timeout_s:
            self.peers.warn(seq, owed, waited_s, timeout_s)
            return
        waits = owed()
        lost = [r for r in ended if r in waits]
        if lost:
            self.raise_abort(seq)  # the process may have reported an error, and ended, since the look above
        if lost or waited_s >= timeout_s:
            raise self.peers.timeout_error(seq, waits, lost, waited_s)

    def unreadable(self, seq: int, rank: int, fault: int) -> BlinkError:
        """The error for memory of a rank that could not be read in the middle of a call: it has ended, or freed it.

        Args:
            fault: the number of the system's error.
        """
        time.sleep(2 * LOOK_SECONDS)  # by then the end of the process is visible, also to the launcher
        self.raise_abort(seq)
        return self.peers.unreadable_error(seq, self.rank, rank, fault)

    # ---- the end

    def abort(self, error: BaseException) -> None:
        """Tell the peers that this rank aborts, and why; they leave as soon as they wait. Safe to call twice."""
        pages = self.pages
        if not int(pages.abort[0]):
            body = encode_failure(error, BODY)
            pages.write(pages.error_record(self.rank), body)
            if pages.fence:
                pages.fence()  # the record comes before the word that leads to it
            pages.abort[0] = 1 + self.rank
            if self.messages:
                self.messages.broadcast_abort(body)

    def raise_abort(self, seq: int) -> None:
        """Raise the error of a rank that aborted, if one did: it may have come to call ``seq`` and gone again."""
        if self.messages:
            self.messages.poll_aborts()
        self.peers.raise_abort(seq)

    def leave(self, timeout_s: float) -> list[int]:
        """Leave for good, and wait until the others have; returns those that did not."""
        end = time.monotonic() + min(timeout_s, LEAVE_SECONDS)
        self.window.leave()
        if self.messages:
            self.messages.broadcast_leave()
        while True:
            if self.messages:
                self.messages.poll_aborts()
            states = {r: self.pages.state(r) for r in range(self.n)}
            here = [r for r, state in states.items() if state not in (*AWAY, "gone")]
            if time.monotonic() > end or all(states[r] == "stopped" for r in here):
                return here
            time.sleep(0.01)

    def give_back_slots(self) -> None:
        """Hold what every call needs, and no more; no program may be run again."""
        self._blocks.clear()
        self.window.give_back_slots()

    def close(self, *, went_on: bool = False) -> None:
        """Look at the shared memory no more; ``went_on``: see :meth:`SharedWindow.close`."""
        self.helper.close()
        if self.shots:
            self.shots.close()
        if self.messages:
            self.messages.close()
        self.recorder.close()
        self._blocks.clear()
        del self.records  # the records are views of the window
        self.window.close(went_on=went_on)
