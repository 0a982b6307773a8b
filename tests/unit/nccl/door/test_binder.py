"""A kind of calls becomes a record, by which C makes what Python makes of each call: arguments, grid, order."""

import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from benchmarks.fake.gpu import EVENT, FakeDriver
from blinkmpi.errors import ArgumentError, DeviceError
from blinkmpi.nccl.binder import COLLECTIVES, NEVER_NS, Kind, Record
from blinkmpi.nccl.library import FLAGS
from blinkmpi.program.call import Call
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda.failure_report import ABORTED, MISMATCH, OVERLAP, TIMEOUT
from blinkmpi.transport.cuda.kernel_layout import buffers_at, fingerprint_at, timeout_at
from blinkmpi.transport.cuda.loaded_kernel import MASK
from blinkmpi.transport.cuda.packets import PROTOCOLS, fits
from blinkmpi.transport.host.native import built
from tests.harness import ENVIRONMENT, ROOT
from tests.unit.nccl.door.fakes import fake_context

HERE = Path(__file__).parent
DOOR = ROOT / "blinkmpi" / "nccl" / "door"
SECONDS = 60
FLOAT32 = 7
pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


class CallStruct(ctypes.Structure):
    """``door_call_t`` of binder.h."""

    _fields_ = (
        ("send", ctypes.c_void_p), ("recv", ctypes.c_void_p), ("count", ctypes.c_uint64), ("number", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    )  # fmt: skip


@pytest.fixture(scope="module")
def door() -> ctypes.CDLL:
    path, why = built(DOOR / "door.c", FLAGS)
    assert path is not None, why
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(str(tmp_path_factory.mktemp("driver")))


@pytest.fixture(autouse=True)
def _anew(driver: FakeDriver) -> Iterator[None]:
    yield
    driver["error"] = driver["captured"] = 0
    driver["context"] = 77


def forced(context: Any, protocol: str) -> Any:
    """A context whose table says nothing else than this protocol."""
    rule = SimpleNamespace(protocol=protocol, ctas=0)
    return SimpleNamespace(
        transport=context.transport, gpu=context.gpu, rank=context.rank, rule=lambda call, registered: rule
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("n", [2, 4, pytest.param(3, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)])
def test_c_makes_the_arguments_and_the_grid_that_python_makes(
    door: ctypes.CDLL, driver: FakeDriver, n: int, protocol: str
) -> None:
    """Of all collectives, as every rank, with counts from one element to the most of a kind."""
    drawn, compared = random.Random(n), 0
    for rank in range(n):
        context = fake_context(driver, rank, n)
        for number, name in enumerate(COLLECTIVES):
            root = drawn.randrange(n) if name in ("broadcast", "reduce") else -1
            op = 0 if name in ("allreduce", "reduce_scatter", "reduce") else -1
            for size_class in range(5, 17):
                kind = Kind(number, FLOAT32, op, root, size_class)
                largest = kind.largest(n)
                if not fits(largest, protocol):
                    continue
                record = Record(forced(context, protocol), kind, EVENT)
                for count in {1, largest.counts[0], drawn.randint(1, largest.counts[0])}:
                    given = CallStruct(1 << 30, 1 << 31, count, 5, 0)
                    words = (ctypes.c_uint64 * 512)()
                    grid = door.blinkmpi_door_fill(ctypes.c_void_p(record.address), ctypes.byref(given), words)
                    call = Call(largest.collective, n, (count,) * len(largest.counts), "float32", largest.op, root)
                    said = Called(record.called.text, count)
                    loaded = context.transport.load_packets(call, protocol, said, 0)
                    context.transport.fill(loaded, 1 << 30, 1 << 31, 0, 0, NEVER_NS / 1e9)
                    loaded.args[fingerprint_at(n)] = (loaded.args[fingerprint_at(n)] + 5) & MASK
                    loaded.args[timeout_at(n)] = NEVER_NS
                    assert (grid, words[: len(loaded.args)]) == (loaded.grid, list(loaded.args)), (call, rank)
                    compared += 1
        context.close(collectively=False)
    assert compared > 20 * n


def launched(door: ctypes.CDLL, record: Record, *, send: int = 1 << 30, stream: int = 7) -> int:
    call = CallStruct(send, 1 << 31, 100, 1, stream)
    return int(door.blinkmpi_door_launch(ctypes.c_void_p(record.address), ctypes.byref(call)))


def record_of(driver: FakeDriver, name: str, *, rank: int = 0, root: int = -1) -> Record:
    op = 0 if name == "allreduce" else -1
    return Record(fake_context(driver, rank, 2), Kind(COLLECTIVES.index(name), FLOAT32, op, root, 10), EVENT)


def counted(driver: FakeDriver) -> list[int]:
    return [driver[name] for name in ("launches", "waits", "records", "external", "copies")]


@pytest.mark.parametrize("captured", [0, 1])
def test_each_launch_waits_for_the_one_before_and_marks_itself(
    door: ctypes.CDLL, driver: FakeDriver, captured: int
) -> None:
    """In a graph as nodes of the event as it is when that is launched."""
    record, before = record_of(driver, "allreduce"), counted(driver)
    driver["captured"], driver["words"] = captured, len(record.kernel.args)
    assert launched(door, record) == 0
    assert [now - then for now, then in zip(counted(driver), before, strict=True)] == [1, 1, 1, 2 * captured, 0]
    assert (driver["before"], driver["behind"]) == (before[0], before[0] + 1), "it waits before, and marks behind"
    function, grid, block, stream, words = driver.last()
    assert (function, block, stream) == (record.kernel.kernel.handle, record.kernel.block, 7)
    assert (grid, words[buffers_at(2)], words[buffers_at(2) + 1]) == (1, 1 << 30, 1 << 31)


@pytest.mark.parametrize(("rank", "send", "copies"), [(1, 1 << 30, 1), (1, 1 << 31, 0), (0, 1 << 30, 0)])
def test_a_broadcast_gives_the_root_its_own_vector(
    door: ctypes.CDLL, driver: FakeDriver, rank: int, send: int, copies: int
) -> None:
    """Unless it is in place; packets go to the others alone."""
    record, before = record_of(driver, "broadcast", rank=rank, root=1), counted(driver)
    assert launched(door, record, send=send) == 0
    assert counted(driver)[-1] - before[-1] == copies


def test_a_launch_is_made_in_the_context_of_the_communicator(door: ctypes.CDLL, driver: FakeDriver) -> None:
    record = record_of(driver, "allreduce")
    driver["context"] = 5
    assert launched(door, record) == 0
    assert (driver["context_of_last"], driver["context"]) == (77, 5)


def test_a_launch_that_cuda_refuses_is_nccls_cuda_error(door: ctypes.CDLL, driver: FakeDriver) -> None:
    record, before = record_of(driver, "allreduce"), counted(driver)
    driver["error"] = 700
    assert launched(door, record) == 1
    assert counted(driver)[2] == before[2], "nothing is marked"


def test_a_kind_that_packets_do_not_carry_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(DeviceError, match="which the door cannot launch yet"):
        Record(fake_context(driver, 0, 2), Kind(0, FLOAT32, 0, -1, 28), EVENT)
    with pytest.raises(ArgumentError, match="no call has 1 bytes at most"):
        Kind(1, FLOAT32, -1, -1, 0).largest(2)


def test_a_process_has_one_binder(driver: FakeDriver) -> None:
    """Asked of a door of its own, as the process keeps it."""
    code = f"""if True:
        import ctypes, sys
        sys.path.insert(0, {str(ROOT)!r})
        from blinkmpi.nccl.binder import Binder
        door = ctypes.CDLL({str(built(DOOR / "door.c", FLAGS)[0])!r})
        Binder(door, lambda group: None).serve()
        try:
            Binder(door, lambda group: None).serve()
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout == "ArgumentError the door has a binder; a process has one\n", done.stderr


def test_an_abort_is_what_kernels_look_for(door: ctypes.CDLL, driver: FakeDriver) -> None:
    transport = fake_context(driver, 0, 2).transport
    door.blinkmpi_door_abort(ctypes.c_void_p(transport.memory.report_at))
    assert transport.report[0] == 1


@pytest.mark.parametrize(("code", "error"), [(0, 0), (ABORTED, 6), (TIMEOUT, 6), (MISMATCH, 5), (OVERLAP, 5)])
def test_a_kernels_report_is_an_error_of_nccls(door: ctypes.CDLL, driver: FakeDriver, code: int, error: int) -> None:
    transport = fake_context(driver, 0, 2).transport
    transport.report[1] = code
    assert door.blinkmpi_door_wrong(ctypes.c_void_p(transport.memory.report_at)) == error


def test_the_current_gpu_is_told_by_its_uuid(tmp_path: Path) -> None:
    """By the driver that the program has loaded; without one there is none."""
    made = tmp_path / "libcuda.so.1"
    source = """
        int cuCtxGetDevice(int *device) { return *device = 3, 0; }
        int cuDeviceGetUuid_v2(unsigned long *uuid, int device) { return uuid[0] = 11, uuid[1] = device, 0; }
    """
    words = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-o", str(made), "-"]
    subprocess.run(words, input=source, text=True, check=True, timeout=SECONDS)
    code = f"""if True:
        import ctypes
        door, words = ctypes.CDLL({str(built(DOOR / "door.c", FLAGS)[0])!r}), (ctypes.c_uint64 * 2)()
        print(door.blinkmpi_door_gpu(words))
        driver = ctypes.CDLL({str(made)!r})
        print(door.blinkmpi_door_gpu(words), *words)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout == "1\n0 11 3\n", done.stderr


def test_all_ranks_launch_the_same_kernels_with_the_same_numbers(tmp_path: Path) -> None:
    """Processes whose calls meet the door, its binder, and the driver that launches nothing."""
    made, path = tmp_path / "libnccl.so.2", built(DOOR / "door.c", FLAGS)[0]
    words = ["cc", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnccl.so.2", "-o", str(made), str(HERE / "stub.c")]
    subprocess.run(words, check=True, timeout=SECONDS)
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "STUB_FOLDER": str(tmp_path)}
    env["BLINKMPI_NCCL_LIBRARY"] = str(made)
    name, processes = uuid4().hex, []
    for rank in (0, 1):
        program = [sys.executable, str(HERE / "bound_client.py"), str(path), name, "2", str(rank)]
        processes.append(subprocess.Popen(program, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE))
    told = [json.loads(process.communicate(timeout=SECONDS)[0]) for process in processes]
    assert told[0] == told[1]
    assert {len(launch) for launch in told[0]} == {6}
    assert len({number for *_, number in told[0]}) == len(told[0]), "each has a number of its own"
