"""The command ``run``: a program of mpi4py's that is not changed, with a Communicator as its ``MPI.COMM_WORLD``."""

import argparse
import importlib
import os
import sys
from typing import Any

from ..errors import ArgumentError

EXAMPLES = """\
examples:
  mpirun -np 4 python -m blinkmpi run train.py --epochs 3
  mpirun -np 4 blinkmpi run --strict -m package.module
  mpirun -np 4 blinkmpi run -c 'from mpi4py import MPI; print(MPI.COMM_WORLD)'
  torchrun --nproc-per-node 4 -m blinkmpi run --backend-for gloo,nccl train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags; what follows the program is the program's."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--strict", action="store_true", help="a call that blinkmpi would hand to MPI is an error")
    add("--timeout", type=float, metavar="SECONDS", help="how long a call may wait (BLINKMPI_TIMEOUT, or 1800)")
    text = "torch.distributed takes blink where the program names one of these backends: gloo,nccl"
    add("--backend-for", metavar="LIST", help=text)
    words: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
    add("-m", dest="module", help="a module and its arguments, as python -m takes them", **words)
    add("-c", dest="code", help="a text and its arguments, as python -c takes them", **words)
    add("program", help="a file of Python, or - for stdin, and its arguments", **words)


def run(args: argparse.Namespace) -> int:
    """Run the program as ``python -m mpi4py`` would; the exit code is its own."""
    words = _words(args)
    try:
        from mpi4py import run as program
    except ImportError as error:
        raise ArgumentError(f"blinkmpi run needs mpi4py: {error}; pip install 'blinkmpi[mpi]'") from error
    no_world = args.backend_for is not None and _by_torchrun()
    if no_world and (args.strict or args.timeout is not None):
        raise ArgumentError(
            "--strict, --timeout: they are for calls of MPI.COMM_WORLD, and torchrun starts no MPI; leave them out and "
            "give init_process_group its timeout="
        )
    if args.backend_for is not None:
        _serve(args.backend_for)
    if not no_world:
        from ..world import World

        World(strict=args.strict, timeout=args.timeout).put()
    if words[0] in ("-m", "-c", "-") and not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as python -m has it; else it is the folder of this command
    try:
        program.run_command_line(words)
    except SystemExit as end:
        if end.code:
            _note_failure()
        program.set_abort_status(end)
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())
        _note_failure()
        program.set_abort_status(1)
        return 1
    return 0


def _note_failure() -> None:
    """Let what runs at this process's end know that the program has failed."""
    from ..runtime.process_exit import UNCAUGHT  # not before: under torchrun the group decides how MPI starts

    UNCAUGHT.set()


def _by_torchrun() -> bool:
    """Whether torchrun has started this process, of which MPI knows nothing."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _serve(backends: str) -> None:
    """Let torch take blink for these backends; under mpirun with the variables that torchrun sets."""
    try:
        importlib.import_module("torch")  # first: without it our own package warns that torch does not know us
        from ..torch.names import serve
        from ..torch.variables import setenv
    except ImportError as error:
        raise ArgumentError(f"--backend-for needs torch: {error}; pip install 'blinkmpi[torch]'") from error
    serve([name.strip() for name in backends.lower().split(",") if name.strip()])
    setenv()


def _words(args: argparse.Namespace) -> list[str]:
    """The program and its arguments, as Python's own command line has them."""
    for flag, words in (("-m", args.module), ("-c", args.code)):
        if words:
            return [flag, *words]
    if not args.program:
        raise ArgumentError("no program; name a file of Python, -m MODULE, -c CODE, or - for stdin")
    if args.program[0] != "-" and not os.path.exists(args.program[0]):
        raise ArgumentError(f"{args.program[0]}: no such file; name a file of Python, or -m MODULE")
    return list(args.program)
