"""Programs on the CPU ranks of one node: shared memory, chunked and pipelined (Blink section 4).

Every rank runs its lanes in one thread. A step runs as soon as its inputs have
arrived and its outputs have room; when nothing is ready the rank spins a
little, then yields its core, then sleeps, so more ranks than cores progress
smoothly. No wait is without a deadline; whoever gives up tells the others.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ..errors import ArgumentError, BlinkError, CollectiveTimeout, MismatchError, PeerLost, RemoteError
from ..numerics import Array, accumulator_of, dtype_of
from ..program import Lane, Program
from . import native
from .runner import NumpyLane, Outcome, enter_numpy, run_numpy
from .window import ARENA_BYTES, LINE, RECORD, Places, SharedWindow

SEQ_BITS = 24  # a flag is (sequence number << SEQ_BITS) + chunks
NUMPY_SHIFT = 16  # where malloc puts a large array in its page: glibc's memcpy is slow across other distances
STREAM_BYTES = 32 << 20  # from here on the result is written past the caches
SPINS = 64
LOOK_SECONDS = 0.2
FOREIGN = "MPI's "  # a rank whose arguments only MPI understands enters with this and the collective
FAILED = "failed: "  # a rank that cannot take part enters with this and its error
RunnerName = Literal["c", "numpy"]


@dataclass
class Loaded:
    """A program as one rank executes it."""

    program: Program
    lanes: tuple[Lane, ...]
    places: Places
    code: NDArray[np.int64]  # the lanes as runner.c reads them
    patch: list[tuple[int, bool, int]]  # (index in code, is the receive buffer, byte offset)
    at: NDArray[np.intp]  # where code counts the chunks that each lane has done
    job: native.Job
    base: int = 0
    steps: list[NumpyLane] = field(default_factory=list)
    runner: RunnerName = "numpy"


class HostTransport:
    """Executes programs among the ranks of ``comm``, which must share memory.

    Args:
        comm: a communicator of our own: nobody else may use it.
        runner: ``auto`` takes the C runner if every rank has it; ``c`` and ``numpy`` insist.

    Raises:
        ArgumentError: on every rank, if ``runner='c'`` and there is no C runner.
    """

    def __init__(self, comm: MPI.Intracomm, *, runner: str = "auto", arena_bytes: int = ARENA_BYTES) -> None:
        self.n, self.rank = comm.size, comm.rank
        self.native, self.runner_reason = _agree_on_runner(comm, runner)
        self.runner: RunnerName = "c" if self.native else "numpy"
        self.window = SharedWindow(comm, arena_bytes)
        self.arena_bytes = self.window.arena_bytes
        self._node = MPI.Get_processor_name()

    # ---- before a call

    def load(self, program: Program) -> Loaded:
        """Resolve a program's channels to addresses. Local and without waiting."""
        call = program.call
        item, acc = dtype_of(call.dtype).itemsize, accumulator_of(call.dtype).itemsize
        places = Places(program, self.window, item, acc, NUMPY_SHIFT if self.runner == "numpy" else 0)
        lanes = program.of(self.rank)
        codes = native.codes(call.dtype, call.op) if self.native else None
        known = codes is not None or not any(len(lane.fold) > 1 or lane.final for lane in lanes)
        rows, patch, at = _records(lanes, program, places, self.window.address, self.rank, item)
        loaded = Loaded(program, lanes, places, np.array(rows, np.int64), patch, np.array(at, np.intp), native.Job())
        if self.native and known:
            loaded.runner = "c"
        else:
            loaded.steps = [NumpyLane(lane, program, places, self.window, self.rank) for lane in lanes]
        job = loaded.job
        dtype, op = codes or (0, 0)
        job.lanes, job.dtype, job.op, job.item, job.acc = len(lanes), dtype, op, item, acc
        job.chunk, job.depth, job.spins = program.chunk, program.depth, SPINS
        job.divide = call.n if call.op == "avg" else 0
        job.stream = call.total * item >= STREAM_BYTES
        job.beat = self.window.address + self.rank * self.window.size + LINE
        job.abort = self.window.address + 3 * LINE
        return loaded

    # ---- a call

    def enter(self, seq: int, text: str, timeout_s: float) -> bool:
        """Wait until every rank has entered call ``seq``, and compare what they called.

        Returns whether the call is MPI's: some rank's text starts with :data:`FOREIGN`, and all name one collective.

        Raises:
            MismatchError: if the ranks' texts differ; names both sides, the same on every rank, and the transport lives
                on. RemoteError: if a rank's text starts with :data:`FAILED`. CollectiveTimeout, PeerLost.
        """
        window = self.window
        mine = fingerprint(text)
        at = window.record(self.rank, seq)
        window.words[at // 8] = mine
        self._write(at, text)
        if window.fence:
            window.fence()
        window.seqs[self.rank] = seq
        self._guard(partial(self._enter_once, seq), timeout_s, lambda: self._absent(seq), seq)
        prints = window.words[window.record(0, seq) // 8 :: window.size // 8]
        if (prints != mine).any():
            return self._differ(seq, [int(p) for p in prints])
        return text.startswith(FOREIGN)

    def run(self, loaded: Loaded, seq: int, send: Array | None, recv: Array | None, timeout_s: float) -> None:
        """Execute a loaded program as call ``seq``, which every rank has entered.

        Args:
            send, recv: 1-D contiguous arrays of the call's dtype, or None where the call has none.
            timeout_s: how long to wait without any progress.

        Raises:
            CollectiveTimeout, PeerLost: naming who waited for whom, and for which chunk. The transport is dead then.
        """
        if not loaded.lanes:
            return
        base = seq << SEQ_BITS
        loaded.base = base
        if loaded.runner == "c":
            addresses = (send.ctypes.data if send is not None else 0, recv.ctypes.data if recv is not None else 0)
            for index, is_recv, offset in loaded.patch:
                loaded.code[index] = addresses[is_recv] + offset
            loaded.code[loaded.at] = 0
            loaded.job.base, loaded.job.left = base, len(loaded.lanes)
            self._guard(partial(self._run_c, loaded), timeout_s, lambda: self._waits(loaded), seq)
        else:
            for lane in loaded.steps:
                lane.start(base, send, recv)
            self._guard(partial(run_numpy, loaded.steps, self.window), timeout_s, lambda: self._waits(loaded), seq)

    def close(self) -> None:
        """Free the shared memory; collective."""
        self.window.close()

    # ---- waiting

    def _run_c(self, loaded: Loaded, slice_s: float) -> tuple[Outcome, bool]:
        job = loaded.job
        job.timeout_ns, job.moved = int(slice_s * 1e9), 0
        status = self.native.library.blink_run(ctypes.addressof(job), loaded.code.ctypes.data)  # type: ignore[union-attr]
        return Outcome(status), bool(job.moved)

    def _guard(
        self,
        attempt: Callable[[float], tuple[Outcome, bool]],
        timeout_s: float,
        waits: Callable[[], dict[int, str]],
        seq: int,
    ) -> None:
        """Repeat ``attempt`` in slices; between two look after the peers that it waits for."""
        since = time.monotonic()
        while True:
            outcome, moved = attempt(min(LOOK_SECONDS, timeout_s))
            if outcome is Outcome.DONE:
                return
            now = time.monotonic()
            if moved:
                since = now
            if outcome is Outcome.ABORTED:
                raise self._heard(seq)
            gone = [r for r in range(self.n) if self.window.life(r) == "gone"]
            if gone or now - since >= timeout_s:
                raise self._give_up(self._late(seq, waits(), gone, now - since))

    def _late(self, seq: int, waits: dict[int, str], gone: list[int], waited_s: float) -> BlinkError:
        """The error for a wait that ended: who waited for whom, for what, and what is known of every suspect."""
        now = time.monotonic_ns()
        quiet = [
            r
            for r in range(self.n)
            if r != self.rank and (self.window.life(r) == "stopped" or now - int(self.window.beats[r]) > 1_000_000_000)
        ]
        culprits = gone or [r for r in quiet if self.window.life(r) == "stopped"] or quiet or sorted(waits)
        about = "; ".join(f"rank {r} {self._state(r)}" for r in culprits)
        details = "; ".join(f"rank {r} for {what}" for r, what in sorted(waits.items()))
        text = f"rank {self.rank} on {self._node}, call {seq} {self._text(self.rank, seq)}: {about}. Waited "
        text += f"{waited_s:.1f} s without progress on {details}. "
        if gone:
            return PeerLost(f"{text}The communicator is dead; start the job again")
        return CollectiveTimeout(f"{text}Look at that process; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT)")

    def _state(self, rank: int) -> str:
        pid, life = int(self.window.pids[rank]), self.window.life(rank)
        entered = int(self.window.seqs[rank])
        known = {"gone": "is gone", "stopped": "is stopped (SIGSTOP or a debugger)", "running": "runs"}
        last = f"last entered call {entered} {self._text(rank, entered)}".rstrip()
        return f"(process {pid}) {known.get(life, 'cannot be seen')}, {last}"

    def _waits(self, loaded: Loaded) -> dict[int, str]:
        """Peers that unfinished lanes of this rank wait for, with the first chunk that each owes."""
        found: dict[int, str] = {}
        words = self.window.words
        for i, lane in enumerate(loaded.lanes):
            k = int(loaded.code[loaded.at[i]]) if loaded.runner == "c" else loaded.steps[i].k
            chunks = -(-lane.count // loaded.program.chunk_of(lane))
            if k >= chunks:
                continue
            where = f"chunk {k + 1} of {chunks} of tree {lane.tree}, way {lane.way}"
            for c in lane.ins:
                if int(words[loaded.places.heads[c]]) < loaded.base + k + 1:
                    found.setdefault(loaded.program.channels[c].writer, where)
            for c in lane.outs:
                for reader, tail in loaded.places.tails[c].items():
                    if k >= loaded.program.depth and int(words[tail]) < loaded.base + k + 1 - loaded.program.depth:
                        found.setdefault(reader, f"room for {where}")
        return found

    def _enter_once(self, seq: int, slice_s: float) -> tuple[Outcome, bool]:
        window = self.window
        if self.native is None:
            return enter_numpy(window, seq, slice_s), False
        status = self.native.library.blink_enter(
            window.address, self.n, window.size // 8, seq,
            window.address + self.rank * window.size + LINE, window.address + 3 * LINE, SPINS, int(slice_s * 1e9),
        )  # fmt: skip
        return Outcome(status), False

    def _absent(self, seq: int) -> dict[int, str]:
        return {r: f"its call {seq}" for r in range(self.n) if int(self.window.seqs[r]) < seq}

    def _differ(self, seq: int, prints: list[int]) -> bool:
        """Raise, on every rank with the same text, what the ranks called; nobody has touched data yet."""
        texts = {p: self._text(prints.index(p), seq) for p in dict.fromkeys(prints)}
        who = {p: [r for r in range(self.n) if prints[r] == p] for p in texts}
        failed = next((p for p, text in texts.items() if text.startswith(FAILED)), None)
        if failed is not None:
            raise RemoteError(f"call {seq}: {_ranks(who[failed])} failed: {texts[failed].removeprefix(FAILED)}")
        names = {text.removeprefix(FOREIGN).partition("(")[0] for text in texts.values()}
        if len(names) == 1 and any(text.startswith(FOREIGN) for text in texts.values()):
            return True
        sides = "; ".join(f"{_ranks(who[p])}: {text}" for p, text in texts.items())
        raise MismatchError(
            f"call {seq}: the ranks disagree. {sides}. "
            "Every rank must make the same calls in the same order with equal arguments"
        )

    # ---- last words

    def _text(self, rank: int, seq: int) -> str:
        """What ``rank`` wrote about call ``seq``, if its record still holds it."""
        return self._read(self.window.record(rank, seq)) if seq else ""

    def _read(self, at: int) -> str:
        length = int(self.window.words[at // 8 + 1])
        return bytes(self.window.bytes[at + 16 : at + 16 + length]).decode(errors="replace")

    def _write(self, at: int, text: str) -> None:
        body = text.encode()[: RECORD - 16]
        self.window.words[at // 8 + 1] = len(body)
        self.window.bytes[at + 16 : at + 16 + len(body)] = np.frombuffer(body, np.uint8)

    def _give_up(self, error: BlinkError) -> BlinkError:
        """Leave ``error`` for the peers and tell them to stop waiting."""
        window = self.window
        if not int(window.abort[0]):
            self._write(window.last_words(self.rank), f"{type(error).__name__}: {error}")
            window.abort[0] = 1 + self.rank
        return error

    def _heard(self, seq: int) -> BlinkError:
        """The error that another rank left."""
        window = self.window
        first = int(window.abort[0]) - 1
        name, _, message = self._read(window.last_words(first)).partition(": ")
        kind = CollectiveTimeout if name == CollectiveTimeout.__name__ else PeerLost
        return kind(f"{message} (found by rank {first}; rank {self.rank} left call {seq} too)")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def fingerprint(text: str) -> int:
    """64 bits that differ if the calls do."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _records(
    lanes: tuple[Lane, ...], program: Program, places: Places, address: int, rank: int, item: int
) -> tuple[list[int], list[tuple[int, bool, int]], list[int]]:
    """The lanes as runner.c reads them: (words, what to patch with buffer addresses, where the chunk counters are)."""
    rows: list[int] = []
    patch: list[tuple[int, bool, int]] = []
    counters: list[int] = []
    for lane in lanes:
        at = len(rows)
        counters.append(at + 9)
        for index, offset in ((at + 1, lane.local), (at + 2, lane.store)):
            if offset is not None:
                patch.append((index, index == at + 2, offset * item))
        partial_in = any(program.channels[c].partial for c in lane.ins)
        partial_out = any(program.channels[c].partial for c in lane.outs)
        rows += [lane.count, 0, 0, int(lane.final), int(partial_in), int(partial_out)]
        rows += [len(lane.fold), len(lane.ins), len(lane.outs), 0, program.chunk_of(lane), *lane.fold]
        for c in lane.ins:
            rows += [address + 8 * places.heads[c], address + places.slots[c], address + 8 * places.tails[c][rank]]
        for c in lane.outs:
            tails = [address + 8 * tail for tail in places.tails[c].values()]
            rows += [address + 8 * places.heads[c], address + places.slots[c], len(tails), *tails]
    return rows, patch, counters


def _agree_on_runner(comm: MPI.Intracomm, wanted: str) -> tuple[native.Native | None, str]:
    """The C runner if every rank has it (or ``wanted`` says numpy), and why."""
    if wanted not in ("auto", "c", "numpy"):
        raise ArgumentError(f"runner {wanted!r}: expected auto, c or numpy")
    if wanted == "numpy":
        return None, "NumPy runner, as asked"
    found = native.build() if comm.rank == 0 else None
    path, why = comm.bcast(found)
    loaded: native.Native | None = None
    if path is not None:
        try:
            loaded = native.load(path, why)
        except OSError as error:
            why = f"rank {comm.rank} cannot load {path}: {error}"
    reasons = comm.allgather(None if loaded else why)
    missing = next((r for r in reasons if r is not None), None)
    if missing is None:
        return loaded, f"C runner, compiled by {why}"
    if wanted == "c":
        raise ArgumentError(f"runner='c', but there is none: {missing}; install a C compiler or use runner='auto'")
    return None, f"NumPy runner: {missing}"
