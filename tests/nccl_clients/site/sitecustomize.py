"""Python imports this as it starts, where this folder is in PYTHONPATH: as a process ends, whose its NCCL calls were.

The programs stay as they are. A process that is killed, or ends without Python's end, writes nothing.
"""

import atexit
import os
from pathlib import Path


def tell() -> None:
    """Write the door's status of this process, if it has one."""
    import msgspec

    from blinkmpi.nccl.status import of_process

    found = of_process(os.getpid())
    if found is not None:
        path = Path(os.environ["NCCL_CLIENTS_STATUS"], f"{os.getpid()}.json")
        path.write_bytes(msgspec.json.encode(found))


if os.environ.get("NCCL_CLIENTS_STATUS") and "LD_PRELOAD" in os.environ:
    atexit.register(tell)
