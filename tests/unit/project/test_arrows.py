"""What may know of what, beside the layers in ``pyproject.toml``: read from the source of the package."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.tree import PACKAGE, sources


@cache
def parsed() -> dict[Path, ast.Module]:
    """Give the modules of the package by path."""
    return {path: ast.parse((ROOT / path).read_bytes()) for path in sources(*PACKAGE) if path.suffix == ".py"}


def dotted(path: Path) -> list[str]:
    """Give the parts of a module's name; a package's own module ends in ``__init__``."""
    return [*PACKAGE[path.parts[0]].split("."), *path.with_suffix("").parts[1:]]


def imported(tree: ast.AST, package: list[str]) -> Iterator[list[str]]:
    """Give the dotted names, in parts, that a module of ``package`` imports, also within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ([*alias.name.split("."), ""] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ([*base, alias.name] for alias in node.names)


# ---------------------------------------------------------------- cycles of imports


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Find the groups of modules of which each imports all others, directly or through others (Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in number:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == number[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(imports):
        if name not in number:
            visit(name)
    return sorted(group for group in found if len(group) > 1)


def imports_between_packages() -> dict[str, set[str]]:
    """Map each package or module right below ``blinkmpi`` to the others that it imports."""
    found: dict[str, set[str]] = {child.stem: set() for child in (ROOT / "blinkmpi").iterdir() if child.stem[0] != "_"}
    for path, tree in parsed().items():
        name = dotted(path)
        if name[1] in found:
            for target in imported(tree, name[:-1]):
                if target[0] == "blinkmpi" and target[1] in found:
                    found[name[1]].add(target[1])
            found[name[1]].discard(name[1])
    return found


def imports_between_modules() -> dict[str, set[str]]:
    """Map each module to those that it imports, within functions and for type checkers too.

    What is taken from a package, and is no module of it, counts as that package's own module. That to import a module
    is to import the packages around it counts for nothing.
    """
    names = {path: ".".join(dotted(path)).removesuffix(".__init__") for path in parsed()}
    modules, found = set(names.values()), dict[str, set[str]]()
    for path, tree in parsed().items():
        targets = {".".join(target) for target in imported(tree, dotted(path)[:-1])}
        found[names[path]] = {t if t in modules else t.rpartition(".")[0] for t in targets} & modules - {names[path]}
    return found


def test_cycles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(imports) == [["a", "b", "c"], ["d", "e"]]


@pytest.mark.slow
def test_no_packages_import_each_other() -> None:
    """From the source, whatever the contract says. Modules beside the packages (``errors.py``) count as one each."""
    imports = imports_between_packages()
    assert "trees" in imports["planning"], "nothing was read"
    assert not cycles(imports)


def test_no_modules_import_each_other() -> None:
    imports = imports_between_modules()
    assert "blinkmpi.trees.tree" in imports["blinkmpi.planning.plan"], "nothing was read"
    assert not cycles(imports)


# ---------------------------------------------------------------- CuPy and torch, if they are there


def test_one_module_asks_what_is_imported() -> None:
    asking = set()
    for path, tree in parsed().items():
        for node in ast.walk(tree):
            looks = isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules"
            if looks or (isinstance(node, ast.ImportFrom) and node.module == "sys"):
                asking.add(str(path))
    assert asking == {"blinkmpi/runtime/foreign.py", "blinkmpi/util/lazy.py"}  # the latter asks for our own packages


# ---------------------------------------------------------------- what other objects keep to themselves

OF_A_NAMED_TUPLE = {"_asdict", "_fields", "_replace"}
# Of other projects, by the name that their objects have for it: what has no public name, or is slower by that.
OF_OTHERS = {
    "_addressof": "mpi4py documents it under this name, for those who hand MPI's objects to C",
    "_handleof": "likewise",
    "_sizeof": "likewise",
    "_typedict": "mpi4py's table of datatypes by their letter",
    "_current_frames": "Python documents it under this name: what each thread executes",
    "_exit": "Python documents it under this name: ends a process without what Python does at its end",
    "_getframe": "Python documents it under this name: who calls",
    "_c_contiguous": "CuPy: flags.c_contiguous in a sixth of the time",
    "_C": "torch in C++",
    "_GLIBCXX_USE_CXX11_ABI": "torch: how its C++ was compiled",
    "_cuda_getCurrentRawStream": "torch: the address of the current stream, in a tenth of the time",
    "_cuda_isCurrentStreamCapturing": "torch: torch.cuda.is_current_stream_capturing in less time",
    "_Work": "torch: the class that a process group's calls must return",
    "_get_backend": "torch: the backend of a device in a group as an object",
    "_Options": "torch: the class of gloo's options",
    "_devices": "torch: gloo's options: the network devices",
    "_timeout": "torch: options of gloo and NCCL: the deadline",
    "_register_backend": "torch: gives a group the backend of a device",
    "_set_sequence_number_for_group": "torch: what it does itself when it has made a backend",
    "_world": "torch: its table of groups, in which get_backend looks up a name",
    "_get_default_group": "torch: the default group as an object",
    "_profiler_enabled": "torch: whether the profiler runs",
    "_symmetric_memory": "torch: the module with its own symmetric memory, to compare with",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(value: ast.expr) -> bool:
    """Whether an expression is the object itself, as its class's methods see it."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def made_here(tree: ast.Module) -> set[str]:
    """Collect what a module defines: its functions and classes, its variables, and its classes' attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    names = [name for name in ast.walk(statement) if isinstance(name, ast.Name)]
                    found |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return found


def reached_into(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find the private names of other modules' objects that a module uses, with the lines in which it does."""
    here = made_here(tree) | OF_A_NAMED_TUPLE
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            if isinstance(name := node.args[1], ast.Constant) and not is_own(node.args[0]):
                names = [str(name.value)]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [part for path in (module, *(alias.name for alias in node.names)) for part in path.split(".")]
        yield from ((node.lineno, name) for name in names if is_private(name) and name not in here)


def test_what_is_reached_into_is_found() -> None:
    source = """
from .other import _hidden, shown
import torch._inductor
class Own(Base):
    _limit = 3
    def __init__(self, other):
        self._there = other._there     # which this class has, too
        super()._begin()
        other._count += self._count    # ours is not made in this module, but it is ours
        getattr(other, "_name")
        return other._replace(limit=Own._limit, name=other.__name__)
"""
    assert sorted(reached_into(ast.parse(source))) == [(2, "_hidden"), (3, "_inductor"), (9, "_count"), (10, "_name")]


@pytest.mark.slow
def test_private_names_stay_in_their_modules() -> None:
    found = [(str(path), line, name) for path, tree in parsed().items() for line, name in reached_into(tree)]
    assert not [place for place in found if place[2] not in OF_OTHERS], "give it a public name and a docstring"
    assert not OF_OTHERS.keys() - {name for *_, name in found}, "nothing needs these any more"
