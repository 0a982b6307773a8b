"""Calls as programs write them: every row of the benchmark, of short vectors, and the page that is made of it."""

import argparse
import sys
from datetime import datetime
from unittest import mock

import numpy as np
from mpi4py import MPI

import blinkmpi
from tests.harness import mpi
from tests.unit.benchmarks.scripts import script
from tests.unit.benchmarks.test_report import document


@mpi(ranks=(2, 3), timeout=60)
def test_every_form_does_what_mpi4py_does(comm: MPI.Intracomm) -> None:
    made = script("call_forms")
    with (
        mock.patch.multiple(made, CYCLES=(7,), NEW_LENGTHS=20, LOOP_S=1e-4),
        blinkmpi.Communicator(comm) as ours,
    ):
        rows = [made.measure(comm, ours, form, 2) for form in made.forms(comm, (32, 100_000))]
    names = {row["collective"] for row in rows}
    assert {"Iallreduce + Wait", "Alltoallv of new lengths", "Bcast of another count each time", "Gatherv",
            "Ibcasts, 4 under way, roots in turn"} <= names  # fmt: skip
    for row in rows:
        found = made.row_of(row)
        assert not found["ours"]["wrong"], found
        assert found["ratio"] > 0


def test_a_wrong_element_is_counted() -> None:
    """By what both leave in the buffers."""
    made = script("call_forms")
    x = np.zeros(5)

    def run(comm: object) -> None:
        x[:3] += comm is world

    world = argparse.Namespace(allreduce=lambda value, *_: value, Barrier=lambda: None)
    assert made.measure(world, object(), made.Form("sum", 40, run, (x,)), 1)["ours"][0]["wrong"] == 3


def test_a_file_is_a_table_and_a_page() -> None:
    made = script("call_forms")
    times = {"ours": [{"us": 2.0, "wrong": 0}] * 3, "mpi": [{"us": us, "wrong": 0} for us in (1.0, 4.0, 3.0)]}
    rows = [{"collective": form, "size": 32, "place": "", **times} for form in ("Allgatherv", "Dup + Free")]
    rows[1] |= {"mpi": [{"us": 1.0, "wrong": 0}] * 3}
    args = argparse.Namespace(n=2, rounds=3)
    facts = {"rows": rows, "env": {}, "versions": {}, "machine": "", "cores": 2}
    with mock.patch.object(sys, "argv", ["call_forms.py"]):
        found = made.document(args, facts, datetime.now().astimezone())
    assert [row["ratio"] for row in found["results"]] == [1.5, 0.5]
    assert "2 rows, mean 0.87, least 0.50, 1 below 0.95" in made.table(found)
    kept = document(*found["results"]) | {"call_forms": found["call_forms"]}
    kept["blinkmpi"] |= {"hardware": {"cpu": "a processor", "cores_available": 2}}
    page = script("report").render([("forms-np2.json", kept)])
    assert "| Allgatherv | 1.50 (2.0) |" in page
    assert "| Dup + Free | **0.50** (2.0) |" in page
    assert "- of 2 rows, 1 are below 0.95; the least is 0.50" in page
    overview = script("report").ratio_tables([("forms-np2.json", kept)])["call-forms"]
    assert "| 2 | 2 | 2 | 0.87 | *0.50* | 1 | [forms-np2]" in overview
