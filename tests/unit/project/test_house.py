"""The tree is what the packaging says, imports stay cheap, and the linters are content."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.harness import ROOT
from tests.tree import PACKAGE, sources

checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a checkout: an archive drops the links")


# ---------------------------------------------------------------- packaging


def metadata() -> dict[str, Any]:
    """Read what setup.py tells setuptools."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return dict(setup.call_args.kwargs)


@checkout
def test_map_links_and_folders_are_equal() -> None:
    setup = metadata()
    package_dir: dict[str, str] = setup["package_dir"]
    assert setup["packages"] == sorted(package_dir)

    for package, folder in package_dir.items():
        inside = ROOT.joinpath(*package.split("."))
        assert (inside / "__init__.py").is_file(), f"{package}: {inside} is no package"
        assert inside.resolve() == ROOT / folder, f"{package}: the link and the map lead to different folders"

    links = {f"blinkmpi.{p.name}": p.readlink() for p in (ROOT / "blinkmpi").iterdir() if p.is_symlink()}
    outside = {package for package in package_dir if package.count(".") == 1 and package_dir[package] in PACKAGE}
    assert set(links) == outside == set(PACKAGE.values()) - {"blinkmpi"}
    assert all(link == Path("..", package.rpartition(".")[2]) for package, link in links.items())

    folders = {str(path.parent) for path in sources(*PACKAGE)}
    assert folders == set(package_dir.values()), "a folder of the package has no __init__.py"


ROOMS = (
    *("bench", "doctor", "forecast", "lang", "launch", "measure", "nccl", "planning", "plot", "program", "runtime"),
    *("top", "topology", "torch", "transport", "trees", "util"),
)


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_an_init_is_a_map_of_its_folder(room: str) -> None:
    """It names each module and each package in it, with those below. (A module of `cli` is named after its command.)"""
    top = (ROOT / "blinkmpi" / room).resolve()
    for init in sorted(top.rglob("__init__.py")) if room else [top / "__init__.py"]:
        named = set(re.findall(r"\w+", ast.get_docstring(ast.parse(init.read_bytes())) or ""))
        modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
        folders = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        assert not (modules | folders) - named, init


# ---------------------------------------------------------------- imports and linters


def loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh process; give back the top-level modules that it loaded."""
    program = f"import sys\n{statement}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


EDGE = "mpi4py cupy pynvml torch"


@pytest.mark.parametrize(("modules", "heavy"), [
    ("blinkmpi", f"{EDGE} scipy networkx matplotlib"),
    ("blinkmpi.program.cost_model, blinkmpi.program.interpreter", EDGE),  # simulate needs no MPI and no GPU
    ("blinkmpi.topology, blinkmpi.launch.hostfile", "numpy rich mpi4py networkx scipy cupy pynvml"),
])  # fmt: skip
def test_imports_are_light(modules: str, heavy: str) -> None:
    assert not loaded_by(f"import {modules}") & set(heavy.split())


@checkout
@pytest.mark.lint
@pytest.mark.parametrize("command", [
    ["ruff", "check"],
    ["ruff", "format", "--check"],
    ["mypy"],
    ["lint-imports", "--no-cache"],
], ids=["ruff", "format", "mypy", "imports"])  # fmt: skip
def test_lint(command: list[str]) -> None:
    tool = Path(sys.prefix) / "bin" / command[0]
    assert tool.exists(), f"{command[0]} is not installed here: pip install -e '.[test]'"
    done = subprocess.run([str(tool), *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-8000:]}{done.stderr[-4000:]}", pytrace=False)
