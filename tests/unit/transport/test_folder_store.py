"""A folder as a store among processes of a machine: it is there while one of them is in it, and no longer."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path

import pytest

from blinkmpi.errors import PeerLost
from blinkmpi.transport.network.folder_store import HELD, shared_folder, sweep


def test_who_comes_later_finds_what_is_there_and_the_last_removes_it(tmp_path: Path) -> None:
    folder = tmp_path / "a.store"
    with shared_folder(folder) as one:
        one.set("a key/with a slash", b"1")
        with shared_folder(folder) as other:
            assert other.check(["a key/with a slash"])
            assert other.get("a key/with a slash") == b"1"
            assert (other.add("n", 2), one.add("n", 3)) == (2, 5)
            assert one.delete_key("n")
            assert not other.delete_key("n")
            assert not other.check(["n"])
        assert folder.exists()
    assert not folder.exists()
    with pytest.raises(OSError, match="No such file"):
        one.get("n")


def test_the_folder_is_removed_behind_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), shared_folder(tmp_path / "a.store") as store:
        store.get("x")
    assert not list(tmp_path.iterdir())


def test_what_no_process_is_in_is_swept(tmp_path: Path) -> None:
    """Of one that was killed in it, or as it made it; not what is another's, or no such folder."""
    for name in ("left.store", "begun.store", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "left.store" / HELD).touch()
    (tmp_path / "left.store" / "key").touch()
    (tmp_path / "link.store").symlink_to(tmp_path / "other")
    with shared_folder(tmp_path / "used.store"):
        sweep(tmp_path, "*.store")
        assert {path.name for path in tmp_path.iterdir()} == {"other", "link.store", "used.store"}


@pytest.mark.parametrize("make", ["file", "open to all"])
def test_a_folder_that_is_not_this_users_alone_is_refused(tmp_path: Path, make: str) -> None:
    folder = tmp_path / "a.store"
    if make == "file":
        folder.touch(0o600)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PeerLost, match=r"a\.store"), shared_folder(folder):
        pass


@pytest.mark.parametrize("step", ["unlink of a key", "unlink of what is held", "rmdir"])
def test_who_comes_as_the_folder_is_removed_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Nothing of what it writes is removed with the old folder."""
    folder, entered = tmp_path / "a.store", ExitStack()
    steps = {"unlink of a key": "key", "unlink of what is held": HELD, "rmdir": "a."}

    def come(path: Path, remove: Callable[[Path], None]) -> None:
        if path.name.startswith(steps[step]):
            new = entered.enter_context(shared_folder(folder))
            assert not new.check(["key"])
            new.set("key", b"new")
        remove(path)

    with entered:
        with monkeypatch.context() as patch, shared_folder(folder) as old:
            old.set("key", b"old")
            patch.setattr(Path, "unlink", partialmethod(come, Path.unlink))
            patch.setattr(Path, "rmdir", partialmethod(come, Path.rmdir))
        assert os.listdir(tmp_path) == [folder.name]
        assert (folder / "key").read_bytes() == b"new"
    assert os.listdir(tmp_path) == []


def test_many_come_and_go_at_once(tmp_path: Path) -> None:
    """Nobody finds a folder that is being removed, and nothing is left."""
    folder = tmp_path / "a.store"

    def come_and_go(who: int) -> int:
        for turn in range(100):
            with shared_folder(folder) as store:
                store.set(str(who), b"%d" % turn)
                assert store.get(str(who)) == b"%d" % turn
            sweep(tmp_path, "*.store")
        return who

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(come_and_go, range(4))) == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == []
