"""Ours and NCCL on parts of a DGX-1V, emulated on the GPUs of an NVSwitch box: ``python benchmarks/emulated.py 4 3 2``.

For each number of ranks, and each set of that many GPUs of a DGX-1V: an Allreduce by our trees for that set, every link
paced in the kernel to 45 GB/s for each NVLink unit; then, in an mpirun of its own, NCCL's, told by ``NCCL_TOPO_FILE``
that these GPUs are wired so. That rate is what NCCL reaches over a unit of an H200 machine that is described to it so.
Pairs without NVLink are for NCCL to reach through host memory (``NCCL_P2P_LEVEL=NVL``). What NCCL made of the file is
read from its log; then its rings, and its trees, run as algorithms of ours on the paced links, too. All results are
checked. A file for each number of ranks goes into ``--out``; a table comes last.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.jobs import FEWEST_SECONDS, LAUNCHER, SETTINGS, load, run_job  # noqa: E402
from benchmarks.lang.nccl_graphs import read_graphs, ring_allreduce, tree_allreduce  # noqa: E402
from blinkmpi.bench import environment as meta  # noqa: E402
from blinkmpi.bench.nccl_tests import call_of_size  # noqa: E402
from blinkmpi.errors import FormatError  # noqa: E402
from blinkmpi.topology import Topology, machine  # noqa: E402
from blinkmpi.topology.importers import on_gpus_of, parse_gpus  # noqa: E402
from blinkmpi.topology.nccl import processor, write_xml  # noqa: E402
from blinkmpi.util.text import parse_size  # noqa: E402

MACHINE = "dgx-1v"
RESULTS = ROOT / "benchmarks" / "results"
UNIT_MBPS = 45_000  # a unit of NVLink, each way
SETS = ("0-7", "0-6", "0-5", "0,1,2,4,5,6", "0-4", "1,2,4,5,7", "1,4,5,6", "0-3", "0,1,4", "0,3,4", "0,3", "0,1", "0,5")
RANKS = {**SETTINGS, "NCCL_NVLS_ENABLE": "0"}
NCCL_SETTINGS = {"NCCL_P2P_LEVEL": "NVL", **jobs.NCCL_LOG}
PACED = {"rings": ring_allreduce, "trees": tree_allreduce}  # NCCL's graphs, on paced links
LIBRARIES = ("ours", "nccl", *PACED)
WARMUP = 80  # calls before a row; ours looks for its chunks in them
NCCL_WARMUP = 3
PATTERNS = {1: "balanced tree", 2: "split tree", 3: "tree", 4: "ring", 5: "NVLS", 6: "CollNet"}  # of NCCL's graph.h


def emulated_part(gpus: str) -> Topology:
    """The part of the machine, with its units of NVLink at the rate that they have here."""
    whole = machine(MACHINE)
    lane = next(link.lane_mbps for link in whole.links if link.kind == "nvlink")
    return whole.scale("nvlink", Fraction(UNIT_MBPS, lane)).subset(parse_gpus(gpus))


def kept_graphs(gpus: str, n: int) -> dict[str, Any]:
    """The rings and trees that NCCL built for a set of ``n`` GPUs, from the results of this program.

    Raises:
        FormatError: where there are none, on every rank that asks.
    """
    path = RESULTS / f"emulated-{MACHINE}-np{n}.json"
    for row in (load(path) or {"results": []})["results"]:
        graphs = (row["nccl"] or {}).get("graphs")
        if graphs and parse_gpus(row["gpus"]) == parse_gpus(gpus):
            return dict(graphs)
    raise FormatError(f"{path} has no rings and trees of NCCL for GPUs {gpus}; keep there what "
                      f"python benchmarks/emulated.py {n} --sets {gpus} --out FOLDER writes")  # fmt: skip


# ---------------------------------------------------------------- a rank


def rank(library: str, gpus: str, sizes: Sequence[int], folder: Path) -> None:
    """Measure one of the libraries on all ranks; rank 0 writes ``<library>.json``, and for ours ``topology.xml``."""
    from mpi4py import MPI

    from blinkmpi.bench.layout import Layout
    from blinkmpi.bench.peers import NcclPeer
    from blinkmpi.bench.time_gpu import GpuTimer
    from blinkmpi.bench.timing import Timing
    from blinkmpi.communicator import Communicator
    from blinkmpi.errors import DeviceError
    from blinkmpi.runtime.inspection import choice
    from blinkmpi.transport.cuda.device import cupy

    world = MPI.COMM_WORLD
    with Communicator(world) as here:
        if here.gpu is None:
            raise DeviceError("this job has no GPUs: BLINKMPI_DEBUG=INFO says why")
        if world.rank == 0 and library == "ours":
            xml = write_xml(on_gpus_of(emulated_part(gpus), here.machine), processor())
            (folder / "topology.xml").write_text(xml, encoding="utf-8")
    calls = [call_of_size("allreduce", world.size, size, "float32", "sum", -1) for size in sizes]
    rows = []
    part = None if library == "nccl" else emulated_part(gpus)
    theirs = None
    if library in PACED:
        graphs = json.loads((folder / "graphs.json").read_text(encoding="utf-8"))
        theirs = PACED[library](world.size, graphs[library])
    with Communicator(world, topology=part, algorithms=[theirs] if theirs else ()) as comm:
        assert comm.gpu is not None
        timer = GpuTimer(cupy(), comm, calls, unalign=0, symmetric=False)
        peer = NcclPeer(world, cupy()) if library == "nccl" else None
        for call in calls:
            with timer.stream:
                layout = Layout(call, world.rank, timer.buffers, in_place=False, marker=MPI.IN_PLACE)
                if peer:
                    contender = peer.contender(call, timer.buffers, in_place=False)
                else:
                    contender = timer.contender(layout, persistent=False)
                (found,) = timer.measure(world, MPI, [contender], Timing(warmup=NCCL_WARMUP if peer else WARMUP))
            row = {"us": found.time_us, "GBps": call.nbytes / found.time_us / 1e3, "wrong": found.wrong}
            row["spread_us"] = found.spread
            if theirs and part:
                row["how"] = choice(comm.context, "allreduce", call.nbytes)
                row["predicted_GBps"] = theirs.simulate(part, call.nbytes).algbw
            elif library == "ours":
                how = choice(comm.context, "allreduce", call.nbytes)
                packing = comm.plans.packing("allreduce", 0, str(how["scheme"]))
                row |= {"how": how, "trees": len(packing.trees)}
                row |= {"planned_GBps": float(packing.rate) / 1e3, "bound_GBps": float(packing.bound) / 1e3}
            rows.append(row)
        facts = {"name": comm.gpu.name, "driver": meta.nvidia_driver(), **comm.gpu.versions}
        version = peer.facts["version"] if peer else None
        if peer:
            peer.close()
    if world.rank == 0:
        result = {"rows": rows, "gpu": facts, "nccl_version": version, "env": meta.environment()}
        result["versions"] = meta.versions(meta.mpi_library(MPI), None, gpu=True)
        (folder / f"{library}.json").write_text(json.dumps(result), encoding="utf-8")


# ---------------------------------------------------------------- the driver


def command(n: int, library: str, gpus: str, sizes: str, folder: Path) -> list[str]:
    """The mpirun of a job."""
    words = ["--rank", library, "--sets", gpus, "--sizes", sizes, "--out", str(folder), str(n)]
    return [*LAUNCHER, "-np", str(n), sys.executable, str(Path(__file__).resolve()), *words]


def run(argv: Sequence[str], settings: dict[str, str], seconds: float) -> str:
    """Run a job; nothing, or what went wrong and, on a line of its own, the last error that it printed."""
    why, said = run_job(argv, {**RANKS, **settings}, seconds)
    own = said.partition("MPI_ABORT was invoked")[0].strip(" -\n")  # what comes after it is mpirun's
    return f"{why}\n{last_error(own)}" if why else ""


def last_error(output: str) -> str:
    """The line of the last exception in what a job said, or else its last line; no traceback and no folders."""
    lines = [line for line in output.splitlines() if re.match(r"\w", line)]  # what a traceback shows is indented
    errors = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return meta.without_folders((errors or lines or [""])[-1])


def made_of(logs: Sequence[str]) -> dict[str, Any]:
    """What NCCL made of the topology file, from the logs of its ranks."""
    text = "\n".join(logs)
    pattern = r"Pattern (\d+), crossNic \d+, nChannels (\d+), bw ([\d.]+)/[\d.]+, type (\S+?), sameChannels"
    patterns = dict.fromkeys(re.findall(pattern, text))
    rings = re.findall(r"Channel \d+/\d+ :((?: +\d+)+) *$", text, re.MULTILINE)
    over = re.findall(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (\w+)", text)
    channels = re.search(r"(\d+) coll channels", text)
    return {
        "file_read": "NCCL_TOPO_FILE set by environment" in text,
        "patterns": [
            {"pattern": PATTERNS.get(int(kind), kind), "channels": int(count), "GBps": float(rate), "path": path}
            for kind, count, rate, path in patterns
        ],
        "rings": sorted({ring.strip() for ring in rings}),
        "coll_channels": int(channels[1]) if channels else None,
        "connections": {way: over.count(way) for way in sorted(set(over))},
    }


def rows_of(gpus: str, sizes: Sequence[int], found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a set, one for each size, from what each library gave; ours is there."""
    rows = []
    nccl = found.get("nccl")
    for i, size in enumerate(sizes):
        own = dict(found["ours"]["rows"][i])
        planned, bound = own.pop("planned_GBps"), own.pop("bound_GBps")
        row: dict[str, Any] = {"gpus": gpus, "size": size, "planned_GBps": planned, "bound_GBps": bound, "ours": own}
        row["share"] = own["GBps"] / planned
        row["nccl"] = None if nccl is None else {**nccl["rows"][i], **nccl["made"]}
        row["ratio"] = None if nccl is None else own["GBps"] / nccl["rows"][i]["GBps"]
        row["paced"] = {name: found[name]["rows"][i] for name in PACED if name in found}
        row["paced_ratio"] = own["GBps"] / max(paced) if (paced := paced_rates(row)) else None
        rows.append(row)
    return rows


def paced_rates(row: dict[str, Any]) -> list[float]:
    """The rates of NCCL's rings and trees on paced links, as far as they were measured."""
    return [paced["GBps"] for paced in row["paced"].values()]


def wrong_elements(row: dict[str, Any]) -> int:
    """The wrong elements of all libraries."""
    return sum(found["wrong"] or 0 for found in (row["ours"], row["nccl"], *row["paced"].values()) if found)


def document(
    n: int, rows: Sequence[dict[str, Any]], failed: Sequence[str], facts: dict[str, Any], began: datetime
) -> dict[str, Any]:
    """The file of a number of ranks."""
    machine = {"name": MACHINE, "emulated": True, "nvlink_unit_mbps": UNIT_MBPS}
    statistic = "median over repeats of many calls each of the slowest rank's time"
    return jobs.document({"emulated": True}, rows, failed, began, ranks=n, collective="allreduce", dtype="float32",
                         op="sum", memory="gpu", machine=machine, statistic=statistic, **facts)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each row; rates in GB/s."""
    lines = [f"{'GPUs':12} {'MiB':>5} {'plan':>6} {'bound':>6} {'ours':>6} {'share':>5} {'NCCL':>6} {'ratio':>6} "
             f"{'paced':>6} {'ratio':>6} wrong"]  # fmt: skip
    for row in rows:
        theirs = row["nccl"]
        cells = [f"{row['gpus']:12} {row['size'] >> 20:5d} {row['planned_GBps']:6.1f} {row['bound_GBps']:6.1f}"]
        cells.append(f"{row['ours']['GBps']:6.1f} {row['share']:5.2f}")
        cells.append(f"{'-':>6} {'-':>6}" if theirs is None else f"{theirs['GBps']:6.1f} {row['ratio']:6.2f}")
        paced = paced_rates(row)
        cells.append(f"{max(paced):6.1f} {row['paced_ratio']:6.2f}" if paced else f"{'-':>6} {'-':>6}")
        cells.append(f"{wrong_elements(row):5d}")
        lines.append(" ".join(cells))
    return "\n".join(lines)


def measure(
    n: int, gpus: str, sizes: str, seconds: float, libraries: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the jobs of a set; (what each library gave, what went wrong by library)."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        folder = Path(name)
        for i, library in enumerate(libraries):
            left = end - time.monotonic()
            told = {"NCCL_TOPO_FILE": f"{folder}/topology.xml", "NCCL_DEBUG_FILE": f"{folder}/log.%p"}
            needed = "" if library == "ours" else "topology.xml" if library == "nccl" else "graphs.json"
            if needed and not (folder / needed).exists():
                failed[library] = f"not started: the job before it has left no {needed}"
                continue
            if left < FEWEST_SECONDS:
                failed[library] = f"not started, {left:.0f} s left"
                continue
            share = left if i + 1 == len(libraries) else left / 2
            settings = {**NCCL_SETTINGS, **told} if library == "nccl" else {}
            why = run(command(n, library, gpus, sizes, folder), settings, share)
            result = load(folder / f"{library}.json")
            if why or result is None:
                failed[library] = why or "no result"
                continue
            found[library] = result
            if library == "nccl":
                logs = [p.read_text(errors="replace") for p in sorted(folder.glob("log.*"))]
                result["made"] = made_of(logs)
                try:
                    graphs = read_graphs("\n".join(logs), n)._asdict()
                except FormatError as error:
                    failed["nccl's graphs"] = str(error)
                else:
                    result["made"]["graphs"] = graphs
                    (folder / "graphs.json").write_text(json.dumps(graphs), encoding="utf-8")
    return found, failed


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ours and NCCL on parts of a DGX-1V, emulated on other GPUs.")
    parser.add_argument("np", type=int, nargs="+", help="numbers of ranks, one GPU each")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results' files")
    parser.add_argument("--budget", type=float, default=300, metavar="SECONDS", help="for all jobs (default 300)")
    parser.add_argument("--sizes", default="256M,1G", help="bytes of the vector (default 256M,1G)")
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="GPUS", help="sets of GPUs, such as 1,4,5,6 or 0-3")
    parser.add_argument("--without-nccl", action="store_true", help="ours alone")
    parser.add_argument("--rank", choices=LIBRARIES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all jobs and write the files; 0 if all of them ended well and nothing was wrong."""
    args = arguments(argv)
    sizes = [parse_size(text) for text in args.sizes.split(",")]
    if args.rank:
        rank(args.rank, args.sets[0], sizes, args.out)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    libraries = LIBRARIES[:1] if args.without_nccl else LIBRARIES
    todo = [(n, gpus) for n in args.np for gpus in args.sets if len(parse_gpus(gpus)) == n]
    end, shown, all_failed = time.monotonic() + args.budget, [], []
    for n in dict.fromkeys(args.np):
        began = datetime.now().astimezone()
        rows: list[dict[str, Any]] = []
        failed: list[str] = []
        facts: dict[str, Any] = {}
        for gpus in [g for m, g in todo if m == n]:
            left = end - time.monotonic()
            found, wrong = measure(n, gpus, args.sizes, min(left, 2 * left / len(todo)), libraries)
            todo.remove((n, gpus))
            failed += [f"{gpus}, {library}: {why}" for library, why in wrong.items()]
            if "ours" in found:
                rows += rows_of(gpus, sizes, found)
                facts |= {key: found["ours"][key] for key in ("gpu", "versions", "env")}
            if "nccl" in found:
                facts |= {key: found["nccl"][key] for key in ("nccl_version", "env")}
        if rows:
            jobs.write(args.out / f"emulated-{MACHINE}-np{n}.json", document(n, rows, failed, facts, began))
        shown += rows
        all_failed += failed
    print(table(shown))
    for row in shown:
        if row["nccl"]:
            made = row["nccl"]
            graphs = ", ".join(f"{p['channels']} x {p['pattern']} {p['path']}" for p in made["patterns"])
            print(f"NCCL on {row['gpus']}, {row['size'] >> 20} MiB: {graphs}; {made['connections']}; "
                  f"file {'read' if made['file_read'] else 'NOT READ'}")  # fmt: skip
    print("\n".join(["failed:", *all_failed]) if all_failed else "all jobs ended well")
    return int(bool(all_failed) or any(map(wrong_elements, shown)))


if __name__ == "__main__":
    sys.exit(main())
