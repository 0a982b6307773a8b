"""Simulated times of the library's algorithms: ``python benchmarks/lang/simulate.py``.

Simulates each algorithm on the machines that it is for, beside the packed trees that the selection table takes there,
and writes ``results/lang-library.json``; ``page.py`` makes the table of it. The cost model is the same for both;
nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from blinkmpi.lang import Algorithm, library  # noqa: E402
from blinkmpi.planning.algorithms import with_algorithms  # noqa: E402
from blinkmpi.planning.explain import explanation  # noqa: E402
from blinkmpi.planning.planner import make_plan  # noqa: E402
from blinkmpi.planning.selection import choose  # noqa: E402
from blinkmpi.topology import machine  # noqa: E402
from blinkmpi.trees.tree import Collective  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "lang-library.json"
SIZES = (64 << 10, 1 << 20, 64 << 20)
SWITCHED, IRREGULAR, SHARED = "dgx-a100", "dgx-1v", "cpu:8"


class Row(NamedTuple):
    """An algorithm on a machine that it is for."""

    machine: str
    made: Algorithm


def rows() -> Iterator[Row]:
    """What is simulated: those for any machine where links are alike and where not, those for nodes on nodes."""
    for name in (SWITCHED, IRREGULAR, SHARED):
        n = machine(name).n
        for written in (library.ring, library.one_step, library.all_pairs, library.halving_doubling):
            yield Row(name, written(n))
    for name in (SWITCHED, SHARED):
        n = machine(name).n
        for written in (library.recursive_doubling, library.bruck_allgather):
            yield Row(name, written(n))
        for written in (library.all_pairs_alltoall, library.bruck_alltoall):
            yield Row(name, written(n))
    yield Row("pcie-8", library.ring(8))
    yield Row("pcie-8", library.islands(8, 4))
    yield Row("dgx-a100:2", library.hierarchical(16, 8))
    yield Row("dgx-a100:2", library.two_step(16, 8))


def simulated(row: Row) -> dict[str, Any]:
    """Seconds and rates of an algorithm and of packed trees, for each size, and the rate that no trees exceed."""
    topology, made = machine(row.machine), row.made
    collective: Collective = made.collective  # type: ignore[assignment]
    plain = make_plan(topology, collectives=[collective])
    plan = with_algorithms(plain, (), {collective: made})
    found: dict[str, Any] = {
        "machine": topology.name, "fingerprint": topology.fingerprint, "ranks": topology.n, "collective": collective,
        "algorithm": made.name, "sizes": [],
    }  # fmt: skip
    for nbytes in SIZES:
        call = made.call_of_bytes(nbytes)
        ours = explanation(plan, topology, call).chosen
        trees = explanation(plain, topology, call, rule=choose(plain, call, mpi=False)).chosen
        assert ours is not None
        assert trees is not None
        found["bound_gbps"] = trees.bound_gbps
        found["sizes"].append({
            "bytes": call.nbytes, "seconds": ours.seconds, "algbw": ours.algbw,
            "trees": {"scheme": trees.scheme, "seconds": trees.seconds, "algbw": trees.algbw},
        })  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and write the file."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(argv)
    document = {"what": "simulated by the cost model", "sizes": list(SIZES), "rows": [simulated(r) for r in rows()]}
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
