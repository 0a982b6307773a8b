"""Result files as short text for a terminal: what a run of benchmarks/gpu.py ends with."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks.pages import overview
from benchmarks.pages.rows import PLACES, on_gpu

Documents = Sequence[tuple[str, dict[str, Any]]]
CHARACTERS = 8_000


def table(documents: Documents, most: int = CHARACTERS) -> str:
    """What the files say: every row of the sweeps, or ratios alone where that is longer than ``most`` characters."""
    bench = [one for one in documents if "size" in next(iter(one[1]["results"]), {})]
    rest = "\n\n".join(text for name, found in documents if (text := of_program(name, found)))
    for text in (of_rows(bench), of_ratios(documents)):
        whole = "\n\n".join(filter(None, (text, rest)))
        if len(whole) <= most:
            return whole
    return f"{whole[:most]}\n... cut: the rest is in the files"


def of_rows(documents: Documents) -> str:
    """Rows out of place and in place: size, ours, and each peer's time and ratio."""
    lines = []
    for name, found in documents:
        peers = found["blinkmpi"]["compare"]
        lines += ["", f"{name}: ours us, {', '.join(f'{peer} us, ratio' for peer in peers)}; the same in place; wrong"]
        for row in found["results"]:
            own = row["blinkmpi"]
            cells = [f"{_size(row['size']):>5} {own.get('protocol') or '-':>7} {own.get('ctas') or '-':>3}"]
            for place, _ in PLACES:
                cells.append(f"{row[place]['time']:9.1f}")
                for peer in peers:
                    theirs = own[place]["compare"][peer]
                    cells.append(f"{'N/A':>15}" if theirs is None else f"{theirs['time']:9.1f} {theirs['ratio']:5.2f}")
            lines.append(" ".join(cells) + f" {sum(_wrong(row, place, peers) for place, _ in PLACES):4d}")
    return "\n".join(lines).strip("\n")


def _wrong(row: dict[str, Any], place: str, peers: Sequence[str]) -> int:
    """Wrong elements of ours and of the peers."""
    theirs = [row["blinkmpi"][place]["compare"][peer] for peer in peers]
    return sum(found["nwrong"] or 0 for found in (row[place], *filter(None, theirs)))


def of_ratios(documents: Documents) -> str:
    """The tables of the performance page, without the links to files."""
    groups = overview.by_kind([one for one in documents if on_gpu(one[1])])
    lines = list(overview.gpu_tables(groups["gpu"]))
    return "\n".join(line.rpartition(" | ")[0] if line.startswith("| ") else line.strip() for line in lines
                     if not line.startswith("|--"))  # fmt: skip


def of_program(name: str, document: dict[str, Any]) -> str:
    """A file that a program beside ``blinkmpi bench`` wrote, in a few lines."""
    kind = next((kind for kind in PROGRAMS if kind in document or kind in document["blinkmpi"]), None)
    return "" if kind is None else "\n".join([name, *PROGRAMS[kind](document)])


def beside_compute(document: dict[str, Any]) -> Iterator[str]:
    """A line for each product and vector: by limit of CTAs both slowdowns, ours then NCCL's, and the totals' ratio."""
    yield "product x, AllReduce x of ours; of NCCL; ratio of totals"
    for (edge, dtype, nbytes), same in groupby(
        document["results"], lambda row: (row["edge"], row["dtype"], row["bytes"])
    ):
        cells = [f"{edge}^3 {dtype} {_size(nbytes)}:"]
        for row in same:
            sides = [row["libraries"][name] for name in ("ours", "nccl")]
            texts = [
                "wrong" if one["wrong"] else f"{one['product_slowdown']:.2f} {one['slowdown']:.2f}" for one in sides
            ]
            if not any(one["wrong"] for one in sides):
                texts.append(f"{sides[1]['total_us'] / sides[0]['total_us']:.2f}")
            cells.append(f"{row['max_ctas'] or 'all'}: {'; '.join(texts)} |")
        yield " ".join(cells)


def host_time(document: dict[str, Any]) -> Iterator[str]:
    """A line for each type and way: microseconds of a call of the same tensor, by size."""
    rows = document["results"]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype]
        for way in own[0]["again_us"]:
            times = (row["again_us"].get(way) for row in own)
            yield f"{dtype} {way}: {' '.join('-' if us is None else f'{us:.1f}' for us in times)}"


def gpu_messages(document: dict[str, Any]) -> Iterator[str]:
    """A line for each pattern and kind of time: NCCL's time by ours, by length."""
    rows = document["results"]
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        for kind in ("us", "graph_us", "host_us"):
            times = [row[kind] for row in rows if row["pattern"] == pattern]
            ratios = (us["nccl"] / us["ours"] if "nccl" in us else None for us in times)
            yield f"{pattern} {kind}: {' '.join('-' if ratio is None else f'{ratio:.2f}' for ratio in ratios)}"


def groups(document: dict[str, Any]) -> Iterator[str]:
    """A line for each number and length of tensors: microseconds of each way, on a stream and in a graph."""
    for row in document["results"]:
        for kind in ("us", "graph_us"):
            if kind in row:
                times = ", ".join(f"{way} {us:.1f}" for way, us in row[kind].items())
                yield f"{row['tensors']} x {_size(row['bytes'])} {kind}: {times}; {sum(row['wrong'].values())} wrong"


def torch_group(document: dict[str, Any]) -> Iterator[str]:
    """A line for each collective and type: the other library's time by ours, by size."""
    key: Callable[[dict[str, Any]], tuple[str, str]] = lambda row: (row["collective"], row["dtype"])  # noqa: E731
    for (collective, dtype), same in groupby(document["results"], key):
        times = [row.get("us") for row in same]
        ratios = (None if us is None else next(us[way] for way in us if way != "blink") / us["blink"] for us in times)
        yield f"{collective} {dtype}: {' '.join('-' if r is None else f'{r:.2f}' for r in ratios)}"


def training(document: dict[str, Any]) -> Iterator[str]:
    """A line for each model and type: a step, what communication adds to it, and what it takes alone, in ms."""
    for row in document["results"]:
        parts = [f"{name} {one['step_ms']:.1f} (exposed {one['exposed_ms']:.1f}, alone {one['communication_ms']:.1f})"
                 for name, one in row["libraries"].items()]  # fmt: skip
        yield f"{row['model']} {row['dtype']}: compute {row['compute_ms']:.1f} ms; {'; '.join(parts)}"


def fsdp(document: dict[str, Any]) -> Iterator[str]:
    """A line for each library: a step and its matrix products in ms, and the first library's step by its own."""
    for row in document["results"]:
        yield f"{row['how']}, {row['parameters'] / 1e6:.0f} M, sums in {row['reduce']}"
        for name, one in row["libraries"].items():
            products = one["kernels_ms"].get("products", 0.0)
            yield f"{name}: {one['step_ms']:.1f}, products {products:.1f}, ratio {one['ratio']['median']:.3f}"


def message_cost(document: dict[str, Any]) -> Iterator[str]:
    """A message, a hop, and the rate."""
    found = document["blinkmpi"]
    yield f"a message {found['message_us']:.3f} us, a hop {found['hop_us']:.3f} us, {found['gbps']:.1f} GB/s"


# By a key of the file that only this program writes.
PROGRAMS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "beside_compute": beside_compute, "host_time": host_time, "groups": groups, "torch_group": torch_group,
    "gpu_messages": gpu_messages,
    "training": training, "fsdp": fsdp, "message_us": message_cost,
}  # fmt: skip


def _size(nbytes: int) -> str:
    at = max(0, min(3, (nbytes.bit_length() - 1) // 10))
    return f"{nbytes / (1 << 10 * at):.4g}{' KMG'[at].strip()}"
