"""Collectives between hosts that are namespaces of this machine: ``python benchmarks/hosts.py --out results-hosts``.

For each set-up of hosts and links: an Allreduce of ours, MPI's own, and between the first ranks of the hosts a plain
Sendrecv of as many bytes, both ways at once, which is what one pair of ranks gets out of the wire. All run in one job,
in turn, and each result is checked; then the same in a second job, where MPI has to do without its component han. For
one set-up, ``blinkmpi bench`` goes through the sizes of four collectives. Needs root or user namespaces, iproute2 and
the test extras; no GPU. Every step writes a file of its own into ``--out``; a table comes last.
"""

import argparse
import faulthandler
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.jobs import FEWEST_SECONDS, PLACES, limits, load  # noqa: E402
from benchmarks.pages.rows import ms_text  # noqa: E402
from blinkmpi.bench.nccl_tests import call_of_size  # noqa: E402
from blinkmpi.bench.verification import Wrong, fill, find_wrong, poison  # noqa: E402
from blinkmpi.program.call import Call  # noqa: E402
from blinkmpi.util.text import parse_size  # noqa: E402
from tests.hosts.world import World, forbidden, missing  # noqa: E402

WITHOUT_HAN = {"OMPI_MCA_coll": "^han"}
JOBS: tuple[tuple[str, Mapping[str, str]], ...] = (("all", {}), ("^han", WITHOUT_HAN))  # MPI's components, settings
SWEEP_FROM = "64K"
SWEEP_REPEATS = 3
TAIL_CHARACTERS = 600  # of a failed job's output


@dataclass(frozen=True, slots=True)
class Hosts:
    """A set-up: ranks of each host, the rate of each of its links as ``tc`` reads it, and how many links it has."""

    ranks: tuple[int, ...]
    rates: tuple[str, ...]
    links: int = 1

    @property
    def text(self) -> str:
        """``4+4 ranks, 800mbit a host``."""
        each = f"{self.links} links of " if self.links > 1 else ""
        rates = self.rates[:1] if len(set(self.rates)) == 1 else self.rates
        return f"{'+'.join(map(str, self.ranks))} ranks, {each}{', '.join(rates)}{' a host' if len(rates) == 1 else ''}"

    def expected_us(self, nbytes: int) -> float:
        """Time of so many bytes into the slowest host, and as many out of it, at the rate of its links."""
        return nbytes * 8 / (min(int(rate.removesuffix("mbit")) for rate in self.rates) * self.links)


@dataclass(frozen=True, slots=True)
class Step:
    """One file: its name, the hosts, its share of the time, and the collective whose sizes it goes through, if any."""

    name: str
    hosts: Hosts
    share: float
    collective: str = ""


EQUAL = Hosts((4, 4), ("800mbit", "800mbit"))
STEPS = (
    Step("equal", EQUAL, 2),
    Step("uneven", Hosts((3, 5), ("800mbit", "800mbit")), 2),
    Step("slow-host", Hosts((2, 2, 2), ("800mbit", "800mbit", "200mbit")), 6),
    Step("two-links", Hosts((4, 4), ("400mbit", "400mbit"), links=2), 2),
    *(Step(f"sizes-{name}", EQUAL, 2, name) for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")),
)


# ---------------------------------------------------------------- a rank


class Exchange:
    """A Sendrecv between two ranks, laid out as :class:`blinkmpi.bench.layout.Layout` lays out a collective.

    The ranks that are not its ``ends`` do nothing.
    """

    in_place = False

    def __init__(self, world: Any, call: Call, buffers: Any, ends: tuple[int, int]) -> None:
        self.world, self.call, self.rank, self.ends = world, call, world.Get_rank(), ends
        self.send, self.recv = buffers.views(call)
        self.peer = sum(ends) - self.rank if self.rank in ends else None

    def prepare(self) -> None:
        """Poison what is received, write what is sent."""
        poison(self.recv)
        fill(self.send, self.rank, self.call.dtype)

    def run(self) -> None:
        """Send and receive."""
        if self.peer is not None:
            self.world.Sendrecv(self.send, self.peer, 0, self.recv, self.peer, 0)

    def wrong(self) -> Wrong:
        """What is not the other's."""
        if self.peer is None:
            return Wrong(0, ())
        sent = Call("broadcast", self.call.n, self.call.counts, self.call.dtype, root=self.peer)
        return find_wrong(sent, self.rank, self.recv)


def firsts(ranks: Sequence[int]) -> list[int]:
    """The first rank of each host."""
    return [sum(ranks[:i]) for i in range(len(ranks))]


def rank(ranks: Sequence[int], size: int, repeats: int, folder: Path) -> None:
    """Measure on all ranks; rank 0 writes ``result.json``."""
    from mpi4py import MPI

    from blinkmpi.bench.layout import Buffers, Layout
    from blinkmpi.bench.peers import MpiPeer
    from blinkmpi.bench.time_host import measure
    from blinkmpi.bench.timing import Contender, Timing, call_facts, our_call
    from blinkmpi.communicator import Communicator
    from blinkmpi.runtime.inspection import choice, predict
    from tests.hosts.rank import check_layout

    world = MPI.COMM_WORLD
    check_layout(world, tuple(ranks))
    call = call_of_size("allreduce", world.size, size, "float32", "sum", -1)
    buffers = Buffers([call])
    first, *others = firsts(ranks)
    wires = [Exchange(world, call, buffers, (first, other)) for other in others]
    with Communicator(world) as comm:
        layout = Layout(call, world.rank, buffers, in_place=False, marker=MPI.IN_PLACE)
        theirs = MpiPeer(world, MPI).contender(call, buffers, in_place=False)
        contenders = [Contender(layout, our_call(comm, layout)), theirs]
        contenders += [Contender(wire, wire.run) for wire in wires]  # type: ignore[arg-type]
        found = measure(world, MPI, contenders, Timing(iterations=repeats))
        own, mpi, *carried = (
            {"us": one.time_us, "spread_us": one.spread, "wrong": one.wrong, "iterations": one.iterations}
            for one in found
        )
        facts = call_facts(call)
        predicted, bound = predict(comm.context, call.collective, call.nbytes, **facts)
        result = {
            "size": call.nbytes,
            "ours": own,
            "mpi": mpi,
            "wires": [{"ends": list(wire.ends), **one} for wire, one in zip(wires, carried, strict=True)],
            "predicted_us": None if predicted is None else predicted * 1e6,
            "bound_us": None if bound is None else bound * 1e6,
            "how": choice(comm.context, call.collective, call.nbytes, **facts),
        }
        job = {"row": result, **jobs.rank_facts(MPI, comm)}
    if world.rank == 0:
        (folder / "result.json").write_text(json.dumps(job), encoding="utf-8")


# ---------------------------------------------------------------- the driver


def command(step: Step, size: str, repeats: int, folder: Path, seconds: float) -> list[str]:
    """What a rank runs: this file, or ``blinkmpi bench`` through the sizes."""
    if step.collective:
        words = [step.collective, "-b", SWEEP_FROM, "-e", size, "-f", "4", "-n", str(SWEEP_REPEATS)]
        words += ["--compare", "mpi", "--predict", "-J", str(folder / "result.json")]
        return [sys.executable, "-m", "blinkmpi", "bench", *words]
    where = ",".join(map(str, step.hosts.ranks))
    words = ["--rank", where, "--size", size, "--repeats", str(repeats), "--out", str(folder)]
    return [sys.executable, str(Path(__file__).resolve()), *words, "--budget", f"{seconds:.0f}"]


def run(
    world: World, step: Step, size: str, repeats: int, settings: Mapping[str, str], seconds: float
) -> tuple[dict[str, Any] | None, str]:
    """Run a job; (what it wrote, what went wrong)."""
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        argv = command(step, size, repeats, Path(name), seconds)
        outcome = world.run(step.hosts.ranks, argv, timeout=seconds, env={"PYTHONPATH": str(ROOT), **settings})
        found = load(Path(name) / "result.json")
    why = f"no end after {seconds:.0f} s" if outcome.timed_out else f"exit status {outcome.rc}" if outcome.rc else ""
    if not why and found is None:
        why = "no result"
    if found is not None and step.collective:
        where = [device["hostname"] for device in found["config"]["devices"]]
        wanted = [f"host{i}" for i, ranks in enumerate(step.hosts.ranks) for _ in range(ranks)]
        if where != wanted:
            return None, f"ranks on {where}, not on {wanted}"
    if why:
        jobs.show_tail(outcome.output, TAIL_CHARACTERS)
    return found, why


def measured(step: Step, size: str, repeats: int, seconds: float) -> tuple[dict[str, Any] | None, list[str]]:
    """Make the hosts, run the jobs of a step; (the document, if there is a row, and what went wrong)."""
    began, end = datetime.now().astimezone(), time.monotonic() + seconds
    jobs = JOBS[:1] if step.collective else JOBS
    found: list[tuple[str, dict[str, Any]]] = []
    failed: list[str] = []
    with World(len(step.hosts.ranks), links=step.hosts.links) as world:
        for host, rate in zip(world.names, step.hosts.rates, strict=True):
            for link in range(step.hosts.links):
                world.shape(host, rate, link=link)
        for i, (components, settings) in enumerate(jobs):
            left = (end - time.monotonic()) / (1 if i + 1 == len(jobs) else 1.8)
            if left < FEWEST_SECONDS:
                failed.append(f"{step.name}, {components}: not started, {left:.0f} s left")
                continue
            result, why = run(world, step, size, repeats, settings, left)
            if why:
                failed.append(f"{step.name}, {components}: {why}")
            if result is not None:
                found.append((components, result))
    if not found:
        return None, failed
    about = {"step": step.name, "namespaces": True, **asdict(step.hosts), "text": step.hosts.text}
    if step.collective:
        return {"hosts": about, **found[0][1], "failed": failed}, failed
    rows = [{"collective": "allreduce", "mpi_coll": components, **result["row"]} for components, result in found]
    for row in rows:
        row["share"] = max(wire["us"] for wire in row["wires"]) / row["ours"]["us"]
        row["rate_us"] = step.hosts.expected_us(row["size"])
        row["rate_share"] = row["rate_us"] / row["ours"]["us"]
        row["ratio"] = row["mpi"]["us"] / row["ours"]["us"]
    return document(about, rows, failed, found[0][1], began), failed


def document(
    about: dict[str, Any], rows: Sequence[Any], failed: Sequence[str], facts: dict[str, Any], began: datetime
) -> dict[str, Any]:
    """The file of a set-up."""
    return jobs.document(
        {"hosts": about, "env": facts["env"]}, rows, failed, began, ranks=sum(about["ranks"]), collective="allreduce",
        dtype="float32", op="sum", memory="host", compare=["mpi"], versions=facts["versions"],
        hostnames=[f"host{i}" for i in range(len(about["ranks"]))], machine={**facts["machine"], "emulated": False},
        statistic="median over iterations of the slowest rank's time",
    )  # fmt: skip


def wrong_in(found: dict[str, Any]) -> int:
    """Wrong elements of all rows of a file."""
    count = 0
    for row in found["results"]:
        if "ours" in row:
            count += sum(one["wrong"] or 0 for one in (row["ours"], row["mpi"], *row["wires"]))
            continue
        for place in PLACES:
            theirs = row["blinkmpi"][place]["compare"]["mpi"] or {}
            count += (row[place]["nwrong"] or 0) + (theirs.get("nwrong") or 0)
    return count


def table(documents: Sequence[dict[str, Any]]) -> str:
    """A line for each set-up, and one for each size of a sweep; times in milliseconds."""
    lines = []
    names = ["ours", "wire", "share", "rate", "share", "MPI", "no han", "bound", "pred.", "wrong"]
    widths = [8, 8, 6, 8, 6, 6, 6, 8, 8, 5]
    setups = [found for found in documents if "ours" in found["results"][0]]
    if setups:
        lines.append(f"{'set-up':42} {'MiB':>5} " + " ".join(map(str.rjust, names, widths)))
    for found in setups:
        row, ratios = found["results"][0], {row["mpi_coll"]: row["ratio"] for row in found["results"]}
        cells = [f"{found['hosts']['text']:42} {row['size'] / 2**20:5.4g} {row['ours']['us'] / 1e3:8.1f}"]
        cells.append(f"{max(wire['us'] for wire in row['wires']) / 1e3:8.1f} {row['share']:6.2f}")
        cells.append(f"{_ms(row['rate_us'])} {row['rate_share']:6.2f}")
        cells += [f"{ratios[name]:6.2f}" if name in ratios else f"{'-':>6}" for name, _ in JOBS]
        cells += [f"{_ms(row['bound_us'])} {_ms(row['predicted_us'])} {wrong_in(found):5d}"]
        lines.append(" ".join(cells))
    for found in (one for one in documents if one not in setups):
        title = f"{found['blinkmpi']['collective']}, {found['hosts']['text']}"
        lines += ["", f"{title}: KiB; ours, MPI, ratio; the same in place; bound, predicted; wrong"]
        for row in found["results"]:
            cells = [f"{row['size'] / 1024:8g}"]
            for place in PLACES:
                theirs = row["blinkmpi"][place]["compare"]["mpi"]
                cells.append(f"{_ms(row[place]['time'])} {_ms(theirs['time'])} {theirs['ratio']:6.2f}")
            cells.append(f"{_ms(row['blinkmpi']['bound_us'])} {_ms(row['blinkmpi']['predicted_us'])}")
            lines.append(" ".join(cells) + f" {wrong_in({'results': [row]}):6d}")
    return "\n".join(lines).strip("\n")


def _ms(us: float | None) -> str:
    return f"{ms_text(us):>8}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Collectives between hosts that are namespaces of this machine.")
    default = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=default, help="folder for the files (default benchmarks/results)")
    parser.add_argument("--budget", type=float, default=1500, metavar="SECONDS", help="for all steps (default 1500)")
    parser.add_argument("--only", default="", metavar="NAME", help="only the steps whose names hold this")
    parser.add_argument("--size", default="64M", help="bytes of the vector, and the largest of a sweep (default 64M)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed calls in a set-up (default 5)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is None:
        if not any(args.only in step.name for step in STEPS):
            parser.error(f"--only {args.only}: the steps are {', '.join(step.name for step in STEPS)}")
        if reason := missing() or forbidden():
            parser.error(reason)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps and write their files; 0 if all of them ended well and nothing was wrong."""
    args = arguments(argv)
    if args.rank:
        faulthandler.dump_traceback_later(args.budget, exit=True)
        rank([int(n) for n in args.rank.split(",")], parse_size(args.size), args.repeats, args.out)
        faulthandler.cancel_dump_traceback_later()
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    todo = [step for step in STEPS if args.only in step.name]

    def one(i: int, seconds: float) -> jobs.Outcome:
        found, why = measured(todo[i], args.size, args.repeats, seconds)
        if found is not None:
            jobs.write(args.out / f"hosts-{todo[i].name}.json", found)
        return found, why, ""

    shown, failed = jobs.in_turn(
        [step.name for step in todo], args.budget, lambda i, left: limits([step.share for step in todo[i:]], left), one,
        tail=TAIL_CHARACTERS, table=table,
    )  # fmt: skip
    return int(bool(failed) or any(map(wrong_in, shown)))


if __name__ == "__main__":
    sys.exit(main())
