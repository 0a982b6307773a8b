"""No test measures the machine: what an assertion says of elapsed time is a lower bound, or names the tests' patience.

Counts say how much work something is (``tests/effort.py``), benchmarks how long it takes.
"""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.harness import ROOT

CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time")  # of the module time
OUTCOMES = {"ended", "job", "outcome", "report"}  # what the harness gives of processes: their ``seconds`` have passed
ALLOWED = {"NEVER_S", "PATIENCE_S"}
UPPER = (ast.Lt, ast.LtE)


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def is_time(node: ast.AST, times: set[str]) -> bool:
    """Whether an expression has a clock in it, a name of ``times``, or a time that a process took or has said."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name("time"), attr=clock) if clock.removesuffix("_ns") in CLOCKS:
                return True
            case ast.Attribute(value=whose, attr="seconds") if names_in(whose) & OUTCOMES:
                return True
            case ast.Name(name) if name in times:
                return True
            case ast.Constant("seconds"):
                return True
    return False


def bindings(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a function binds or appends to what."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(targets)], value=ast.Tuple(values)):
                yield from zip(targets, values, strict=False)
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                yield target, value
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield target, value
            case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[value]):
                yield target, value


def hasty(source: str) -> list[int]:
    """The lines of assertions that a time is below something that has not the tests' patience in it."""
    found = set()
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        times: set[str] = set()
        patient = set(ALLOWED)
        for target, value in [*bindings(function)] * 2:  # a name may be made of another one
            if names_in(value) & patient:
                patient |= names_in(target)
            elif is_time(value, times):
                times |= names_in(target)
        for node in (n for n in ast.walk(function) if isinstance(n, ast.Assert)):
            for compare in (n for n in ast.walk(node.test) if isinstance(n, ast.Compare)):
                sides = pairwise([compare.left, *compare.comparators])
                for sign, (left, right) in zip(compare.ops, sides, strict=True):
                    small, large = (left, right) if isinstance(sign, UPPER) else (right, left)
                    if isinstance(sign, (*UPPER, ast.Gt, ast.GtE)) and is_time(small, times):
                        found |= {node.lineno} if not (names_in(large) & patient or is_time(large, set())) else set()
    return sorted(found)


@pytest.mark.parametrize(("text", "lines"), [
    ("since = time.monotonic(); f(); assert time.monotonic() - since < 5", [1]),
    ("since = time.monotonic(); f(); assert time.monotonic() - since < PATIENCE_S", []),
    ("since = time.monotonic(); f(); assert 0.5 <= time.monotonic() - since < 0.5 + PATIENCE_S", []),
    ("since = time.monotonic(); f(); assert time.monotonic() - since >= 0.5", []),
    ("began = time.process_time(); f(); took = time.process_time() - began; assert 1 > took", [1]),
    ("times.append(time.perf_counter() - began); assert min(times) < CALL_US", [1]),
    ("assert said(outcome, 'seconds')[1] < 3", [1]),
    ("seconds, texts = said(outcome, 'seconds'), 7; assert texts < 8; assert seconds[1] < within", [1]),
    ("assert outcome.seconds < 10", [1]),
    ("assert price(program).seconds < 10", []),
    ("assert found['seconds'] < 1; assert found['seconds'] < simulated['seconds']", [1]),
    ("end = time.monotonic() + 30\n  while f(): assert time.monotonic() < end", [2]),
    ("end = time.monotonic() + PATIENCE_S\n  while f(): assert time.monotonic() < end", []),
])  # fmt: skip
def test_the_plain_forms_are_found(text: str, lines: list[int]) -> None:
    assert hasty(f"def test():\n  {text}") == [line + 1 for line in lines]


@pytest.mark.slow
def test_no_assertion_measures_the_machine() -> None:
    files = sorted(path for path in Path(ROOT, "tests").rglob("*.py") if path != Path(__file__))
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in hasty(path.read_text(encoding="utf-8"))]
    assert not found, "a time of the machine's; count something, or allow PATIENCE_S behind the event: " + " ".join(
        found
    )
