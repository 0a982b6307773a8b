"""File descriptors from process to process of one user, over Unix sockets (``SCM_RIGHTS``).

No process looks into another one (``ptrace``, ``pidfd_getfd``), so containers and Yama do not forbid it. Addresses are
abstract: they are no files, and end with their process.
"""

import os
import socket
import struct
from collections.abc import Sequence

from ....errors import DeviceError

TIMEOUT_S = 60.0  # of an answer
OK = b"ok"
CREDENTIALS = struct.Struct("3i")  # process, user, group


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
        listener.settimeout(timeout_s)
        for _ in range(len(addresses) - 1):
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(timeout_s)
                if not _is_ours(peer):
                    raise DeviceError("a process of another user spoke on a socket of ours; start the job again")
                source, many = struct.unpack("ii", peer.recv(8))
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
    except OSError:
        made.close()
        raise
    return made


def _is_ours(peer: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(told)[1] == os.getuid())
