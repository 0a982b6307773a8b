"""File descriptors from process to process of one user, over Unix sockets (``SCM_RIGHTS``).

No process looks into another one (``ptrace``, ``pidfd_getfd``), so containers and Yama do not forbid it. Addresses are
abstract: they are no files, and end with their process.
"""

import os
import socket
import struct
import time
from collections.abc import Sequence

from ....errors import DeviceError
from ...processes import peer_of

TIMEOUT_S = 60.0  # of an answer
OK = b"ok"


def listen() -> tuple[socket.socket, bytes]:
    """A socket that waits for peers, and its address."""
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.bind("")  # the kernel finds a name
        made.listen(64)
    except OSError as error:
        raise DeviceError(f"no Unix socket to share memory by: {error}; use comm.register() instead") from error
    return made, made.getsockname()


def exchange(
    listener: socket.socket, addresses: Sequence[bytes], rank: int, own: Sequence[int], timeout_s: float = TIMEOUT_S
) -> list[list[int]]:
    """Give descriptors to all ranks and get everybody's; all call it, each with its :func:`listen`.

    Raises:
        DeviceError: if one does not send its own in time.
    """
    found: list[list[int]] = [[] for _ in addresses]
    made = []
    try:
        for address in (a for r, a in enumerate(addresses) if r != rank):
            made.append(_connected(address, timeout_s))
            made[-1].send(struct.pack("ii", rank, len(own)))
            for descriptor in own:
                socket.send_fds(made[-1], [OK], [descriptor])
        waited = set(range(len(addresses))) - {rank}
        until = time.monotonic() + timeout_s
        while waited:
            listener.settimeout(max(0.001, until - time.monotonic()))
            peer, _ = listener.accept()
            with peer:
                if not _is_ours(peer):  # anybody may connect, and is not heard
                    continue
                peer.settimeout(timeout_s)
                source, many = struct.unpack("ii", peer.recv(8))
                if source not in waited:
                    raise DeviceError(f"a process calls itself rank {source} on a socket of rank {rank}; "
                                      "start the job again")  # fmt: skip
                waited.remove(source)
                for _ in range(many):
                    found[source] += socket.recv_fds(peer, len(OK), 1)[1]
    except (OSError, struct.error, DeviceError) as error:
        for descriptor in (d for some in found for d in some):
            os.close(descriptor)
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(f"ranks could not exchange file descriptors: {error}; start the job again") from error
    finally:
        for one in made:
            one.close()
    return found


def _connected(address: bytes, timeout_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout_s)
    try:
        made.connect(address)
        if not _is_ours(made):
            raise DeviceError("another user's process listens where a rank should; start the job again")
    except (OSError, DeviceError):
        made.close()
        raise
    return made


def _is_ours(peer: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    return peer_of(peer)[1] == os.getuid()
