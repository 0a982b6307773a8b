"""The performance page's section about what traces cost."""

from typing import Any

from benchmarks.report_rows import fact_lines, line, table_head

LEGEND = """
## Cost of a trace

Allreduces of a plain communicator, of one that measures times, and of one that is [traced](tracing.md), call by call in
turn. A ratio is the median over the turns of a time divided by the plain one's beside it, with its quartiles; the ratio
of the least times is that of the calls which nothing disturbed.
"""


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
