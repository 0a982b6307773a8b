"""``Binder`` turns arguments into a call that can be started: by a program, a kernel, or MPI's own collective.

Wrong arguments are bound, too, to a call by which all ranks learn of the error. Bound calls are kept for later calls
with the same arguments: C keeps those on host memory, also for calls that differ in lengths or counts alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mpi4py import MPI

from ..errors import ArgumentError, BufferTypeError, CollectiveTimeout, MismatchError, PeerLost, RemoteError
from ..planning.plan import Rule
from ..program.call import Call
from ..transport.announcement import Called, Delegated
from ..transport.host.host_call import HostBuffers, HostCall, entry
from ..transport.host.host_program import HostProgram
from ..transport.host.shared_window import NoRoom
from ..transport.interface import BoundCall
from ..util.lru import LRU
from .agreeing import DelegatedByPeer, agreed, differ
from .arguments import InBlocks, Lengths, NeedsNumbers, Prepared
from .bootstrap import check_timeout
from .buffers import DelegatedToMPI
from .call_keys import KeptMemory, OwnMemory, own_bytes
from .calls_without_program import EntryCall, MpiCall, RefusedCall
from .collectives import Invocation, announced, describe
from .cuda.buffers import stream_address, tensor_types
from .delegation import told
from .foreign import EXCHANGE
from .other_lengths import OtherLengths
from .ranks.interface import NO_MPI
from .requests import HostRequest
from .sequence import KEPT_CALLS, CallSequence

if TYPE_CHECKING:
    from ..transport.host.block_call import BlockCall
    from ..transport.host.pending_calls import Finish
    from .cuda.calls import CudaCalls

PROGRAMS = 8192  # programs kept for calls with other buffers


class Binder:
    """Binds the calls of a communicator.

    Attributes:
        calls: those that are kept, and that C does not keep.
        own: memory of our own that calls use one after another.
    """

    def __init__(self, sequence: CallSequence, cuda: CudaCalls | None) -> None:
        self.sequence, self.context, self.host, self.cuda = sequence, sequence.context, sequence.host, cuda
        self.repeated = sequence.repeated
        self.calls: LRU[tuple[Any, ...], BoundCall] = LRU(KEPT_CALLS)
        self.programs: LRU[tuple[Call, bool], tuple[Rule | None, HostProgram | None]] = LRU(PROGRAMS)
        self.lengths = OtherLengths(self)
        self.kept, self.own = KeptMemory(), OwnMemory()

    def prepare(
        self, invocation: Invocation, timeout_s: float | None, stream: Any
    ) -> Prepared | NeedsNumbers | Exception:
        """Check this rank's arguments. An error is returned: the peers must learn of it before it is raised."""
        self.sequence.check_alive()
        context, method = self.context, invocation.method
        try:
            if timeout_s is not None:
                check_timeout(timeout_s)
            address = stream_address(stream)
            extra = (self.sequence.number_of_each,) if method.exchanges else ()
            ready: Prepared | NeedsNumbers = method.prepare(context.rank, context.n, *invocation.args, *extra)
            if ready.on_device and context.gpus is None:
                raise BufferTypeError(f"{method.name} of GPU memory: {context.why_no_gpus}; pass NumPy copies")
            if address is not None and not ready.on_device:
                raise ArgumentError("stream= is for buffers in GPU memory; leave it out, or pass GPU arrays")
            if ready.on_device and context.gpus is not None:
                context.gpus.check(method.name, ready.buffers if isinstance(ready, NeedsNumbers) else ready)
            if isinstance(ready, Prepared) and ready.final is not None and ready.recv is None:
                ready = ready.received_in(self.own.room(ready.final.nbytes))
            return ready
        except (MismatchError, RemoteError, CollectiveTimeout, PeerLost):  # raised by an exchange, on every rank
            raise
        except DelegatedToMPI as why:
            if not context.has_mpi:
                return BufferTypeError(f"{method.name}: {why}, {NO_MPI}")
            return type(why)(*why.args)  # without its traceback: the frames would keep the user's buffers alive
        except Exception as error:
            return error

    def bind(
        self,
        invocation: Invocation,
        timeout_s: float | None,
        stream: Any,
        key: tuple[Any, ...] | None,
        *,
        repeats: bool = False,
    ) -> BoundCall:
        """A blocking call with these arguments, which is kept if it can be made again.

        Args:
            key: by which Python finds it again; None if it does not.
            repeats: whether C may find it again.
        """
        sequence = self.sequence
        deadline = sequence.deadline(timeout_s)
        ready = agreed(sequence, self.prepare(invocation, timeout_s, stream), invocation.name, deadline)
        repeats = repeats or isinstance(ready, InBlocks)
        if isinstance(ready, Prepared) and ready.on_device and self.cuda is not None:
            args = invocation.args if (repeats or ready.blocks) and timeout_s is None else ()
            bound: BoundCall = sequence.guarded(partial(self.cuda.bind, ready, stream, deadline, args))
        else:
            bound = self.bind_host(ready, invocation, deadline, blocking=True, owns=not repeats)
            if isinstance(bound, HostCall) and repeats and self._known_to_c(bound, invocation):
                self.lengths.offer(ready, invocation, pending=False)
                return bound
            if isinstance(ready, InBlocks) and isinstance(bound, HostCall) and key is None:
                self.lengths.block_calls.put((ready.moves, False), cast("BlockCall", bound))
        if key is not None and bound.reusable:
            self.calls.put(key, bound)
        return bound

    def known_pending(self, ready: Prepared | InBlocks, invocation: Invocation) -> bool:
        """Let C begin a non-blocking call by itself from now on, if it can; not behind others that it has not begun."""
        repeated = self.repeated
        if (
            self.sequence.thread.busy
            or self.host.messages is not None
            or not repeated.serve(HostRequest, _ended_by(weakref.ref(self.sequence)))
        ):
            return False
        bound = self.bind_host(ready, invocation, self.context.timeout_s, blocking=False, owns=False)
        known = isinstance(bound, HostCall) and self._known_to_c(bound, invocation, pending=True)
        if known:
            self.lengths.offer(ready, invocation, pending=True)
            repeated.open()
        return known

    def _known_to_c(self, bound: HostCall, invocation: Invocation, *, pending: bool = False) -> bool:
        """Let C find a call by itself from now on, if it can; a group's are its own to find."""
        if invocation.method.grouped:
            return False
        if tensors := tensor_types():
            self.repeated.read_tensors(tensors, getattr(tensors[0], EXCHANGE, None))
        return self.repeated.keep(bound, invocation.method, invocation.args, pending=pending)

    def bind_host(
        self,
        ready: Prepared | InBlocks | Exception,
        invocation: Invocation,
        deadline: float,
        *,
        blocking: bool,
        owns: bool,
        begun: MPI.Request | None = None,
    ) -> BoundCall:
        """A call on host memory: by a program, by MPI, or one that only tells the peers why it is not made.

        Args:
            owns: whether it keeps its buffers alive, which one that may be made again must not.
            begun: MPI's own, where it has begun.
        """
        if isinstance(ready, DelegatedToMPI):
            self.sequence.check_delegated(invocation)
            entered, why = isinstance(ready, DelegatedByPeer), str(ready)
            said = Delegated(invocation.name, "" if entered else told(invocation, self.context.rank, self.context.n))
            return MpiCall(
                self.context, invocation, said, deadline, why, again=self.sequence.next, entered=entered, begun=begun
            )
        if not isinstance(ready, Prepared | InBlocks):
            return RefusedCall(self.host, ready, deadline)
        try:
            if isinstance(ready, InBlocks):
                timeout_s = deadline if owns else self.context.timeout_s
                return self.lengths.blocks(ready, invocation.name, timeout_s, owns=owns)
            rule, program = self.program(ready.call, blocking=blocking)
        except NoRoom as full:
            if invocation.method.grouped or self.context.options.strict:
                return RefusedCall(self.host, full, deadline)
            self.context.warn_once(f"MPI's own collectives carry the calls, because {full}")
            delegated = DelegatedToMPI(str(full))
            return self.bind_host(delegated, invocation, deadline, blocking=blocking, owns=owns, begun=begun)
        except Exception as error:
            return RefusedCall(self.host, error, deadline)
        called = Called(ready.said) if ready.said else announced(ready.call)
        owns = owns or not self.kept.may_have(own_bytes(ready, program))
        usual = self.context.timeout_s  # a kept call gets its own timeout when it is run
        if program is not None:
            buffers = HostBuffers(ready.send, ready.recv, ready.final, ready.before, ready.after)
            return HostCall(self.host, program, called, buffers, deadline if owns else usual, owns=owns)
        if rule is None:
            return entry(self.host, called, usual if blocking else deadline) or EntryCall(
                self.host, called, deadline, nbytes=0
            )
        held = invocation if owns else invocation.unowned()
        return MpiCall(self.context, held, called, deadline, again=self.sequence.next, nbytes=ready.call.nbytes)

    def program(self, call: Call, *, blocking: bool) -> tuple[Rule | None, HostProgram | None]:
        """How to make a call, by the plan's table: its rule and its program.

        Without a program it is MPI's own; without a rule there is nothing to move.
        """
        found = self.programs.find((call, blocking))
        if found is None:
            rule, program = None, None
            if call.total:
                rule = self.context.rule(call, blocking=blocking)
                if rule.scheme != "mpi" and not self.host.window.full:
                    program = self.context.load(call, rule)
                how = program.said(rule.scheme) if program is not None else "MPI's own"
                self.context.say(partial("{}: {}; {}".format, describe(call), how, rule.reason), "INFO")
            found = rule, program
            self.programs.put((call, blocking), found)
        return found

    def differ(self, lengths: Lengths, text: str, collective: str, timeout_s: float) -> NoReturn:
        """Raise, on every rank, where two ranks expect different lengths of a call."""
        differ(self.sequence, lengths, text, collective, timeout_s)

    def forget(self) -> None:
        """Bind every call anew: buffers were registered, or the plan is another one."""
        self.repeated.forget()
        self.kept = KeptMemory()
        self.calls.clear()
        self.lengths.block_calls.clear()
        if self.cuda is not None:
            self.cuda.forget()


def _ended_by(sequence: weakref.ref[CallSequence]) -> Callable[[], Finish | None]:
    """What the thread asks that looks after non-blocking calls, and must not keep their communicator."""

    def by() -> Finish | None:
        alive = sequence()
        return alive.end_pending if alive is not None else None

    return by
