"""The command ``plan``: pack trees for one collective or all, prove their rate, and compare plans."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError
from ..planning.explain import share_text, shares
from ..planning.in_switch import InSwitch, beside, packing_in_switch
from ..planning.plan import Plan
from ..planning.planner import make_plan
from ..planning.slots import Gpus
from ..program.call import collective_named
from ..topology.model import Topology
from ..trees.answer import SHARP
from ..trees.packing import extra_methods, pack
from ..trees.pareto_front import pareto
from ..trees.problem import MethodOptions
from ..trees.tree import COLLECTIVES, ROOTED, Collective, Packing
from ..util.codec import plain
from ..util.settings import read
from ..util.text import parse_size
from .calls import add_collective
from .differences import compared
from .machine import add_machine, kind_of, on_machine
from .numbers import fraction, of_flag, whole
from .output import show, write

if TYPE_CHECKING:
    from ..planning.diff import PlanDifference

Found = list[tuple[Packing, float]]  # with the seconds that making their plan took


class KnobFlag(NamedTuple):
    """A flag of ``plan`` that some methods read; without ``--method`` the first of them is taken."""

    flag: str
    read: Callable[[str], Any]
    methods: tuple[str, ...]
    what: str


KNOBS = {
    "epsilon": KnobFlag("--epsilon", fraction, ("mwu", "mwu+ilp"), "stop within this part of the best rate: 1/20"),
    "loss": KnobFlag("--loss", fraction, ("mwu+ilp",), "the part of the rate to give up for fewer trees: 0.05"),
    "max_trees": KnobFlag("--max-trees", whole, ("few",), "at most so many trees"),
    "max_depth": KnobFlag("--max-depth", whole, ("few", "shallow"), "trees of at most so many hops"),
    "nbytes": KnobFlag("--bytes", parse_size, ("hybrid",), "the vector to split between two kinds of links"),
    "switch_seconds": KnobFlag("--switch-seconds", fraction, ("hybrid",), "how long the slow links take to start"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_machine(parser)
    parser.add_argument("-o", metavar="FILE", dest="output", help="write the plan's file")
    add_collective(parser)
    what = "auto, exact, mwu, few, rings, ...; sharp: sums in the switches, not executed here; see the docs"
    parser.add_argument("--method", default="auto", metavar="M", help=what)
    for name, knob in KNOBS.items():
        used = f"{knob.what} ({', '.join(knob.methods)})"
        parser.add_argument(knob.flag, dest=name, metavar=knob.flag.rpartition("-")[2].upper()[:1], help=used)
    parser.add_argument("--pareto", action="store_true", help="the front of few, shallow and fast packings")
    parser.add_argument("--plot", metavar="FILE", help="draw machine and trees: .svg, .png or .pdf")
    parser.add_argument("--lang", action="store_true", help="print the trees as a program that blinkmpi.lang runs")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what plan file B has differently from A")
    parser.add_argument("--trees", action="store_true", help="with --diff: every tree and the load of every link")


def run(args: argparse.Namespace) -> int:
    """Answer; the exit code."""
    if args.diff:
        return plan_diff(args)

    def answer(topology: Topology, ranks: int) -> int:
        mpi, gpus = kind_of(topology, ranks)
        return plan(args, topology, mpi=mpi, gpus=gpus)

    return on_machine(args, answer)


def plan(args: argparse.Namespace, topology: Topology, *, mpi: bool, gpus: Gpus = "") -> int:
    """Plan one collective or all, print, write, draw; ``mpi`` and ``gpus`` as for :func:`.make_plan`."""
    for flag in ("pareto", "plot", "lang"):
        if getattr(args, flag) and not args.collective:
            raise ArgumentError(f"--{flag} is for one collective; add --collective")
    if not 0 <= args.root < topology.n:
        raise ArgumentError(f"root {args.root}: {topology.name} has ranks 0..{topology.n - 1}; choose one of these")
    if args.trees:
        raise ArgumentError("--trees is for --diff A B; leave it out, a plan of one --collective shows its trees")
    if args.lang and (args.pareto or args.json):
        raise ArgumentError("--lang prints one program; leave --pareto and --json out")
    if args.method == SHARP and (args.lang or args.pareto):
        raise ArgumentError("method sharp has sums in the switches, which no program of ranks makes; leave --lang and "
                            "--pareto out")  # fmt: skip
    methods, options = _methods(args)
    if args.plot:
        from ..util.figure import check_target

        check_target(args.plot)
    wanted = [collective_named(args.collective)] if args.collective else [c for c in COLLECTIVES if c != "barrier"]
    found: Found = []
    left_out: dict[str, str] = {}
    if args.output:
        start = time.perf_counter()
        whole = make_plan(topology, mpi=mpi, gpus=gpus, seconds=read().plan_s)
        seconds = time.perf_counter() - start
        write(args.output, whole.to_json())
        if args.collective is None and not args.json:
            return 0
        found = [(_best(whole, collective, args.root), seconds) for collective in wanted]
    if methods != ("auto",):
        found, left_out = _by_method(topology, wanted, args.root, methods, options)
    elif not args.output:
        found = _planned(topology, wanted, args.root, mpi, gpus)
    in_switch = next((one for p, _ in found if (one := beside(p, topology, packed=True))), None)
    front = _front(topology, found[0][0], args.root) if args.pareto else ()
    if args.plot:
        from ..plot.trees import draw_packing

        draw_packing(found[0][0], topology, args.plot)
    if args.lang:
        from ..lang.packed import python_of

        print(python_of(found[0][0]), end="")
        return 0
    if args.json:
        _print_json(topology, found, front, in_switch, one=bool(args.collective), left_out=left_out)
        return 0
    from . import show as cli_show

    if front:
        show(cli_show.front(front, found[0][0], topology))
    elif args.collective:
        show(cli_show.packing(found[0][0], found[0][1], topology, in_switch))
    else:
        show(cli_show.packings(found, topology, left_out, in_switch))
    return 0


def _methods(args: argparse.Namespace) -> tuple[Sequence[str], MethodOptions]:
    """The method, or those that read the flags, and their parameters.

    Raises:
        ArgumentError: for a flag that the method does not read.
    """
    given = {name: knob for name, knob in KNOBS.items() if getattr(args, name) is not None}
    sets = [knob.methods for knob in given.values()]
    able = [method for method in (sets[0] if sets else ()) if all(method in some for some in sets)]
    method = able[0] if args.method == "auto" and able else args.method
    for knob in given.values():
        if method not in knob.methods:
            other = f"for {method}" if method != "auto" else "for those of the other flags"
            able_ones = " and ".join(knob.methods)
            raise ArgumentError(f"{knob.flag} is for method {able_ones}, not {other}; leave one of them out")
    values = {name: of_flag(knob.flag, knob.read, getattr(args, name)) for name, knob in given.items()}
    return able if args.method == "auto" and able else (method,), MethodOptions(**values).check()


def _planned(topology: Topology, wanted: Sequence[Collective], root: int, mpi: bool, gpus: Gpus) -> Found:
    """The best packing of each collective in a plan as a job makes it, which plans for one collective and root."""
    found: Found = []
    for collective in wanted:
        start, seconds = time.perf_counter(), read().plan_s
        made = make_plan(topology, mpi=mpi, gpus=gpus, collectives=[collective], roots=[root], seconds=seconds)
        found.append((_best(made, collective, root), time.perf_counter() - start))
    return found


def _best(plan: Plan, collective: Collective, root: int) -> Packing:
    """The packing that the planner prefers among those of a plan, which stands first."""
    root = root if collective in ROOTED else -1
    return plan.packing(collective, root, plan.schemes(collective, root)[0])


def _by_method(
    topology: Topology, wanted: Sequence[Collective], root: int, methods: Sequence[str], options: MethodOptions
) -> tuple[Found, dict[str, str]]:
    """The packings, each by the first of the methods that can plan its collective.

    Of several collectives those that none can plan are left out, with the reason.
    """
    found: Found = []
    left_out: dict[str, str] = {}
    for collective in wanted:
        start = time.perf_counter()
        try:
            able = methods if len(methods) == 1 else extra_methods(topology, collective, root=root)
            method = next((some for some in methods if some in able), methods[0])
            seconds = read().plan_s
            if method == SHARP:
                packing = packing_in_switch(topology, collective, seconds)
            else:
                packing = pack(topology, collective, root=root, method=method, options=options, seconds=seconds)
        except ArgumentError as error:
            if len(wanted) == 1:
                raise
            left_out[collective] = str(error)
        else:
            found.append((packing, time.perf_counter() - start))
    if not found:
        raise ArgumentError(next(iter(left_out.values())))
    return found, left_out


def _front(topology: Topology, packing: Packing, root: int) -> tuple[Packing, ...]:
    collective = packing.collective
    if not {"few", "shallow"} & set(extra_methods(topology, collective, root=max(root, 0))):
        raise ArgumentError(
            f"--pareto: few and shallow trees for {collective} on {topology.name} are not searched for; it is for GPUs "
            "joined by links, with a tree from each rank for at most 32"
        )
    return pareto(topology, collective, root)


def _print_json(
    topology: Topology, found: Found, front: Sequence[Packing], in_switch: InSwitch | None, *, one: bool,
    left_out: dict[str, str],
) -> None:  # fmt: skip
    reports = [report(*pair) for pair in found]
    head: dict[str, Any] = {"format": "blinkmpi.plan-report", "version": 1, "machine": topology.name}
    body: dict[str, Any] = reports[0] if one else {"plans": reports, "left_out": left_out}
    if front:
        body["pareto"] = [report(p) for p in front]
    if in_switch is not None:
        packed = {} if in_switch.packing is None else report(in_switch.packing)
        bound = {"bound_gbps": float(in_switch.bound.bound / 1000), "certificate": plain(in_switch.bound)}
        body["allreduce_in_switches"] = {**packed, **bound, "executed": False}
    print(json.dumps({**head, **body}, indent=1))


def report(packing: Packing, seconds: float | None = None) -> dict[str, Any]:
    """What ``plan --json`` says about one collective."""
    p = packing
    trees = [
        {"root": tree.root, "edges": [[e.src, e.dst] for e in tree.edges], "paths": [e.path for e in tree.edges],
         **({"up": [[e.src, e.dst] for e in tree.up], "up_paths": [e.path for e in tree.up]} if tree.up else {}),
         "depth": tree.depth,
         "weight_gbps": float(tree.weight / 1000), "share": f"{share.numerator}/{share.denominator}"}
        for tree, share in zip(p.trees, shares(p), strict=True)
    ]  # fmt: skip
    return {
        "collective": p.collective, "root": p.root, "ranks": p.n, "scheme": p.scheme,
        "method": p.reason.partition(": ")[0], "reason": p.reason, "links": p.links, "depth": p.depth,
        "rate_gbps": float(p.rate / 1000), "bound_gbps": float(p.bound / 1000),
        "of_bound": str(p.rate / p.bound) if p.bound else "1",  # 0 where none is worked out
        "optimal": p.optimal, **({} if seconds is None else {"seconds": seconds}),
        "certificate": plain(p.certificate), "trees": trees,
    }  # fmt: skip


def plan_diff(args: argparse.Namespace) -> int:
    """Compare two plans' files."""
    if args.topology is not None or args.output or args.collective:
        raise ArgumentError("plan --diff A B compares two files of plans; leave out TOPOLOGY, -o and --collective")
    from ..planning.diff import plan_differences
    from ..runtime.bootstrap import read_plan

    one, other = (read_plan(path) for path in args.diff)
    found = plan_differences(one, other)
    rows: list[tuple[str, ...]] = [(d.collective, d.what, d.one, d.other) for d in found]
    if not args.json:
        rows = [(*row[:2], *_percentages(*row[1:])) for row in rows] if args.trees else _brief(found)
    code = compared(args, "plan-diff", tuple(args.diff), ("collective", "what"), rows)
    if not args.json and len(rows) < len(found):
        print(f"\n {len(found)} in all, with trees and loads of links: --trees, --json")
    return code


def _percentages(what: str, one: str, other: str) -> tuple[str, str]:
    """The shares of a tree as people read them, unless these look the same."""
    if not what.startswith("tree "):
        return one, other
    texts = tuple(share_text(Fraction(share)) if share else "" for share in (one, other))
    return (one, other) if texts[0] == texts[1] else (texts[0], texts[1])


def _brief(found: Sequence[PlanDifference]) -> list[tuple[str, ...]]:
    """The rows without trees and links; roots with the same difference share a row."""
    from ..planning.diff import DETAILS

    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for d in found:
        name, _, root = d.collective.partition(" from ")
        if not d.what.startswith(DETAILS):
            rows.setdefault((name, d.what, d.one, d.other), []).append(root)
    return [
        (name + (f" from {','.join(roots)}" if roots[0] else ""), *rest)
        for (name, *rest), roots in sorted(rows.items(), key=lambda row: row[0][0])
    ]
