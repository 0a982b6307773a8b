"""blinkmpi: collectives that use every link a machine really has.

``Communicator`` takes the place of an mpi4py communicator, and ``StoreCommunicator`` serves
processes that MPI did not start. Importing this package only defines names: no MPI, no GPU, no probing.
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
