"""``ProcessGroupBlink``: a group for torchft, which makes it anew for each set of replicas that go on.

torchft (0.2 by ``configure``, newer ones by ``reconfigure``) calls it with a part of a store that nobody has used
before. What there is, is aborted then, without waiting for ranks that may be gone. The processes are those of one node,
since MPI has not started them.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from ..collectives import dispatcher_of
from ..runtime.dispatch import Dispatcher
from .group import BlinkGroup
from .start import by_store, keywords_of

GOES_ON = "torchft's next quorum goes on without it"  # what there is to do when a rank is lost


class ProcessGroupBlink(ProcessGroupWrapper):  # type: ignore[misc]
    """torchft's process group over blinkmpi, for its ``Manager``.

    Errors of calls are blinkmpi's, raised within the timeout on all ranks; the Manager takes them for a failed step.

    Args:
        timeout: of calls, and of the making of a group.
        options: keyword arguments of the StoreCommunicator.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), **options: Any) -> None:
        super().__init__(timeout)
        self._options = options
        self._error: BaseException | None = None  # of a group that was aborted
        self._aborted: list[Dispatcher] = []  # what made the calls of such, in which a thread may still be

    def getBackendName(self) -> str:
        """The name of torchft's backends, and this one's."""
        return "torchft-blink"

    def _create_pg(self, store: Any, rank: int, world_size: int) -> BlinkGroup:
        """The group of these ranks, which all come here.

        Raises:
            CollectiveTimeout, PeerLost: if one does not. BlinkError: what kept a rank from opening it.
        """
        self._give_back()
        self._error = None
        keywords = keywords_of(self._options, self._timeout)
        open_comm = partial(by_store, store, rank, world_size, keywords)
        group = BlinkGroup(store, rank, world_size, self._timeout, open_comm, "torchft")
        group.comm.context.say_of_loss(GOES_ON)
        return group

    def abort(self, errored: bool = True) -> None:
        """End the calls of all ranks at once; a group can be made anew then."""
        group = self._pg
        super().abort(errored)
        if group is not None:
            dispatcher = dispatcher_of(group.comm)
            self._aborted.append(dispatcher)
            self._error = dispatcher.sequence.dead if errored else None

    def shutdown(self) -> None:
        """As :meth:`abort`: the other ranks may be gone, and are not waited for."""
        self.abort(errored=False)
        self._give_back()

    def _give_back(self) -> None:
        while self._aborted:
            self._aborted.pop().leave_behind()

    def errored(self) -> Exception | None:
        """What has ended the group, so that it must be made anew; None while it lives."""
        group = self._pg
        found = self._error if group is None else dispatcher_of(group.comm).sequence.dead
        return found if isinstance(found, Exception) else None

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls that have no timeout of their own, and for groups to come."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)
