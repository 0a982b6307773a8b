"""The command ``nccl``: programs that use NCCL, unchanged: run with calls of ours among NCCL's, or counted."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import ArgumentError
from ..nccl.counts import Kind, Process, Report, kinds, read_folder, read_process
from ..nccl.library import COUNT, DOOR, FOLDER, SONAME, environment, opened_by_name, preloaded
from ..nccl.status import CommunicatorStatus, DoorStatus, of_process
from ..topology.show import table_of
from ..util.text import amount_text, plural, size_text
from .output import show, write

EXAMPLES = f"""\
examples:
  blinkmpi nccl run torchrun --nproc-per-node 8 train.py
  BLINKMPI_NCCL=allreduce:..1M blinkmpi nccl run vllm serve MODEL
  LD_PRELOAD=$(blinkmpi nccl) python serve.py   and then   blinkmpi nccl status PID
  VLLM_NCCL_SO_PATH=$(blinkmpi nccl --by-name) vllm serve MODEL
  blinkmpi nccl count -o counts.json torchrun --nproc-per-node 8 train.py

Without an action it prints a library's path: for LD_PRELOAD, which programs meet that are linked with
{SONAME}, or with --by-name for those that open it by name. --count: that of the library that counts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's actions and their flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    text = "print the path of what programs open that take NCCL's library by name"
    parser.add_argument("--by-name", action="store_true", help=text)
    text = "print the path of the library that only counts NCCL's calls"
    parser.add_argument("--count", action="store_true", dest="counts", help=text)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    what = "run a program, and make those of its calls of NCCL that all ranks can make without NCCL"
    program = actions.add_parser("run", help=what, description=what)
    program.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    what = "run a program and say which calls of NCCL its processes on this machine made"
    count = actions.add_parser("count", help=what, description=what)
    count.add_argument("-o", metavar="FILE", dest="output", help="write the counts of each process as JSON")
    count.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    what = "say whose the calls of a running process are that was started by `run` or with the library, or its counts"
    status = actions.add_parser("status", help=what, description=what)
    status.add_argument("pid", type=int, metavar="PID", help="the process")
    status.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Answer; the exit code, which is the program's if one was run."""
    if args.action == "run":
        return _execute(args.program)
    if args.action == "count":
        return _count(args.program, args.output)
    if args.action == "status":
        return _status(args.pid, as_json=args.json)
    source = COUNT if args.counts else DOOR
    print(opened_by_name(source) if args.by_name else preloaded(source))
    return 0


def _named(action: str, program: Sequence[str]) -> Sequence[str]:
    program = program[1:] if program[:1] == ["--"] else program
    if not program:
        raise ArgumentError(f"nccl {action}: name a program, as in `blinkmpi nccl {action} torchrun train.py`")
    return program


def _execute(program: Sequence[str]) -> int:
    """Be the program from here on: its processes meet the door."""
    program = _named("run", program)
    env = environment(os.environ)
    sys.stdout.flush()
    try:
        os.execvpe(program[0], [*program], env)
    except OSError as error:
        raise ArgumentError(f"cannot run {program[0]!r}: {error.strerror}") from error


def _count(program: Sequence[str], output: str | None) -> int:
    program = _named("count", program)
    if output:
        write(output, "")  # what cannot be written is said before the program has run, for hours perhaps
    with tempfile.TemporaryDirectory(prefix="blinkmpi-nccl-") as folder:
        code = _run(program, {**environment(os.environ, COUNT), FOLDER: folder})
        processes = read_folder(Path(folder))
    report = Report(tuple(program), code, kinds(processes), tuple(processes))
    show(_text(report.kinds, processes), stderr=True)  # what the program prints stays as it is
    if output:
        write(output, _json(report))
    return code


def _run(program: Sequence[str], env: dict[str, str]) -> int:
    """Run a program to its end; its exit code as a shell has it."""
    try:
        child = subprocess.Popen(program, env=env)
    except OSError as error:
        raise ArgumentError(f"cannot run {program[0]!r}: {error.strerror}") from error
    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal sends the first one to the program, too
        before[number] = signal.signal(number, _to(child) if number == signal.SIGTERM else signal.SIG_IGN)
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _to(child: subprocess.Popen[bytes]) -> Callable[[int, object], None]:
    return lambda number, _frame: child.send_signal(number)


def _status(pid: int, *, as_json: bool) -> int:
    door = of_process(pid)
    if door is not None:
        if as_json:
            sys.stdout.write(_json(door))
        else:
            show(_door_text(door))
        return 0
    process = read_process(pid)
    if as_json:
        sys.stdout.write(_json(process))
    else:
        show(_text(kinds([process]), [process]))
    return 0


def _door_text(door: DoorStatus) -> RenderableType:
    """Whose each communicator's calls are, and why."""
    if door.why:
        return Text(f"All calls of process {door.pid} are NCCL's: {door.why}.")
    parts = [part for c in door.communicators for part in _communicator_text(c)]
    return Group(*parts) if parts else Text(f"Process {door.pid} has made no communicator of several ranks yet.")


def _communicator_text(c: CommunicatorStatus) -> list[RenderableType]:
    title = f"communicator {c.name[:8]}, rank {c.rank} of {c.ranks}, {c.state}: {c.ours} calls ours, {c.nccls} NCCL's"
    if c.why:
        return [Text(f"communicator {c.name[:8]}, rank {c.rank} of {c.ranks}: all calls are NCCL's: {c.why}", "bold")]
    table = table_of("call", "type", "op", ">root", ">at most", "whose", ">ours", ">NCCL's", "why")
    for k in c.kinds:
        root = "" if k.root < 0 else str(k.root)
        table.add_row(
            k.call, k.dtype, k.op, root, size_text(k.most_bytes), k.whose, str(k.ours), str(k.nccls), k.why
        )  # fmt: skip
    return [Text(title, "bold"), table]


def _text(found: Sequence[Kind], processes: Sequence[Process]) -> RenderableType:
    """The calls by kind, and the communicators."""
    if not processes:
        return Text(
            f"No process on this machine called NCCL through this library. A program meets it if it is linked with\n"
            f"{SONAME}, or opens what VLLM_NCCL_SO_PATH or SGLANG_NCCL_SO_PATH names; JAX and programs that contain\n"
            "NCCL do not meet it."
        )
    table = table_of(
        "call",
        "type",
        "op",
        ">ranks",
        ">at most",
        ">calls each",
        ">processes",
        ">bytes in all",
        ">in groups",
        ">in graphs",
    )
    for kind in found:
        each = str(kind.most) if kind.fewest == kind.most else f"{kind.fewest} to {kind.most}"
        ranks, most = str(kind.ranks) if kind.ranks else "?", size_text(kind.most_bytes)
        row = kind.function, kind.dtype, kind.op, ranks, most, each, str(kind.processes), amount_text(kind.nbytes)
        table.add_row(*row, str(kind.grouped or "-"), str(kind.captured or "-"))
    sizes = sorted((ranks for process in processes for ranks, _ in process.communicators), reverse=True)
    comms = ", ".join(f"{sizes.count(size)} of {plural(size, 'rank')}" for size in dict.fromkeys(sizes))
    lost = sum(process.lost for process in processes)
    rest = [Text(f" {lost} calls more were of kinds for which there was no room")] if lost else []
    by = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    title = Text(f"NCCL's calls of {by}; communicators met: {comms}", "bold")
    return Group(title, table, *rest)


def _json(thing: Report | Process | DoorStatus) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(thing), indent=1).decode() + "\n"
