"""The tables of docs/planner_results.md: what the programs of benchmarks/planner wrote into ``benchmarks/results``."""

import json
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
CLOSE = 0.95  # of the bound
NEAR = 1.03  # times the fastest scheme
COLLECTIVES = ("allgather", "broadcast", "allreduce")
CATALOGUE, MOST_BOXES = ("DGX-1P", "DGX-1V", "DGX-2", "PCIe", "A100", "H100", "MI250"), 8
OUTCOMES = {
    "optimal": "at the bound", "close": "within 5 %", "below": "below", "refused": "impossible",
    "as scatters": "as scatters", "wrongly refused": "wrongly refused", "crashed": "crashed",
}  # fmt: skip


def tables() -> dict[str, str]:
    """The tables by their names."""
    return {name: make(json.loads((RESULTS / file).read_text(encoding="utf-8"))) for name, (file, make) in MADE.items()}


def origin(found: dict[str, Any], machine: bool = True) -> str:
    """The line above a table: the machine that planned, and the code."""
    code = f"Code: {(found['commit'] or 'unknown')[:12]}."
    return f"Machine: {found['hardware']['cpu']}. {code}" if machine else code


def methods(found: dict[str, Any]) -> str:
    """One row for each machine, collective and method."""
    lines = [
        f"{origin(found)} A fixed loop of 3 million steps took {found['calibration_seconds'] * 1e3:.0f} ms.\n",
        "| machine | collective | method | trees | depth | rate GB/s | of the NVLink bound | predicted 1 MiB | "
        "64 MiB | planning, CPU ms |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        short, long = (row["predicted_gbps"][str(n)] for n in (1 << 20, 64 << 20))
        lines.append(
            f"| {row['machine']} | {row['collective']} | {row['method']} | {row['trees']} | {row['depth']} | "
            f"{row['rate_gbps']:.2f} | {row['of_nvlink_bound']:.1%} | {short:.1f} | {long:.1f} | "
            f"{row['seconds'] * 1e3:.1f} |"
        )
    return "\n".join(lines) + "\n"


def fronts(found: dict[str, Any]) -> str:
    """The Pareto fronts, a line each."""
    lines = ["| machine | collective | trees / depth / GB/s | CPU ms |", "|---|---|---|---:|"]
    for one in found["fronts"]:
        points = ", ".join(f"{p['trees']}/{p['depth']}/{p['rate_gbps']:.1f}" for p in one["points"])
        lines.append(f"| {one['machine']} | {one['collective']} | {points} | {one['seconds'] * 1e3:.0f} |")
    return "\n".join(lines) + "\n"


def fewest(found: dict[str, Any]) -> str:
    """The least numbers of trees."""
    lines = ["| machine | collective | trees | at least | proved by | CPU ms |", "|---|---|---:|---:|---|---:|"]
    for one in found["fewest"]:
        lines.append(
            f"| {one['machine']} | {one['collective']} | {one['trees']} | {one['at_least']} | "
            f"{one['proof'] or 'open'} | {one['seconds'] * 1e3:.0f} |"
        )
    return "\n".join(lines) + "\n"


def choice(found: dict[str, Any]) -> str:
    """A line for each machine: how far the scheme that a plan takes is from the fastest."""
    lines = [
        f"{len(found['rows'])} calls, {found['near']} within 3 % of the fastest scheme. {origin(found, False)}\n",
        "| machine | ranks | calls | within 3 % | most above the fastest | broadcast | allreduce | allgather |",
        "|---|---:|---:|---:|---:|---|---|---|",
    ]
    for name in dict.fromkeys(row["machine"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["machine"] == name]
        worst = max(row["longer"] for row in rows)
        near = sum(row["longer"] <= NEAR for row in rows)
        schemes = [" ".join(dict.fromkeys(row["chosen"] for row in rows if row["collective"] == c))
                   for c in ("broadcast", "allreduce", "allgather")]  # fmt: skip
        start = f"| {name.removeprefix('~')} | {rows[0]['ranks']} | {len(rows)} | {near} | {100 * worst - 100:.0f} %"
        lines.append(f"{start} | {' | '.join(schemes)} |")
    return "\n".join(lines) + "\n"


def catalogue(found: dict[str, Any]) -> str:
    """A line for each machine of the catalogue: trees, depth, part of the bound and milliseconds of each collective."""
    reference = found["reference"]
    lines = [
        f"Trees / depth / part of the bound / milliseconds. {origin(found)}\n"
        f"The last column was timed on another machine: {reference['what']}.\n",
        f"| machine | boxes | {' | '.join(COLLECTIVES)} | ForestColl, ms |",
        "|---|---:|" + "---|" * len(COLLECTIVES) + "---:|",
    ]
    for name in CATALOGUE:
        rows = {(row["size"], row["collective"]): row for row in found["rows"] if row["family"] == name}
        for size in sorted({size for size, _ in rows if size <= MOST_BOXES}):
            cells = [_catalogue_cell(rows[size, collective]) for collective in COLLECTIVES]
            seconds = reference["seconds"].get(name, {}).get(str(rows[size, COLLECTIVES[0]]["gpus"]))
            lines.append(f"| {name} | {size} | {' | '.join(cells)} | {f'{1000 * seconds:.0f}' if seconds else ''} |")
    return "\n".join(lines) + "\n"


def _catalogue_cell(row: dict[str, Any]) -> str:
    """``16 / 2 / 100 % / 12``."""
    if "failed" in row:
        return "failed"
    part = "100" if row["optimal"] else f"{100 * row['of_bound']:.1f}"
    return f"{row['trees']} / {row['depth']} / {part} % / {1000 * row['seconds']:.1f}"


def large(found: dict[str, Any]) -> str:
    """A line for each usual machine and shown collective, then the drawn ones by kind."""
    lines = [
        f"{origin(found)}\n",
        "| machine | collective | GB/s | bound | part | scheme | trees | depth | CPU s | MB |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        if "seed" not in row and row["collective"] in COLLECTIVES:
            lines.append(
                f"| {row['machine']} | {row['collective']} | {row['rate_gbps']:.1f} | {row['bound_gbps']:.1f} | "
                f"{row['of_bound']:.1%} | {row['scheme']} | {row['trees']} | {row['depth']} | {row['seconds']:.1f} | "
                f"{row['memory_mb']} |"
            )
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        if "seed" in row and "of_bound" in row:
            kinds.setdefault(row["machine"], []).append(row)
    lines += [
        "\n| drawn machines | number | calls | within 5 % | least part | deepest / 2 log2 n | most CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, rows in sorted(kinds.items()):
        close = sum(row["of_bound"] >= CLOSE for row in rows)
        deepest = max(row["depth"] / (2 * log2(row["ranks"])) for row in rows)
        lines.append(
            f"| {kind} | {len({row['seed'] for row in rows})} | {len(rows)} | {close} | "
            f"{min(row['of_bound'] for row in rows):.1%} | {deepest:.2f} | {max(row['seconds'] for row in rows):.1f} |"
        )
    return "\n".join(lines) + "\n"


def in_switch(found: dict[str, Any]) -> str:
    """A line for each published figure of sums in switches."""
    names = "machine", "GPUs", "NCCL", "with sums", "ours", "with sums", "ours at NCCL's rate", "with sums", "source"
    lines = [
        f"Bus bandwidths in GB/s, {found['nbytes'] >> 30} GiB. {origin(found, False)}\n",
        f"| {' | '.join(names)} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in found["rows"]:
        said = [" to ".join(dict.fromkeys(map(str, row[name]))) or "not stated" for name in ("without", "with")]
        ours = [f"{row['simulated'][r][w]:.0f}" for r in ("listed", "nccl") for w in ("without", "with")]
        url, _, date = row["source"].partition(" ")
        where = f"[{'/'.join(url.split('/')[3:5])}]({url}) {date}"
        lines.append(f"| {row['machine']} | {row['gpus']} | {' | '.join([*said, *ours])} | {where} |")
    return "\n".join(lines) + "\n"


def beside_others(found: dict[str, Any]) -> str:
    """A line for each rate that others published, or that a formula gives."""
    names = "beside", "machine", "ranks", "collective", "hops, at most", "theirs, GB/s", "ours, GB/s", "the most"
    lines = [
        f"{origin(found)}\n",
        f"| {' | '.join(names)} | depth | trees | CPU s |",
        "|---|---|---:|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in found["rows"]:
        start = f"{row['source']} | {row['machine']} | {row['ranks']} | {row['collective']}"
        rates = f"{row['max_depth'] or 'any'} | {row['theirs_gbps']:.2f} | {row['ours_gbps']:.2f}"
        ours = f"{'proved' if row['proved'] else 'open'} | {row['depth']} | {row['trees']} | {row['cpu_seconds']:.2f}"
        lines.append(f"| {start} | {rates} | {ours} |")
    return "\n".join(lines) + "\n"


def at_random(found: dict[str, Any]) -> str:
    """A line for each family of drawn machines."""
    lines = [
        f"{found['all']['machines']} machines, {found['all']['calls']} calls of {found['plan_seconds']:g} s at most, "
        f"{found['processes']} at a time. {origin(found)}\n",
        f"| family | machines | ranks, at most | {' | '.join(OUTCOMES.values())} | slowest, s |",
        "|---|---:|---:|" + "---:|" * (len(OUTCOMES) + 1),
    ]
    for name, one in {**found["families"], "all": found["all"]}.items():
        counts = " | ".join(str(one.get(outcome, 0)) for outcome in OUTCOMES)
        start = f"| {name.replace('_', ' ')} | {one['machines']} | {one['most ranks']}"
        lines.append(f"{start} | {counts} | {one['most seconds']:.1f} |")
    return "\n".join(lines) + "\n"


MADE: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "methods": ("treegen-methods.json", methods),
    "fewest": ("treegen-methods.json", fewest),
    "fronts": ("treegen-methods.json", fronts),
    "choice": ("choice.json", choice),
    "catalogue": ("treegen.json", catalogue),
    "large": ("treegen-large.json", large),
    "in-switch": ("treegen-in-switch.json", in_switch),
    "beside": ("treegen-beside.json", beside_others),
    "random": ("treegen-random.json", at_random),
}
