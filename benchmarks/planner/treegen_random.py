"""Plan for machines drawn at random: ``python benchmarks/planner/treegen_random.py [--machines 1000] [--seed 1]``.

Every collective on every machine, from a random root, within the time that planning may take. Each packing is proved
by ``pack`` itself; a machine that is refused is looked at with networkx. Writes ``results/treegen-random.json``: sums
by family, and each call that misses its bound, takes long or fails, with the seed that draws its machine again.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import networkx as nx
from drawn_machines import FAMILIES, drawn
from methods import head

from blinkmpi.errors import NoPackingError, TopologyError
from blinkmpi.topology.model import Topology
from blinkmpi.trees.deadline import SECONDS
from blinkmpi.trees.packing import pack
from blinkmpi.trees.tree import ROOTED

RESULT = Path(__file__).resolve().parents[1] / "results" / "treegen-random.json"
COLLECTIVES = ("broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "allreduce", "alltoall")
SMALL, CLOSE = 64, 0.95  # ranks up to which the bound is to be met, and how close to it larger machines are
AS_IT_SHOULD = ("optimal", "refused", "as scatters")
SLACK_S = 2.0  # behind the deadline: what is found must still be proved


def possible(t: Topology, collective: str, root: int) -> bool:
    """Whether the links join the ranks as a collective needs it."""
    graph = nx.DiGraph([(k.src, k.dst) for k in t.links])
    graph.add_nodes_from(range(t.n))
    everybody = set(range(t.n))
    to_all = everybody <= {root, *nx.descendants(graph, root)}
    from_all = everybody <= {root, *nx.ancestors(graph, root)}
    if collective in ("broadcast", "scatter"):
        return to_all
    return from_all if collective in ("reduce", "gather") else to_all and from_all


def judged(job: tuple[str, int]) -> list[dict[str, Any]]:
    """All collectives on one machine."""
    family, seed = job
    t = drawn(family, seed)
    root = random.Random(seed).randrange(t.n)
    rows = []
    for collective in COLLECTIVES:
        row: dict[str, Any] = {
            "family": family,
            "seed": seed,
            "machine": t.name,
            "ranks": t.n,
            "collective": collective,
        }
        if collective in ROOTED:
            row["root"] = root
        begin = time.perf_counter()
        try:
            found = pack(t, collective, root=root)
        except TopologyError as error:
            outcome = "wrongly refused" if possible(t, collective, root) else "refused"
            row |= {"outcome": outcome, "error": str(error)[:200]}
        except NoPackingError as error:  # an alltoall of so many ranks
            crash = collective != "alltoall" or t.n <= SMALL
            row |= {"outcome": "crashed" if crash else "as scatters", "error": str(error)[:200]}
        except Exception as error:  # whatever it is, it is a crash
            row |= {"outcome": "crashed", "error": f"{type(error).__name__}: {str(error)[:200]}"}
        else:
            of_bound = float(found.rate / found.bound)
            outcome = "optimal" if found.optimal else "close" if of_bound >= CLOSE else "below"
            row |= {"outcome": outcome, "of_bound": of_bound, "trees": len(found.trees), "depth": found.depth}
            row["reason"] = found.reason
        rows.append({**row, "seconds": round(time.perf_counter() - begin, 3)})
    return rows


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of outcomes and the longest time."""
    missed = [row for row in rows if row["outcome"] in ("close", "below")]
    return {
        "machines": len({(row["family"], row["seed"]) for row in rows}), "calls": len(rows),
        **Counter(row["outcome"] for row in rows),
        "not optimal up to 64 ranks": sum(row["ranks"] <= SMALL for row in missed),
        "over time": sum(row["seconds"] > SECONDS + SLACK_S for row in rows),
        "most seconds": max(row["seconds"] for row in rows), "most ranks": max(row["ranks"] for row in rows),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run, write; 1 if anything crashed or was wrongly refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of the first machine; the others count on")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES), metavar="F")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("-o", dest="output", type=Path, default=RESULT, metavar="FILE")
    args = parser.parse_args(argv)
    work = [(args.families[i % len(args.families)], args.seed + i) for i in range(args.machines)]
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        for some in pool.map(judged, work):
            rows += some
            for row in some:
                if row["outcome"] in ("crashed", "wrongly refused", "below") or row["seconds"] > SECONDS + SLACK_S:
                    print(json.dumps(row), flush=True)
    families = {name: summed([row for row in rows if row["family"] == name]) for name in args.families}
    document = {
        **head("treegen-random"), "first_seed": args.seed, "plan_seconds": SECONDS, "processes": args.jobs,
        "seconds": round(time.perf_counter() - begin, 1), "all": summed(rows), "families": families,
        "calls": [row for row in rows if row["outcome"] not in AS_IT_SHOULD or row["seconds"] > SECONDS],
    }  # fmt: skip
    args.output.write_text(json.dumps(document, indent=1) + "\n")
    for name, line in {**families, "all": document["all"]}.items():
        print(f"{name:16}", *(f"{key} {value}" for key, value in line.items()), sep="  ")
    return int(any(row["outcome"] in ("crashed", "wrongly refused") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
