"""Which tests share a worker of pytest-xdist: those on ranks, those that start jobs of their own, the others by files.

Tests on ranks want all cores. Those that start and end jobs of their own mostly wait, beside them and beside the
unit tests.
"""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

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

    def remove_node(self, node: WorkerController) -> str | None:
        """Give others what a worker that has ended did not run; the test that ended it, which is not run again.

        pytest-xdist also hands out the shares that it had done, and a worker that is given nothing waits for ever.
        """
        work = self.assigned_work.pop(node)
        left = [(share, test) for share, tests in work.items() for test, done in tests.items() if not done]
        if not left:
            return None
        share, last = left[0]
        work[share][last] = True
        self.workqueue.update({name: tests for name, tests in work.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return last
