"""The sections of the performance page about host memory: one host, several, the cost of calls and of mechanisms."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.pages.rows import (
    NONE,
    PLACES,
    blocks,
    compared,
    exact_size_text,
    fact_lines,
    failures,
    first_peer,
    label_of,
    label_with_mark,
    line,
    link_to,
    mean,
    ms_text,
    our_time,
    ratio_of,
    ratio_text,
    scheme_text,
    table_head,
    us_text,
    wrong_count,
    wrong_text,
)
from benchmarks.pages.text import HOSTS_LEGEND


def host_summary(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    means = (">mean from 1 MiB, out of place", ">in place")
    lines = ["## Summary", "", *table_head("collective", ">ranks", "executor", *means, ">wrong values", "file")]
    for name, document in results:
        peer = first_peer(document)
        for executor, rows in blocks(document):
            cells = [label_with_mark(document, rows), str(document["blinkmpi"]["ranks"]), executor]
            cells += [ratio_text(mean(rows, place, peer)) for place, _ in PLACES]
            lines.append(line([*cells, wrong_text(rows), link_to(name)]))
    return "\n".join(lines)


def host_file(name: str, document: dict[str, Any]) -> str:
    lines = [f"## {name}", "", *fact_lines(document)]
    for executor, rows in blocks(document):
        lines += ["", f"### {document['blinkmpi'].get('collective')}, {executor} executor", ""]
        lines += _table(rows, document)
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]], document: dict[str, Any]) -> list[str]:
    peer = first_peer(document)
    mixed = len({row.get("experiment_name") for row in rows}) > 1 or len({row.get("root") for row in rows}) > 1
    head = [">size", *(["type", "op", ">root"] if mixed else []), "scheme", "executor"]
    for _, label in PLACES:
        head += [f">{label}: ours", f">{label_of(peer, document)}", ">ratio"]
    lines = [*table_head(*head, ">wrong")]
    for row in rows:
        own = row.get("blinkmpi") or {}
        cells = [exact_size_text(row["size"])]
        cells += [str(row.get(key)) for key in ("type", "redop", "root")] if mixed else []
        cells += [scheme_text(own), str(own.get("executor") or NONE)]
        for place, _ in PLACES:
            theirs = (compared(row, place, peer) or {}).get("time")
            cells += [us_text(our_time(row, place)), us_text(theirs), ratio_text(ratio_of(row, place, peer))]
        lines.append(line([*cells, wrong_text([row])]))
    last = ["**mean from 1 MiB**", *([""] * (5 if mixed else 2))]
    for place, _ in PLACES:
        value = mean(rows, place, peer)
        last += ["", "", NONE if value is None else f"**{ratio_text(value)}**"]
    return [*lines, line([*last, ""])]


def several_hosts(results: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Files that benchmarks/hosts.py wrote: its set-ups in one table, then each file, with the rows of its sweep."""
    setups = [result for result in results if "ours" in result[1]["results"][0]]
    yield HOSTS_LEGEND
    if setups:
        head = [">size", ">ours", ">wire", ">share of the wire", ">rate", ">share of the rate", ">MPI", ">ratio"]
        lines = [*table_head("set-up", *head, ">ratio without han", ">predicted", ">bound", ">wrong", ">file")]
        for name, document in setups:
            rows = {row["mpi_coll"]: row for row in document["results"]}
            row, without = next(iter(rows.values())), rows.get("^han")
            usual = rows.get("all")  # None where that job failed
            cells = [f"allreduce, {document['hosts']['text']}", exact_size_text(row["size"])]
            cells += [ms_text(row["ours"]["us"]), ms_text(max(wire["us"] for wire in row["wires"]))]
            cells += [ratio_text(row["share"]), ms_text(row["rate_us"]), ratio_text(row["rate_share"])]
            cells += [ms_text(usual["mpi"]["us"]), ratio_text(usual["ratio"])] if usual else [NONE, NONE]
            cells.append(ratio_text(without["ratio"]) if without else NONE)
            cells += [ms_text(row["predicted_us"]), ms_text(row["bound_us"])]
            timed = (one for each in rows.values() for one in (each["ours"], each["mpi"], *each["wires"]))
            lines.append(line([*cells, wrong_count(one["wrong"] for one in timed), link_to(name)]))
        yield "\n".join(lines)
    for name, document in results:
        about = document["hosts"]
        lines = [f"### {name}", "", f"- hosts: {about['text']}; namespaces of one machine"]
        lines += [*fact_lines(document, command=f"hosts.py --only {about['step']}"), *failures(document)]
        yield "\n".join([*lines, *([] if (name, document) in setups else ["", *_hosts_sweep(document)])])


def _hosts_sweep(document: dict[str, Any]) -> Iterator[str]:
    """The rows of a collective through the sizes."""
    head = [document["blinkmpi"]["collective"], "scheme", "ours", "MPI", "ratio", "in place: ours", "MPI", "ratio"]
    yield from table_head(*(f">{name}" for name in (*head, "predicted", "bound", "wrong")))
    for row in document["results"]:
        own = row["blinkmpi"]
        cells = [exact_size_text(row["size"]), str(own.get("scheme") or NONE)]
        for place, _ in PLACES:
            theirs = (compared(row, place, "mpi") or {}).get("time")
            cells += [ms_text(our_time(row, place)), ms_text(theirs), ratio_text(ratio_of(row, place, "mpi"))]
        cells += [ms_text(own.get("predicted_us")), ms_text(own.get("bound_us")), wrong_text([row])]
        yield line(cells)


def call_cost_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/call_cost.py wrote."""
    lines = [f"### {name}", "", *fact_lines(document, command="call_cost.py"), ""]
    lines += table_head(">tensors", ">elements", ">ours", ">mpi4py", ">ratio", ">wrong")
    for row in document["results"]:
        wrong = row["ours"]["wrong"] + row["mpi"]["wrong"]
        cells = [str(row["distinct"]), "-".join(map(str, row["lengths"])), us_text(row["ours"]["us"])]
        cells += [us_text(row["mpi"]["us"]), ratio_text(row["ratio"]), str(wrong)]
        lines.append(line(cells))
    return "\n".join(lines)


def ablation_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/call_cost.py wrote with a variable."""
    about = document["ablation"]
    command = f"call_cost.py --variable {about['variable']}"
    lines = [f"### {name}", "", *fact_lines(document, command=command)]
    lines.append(f"- variable: `{about['variable']}`, {about['rounds']} jobs of each value")
    values = [cell for value in about["values"] for cell in (f">`{value}`" if value else ">unset", ">ratio")]
    lines += [*failures(document), "", *table_head("collective", "place", ">size", *values, ">wrong")]
    for row in document["results"]:
        cells = [row["collective"], row["place"].replace("_", " "), exact_size_text(row["size"])]
        for value in about["values"]:
            one = row["values"].get(value)
            cells += [NONE, NONE] if one is None else [us_text(one["us"]), ratio_text(one["ratio"])]
        lines.append(line([*cells, str(row["wrong"])]))
    return "\n".join(lines)


def trace_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/trace_cost.py wrote."""
    ours = document["blinkmpi"]
    named = {**document, "blinkmpi": {**ours, "machine": {"name": ours["machine"], "fingerprint": "not kept"}}}
    lines = [f"### {name}", "", *fact_lines(named, command="trace_cost.py"), ""]
    lines += table_head(">bytes", ">turns", ">plain, us", ">times", ">trace", ">trace, least", ">wrong")
    for row in document["results"]:
        cells = [str(row["bytes"]), str(row["turns"]), f"{row['plain']['us']:.1f}"]
        for mode in ("times", "trace"):
            low, high = row[mode]["quartiles"]
            cells.append(f"{row[mode]['ratio']:.3f} ({low:.2f} to {high:.2f})")
        cells += [f"{row['trace']['least_us'] / row['plain']['least_us']:.3f}", str(row["wrong"])]
        lines.append(line(cells))
    if document["against"]:
        lines += ["", "Calls without a trace, beside a checkout from before there were counters, least times in jobs "
                  "that took turns:", ""]  # fmt: skip
        lines += table_head(">bytes", ">here, us", ">before, us", ">ratio")
        lines += [
            line([str(row["bytes"]), f"{row['here_us']:.1f}", f"{row['before_us']:.1f}", f"{row['ratio']:.3f}"])
            for row in document["against"]
        ]
    return "\n".join(lines)
