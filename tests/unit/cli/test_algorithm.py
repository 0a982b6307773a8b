"""``--algorithm FILE`` of the commands, and ``lang check`` on what users write in Python."""

import json
from pathlib import Path
from typing import Any

import pytest

from blinkmpi import lang
from blinkmpi.cli import main as cli
from blinkmpi.cli import simulate
from blinkmpi.errors import ArgumentError, FormatError
from blinkmpi.lang import library
from blinkmpi.lang.source import algorithm_for
from blinkmpi.program.interpreter import run
from blinkmpi.topology import machine
from blinkmpi.util.launcher import RANK_VARIABLES

HEAD = "from blinkmpi import lang\nfrom blinkmpi.lang import chunk\nfrom blinkmpi.lang.library import all_pairs\n"
STAR = """
@lang.algorithm("broadcast", chunks=1, root=1)
def star(n):
    for r in range(n):
        if r != 1:
            chunk(1, "input", 0).copy(r, "output", 0)
"""
TO_NEXT = """
to_next = lang.custom(given=lambda n, rank: 1, wanted=lambda n, rank: [[(rank - 1, 0)]] if rank else [])

@lang.algorithm(to_next, chunks=1)
def forward(n):
    for r in range(1, n):
        chunk(r - 1, "input", 0).copy(r, "output", 0)
"""
ALL_TO_NEXT = """
to_next = lang.custom(given=lambda n, r: 2, wanted=lambda n, r: [[(r - 1, 0)], [(r - 1, 1)]] if r else [])

@lang.algorithm(to_next, chunks=2)
def all_to_next(n):
    for r in range(1, n):
        chunk(r - 1, "input", 0, 2).copy(r, "output", 0)
"""
STENCIL = """
near = lang.custom(given=lambda n, rank: 2, wanted=lambda n, rank: [[(rank, 0), ((rank + 1) % n, 1)], []])

@lang.algorithm(near, chunks=1)
def stencil(n):
    for r in range(n):
        chunk(r, "input", 0).copy(r, "sum", 0).reduce(chunk((r + 1) % n, "input", 1)).copy(r, "output", 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    Path("star.py").write_text(HEAD + STAR)
    Path("two.py").write_text(HEAD + STAR + TO_NEXT)
    library.ring(4).save("ring.json")
    Path("ring.xml").write_text(library.ring(4).to_xml())
    return tmp_path


def blink(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    code = cli.main(words.split())
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("source", ["ring.json", "ring.xml"])
def test_simulate_runs_and_prices_what_a_file_says(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    code, out, err = blink(capsys, f"simulate cpu:4 --bytes 64K --json --algorithm {source}")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert (found["scheme"], found["wrong"], found["call"]["collective"]) == ("lang:ring", 0, "allreduce")
    own = library.ring(4).simulate(machine("cpu:4"), 64 << 10, chunk_bytes=512 << 10)
    assert found["seconds"] == pytest.approx(own.seconds)


def test_the_collective_and_root_are_the_algorithms(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = blink(capsys, "simulate dgx-1v --gpus 0-3 --bytes 8K --algorithm star.py")
    assert code == 0
    assert "broadcast of 8 KiB" in out
    assert "every element right, against NumPy" in out
    code, out, _ = blink(capsys, "explain dgx-1v --gpus 0-3 --algorithm two.py:star --collective bcast")
    assert code == 0
    assert "root 1, 4 ranks" in out
    assert "runs as     lang:star: an algorithm of 3 messages of a chunk, 1 after one another" in out
    assert "why         --algorithm\n" in out
    assert "not chosen" in out


@pytest.mark.parametrize("op", ["sum", "prod", "max"])
def test_a_custom_collective_is_simulated_and_compared(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    Path("stencil.py").write_text(HEAD + STENCIL)
    code, out, err = blink(capsys, f"simulate dgx-1v --bytes 96K --algorithm stencil.py --op {op} --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["scheme"], found["wrong"], found["call"]["collective"]) == ("lang:stencil", 0, "custom")
    assert found["seconds"] > 0

    def spoiled(*args: Any) -> Any:
        results = run(*args)
        results[1][5] += 1
        return results

    monkeypatch.setattr(simulate.interpreter, "run", spoiled)
    code, out, _ = blink(capsys, f"simulate dgx-1v --bytes 96K --algorithm stencil.py --op {op}")
    assert code == 1
    assert "1 ELEMENTS WRONG" in out


def test_neighbouring_chunks_of_a_custom_collective_are_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("next.py").write_text(HEAD + ALL_TO_NEXT)
    code, out, err = blink(capsys, "simulate dgx-1v --bytes 96K --algorithm next.py --json")
    assert (code, err) == (0, "")
    assert json.loads(out)["wrong"] == 0


def test_of_a_python_file_its_own_algorithm_is_taken(folder: Path) -> None:
    assert algorithm_for("star.py", 3).name == "star", "not all_pairs, which it imports"
    assert algorithm_for("star.py:all_pairs", 3) == library.all_pairs(3)
    Path("value.py").write_text("from blinkmpi.lang import library\nmade = library.islands(4, 2)\n")
    assert algorithm_for("value.py", 4).name == "islands"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("two.py", "'two.py' has 2 algorithms; choose one of forward, star, as in two.py:forward"),
        ("two.py:star2", "'two.py' has no algorithm 'star2'; choose one of forward, star"),
        ("ring.xml", "'ring.xml': ring is for 4 ranks, and there are 3; make it for these"),
        ("star.txt", "'star.txt': expected a file of an algorithm: x.json, x.xml, x.py or x.py:NAME"),
        ("no.py", "cannot read 'no.py': No such file or directory; correct the path"),
        ("empty.py", "'empty.py' has no algorithm; decorate a function with @lang.algorithm(...)"),
        ("wrong.py", "'wrong.py': line 2: ZeroDivisionError: division by zero; correct the file"),
        ("inside.py", "'inside.py': line 6: KeyError: 3; correct the file"),
        ("syntax.py", "'syntax.py': line 1: SyntaxError:"),
        ("nul.py", "'nul.py': SyntaxError: source code string cannot contain null bytes; correct the file"),
        ("exits.py", "'exits.py': line 2: SystemExit: 3; correct the file"),
        ("leaves.py", "'leaves.py': line 6: SystemExit: 3; correct the file"),
        ("folder.py", "cannot read 'folder.py': Is a directory; correct the path"),
        ("unproved.py", "nothing writes chunk 0 of its output"),
        ("needs.py:islands", "missing a required argument: 'k'; give its parameters"),
    ],
)
def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], source: str, said: str) -> None:
    Path("empty.py").write_text("x = 1\n")
    Path("nul.py").write_bytes(b"\0")
    Path("exits.py").write_text("import sys\nsys.exit(3)\n")
    leaves = '@lang.algorithm("broadcast", chunks=1)\ndef body(n):\n    raise SystemExit(3)\n'
    Path("leaves.py").write_text(HEAD + leaves)
    Path("folder.py").mkdir()
    Path("wrong.py").write_text("x = 1\nx / 0\n")
    Path("inside.py").write_text(HEAD + '@lang.algorithm("broadcast", chunks=1)\ndef body(n):\n    {}[n]\n')
    Path("syntax.py").write_text("def (\n")
    Path("unproved.py").write_text(HEAD + '@lang.algorithm("broadcast", chunks=1)\ndef body(n):\n    pass\n')
    Path("needs.py").write_text("from blinkmpi.lang.library import islands\n")
    code, out, err = blink(capsys, f"simulate cpu:3 --algorithm {source}")
    assert (code, out) == (2, "")
    assert err.startswith("blinkmpi: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_flags_that_contradict_it_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ("explain cpu:4 --algorithm two.py:forward", "forward is for a collective of its own, which has no size"),
        ("simulate cpu:4 --algorithm two.py:forward --op avg", "expected sum, prod, min or max"),
        ("simulate cpu:4 --algorithm ring.xml --collective broadcast", "ring is for allreduce, not broadcast"),
        ("explain cpu:4 --algorithm star.py --root 2", "star is for root 1, not 2"),
    ):
        code, _, err = blink(capsys, words)
        assert code == 2
        assert said in err


def test_lang_check_proves_a_python_file_for_some_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = blink(capsys, "lang check two.py:star --ranks 4")
    assert (code, err) == (0, "")
    assert out.startswith("star: broadcast from rank 1 of 4 ranks, 1 chunk, proved\n")
    assert blink(capsys, "lang check ring.json")[0] == 0
    code, out, _ = blink(capsys, "lang check two.py:forward --ranks 3 --json")
    assert code == 0
    assert json.loads(out)["collective"] == "custom"
    Path("unproved.py").write_text(HEAD + '@lang.algorithm("broadcast", chunks=1)\ndef body(n):\n    pass\n')
    code, out, err = blink(capsys, "lang check unproved.py --ranks 2")
    assert (code, err) == (1, "")
    assert "body: rank 1: nothing writes chunk 0 of its output" in out
    assert "refused" in out
    code, out, _ = blink(capsys, "lang check unproved.py --ranks 2 --json")
    assert code == 1
    assert json.loads(out)["fault"].startswith("body: rank 1: nothing writes")
    for words, said in (
        ("lang check star.py", "--ranks: for how many is it to be proved?"),
        ("lang check no.py", "cannot read 'no.py': No such file or directory; correct the path"),
        ("lang check no.py:star", "cannot read 'no.py': No such file or directory; correct the path"),
        ("lang check two.py:moon", "'two.py' has no algorithm 'moon'"),
        ("lang check ring.json --ranks 8", "ring is for 4 ranks, and there are 8"),
        ("lang check star.py --ranks 3 --slots 2", "--slots is for MSCCL's XML"),
    ):
        code, _, err = blink(capsys, words)
        assert code == 2, words
        assert said in err


TORUS = """
@lang.algorithm("broadcast", chunks=lambda n, cols, *_, **__: cols)
def torus(n, cols, wrap: bool = True, scale=1.5, *, title="plain", what: "int" = None):
    assert [type(x) for x in (cols, wrap, scale, title)] == [int, bool, float, str], (cols, wrap, scale, title)
    for r in range(1, n):
        chunk(0, "input", 0, cols).copy(r, "output", 0)
"""


def test_parameters_of_an_algorithm_are_given_behind_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("torus.py").write_text(HEAD + TORUS)
    Path("made.py").write_text("from blinkmpi.lang import library\nmade = library.islands(4, 2)\n")
    Path("opens.py").write_text("open('data.txt')\n")
    for words, chunks in (("cols=2", 2), ("cols=3,wrap=False,scale=2,title=7,what=9", 3)):
        code, out, err = blink(capsys, f"lang check torus.py:torus,{words} --ranks 4")
        assert (code, err) == (0, "")
        assert out.startswith(f"torus: broadcast from rank 0 of 4 ranks, {chunks} chunks, proved\n")
        assert lang.load(f"torus.py:torus,{words}", 4) == algorithm_for(f"torus.py:torus,{words}", 4)
    assert blink(capsys, "simulate cpu:4 --bytes 64K --algorithm torus.py:torus,cols=2")[0] == 0
    assert blink(capsys, "lang check made.py")[0] == 0, "it says for how many ranks it is"
    known = "cols (needed), wrap (bool, default True), scale (float, default 1.5), title (str, default 'plain'), what"
    for words, said in (
        ("torus.py:torus", f"'torus.py': missing a required argument: 'cols'; give its parameters: {known}"),
        ("torus.py:torus", "as in torus.py:torus,cols=VALUE"),
        ("torus.py", "as in torus.py:torus,cols=VALUE"),
        ("torus.py:torus,rows=2", f"'rows=2' fits no parameter; its parameters: {known}"),
        ("torus.py:torus,cols", "'cols' is no NAME=VALUE; its parameters: cols (needed)"),
        ("torus.py:torus,cols=2,cols=3", "'cols=3' is given twice"),
        ("torus.py:torus,cols=2,wrap=maybe", "wrap='maybe': expected bool for wrap (bool, default True)"),
        ("torus.py:torus,cols=2,scale=x", "scale='x': expected float for scale (float, default 1.5)"),
        ("torus.py:torus,cols=2,what=x", "what='x': expected int for what (int, default None)"),
        ("made.py:made,k=2", "islands is made already and takes no parameters; leave 'k=2' out"),
        ("opens.py", "'opens.py': line 1: FileNotFoundError"),
    ):
        code, out, err = blink(capsys, f"lang check {words} --ranks 4")
        assert (code, out) == (2, ""), words
        assert said in err


def test_errors_have_the_types_of_a_library(folder: Path) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        algorithm_for("no.json", 4)
    with pytest.raises(ArgumentError, match="ring is for 4 ranks"):
        algorithm_for("ring.json", 5)
