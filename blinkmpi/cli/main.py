"""The command line: ``blinkmpi COMMAND``. :data:`COMMANDS` has the commands, each of which is a module of this package.

A command's module is imported when the command is asked for; it has ``add_arguments(parser)`` and ``run(args)``, which
gives the exit code. With TOPOLOGY, a machine of the catalogue or a file, a command needs no MPI. Without it, the
command asks the ranks that ``mpirun`` started (this process alone without ``mpirun``). Rank 0 prints, and its exit code
is the job's.
"""

import argparse
import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from .. import __version__
from ..errors import ArgumentError, BlinkError
from ..util.launcher import launched_rank
from .output import fail, own_rank


def _never(_: argparse.Namespace) -> bool:
    return False


def _always(_: argparse.Namespace) -> bool:
    return True


def _if_live(args: argparse.Namespace) -> bool:
    return args.topology is None


class Entry(NamedTuple):
    """What a command does, in a line, and whether all ranks take part in it, by its arguments; else rank 0 does it."""

    what: str
    on_all_ranks: Callable[[argparse.Namespace], bool]


COMMANDS = {
    "topo": Entry("show a machine: devices, links, rates", _if_live),
    "plan": Entry("pack trees and prove their rate", lambda args: args.topology is None and not args.diff),
    "explain": Entry("say how a call runs, and why", _if_live),
    "simulate": Entry("run a call in this process and predict its time", _if_live),
    "subsets": Entry("list every part of a machine that a job may get, trees beside rings", _if_live),
    "advise": Entry("say which GPUs to ask a scheduler for, the best sets first", _if_live),
    "env": Entry("print versions and settings, to paste into a report", _never),
    "bench": Entry("time and check collectives, beside other libraries", _always),
    "doctor": Entry("see whether a job would run well here", _always),
    "tune": Entry("measure which scheme, protocol and chunk is fastest on these GPUs, or what steps of calls cost on "
                  "these CPU ranks, and keep it for later jobs", _always),
    "top": Entry("watch running jobs on this machine", _never),
    "run": Entry("run a program of mpi4py's, unchanged, with a Communicator as its MPI.COMM_WORLD", _always),
    "nccl": Entry("count what an unchanged program asks of NCCL", _always),
    "launch": Entry("print the mpirun or srun line that starts a program on these machines, with the reason of each "
                    "flag", _never),
    "lang": Entry("chunk programs: prove them, or say what is wrong with them", _never),
    "plot": Entry("draw what bench measured: time, bus bandwidth and ratios against size", _never),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors of ours end as one line on stderr and code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if own_rank() != 0 and not _for_all_ranks(words):
        return 0  # rank 0 answers, with the job's exit code
    args = parsed(words)
    try:
        code: int = _module(args.command).run(args)
        if sys.stdout is not None:  # it is closed
            sys.stdout.flush()
        return code
    except BlinkError as error:
        return fail(error)
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        _drop_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return fail(ArgumentError(f"cannot write the answer: {error.strerror}; make room, or write it elsewhere"))
    except KeyboardInterrupt:
        if launched_rank(os.environ) is not None:
            raise
        print("blinkmpi: interrupted", file=sys.stderr)
        return 130


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; what is wrong ends the process, with the usage of the command that is meant."""
    made = parser([word for word in words if word in COMMANDS][:1])
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        made.error(f"there is no command {words[0]!r}{_near(words[0], COMMANDS) or '; blinkmpi -h has all'}")
    args, rest = made.parse_known_args(words)
    if rest:
        own: argparse.ArgumentParser = args.parser
        flags = re.findall(r"(?<![\w-])--?[a-z][\w-]*", own.format_help())
        own.error(f"unrecognized arguments: {' '.join(rest)}{_near(rest[0].partition('=')[0], flags)}")
    return args


def _near(word: str, words: Iterable[str]) -> str:
    """What may have been meant, as the end of a sentence; nothing if no word is near."""
    import difflib

    near = difflib.get_close_matches(word, [*words], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command line; of these commands it knows the arguments, of the others the names."""
    what = "Collectives from packed spanning trees: look and ask."
    made = argparse.ArgumentParser(prog="blinkmpi", description=what)
    made.add_argument("--version", action="version", version=f"blinkmpi {__version__}")
    sub = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = sub.add_parser(name, help=command.what, description=command.what)
        one.set_defaults(parser=one)
        if name in commands:
            _module(name).add_arguments(one)
    return made


def _module(command: str) -> Any:
    return import_module(f".{command}", __package__)


def _for_all_ranks(words: Sequence[str]) -> bool:
    """Whether a command that can be parsed needs the other ranks too."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            args = parsed(words)
        except SystemExit:
            return False
    return COMMANDS[args.command].on_all_ranks(args)


def _drop_output() -> None:
    """Let what is still to be written to stdout go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
