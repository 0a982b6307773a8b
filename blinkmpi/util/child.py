"""Run another program with a time limit, so that nothing of it stays behind."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

END_SECONDS = 10.0  # that a launcher has to end its ranks


def run_limited(
    argv: Sequence[str], env: Mapping[str, str], seconds: float, *, grace: float = END_SECONDS
) -> tuple[int | None, str]:
    """Run a command in a session of its own; its exit status (None: it was ended after ``seconds``) and its output.

    It gets ``grace`` seconds to end what it has started itself; then its session is killed.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")
