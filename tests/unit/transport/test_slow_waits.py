"""When a wait is warned of, what another process says of its Python, and which processes are told apart."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from blinkmpi.errors import SettingsError
from blinkmpi.transport import processes, python_stacks
from blinkmpi.transport.control_pages import start_time
from blinkmpi.transport.processes import JobProcess
from blinkmpi.transport.slow_waits import SlowWaits, stacks_of
from blinkmpi.util.settings import Settings, read
from tests.harness import PATIENCE_S, wait_until


def test_a_wait_is_warned_of_once_and_then_each_two_times_as_long() -> None:
    slow = SlowWaits(Settings(warn_after_s=30))
    times = [t for t in range(200) if slow.due(7, float(t))]
    assert times == [30, 90, 150]
    assert not slow.due(8, 29.0)
    assert slow.due(8, 31.0)
    assert not slow.due(8, 31.2)
    assert not slow.due(8, 0.2)  # it moved
    assert slow.due(8, 30.0)


def test_zero_turns_warnings_off() -> None:
    slow = SlowWaits(Settings(warn_after_s=0.0))
    assert not any(slow.due(1, float(t)) for t in range(10_000))


def test_settings_of_waits() -> None:
    assert (read({"X": "y"}).timeout_s, read({"X": "y"}).warn_after_s) == (1800.0, 30.0)
    assert read({"BLINKMPI_WARN_AFTER": "0"}).warn_after_s == 0.0
    assert read({"BLINKMPI_WARN_AFTER": "2.5"}).warn_after_s == 2.5
    for text in ("-1", "soon", "nan", "1e10"):
        with pytest.raises(SettingsError, match="BLINKMPI_WARN_AFTER"):
            read({"BLINKMPI_WARN_AFTER": text})


@pytest.fixture
def me() -> Iterator[JobProcess]:
    """This process, which answers."""
    known, visible = dict(processes.KNOWN), set(processes.VISIBLE)
    process = processes.own()
    processes.learn({0: process})
    python_stacks.open_service()
    yield process
    python_stacks.close_service()
    processes.KNOWN.clear()
    processes.VISIBLE.clear()
    processes.KNOWN.update(known)
    processes.VISIBLE.update(visible)


def test_a_process_says_where_its_main_thread_is(me: JobProcess) -> None:
    python_stacks.CAME_TO["a test"] = 3
    answer = python_stacks.ask(me)
    assert not isinstance(answer, str)
    assert answer.came_to["a test"] == 3
    assert any("test_a_process_says_where_its_main_thread_is" in line for line in answer.stack)
    assert "Python stack of rank 0" in stacks_of([0], {0: me})
    assert processes.state(me) == "running"


def test_who_has_no_communicator_does_not_answer(me: JobProcess) -> None:
    python_stacks.close_service()
    assert "no communicator" in str(python_stacks.ask(me))
    assert not [t for t in threading.enumerate() if t.name == "blinkmpi-answers" and ended_late(t)]
    python_stacks.open_service()  # and again
    assert not isinstance(python_stacks.ask(me), str)


def ended_late(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return thread.is_alive()


def test_it_answers_while_anybody_uses_it(me: JobProcess) -> None:
    python_stacks.open_service()
    python_stacks.close_service()
    assert not isinstance(python_stacks.ask(me), str)


def test_a_forked_child_neither_answers_nor_ends_the_service(me: JobProcess) -> None:
    child = multiprocessing.get_context("fork").Process(target=python_stacks.close_service)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert not isinstance(python_stacks.ask(me), str)


def test_a_service_that_is_opened_again_at_once_answers(me: JobProcess) -> None:
    for _ in range(200):
        python_stacks.close_service()
        python_stacks.open_service()
        assert not isinstance(python_stacks.ask(me), str)


TAKEN = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(b"\\0" + sys.argv[1].encode())
listener.listen()
print("listens", flush=True)
while True:
    listener.accept()[0].sendall(b'{"stack": ["FORGED\\n line \\x1b[31m"], "came_to": {}}')
"""


@pytest.mark.parametrize("another", [False, True])
def test_who_takes_the_name_of_a_process_is_not_believed(me: JobProcess, another: bool) -> None:
    user = 65534 if another else os.getuid()
    if another and os.getuid():
        pytest.skip("only root starts processes of other users")
    python_stacks.close_service()
    argv = [sys.executable, "-c", TAKEN, f"blinkmpi-{me.pid}-{me.start}-0123456789abcdef", str(user)]
    other = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"listens\n"
        answer = python_stacks.ask(me)
        assert isinstance(answer, str)
        assert ("another user, uid 65534" if another else f"process {other.pid}") in answer
        assert "FORGED" not in stacks_of([0], {0: me})
        python_stacks.open_service()  # beside it
        assert not isinstance(python_stacks.ask(me), str)
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize(
    "body",
    [
        b'{"stack": ' + b"[" * 60_000,
        b'{"deep": ' + b"[" * 60_000,
        b'{"came_to": ' + b'{"a":' * 12_000,
        b"\xff",
        b"{}",
        b"",
    ],
)
def test_an_answer_that_is_none_is_said_in_words(me: JobProcess, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(msgspec.json, "encode", lambda _: body)
    assert "cannot be asked" in str(python_stacks.ask(me))


def test_an_answer_cannot_forge_lines(me: JobProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    said = python_stacks.Answer(["a\nrank 1: forged\x1b[31m"] * 1000, {})
    body = msgspec.json.encode(said)
    monkeypatch.setattr(msgspec.json, "encode", lambda _: body)
    text = stacks_of([0], {0: me})
    assert "\\n" in text
    assert "\x1b" not in text
    assert len(text.splitlines()) == python_stacks.FRAMES + 2  # an empty one, and the heading


def awaited(process: JobProcess, state: str) -> str:
    """A process's state, as soon as it is this one; one that starts waits for the disk now and then."""
    wait_until(lambda: processes.state(process) == state, f"the process is {state}")
    return processes.state(process)


def test_processes_are_told_apart(me: JobProcess) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = JobProcess(me.host, me.boot, child.pid, start_time(child.pid) or 0)
        processes.learn({5: found, 6: JobProcess("far", "another", child.pid, found.start)})
        assert awaited(processes.KNOWN[5], "running") == "running"
        assert processes.state(processes.KNOWN[6]) == ""
        assert "another machine" in str(python_stacks.ask(processes.KNOWN[6]))
        os.kill(child.pid, signal.SIGSTOP)
        assert awaited(found, "stopped") == "stopped"
        assert stacks_of([5], processes.KNOWN) == ""  # it could not answer
    finally:
        child.kill()
        child.wait()
    assert processes.state(found) == "gone"


def test_before_any_exchange_ranks_are_known_by_their_launcher() -> None:
    """Children of one parent, by the rank that it gave them; not those that it has started later."""
    program = "import subprocess, sys\n" + "\n".join(
        [
            f"sleep = [{sys.executable!r}, '-c', 'import time; time.sleep(60)']",
            f"asks = [{sys.executable!r}, '-c', sys.argv[1]]",
            "env = {'PMIX_NAMESPACE': 'first', 'PYTHONPATH': sys.argv[2]}",
            "later = subprocess.Popen(sleep, env={**env, 'PMI_RANK': '1', 'PMIX_NAMESPACE': 'second'})",
            "other = subprocess.Popen(sleep, env={**env, 'PMI_RANK': '1'})",
            "found = subprocess.run(asks, env={**env, 'PMI_RANK': '0'}, capture_output=True, text=True)",
            "print(other.pid, found.stdout)",
            "other.kill(), later.kill()",
        ]
    )
    learn = "import blinkmpi.transport.processes as p; p.learn_from_launcher(int);"
    asks = f"{learn} print(p.KNOWN[1].pid, p.state(p.KNOWN[1]))"
    argv = [sys.executable, "-c", program, asks, os.pathsep.join(sys.path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    wanted, pid, state = done.stdout.split()
    assert (pid, state) == (wanted, "running"), done
