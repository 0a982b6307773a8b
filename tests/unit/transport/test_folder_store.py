"""A folder as a store among processes of a machine: it is there while one of them is in it, and no longer."""

import os
from concurrent.futures import ThreadPoolExecutor
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
