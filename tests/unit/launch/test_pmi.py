"""The server of PMI-1 by which MPICH's ranks find one another: what it answers, whom it lets in, how a job ends."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from blinkmpi.launch import pmi

HOSTS = ("alpha", "beta")
SECRET = "sesame"
PATIENCE_S = 20.0


@pytest.mark.parametrize(("nodes", "told"), [
    ("aabb", "(vector,(0,2,2))"),
    ("aab", "(vector,(0,1,2),(1,1,1))"),
    ("abab", "(vector,(0,2,1),(0,2,1))"),
    ("aaabbbcc", "(vector,(0,2,3),(2,1,2))"),
    ("a", "(vector,(0,1,1))"),
    ("abba", "(vector,(0,1,1),(1,1,2),(0,1,1))"),
])  # fmt: skip
def test_ranks_of_nodes_are_told_in_runs(nodes: str, told: str) -> None:
    assert pmi.process_mapping(nodes) == told
    blocks = [tuple(map(int, block.split(","))) for block in told[len("(vector,(") : -2].split("),(")]
    spread = [node for first, count, ranks in blocks for node in range(first, first + count) for _ in range(ranks)]
    assert spread == [sorted(set(nodes), key=nodes.index).index(node) for node in nodes], "as MPICH reads it"


def job() -> pmi.Job:
    return pmi.Job("space", HOSTS, {pmi.MAPPING: "(vector,(0,2,1))"})


@pytest.mark.parametrize(("asked", "answer"), [
    ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"),
    ("cmd=get_my_kvsname", "cmd=my_kvsname kvsname=space rc=0"),
    ("cmd=get_universe_size", "cmd=universe_size size=2 rc=0"),
    ("cmd=get kvsname=space key=PMI_process_mapping", "cmd=get_result rc=0 msg=success value=(vector,(0,2,1))"),
    ("cmd=get kvsname=space key=none", "cmd=get_result rc=-1 msg=key_none_not_found value=unknown"),
])  # fmt: skip
def test_a_question_is_answered_to_who_asked(asked: str, answer: str) -> None:
    assert job().answers(1, asked) == [(1, answer)]


def test_what_one_rank_puts_the_other_gets() -> None:
    ranks = job()
    assert ranks.answers(0, "cmd=put kvsname=space key=card value=a=b#c") == [(0, "cmd=put_result rc=0 msg=success")]
    assert ranks.answers(1, "cmd=get kvsname=space key=card") == [(1, "cmd=get_result rc=0 msg=success value=a=b#c")]


def test_a_barrier_lets_all_go_when_the_last_has_come() -> None:
    ranks = job()
    for _ in range(2):
        assert ranks.answers(1, "cmd=barrier_in") == []
        assert ranks.answers(0, "cmd=barrier_in") == [(0, "cmd=barrier_out rc=0"), (1, "cmd=barrier_out rc=0")]


@pytest.mark.parametrize(("said", "why", "aborts"), [
    ("cmd=abort exitcode=3", "rank 1 on beta aborted the job, exit status 3", 1),
    ("mcmd=spawn", "rank 1 on beta asked MPI's launcher for 'spawn', and MPI has none here", -1),
    ("GET / HTTP/1.1", "rank 1 on beta asked MPI's launcher for '', and MPI has none here", -1),
])  # fmt: skip
def test_what_ends_the_job_is_told_with_the_rank(said: str, why: str, aborts: int) -> None:
    with pytest.raises(pmi.JobEnds) as caught:
        job().answers(1, said)
    assert (str(caught.value), caught.value.aborts) == (why, aborts)


def test_a_rank_may_go_when_it_has_finalized_and_not_before() -> None:
    ranks = job()
    ranks.answers(0, "cmd=finalize")
    ranks.gone(0)
    with pytest.raises(pmi.JobEnds, match=r"rank 1 on beta ended before MPI_Finalize"):
        ranks.gone(1)


# ---------------------------------------------------------------- the process


class Rank:
    """A rank as the server sees it: two connections."""

    def __init__(self, port: int, rank: int) -> None:
        self.lifeline = greeted(port, f"{SECRET} lifeline {rank}")
        self.pmi = greeted(port, f"{SECRET} pmi {rank}")

    def ask(self, line: str) -> str:
        self.pmi.sendall(f"{line}\n".encode())
        return self.pmi.makefile().readline().strip()

    def leave(self) -> None:
        self.pmi.close()
        self.lifeline.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def greeted(port: int, line: str) -> socket.socket:
    connection = connected(port)
    connection.sendall(f"{line}\n".encode())
    assert connection.makefile().readline().strip() == pmi.WELCOME
    return connection


def started(seconds: float = PATIENCE_S, hosts: Sequence[str] = HOSTS) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen([sys.executable, "-I", pmi.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pmi.described("space", SECRET, hosts, {}, seconds))
    process.stdin.flush()
    return process, int(process.stdout.readline())


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    process, port = started()
    with process:
        try:
            yield process, port
        finally:
            process.kill()


def test_ranks_meet_and_the_server_ends_with_the_last(server: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = server
    ranks = [Rank(port, rank) for rank in (1, 0)]
    assert ranks[0].ask("cmd=put kvsname=space key=me value=1") == "cmd=put_result rc=0 msg=success"
    for rank in ranks:
        rank.pmi.sendall(b"cmd=barrier_in\n")
    assert [rank.pmi.makefile().readline().strip() for rank in ranks] == ["cmd=barrier_out rc=0"] * 2
    assert ranks[1].ask("cmd=get kvsname=space key=me") == "cmd=get_result rc=0 msg=success value=1"
    for rank in ranks:
        assert rank.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
    ranks[0].leave()
    ranks[1].lifeline.settimeout(0.3)
    with pytest.raises(TimeoutError):
        ranks[1].lifeline.recv(1)
    ranks[1].leave()
    assert process.wait(PATIENCE_S) == 0


def test_a_rank_that_dies_is_told_to_the_others_and_ends_the_server(
    server: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, port = server
    ranks = [Rank(port, rank) for rank in range(2)]
    ranks[0].ask("cmd=init pmi_version=1 pmi_subversion=1")
    ranks[1].leave()
    assert "rank 1 on beta ended before MPI_Finalize" in ranks[0].lifeline.makefile().readline()
    assert (ranks[0].lifeline.recv(1), ranks[0].pmi.recv(1)) == (b"", b"")
    assert process.wait(PATIENCE_S) == 0


def test_a_rank_that_aborts_ends_by_itself_and_the_others_are_told(
    server: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, port = server
    ranks = [Rank(port, rank) for rank in range(2)]
    ranks[0].pmi.sendall(b"cmd=abort exitcode=7\n")
    assert "rank 0 on alpha aborted the job, exit status 7" in ranks[1].lifeline.makefile().readline()
    ranks[0].lifeline.settimeout(0.3)
    with pytest.raises(TimeoutError):
        ranks[0].lifeline.recv(1)
    ranks[0].leave()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("line", [
    "guess pmi 0", f"{SECRET} pmi 2", f"{SECRET} pmi -1", f"{SECRET} shell 0", f"{SECRET} pmi 0\ncmd=abort",
    70000 * "x",
])  # fmt: skip
def test_strangers_are_not_let_in_and_do_no_harm(server: tuple[subprocess.Popen[bytes], int], line: str) -> None:
    process, port = server
    first = Rank(port, 0)
    stranger = connected(port)
    stranger.sendall(f"{line}\n".encode())
    with contextlib.suppress(ConnectionResetError):  # it was closed before all was read
        assert stranger.recv(1) == b""
    again = connected(port)
    again.sendall(f"{SECRET} pmi 0\n".encode())
    assert again.recv(1) == b"", "that rank is there already"
    ranks = [first, Rank(port, 1)]
    for rank in ranks:
        assert rank.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
        rank.leave()
    assert process.wait(PATIENCE_S) == 0


def test_it_ends_when_the_rank_that_started_it_ends_before_all_have_come(
    server: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, port = server
    rank = Rank(port, 1)
    assert process.stdin is not None
    process.stdin.close()
    assert "rank 0 on alpha ended while the ranks connected" in rank.lifeline.makefile().readline()
    assert process.wait(PATIENCE_S) == 0


def test_it_ends_when_not_all_come_in_time() -> None:
    process, port = started(seconds=0.5)
    with process:
        rank = Rank(port, 1)
        assert "only 2 of 4 connections" in rank.lifeline.makefile().readline()
        assert process.wait(PATIENCE_S) == 0
