"""What is kept in the cache folder may be cut off or replaced: it is made again, or an error says how."""

import ctypes
import os
import pwd
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blinkmpi.errors import SettingsError
from blinkmpi.forecast import rates
from blinkmpi.planning import tuned_table
from blinkmpi.planning.planner import make_plan
from blinkmpi.topology import machine
from blinkmpi.topology.gpu import unknown_gpu
from blinkmpi.topology.measured import file_of, kept
from blinkmpi.transport.host import native
from blinkmpi.util.cache_folder import cache_dir, keep, library, read_kept, why_not_trusted
from tests.unit.fuzz.mutators import promised


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for temporary files, where libraries are kept that the cache folder does not take."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"blinkmpi-{os.getuid()}"


@pytest.fixture
def compiled(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a compiler has made that is quicker than a real one."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = -o ] && seq 2000 > $2; shift; done; echo cc 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path / "cache"))
    path, name = native.build()
    assert path is not None, name
    return path


@pytest.mark.parametrize("what", ["half", "empty", "a byte less", "a page of zeros"])
def test_a_library_that_was_cut_off_is_compiled_again(what: str, compiled: Path) -> None:
    """To load it would end the process by SIGBUS."""
    good = compiled.read_bytes()
    zeros = good[:4096] + b"\0" * 100 + good[4196:]
    spoilt = {"half": good[: len(good) // 2], "empty": b"", "a byte less": good[:-1], "a page of zeros": zeros}[what]
    compiled.write_bytes(spoilt)
    assert native.build() == (compiled, "cc 1")
    assert compiled.read_bytes() == good
    kept_at = compiled.stat().st_mtime_ns
    assert native.build() == (compiled, "cc 1")
    assert compiled.stat().st_mtime_ns == kept_at, "a whole one is not made again"


def test_a_folder_in_place_of_the_library_is_a_reason(compiled: Path, own: Path) -> None:
    compiled.unlink()
    compiled.mkdir()
    elsewhere, why = native.build()
    assert elsewhere == own / compiled.name
    assert str(compiled.parent) in why
    assert native.build() == (elsewhere, "cc 1"), "not made again"


def test_a_folder_that_everybody_may_write_is_not_trusted(compiled: Path, own: Path) -> None:
    compiled.parent.chmod(0o777)
    elsewhere, why = native.build()
    assert elsewhere == own / compiled.name
    assert f"{compiled.parent} can be written by everybody" in why
    compiled.parent.chmod(0o1777)  # like /tmp: a file that another user has put there is not taken, ours is
    assert native.build() == (compiled, "cc 1")
    compiled.chmod(0o777)
    assert native.build()[0] == elsewhere
    own.chmod(0o777)
    compiled.unlink()
    assert native.build() == (compiled, "cc 1")


def test_a_group_may_not_write_where_libraries_lie(compiled: Path, own: Path) -> None:
    compiled.parent.chmod(0o775)
    elsewhere, why = native.build()
    assert elsewhere == own / compiled.name
    assert f"{compiled.parent} can be written by its group (chmod g-w)" in why
    compiled.parent.chmod(0o700)
    compiled.chmod(0o775)
    made, _ = native.build()
    assert made == elsewhere
    compiled.chmod(0o755)
    elsewhere.chmod(0o775)
    with pytest.raises(OSError, match="by its group"):
        native.load(elsewhere, "cc 1")


def test_a_folder_on_the_way_counts_too(tmp_path: Path) -> None:
    (folder := tmp_path / "a" / "b").mkdir(parents=True)
    assert why_not_trusted(folder) == ""
    folder.parent.chmod(0o770)
    assert f"{folder.parent} can be written by its group" in why_not_trusted(folder)
    (tmp_path / "link").symlink_to(folder)
    assert f"{folder.parent} can be written by its group" in why_not_trusted(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """As /tmp/blinkmpi-UID may be one, where the kernel follows such links (fs.protected_symlinks=0)."""
    (folder := tmp_path / "a").mkdir()
    (link := tmp_path / "blinkmpi-0").symlink_to(folder)
    assert why_not_trusted(link) == ""
    os.lchown(link, 12345, -1)
    assert f"{link} is another user's" in why_not_trusted(link)


def test_what_was_checked_is_what_is_loaded(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file takes its place between the look at it and the loader's."""
    monkeypatch.delenv("CC")
    path, name = native.build()
    assert path is not None, name
    checked = library(path)
    (other := path.with_suffix(".new")).write_bytes(b"other code")
    os.replace(other, path)
    assert Path(checked).read_bytes() != b"other code"
    assert ctypes.CDLL(checked).blink_help_no_more


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("spoil", [lambda path: os.chown(path, 12345, -1), lambda path: path.chmod(0o666)])
def test_measurements_that_others_may_have_written_are_not_read(
    tmp_path: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(path := tmp_path / "folder" / "steps.json", "{}")
    assert read_kept(path) == b"{}"
    spoil(path)
    with pytest.raises(OSError, match=r"another user's|by everybody"):
        read_kept(path)
    with pytest.raises(SettingsError, match=r"another user's|by everybody"):
        tuned_table.read(path)
    with pytest.raises(SettingsError, match=r"another user's|by everybody"):
        rates.read(path, rates.hardware_of(2, ""))


def test_folders_on_the_way_are_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        keep(tmp_path / "new" / "newer" / "file", "text")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "new/newer")] == [0o700, 0o700]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_library_or_folder_of_another_user_is_not_loaded(compiled: Path, own: Path) -> None:
    os.chown(compiled, 12345, -1)
    assert native.build() == (compiled, "cc 1")
    assert compiled.stat().st_uid == 0, "made again: root may replace it"
    os.chown(compiled.parent, 12345, -1)
    elsewhere, why = native.build()
    assert elsewhere == own / compiled.name
    assert f"{compiled.parent} is another user's (uid 12345)" in why
    os.chown(own, 12345, -1)
    lost, why = native.build()
    assert lost is None
    assert "uid 12345" in why


def test_where_there_is_no_compiler_a_kept_library_serves(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(compiled.parent))
    path, compiler = native.build()
    assert path == compiled
    assert "no C compiler" in compiler
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O0"))  # one that was made otherwise does not
    assert native.build() == (None, native.NO_COMPILER)


def test_the_compiler_of_a_package_serves_where_none_is_on_the_path(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package, cc, path = tmp_path / "packages" / "ziglang", os.environ["CC"], os.environ["PATH"]
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(
        "import subprocess, sys\n"
        "assert sys.argv[1] == 'cc'\n"
        f"sys.exit(subprocess.call([{cc!r}, *sys.argv[2:]], env={{'PATH': {path!r}}}))\n"
    )
    monkeypatch.delenv("CC")
    assert native.compiler_command(os.environ) != [sys.executable, "-m", "ziglang", "cc"], "what is on PATH comes first"
    monkeypatch.setenv("PATH", str(package))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(str(package.parent))
    assert native.compiler_command(os.environ) == [sys.executable, "-m", "ziglang", "cc"]
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O1"))
    made, compiler = native.build()
    assert made not in (None, compiled)
    assert compiler == "cc 1"


@pytest.mark.parametrize("cc", ["'cc", "no-such-compiler -x"])
def test_a_compiler_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch, cc: str, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", cc)
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    path, why = native.build()
    assert path is None
    assert "--version failed" in why


def test_a_wrong_compiler_is_said_whatever_is_kept(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc -m64")
    lost, why = native.build()
    assert lost is None
    assert why.startswith("/no/such/cc -m64 --version failed: ")


def test_a_compiler_may_have_arguments(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{os.environ['CC']} -m64")
    assert native.build() == (compiled, "cc 1")


def test_processes_that_compile_at_once_all_get_a_whole_library(compiled: Path) -> None:
    """The fake compiler writes a page at a time; each process finds or makes a library that is whole."""
    good = compiled.read_bytes()
    for _ in range(3):
        compiled.unlink()
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _: native.build(), range(8)))
        assert set(made) == {(compiled, "cc 1")}
        assert compiled.read_bytes() == good
    assert [path.name for path in compiled.parent.iterdir()] == [compiled.name], "nothing is left beside it"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "BLINKMPI_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(SettingsError, match="has no home; set BLINKMPI_CACHE_DIR"):
        cache_dir()


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def bcast_bytes(self, obj: object, _: int) -> object:
        return obj

    def allgather_bytes(self, obj: object) -> list[object]:
        return [obj]


@pytest.mark.parametrize("what", ["folder", "pipe", "text", "another document", "deep"])
def test_a_spoilt_measurement_says_how_to_measure_again(what: str, tmp_path: Path) -> None:
    topology = machine("dgx-1v")
    path = file_of(tmp_path, [d.uuid for d in topology.devices], "unknown")
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        texts = {"text": "x" * 10**6, "another document": make_plan(machine("cpu:2")).to_json(), "deep": '{"a":' * 9999}
        path.write_text(texts[what])
    facts = unknown_gpu("not asked")
    found = promised(lambda: kept(Alone(), topology, facts, tmp_path), SettingsError, source=path.name)  # type: ignore[arg-type]
    assert isinstance(found, SettingsError)
    assert "--measure=again" in str(found)
