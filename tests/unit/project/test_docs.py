"""What the documents say is what the code does: commands, outputs, tables, programs, links.

``python tests/unit/project/test_docs.py`` writes anew what machines write: the outputs in ``console`` blocks, and
program and table of the README.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # for the script; pytest does so itself

from benchmarks.pages.made import filled  # noqa: E402
from blinkmpi.cli import main as cli  # noqa: E402
from blinkmpi.planning.default_tables import default_table, rows_of  # noqa: E402
from blinkmpi.planning.memory_rows import SLOTS  # noqa: E402
from blinkmpi.planning.plan import Rule  # noqa: E402
from blinkmpi.program.reduction import _ALLOWED, DTYPES, accumulator_of  # noqa: E402
from blinkmpi.util import settings  # noqa: E402
from blinkmpi.util.launcher import RANK_VARIABLES  # noqa: E402
from blinkmpi.util.text import size_text  # noqa: E402
from tests.harness import run_command  # noqa: E402
from tests.unit.benchmarks.scripts import script  # noqa: E402

DOCS = ("README.md", "CONTRIBUTING.md", "CHANGES.md", "SECURITY.md", "benchmarks/README.md", *sorted(
    str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")
))  # fmt: skip
PROGRAM = "examples/replace_mpi4py.py"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMES = re.compile(r"(planned in\s+)\S+ (?:us|ms|s)\b")
MPIRUN = re.compile(r"mpirun -np (\d+) (blinkmpi .*)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(name: str, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is ``first``, without its two heading rows."""
    lines = text_of(name).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


# ---------------------------------------------------------------- commands


def environment() -> dict[str, str]:
    """What a command sees: this checkout, 100 columns, no colour, no settings of ours."""
    drop = (*RANK_VARIABLES, "FORCE_COLOR", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith("BLINKMPI_")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}


def output_of(command: str) -> list[str]:
    """Run ``blinkmpi ...``; the lines that it prints, without trailing blanks."""
    argv = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def consoles(name: str) -> list[tuple[str, list[str]]]:
    """(command, output shown) of every console block."""
    found: list[tuple[str, list[str]]] = []
    for block in BLOCK.findall(text_of(name)):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def shown() -> list[Any]:
    """Commands of console blocks as parameters, with what is shown under each."""
    return [pytest.param(c, out, id=f"{Path(name).stem}:{c}") for name in DOCS for c, out in consoles(name)]


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.parametrize(("command", "expected"), shown())
def test_a_console_block_shows_what_the_command_prints(command: str, expected: list[str]) -> None:
    if ranks := MPIRUN.fullmatch(command):
        assert not expected, "measured times are not pasted: they belong to the performance page"
        run_on_ranks(int(ranks[1]), ranks[2])
        return
    assert expected, "empty: run python tests/unit/project/test_docs.py"
    assert masked(output_of(command)) == masked(expected), (
        "run python tests/unit/project/test_docs.py, and read the difference"
    )


def masked(lines: list[str]) -> list[str]:
    return [TIMES.sub(r"\1...", line).rstrip() for line in lines]


def run_on_ranks(n: int, command: str) -> str:
    argv = [sys.executable, "-m", *shlex.split(command)]
    outcome = run_command(n, argv, timeout=60, env={"PYTHONPATH": str(ROOT), "BLINKMPI_TOPO_FILE": None}, cwd=ROOT)
    assert outcome.rc == 0, outcome.output
    return outcome.output


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_the_examples_of_the_commands_run() -> None:
    rows = table("docs/commands.md", "command")
    names = ["topo", "plan", "subsets", "advise", "explain", "simulate", "doctor", "bench"]
    assert [row[0].strip("`") for row in rows] == names
    for row in rows:
        command = row[2].strip("`")
        if ranks := MPIRUN.fullmatch(command):
            printed = run_on_ranks(int(ranks[1]), ranks[2])
            assert ("Out of bounds values : 0 OK" if " bench " in command else "a job would run here") in printed
        else:
            assert output_of(command)


def mentioned() -> list[str]:
    """Every command of ours that stands in a document, in backticks or on a line of its own."""
    found = set()
    for name in DOCS:
        text = text_of(name)
        found |= set(re.findall(r"`(?:mpirun -np \d+ )?(blinkmpi [a-z]+ [^`\n]*)`", text))
        found |= set(re.findall(r"^(?:    |\$ )(?:mpirun -np \d+ )?(blinkmpi [a-z]+ .*)$", text, re.MULTILINE))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("command", mentioned())
def test_every_command_line_can_be_parsed(command: str) -> None:
    words = [word for word in shlex.split(command)[1:] if word not in ("COMMAND", "...")]
    if "-h" not in words:
        cli.parsed(words)


def test_every_flag_of_a_command_is_documented() -> None:
    text = text_of("docs/commands.md")
    own = [name for name in cli.COMMANDS if name != "bench"]  # which has nccl-tests' flags
    subcommands = next(a for a in cli.parser(own)._actions if a.dest == "command").choices
    assert subcommands is not None
    for name, parser in dict(subcommands).items():
        assert f"## {name}: " in text
        for action in parser._actions:
            for flag in action.option_strings:
                assert flag in ("-h", "--help") or f"`{flag}" in text, f"{name} {flag} is not in docs/commands.md"


def test_make_targets_exist() -> None:
    targets = {line.partition(":")[0] for line in text_of("Makefile").splitlines() if re.match(r"[a-z0-9%-]+:", line)}
    for name in DOCS:
        for target in re.findall(r"(?:`|^    )make ([a-z0-9-]+)", text_of(name), re.MULTILINE):
            pattern = re.sub(r"^test-.*", "test-%", target)
            assert {target, pattern} & targets, f"{name}: make {target}"


# ---------------------------------------------------------------- programs


def test_the_first_program_is_the_example() -> None:
    assert readme_program() == PYTHON.findall(text_of("README.md"))[0], "run python tests/unit/project/test_docs.py"


def readme_program() -> str:
    """The example without its docstring."""
    return text_of(PROGRAM).partition('"""\n\n')[2]


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.parametrize("n", [1, 2])
def test_the_first_program_runs(n: int) -> None:
    outcome = run_command(n, [sys.executable, PROGRAM], timeout=60, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert outcome.rc == 0, outcome.output
    assert outcome.output.count("allreduce of 4 MiB, float32 sum") == 1
    assert "runs as" in outcome.output


# ---------------------------------------------------------------- tables


def test_settings_are_all_documented() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("docs/settings.md", "variable")}
    assert list(rows) == [settings.PREFIX + name for name in settings.KNOWN]
    defaults = settings.Settings()
    assert rows["BLINKMPI_DEBUG"] == defaults.debug
    assert float(rows["BLINKMPI_TIMEOUT"]) == defaults.timeout_s
    assert float(rows["BLINKMPI_PLAN_SECONDS"]) == defaults.plan_s
    assert rows["BLINKMPI_EXECUTOR"] == defaults.executor
    assert int(rows["BLINKMPI_BUFFSIZE"]) == defaults.buffer_bytes
    assert " ".join(settings.LEVELS) in text_of("docs/settings.md")


def test_arguments_of_the_communicator_are_all_documented() -> None:
    """Read from the source: importing it would start MPI in this process."""
    tree = ast.parse(text_of("blinkmpi/communicator.py"))
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Communicator")
    init = next(n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    names = [a.arg for a in (*init.args.args[1:], *init.args.kwonlyargs)]
    assert [row[0].strip("`") for row in table("docs/settings.md", "argument")] == names
    signature = re.search(r"blinkmpi\.Communicator\((.*?)\)", text_of("docs/settings.md"), re.DOTALL)
    assert signature is not None
    assert signature[1].startswith("comm, *, ")
    assert re.findall(r"(\w+)=", signature[1]) == names[1:]


def test_the_limits_of_the_selection_table_are_documented() -> None:
    rows = table("docs/selection.md", "collective | without cma to MPI below, 2 ranks")
    floors = [default_table(kind, n) for kind, n in (("no_cma", 2), ("no_cma", 8), ("nodes", 4))]  # type: ignore[arg-type]
    wanted = [{r.collective: size_text(r.min_bytes) for r in one.rules if not r.scheme} for one in floors]
    assert {c: tuple(sizes) for c, *sizes in rows} == {c: tuple(one[c] for one in wanted) for c in wanted[0]}  # type: ignore[index]

    def words(row: Rule) -> str:
        chunk = "" if row.chunk_bytes == SLOTS[0] else f" ({size_text(row.chunk_bytes)})"
        return row.protocol + chunk + (f" from {size_text(row.min_bytes)}" if row.min_bytes else "")

    rows = table("docs/selection.md", "collective | 2 ranks | more ranks")
    collectives = dict.fromkeys(row.collective for row in default_table("memory", 2).rules)
    assert {c: tuple(cells) for c, *cells in rows} == {
        c: tuple(", ".join(map(words, rows_of("memory", n, c))) for n in (2, 8)) for c in collectives
    }


def test_types_and_operations_are_documented() -> None:
    documented: dict[str, set[str]] = {}
    for types, operations, partial in table("docs/numerics.md", "type | operations"):
        for name in types.split():
            documented[name] = set(operations.split())
            assert partial == ("the type itself" if partial.startswith("the") else str(accumulator_of(name)))
            assert (partial == "the type itself") <= (accumulator_of(name).name == name)
    assert documented == {d: {op for op, allowed in _ALLOWED.items() if d in allowed} for d in DTYPES}


def test_the_layers_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    there = {p.stem for p in (ROOT / "blinkmpi").iterdir()}
    rows = [[name for name in re.findall(r"\w+", layer) if name in there] for layer in layers]
    assert [re.findall(r"`(\w+)`", row[0]) for row in table("docs/design.md", "package")] == [r for r in rows if r]


def test_every_package_has_a_paragraph_that_names_its_files() -> None:
    section = text_of("docs/design.md").partition("## The packages")[2].partition("\n## ")[0]
    paragraphs = {p.partition("`**")[0]: p for p in section.split("\n\n**`")[1:]}
    package = ROOT / "blinkmpi"
    assert set(paragraphs) == {p.name for p in package.iterdir() if (p / "__init__.py").exists()} | {"communicator"}
    for name_of, text in paragraphs.items():
        files = [str(file) for file in (package / name_of).resolve().rglob("*")]
        for name in re.findall(r"`([\w/]+\.(?:py|c|h|cu|cuh)|\w+/)`", text):
            assert any(file.endswith(f"/{name.rstrip('/')}") for file in files), f"{name_of}: there is no {name}"


# ---------------------------------------------------------------- links and names


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    text = text_of(name)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, fragment = target.partition("#")
        if path.startswith("http"):
            continue
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        if fragment:
            page = filled(file.read_text(encoding="utf-8"))
            headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            rows = re.findall(r"^\| `([^`\s]+)", page, re.MULTILINE)
            anchors |= {re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-") for row in rows}  # docs/site_extension.py
            assert fragment in anchors, f"{name}: {target}; there are {sorted(anchors)}"
    for path in re.findall(r"`([a-z_]+/[\w./-]*)`", text):
        top = path.partition("/")[0]
        if top == "build":  # is made
            continue
        if (ROOT / top).is_dir() or (ROOT / "blinkmpi" / top).is_dir():
            assert (ROOT / path).exists() or (ROOT / "blinkmpi" / path).exists(), f"{name}: {path} does not exist"


def test_lines_are_not_longer_than_the_codes() -> None:
    for name in DOCS:
        text = re.sub(r"^```.*?^```$", "", text_of(name), flags=re.DOTALL | re.MULTILINE)
        for number, line in enumerate(text.splitlines(), start=1):
            assert len(line) <= 120 or line.startswith("|"), f"{name}: line {number}"


# ---------------------------------------------------------------- performance


def test_what_is_kept_of_results_is_what_the_results_give() -> None:
    for name, page in script("report").pages(ROOT / "benchmarks" / "results").items():
        assert page == text_of(name), f"{name}: run python benchmarks/report.py"


# ---------------------------------------------------------------- writing anew


def refresh() -> None:
    """Write the blocks and tables that come from a machine."""
    for name in DOCS:
        before = text = text_of(name)
        for command, old in consoles(name):
            if command.startswith("blinkmpi "):
                new = output_of(command)
                if masked(new) != masked(old):
                    stale, fresh = ("\n".join(["```console", f"$ {command}", *out, "```"]) for out in (old, new))
                    assert text.count(stale) == 1, f"{name}: one command per block"
                    text = text.replace(stale, fresh)
        if name == "README.md":
            text = PYTHON.sub(lambda _: f"```python\n{readme_program()}```", text, count=1)
        if text != before:
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    script("report").main([])


if __name__ == "__main__":
    refresh()
