"""Algorithms from files: what :meth:`Algorithm.save` wrote, MSCCL's XML, or functions of a Python file."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable
from errno import EISDIR
from os import strerror
from os.path import abspath
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, BlinkError, FormatError
from ..program.call import collective_named
from ..util.text import brief, error_text, quoted
from ..util.together import Comm, from_root
from .algorithms import Algorithm, read_algorithm, read_xml
from .parameters import arguments, check_all_given
from .written import Written

READERS: dict[str, Callable[[str], Algorithm]] = {".json": read_algorithm, ".xml": read_xml}  # by files' suffix
OWN = "<run_path>"  # the module of what a file defines that runpy runs


def load(source: str | Path, *args: Any, **params: Any) -> Algorithm:
    """An algorithm from a file: one that :meth:`Algorithm.save` wrote, MSCCL's XML, or a function in a Python file.

    Args:
        source: ``ring.json``, ``ring.xml``, or ``mine.py:ring``, which is run, also as ``mine.py:torus,cols=2``.
        args, params: of the function, the number of ranks first: ``load("mine.py:ring", 8)``.

    Raises:
        ArgumentError: for a file of another kind, or without that function. FormatError: for one that cannot be read.
        PlanError: for an algorithm that is wrong.
    """
    source = str(source)
    path, name, words = _parts_of(source)
    suffix = Path(path).suffix
    if suffix in READERS and not (args or params):
        return READERS[suffix](path)
    if suffix != ".py" or not name or not args:
        kinds = ", ".join(f"x{kind}" for kind in READERS)
        raise ArgumentError(
            f"load({quoted(source)}{''.join(f', {arg!r}' for arg in args)}): expected a file ({kinds}) alone, or a "
            "function of a Python file with its number of ranks, as in load('x.py:ring', 8)"
        )
    found = _run(path).get(name)
    if not isinstance(found, Written):
        raise ArgumentError(f"{quoted(path)} has no algorithm {quoted(name)}; decorate it with @lang.algorithm(...)")
    return _made(path, found, *args, **arguments(found.body, words, source), **params)


def algorithm_for(source: str, n: int | None) -> Algorithm:
    """The algorithm of a file for ``n`` ranks, as the commands' ``--algorithm FILE`` names it.

    Args:
        source: ``ring.json``, ``ring.xml``, ``mine.py``, or ``mine.py:ring`` where the file has several. Of a Python
            file, a function with ``@lang.algorithm`` is called with the number of ranks, and with parameters as in
            ``mine.py:torus,cols=2``; an Algorithm is taken.
        n: None for as many as the file says.

    Raises:
        ArgumentError: for another file, another number of ranks, or several algorithms. FormatError: for a file that
        cannot be read. PlanError: for an algorithm that is wrong.
    """
    path, name, words = _parts_of(source)
    suffix = Path(path).suffix
    if suffix in READERS:
        made = READERS[suffix](path)
    elif suffix == ".py":
        made = _of_python(source, path, name, words, n)
    else:
        kinds = ", ".join(f"x{kind}" for kind in READERS)
        raise ArgumentError(
            f"{quoted(source)}: expected a file of an algorithm: {kinds}, x.py or x.py:NAME,PARAMETER=VALUE"
        )
    if n not in (None, made.n):
        raise ArgumentError(f"{quoted(source)}: {brief(made.name)} is for {made.n} ranks, and there are {n}; make it "
                            "for these, or take as many")  # fmt: skip
    return made


def algorithm_from_root(comm: Comm, source: str) -> Algorithm:
    """The algorithm of a file for the ranks of ``comm``, which rank 0 reads; collective, errors on every rank."""
    text = from_root(comm, lambda: algorithm_for(source, comm.size).to_json(), str)
    return Algorithm.from_json(text, source="algorithm from rank 0")


def check_asked(made: Algorithm, collective: str | None, root: int) -> None:
    """Raise ArgumentError unless a command can call the algorithm, as the collective and root that it was asked for.

    Args:
        collective: None if the algorithm says it. root: 0 if the algorithm says it.
    """
    if made.collective == "custom":
        raise ArgumentError(f"{made.name} is for a collective of its own, which has no size to be called with; "
                            "blinkmpi lang check proves it, Communicator.Custom runs it")  # fmt: skip
    if collective is not None and collective_named(collective) != made.collective:
        raise ArgumentError(f"{made.name} is for {made.collective}, not {brief(collective)}; leave the collective "
                            "out, or name an algorithm for it")  # fmt: skip
    if root not in (0, made.root):
        raise ArgumentError(f"{made.name} is for root {made.root}, not {root}; leave the root out, or name an "
                            "algorithm for it")  # fmt: skip


def _parts_of(source: str) -> tuple[str, str, list[str]]:
    """File, name and parameters of ``mine.py:torus,cols=2``; of other files, the file alone."""
    if ".py:" not in source:
        return source, "", []
    path, _, rest = source.rpartition(".py:")
    name, *words = rest.split(",")
    return f"{path}.py", name, words


def path_of(source: str) -> str:
    """The file of ``mine.py:torus,cols=2``."""
    return _parts_of(source)[0]


def _of_python(source: str, path: str, name: str, words: list[str], n: int | None) -> Algorithm:
    """What a Python file makes for ``n`` ranks."""
    found = _named(path, name)
    if isinstance(found, Algorithm):
        if words:
            raise ArgumentError(f"{quoted(source)}: {brief(found.name)} is made already and takes no parameters; leave "
                                f"{quoted(','.join(words))} out")  # fmt: skip
        return found
    given = arguments(found.body, words, source)
    check_all_given(found.body, given, path, name or found.body.__name__)
    if n is None:
        raise ArgumentError(f"--ranks: for how many is it to be proved? {quoted(source)} is a function of that; write "
                            "--ranks 8")  # fmt: skip
    return _made(path, found, n, **given)


def _named(path: str, name: str) -> Algorithm | Written:
    """The algorithm of that name in a Python file; without a name the only one, of the file's own if it has any."""
    there = {key: value for key, value in _run(path).items() if isinstance(value, Written | Algorithm)}
    if name and name in there:
        return there[name]
    own = {key: value for key, value in there.items() if isinstance(value, Algorithm) or value.body.__module__ == OWN}
    some = own or there
    if not some:
        raise ArgumentError(f"{quoted(path)} has no algorithm; decorate a function with @lang.algorithm(...)")
    if name or len(some) > 1:
        what = f"no algorithm {quoted(name)}" if name else f"{len(some)} algorithms"
        known = ", ".join(sorted(some))
        raise ArgumentError(f"{quoted(path)} has {what}; choose one of {known}, as in {brief(path)}:{min(some)}")
    return next(iter(some.values()))


def _run(path: str) -> dict[str, Any]:
    """What a Python file defines."""
    try:
        if Path(path).is_dir():  # runpy would look for a program in it
            raise IsADirectoryError(EISDIR, strerror(EISDIR))
        return runpy.run_path(path)
    except BlinkError:
        raise
    except OSError as error:
        if error.filename is not None and abspath(str(error.filename)) != abspath(path):  # one that the program opens
            raise _of_the_file(path, error) from error
        raise FormatError(f"cannot read {quoted(path)}: {error.strerror}; correct the path") from error
    except (Exception, SystemExit) as error:
        raise _of_the_file(path, error) from error


def _made(path: str, written: Written, *args: Any, **params: Any) -> Algorithm:
    """What a function of a Python file makes."""
    try:
        return written(*args, **params)
    except BlinkError:
        raise
    except (Exception, SystemExit) as error:
        raise _of_the_file(path, error) from error


def _of_the_file(path: str, error: BaseException) -> ArgumentError:
    """What the user's own program raised, with the line where."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f"line {lines[-1]}: " if lines and lines[-1] else ""
    return ArgumentError(f"{quoted(path)}: {where}{brief(error_text(error))}; correct the file")
