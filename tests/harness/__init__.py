"""Start ranks under mpirun from an ordinary pytest process, and always come back.

Three ways in:

* ``@mpi(ranks=(1, 2, 4), timeout=60)`` turns a function of a communicator into
  one test per size (``decorator.py``). The ranks stay for the tests after it:
  one job for each number of ranks, until a test fails (``ranks.py``);
* :func:`run_ranks` runs a function on n ranks of a job of its own and gives
  back a :class:`Report` (``ranks.py``, ``reports.py``);
* :class:`Job` and :func:`run_command` start any command line on n ranks; a
  ``Job`` can signal one rank while it runs, which is what fault tests need
  (``jobs.py``).

What keeps a test from hanging, from the inside out: each rank has a watchdog
that prints all stacks and exits, also from within a blocked MPI call; when a
rank fails, the outer process ends the job; mpirun has ``MPIEXEC_TIMEOUT``. The
outer process ends mpirun by SIGTERM, then kills its process group and whatever
else carries the job's token in its environment (ranks live in process groups of
their own). Should the outer process die, the ranks see their socket close.

Under ``mpirun -np 4 python -m pytest --with-mpi tests/mpi`` the decorated
functions run in place on the ranks that are there, a barrier before each; other
sizes are skipped. A failure aborts the job there too: to go on would let one
rank's collective meet another test's.

How long a test waits for an event, and behind a deadline, stands in ``patience.py`` alone.

``python tests/harness SOCKET`` is the program of a rank (``__main__.py``).
"""

from tests.harness.decorator import STDERR, inline, mpi
from tests.harness.jobs import (
    ENVIRONMENT,
    GRACE_S,
    ROOT,
    TAIL,
    Closing,
    Job,
    Outcome,
    Started,
    command_line,
    mpirun,
    run_command,
)
from tests.harness.long import long_but
from tests.harness.patience import NEVER_S, PATIENCE_S, wait_until
from tests.harness.ranks import Pools, Ranks, run_ranks
from tests.harness.reports import Report, Verdict
from tests.harness.shared_memory import SharedMemoryWatch
from tests.harness.wheels import other_mpi

__all__ = [
    "ENVIRONMENT", "GRACE_S", "NEVER_S", "PATIENCE_S", "ROOT", "STDERR", "TAIL", "Closing", "Job", "Outcome", "Pools",
    "Ranks", "Report", "SharedMemoryWatch", "Started", "Verdict", "command_line", "inline", "long_but", "mpi", "mpirun",
    "other_mpi", "run_command", "run_ranks", "wait_until",
]  # fmt: skip
