"""What SECURITY.md says of the other users of a node, tried by one: a process with another user and group."""

import ctypes
import os
import pickle
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blinkmpi
from blinkmpi.errors import FormatError
from blinkmpi.transport import processes, python_stacks
from blinkmpi.transport.host import native
from blinkmpi.util.cache_folder import library
from tests.store.folder_store import FolderStore
from tests.store.processes import sharing_a_store

OTHER = 12345  # user and group
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of other users")


def by_another(work: Callable[[], object], groups: tuple[int, ...] = ()) -> bool:
    """Do something in a process of the other user; whether it could."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups(groups)
            os.setgid(OTHER)
            os.setuid(OTHER)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder like /tmp: everybody may write, and replaces what is his own."""
    folder = Path("/tmp") / f"blinkmpi-users-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_a_name_like_a_ranks_gets_neither_questions_nor_its_answer() -> None:
    me = processes.own()
    processes.see([me])
    taken: list[socket.socket] = []

    def take() -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0blinkmpi-{me.pid}-{me.start}-".encode())
        listener.listen()
        taken.append(listener)

    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(OTHER)
            os.setuid(OTHER)
            take()
            os.write(tell, b".")
            taken[0].accept()[0].sendall(b'{"stack": ["forged"], "came_to": {}}')
        finally:  # who asks may have seen whose socket it is, and gone; pytest goes on in the parent alone
            os._exit(0)
    try:
        os.read(told, 1)
        assert "another user" in str(python_stacks.ask(me))
        python_stacks.open_service()
        answer = python_stacks.ask(me)
        assert not isinstance(answer, str)
        assert "forged" not in answer.stack
    finally:
        python_stacks.close_service()
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)


def test_another_user_asks_a_rank_nothing() -> None:
    me = processes.own()
    processes.see([me])
    python_stacks.open_service()
    try:
        assert not isinstance(python_stacks.ask(me), str)

        def ask() -> None:
            (address,) = python_stacks._addresses(me)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.settimeout(10)
                asking.connect(address)
                assert asking.recv(100) == b""

        assert by_another(ask)
    finally:
        python_stacks.close_service()


def compiled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(cache))
    path, why = native.build()
    assert path is not None, why
    return path


def test_a_link_that_another_user_made_in_place_of_ours_is_not_followed(
    open_to_all: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache folder cannot be used, and the kernel follows such links (fs.protected_symlinks=0)."""
    theirs, ours = open_to_all / "theirs", open_to_all / f"blinkmpi-{os.getuid()}"
    assert by_another(lambda: (theirs.mkdir(), ours.symlink_to(theirs)))
    monkeypatch.setattr("tempfile.tempdir", str(open_to_all))
    (tmp_path / "cache").write_text("a file, no folder")
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path / "cache"))
    path, why = native.build()
    assert path is None
    assert f"{ours} is another user's (uid {OTHER})" in why or f"Permission denied: '{ours}'" in why
    assert list(theirs.iterdir()) == []


def test_a_member_of_the_folders_group_replaces_no_library(
    open_to_all: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    good = compiled(monkeypatch, open_to_all / "cache")
    assert good.parent == open_to_all / "cache"
    ctypes.CDLL(library(good))
    os.chown(good.parent, 0, OTHER)
    good.parent.chmod(0o770)

    def replace() -> None:
        (made := good.with_suffix(".new")).write_bytes(good.read_bytes())
        os.replace(made, good)

    assert by_another(replace), "the group may write there"
    assert good.stat().st_uid == OTHER
    elsewhere = compiled(monkeypatch, good.parent)
    assert elsewhere.parent == tmp_path / f"blinkmpi-{os.getuid()}"
    assert stat.S_IMODE(elsewhere.parent.stat().st_mode) == 0o700
    library.cache_clear()
    with pytest.raises(OSError, match=r"by its group"):
        native.load.__wrapped__(good, "cc")
    assert not by_another(lambda: (elsewhere.parent / "x").write_bytes(b""))


class Pickle:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (self.path,)


@sharing_a_store((2,))
def test_a_pickle_that_another_user_wrote_into_the_store_is_not_run(
    store: FolderStore, rank: int, size: int, tmp_path: Path
) -> None:
    """As torch's TCPStore lets everybody: here the folder of the store is open to all."""
    ran = tmp_path / "ran"

    class Overwritten(FolderStore):
        def set(self, key: str, value: bytes) -> None:
            super().set(key, value)
            if key.endswith(f"/2/{rank}"):
                super().set(key, pickle.dumps(Pickle(str(ran))))

    with pytest.raises(FormatError, match="let nobody else write into the store"):
        blinkmpi.StoreCommunicator(Overwritten(store.folder), rank, size, timeout=20)
    assert not ran.exists()


def test_shared_memory_is_this_users_alone() -> None:
    """Another user finds no name of it, and cannot go through /proc."""
    from mpi4py import MPI

    with blinkmpi.Communicator(MPI.COMM_SELF) as comm:
        comm.Allreduce(MPI.IN_PLACE, np.ones(3))
        held = [f"/proc/{os.getpid()}/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        ours = [path for path in held if os.path.lexists(path) and os.readlink(path).startswith("/dev/shm/")]
        assert ours
        for path in ours:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert not by_another(lambda path=path: os.open(path, os.O_RDONLY))  # type: ignore[misc]
