"""blinkmpi: collectives that use every link a machine really has.

``Communicator`` takes the place of an mpi4py communicator, and ``StoreCommunicator`` serves
processes that MPI did not start. Importing this package only defines names: no MPI, no GPU, no probing.

What users see:

``communicator``  mpi4py's signatures: the methods of ``collectives``, and MPI's own, ``guarded`` against GPU memory;
                  ``store_communicator`` is its like without MPI, ``planned`` what both share
``world``         a Communicator in the place of ``MPI.COMM_WORLD``, for ``blinkmpi run``
``torch``         the backend ``blink`` of ``torch.distributed``
``nccl``          calls of unchanged programs that use NCCL
``lang``          collectives that users write
``cli``           the commands; behind them ``bench``, ``doctor``, ``measure``, ``top``, ``plot``, ``launch``
``errors``        what is raised

What carries a call, in the order of its life (docs/life_of_a_call.md):

``topology``      the machine
``trees``         packings of spanning trees into its links, and their proofs
``planning``      the plan of a job, and the row of its table that a call takes; ``forecast`` predicts on CPU ranks
``program``       a call as stages and channels: made, proved, interpreted, priced
``runtime``       from the user's arguments to a call that can be started, and to its end
``transport``     the executors: shared memory, GPUs, messages between nodes
``util``          what several of these need
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    ArgumentError,
    BlinkError,
    BufferTypeError,
    CannotGrow,
    CannotShrink,
    CollectiveTimeout,
    DeviceError,
    FallbackError,
    FormatError,
    MismatchError,
    NoPackingError,
    PeerLost,
    PlanError,
    PoolExhausted,
    PoolInUse,
    RemoteError,
    SettingsError,
    TopologyError,
    TraceError,
)
from .util.lazy import lazily

if TYPE_CHECKING:
    from .communicator import Communicator
    from .store_communicator import StoreCommunicator
else:
    __getattr__, __dir__ = lazily(  # and with them MPI
        __name__, {"communicator": ("Communicator",), "store_communicator": ("StoreCommunicator",)}
    )

__version__ = "0.2.0"
__all__ = [
    "ArgumentError",
    "BlinkError",
    "BufferTypeError",
    "CannotGrow",
    "CannotShrink",
    "CollectiveTimeout",
    "Communicator",
    "DeviceError",
    "FallbackError",
    "FormatError",
    "MismatchError",
    "NoPackingError",
    "PeerLost",
    "PlanError",
    "PoolExhausted",
    "PoolInUse",
    "RemoteError",
    "SettingsError",
    "StoreCommunicator",
    "TopologyError",
    "TraceError",
]
