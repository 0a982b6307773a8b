"""Ours and NCCL between virtual nodes of GPUs: ``python benchmarks/nodes.py 4 --aware --out results-nodes``.

The GPUs of one machine are split into nodes that share nothing: ours by ``BLINKMPI_NODES``, with an MPI that has TCP
over the loopback interface alone; NCCL by ``NCCL_HOSTID``, with its sockets on the same interface and nothing else. So
both carry what crosses through the same wire, which is this machine's memory and kernel and no network. ``blinkmpi
bench`` measures and checks; what NCCL took for nodes, and how its ranks are connected, is read from its log. A file for
each split goes into ``--out``; a table comes last.

``--aware`` measures each split once more with an MPI that takes GPU memory: Open MPI by the UCX of libucx-cu13
(docs/nodes.md). That maps the other node's GPU memory, which no network lets it do, so the only comparison is our own
call on one node, over NVLink, and the rows are marked ``ipc across the split``.
"""

import argparse
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.jobs import PLACES, load, python_path, run_job  # noqa: E402
from benchmarks.pages.rows import ms_text  # noqa: E402

SPLITS = {2: ((1, 1),), 4: ((2, 2), (1, 3)), 8: ((4, 4), (3, 5))}
LAUNCHER = (*jobs.LAUNCHER, *["--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"])
SETTINGS = jobs.SETTINGS | jobs.NCCL_LOG | {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0",
    "OMPI_MCA_osc": "^ucx",
}  # fmt: skip
AWARE = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
    "UCX_TLS": "self,sm,cuda_copy,cuda_ipc,tcp",
}
MARK, ONE_NODE = "ipc across the split", "one node"
CALLS = 2  # in a block: a call of 256 MiB takes long enough
TAIL_CHARACTERS = 3000  # of a failed job's output: bench prints each row as it is measured


def name_of(split: Sequence[int]) -> str:
    """``2+2``."""
    return "+".join(map(str, split))


def command(split: Sequence[int], high: str, file: Path) -> list[str]:
    """The mpirun of a split: a context for each node, with its own ``NCCL_HOSTID``."""
    words = list(LAUNCHER)
    for node, ranks in enumerate(split):
        words += [":"] if node else []
        words += ["-np", str(ranks), "-x", f"NCCL_HOSTID=node{node}", *_bench(high, file), "--compare", "nccl"]
    return words


def aware_command(split: Sequence[int], high: str, file: Path) -> list[str]:
    """The mpirun of a split whose MPI takes GPU memory."""
    return [*jobs.LAUNCHER, "-np", str(sum(split)), *_bench(high, file)]


def _bench(high: str, file: Path) -> list[str]:
    words = [sys.executable, "-m", "blinkmpi", "bench", "all_reduce", "-b", "1M", "-e", high, "-f", "4"]
    return [*words, "-n", str(CALLS), "--predict", "-J", str(file)]


def settings(split: Sequence[int], folder: Path) -> dict[str, str]:
    """The variables of all ranks."""
    log = {"NCCL_DEBUG_FILE": f"{folder}/log.%h.%p"}
    return {**SETTINGS, **log, "BLINKMPI_NODES": name_of(split), "PYTHONPATH": python_path()}


def aware_settings(split: Sequence[int], folder: Path) -> dict[str, str]:
    """The same for an MPI that takes GPU memory.

    Raises:
        SystemExit: if there is no such UCX.
    """
    found = importlib.util.find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("--aware needs a UCX with CUDA parts: pip install libucx-cu13")
    folders = f"{found.submodule_search_locations[0]}/lib", os.environ.get("LD_LIBRARY_PATH")
    path = os.pathsep.join(filter(None, folders))
    return {**settings(split, folder), **AWARE, "LD_LIBRARY_PATH": path, "BLINKMPI_CUDA_AWARE": "1"}


def made_of(logs: Sequence[str]) -> dict[str, Any]:
    """What NCCL made of the nodes: how many it saw, and its connections by kind."""
    text = "\n".join(logs)
    nodes = sorted({int(count) for count in re.findall(r"nNodes (\d+)", text)})
    over = re.findall(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[send\])? via (\w+)(?:/(Socket|IB))?", text)
    kinds = ["/".join(filter(None, found)) for found in over]
    return {"nodes": nodes, "connections": {kind: kinds.count(kind) for kind in sorted(set(kinds))}}


def measured(split: Sequence[int], high: str, seconds: float) -> jobs.Outcome:
    """Run the job of a split; (its document, what went wrong, its output)."""
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        folder, file = Path(name), Path(name) / "result.json"
        why, said = run_job(command(split, high, file), settings(split, folder), seconds)
        found = load(file)
        made = made_of([path.read_text(errors="replace") for path in sorted(folder.glob("log.*"))])
    failed = [why] if why else []
    if found is None:
        return None, failed or ["no result"], said
    if found["blinkmpi"]["memory"] != "gpu":
        return None, [*failed, "the ranks had no GPUs"], said
    if made["nodes"] != [len(split)]:
        failed.append(f"NCCL saw {made['nodes'] or 'no number of'} nodes, not {len(split)}")
    return {"nodes": {"virtual": True, "ranks": list(split), "nccl": made}, **found, "failed": failed}, failed, said


def measured_aware(split: Sequence[int], high: str, seconds: float) -> jobs.Outcome:
    """Run a split by an MPI that takes GPU memory, then the same ranks on one node; as :func:`measured`."""
    documents: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        for label, variables in (("split", {}), (ONE_NODE, {"BLINKMPI_NODES": "", "BLINKMPI_CUDA_AWARE": ""})):
            file = Path(name) / f"{label}.json"
            ran = {**aware_settings(split, Path(name)), **variables}
            why, said = run_job(aware_command(split, high, file), ran, seconds / 2)
            result = load(file)
            if why or result is None:
                return None, [f"{label}: {why or 'no result'}"], said
            documents.append(result)
    found, whole = documents
    if found["blinkmpi"]["memory"] != "gpu":
        return None, ["the ranks had no GPUs"], said
    for row, other in zip(found["results"], whole["results"], strict=True):
        for place in PLACES:
            theirs = {"time": other[place]["time"], "ratio": other[place]["time"] / row[place]["time"]}
            row["blinkmpi"].setdefault(place, {})["compare"] = {ONE_NODE: {**theirs, "nwrong": other[place]["nwrong"]}}
    found["blinkmpi"]["compare"] = [ONE_NODE]
    return {"nodes": {"virtual": True, "ranks": list(split), "mark": MARK}, **found, "failed": []}, [], said


def table(documents: Sequence[dict[str, Any]]) -> str:
    """A line for each size: ours and NCCL's in ms, out of place and in place."""
    lines: list[str] = []
    for found in documents:
        peer = "nccl" if "nccl" in found["nodes"] else ONE_NODE
        name = {"nccl": "NCCL"}.get(peer, peer)
        split = name_of(found["nodes"]["ranks"])
        lines += ["", f"allreduce on virtual nodes of {split} GPUs; {_about(found['nodes'])}"]
        lines.append(f"MiB; ours ms, GB/s, {name} ms, ratio; the same in place; predicted, bound; wrong")
        for row in found["results"]:
            own, wrong = row["blinkmpi"], 0
            cells = [f"{row['size'] >> 20:4d}"]
            for place in PLACES:
                theirs = own[place]["compare"][peer]
                cells.append(f"{_ms(row[place]['time'])} {row[place]['alg_bw']:6.2f}")
                cells.append(f"{_ms(theirs['time'])} {theirs['ratio']:5.2f}")
                wrong += (row[place]["nwrong"] or 0) + (theirs["nwrong"] or 0)
            lines.append(" ".join([*cells, _ms(own["predicted_us"]), _ms(own["bound_us"]), f"{wrong:4d}"]))
    return "\n".join(lines).strip("\n")


def _about(nodes: dict[str, Any]) -> str:
    """What is to be known of a split besides its ranks."""
    if "nccl" not in nodes:
        return f"{nodes['mark']}, MPI takes GPU memory; beside ours on one node"
    connections = ", ".join(f"{count} {kind}" for kind, count in nodes["nccl"]["connections"].items())
    return f"NCCL saw {', '.join(map(str, nodes['nccl']['nodes']))} nodes, connections: {connections or 'unknown'}"


def _ms(us: float | None) -> str:
    return f"{ms_text(us):>8}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of every split and write its file; 0 if all of them ended well."""
    parser = argparse.ArgumentParser(description="Ours and NCCL between virtual nodes of this machine's GPUs.")
    parser.add_argument("np", type=int, choices=sorted(SPLITS), help="ranks, one for each GPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results' files")
    parser.add_argument("--budget", type=float, default=90, metavar="SECONDS", help="for all jobs (default 90)")
    parser.add_argument("--max", default="256M", metavar="SIZE", help="largest size (default 256M)")
    parser.add_argument("--aware", action="store_true", help="also by an MPI that takes GPU memory")
    parser.add_argument("--only", default="", metavar="SPLIT", help="only the splits whose names hold this, as 2+2")
    args = parser.parse_args(argv)
    ways = {"": measured, "-ipc": measured_aware} if args.aware else {"": measured}
    todo = [(split, way) for split in SPLITS[args.np] for way in ways if args.only in name_of(split)]
    args.out.mkdir(parents=True, exist_ok=True)

    def one(i: int, seconds: float) -> jobs.Outcome:
        split, way = todo[i]
        found, why, said = ways[way](split, args.max, seconds)
        if found is not None:
            jobs.write(args.out / f"nodes-gpu-{'-'.join(map(str, split))}{way}.json", found)
        return found, [f"{names[i]}: {text}" for text in why], said

    names = [name_of(split) + way for split, way in todo]
    _, failed = jobs.in_turn(names, args.budget, lambda i, left: left / (len(todo) - i), one, tail=TAIL_CHARACTERS,
                             what="jobs", table=table)  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
