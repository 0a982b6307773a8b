"""The command ``launch``: find the MPI and the machines, print the line that starts the ranks, or become it."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys

from ..errors import ArgumentError
from ..launch.allocation import allocation, scheduler_of
from ..launch.command import BINDINGS, LAUNCHERS, PMIS, Command, Job, Launcher, Pmi, command, exported, mpi_of
from ..launch.hostfile import Dialect, Host, parse, read_for, write
from ..util.launcher import find_mpirun
from . import output as cli_out

VERSION_SECONDS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="FILE", help="the machines, in Open MPI's or Hydra's dialect")
    where.add_argument("--from-env", action="store_true", help="the machines that Slurm, PBS or LSF gave this job")
    parser.add_argument("-np", type=int, dest="ranks", metavar="N", help="ranks; with --from-env by default its tasks")
    parser.add_argument("--ppn", type=int, metavar="K", help="ranks of each node")
    parser.add_argument("--gpus-per-node", type=int, metavar="G", help="GPUs of each node, one for each rank")
    parser.add_argument("--bind", choices=BINDINGS, default="none", help="what a rank stays on (none)")
    parser.add_argument("-x", action="append", default=[], metavar="NAME", help="export this variable too")
    parser.add_argument("--mpi", choices=LAUNCHERS, help="the launcher; default: mpirun of the MPI that mpi4py has")
    parser.add_argument("--pmi", choices=PMIS, help="srun's plugin; default: the one of the MPI that mpi4py has")
    parser.add_argument("-o", metavar="FILE", dest="output", help="write the machines in the launcher's dialect")
    parser.add_argument("--run", action="store_true", help="become that command")
    parser.add_argument("program", nargs="*", metavar="PROGRAM ARGS", help="after --")


def run(args: argparse.Namespace) -> int:
    """Print the line and why, or run it: then this process is the launcher, and its exit code the job's."""
    launcher, pmi, mpirun = _mpi(args)
    hosts, hostfile, ranks = _machines(args, launcher)
    program = list(args.program)
    if hosts and program:
        program[0] = shutil.which(program[0]) or program[0]  # another machine's PATH may lead elsewhere
    variables = exported(os.environ, extra=args.x, allocated=args.from_env)
    job = Job(tuple(program), ranks, hosts, hostfile, args.ppn, args.gpus_per_node, args.bind,
              variables, scheduler_of(os.environ), args.from_env, pmi)  # fmt: skip
    found = command(job, launcher, mpirun=mpirun)
    line = shlex.join(found.argv)
    if not args.run:
        print("\n".join((line, "", *_reasons(found))))
        return 0
    print(f"blinkmpi: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    try:
        os.execvp(found.argv[0], found.argv)
    except OSError as error:
        raise ArgumentError(f"cannot start {found.argv[0]!r}: {error.strerror}; install this MPI, load its module, "
                            "or choose another with --mpi") from error  # fmt: skip


def version_text() -> str:
    """What mpi4py's MPI says of itself, without initialising it; else what ``mpirun --version`` says; else nothing."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        return str(MPI.Get_library_version())
    except (ImportError, RuntimeError):  # no mpi4py, or no libmpi
        mpirun = find_mpirun()
    if mpirun is None:
        return ""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise ArgumentError(f"{mpirun} --version: {error}; say which MPI this is with --mpi") from error
    return done.stdout + done.stderr


def _mpi(args: argparse.Namespace) -> tuple[Launcher, Pmi, str]:
    """Launcher, srun's plugin, and the path of mpirun."""
    if args.mpi == "srun":
        return "srun", args.pmi or mpi_of(version_text())[1], "srun"
    if args.pmi:
        raise ArgumentError(f"--pmi {args.pmi}: a plugin of srun's; give --mpi srun too, or leave it out")
    if args.mpi:
        return args.mpi, "pmix", "mpirun"
    text = version_text()
    if not text:
        raise ArgumentError("no MPI here: mpi4py finds none, and there is no mpirun; load your site's module, "
                            "pip install 'blinkmpi[mpi]', or say which with --mpi")  # fmt: skip
    return (*mpi_of(text), find_mpirun() or "mpirun")


def _machines(args: argparse.Namespace, launcher: Launcher) -> tuple[tuple[Host, ...], str, int]:
    """Hosts, a file of them in the launcher's dialect ("" if there is none), and the number of ranks."""
    dialect: Dialect = "openmpi" if launcher == "openmpi" else "hydra"
    hosts: tuple[Host, ...] = ()
    hostfile, ranks = "", args.ranks
    if args.from_env:
        given = allocation(os.environ)
        hosts, ranks = given.hosts, args.ranks if args.ranks is not None else given.ranks
    elif args.hostfile:
        hosts, old = read_for(args.hostfile, dialect)
        hostfile = args.hostfile if old in (None, dialect) else ""
    if ranks is None:
        raise ArgumentError("how many ranks? Give -np N, or --from-env inside a job")
    if args.output:
        if launcher == "srun" or not hosts:
            raise ArgumentError(f"-o {args.output}: " + (
                "srun reads no hostfile; choose another launcher with --mpi" if launcher == "srun"
                else "no machines to write; give --hostfile or --from-env"))  # fmt: skip
        text = write(hosts, dialect)
        parse(text, dialect, source=args.output)
        cli_out.write(args.output, text)
        hostfile = args.output
    return hosts, "" if launcher == "srun" else hostfile, ranks


def _reasons(found: Command) -> list[str]:
    """The parts and their reasons in two columns; neighbours with one reason in one row."""
    rows: list[tuple[list[str], str]] = []
    for part in found.parts[:-1]:
        if rows and rows[-1][1] == part.why:
            rows[-1][0].extend(part.words)
        else:
            rows.append((list(part.words), part.why))
    lines = []
    for words, why in rows:
        left = shlex.join(words)
        lines += [f"  {left:28}  {why}"] if len(left) <= 28 else [f"  {left}", f"  {'':28}  {why}"]
    return lines
