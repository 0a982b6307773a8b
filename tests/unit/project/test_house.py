"""The tree is what the packaging says, imports stay cheap, and the linters are content."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[3]
checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a checkout: an archive drops the links")


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
    roots = {package: folder for package, folder in package_dir.items() if "/" not in folder}
    outside = set(roots) - {"blinkmpi"}
    assert set(links) == outside
    assert all(link == Path("..", package.rpartition(".")[2]) for package, link in links.items())

    folders = {f.parent.resolve() for f in (ROOT / "blinkmpi").glob("**/__init__.py")}
    folders |= {f.parent for name in outside for f in (ROOT / package_dir[name]).glob("**/__init__.py")}
    assert folders == {ROOT / folder for folder in package_dir.values()}, "a package is missing in setup.py"


def test_a_build_holds_every_file_once(tmp_path: Path) -> None:
    """Built from a copy, so that it leaves nothing in the checkout."""
    package_dir: dict[str, str] = metadata()["package_dir"]
    source, out = tmp_path / "source", tmp_path / "out"
    expected = []
    for package, folder in package_dir.items():
        (source / folder).mkdir(parents=True, exist_ok=True)
        for file in (ROOT / folder).iterdir():
            if file.suffix in {".py", ".c", ".h", ".cu", ".cuh", ".sbatch", ".sh"}:
                shutil.copy(file, source / folder)
                expected.append(f"{package.replace('.', '/')}/{file.name}")
    for link in (ROOT / "blinkmpi").iterdir():
        if link.is_symlink():
            (source / "blinkmpi" / link.name).symlink_to(link.readlink())
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "setup.py", "-q", "build", "-b", str(out)], cwd=source, check=True)
    assert sorted(str(p.relative_to(out / "lib")) for p in (out / "lib").rglob("*.*")) == sorted(expected)


def loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh process; give back the top-level modules that it loaded."""
    program = f"import sys\n{statement}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_does_nothing() -> None:
    heavy = {"mpi4py", "cupy", "pynvml", "scipy", "networkx", "torch", "matplotlib"}
    assert not loaded_by("import blinkmpi") & heavy


def test_simulate_needs_no_mpi_and_no_gpu() -> None:
    assert not loaded_by("import blinkmpi.program.cost_model, blinkmpi.program.interpreter") & {
        "mpi4py",
        "cupy",
        "pynvml",
        "torch",
    }


@checkout
@pytest.mark.lint
@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        ["mypy"],
        ["lint-imports", "--no-cache"],
    ],
    ids=["ruff", "format", "mypy", "imports"],
)
def test_lint(command: list[str]) -> None:
    tool = Path(sys.prefix) / "bin" / command[0]
    assert tool.exists(), f"{command[0]} is not installed here: pip install -e '.[test]'"
    done = subprocess.run([str(tool), *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-8000:]}{done.stderr[-4000:]}", pytrace=False)
