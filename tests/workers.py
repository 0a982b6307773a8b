"""Which tests share a worker of pytest-xdist: all on ranks, one after another; of the others, those of one file."""

from xdist.scheduler import LoadScopeScheduling

RANKS = ("campaign", "harness", "hosts", "mpi", "store", "torch")  # folders whose tests start processes


def share_of(nodeid: str) -> str:
    """The name of what a test belongs to; each goes to one worker, in the order of the tests."""
    file = nodeid.partition("::")[0]
    return "ranks" if file.split("/")[1] in RANKS else file


class Scheduler(LoadScopeScheduling):
    """Gives each worker whole shares of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)
