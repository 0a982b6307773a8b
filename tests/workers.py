"""Which tests share a worker of pytest-xdist: those on ranks, those that start jobs of their own, the others by files.

Tests on ranks want all cores. Those that start and end jobs of their own mostly wait, beside them and beside the
unit tests.
"""

from xdist.scheduler import LoadScopeScheduling

SHARES = {"campaign": "jobs", "harness": "jobs", "hosts": "jobs", "store": "jobs", "mpi": "ranks", "torch": "ranks"}
JOBS = ("tests/mpi/test_deadlines.py", "tests/mpi/test_faults.py", "tests/mpi/test_faults_errors.py",
        "tests/mpi/test_other_mpis.py")  # fmt: skip


def share_of(nodeid: str) -> str:
    """The name of what a test belongs to; each goes to one worker, in the order of the tests."""
    file = nodeid.partition("::")[0]
    return "jobs" if file in JOBS else SHARES.get(file.split("/")[1], file)


class Scheduler(LoadScopeScheduling):
    """Gives each worker whole shares of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)
