"""The table of docs/nccl.md: calls of an unchanged torch program, by the door and by NCCL."""

import json
from typing import Any

from benchmarks import report
from benchmarks.pages.rows import exact_size_text, line, table_head

RESULT = report.RESULTS / "nccl-door-gpu-np2.json"
TIMES = {"host_us": "host", "device_us": "on a stream", "graph_us": "in a graph"}


def tables() -> dict[str, str]:
    """By name, of the file that benchmarks/nccl_door.py wrote."""
    return {"door": door_table(json.loads(RESULT.read_text(encoding="utf-8")))}


def door_table(document: dict[str, Any]) -> str:
    """How many times as fast as NCCL each collective is, from the least to the most of all types and lengths."""
    rows = document["results"]
    names = list(dict.fromkeys(row["collective"] for row in rows))
    lines = [_line(name, [row for row in rows if row["collective"] == name]) for name in names]
    facts, training = document["facts"], document["training"]
    losses = "equal" if training["equal"] else "NOT equal"
    below = (
        f"{document['n']} {facts['gpu']}, torch {facts['torch']}, NCCL {facts['nccl']} without NVLS; {len(rows)} rows, "
        f"of {_listed(rows, 'dtype')} and {_sizes(rows)}. Wrong elements: {document['wrong']}. {training['ours']} "
        f"calls of a training were ours; its losses were {losses} to those of plain NCCL."
    )
    head = table_head("collective", *TIMES.values(), "ours, of the calls that were looked at")
    return "\n".join([*head, *map(line, lines), "", below])


def _line(name: str, rows: list[dict[str, Any]]) -> list[str]:
    ratios = {key: [row["nccl"][key] / row[key] for row in rows] for key in TIMES}
    spans = [f"{min(of):.2f} to {max(of):.2f}" for of in ratios.values()]
    return [name, *spans, f"{sum(row['ours'] for row in rows)} of {sum(row['checked'] for row in rows)}"]


def _listed(rows: list[dict[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(row[key] for row in rows))


def _sizes(rows: list[dict[str, Any]]) -> str:
    sizes = [row["bytes"] for row in rows]
    return f"{exact_size_text(min(sizes))} to {exact_size_text(max(sizes))}"
