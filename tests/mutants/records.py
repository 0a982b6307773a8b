"""The list of mutants, and what must be true of each record before it is tried."""

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.harness import ROOT

LIST = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """A line made wrong.

    Attributes:
        number: in the list, from 1.
        file: from the root of the tree.
        old: a part of a line, which no other place of the file has.
        new: what stands there instead.
        fault: what is wrong then.
        test: pytest's name of the test that must fail.
    """

    number: int
    file: str
    old: str
    new: str
    fault: str
    test: str

    def applied(self, text: str) -> str:
        """The text of the file with the fault."""
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """Read the list."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(number, **row) for number, row in enumerate(rows, start=1)]


def why_not(mutant: Mutant) -> str:
    """Why a record does not fit the tree; empty if it does."""
    path, test_file = ROOT / mutant.file, ROOT / mutant.test.partition("::")[0]
    if not path.is_file():
        return f"{mutant.file} is not there"
    text, lines = path.read_text(encoding="utf-8"), (mutant.old + mutant.new).count("\n")
    if (count := text.count(mutant.old)) != 1 or lines:
        return f"{mutant.file} has {mutant.old!r} {count} times; expected a part of one line, once"
    if path.suffix == ".py" and ast.dump(ast.parse(text)) == ast.dump(ast.parse(mutant.applied(text))):
        return f"{mutant.new!r} is the same program as {mutant.old!r}"
    name = mutant.test.partition("::")[2].partition("[")[0]
    if not test_file.is_file() or f"def {name}(" not in test_file.read_text(encoding="utf-8"):
        return f"{mutant.test}: there is no such test"
    return ""
