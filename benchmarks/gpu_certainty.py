"""How far predictions on GPUs are from what was measured: ``python benchmarks/gpu_certainty.py``.

It predicts every row of the result files of calls between GPUs of a node anew, by the protocol that ran, and prints
bound, prediction, measurement and error. ``make docs`` makes the tables of docs/certainty.md by it. ``--fit`` fits the
parameters of ``planning/gpus/kernel_times.py`` to the rows that are named below, and prints them beside those that it
has.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from msgspec.structs import asdict, replace  # noqa: E402

from blinkmpi.bench.document import with_current_names  # noqa: E402
from blinkmpi.bench.nccl_tests import dtype_named  # noqa: E402
from blinkmpi.planning.gpus.kernel_times import H200, KernelCosts, costs_of, seconds  # noqa: E402
from blinkmpi.planning.plan import PACKETS, Plan, Rule  # noqa: E402
from blinkmpi.planning.planner import make_plan  # noqa: E402
from blinkmpi.planning.selection import kernel_call, program_for  # noqa: E402
from blinkmpi.program.call import REDUCTIONS, Call, call_of_bytes  # noqa: E402
from blinkmpi.program.ir import Wire  # noqa: E402
from blinkmpi.topology.importers import modify  # noqa: E402
from blinkmpi.topology.machines import machine  # noqa: E402
from blinkmpi.topology.measured import Measured  # noqa: E402
from blinkmpi.topology.model import Topology  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LINKS = ROOT / "benchmarks" / "tables" / "links-NVIDIA-H200-x4.json"
FITTED_TO, FITTED_GPU = RESULTS / "h200", "NVIDIA H200"  # what the parameters are from; two such GPUs, and four
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter", "alltoall")
PLACES = ("out_of_place", "in_place")
WITHIN, FROM = 0.1, 1 << 20
HOST_BOUND = 0.9  # of a call's time: what the host takes to launch it
SLOTS = (32 << 10, 4)
FITTED = ("launch_s", "hop_s", "line_s", "back", "direct_hops", "slots_hops")


class Measurement(NamedTuple):
    """One row of a result file."""

    file: str
    collective: str
    call: Call
    rule: Rule
    place: str
    moves: bool  # the result goes to the front, as in place with MPI
    graph: bool
    measured_us: float
    bound_us: float
    host_us: float
    gpu: str
    wire: Wire

    @property
    def by_host(self) -> bool:
        """Whether the GPUs waited for the host."""
        return not self.graph and self.host_us >= HOST_BOUND * self.measured_us


@cache
def machine_of(n: int) -> Topology:
    """So many of the GPUs on which the files were measured, which all NVSwitches join."""
    return modify(machine("hgx-h200"), gpus=",".join(map(str, range(n))))


@cache
def plan_of(n: int, wire: Wire = "accumulator") -> Plan:
    """A plan for them."""
    return replace(make_plan(machine_of(n), gpus="onehop"), wire=wire)


def measurements(folder: Path = RESULTS) -> list[Measurement]:
    """All rows of the files of calls between GPUs of one node, but those by packings that need more than NVLinks."""
    found = []
    for path in sorted(folder.glob("*-gpu-*.json")):
        if path.name.startswith(COLLECTIVES):
            rows = of_document(path.stem, json.loads(path.read_text(encoding="utf-8")))
            found += [row for row in rows if row.rule.scheme in _schemes(row.call)]
    return found


def of_document(name: str, document: dict[str, Any]) -> list[Measurement]:
    """The rows of one file."""
    document = with_current_names(document)
    facts, found = document["blinkmpi"], []
    collective, n = facts["collective"], facts["ranks"]
    for row in document["results"]:
        own, root = row["blinkmpi"], max(row["root"], 0)
        op = "sum" if collective in REDUCTIONS else ""
        call = call_of_bytes(collective, n, row["size"], dtype=dtype_named(row["type"]), op=op, root=root)
        protocol = own["protocol"]
        if protocol == "direct" and facts.get("local_register") == 0:
            protocol = "slots"  # of buffers that are not registered: older files name the row of registered ones
        rule = Rule(collective, 0, own["scheme"], *SLOTS, protocol=protocol, ctas=own["ctas"])
        for place in PLACES:
            found.append(Measurement(
                name, name.partition("-")[0], call, rule, place,
                place == "in_place" and not facts.get("own_block", False), bool(document["config"].get("graph")),
                row[place]["time"], own["bound_us"], own[place].get("host_us") or 0.0, facts["gpu"]["name"],
                facts.get("wire") or "accumulator",
            ))  # fmt: skip
    return found


def predicted_us(row: Measurement, costs: KernelCosts = H200) -> float:
    """The prediction for a row."""
    call, shown = row.call, kernel_call(row.call, row.rule)
    plan = plan_of(call.n, row.wire)
    packing = plan.packing(shown.collective, shown.root, row.rule.scheme)
    program = _program(shown, row.rule.scheme, row.wire)
    return 1e6 * seconds(
        call, row.rule, program, packing, machine_of(call.n), costs, in_place=row.moves, graph=row.graph
    )


def _schemes(call: Call) -> tuple[str, ...]:
    return plan_of(call.n).schemes(call.collective, call.root)


@cache
def _program(call: Call, scheme: str, wire: Wire) -> Any:
    return program_for(plan_of(call.n, wire), call, Rule(call.collective, 0, scheme, *SLOTS))


# ---- the fit


def is_fitted(row: Measurement) -> bool:
    """The rows to which most parameters are fitted: two collectives of float32 on two GPUs, in graphs, out of place."""
    ours = row.collective in ("all_reduce", "broadcast") and row.call.n == 2 and row.call.dtype == "float32"
    return ours and row.graph and row.place == "out_of_place"


def is_cta(row: Measurement) -> bool:
    """The rows from which the rate of a CTA is: Broadcast by few of them on four GPUs."""
    few = row.collective == "broadcast" and row.rule.protocol == "direct" and 0 < row.rule.ctas <= 16
    return few and row.graph and row.place == "out_of_place"


def is_copy(row: Measurement) -> bool:
    """The rows from which the rate of copies within a GPU is."""
    ours = row.collective == "reduce_scatter" and row.call.n == 2 and row.call.dtype == "float32"
    return ours and row.graph and row.rule.protocol == "slots" and row.moves == (row.place == "in_place")


def is_gap(row: Measurement) -> bool:
    """The rows from which the gap between launches is: they are long enough for the host."""
    ours = row.collective == "all_reduce" and row.call.n == 2 and row.call.dtype == "float32"
    return ours and row.place == "out_of_place" and row.rule.protocol == "direct"


def is_exchange(row: Measurement) -> bool:
    """The rows from which it is what lines to several peers take longer: ReduceScatter of float32 on four GPUs."""
    ours = row.collective == "reduce_scatter" and row.call.n == 4 and row.call.dtype == "float32"
    lines = row.rule.protocol == "ll128_one_shot" and row.call.nbytes >= FROM
    return ours and row.graph and row.place == "out_of_place" and lines


def is_long_exchange(row: Measurement) -> bool:
    """The rows from which it is what ``direct`` takes longer there."""
    ours = row.collective == "reduce_scatter" and row.call.n == 4 and row.call.dtype == "float32"
    return ours and row.graph and row.place == "out_of_place" and row.rule.protocol == "direct"


def calibration(row: Measurement) -> bool:
    """Whether some parameter was fitted to this row."""
    kinds = is_fitted, is_cta, is_copy, is_gap, is_exchange, is_long_exchange
    return row.gpu == FITTED_GPU and any(kind(row) for kind in kinds)


def fit() -> KernelCosts:
    """The parameters: links and flags as the probe measured them, the others by least squares of the errors."""
    from scipy.optimize import least_squares

    rows = [row for row in (*measurements(FITTED_TO), *measurements()) if calibration(row)]

    probed = Measured.from_json(LINKS.read_text(encoding="utf-8"), source=LINKS.name)
    measured = costs_of(machine_of(len(probed.devices)), probed)
    start = replace(
        H200, wire=measured.wire, flag_us=measured.flag_us, cta_bytes_s=1e15, exchange=0.0, exchange_long=0.0
    )
    chosen = [row for row in rows if is_fitted(row)]

    def with_numbers(numbers: Iterable[float]) -> KernelCosts:
        return replace(start, **{name: getattr(H200, name) * x for name, x in zip(FITTED, numbers, strict=True)})

    def errors(numbers: Any, /) -> list[float]:
        return [predicted_us(row, with_numbers(numbers)) / row.measured_us - 1 for row in chosen]

    found = with_numbers(list(least_squares(errors, [1.0] * len(FITTED), loss="soft_l1", f_scale=0.03).x))
    longest = max((row for row in rows if is_cta(row)), key=lambda row: row.call.nbytes)
    cta = longest.call.nbytes / longest.rule.ctas / (longest.measured_us * 1e-6)
    pairs: dict[tuple[int, bool], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if is_copy(row):
            pairs[row.call.nbytes, True][row.place] = row.measured_us
    copies = [size / 2 / (both["in_place"] - both["out_of_place"]) * 1e6 for (size, _), both in pairs.items()]
    times: dict[tuple[str, int], dict[bool, float]] = defaultdict(dict)
    for row in rows:
        if is_gap(row):
            times[row.file.replace("-graph", ""), row.call.nbytes][row.graph] = row.measured_us
    gaps = [both[False] - both[True] for both in times.values() if len(both) == 2]
    found = replace(found, cta_bytes_s=cta, copy_bytes_s=median(copies), gap_s=median(gaps) * 1e-6)

    def more(name: str, kind: Callable[[Measurement], bool]) -> float:
        """The factor that the rows of a kind ask for."""
        asked = []
        for row in filter(kind, rows):
            none, one = (predicted_us(row, replace(found, **{name: each})) for each in (0.0, 1.0))
            asked.append((row.measured_us - none) / (one - none))
        return median(asked)

    return replace(found, exchange=more("exchange", is_exchange), exchange_long=more("exchange_long", is_long_exchange))


# ---- tables


def error(row: Measurement) -> float:
    """Of the measurement."""
    return predicted_us(row) / row.measured_us - 1


def detail(rows: Sequence[Measurement]) -> str:
    """A line for each row."""
    lines = [
        "| file | size | place | protocol | bound | predicted | measured | error % | |",
        "|---|---:|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        far = error(row)
        note = "fitted" if calibration(row) else "the host's time" if row.by_host else ""
        mark = " *" if abs(far) > WITHIN and not row.by_host else ""
        lines.append(
            f"| {row.file} | {_size(row.call.nbytes)} | {row.place.replace('_', ' ')} | {_how(row)} | "
            f"{row.bound_us:.1f} | {predicted_us(row):.1f} | {row.measured_us:.1f} | {100 * far:+.1f}{mark} | {note} |"
        )
    return "\n".join(lines) + "\n"


def _how(row: Measurement) -> str:
    scheme = "" if row.rule.scheme == "onehop" or row.rule.protocol in PACKETS else f" {row.rule.scheme}"
    return row.rule.protocol + scheme + (f", {row.rule.ctas} CTAs" if row.rule.ctas else "")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def summary(rows: Sequence[Measurement], key: Callable[[Measurement], str], heads: str) -> str:
    """How many rows of each kind are hit, without those that the host bounds and those that were fitted."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if not row.by_host and not calibration(row):
            groups[key(row)].append(error(row))
    columns = heads.count("|") + 1
    lines = [
        f"| {heads} | rows | within {WITHIN:.0%} | median error % | from | to |",
        f"|{'---|' * columns}---:|---:|---:|---:|---:|",
    ]
    for name, errors in groups.items():
        near = sum(abs(e) <= WITHIN for e in errors)
        middle = median(map(abs, errors))
        lines.append(
            f"| {name} | {len(errors)} | {near} | {100 * middle:.1f} | {100 * min(errors):+.1f} | "
            f"{100 * max(errors):+.1f} |"
        )
    return "\n".join(lines) + "\n"


def parameters(costs: KernelCosts = H200) -> str:
    """The numbers of the model."""
    shown = {
        "launch": f"{costs.launch_s * 1e6:.2f} us", "hop": f"{costs.hop_s * 1e6:.2f} us",
        "line": f"{costs.line_s * 1e6:.2f} us", "exchange": f"{costs.exchange:.2f}",
        "exchange, long": f"{costs.exchange_long:.3f}",
        "wire": f"{costs.wire:.2f}", "back": f"{costs.back:.3f}",
        "CTA": f"{costs.cta_bytes_s / 1e9:.0f} GB/s", "copy": f"{costs.copy_bytes_s / 1e12:.2f} TB/s",
        "direct": f"{costs.direct_hops:.1f} hops", "slots": f"{costs.slots_hops:.1f} hops",
        "gap": f"{costs.gap_s * 1e6:.1f} us",
    }  # fmt: skip
    return "| " + " | ".join(shown) + " |\n|" + "---:|" * len(shown) + "\n| " + " | ".join(shown.values()) + " |\n"


def tables(rows: Sequence[Measurement]) -> dict[str, str]:
    """What the page shows."""
    long = [row for row in rows if row.call.nbytes >= FROM]
    short = [row for row in rows if row.call.nbytes < FROM]
    by_kind = "collective | GPUs | type | launched"

    def kind(row: Measurement) -> str:
        launched = "in graphs" if row.graph else "one by one"
        rounded = ", rounded on each hop" if row.wire == "operand" else ""
        return f"{row.collective} | {row.call.n} | {row.call.dtype}{rounded} | {launched}"

    goal = [row for row in long if row.graph and row.call.n == 2 and row.place == "out_of_place"]
    return {
        "parameters": parameters(),
        "long": summary(long, kind, by_kind),
        "short": summary(short, lambda row: f"{row.collective} | {row.call.n}", "collective | GPUs"),
        "rows": detail([row for row in goal if row.collective in COLLECTIVES[:3]]),
        "misses": detail([r for r in long if not r.by_host and not calibration(r) and abs(error(r)) > WITHIN]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print all rows, or the parameters."""
    parser = argparse.ArgumentParser(description="How far predictions on GPUs are from what was measured.")
    parser.add_argument("--fit", action="store_true", help="fit the parameters, and print them")
    args = parser.parse_args(argv)
    rows = measurements()
    if args.fit:
        found = fit()
        for name, value in asdict(found).items():
            print(f"{name:14} {value!s:28} {getattr(H200, name)}")
    else:
        print(detail(rows))
        print(tables(rows)["long"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
