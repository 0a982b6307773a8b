"""A simulated call as a trace: a row for each link of the machine, a slice for each chunk that crosses it."""

import json
from collections.abc import Iterator, Sequence

from ..topology.model import Topology
from ..util.chrome_trace import names_texts, slice_text
from .cost_model import Crossing


def trace_of(crossings: Sequence[Crossing], topology: Topology, title: str) -> Iterator[str]:
    """The lines of a trace's file."""
    rows = {link: row for row, link in enumerate(sorted({c.link for c in crossings}))}
    named = {
        row: f"{topology.vertex_label(s)} -> {topology.vertex_label(d)} ({kind})" for (s, d, kind), row in rows.items()
    }
    yield from names_texts(0, title, named)
    for crossing in crossings:
        stage, row = crossing.stage, rows[crossing.link]
        args = json.dumps({"tree": stage.tree, "way": stage.way, "from": stage.rank, "chunk": crossing.chunk})
        name = f"tree {stage.tree} {stage.way} {crossing.chunk}"
        us = (crossing.end_s - crossing.start_s) * 1e6
        yield slice_text(name, 0, row, crossing.start_s * 1e6, us, args)
