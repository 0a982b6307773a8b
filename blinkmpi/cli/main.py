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

COMPLETING = "_ARGCOMPLETE"  # is set by a shell that asks what may come next
COMPLETION = "pip install 'blinkmpi[completion]'"


def _never(_: argparse.Namespace) -> bool:
    return False


def _always(_: argparse.Namespace) -> bool:
    return True


def _if_live(args: argparse.Namespace) -> bool:
    return args.topology is None


class Entry(NamedTuple):
    """What a command does, in a line, and whether all ranks take part in it, by its arguments; else rank 0 does it.

    The examples end its help; those of ``run`` and ``nccl`` are in their modules.
    """

    what: str
    on_all_ranks: Callable[[argparse.Namespace], bool]
    examples: tuple[str, ...] = ()


COMMANDS = {
    "topo": Entry("show a machine: devices, links, rates", _if_live, (
        "blinkmpi topo dgx-1v --gpus 1,4,5,6",
        "mpirun -np 8 blinkmpi topo --measure",
    )),
    "plan": Entry("pack trees and prove their rate", lambda args: args.topology is None and not args.diff, (
        "blinkmpi plan dgx-1v --gpus 1,4,5,6 --collective allreduce",
        "blinkmpi plan --diff plan.json other.json",
    )),
    "explain": Entry("say how a call runs, and why", _if_live, (
        "blinkmpi explain dgx-a100 --collective allgather --bytes 64M",
        "mpirun -np 4 blinkmpi explain --bytes 1M",
    )),
    "simulate": Entry("run a call in this process and predict its time", _if_live, (
        "blinkmpi simulate dgx-1v --gpus 1,4,5,6 --bytes 1M",
        "blinkmpi simulate pcie-8 --bytes 64K --dtype bfloat16",
    )),
    "subsets": Entry("list every part of a machine that a job may get, trees beside rings", _if_live, (
        "blinkmpi subsets dgx-1p",
    )),
    "advise": Entry("say which GPUs to ask a scheduler for, the best sets first", _if_live, (
        "blinkmpi advise dgx-1v --take 4 --from 0,1,4,5,6",
    )),
    "env": Entry("print versions and settings, to paste into a report", _never, ("blinkmpi env --all",)),
    "bench": Entry("time and check collectives, beside other libraries", _always, (
        "mpirun -np 4 blinkmpi bench all_reduce -b 64K -e 256M -f 4 --compare mpi",
        "mpirun -np 8 blinkmpi bench all_reduce -b 1K -e 1G -f 4 --compare nccl -G 4",
        "blinkmpi bench --sweep benchmarks/sweeps/quick.toml -J quick.json",
    )),
    "doctor": Entry("see whether a job would run well here", _always, ("mpirun -np 8 blinkmpi doctor",)),
    "tune": Entry("measure which scheme, protocol and chunk is fastest on these GPUs, or what steps of calls cost on "
                  "these CPU ranks, and keep it for later jobs", _always, (
        "mpirun -np 8 blinkmpi tune",
        "mpirun -np 8 blinkmpi tune allreduce allgather -b 64K -e 64M",
        "mpirun -np 2 blinkmpi tune --beside nccl",
    )),
    "top": Entry("watch running jobs on this machine", _never, ("blinkmpi top", "blinkmpi top --once --pid 4711")),
    "run": Entry("run a program of mpi4py's, unchanged, with a Communicator as its MPI.COMM_WORLD", _always),
    "nccl": Entry("run a program of NCCL's, unchanged, with calls of ours; or count its calls", _always),
    "launch": Entry("print the mpirun or srun line that starts a program on these machines, with the reason of each "
                    "flag", _never, (
        "blinkmpi launch -np 4 -- python examples/train.py",
        "blinkmpi launch --hostfile hosts -np 16 --gpus-per-node 8 --run -- python train.py",
    )),
    "lang": Entry("chunk programs: prove them, or say what is wrong with them", _never, (
        "blinkmpi lang check allreduce.xml",
        "blinkmpi lang check mine.py:ring --ranks 8",
    )),
    "plot": Entry("draw what bench measured: time, bus bandwidth and ratios against size", _never, (
        "blinkmpi plot all_reduce.json -o all_reduce.svg",
    )),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors of ours end as one line on stderr and code 2."""
    if COMPLETING in os.environ:
        return _complete()
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
            if command.examples:
                one.formatter_class = argparse.RawDescriptionHelpFormatter
                one.epilog = "\n  ".join(["examples:", *command.examples])
            _module(name).add_arguments(one)
    return made


def _complete() -> int:
    """What the shell asks for when a user types TAB: argcomplete answers it by the parser, and ends the process."""
    try:
        import argcomplete
    except ImportError:
        print(f"blinkmpi: completion needs argcomplete: {COMPLETION}", file=sys.stderr)
        return 1
    typed = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(parser([word for word in typed if word in COMMANDS][:1]), always_complete_options="long")
    return 0


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
