"""``blinkmpi lang check FILE``: prove a chunk program, or say what is wrong. Only rank 0 runs this; it needs no MPI."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..util.text import plural
from .output import show

SHOWN = 5  # faults of a kind, and unused steps, that are printed; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    what = "say what a file of a chunk program computes, or what is wrong with it"
    check = actions.add_parser("check", help=what, description=what)
    check.add_argument("file", metavar="FILE", help="x.xml (MSCCL's), x.json, x.py, x.py:NAME,PARAMETER=VALUE")
    check.add_argument("--ranks", type=int, metavar="N", help="the number of ranks to prove a Python file for")
    check.add_argument(
        "--slots", type=int, metavar="N", help="messages that a connection holds; default: Simple 2, LL 8"
    )
    check.add_argument("--json", action="store_true", help="print JSON, with every fault")


def run(args: argparse.Namespace) -> int:
    """Judge a file; 0 if it is proved, 1 if it is wrong."""
    from ..errors import ArgumentError
    from ..lang.source import path_of

    suffix = Path(path_of(args.file)).suffix
    if suffix != ".xml" and args.slots is not None:
        raise ArgumentError("--slots is for MSCCL's XML, whose connections hold so many messages; leave it out")
    return _written(args) if suffix in (".py", ".json") else _xml(args)


def _xml(args: argparse.Namespace) -> int:
    """Judge MSCCL's XML."""
    from ..errors import ArgumentError
    from ..lang.xml.check import judge
    from ..lang.xml.file import load_xml

    if args.slots is not None and args.slots < 1:
        raise ArgumentError(f"--slots {args.slots}: a connection holds at least one message; write 1 or more")
    report, _ = judge(load_xml(args.file), source=args.file, slots=args.slots)
    if args.ranks not in (None, report.ranks):
        raise ArgumentError(f"--ranks {args.ranks}: {args.file} is for {report.ranks} ranks; leave --ranks out")
    if args.json:
        print(report.to_json(), end="")
    else:
        show(_text(report))
    return 0 if report.proved else 1


def _written(args: argparse.Namespace) -> int:
    """Prove what a Python file makes, or what :meth:`Algorithm.save` wrote."""
    from rich.text import Text

    from ..errors import PlanError
    from ..lang.source import algorithm_for

    try:
        made = algorithm_for(args.file, args.ranks)
    except PlanError as error:
        if args.json:
            print(json.dumps({"format": "blinkmpi.refusal", "version": 1, "source": args.file, "fault": str(error)}))
        else:
            show(Text.assemble(f"{error}\n", ("refused", "bold red")))
        return 1
    print(made.to_json() if args.json else made.explain(), end="" if args.json else "\n")
    return 0


def _text(report: Any) -> Any:
    """What was found in MSCCL's XML: a heading, one row for each thing that was looked at, and the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    calls = [word for word, there in (("out of place", report.out_of_place), ("in place", report.in_place)) if there]
    root = f" from rank {report.root}" if report.root >= 0 else ""
    rows: list[tuple[str, Any]] = [
        ("collective", f"{report.collective}{root} of {plural(report.ranks, 'rank')}, {' and '.join(calls)}"),
        ("size", f"{plural(report.chunks, 'chunk')}, {plural(report.blocks, 'thread block')}, "
                 f"{plural(report.steps, 'step')}, protocol {report.protocol}"),
    ]  # fmt: skip
    kinds = {fault.kind for fault in report.faults}
    # What is looked at in turn; each is known only if what is before it is right.
    held = plural(report.slots, "message")
    looked = [
        ("structure", {"structure"}, "sound", ""),
        ("order", {"deadlock"}, f"no deadlock: {report.slots_needed} of the {held} that a connection holds are enough",
         "structure"),
        ("races", {"race"}, "none", "deadlock"),
        ("reads", {"read"}, "only what was written before", "race"),
        ("results", {"result"}, "as " + report.collective + " wants them", "race"),
    ]  # fmt: skip
    stopped = ""
    for title, own, good, needs in looked:
        if needs in kinds:
            stopped = needs
        wrong = [fault.text for fault in report.faults if fault.kind in own]
        if stopped:
            rows.append((title, Text("not known", "dim")))
        else:
            rows.append((title, _first(wrong, "red") if wrong else Text(good)))
    if report.proved and report.slots_by_chunk > report.slots:
        text = f"{report.slots_by_chunk} messages, where chunks are so large that each is a message of its own"
        rows.append(("long vectors", Text(text, "yellow")))
    if not stopped:
        rows.append(("unused", _first(report.unused, "yellow") if report.unused else Text("no step")))
    if report.computes:
        rows.append(("computes", _first(report.computes, "")))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in rows:
        table.add_row(f" {title}", value)
    verdict = Text("refused: " + plural(len(report.faults), "fault"), "bold red")
    if report.proved:
        verdict = Text("proved", "bold green")
    return Group(Text(f"{report.source}: {report.name or 'no name'}", "bold"), table, verdict)


def _first(texts: Any, colour: str) -> Any:
    """The first lines, and how many more there are."""
    from rich.text import Text

    more = [f"and {len(texts) - SHOWN} more; see --json"] if len(texts) > SHOWN else []
    return Text("\n".join([*texts[:SHOWN], *more]), colour)
