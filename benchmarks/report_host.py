"""The sections of the performance page about host memory: one host, and several."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.report_rows import (
    NONE,
    PLACES,
    anchor,
    blocks,
    compared,
    exact_size_text,
    facts_of,
    first_peer,
    is_emulated,
    label_of,
    mean,
    ms_text,
    our_time,
    ratio_of,
    ratio_text,
    table_head,
    us_text,
    wrong_text,
)
from benchmarks.report_text import HOSTS_LEGEND


def host_summary(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    lines = [
        "## Summary",
        "",
        "| collective | ranks | executor | mean from 1 MiB, out of place | in place | wrong values | file |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for name, document in results:
        ours = document["blinkmpi"]
        peer = first_peer(document)
        for executor, rows in blocks(document):
            means = [ratio_text(mean(rows, place, peer)) for place, _ in PLACES]
            label = f"{ours.get('collective')}{' (emulated)' if is_emulated(rows) else ''}"
            cells = [label, str(ours["ranks"]), executor, *means, wrong_text(rows), f"[{name}](#{anchor(name)})"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def host_file(name: str, document: dict[str, Any]) -> str:
    lines = [f"## {name}", ""]
    lines += [f"- {label}: {text}" for label, text in facts_of(document)]
    peer = first_peer(document)
    for executor, rows in blocks(document):
        lines += ["", f"### {document['blinkmpi'].get('collective')}, {executor} executor", ""]
        lines += _table(rows, peer)
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]], peer: str) -> list[str]:
    mixed = len({row.get("experiment_name") for row in rows}) > 1 or len({row.get("root") for row in rows}) > 1
    head = ["size", *(["type", "op", "root"] if mixed else []), "scheme", "executor"]
    for _, label in PLACES:
        head += [f"{label}: ours", label_of(peer), "ratio"]
    head.append("wrong")
    align = ["---:", *(["---", "---", "---:"] if mixed else []), "---", "---", *["---:"] * 6, "---:"]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(align)}|"]
    for row in rows:
        own = row.get("blinkmpi") or {}
        cells = [exact_size_text(row["size"])]
        cells += [str(row.get("type")), str(row.get("redop")), str(row.get("root"))] if mixed else []
        cells += [str(own.get("scheme") or NONE) + (" (emulated)" if own.get("emulated") else "")]
        cells.append(str(own.get("executor") or NONE))
        for place, _ in PLACES:
            theirs = compared(row, place, peer)
            cells += [
                us_text(our_time(row, place)),
                us_text((theirs or {}).get("time")),
                ratio_text(ratio_of(row, place, peer)),
            ]
        cells.append(wrong_text([row]))
        lines.append(f"| {' | '.join(cells)} |")
    last = ["**mean from 1 MiB**", *([""] * (5 if mixed else 2))]
    for place, _ in PLACES:
        value = mean(rows, place, peer)
        last += ["", "", NONE if value is None else f"**{ratio_text(value)}**"]
    return [*lines, f"| {' | '.join([*last, ''])} |"]


def several_hosts(results: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Files that benchmarks/hosts.py wrote: its set-ups in one table, then each file, with the rows of its sweep."""
    setups = [result for result in results if "ours" in result[1]["results"][0]]
    yield HOSTS_LEGEND
    if setups:
        head = ["set-up", "size", "ours", "wire", "share of the wire", "rate", "share of the rate", "MPI", "ratio"]
        lines = [*table_head([*head, "ratio without han", "predicted", "bound", "wrong", "file"], left=1)]
        for name, document in setups:
            rows = {row["mpi_coll"]: row for row in document["results"]}
            row, without = next(iter(rows.values())), rows.get("^han")
            usual = rows.get("all")  # None where that job failed
            cells = [
                f"allreduce, {document['hosts']['text']}",
                exact_size_text(row["size"]),
                ms_text(row["ours"]["us"]),
            ]
            cells += [ms_text(max(wire["us"] for wire in row["wires"])), ratio_text(row["share"])]
            cells += [ms_text(row["rate_us"]), ratio_text(row["rate_share"])]
            cells += [ms_text(usual["mpi"]["us"]), ratio_text(usual["ratio"])] if usual else [NONE, NONE]
            cells += [
                ratio_text(without["ratio"]) if without else NONE,
                ms_text(row["predicted_us"]),
                ms_text(row["bound_us"]),
            ]
            wrong = [one["wrong"] for each in rows.values() for one in (each["ours"], each["mpi"], *each["wires"])]
            cells += ["not checked" if None in wrong else str(sum(wrong)), f"[{name}](#{anchor(name)})"]
            lines.append(f"| {' | '.join(cells)} |")
        yield "\n".join(lines)
    for name, document in results:
        about = document["hosts"]
        lines = [f"### {name}", "", f"- hosts: {about['text']}; namespaces of one machine"]
        lines += [f"- {label}: {text}" for label, text in facts_of(document) if label != "command"]
        lines.append(f"- command: `python benchmarks/hosts.py --only {about['step']}`")
        lines += [f"- failed: {failure}" for failure in document.get("failed") or []]
        yield "\n".join([*lines, *([] if (name, document) in setups else ["", *_hosts_sweep(document)])])


def _hosts_sweep(document: dict[str, Any]) -> Iterator[str]:
    """The rows of a collective through the sizes."""
    head = [document["blinkmpi"]["collective"], "scheme", "ours", "MPI", "ratio", "in place: ours", "MPI", "ratio"]
    yield from table_head([*head, "predicted", "bound", "wrong"])
    for row in document["results"]:
        own = row["blinkmpi"]
        cells = [exact_size_text(row["size"]), str(own.get("scheme") or NONE)]
        for place, _ in PLACES:
            theirs = (compared(row, place, "mpi") or {}).get("time")
            cells += [ms_text(our_time(row, place)), ms_text(theirs), ratio_text(ratio_of(row, place, "mpi"))]
        cells += [ms_text(own.get("predicted_us")), ms_text(own.get("bound_us")), wrong_text([row])]
        yield f"| {' | '.join(cells)} |"
