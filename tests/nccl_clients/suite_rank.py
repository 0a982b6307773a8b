"""The process that runs tests of one file by pytest, and writes down each as it begins and ends.

    python -m tests.nccl_clients.suite_rank FILE FOLDER TOLD

Processes that the tests start import this module again, so it imports little.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.rank import Plugin, Record, named

TEST_S = 120  # for one test
WAITING = "waiting"  # what is recorded of a test before the first begins
OPTIONS = ("-q", "-p", "no:cacheprovider", "--import-mode=prepend", "-c", os.devnull, "-o", "addopts=", "--noconftest")


class Some(Plugin):
    """Records the tests, and runs every ``step``-th from the ``first``, of those that are not left out.

    A test that does not end within its time ends the process.
    """

    def __init__(self, record: Record, told: dict[str, Any]) -> None:
        super().__init__(record)
        self.told, self.leave_out = told, frozenset(told["leave_out"])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mine = [item for item in items if self.told["pattern"] in item.nodeid][self.told["first"] :: self.told["step"]]
        items[:] = [item for item in mine if named(item.nodeid) not in self.leave_out]
        for item in items:
            self.record.ended(named(item.nodeid), WAITING, 0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        faulthandler.dump_traceback_later(TEST_S, exit=True)
        super().pytest_runtest_logstart(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        super().pytest_runtest_logfinish(nodeid)


def run(path: str, folder: str, told: str) -> int:
    """Run the tests of a file; pytest's exit status."""
    words = json.loads(told)
    return int(pytest.main([*OPTIONS, path], plugins=[Some(Record(Path(folder), words["first"]), words)]))


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
