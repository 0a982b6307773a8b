"""What is built from this tree holds it, installs, and runs outside of it.

Built from a copy, so that nothing is left in the checkout, and without an index: what the package needs is taken from
the environment of the tests.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import blinkmpi
from tests.harness import ROOT, run_command
from tests.tree import PACKAGE, sources
from tests.unit.project.test_house import checkout, metadata

NOT_IN_AN_ARCHIVE = (".ci/", ".gitignore")
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools; and the folder below
EGG_INFO = "blinkmpi.egg-info/"
BUILD = "import sys, setuptools.build_meta as m; getattr(m, sys.argv[1])(sys.argv[2])"
WITHOUT_MPI = ("topo dgx-1v", "explain dgx-1v", "simulate cpu:4", "subsets dgx-1p", "launch --mpi mpich -np 2 -- x")
WITH_MPI = ("bench all_reduce", "tune", "topo", "plan", "explain", "simulate")

# Runs commands in one process; prints a list of (exit code, stdout, stderr).
SEVERAL = """
import contextlib, io, json, sys
from blinkmpi.cli.main import main
found = []
for command in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command.split())
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""

pytestmark = [checkout, pytest.mark.mpi_skip]


class Build(NamedTuple):
    """What was built: the archive, the wheel of the tree, and the wheel of the archive."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


class Installed(NamedTuple):
    """An environment that has the wheel, and a folder outside of the checkout."""

    bin: Path
    packages: Path
    elsewhere: Path


def tracked() -> list[str]:
    """List the files of the checkout that git knows or would take, links too."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in found.split("\0") if name and os.path.lexists(ROOT / name))


def run(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def make(hook: str, source: Path, out: Path) -> Path:
    """Call one of the hooks of the build backend (PEP 517); the one file that it makes."""
    out.mkdir()
    done = run(sys.executable, "-c", BUILD, hook, out, cwd=source)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    for name in tracked():
        if not name.startswith(NOT_IN_AN_ARCHIVE):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    sdist = make("build_sdist", source, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Build(sdist, make("build_wheel", source, folder / "w1"), make("build_wheel", unpacked, folder / "w2"))


def headers(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


# ---------------------------------------------------------------- what is in them


@pytest.mark.slow
def test_the_archive_holds_the_tree_and_no_links(build: Build) -> None:
    with tarfile.open(build.sdist) as archive:
        members = archive.getmembers()
        assert all(member.isfile() or member.isdir() for member in members), "a link, or something odd"
        texts = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in members if m.isfile()}  # type: ignore[union-attr]
    made = {name for name in texts if name in MADE or name.startswith(EGG_INFO)}
    wanted = {n for n in tracked() if not n.startswith(NOT_IN_AN_ARCHIVE) and not (ROOT / n).is_symlink()}
    assert set(texts) - made == wanted
    changed = [name for name in sorted(wanted) if texts[name] != (ROOT / name).read_bytes()]
    assert not changed


def test_the_wheel_holds_every_file_of_the_package_once(build: Build) -> None:
    tables = [f"blinkmpi/planning/tables/{file.name}" for file in (ROOT / "blinkmpi/planning/tables").iterdir()]
    wanted = {name: ROOT / name for name in ("blinkmpi/py.typed", "blinkmpi/planning/beside_mpi.json", *tables)}
    for path in sources(*PACKAGE):
        wanted["/".join([*PACKAGE[path.parts[0]].split("."), *path.parts[1:]])] = ROOT / path
    with zipfile.ZipFile(build.wheel) as archive:
        everything = [name for name in archive.namelist() if ".dist-info/" not in name]
        pages = {name.partition("/share/doc/blinkmpi/")[2]: name for name in everything if ".data/data/" in name}
        names = [name for name in everything if name not in pages.values()]
        assert sorted(names) == sorted(wanted)
        assert not [name for name in names if archive.read(name) != wanted[name].read_bytes()]
        assert not [info.filename for info in archive.infolist() if info.external_attr >> 28 not in (0o10, 0)], "a link"
        assert "kernels" in " ".join(name for name in names if name.endswith(".cu")), "the kernels' sources"
        assert set(pages) >= {"README.md", "CHANGES.md", "SECURITY.md", "docs/index.md", "docs/ring.svg"}
        assert set(pages) >= {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")}
        assert not [page for page, name in pages.items() if archive.read(name) != (ROOT / page).read_bytes()]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_site_is_made_from_the_archive(build: Build, tmp_path: Path) -> None:
    with tarfile.open(build.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    argv = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", "build/doctrees", "docs", "build/docs"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, cwd=unpacked, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_reduce-np2.json" in (unpacked / "build" / "docs" / "measurements.html").read_text(encoding="utf-8")


def test_the_archive_builds_the_same_wheel(build: Build) -> None:
    with zipfile.ZipFile(build.wheel) as one, zipfile.ZipFile(build.wheel_of_sdist) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert not [name for name in one.namelist() if one.read(name) != other.read(name)]


def test_the_metadata_is_what_setup_says(build: Build) -> None:
    setup, found = metadata(), headers(build.wheel)
    assert (found["Name"], found["Version"]) == ("blinkmpi", blinkmpi.__version__)
    assert build.wheel.name == f"blinkmpi-{blinkmpi.__version__}-py3-none-any.whl"
    assert (found["License-Expression"], found.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    assert found["Author"] == setup["author"]
    assert found.get_all("Classifier") == setup["classifiers"]
    assert set(found.get_all("Provides-Extra", [])) == set(setup["extras_require"])
    needed = [Requirement(line) for line in found.get_all("Requires-Dist", [])]
    assert {r.name for r in needed if "extra" not in str(r.marker)} == {
        Requirement(line).name for line in setup["install_requires"]
    }
    pythons = SpecifierSet(found["Requires-Python"])
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(setup["classifiers"]))
    assert named
    assert all(version in pythons for version in named)
    assert found["Description-Content-Type"] == "text/markdown"
    text, whole = str(found.get_payload()), (ROOT / "README.md").read_text(encoding="utf-8")
    assert [url for url in re.findall(r"\]\(([^)]*)\)", text) if not url.startswith("https://")] == []
    assert text.count("\n") >= whole.count("\n") - 2, "a picture and the line below it"
    assert re.search(r"^- Tutorial: ", text, re.MULTILINE), "the text of a link stays"


def test_the_locked_file_has_what_the_tests_need_with_hashes() -> None:
    text = (ROOT / "tests" / "requirements.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=\w)", text.partition("\n")[2])
    locked: dict[str, set[str]] = {}
    for block in blocks:
        requirement, hashes = Requirement(block.partition("\\")[0]), block.count("--hash=sha256:")
        assert hashes, block
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        locked.setdefault(canonicalize_name(requirement.name), set()).add(pin.version)
    setup = metadata()
    extras = setup["extras_require"]
    for line in (*setup["install_requires"], *extras["mpi"], *extras["test"]):
        needed = Requirement(line)
        versions = locked[canonicalize_name(needed.name)]
        assert all(version in needed.specifier for version in versions), f"{line}: {versions}; make lock"


def test_the_licences_of_what_is_installed_are_on_the_page() -> None:
    setup, page = metadata(), (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w[^|]*) \| ([^|]*) \| ([^|]+) \|$", page.partition("| licence |")[2], re.MULTILINE)
    told = {name: extras for names, extras, _ in rows for name in re.findall(r"[\w-]+", names)}
    for line in setup["install_requires"]:
        assert told[Requirement(line).name] == "always"
    for extra in setup["extras_require"].keys() - {"docs", "quick", "test"}:
        for line in setup["extras_require"][extra]:
            assert f"`{extra}`" in told[Requirement(line).name], line


# ---------------------------------------------------------------- installed


@pytest.fixture(scope="module")
def installed(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An empty environment with the wheel alone; its other packages are those of the tests' own environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    (packages,) = (folder / "venv" / "lib").glob("python3.*/site-packages")
    (packages / "others.pth").write_text("\n".join(p for p in sys.path if Path(p).name == "site-packages"))
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    done = run(*pip, "install", "-q", "--no-deps", "--no-index", build.wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "elsewhere").mkdir()
    shutil.copy(ROOT / "examples" / "replace_mpi4py.py", folder / "elsewhere")
    return Installed(python.parent, packages, folder / "elsewhere")


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BLINKMPI_", "PYTHON"))}
    return {**kept, "COLUMNS": "200", **more}


def on_ranks(installed: Installed, n: int, *argv: str | Path) -> str:
    """Run a command of the environment on n ranks; mpi4py looks for an MPI beside its own environment's Python."""
    libraries = sorted(Path(sys.prefix, "lib").glob("libmpi.so.*[0-9]"))
    env = {"PYTHONPATH": None, **({"MPI4PY_LIBMPI": str(libraries[0])} if libraries else {})}
    outcome = run_command(n, [str(word) for word in argv], timeout=50, env=env, cwd=installed.elsewhere)
    assert outcome.rc == 0, outcome.output
    return outcome.output


@pytest.mark.slow
def test_it_is_the_wheel_that_is_imported(installed: Installed) -> None:
    program = "import blinkmpi, blinkmpi.topology, blinkmpi.trees as t; print(blinkmpi.__file__, t.__file__)"
    done = run(installed.bin / "python", "-c", program, cwd=installed.elsewhere, env=environment())
    below = installed.packages / "blinkmpi"
    assert done.stdout.split() == [str(below / "__init__.py"), str(below / "trees" / "__init__.py")], done.stderr


@pytest.mark.slow
def test_the_first_program_runs_from_the_wheel(installed: Installed) -> None:
    printed = on_ranks(installed, 4, installed.bin / "python", "replace_mpi4py.py")
    assert printed.count("allreduce of 4 MiB, float32 sum, 4 ranks") == 1
    if shutil.which("cc"):
        assert "C executor, compiled by" in printed


@pytest.mark.slow
def test_the_doctor_runs_from_the_wheel(installed: Installed) -> None:
    assert "a job would run here" in on_ranks(installed, 2, installed.bin / "blinkmpi", "doctor")


@pytest.mark.slow
def test_commands_need_no_mpi_where_a_machine_is_named(installed: Installed) -> None:
    env = environment(MPI4PY_LIBMPI="/no/libmpi.so")
    done = run(installed.bin / "blinkmpi", "plan", "dgx-1v", cwd=installed.elsewhere, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"broadcast from 0 +trees +\d+ +\d+ +150 +150 +yes", done.stdout)
    argv = (installed.bin / "python", "-c", SEVERAL, *WITHOUT_MPI, *WITH_MPI)
    found = json.loads(run(*argv, cwd=installed.elsewhere, env=env).stdout)
    for command, (code, out, err) in zip((*WITHOUT_MPI, *WITH_MPI), found, strict=True):
        if command in WITHOUT_MPI:
            assert (code, err) == (0, ""), command
            assert out, command
        else:
            assert (code, out) == (2, ""), command
            assert err.startswith(f"blinkmpi: error: {command.split()[0]}: there is no MPI"), err
            assert err.endswith("pip install 'blinkmpi[mpi]'\n")
            assert err.count("\n") == 1
