"""The sections of the performance page about PyTorch: collectives of process groups, and training."""

from typing import Any

from benchmarks.pages.rows import (
    NONE,
    OURS_IN_TRAINING,
    emulated_links,
    exact_size_text,
    fact_lines,
    failures,
    gpu_lines,
    line,
    ratio_text,
    step_ratio,
    table_head,
    us_text,
    with_nvls_told,
)


def torch_group_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/torch_group.py wrote: a line for each size, a pair of columns for each type."""
    rows = document["results"]
    types = list(dict.fromkeys(row["dtype"] for row in rows))
    other = next(name for row in rows if "us" in row for name in row["us"] if name != "blink")
    heads = [cell for dtype in types for cell in (f">{dtype}: ours", f">{with_nvls_told(other, document)}", ">ratio")]
    lines = [f"### {name}", "", *gpu_lines(document), *fact_lines(document, command="torch_group.py"), ""]
    lines += table_head("collective", ">size", *heads, ">wrong")
    by_size: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        by_size.setdefault((row["collective"], row["bytes"]), {})[row["dtype"]] = row
    for (collective, nbytes), found in by_size.items():
        cells, wrong = [collective, exact_size_text(nbytes)], 0
        for dtype in types:
            us = found.get(dtype, {}).get("us", {})
            both = "blink" in us and other in us
            cells += [us_text(us.get("blink")), us_text(us.get(other))]
            cells.append(ratio_text(us[other] / us["blink"]) if both else NONE)
            wrong += found.get(dtype, {}).get("wrong", {}).get("blink", 0)
        lines.append(line([*cells, str(wrong)]))
    return "\n".join(lines)


def training_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/training/measure.py wrote: a line for each model and library."""
    lines = [f"### {name}", "", *gpu_lines(document), *fact_lines(document, command="training/measure.py"), ""]
    lines += table_head("model", "type", "a rank's batch", ">parameters", "library", ">step", ">compute", ">exposed",
                        ">alone", ">overlap", ">step: ratio", ">alone: ratio", ">weights apart")  # fmt: skip
    for row in document["results"]:
        ours = row["libraries"]["blink"]
        for library, one in row["libraries"].items():
            cells = [
                f"{row['model']}{emulated_links(document)}",
                row["dtype"],
                row["batch"],
                f"{row['parameters'] / 1e6:.1f} M",
                with_nvls_told(library, document),
            ]
            cells += [f"{ms:.1f}" for ms in (one["step_ms"], row["compute_ms"], one["exposed_ms"])]
            cells += [f"{one['communication_ms']:.1f}", f"{one['overlap']:.0%}" if one["overlap"] > 0 else "none"]
            ratio, between = step_ratio(one, ours)
            ratios = [f"{ratio:.3f}{between}", ratio_text(one["communication_ms"] / ours["communication_ms"])]
            cells += ["-", "-"] if library in OURS_IN_TRAINING and one is not ours else ratios
            lines.append(line([*cells, f"{one['weights_differ_by']:.0e}"]))
    return "\n".join(lines)


KERNELS = ("products", "communication", "gates")  # of those that fsdp.py tells apart


def fsdp_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/training/fsdp.py wrote: a line for each library."""
    lines = [f"### {name}", "", *gpu_lines(document), *fact_lines(document, command="training/fsdp.py")]
    lines += [*failures(document), ""]
    lines += table_head("model", "how", "sums", "library", ">step", *(f">{kind}" for kind in KERNELS), ">step: ratio",
                        ">losses apart")  # fmt: skip
    for row in document["results"]:
        for library, one in row["libraries"].items():
            model = f"{row['parameters'] / 1e6:.1f} M parameters, {row['batch']} x {row['length']} tokens"
            cells = [model, row["how"], row["reduce"], with_nvls_told(library, document), f"{one['step_ms']:.1f}"]
            times = (one["kernels_ms"].get(kind) for kind in KERNELS)
            cells += [NONE if ms is None else f"{ms:.1f}" for ms in times]
            ratio = one["ratio"]
            ends = "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
            lines.append(line([*cells, f"{ratio['median']:.3f}{ends}", f"{one['losses_apart']:.0e}"]))
    return "\n".join(lines)
