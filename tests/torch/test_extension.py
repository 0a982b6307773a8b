"""torch_extension.cpp: compiled here for this torch, and tried on a device that has no memory; on GPUs in tests/gpu."""

import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkmpi.errors import CollectiveTimeout
from blinkmpi.transport.host.compiling import CHILD
from tests.harness import wait_until

torch = pytest.importorskip("torch")
torch_extension = pytest.importorskip("blinkmpi.torch.torch_extension")
dist = torch.distributed
SHORT = timedelta(milliseconds=20)


def test_work_waits_on_the_current_stream_and_then_lets_its_operands_go(quick: Any, device: Any) -> None:
    """``wait`` tells the current stream to wait for the event; then the Work holds the results alone."""
    result, memory = torch.arange(3.0), np.ones(2)
    there = weakref.ref(memory)
    work = quick.work([result], [torch.from_numpy(memory)], device.stream(5), True)
    del memory
    assert there() is not None
    assert isinstance(work, dist._Work)
    recorded, blocked = device.counts()
    assert work.wait()
    assert device.counts() == (recorded, blocked + 1)
    assert there() is None
    assert work.result()[0] is result
    assert work.is_completed()
    assert work.is_success()


def test_a_wait_with_a_timeout_raises_ours(quick: Any, device: Any) -> None:
    """The host waits no longer than it was told, and other threads run meanwhile."""
    work = quick.work([torch.ones(1)], [], device.stream(5), True)
    device.say(False)
    try:
        assert not work.is_completed()
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"wait\(20 ms\): the call is still under way; wait longer"):
            work.wait(SHORT)
        assert time.monotonic() - began >= SHORT.total_seconds()
        later = threading.Timer(0.05, device.say, [True])
        later.start()
        assert work.wait(timedelta(seconds=30))
        later.join()
    finally:
        device.say(True)


def test_spans_are_asynchronous(quick: Any) -> None:
    """As torch expects of a backend's collectives; nothing is shown where nothing is profiled."""
    with quick.Span("blink:unseen"):
        pass
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        pytest.raises(ValueError, match="out of it"),
        quick.Span("blink:all_reduce"),
    ):
        raise ValueError("out of it")
    found = [event for event in profile.events() if event.name.startswith("blink:")]
    assert [(event.name, event.is_async) for event in found] == [("blink:all_reduce", True)]


def test_futures_have_the_results(quick: Any, device: Any) -> None:
    """``get_future`` has a list, as torch's own; a hook's has the one tensor, as a Python object."""
    result = torch.arange(3.0)
    future = quick.work([result], [], device.stream(5), True).get_future()
    assert future.done()
    assert [t.tolist() for t in future.value()] == [[0, 1, 2]]
    assert future.then(lambda f: f.value()[0].sum()).wait().item() == 3
    hooks = quick.future(result, result, device.stream(5))
    assert hooks.done()
    assert hooks.value() is result
    assert hooks.then(lambda f: f.value().sum()).wait().item() == 3


def test_a_stream_follows_another(quick: Any, device: Any) -> None:
    """One event of the current stream, for which the other one waits."""
    recorded, blocked = device.counts()
    quick.follow(device.stream(5))
    assert device.counts() == (recorded + 1, blocked + 1)


def test_work_on_the_current_stream_needs_no_event(quick: Any, device: Any) -> None:
    """What the user does next comes behind it anyhow."""
    result, before = torch.arange(3.0), device.counts()
    work = quick.work([result], [], device.stream(5), False)
    assert work.wait()
    assert device.counts() == before
    assert work.result()[0] is result
    device.say(False)
    try:
        assert not work.is_completed()
        with pytest.raises(CollectiveTimeout):
            work.wait(SHORT)
    finally:
        device.say(True)
    assert work.is_completed()
    assert work.is_success()


def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Then calls go on through Python, and the log says why, once."""
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo none && exit\necho no luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    compiling = torch_extension._Compiling()
    compiling.begin()
    wait_until(lambda: compiling.look() or compiling.why, "the compiler fails")
    assert "compiling torch_extension.cpp failed" in compiling.why
    assert "no luck" in compiling.why
    compiling.begin()
    compiling.look()
    said = [line for line in capfd.readouterr().err.splitlines() if "go through Python" in line]
    assert len(said) == 1
    assert "no luck" in said[0]


def test_a_process_that_cannot_be_started_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The call that asked for it goes on."""
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(torch_extension, "kept_library", lambda *_: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    compiling = torch_extension._Compiling()
    compiling.begin()
    assert "cannot begin" in compiling.why
    assert "no-python" in capfd.readouterr().err


def test_a_library_that_does_not_load_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One of another C++ library, say."""
    path = tmp_path / "torch_extension.so"
    path.write_bytes(b"no library")
    compiling = torch_extension._Compiling()
    compiling._load(path)
    assert compiling.module is None
    assert str(path) in compiling.why
    assert compiling.why in capfd.readouterr().err


def test_the_process_that_compiles_touches_neither_mpi_nor_torch() -> None:
    """It runs beside ranks of MPI."""
    code = f"{CHILD.partition(';')[0]}; import sys; print([m for m in ('mpi4py.MPI', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
