"""The performance page: ratios alone, by size, in a few tables; each row names the file that has all of it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.pages.rows import (
    NONE,
    OURS_IN_TRAINING,
    anchor,
    blocks,
    collective_text,
    emulated_links,
    exact_size_text,
    label_of,
    line,
    on_gpu,
    peers_of,
    ranks_text,
    ratio_of,
    ratio_text,
    step_ratio,
    table_head,
    with_nvls_told,
)

Results = Sequence[tuple[str, dict[str, Any]]]
Row = tuple[list[str], dict[int, float | None], str]  # what it is, a ratio for each size, its file
MEASUREMENTS = "measurements.md"
OURS = ("emulated", "hosts", "nodes", "small_calls", "call_forms", "call_cost", "trace_cost", "certainty",
        "lang_measured",
        "ablation", "host_time", "gpu_messages", "torch_group", "training", "fsdp", "beside_compute",
        "groups")  # fmt: skip
IN_README = ("all_reduce-gpu-graph-np2.json", "all_reduce-bfloat16-gpu-graph-np2.json", "all_reduce-gpu-np2.json",
             "all_reduce-gpu-graph-np4.json", "all_reduce-bfloat16-gpu-graph-np4.json", "all_reduce-np2.json",
             "all_reduce-np4.json")  # fmt: skip
PART_IN_README = "emulated-dgx-1v-np4.json", "1,4,5,6"  # GPUs that no ring joins
TYPES = {"float": "float32", "double": "float64"}


def kind_of(document: dict[str, Any]) -> str:
    """Which program wrote a file: a key of it, or ``gpu`` or ``host`` for ``blinkmpi bench``."""
    return next((kind for kind in OURS if document.get(kind)), "gpu" if on_gpu(document) else "host")


def by_kind(results: Results) -> dict[str, Results]:
    """The files of each kind."""
    return {kind: [one for one in results if kind_of(one[1]) == kind] for kind in (*OURS, "gpu", "host")}


def gpu_tables(results: Results) -> Iterator[str]:
    """A table for each GPU, number of them and way of starting calls."""
    groups: dict[tuple[int, str, bool], list[Row]] = {}
    for name, document in results:
        ours, config = document["blinkmpi"], document.get("config") or {}
        gpu, graph = (ours.get("gpu") or {}).get("name", "unknown GPU"), bool(config.get("graph"))
        plain = "registered" if ours.get("local_register") else "not registered"
        for _, rows in blocks(document):
            types = ", ".join(dict.fromkeys(TYPES.get(str(row["type"]), str(row["type"])) for row in rows))
            types += ", rounded on each hop" if ours.get("wire") == "operand" else ""
            for peer in peers_of(document):
                what = [collective_text(document), types, plain, label_of(peer, document)]
                group = groups.setdefault((ours["ranks"], gpu, graph), [])
                group.append((what, ratios(rows, "out_of_place", peer), name))
    for (n, gpu, graph), found in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1], not item[0][2])):
        yield f"### {n} x {gpu}, {'in a CUDA graph' if graph else 'calls on a stream'}\n"
        yield from table(("collective", "type", "buffers", "beside"), found)


def host_tables(results: Results) -> Iterator[str]:
    """A table of the collectives on CPU ranks by the C executor."""
    found: list[Row] = []
    for name, document in results:
        for executor, rows in blocks(document):
            for place in ("out_of_place", "in_place") if executor == "c" else ():
                peer = (peers_of(document) or ["mpi"])[0]
                what = [str(document["blinkmpi"].get("collective")), str(document["blinkmpi"]["ranks"])]
                found.append(([*what, place.replace("_", " ")], ratios(rows, place, peer), name))
    yield from table(("collective", "ranks", "place"), sorted(found, key=lambda row: (row[0][1], row[0][0])))


def small_calls_table(results: Results) -> Iterator[str]:
    """A line for each file of short calls."""
    yield from table_head("hosts", ">ranks", ">rows", ">mean", ">least", ">below 0.97", "file")
    for name, document in results:
        found = [row["ratio"] for row in document["results"]]
        below = sum(ratio < document["small_calls"]["goal"] for ratio in found)
        cells = [str(document["small_calls"]["hosts"]), str(document["blinkmpi"]["ranks"]), str(len(found))]
        cells += [ratio_text(mean(found)), marked(min(found)), str(below)]
        yield line([*cells, f"[{name.removesuffix('.json')}]({MEASUREMENTS}#{anchor(name)})"])


def call_forms_table(results: Results) -> Iterator[str]:
    """A line for each file of calls as programs write them."""
    yield from table_head(">ranks", ">cores", ">rows", ">mean", ">least", ">below 0.95", "file")
    for name, document in results:
        found, ours = [row["ratio"] for row in document["results"]], document["blinkmpi"]
        below = sum(ratio < document["call_forms"]["goal"] for ratio in found)
        cells = [str(ours["ranks"]), str(ours["hardware"]["cores_available"]), str(len(found))]
        cells += [ratio_text(mean(found)), marked(min(found)), str(below)]
        yield line([*cells, f"[{name.removesuffix('.json')}]({MEASUREMENTS}#{anchor(name)})"])


def torch_table(results: Results) -> Iterator[str]:
    """A line for each file and collective of process groups."""
    found: list[Row] = []
    for name, document in results:
        rows = [row for row in document["results"] if "us" in row]
        for collective, dtype in dict.fromkeys((row["collective"], row["dtype"]) for row in rows):
            own = [row for row in rows if (row["collective"], row["dtype"]) == (collective, dtype)]
            other = next((key for row in own for key in row["us"] if key != "blink"), "")
            by_size = {row["bytes"]: row["us"][other] / row["us"]["blink"] for row in own if {other, "blink"} <= set(row["us"])}  # fmt: skip  # noqa: E501
            found.append(([collective, dtype, ranks_text(document), with_nvls_told(other, document)], by_size, name))
    yield from table(("collective", "type", "ranks", "beside"), found)


ALONE_MS = "communication_ms"
NCCL_HOOK = "nccl_hook"


def alike(own: str, other: str, libraries: Iterable[str]) -> bool:
    """Whether to compare a way of ours with another library's: NCCL in a hook, where it was measured, with hooks."""
    if own not in OURS_IN_TRAINING or other in OURS_IN_TRAINING:
        return False
    return NCCL_HOOK not in libraries or (own != "blink") == (other == NCCL_HOOK)


def training_table(results: Results) -> Iterator[str]:
    """A line for each model, way of ours and other library."""
    yield from table_head("model", "type", ">ranks", "by", "beside", ">a step", ">all AllReduces of a step", "file")
    for name, document in results:
        for row in document["results"]:
            libraries = row["libraries"]
            for own, other in itertools.product(libraries, libraries):
                if alike(own, other, libraries):
                    cells = [
                        f"{row['model']}{emulated_links(document)}",
                        row["dtype"],
                        ranks_text(document),
                        OURS_IN_TRAINING[own],
                        with_nvls_told(other, document),
                    ]
                    ratio, between = step_ratio(libraries[other], libraries[own])
                    cells.append(marked(ratio, 3) + between)
                    cells.append(marked(libraries[other][ALONE_MS] / libraries[own][ALONE_MS]))
                    yield line([*cells, link(name)])


def certainty_table(results: Results) -> Iterator[str]:
    """A line for each file of predictions."""
    yield from table_head(">ranks", ">rows", ">within a tenth", ">median error", "file")
    for name, document in results:
        errors = sorted(abs(row["error"]) for row in document["results"])
        within = sum(row["within"] for row in document["results"])
        cells = [str(document["blinkmpi"]["ranks"]), str(len(errors)), str(within)]
        yield line([*cells, f"{100 * errors[len(errors) // 2]:.1f} %", link(name)])


def for_readme(results: Results) -> Iterator[str]:
    """AllReduce of float32 and bfloat16 at a few sizes: the files of the README, those that there are."""
    known = dict(results)
    sizes = [1 << 16, 1 << 20, 1 << 24, 1 << 28]
    yield from table_head("AllReduce on", "type", "beside", *(f">{exact_size_text(size)}" for size in sizes))
    emulated, part = PART_IN_README
    if emulated in known:
        ours = known[emulated]["blinkmpi"]
        by_size = {row["size"]: row["ratio"] for row in known[emulated]["results"] if row["gpus"] == part}
        played = f"GPUs {part} of a {ours['machine']['name'].upper()}"
        found = [f"{where(known[emulated])}, as {played}", ours["dtype"], label_of("nccl", known[emulated])]
        yield line([*found, *(marked(by_size.get(size)) for size in sizes)])
    for name in IN_README:
        if name in known:
            rows = next(rows for _, rows in blocks(known[name]))
            dtype, peer = str(rows[0]["type"]), peers_of(known[name])[0]
            by_size = ratios(rows, "out_of_place", peer)
            found = [
                where(known[name]),
                TYPES.get(dtype, dtype),
                {"mpi": "Open MPI"}.get(peer) or label_of(peer, known[name]),
            ]
            yield line([*found, *(marked(by_size.get(size)) for size in sizes)])


def where(document: dict[str, Any]) -> str:
    """What a file of ``blinkmpi bench`` was measured on, in short."""
    ours, graph = document["blinkmpi"], (document.get("config") or {}).get("graph")
    if on_gpu(document):
        gpu = ours["gpu"]["name"].removeprefix("NVIDIA ")
        return f"{ours['ranks']} x {gpu}, {'CUDA graph' if graph else 'stream'}"
    cores = ours["hardware"]["cores_available"]
    return f"{ours['ranks']} CPU ranks" + (f" on {cores} cores" if cores < ours["ranks"] else "")


def ratios(rows: Iterable[dict[str, Any]], place: str, peer: str) -> dict[int, float | None]:
    """The ratio of each size of a sweep; of several calls of a size, their mean."""
    found: dict[int, list[float]] = {}
    for row in rows:
        ratio = ratio_of(row, place, peer)
        found.setdefault(row["size"], []).extend([ratio] if ratio else [])
    return {size: mean(several) if several else None for size, several in found.items()}


def table(head: Sequence[str], found: Sequence[Row]) -> Iterator[str]:
    """Rows of ratios, a column for each size that one of them has."""
    sizes = sorted({size for _, by_size, _ in found for size in by_size})
    yield from table_head(*head, *(f">{exact_size_text(size)}" for size in sizes), "file")
    for what, by_size, name in found:
        yield line([*what, *(marked(by_size.get(size)) for size in sizes), link(name)])


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def marked(ratio: float | None, digits: int = 2) -> str:
    """A ratio with so many decimals, in italics below 1."""
    if ratio is None:
        return NONE
    text = f"{ratio:.{digits}f}"
    return f"*{text}*" if float(text) < 1 else text


def link(name: str) -> str:
    """To the section of a file on the page of measurements."""
    return f"[all]({MEASUREMENTS}#{anchor(name)})"
