"""Ask another process of this machine what its Python does: for warnings of a wait, and for the error that ends it.

While a process has a communicator, a thread of it sleeps in ``accept`` on a socket (in Linux's abstract namespace, so
there is no file) and answers each connection of the same user with the stack of the main thread, and with the exchanges
that the process has come to. It costs nothing while nobody asks.
"""

import os
import socket
import struct
import sys
import threading
import time
from types import FrameType

import msgspec

from .control_pages import start_time
from .processes import VISIBLE, JobProcess

ASK_SECONDS = 1.0
FRAMES = 12  # of a stack that are told, the innermost ones
LONGEST = 64 << 10
CAME_TO: dict[str, int] = {}  # by the name of a communicator: the last of its exchanges that this process has begun


class Answer(msgspec.Struct):
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
                listener.bind(_address(os.getpid(), start_time(os.getpid()) or 0))
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
    since, body = time.monotonic(), bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.settimeout(seconds)
            asking.connect(_address(process.pid, process.start))
            while len(body) < LONGEST and (part := asking.recv(LONGEST)):
                body += part
                asking.settimeout(max(0.01, seconds - (time.monotonic() - since)))
            return msgspec.json.decode(body, type=Answer)
        except TimeoutError:
            return f"does not answer within {max(0.1, round(seconds, 1)):g} s (it holds Python's lock, or has no time)"
        except ConnectionRefusedError:
            return "cannot be asked (it has no communicator of blinkmpi yet)"
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"cannot be asked ({error})"


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
                    credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                    if struct.unpack("3i", credentials)[1] in (os.getuid(), 0):
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


def _address(pid: int, start: int) -> bytes:
    return f"\0blinkmpi-{pid}-{start}".encode()
