"""The sections of the performance page about GPUs: one node, virtual nodes, and emulated machines."""

from collections.abc import Sequence
from typing import Any

from benchmarks.pages.rows import (
    NONE,
    PLACES,
    blocks,
    compared,
    exact_size_text,
    fact_lines,
    failures,
    gpu_lines,
    label_of,
    label_with_mark,
    line,
    link_to,
    mean,
    ms_text,
    our_time,
    peers_of,
    ratio_text,
    scheme_text,
    table_head,
    us_text,
    with_nvls_told,
    wrong_count,
    wrong_text,
)

SLOWDOWNS = ("slowdown", "product_slowdown")
GROUP_WAYS = {"vector": "one vector", "each": "a call each", "nccl": "NCCL's group"}


def _mode(document: dict[str, Any]) -> str:
    """How calls were started, and on which buffers."""
    ours, config = document["blinkmpi"], document.get("config") or {}
    graph = config.get("graph")
    words = [f"graph, launched {graph} times" if graph else "stream"]
    words += ["persistent"] if ours.get("persistent") else []
    words += ["plain buffers"] if ours.get("local_register") == 0 else []
    return ", ".join(words)


def gpu_summary(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    means = (">out of place: below 1 MiB", ">from 1 MiB", ">in place: below 1 MiB", ">from 1 MiB")
    lines = [*table_head("collective", "type", ">GPUs", "mode", "beside", *means, ">wrong values", "file")]
    for name, document in results:
        for _, rows in blocks(document):
            for peer in peers_of(document) or [NONE]:
                found = [mean(rows, place, peer, small=small) for place, _ in PLACES for small in (True, False)]
                types = ", ".join(dict.fromkeys(str(row.get("type")) for row in rows))
                cells = [label_with_mark(document, rows), types, str(document["blinkmpi"]["ranks"]), _mode(document)]
                cells += [label_of(peer, document), *map(ratio_text, found), wrong_text(rows), link_to(name)]
                lines.append(line(cells))
    return "\n".join(lines)


def gpu_file(name: str, document: dict[str, Any]) -> str:
    ours = document["blinkmpi"]
    gpu, peers = ours.get("gpu") or {}, ours.get("peers") or {}
    lines = [f"### {name}", ""]
    versions = [f"{key} {value}" for key, value in gpu.items() if key != "name" and value]
    lines.append(f"- GPUs: {ours['ranks']} x {gpu.get('name', 'unknown')}, {', '.join(versions) or 'unknown versions'}")
    for peer, facts in peers.items():
        lines.append(
            f"- {label_of(peer, document)}: {', '.join(f'{key} {value}' for key, value in facts.items()) or 'no facts'}"
        )
    lines += [f"- N/A: {label_of(peer, document)}, where {why}" for peer, why in (ours.get("refused") or {}).items()]
    lines.append(f"- mode: {_mode(document)}")
    lines += fact_lines(document)
    for _, rows in blocks(document):
        lines += ["", *_gpu_table(rows, document)]
    return "\n".join(lines)


def _gpu_table(rows: Sequence[dict[str, Any]], document: dict[str, Any]) -> list[str]:
    peers = peers_of(document)
    labels = [label_of(peer, document) for peer in peers]
    head = [">size", "type", "op", "scheme", "protocol", ">CTAs"]
    for _, label in PLACES:
        head += [f">{label}: ours", ">GB/s", *(cell for theirs in labels for cell in (f">{theirs}", ">ratio"))]
    lines = [*table_head(*head, ">predicted", ">bound", ">wrong")]
    for row in rows:
        own = row.get("blinkmpi") or {}
        cells = [exact_size_text(row["size"]), str(row.get("type")), str(row.get("redop"))]
        cells += [scheme_text(own), *(str(own.get(key) or NONE) for key in ("protocol", "ctas"))]
        for place, _ in PLACES:
            rate = (row.get(place) or {}).get("bus_bw")
            cells += [us_text(our_time(row, place)), NONE if rate is None else f"{rate:.1f}"]
            for peer in peers:
                theirs = compared(row, place, peer)
                cells += ["N/A", "N/A"] if theirs is None else [us_text(theirs["time"]), ratio_text(theirs["ratio"])]
        cells += [us_text(own.get("predicted_us")), us_text(own.get("bound_us")), wrong_text([row])]
        lines.append(line(cells))
    return lines


def host_time_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/host_time.py wrote."""
    lines = [f"### {name}", "", *gpu_lines(document), *fact_lines(document, command="host_time.py")]
    theirs, rows = "NCCL group", document["results"]
    ways = [way for way in rows[0]["again_us"] if way != theirs]
    calls = {"again_us": "", "new_us": "new", "count_us": "another count"}
    named = [key for key in calls if key in rows[0]]
    others = [f">{calls[key]}" for key in named[1:]]
    cells = [cell for way in ways for other in (f">{way}", *others) for cell in (other, ">ratio")]
    lines += ["", *table_head("type", ">size", f">{label_of('nccl', document)}", *others, *cells, ">wrong")]
    for row in rows:
        found = [row["dtype"], exact_size_text(row["bytes"]), *(us_text(row[key][theirs]) for key in named)]
        for way in ways:
            for us in (row[key] for key in named):
                ratio = us[theirs] / us[way] if way in us and us[theirs] is not None else None
                found += [us_text(us.get(way)), NONE if ratio is None else ratio_text(ratio)]
        lines.append(line([*found, str(row["wrong"])]))
    return "\n".join(lines)


def gpu_messages_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/gpu_messages.py wrote."""
    lines = [f"### {name}", "", *gpu_lines(document), *fact_lines(document, command="gpu_messages.py")]
    kinds = {"us": "stream", "graph_us": "graph", "host_us": "host"}
    head = [cell for kind in kinds.values() for cell in (f">{kind}: ours", f">{label_of('nccl', document)}", ">ratio")]
    lines += ["", *table_head("pattern", ">size", *head, ">wrong")]
    for row in document["results"]:
        cells = [row["pattern"], exact_size_text(row["bytes"])]
        for kind in kinds:
            ours, theirs = row[kind]["ours"], row[kind].get("nccl")  # whose counts no graph can have
            cells += [us_text(ours), us_text(theirs), NONE if theirs is None else ratio_text(theirs / ours)]
        lines.append(line([*cells, str(row["wrong"])]))
    return "\n".join(lines)


def beside_compute_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/beside_compute/measure.py wrote: a line for each product, vector and limit."""
    about = document["beside_compute"]
    priority = "a high" if about["high_priority"] else "the usual"
    lines = [f"### {name}", "", *gpu_lines(document), *fact_lines(document, command="beside_compute/measure.py")]
    lines.append(
        f"- calls: on a stream of {priority} priority, on {'' if about['registered'] else 'un'}registered buffers"
    )
    lines += [f"- laps that the host was too late for: {about['late_laps']}", *failures(document)]
    sides = [cell for label in ("ours", label_of("nccl", document)) for cell in
             (f">{label}: alone", ">AllReduce slower", ">product slower", ">total", ">one after another")]  # fmt: skip
    lines += ["", *table_head("product", "type", ">size", ">CTAs", ">product", *sides, ">total: ratio", ">wrong")]
    for row in document["results"]:
        both = [row["libraries"]["ours"], row["libraries"]["nccl"]]
        cells = [f"{row['edge']}^3", row["dtype"], exact_size_text(row["bytes"]), str(row["max_ctas"] or "default")]
        cells.append(us_text(row["product_us"]))
        for one in both:
            cells += [us_text(one.get("alone_us")), *(ratio_text(one.get(key)) for key in SLOWDOWNS)]
            cells += [ms_text(one.get(key)) for key in ("total_us", "one_after_another_us")]
        ours, nccl = (one.get("total_us") for one in both)
        cells += [ratio_text(nccl / ours if ours and nccl else None), str(sum(one["wrong"] for one in both))]
        lines.append(line(cells))
    return "\n".join(lines)


def groups_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/groups.py wrote: a line for each number and length of tensors, and way of starting."""
    rows, why = document["results"], document["groups"]["no_nccl"]
    lines = [f"### {name}", "", *gpu_lines(document), *fact_lines(document, command="groups.py")]
    lines += [f"- NCCL was not measured: {why}"] if why else []
    ways = list(rows[0]["us"])
    others = [cell for way in ways[1:] for cell in (f">{with_nvls_told(GROUP_WAYS[way], document)}", ">ratio")]
    lines += ["", *table_head(">tensors", ">bytes of each", "started", ">group", *others, ">wrong")]
    for row in rows:
        for key, started in (("us", "directly"), ("graph_us", "in a graph")):
            if key in row:
                us = row[key]
                cells = [str(row["tensors"]), exact_size_text(row["bytes"]), started, us_text(us["group"])]
                cells += [cell for way in ways[1:] for cell in (us_text(us[way]), ratio_text(us[way] / us["group"]))]
                lines.append(line([*cells, str(sum(row["wrong"].values()))]))
    return "\n".join(lines)


def nodes_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/nodes.py wrote: that of a GPU benchmark, and how it was split."""
    about = document["nodes"]
    split = "+".join(map(str, about["ranks"]))
    if "nccl" in about:
        made = ", ".join(f"{count} {kind}" for kind, count in about["nccl"]["connections"].items())
        seen = " or ".join(map(str, about["nccl"]["nodes"])) or "an unknown number of"
        lines = [f"- virtual nodes: {split} GPUs; NCCL saw {seen} nodes, its connections are {made or 'unknown'}"]
    else:
        lines = [f"- virtual nodes: {split} GPUs; {about['mark']}: MPI maps the other node's GPU memory"]
    lines += failures(document)
    title, rest = gpu_file(name, document).split("\n\n", 1)
    return "\n".join([title, "", *lines, rest])


def emulated_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/emulated.py wrote."""
    ours = document["blinkmpi"]
    gpu, versions = ours.get("gpu") or {}, ours.get("versions") or {}
    dirty = ", with changes since" if ours.get("dirty") else ""
    facts = {
        "machine": f"{ours['machine']['name']}, emulated, {ours['machine']['nvlink_unit_mbps'] / 1e3:g} GB/s a unit of "
        "NVLink each way",
        "GPUs": f"{ours['ranks']} x {gpu.get('name')}, driver {gpu.get('driver')}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
        label_of("nccl", document): ours.get("nccl_version") or "not measured",
        "commit": f"`{ours['commit'][:12]}`{dirty}" if ours.get("commit") else "unknown",
        "date": ours.get("date") or "unknown",
    }
    lines = [f"### {name}", "", *(f"- {label}: {text}" for label, text in facts.items())]
    beside = f">{label_of('nccl', document)} (not paced)"
    rates = (">size", ">plan", ">bound", ">ours", ">share", beside, ">ratio", ">its rings, paced",
             ">its trees, paced", ">ratio")  # fmt: skip
    lines += [*failures(document), "", *table_head("GPUs", *rates, "NCCL's graphs", ">wrong")]
    for row in document["results"]:
        own, theirs = row["ours"], row["nccl"]
        rates = [row["planned_GBps"], row["bound_GBps"], own["GBps"]]
        cells = [row["gpus"], exact_size_text(row["size"]), *(f"{rate:.1f}" for rate in rates), f"{row['share']:.2f}"]
        graphs = [f"{p['channels']} x {p['pattern']} {p['path']}" for p in (theirs or {}).get("patterns", [])]
        above = "> " * (theirs is not None and theirs["GBps"] > row["bound_GBps"])
        cells += [NONE, NONE] if theirs is None else [f"{above}{theirs['GBps']:.1f}", ratio_text(row["ratio"])]
        paced = row.get("paced") or {}
        cells += [f"{paced[kind]['GBps']:.1f}" if kind in paced else NONE for kind in ("rings", "trees")]
        cells.append(ratio_text(row["paced_ratio"]) if paced else NONE)
        wrong = wrong_count(found["wrong"] for found in (own, theirs, *paced.values()) if found is not None)
        cells += [", ".join(graphs) or NONE, wrong]
        lines.append(line(cells))
    return "\n".join(lines)
