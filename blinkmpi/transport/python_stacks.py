"""Ask another process of this machine what its Python does: for warnings of a wait, and for the error that ends it.

While a process has a communicator, a thread of it sleeps in ``accept`` on a socket (in Linux's abstract namespace, so
there is no file) and answers each connection of the same user with the stack of the main thread, and with the exchanges
that the process has come to. It costs nothing while nobody asks.

Abstract names belong to whoever binds them first, whatever user that is. So a name ends in random letters, which nobody
can take beforehand; who asks finds it in the kernel's list of sockets, and asks only a listener of which the kernel
says that it is that process, of the same user.
"""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from ..util.text import brief
from .control_pages import start_time
from .processes import VISIBLE, JobProcess, peer_of

ASK_SECONDS = 1.0
FRAMES = 12  # of a stack that are told, the innermost ones
LONGEST = 64 << 10  # bytes of an answer
SOCKETS = Path("/proc/net/unix")
CAME_TO: dict[str, int] = {}  # by the name of a communicator: the last of its exchanges that this process has begun


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What a process says."""

    stack: list[str]  # of the main thread, the innermost frame last
    came_to: dict[str, int]


class _Service:
    """The thread that answers."""

    def __init__(self) -> None:
        self.users = 0
        self.listener: socket.socket | None = None
        self.lock = threading.Lock()

    def open(self) -> None:
        with self.lock:
            self.users += 1
            if self.users > 1:
                return
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(b"\0" + _name(os.getpid(), start_time(os.getpid()) or 0) + secrets.token_hex(8).encode())
                listener.listen(64)
            except OSError:  # not Linux: who asks says that there was no answer
                listener.close()
                return
            self.listener = listener
            threading.Thread(target=_answer_all, args=(listener,), name="blinkmpi-answers", daemon=True).start()

    def close(self) -> None:
        with self.lock:
            self.users = max(0, self.users - 1)
            listener = None if self.users else self.listener
            if listener is not None:
                self.listener = None
                listener.shutdown(socket.SHUT_RDWR)  # which ends accept()

    def forget(self) -> None:
        """In a forked child, which has no such thread."""
        self.lock, self.users = threading.Lock(), 0
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.close()


_service = _Service()
open_service, close_service = _service.open, _service.close
os.register_at_fork(after_in_child=_service.forget)


def ask(process: JobProcess, seconds: float = ASK_SECONDS) -> Answer | str:
    """What a process says, or why it says nothing, in words."""
    if process not in VISIBLE:
        return "on another machine, and was not asked"
    since, body, why_not = time.monotonic(), bytearray(), "it has no communicator of blinkmpi yet"
    for address in _addresses(process):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.settimeout(seconds)
                asking.connect(address)
                if another := _is_another(asking, process):
                    why_not = another
                    continue
                while len(body) < LONGEST and (part := asking.recv(LONGEST)):
                    body += part
                    asking.settimeout(max(0.01, seconds - (time.monotonic() - since)))
                return _read(body)
            except ConnectionRefusedError:  # it closes this moment
                continue
            except TimeoutError:
                return (
                    f"does not answer within {max(0.1, round(seconds, 1)):g} s (it holds Python's lock, or has no time)"
                )
            except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                why_not = brief(str(error))
    return f"cannot be asked ({why_not})"


def _read(body: bytes | bytearray) -> Answer:
    """An answer, each of whose lines is one line."""
    answer = msgspec.json.decode(body, type=Answer)
    return Answer([brief(line) for line in answer.stack[-FRAMES:]], answer.came_to)


def _is_another(asking: socket.socket, process: JobProcess) -> str:
    """Why who listens is not the process that is asked for; empty if it is, and is this user's."""
    pid, uid = peer_of(asking)
    if uid != os.getuid():
        return f"a process of another user, uid {uid}, took its name"
    return "" if pid == process.pid else f"process {pid} took its name"


def _addresses(process: JobProcess) -> Iterator[bytes]:
    """The addresses that bear a process's name, whoever listens there."""
    name = b"@" + _name(process.pid, process.start)
    for line in SOCKETS.read_bytes().splitlines() if SOCKETS.exists() else ():
        address = line.rpartition(b" ")[2]
        if address.startswith(name):
            yield b"\0" + address[1:]


def _answer_all(listener: socket.socket) -> None:
    """Answer until the service is closed. A thread's whole life."""
    with listener:
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:  # closed
                return
            with asking:
                try:
                    if peer_of(asking)[1] in (os.getuid(), 0):
                        asking.settimeout(ASK_SECONDS)
                        asking.sendall(msgspec.json.encode(Answer(main_stack(), dict(CAME_TO))))
                except OSError:  # who asked has gone
                    continue


def main_stack() -> list[str]:
    """The stack of the main thread, the innermost frame last."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


def _name(pid: int, start: int) -> bytes:
    return f"blinkmpi-{pid}-{start}-".encode()
