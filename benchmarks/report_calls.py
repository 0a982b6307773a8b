"""The sections of the performance page about the cost of a call, and about what single mechanisms gain."""

from typing import Any

from benchmarks.report_rows import NONE, exact_size_text, facts_of, ratio_text, table_head, us_text


def call_cost_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/call_cost.py wrote."""
    lines = _title(name, document, "call_cost")
    lines += ["", *table_head(["tensors", "elements", "ours", "mpi4py", "ratio", "wrong"])]
    for row in document["results"]:
        wrong = row["ours"]["wrong"] + row["mpi"]["wrong"]
        cells = [str(row["distinct"]), "-".join(map(str, row["lengths"])), us_text(row["ours"]["us"])]
        cells += [us_text(row["mpi"]["us"]), ratio_text(row["ratio"]), str(wrong)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ablation_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/ablation.py wrote."""
    about = document["ablation"]
    lines = _title(name, document, "ablation")
    lines.append(f"- variable: `{about['variable']}`, {about['rounds']} jobs of each value")
    lines += [f"- failed: {failure}" for failure in document.get("failed") or []]
    values = [cell for value in about["values"] for cell in (f"`{value}`" if value else "unset", "ratio")]
    lines += ["", *table_head(["collective", "place", "size", *values, "wrong"], left=2)]
    for row in document["results"]:
        cells = [row["collective"], row["place"].replace("_", " "), exact_size_text(row["size"])]
        for value in about["values"]:
            one = row["values"].get(value)
            cells += [NONE, NONE] if one is None else [us_text(one["us"]), ratio_text(one["ratio"])]
        lines.append(f"| {' | '.join([*cells, str(row['wrong'])])} |")
    return "\n".join(lines)


def _title(name: str, document: dict[str, Any], program: str) -> list[str]:
    """Heading and facts; the command is this program's, and not ``blinkmpi bench``."""
    facts = [f"- {label}: {text}" for label, text in facts_of(document) if label != "command"]
    return [f"### {name}", "", *facts, f"- command: `python benchmarks/{program}.py`"]
