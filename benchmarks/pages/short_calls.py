"""The section of the performance page about short calls, and what ``blinkmpi explain`` says of them."""

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.pages.rows import NONE, exact_size_text, fact_lines, line, ratio_text, table_head, us_text

SHORT_BYTES = 4 << 10  # a call of fewer bytes takes the time of its meeting
ALL_MEET = "the meeting of all ranks, where mpi4py's call waits for fewer or for none"
CHECK = "Python's part of a call, and the comparison of what the ranks announced"
TREES = "chunks along trees, through slots and messages of MPI"
MESSAGES = "announcement and data in one message: whole vectors are folded or copied before it is sent"
ONE_COPY = "one copy from process to process, as mpi4py's call makes"
SLOTS = "two copies through slots"
BLOCKS = "blocks, of which each rank reads its own from the sender's memory, or takes it from a slot"
NON_BLOCKING = "left to MPI's non-blocking collective, so that the deadline holds"


def small_calls_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/small_calls.py wrote: a row for each collective and place, a ratio for each size."""
    about, rows = document["small_calls"], document["results"]
    ranks = f"{document['blinkmpi']['ranks']} ranks on {about['hosts']} host{'s' * (about['hosts'] > 1)}"
    crowded = ", more ranks than cores" if about["oversubscribed"] else ""
    lines = [f"### {name}", "", *fact_lines(document, command="small_calls.py"), f"- ranks: {ranks}{crowded}"]
    lines.append(f"- machine's load at the end: {about['load']:.1f}; niceness of the ranks: {about['niceness']}")
    ratios = [row["ratio"] for row in rows]
    below = [row for row in rows if row["ratio"] < about["goal"]]
    lines.append(f"- of {len(ratios)} rows, {len(below)} are below {about['goal']}; the least is {ratio_text(min(ratios))}")  # fmt: skip  # noqa: E501
    for reason, some in by_reason(below, about["hosts"]).items():
        lines.append(f"- below, by {reason}: {calls_text(some)}")
    if made := document.get("communicators"):
        some = ((row, "with a call of 32 B on it" if row["size"] else "without a call") for row in made)
        told = ("{} {} {}".format(row["collective"].title(), how, cell(row, 0)) for row, how in some)
        lines.append(f"- communicators made and freed, mpi4py's time / ours (ours): {'; '.join(told)}")
    wrong = sum(row[side]["wrong"] for row in rows for side in ("ours", "mpi"))
    sizes = sorted({row["size"] for row in rows if row["size"]})
    lines += [
        f"- wrong elements: {wrong}",
        "",
        *table_head("collective", "place", *(f">{exact_size_text(s)}" for s in sizes)),
    ]
    for collective, place in dict.fromkeys((row["collective"], row["place"]) for row in rows):
        own = {row["size"]: row for row in rows if (row["collective"], row["place"]) == (collective, place)}
        if 0 in own:  # no data: in the first column
            own = {sizes[0]: own[0]}
        cells = [cell(own[s], about["goal"]) if s in own else NONE for s in sizes]
        lines.append(line([collective, place.replace("_", " "), *cells]))
    return "\n".join(lines)


def call_forms_file(name: str, document: dict[str, Any]) -> str:
    """A file that benchmarks/call_forms.py wrote: a row for each form, a ratio for each size."""
    about, rows = document["call_forms"], document["results"]
    crowded = ", more ranks than cores" if about["oversubscribed"] else ""
    below = [row for row in rows if row["ratio"] < about["goal"]]
    sizes = sorted({row["size"] for row in rows})
    lines = [
        f"### {name}", "", *fact_lines(document, command="call_forms.py"),
        f"- ranks: {document['blinkmpi']['ranks']}{crowded}; the machine's load at the end: {about['load']:.1f}",
        f"- of {len(rows)} rows, {len(below)} are below {about['goal']}; the least is "
        + ratio_text(min(row["ratio"] for row in rows)),
        f"- elements that differ from mpi4py's: {sum(row['ours']['wrong'] for row in rows)}",
        "",
        *table_head("call", *(f">{exact_size_text(s)}" for s in sizes)),
    ]  # fmt: skip
    for form in dict.fromkeys(row["collective"] for row in rows):
        own = {row["size"]: row for row in rows if row["collective"] == form}
        lines.append(line([form, *(cell(own[s], about["goal"]) if s in own else NONE for s in sizes)]))
    return "\n".join(lines)


def cell(row: dict[str, Any], goal: float) -> str:
    """A ratio, in bold if it is below the goal, and our time."""
    ratio = ratio_text(row["ratio"])
    return f"{f'**{ratio}**' if row['ratio'] < goal else ratio} ({us_text(row['ours']['us'])})"


def by_reason(rows: Sequence[dict[str, Any]], hosts: int) -> dict[str, list[dict[str, Any]]]:
    """Rows by what their time goes to, as far as their protocol and size say it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(reason_of(row, hosts), []).append(row)
    return found


def reason_of(row: dict[str, Any], hosts: int) -> str:
    """What the time of a call goes to."""
    how = row.get("how") or {}  # a barrier has none, nor has a call of blocks
    if not row["size"]:
        return CHECK
    if how.get("scheme") == "mpi":
        return NON_BLOCKING
    if row["size"] <= SHORT_BYTES:
        return ALL_MEET
    if not how:
        return BLOCKS
    if hosts > 1:
        return MESSAGES if how["protocol"] == "one_shot" else TREES
    return ONE_COPY if "cma" in how["protocol"] else SLOTS


def calls_text(rows: Sequence[dict[str, Any]]) -> str:
    """``scatter 64 B, 512 B; scan in place 8 B``."""
    found: dict[str, list[str]] = {}
    for row in rows:
        place = " in place" if row["place"] == "in_place" else ""
        found.setdefault(row["collective"] + place, []).append(exact_size_text(row["size"]) if row["size"] else "")
    return "; ".join(f"{call} {', '.join(sizes)}".strip() for call, sizes in found.items())


def facts_of(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The JSON that blinkmpi/planning/beside_mpi.py reads: the least ratio of each size, of both places."""
    rows: dict[str, dict[str, list[list[float]]]] = {}
    machines, goal = {}, 0.0
    for _, document in results:
        about = document.get("small_calls")
        if not about:
            continue
        hardware = document["blinkmpi"]["hardware"]
        key, goal = f"{document['blinkmpi']['ranks']}x{about['hosts']}", about["goal"]
        machines[key], own = f"{hardware['cpu']}, {hardware['cores_available']} cores", rows.setdefault(key, {})
        least: dict[tuple[str, int], float] = {}
        for row in document["results"]:
            if row["size"] and not row.get("how"):  # a call of blocks, which no table of a plan has
                continue
            call = row["collective"], row["size"]
            least[call] = min(least.get(call, row["ratio"]), row["ratio"])
        for (collective, size), ratio in sorted(least.items()):
            own.setdefault(collective, []).append([size, round(ratio, 3)])
    return json.dumps({"machines": machines, "goal": goal, "rows": rows}, indent=None, separators=(",", ":")) + "\n"
