"""The section of the performance page about predictions on CPU ranks."""

from typing import Any

from benchmarks.pages.rows import exact_size_text, fact_lines, line, table_head, us_text


def certainty_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/certainty.py wrote."""
    about, found = document["certainty"], document["results"]
    seconds = sorted(about["calibration_s"])
    lines = [f"### {name}", "", *fact_lines(document, command="certainty.py")]
    lines.append(f"- {about['rounds']} jobs of each collective; timing the steps took {seconds[0]:.2f} to "
                 f"{seconds[-1]:.2f} s in a job")  # fmt: skip
    within = sum(row["within"] for row in found)
    lines.append(f"- {within} of {len(found)} rows are within {about['within']:.0%}; the others are marked *")
    head = (">size", "place", "protocol", ">bound", ">predicted", ">quartiles", ">measured", ">quartiles", ">error",
            ">of a job: quartiles", ">wrong")  # fmt: skip
    lines += ["", *table_head("collective", *head)]
    for row in found:
        low, high = row["error_of_a_job_quartiles"]
        cells = [row["collective"], exact_size_text(row["size"]), row["place"].replace("_", " "), row["protocol"]]
        cells.append(us_text(row["bound_us"]))
        for what in ("predicted_us", "measured_us"):
            cells += [us_text(row[what]), " to ".join(map(us_text, row[f"{what}_quartiles"]))]
        cells.append(f"{100 * row['error']:+.1f} %{'' if row['within'] else ' *'}")
        lines.append(line([*cells, f"{100 * low:+.1f} to {100 * high:+.1f} %", str(row["wrong"])]))
    return "\n".join(lines)
