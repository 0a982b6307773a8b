"""The section of the performance page about algorithms of blinkmpi.lang on CPU ranks."""

from typing import Any

from benchmarks.pages.rows import exact_size_text, fact_lines, line, ratio_text, table_head, us_text

SIDES = ("algorithm", "default", "mpi")


def lang_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/lang/measure.py wrote."""
    about, found = document["lang_measured"], document["results"]
    where = f"on virtual nodes {about['nodes']}" if about["nodes"] else "on one node"
    crowded = ", more ranks than cores" if about["oversubscribed"] else ""
    lines = [f"### {name}", "", *fact_lines(document, command="lang/measure.py")]
    lines.append(f"- ranks: {document['blinkmpi']['ranks']} {where}{crowded}; {about['rounds']} rounds")
    head = ("collective", ">size", ">bound", ">predicted", ">measured", "default", ">predicted", ">measured", ">ratio",
            ">mpi4py", ">ratio", ">wrong")  # fmt: skip
    lines += ["", *table_head("algorithm", *head)]
    for row in found:
        own, default, mpi = (row[side] for side in SIDES)
        cells = [row["name"], row["collective"], exact_size_text(row["size"]), us_text(default["bound_us"])]
        cells += [us_text(own["predicted_us"]), us_text(own["us"]), how_text(default["how"])]
        cells += [us_text(default["predicted_us"]), us_text(default["us"]), ratio_text(default["ratio"])]
        cells += [us_text(mpi["us"]), ratio_text(mpi["ratio"]), str(sum(row[side]["wrong"] for side in SIDES))]
        lines.append(line(cells))
    return "\n".join(lines)


def how_text(how: dict[str, Any]) -> str:
    """``direct, cma``."""
    return ", ".join(filter(None, (how["scheme"], how.get("protocol"))))
