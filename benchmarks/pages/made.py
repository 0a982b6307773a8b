"""The tables that pages of docs/ show of result files, made as the site is made.

A page has ``<!-- made: paper/speedup -->`` on a line of its own where a table belongs. ``filled`` puts it there, from
``benchmarks/results``; the tables themselves are kept nowhere.
"""

import json
import re
from collections.abc import Callable
from functools import cache

from benchmarks import gpu_certainty, losses, report
from benchmarks.lang import page as lang
from benchmarks.pages import nccl, planner
from benchmarks.paper import __main__ as paper
from benchmarks.planner import gpu_choice
from benchmarks.training import figure as training
from tests.torch_suite import versions

MARK = re.compile(r"^<!-- made: (\S+) -->$", re.MULTILINE)


def training_sets() -> str:
    """Steps on parts of a DGX-1V."""
    return training.summary(json.loads(training.RESULT.read_text(encoding="utf-8"))["rows"])


def choices_on_gpus() -> str:
    """How often the fastest way was chosen."""
    return gpu_choice.table(json.loads(gpu_choice.RESULT.read_text(encoding="utf-8"))["rows"])


def in_readme() -> str:
    """The table that the README has."""
    begin, end = report.MARKS
    return (report.ROOT / report.README).read_text(encoding="utf-8").split(begin)[1].split(end)[0]


SOURCES: dict[str, Callable[[], dict[str, str]]] = {
    "readme": lambda: {"measured": in_readme()},
    "performance": lambda: report.ratio_tables(report.read(report.RESULTS)),
    "measurements": lambda: {"all": report.render(report.read(report.RESULTS))},
    "losses": losses.tables,
    "nccl": nccl.tables,
    "paper": paper.tables,
    "certainty": lambda: {**gpu_certainty.tables(gpu_certainty.measurements()), "choice": choices_on_gpus()},
    "lang": lang.tables,
    "planner": planner.tables,
    "pytorch": lambda: {"training-sets": training_sets(), "versions": versions.table_of_files()},
}


@cache
def made(source: str) -> dict[str, str]:
    """The tables of one source by their names."""
    return SOURCES[source]()


def filled(text: str) -> str:
    """A page's text with each table in the place of its mark.

    Raises:
        KeyError: naming a mark that no source makes.
    """

    def of(match: re.Match[str]) -> str:
        source, _, name = match[1].partition("/")
        if source not in SOURCES or name not in made(source):
            known = ", ".join(SOURCES) if source not in SOURCES else ", ".join(made(source))
            raise KeyError(f"<!-- made: {match[1]} -->: there is no such table; there are {known}")
        return made(source)[name].strip("\n")

    return MARK.sub(of, text)
