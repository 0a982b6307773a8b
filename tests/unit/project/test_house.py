"""The tree has its shape and is what the packaging says, imports stay cheap, and the linters are content."""

import ast
import runpy
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.harness import ROOT
from tests.tree import OTHERS, PACKAGE, lines, sources

MODULES = 16  # in a folder
LINES = 400  # in a file
LAYERS = 15  # in the import contract
CHAIN = 9  # packages, each of which imports the next
checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a checkout: an archive drops the links")


# ---------------------------------------------------------------- shape


def test_no_folder_has_many_modules() -> None:
    modules = Counter(path.parent for path in sources(*PACKAGE, *OTHERS) if path.suffix == ".py")
    crowded = {str(folder): count for folder, count in modules.items() if count > MODULES}
    assert not crowded, crowded


def test_no_file_is_long() -> None:
    long = {str(path): n for path in sources(*PACKAGE, *OTHERS) if (n := lines(path)) > LINES}
    assert not long, long


def test_no_two_classes_of_the_package_have_one_name() -> None:
    homes = defaultdict(list)
    for path in sources(*PACKAGE):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not shared, shared


def test_the_import_contract_has_few_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        assert len(contract.get("layers", [])) <= LAYERS, contract["name"]


def test_imports_between_packages_form_short_chains_and_no_cycle() -> None:
    """From the source, whatever the contract says. Modules beside the packages (``errors.py``) are not counted."""
    imports = imports_between_packages()
    chains: dict[str, list[str]] = {}

    def longest(package: str, *above: str) -> list[str]:
        assert package not in above, f"a cycle of imports: {' -> '.join([*above, package])}"
        if package not in chains:
            below = [longest(other, *above, package) for other in sorted(imports[package])]
            folder = [package] if (ROOT / "blinkmpi" / package).is_dir() else []
            chains[package] = folder + max(below, key=len, default=[])
        return chains[package]

    chain = max(map(longest, sorted(imports)), key=len)
    assert len(chain) <= CHAIN, " -> ".join(chain)


def imports_between_packages() -> dict[str, set[str]]:
    """Map each package or module right below ``blinkmpi`` to the others that it imports, also within functions."""
    found: dict[str, set[str]] = {child.stem: set() for child in (ROOT / "blinkmpi").iterdir() if child.stem[0] != "_"}
    for path in sources(*PACKAGE):
        module = [*PACKAGE[path.parts[0]].split("."), *path.with_suffix("").parts[1:]]
        if path.suffix == ".py" and module[1] in found:
            for target in imported(parsed(path), module[:-1]):
                if target[0] == "blinkmpi" and target[1] in found:
                    found[module[1]].add(target[1])
            found[module[1]].discard(module[1])
    return found


def imported(tree: ast.Module, package: list[str]) -> Iterator[list[str]]:
    """Give the dotted names, in parts, that the imports of a module of ``package`` name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ([*alias.name.split("."), ""] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ([*base, alias.name] for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_bytes() if path.suffix == ".py" else b"")


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
