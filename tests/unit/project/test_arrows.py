"""What may know of what, beside the layers in ``pyproject.toml``: read from the source of the package."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


def test_cycles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(imports) == [["a", "b", "c"], ["d", "e"]]


def test_no_packages_import_each_other() -> None:
    """From the source, whatever the contract says. Modules beside the packages (``errors.py``) count as one each."""
    imports = imports_between_packages()
    assert "trees" in imports["planning"], "nothing was read"
    assert not cycles(imports)
