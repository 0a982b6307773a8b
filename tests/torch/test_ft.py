"""torchft with our group: its own checks of process groups, ranks that are killed or abort, and groups without end.

torchft's checks of several ranks run in threads of one process, which our ranks cannot be; here each is a process.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.harness import ENVIRONMENT, ROOT, TAIL

SECONDS = 90  # for a case
INSTALL_S = 300
NEEDS = ("opentelemetry-exporter-otlp-proto-http>=1.39.0", "opentelemetry-sdk>=1.39.0", "parameterized")
pytestmark = [pytest.mark.long, pytest.mark.mpi_skip, pytest.mark.timeout(2 * INSTALL_S + SECONDS)]


@pytest.fixture(scope="module", params=["torchft==0.2.0", "torchft-nightly"])
def torchft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a torchft, beside this environment and for its torch."""
    pytest.importorskip("torch", minversion="2.7")
    folder = tmp_path_factory.mktemp("torchft")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--retries", "1", "--target", str(folder)]
    for words in (["--no-deps", request.param], [*NEEDS]):  # torchft asks for a torch with CUDA's libraries
        done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode:
            pytest.skip(f"pip does not get {words[-1]}: {done.stderr.strip()[-300:]}")
    return folder


def run(torchft: Path, case: str, n: int, **variables: str) -> list[tuple[int, str]]:
    """Exit status and output of each process of a case of ``ft_rank.py``, which share a store that this one serves."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join((str(ROOT), str(torchft)))
    env: Mapping[str, str] = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **variables}
    argv = [sys.executable, str(ROOT / "tests" / "torch" / "ft_rank.py"), case, f"localhost:{store.port}"]
    logs = [torchft / f"{case}-{rank}.log" for rank in range(n)]
    processes = []
    try:
        for rank, name in enumerate(logs):
            with name.open("wb") as log:
                words = [*argv, str(rank), str(n)]
                processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(code, name.read_text(errors="replace")[-TAIL:]) for code, name in zip(codes, logs, strict=True)]


@pytest.mark.parametrize(("case", "n"), [("suite", 1), ("suite", 3), ("aborted", 3), ("late", 1), ("many", 2)])
def test_a_case_ends_in_order(torchft: Path, case: str, n: int) -> None:
    ended = run(torchft, case, n)
    assert [code for code, _ in ended] == [0] * n, ended
    assert all(f"rank {rank} ended in order" in text for rank, (_, text) in enumerate(ended)), ended


def test_the_others_of_a_killed_rank_go_on_in_a_group_that_is_made_anew(torchft: Path) -> None:
    ended = run(torchft, "killed", 3)
    assert [code for code, _ in ended] == [0, 0, -9], ended
    assert all("PeerLost" in text for _, text in ended[:2]), ended


LIGHTHOUSE = """
import socket, sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=int(sys.argv[1]), join_timeout_ms=2000, heartbeat_timeout_ms=1000)
print(server.address().replace(socket.gethostname(), "localhost"), flush=True)
sys.stdin.read()
"""


def trained(torchft: Path, n: int, **variables: str) -> list[tuple[int, str]]:
    """As :func:`run`, of replicas that torchft's Manager keeps in step."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(torchft)))}
    words = [sys.executable, "-c", LIGHTHOUSE, "1"]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lighthouse:
        assert lighthouse.stdout is not None
        try:
            address = lighthouse.stdout.readline().strip()
            return run(torchft, "manager", n, LIGHTHOUSE=address, **variables)
        finally:
            lighthouse.kill()


def test_replicas_that_lose_one_end_with_the_weights_of_a_run_that_loses_none(torchft: Path) -> None:
    """torchft's Manager and its lighthouse, which is a process of its own."""
    whole = trained(torchft, 2)
    ended = trained(torchft, 2, VICTIM="1")
    assert [code for code, _ in whole] == [0, 0], whole
    assert [code for code, _ in ended] == [0, -9], ended
    weights = [re.findall(r"has (\[.*\]) after", text)[0] for _, text in (*whole, ended[0])]
    assert weights == weights[:1] * 3, (whole, ended)
    assert "after sizes [2]" in whole[0][1], whole
    assert "after sizes [1, 2]" in ended[0][1], ended
