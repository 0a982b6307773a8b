"""The commands about trees: ``plan`` one machine, list its ``subsets``. Only rank 0 runs this."""

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from ..errors import ArgumentError, NoPackingError
from ..lang.packed import python_of
from ..planning.explain import shares
from ..planning.planner import make_plan
from ..planning.slots import Gpus
from ..planning.subsets import COLLECTIVES as COMPARED
from ..planning.subsets import PCIE_MBPS, Allocations, Subset, by_size, summary, survey
from ..program.call import collective_named
from ..topology.model import MOST_MBPS, Topology
from ..trees.blink.pareto import pareto
from ..trees.packing import extra_methods, pack
from ..trees.problem import MethodOptions
from ..trees.tree import COLLECTIVES, Packing
from ..util.codec import plain
from ..util.settings import read
from ..util.text import DIGITS, parse_size, quoted
from .output import show, write

Number = TypeVar("Number")
# Python takes more, such as 1e-999999999, and is long at it.
NUMBER = re.compile(rf"[+-]?[0-9.]{{1,{DIGITS}}}(e[+-]?[0-9]{{1,3}}|/[0-9]{{1,{DIGITS}}})?", re.IGNORECASE | re.ASCII)
Found = list[tuple[Packing, float]]  # with the seconds that planning took


def number(text: str, kind: Callable[[str], Number], what: str) -> Number:
    """Read a number of a kind, or raise an ArgumentError that says what was expected."""
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if NUMBER.fullmatch(text.strip()):
            return kind(text)
    raise ArgumentError(f"{quoted(text)} is no {what}, for example")


def fraction(text: str) -> Fraction:
    """Read ``1/20`` or ``0.05``."""
    return number(text, Fraction, "number; write 1/20 or 0.05")


def whole(text: str) -> int:
    """Read a whole number."""
    return number(text, int, "whole number; write 4")


def of_flag(flag: str, reader: Callable[[str], Number], text: str) -> Number:
    """Read the value of a flag, which an error names."""
    try:
        return reader(text)
    except ArgumentError as error:
        raise ArgumentError(f"{flag}: {error}") from error


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


def add_plan(command: argparse.ArgumentParser) -> None:
    """The flags of ``plan`` besides those of all commands."""
    what = "auto, exact, mwu, few, rings, ...; see the docs"
    command.add_argument("--method", default="auto", metavar="M", help=what)
    for name, knob in KNOBS.items():
        used = f"{knob.what} ({', '.join(knob.methods)})"
        command.add_argument(knob.flag, dest=name, metavar=knob.flag.rpartition("-")[2].upper()[:1], help=used)
    command.add_argument("--pareto", action="store_true", help="the front of few, shallow and fast packings")
    command.add_argument("--plot", metavar="FILE", help="draw machine and trees: .svg, .png or .pdf")
    command.add_argument("--lang", action="store_true", help="print the trees as a program that blinkmpi.lang runs")


def add_subsets(command: argparse.ArgumentParser) -> None:
    """The flags of ``subsets`` besides those of all commands."""
    command.add_argument("--pcie", default=str(PCIE_MBPS // 1000), metavar="GBPS", help="what a ring over PCIe reaches")
    command.add_argument("--plot", metavar="FILE", help="draw the speed-ups: .svg, .png or .pdf")


def plan(args: argparse.Namespace, topology: Topology, *, mpi: bool, gpus: Gpus = "") -> int:
    """Plan one collective or all, print, write, draw; ``mpi`` and ``gpus`` as for :func:`.make_plan`."""
    for flag in ("pareto", "plot", "lang"):
        if getattr(args, flag) and not args.collective:
            raise ArgumentError(f"--{flag} is for one collective; add --collective")
    if args.trees:
        raise ArgumentError("--trees is for --diff A B; leave it out, a plan of one --collective shows its trees")
    if args.lang and (args.pareto or args.json):
        raise ArgumentError("--lang prints one program; leave --pareto and --json out")
    method, options = _method(args)
    if args.plot:
        from ..util.figure import check_target

        check_target(args.plot)
    if args.output:
        write(args.output, make_plan(topology, mpi=mpi, gpus=gpus, seconds=read().plan_s).to_json())
        if args.collective is None and not args.json:
            return 0
    wanted = [collective_named(args.collective)] if args.collective else [c for c in COLLECTIVES if c != "barrier"]
    found, left_out = _planned(topology, wanted, args.root, method, options)
    front = _front(topology, found[0][0], args.root) if args.pareto else ()
    if args.plot:
        from ..plot.trees import draw_packing

        draw_packing(found[0][0], topology, args.plot)
    if args.lang:
        print(python_of(found[0][0]), end="")
        return 0
    if args.json:
        _print_json(topology, found, front, one=bool(args.collective), left_out=left_out)
        return 0
    from . import show as cli_show

    if front:
        show(cli_show.front(front, found[0][0], topology))
    elif args.collective:
        show(cli_show.packing(found[0][0], found[0][1], topology))
    else:
        show(cli_show.packings(found, topology, left_out))
    return 0


def _method(args: argparse.Namespace) -> tuple[str, MethodOptions]:
    """The method and its parameters.

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
    return method, MethodOptions(**values).check()


def _planned(
    topology: Topology, wanted: Sequence[str], root: int, method: str, options: MethodOptions
) -> tuple[Found, dict[str, str]]:
    """The packings; of several collectives those that the method cannot plan are left out, with the reason."""
    found: Found = []
    left_out: dict[str, str] = {}
    for collective in wanted:
        start = time.perf_counter()
        try:
            packing = pack(topology, collective, root=root, method=method, options=options, seconds=read().plan_s)
        except ArgumentError as error:
            if len(wanted) == 1 or (method == "auto" and not isinstance(error, NoPackingError)):
                raise
            left_out[collective] = str(error)
        else:
            found.append((packing, time.perf_counter() - start))
    if not found:
        raise ArgumentError(next(iter(left_out.values())))
    return found, left_out


def _front(topology: Topology, packing: Packing, root: int) -> tuple[Packing, ...]:
    collective = packing.collective
    if "few" not in extra_methods(topology, collective, root=root):
        raise ArgumentError(
            f"--pareto: few and shallow trees for {collective} on {topology.name} are not searched for; it is for "
            "broadcast, reduce and allreduce on a few GPUs joined by links or one switch"
        )
    return pareto(topology, collective, root)


def _print_json(
    topology: Topology, found: Found, front: Sequence[Packing], *, one: bool, left_out: dict[str, str]
) -> None:
    reports = [report(*pair) for pair in found]
    head: dict[str, Any] = {"format": "blinkmpi.plan-report", "version": 1, "machine": topology.name}
    body: dict[str, Any] = reports[0] if one else {"plans": reports, "left_out": left_out}
    if front:
        body["pareto"] = [report(p) for p in front]
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
        "rate_gbps": float(p.rate / 1000), "bound_gbps": float(p.bound / 1000), "of_bound": str(p.rate / p.bound),
        "optimal": p.optimal, **({} if seconds is None else {"seconds": seconds}),
        "certificate": plain(p.certificate), "trees": trees,
    }  # fmt: skip


def subsets(args: argparse.Namespace, topology: Topology) -> int:
    """List the connected subsets, print, write, draw."""
    if args.plot:
        from ..util.figure import check_target

        check_target(args.plot)
    pcie_mbps = int(of_flag("--pcie", fraction, args.pcie) * 1000)
    if not 1 <= pcie_mbps <= MOST_MBPS:
        raise ArgumentError(f"--pcie {quoted(args.pcie)}: expected GB/s above 0; 10 is usual for a DGX-1")
    found = survey(topology, pcie_mbps=pcie_mbps, each=_with_bar)
    text = json.dumps(subsets_report(topology, found, pcie_mbps), indent=1)
    if args.output:
        write(args.output, text + "\n")
    if args.plot:
        from ..plot.trees import draw_subsets

        draw_subsets(found, topology, pcie_mbps, args.plot)
    if args.json:
        print(text)
    elif not args.output:
        from . import show as cli_show

        show(cli_show.subsets(found, topology, pcie_mbps))
    return 0


def _with_bar(some: Sequence[Allocations]) -> Iterable[Allocations]:
    """The same, with a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        return some
    from rich.console import Console
    from rich.progress import track

    return track(some, "planning", console=Console(stderr=True), transient=True)


def subsets_report(topology: Topology, found: Sequence[Subset], pcie_mbps: int) -> dict[str, Any]:
    """What ``subsets --json`` says: all subsets, then sums by size and over all of 3 GPUs and more."""
    larger = [s for s in found if len(s.gpus) > 2]
    rows = [
        {"gpus": list(s.gpus), "allocations": s.allocations, "rings": s.rings,
         "rate_gbps": _by_name([float(r / 1000) for r in s.rates]),
         "baseline_gbps": _by_name([float(r / 1000) for r in s.baseline]),
         "speedup": _by_name([float(r) for r in s.speedups]), "broadcast_trees": s.trees, "fewest": s.fewest}
        for s in found
    ]  # fmt: skip
    return {
        "format": "blinkmpi.subsets", "version": 1, "machine": topology.name, "fingerprint": topology.fingerprint,
        "pcie_gbps": pcie_mbps / 1000, "subsets": rows,
        "sizes": {str(size): _summary(some) for size, some in by_size(found).items()},
        "from_3": _summary(larger) if larger else None,
    }  # fmt: skip


def _summary(some: Sequence[Subset]) -> dict[str, Any]:
    s = summary(some)
    return {**s._asdict(), "speedups": _by_name([spread._asdict() for spread in s.speedups])}


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(COMPARED, values, strict=True))
