"""blinkmpi: collectives that use every link a machine really has.

``Communicator`` takes the place of an mpi4py communicator, and ``StoreCommunicator`` serves
processes that MPI did not start. Importing this package only defines names: no MPI, no GPU, no probing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    ArgumentError,
    BlinkError,
    BufferTypeError,
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
    no_mpi_has_a_remedy,
)

if TYPE_CHECKING:
    from .communicator import Communicator
    from .store_communicator import StoreCommunicator

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "BlinkError",
    "BufferTypeError",
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


def __getattr__(name: str) -> Any:
    """Load a communicator's class (and with it MPI) when it is first asked for."""
    with no_mpi_has_a_remedy():
        if name == "Communicator":
            from .communicator import Communicator

            return Communicator
        if name == "StoreCommunicator":
            from .store_communicator import StoreCommunicator

            return StoreCommunicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
