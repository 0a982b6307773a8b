"""``Dispatcher`` makes the calls of a communicator: look it up or bind it, give it a number, start it, wait for it.

1. Earlier non-blocking calls are waited for: calls keep their order.
2. A call that was made before with the same arguments is found, bound to its program and buffers. Otherwise its
   arguments are checked, and it is bound: to a program on CPU ranks, a kernel on a GPU, or MPI's own collective. A rank
   whose arguments are wrong makes a call, too, by which all ranks learn of it.
3. It takes the next number and is started; every transport compares it with the peers' before data is touched.
4. Unless it is only put on a stream, it is waited for, under its deadline. After an error in its middle the
   communicator is dead; a call that all ranks refused together changes nothing.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mpi4py import MPI

from ..errors import ArgumentError, BlinkError, BufferTypeError, CollectiveTimeout, MismatchError, PeerLost, RemoteError
from ..planning.plan import Rule
from ..program.call import Call
from ..transport.announcement import Called, Delegated
from ..transport.host.host_call import HostBuffers, HostCall, entry
from ..transport.host.host_program import HostProgram
from ..transport.host.repeated import Found, RepeatedCalls
from ..transport.host.shared_window import NoRoom
from ..transport.host.transport import HostTransport
from ..transport.interface import BoundCall, PeerDelegates, Refused
from ..transport.liveness import died_of
from ..transport.network.bounded import Rendezvous
from ..util.lru import LRU
from .arguments import InBlocks, Lengths, Prepared, Unsettled
from .bootstrap import Options, check_timeout, is_time
from .buffers import DelegatedOp, DelegatedToMPI
from .call_keys import KeptMemory, OwnMemory, key_of, own_bytes, signature_of
from .calls_without_program import EntryCall, MpiCall, RefusedCall, fallback_error
from .children import SPARE_BYTES, Child
from .collectives import CollectiveMethod, Invocation, announced, describe
from .context import Context
from .cuda.buffers import stream_address, tensor_types
from .delegation import told
from .entering import enter
from .foreign import EXCHANGE
from .grouping.group import Groups
from .other_lengths import OtherLengths
from .process_exit import end_with_process, in_child
from .ranks.interface import NO_MPI, Ranks
from .requests import HostRequest, Persistent, ProgressThread
from .settling import DelegatedByPeer, differ, exchange, persist, settled, settled_alone

if TYPE_CHECKING:
    from ..planning.diff import PlanDifference
    from ..transport.host.block_call import BlockCall
    from ..transport.host.pending_calls import Settle, ToSettle
    from .cuda.calls import CudaCalls

BOUND_CALLS = PROGRAMS = 8192  # calls that are kept to be made again; programs, for other buffers
Args = tuple[Any, ...]


class Dispatcher:
    """Makes the calls of one communicator; the arguments are those of its :class:`Context`."""

    def __init__(self, meet: Callable[[Rendezvous], Ranks], options: Options, child: Child | None = None) -> None:
        self.context, self.child = Context(meet, options, child), child
        self.enqueues = options.stream == "current"  # whether calls on GPU memory return before they are through
        self.dead: BaseException | None = None
        self._inside = 0  # the thread that makes a call through Python
        self.context.rendezvous.give_up = self.die
        self.context.rendezvous.check = lambda: self.host.raise_abort(self.seq)
        self.repeated = RepeatedCalls(self.context.host.native, BOUND_CALLS)
        self.calls: LRU[tuple[Any, ...], BoundCall] = LRU(BOUND_CALLS)  # those that C does not keep
        self.programs: LRU[tuple[Call, bool], tuple[Rule | None, HostProgram | None]] = LRU(PROGRAMS)
        self.lengths = OtherLengths(self)
        self.kept, self.own = KeptMemory(), OwnMemory()
        self.thread, self.groups = ProgressThread(), Groups(self)
        self.cuda: CudaCalls | None = None
        if self.context.gpus is not None:
            from .cuda.calls import CudaCalls
            from .cuda.watch import watch

            self.cuda = CudaCalls(self.context.gpus, self.host, self)
            watch(self)
        end_with_process(self)

    @property
    def host(self) -> HostTransport:
        """The transport of CPU ranks, on which the ranks of any call announce it."""
        return self.context.host

    @property
    def seq(self) -> int:
        """The number of the last call."""
        return self.repeated.seq

    @seq.setter
    def seq(self, number: int) -> None:
        self.repeated.seq = number

    # ---- making calls

    def call(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> None:
        """Make a blocking call; with ``stream``, or on the current one if calls are so made, only put it there."""
        earlier = self._come_in()
        try:
            self._make(method, args, timeout_s, stream)
        finally:
            self._inside = earlier

    def _come_in(self) -> int:
        """Note that this thread is inside a call; returns which one was before: none, or this.

        Raises:
            ArgumentError: if another one is. Which of the two calls the peers have made is nobody's to know then.
        """
        me, other = get_ident(), self._inside
        if (other and other != me) or self.repeated.inside:
            error = ArgumentError(
                f"rank {self.context.rank}: two threads are inside calls of one communicator, which MPI forbids; make "
                "calls one after another, or give each thread a communicator of its own (comm.Dup()). This one is dead"
            )
            self.die(error)
            raise error
        self._inside = me
        return other

    def _make(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> None:
        if self.groups.open and self.groups.note(method, args, timeout_s, stream):
            return
        self.drain()
        if stream is None and (timeout_s is None or is_time(timeout_s)):
            found = self.repeated.find(method, args)
            if found is not None:
                self._make_host(found, method, args, timeout_s)
                return
        repeats = method.repeats(args)
        key = key_of(method.prepare, args, stream, method.buffers) if repeats and timeout_s is None else None
        bound = self.calls.find(key) if key is not None else None
        if bound is None:
            if self.groups.made(method, args, timeout_s, stream):
                return
            bound = self._bind(Invocation(method, args), timeout_s, stream, key, repeats=repeats)
        if isinstance(bound, HostCall):
            self._make_host(bound, method, args, timeout_s)
            return
        self.check_alive()
        starts = stream is not None or (self.enqueues and self.cuda is not None and self.cuda.makes(bound))
        self._run(partial(self._numbered, bound.start if starts else bound.run), method, args, timeout_s)
        if starts:
            self.cuda.keep(bound, args, method if key is not None else None, stream)  # type: ignore[union-attr]

    def _make_host(self, bound: HostCall, method: CollectiveMethod, args: Args, timeout_s: float | None) -> None:
        """Make a call on host memory that is bound; C may make the next one."""
        self.check_alive()
        self._run(partial(self._numbered, partial(bound.run, timeout_s=timeout_s)), method, args, timeout_s)
        self.repeated.open()

    def make(self, method: CollectiveMethod, args: Args, stream: Any, timeout_s: float | None = None) -> None:
        """Make a blocking call: C does, if one like it was made before."""
        try:
            begun = self.repeated.again(method, args, stream, False, timeout_s)
            if begun is True:
                return
            if begun is not False:
                self.go_on(method, args, stream, begun, timeout_s)
                return
        except BlinkError:
            raise
        except BaseException as interrupt:  # a signal's, in the middle of the call
            self.die(interrupt)
            raise
        self.call(method, args, timeout_s, stream)

    def again(self, method: CollectiveMethod | str, args: Args, stream: Any) -> Found:
        """Let C make a blocking call that was made before: True; else what :meth:`go_on` does the rest of."""
        try:
            return self.repeated.again(method, args, stream)
        except BaseException as interrupt:  # a signal's, in the middle of the call
            self.die(interrupt)
            raise

    def go_on(
        self, method: CollectiveMethod, args: Args, stream: Any, begun: Found, timeout_s: float | None = None
    ) -> None:
        """Make a blocking call that ``repeated`` has not made, or go on with one that it could not end by itself."""
        if isinstance(begun, bool):
            self.call(method, args, timeout_s, stream)
            return
        earlier = self._come_in()
        own = () if timeout_s is None else (timeout_s,)
        host = begun[0] if isinstance(begun[0], HostCall) else None
        try:
            if host is not None:
                host.made = Invocation(method, args)
            self._run(partial(begun[0].go_on, *begun[1:], *own), method, args, timeout_s)
        finally:
            self._inside = earlier
            if host is not None:
                host.made = None  # which keeps the user's buffers

    def _numbered(self, work: Callable[[int], None]) -> None:
        """Make the next call. It gets its number here, where an interrupt between the two ends the communicator."""
        self.seq += 1
        work(self.seq)

    def _run(self, work: Callable[[], None], method: CollectiveMethod, args: Any, timeout_s: float | None) -> None:
        """Do what makes a call, or MPI's own where a peer delegates it; see :meth:`_guarded`."""
        try:
            work()
        except Refused as refused:
            raise refused.error from None
        except PeerDelegates:
            self._delegate(Invocation(method, args), timeout_s)
        except BaseException as fatal:
            self.die(fatal)
            raise

    def meet(self, what: str) -> None:
        """Wait until all ranks are about to do ``what``; C makes this call, too, where it was made before."""
        begun = self.again(what, (), None)
        if begun is True:
            return
        if begun is not False:
            earlier = self._come_in()
            try:
                self._guarded(partial(begun[0].go_on, *begun[1:]))
            finally:
                self._inside = earlier
            return
        said, timeout_s = Called(what), self.context.timeout_s
        call = entry(self.host, said, timeout_s, counted=False) or EntryCall(self.host, said, timeout_s)
        self.launch(call)
        self.wait(call)
        if isinstance(call, HostCall) and not self.groups.open:
            self.repeated.keep(call, what, ())
            self.repeated.open()

    # ---- non-blocking calls

    def begin(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> MPI.Request:
        """Begin a non-blocking call: C does, if one like it was begun before."""
        request = self.repeated.begin(method, args, timeout_s) if stream is None else None
        if request is None:
            return self.start(method, args, timeout_s, stream)
        request.of = self
        return request  # type: ignore[no-any-return]

    def settle(self, left: tuple[Any, ...]) -> BaseException | None:
        """Bring a non-blocking call to its end that C cannot; returns what it has raised."""
        assert self.repeated.calls is not None
        try:
            return self.repeated.calls.settle(left, self._end)
        except BaseException as interrupt:
            self.die(interrupt)
            raise

    def _end(self, left: ToSettle) -> BaseException | None:
        own = () if left.timeout_s is None else (left.timeout_s,)
        host = left.bound if isinstance(left.bound, HostCall) else None
        try:
            self.check_alive()
            if host is not None:
                host.made = Invocation(left.method, left.args)
            self._run(partial(left.bound.go_on, left.seq, left.status, *own), left.method, left.args, left.timeout_s)
        except BaseException as error:
            return error
        finally:
            if host is not None:
                host.made = None
        return None

    def drain(self) -> None:
        """Wait until all non-blocking calls have ended; another call must not overtake them."""
        if self.thread.busy:
            self.thread.drain()
        self.drain_c()

    def drain_c(self) -> None:
        """Wait until those have ended that C makes."""
        if self.repeated.calls is not None and self.repeated.pending:
            try:
                self.repeated.calls.drain(self._end)
            except BaseException as interrupt:
                self.die(interrupt)
                raise

    def start(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> MPI.Request:
        """Begin a non-blocking call. Arguments are read now; what peers or time do wrong is raised by ``Wait``."""
        earlier = self._come_in()
        try:
            return self._start(method, args, timeout_s, stream)
        finally:
            self._inside = earlier

    def _start(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> MPI.Request:
        self.groups.refuse(f"I{method.name}")
        invocation = Invocation(method, args)
        ready: Prepared | Unsettled | InBlocks | Exception = self.prepare(invocation, timeout_s, stream)
        if isinstance(ready, Prepared | Unsettled) and ready.on_device and self.cuda is not None:
            self.drain()
            ready = settled(self, ready, method.name, self.deadline(timeout_s))
        if isinstance(ready, Prepared) and ready.on_device and self.cuda is not None:
            bound = self._guarded(partial(self.cuda.bind, ready, stream, self.deadline(timeout_s)))
            self.launch(bound)
            return self.cuda.request(bound, args)
        if (alone := settled_alone(self, ready)) is not None and self._kept_pending(alone, invocation):
            request = self.repeated.begin(method, args, timeout_s)
            if request is not None:
                request.of = self
                return request  # type: ignore[no-any-return]
        self.repeated.shut()  # until a call has waited for it
        begun, held = None, invocation
        if isinstance(ready, DelegatedOp):  # on every rank; the user may free the operation at once
            if error := fallback_error(self.context, invocation.name, str(ready)):
                raise error
            begun = invocation.begin(self.context.mpi.public)
        elif isinstance(ready, DelegatedToMPI):
            try:
                held = invocation.held()
            except Exception as error:  # an object that does not show its memory
                ready = error

        def work() -> None:
            try:
                self.drain_c()
                self.make_prepared(ready, held, self.deadline(timeout_s), begun)
            finally:
                held.free()

        request = self.thread.begin(work, self.context.log_once)
        if isinstance(ready, Prepared | Unsettled | InBlocks | DelegatedToMPI):
            return request
        raise ready  # as MPI does, and the peers learn of it

    def _kept_pending(self, ready: Prepared | InBlocks, invocation: Invocation) -> bool:
        """Let C begin a non-blocking call by itself from now on, if it can; not behind others that it has not begun."""
        repeated = self.repeated
        if (
            self.thread.busy
            or self.host.messages is not None
            or not repeated.serve(HostRequest, _ended_by(weakref.ref(self)))
        ):
            return False
        bound = self._bind_host(ready, invocation, self.context.timeout_s, blocking=False, owns=False)
        kept = isinstance(bound, HostCall) and self._known_to_c(bound, invocation, pending=True)
        if kept:
            self.lengths.offer(ready, invocation, pending=True)
            repeated.open()
        return kept

    def persist(self, method: CollectiveMethod, args: Args, stream: Any) -> Persistent | None:
        """A call to be started many times; None if its buffers lie in host memory, and MPI has such calls."""
        self.groups.refuse(f"{method.name}_init")
        return persist(self, method, args, stream)

    def exchange(self, count: int) -> tuple[int, ...]:
        """Every rank's number, for what a call must know before it can begin."""
        self.drain()
        return tuple(row[0] for row in exchange(self, (count,), self.context.timeout_s))

    # ---- binding

    def _bind(
        self,
        invocation: Invocation,
        timeout_s: float | None,
        stream: Any,
        key: tuple[Any, ...] | None,
        *,
        repeats: bool = False,
    ) -> BoundCall:
        """A call with these arguments, which is kept if it can be made again; it refuses what cannot be made."""
        signature = signature_of(key, invocation.args) if key is not None and self.cuda is not None else None
        if signature is not None:
            elsewhere: BoundCall | None = self._guarded(partial(self.cuda.elsewhere, signature))  # type: ignore[union-attr]
            if elsewhere is not None:
                self.calls.put(key, elsewhere)  # type: ignore[arg-type]
                return elsewhere
        deadline = self.deadline(timeout_s)
        ready = settled(self, self.prepare(invocation, timeout_s, stream), invocation.name, deadline)
        repeats = repeats or isinstance(ready, InBlocks)
        if isinstance(ready, Prepared) and ready.on_device and self.cuda is not None:
            bound: BoundCall = self._guarded(partial(self.cuda.bind, ready, stream, deadline, signature))
        else:
            bound = self._bind_host(ready, invocation, deadline, blocking=True, owns=not repeats)
            if isinstance(bound, HostCall) and repeats and self._known_to_c(bound, invocation):
                self.lengths.offer(ready, invocation, pending=False)
                return bound
            if isinstance(ready, InBlocks) and isinstance(bound, HostCall) and key is None:
                self.lengths.block_calls.put((ready.moves, False), cast("BlockCall", bound))
        if key is not None and bound.reusable:
            self.calls.put(key, bound)
        return bound

    def _known_to_c(self, bound: HostCall, invocation: Invocation, *, pending: bool = False) -> bool:
        """Let C find a call by itself from now on, if it can; a group's are its own to find."""
        if invocation.method.grouped:
            return False
        if tensors := tensor_types():
            self.repeated.read_tensors(tensors, getattr(tensors[0], EXCHANGE, None))
        return self.repeated.keep(bound, invocation.method, invocation.args, pending=pending)

    def _bind_host(
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

        ``owns``: whether it keeps its buffers alive, which one that may be made again must not.
        """
        if isinstance(ready, DelegatedToMPI):
            self.groups.check_delegated(invocation)
            entered, why = isinstance(ready, DelegatedByPeer), str(ready)
            said = Delegated(invocation.name, "" if entered else told(invocation, self.context.rank, self.context.n))
            return MpiCall(
                self.context, invocation, said, deadline, why, again=self._next, entered=entered, begun=begun
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
            return self._bind_host(delegated, invocation, deadline, blocking=blocking, owns=owns, begun=begun)
        except Exception as error:
            return RefusedCall(self.host, error, deadline)
        called = Called(ready.said) if ready.said else announced(ready.call)
        owns = owns or not self.kept.may_have(own_bytes(ready, program))
        usual = self.context.timeout_s  # of a call that may be made again, which is told another one when it is run
        if program is not None:
            buffers = HostBuffers(ready.send, ready.recv, ready.final, ready.before, ready.after)
            return HostCall(self.host, program, called, buffers, deadline if owns else usual, owns=owns)
        if rule is None:
            return entry(self.host, called, usual if blocking else deadline) or EntryCall(
                self.host, called, deadline, nbytes=0
            )
        held = invocation if owns else invocation.unowned()
        return MpiCall(self.context, held, called, deadline, again=self._next, nbytes=ready.call.nbytes)

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

    def prepare(self, invocation: Invocation, timeout_s: float | None, stream: Any) -> Prepared | Unsettled | Exception:
        """Check this rank's arguments. An error is returned: the peers must learn of it before it is raised."""
        self.check_alive()
        context, method = self.context, invocation.method
        try:
            if timeout_s is not None:
                check_timeout(timeout_s)
            address = stream_address(stream)
            extra = (self.exchange,) if method.exchanges else ()
            ready: Prepared | Unsettled = method.prepare(context.rank, context.n, *invocation.args, *extra)
            if ready.on_device and context.gpus is None:
                raise BufferTypeError(f"{method.name} of GPU memory: {context.why_no_gpus}; pass NumPy copies")
            if address is not None and not ready.on_device:
                raise ArgumentError("stream= is for buffers in GPU memory; leave it out, or pass GPU arrays")
            if ready.on_device and context.gpus is not None:
                context.gpus.check(method.name, ready.buffers if isinstance(ready, Unsettled) else ready)
            if isinstance(ready, Prepared) and ready.final is not None and ready.recv is None:
                ready = ready.received_in(self.own.room(ready.final.nbytes))
            return ready
        except (MismatchError, RemoteError, CollectiveTimeout, PeerLost):  # of an exchange: all ranks know
            raise
        except DelegatedToMPI as why:
            if not context.has_mpi:
                return BufferTypeError(f"{method.name}: {why}, {NO_MPI}")
            return type(why)(*why.args)  # without the traceback, whose frames keep the user's buffers
        except Exception as error:
            return error

    def differ(self, lengths: Lengths, text: str, collective: str, timeout_s: float) -> NoReturn:
        """Raise, on every rank, where two ranks expect different lengths of a call."""
        differ(self, lengths, text, collective, timeout_s)

    def deadline(self, timeout_s: float | None) -> float:
        """The time that a call may wait; a bad one is an error that the peers are told of, in the time of all."""
        return float(timeout_s) if timeout_s is not None and is_time(timeout_s) else self.context.timeout_s

    # ---- starting and waiting, where it is not one step

    def make_prepared(
        self,
        ready: Prepared | Unsettled | InBlocks | Exception,
        invocation: Invocation,
        deadline: float,
        begun: MPI.Request | None = None,
    ) -> None:
        """Bind and make a call whose arguments were checked, in the progress thread; ``begun`` by MPI, if it is so."""
        self.check_alive()
        made = settled(self, ready, invocation.name, deadline)
        bound = self._bind_host(made, invocation, deadline, blocking=False, owns=True, begun=begun)
        self._run(partial(self._numbered, bound.run), invocation.method, invocation.args, deadline)

    def _delegate(self, invocation: Invocation, timeout_s: float | None) -> None:
        """Make MPI's collective in a call that another rank delegated; all ranks have entered it."""
        self.groups.check_delegated(invocation)
        said, why = Delegated(invocation.name), "another rank's arguments are MPI's"
        call = MpiCall(self.context, invocation, said, self.deadline(timeout_s), why, again=self._next, entered=True)
        self._guarded(lambda: call.run(self.seq))

    def _next(self) -> int:
        """The number of a call that goes with the one that is made."""
        self.seq += 1
        return self.seq

    def launch(self, bound: BoundCall) -> None:
        """Give a bound call its number and start it, behind all non-blocking calls on host memory."""
        earlier = self._come_in()
        try:
            self.drain()
            self.check_alive()
            self._guarded(partial(self._numbered, bound.start))
        finally:
            self._inside = earlier

    def wait(self, bound: BoundCall) -> None:
        """Wait for a started call."""
        self._guarded(bound.wait)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Do a part of a call: what it raises kills the communicator, unless all ranks refused the call together."""
        try:
            return work()
        except Refused as refused:
            raise refused.error from None
        except BaseException as fatal:
            self.die(fatal)
            raise

    # ---- another plan, other buffers, the end

    def forget(self) -> None:
        """Bind every call anew: buffers were registered, or the plan is another one."""
        self.repeated.forget()
        self.kept = KeptMemory()
        self.calls.clear()
        self.lengths.block_calls.clear()
        if self.cuda is not None:
            self.cuda.by_signature.clear()

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe the machine again, plan, and go on with the new plan; collective. Returns what is different."""
        self.drain()
        self.check_alive()
        if self.cuda is not None:
            self.cuda.thread.drain()
        enter(self, "replan()", lambda: None)
        changes: tuple[PlanDifference, ...] = self._guarded(self.context.replan)
        self.programs.clear()
        self.forget()
        return changes

    def check_alive(self) -> None:
        """Raise PeerLost if an earlier call left the communicator dead."""
        if self.dead is not None:
            raise died_of(self.dead) from self.dead

    def check(self) -> None:
        """Raise what has gone wrong since the last call."""
        self.check_alive()
        if self.cuda is not None:
            self._guarded(self.cuda.check)

    def close(self) -> None:
        """Free everything: collectively, or, if the communicator is dead, only what is local.

        What another communicator of the same ranks can go on with is kept for that.
        """
        self.thread.close()
        self.drain_c()
        if self.cuda is not None:
            self.cuda.close()
        if self.dead is not None:
            self.repeated.close()
            self.host.helper.close()
            self.die(self.dead)
            return
        self.seq += 1
        failed: BaseException | None = None
        try:
            self.host.barrier(self.seq, Called("free()"), self.context.timeout_s)
        except BaseException as error:
            failed = error.error if isinstance(error, Refused) else error
        if failed is not None:
            self.die(failed)
            raise failed  # out here, so that what the user's code raised before is shown too
        if not self._spared(freed=True):
            self.end()

    def end(self) -> None:
        """Free everything; collective, when all have come."""
        self.repeated.close()
        self.context.close_spares()
        self.forget()
        self.programs.clear()
        self.context.close()

    def rest(self) -> None:
        """Do nothing, until :meth:`wake`."""
        self.context.rest()

    def wake(self) -> None:
        """Be there for calls again."""
        self.context.wake()

    def _spared(self, *, freed: bool) -> bool:
        """Keep it for another communicator of the same ranks, if that may be; whether it is kept.

        Args:
            freed: by all ranks, and not only dropped by this one: then it may be kept on all of them or on none.
        """
        child, context = self.child, self.context
        asked = self.repeated.calls is not None  # whether a thread looks after calls that do not block
        if child is None or not context.may_be_spare or asked or self.groups.open:
            return False
        if context.host.window.held > SPARE_BYTES:
            if not freed:  # others may still read what it holds
                return False
            self.forget()
            self.programs.clear()
            context.host.give_back_slots()
        self.rest()
        return child.parent.spares.put(child.ranks, context.number, self)

    def serve(self, child: Child) -> None:
        """Make the calls of another communicator."""
        self.child = child
        self.context.serve(child)

    def drop(self) -> None:
        """Give back what is this process's, where the user holds the communicator no more and has not freed it.

        Not on GPUs or several nodes, whose memory only all ranks free together.
        """
        if self.dead is None and self.cuda is None and self.host.messages is None:
            self.thread.behind(self._dropped, later=self.repeated.pending > 0)

    def _dropped(self) -> None:
        self.drain_c()
        if self.dead is None and not self._spared(freed=False):
            self.discard()

    def discard(self) -> None:
        """Give back what is this process's; nobody makes calls any more."""
        self.repeated.close()
        self.dead = PeerLost("it was dropped without Free()")
        self.thread.end()
        self.forget()
        self.programs.clear()
        self.context.drop()

    def die(self, error: BaseException) -> None:
        """Never use the communicator again, and tell the peers why. Safe to call twice."""
        self.dead = self.dead or error
        self.repeated.shut()
        self.repeated.give_up(died_of(self.dead))
        if in_child():  # its parent's peers are not told of it
            return
        if self.context.gpus is not None:
            self.context.gpus.transport.abort()
        self.host.abort(self.dead)
        self.context.end_trace()
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        context = self.context
        context.ranks.leave(context.host, context.timeout_s, lambda: context.open_mpi_call, context.settings)


def _ended_by(dispatcher: weakref.ref[Dispatcher]) -> Callable[[], Settle | None]:
    """What the thread asks that looks after non-blocking calls, and must not keep their communicator."""

    def by() -> Settle | None:
        alive = dispatcher()
        return alive._end if alive is not None else None

    return by
