"""Which calls are faster than NCCL's: measured beside it, kept as rows, and what a table that does not hold says."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.fake.gpu import FakeDriver
from blinkmpi.errors import DeviceError, FormatError
from blinkmpi.nccl.beside import Nccl, kinds, measure
from blinkmpi.nccl.binder import Kind
from blinkmpi.nccl.library import LIBRARY
from blinkmpi.nccl.table import Faster, FasterTable, Measured, file_of, read, rows_of, variables
from blinkmpi.topology import machine
from tests.unit.nccl.door.fakes import Alike, fake_context

STUB = Path(__file__).parent / "door" / "stub.c"
TABLE = FasterTable(
    "NVIDIA H200", 2, "hgx-h200", "2026-11-30", "2.28.9", {"NCCL_NVLS_ENABLE": "0"}, "k", ("allreduce", "reduce"),
    (Faster("allreduce", "float32", 4096, 1.5), Faster("reduce", "bfloat16", 8192, 1.1)),
)  # fmt: skip


def measured(nbytes: int, plain: float, graph: float, dtype: str = "float32") -> Measured:
    return Measured("allreduce", dtype, nbytes, (1e-5, plain * 1e-5), (2e-5, graph * 2e-5))


def test_a_row_is_faster_plain_and_in_graphs_and_at_both_ends() -> None:
    found = [
        measured(1024, 1.5, 1.1), measured(2048, 1.2, 1.05), measured(4096, 1.5, 1.02), measured(8192, 1.5, 1.5),
        measured(16384, 1.04, 1.5), measured(32768, 1.0, 2.0), measured(1024, 1.04, 1.04, "bfloat16"),
    ]  # fmt: skip
    assert rows_of(found) == (
        Faster("allreduce", "float32", 1024, 1.1), Faster("allreduce", "float32", 2048, 1.05),
        Faster("allreduce", "float32", 16384, 1.04), Faster("allreduce", "bfloat16", 1024, 1.04),
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [("allreduce", 4, 11), ("allreduce", 4, 13), ("allreduce", 2, 12), ("allgather", 4, 12), ("allreduce", 8, 12)],
)
def test_kinds_that_no_row_has_are_nccls(kind: tuple[str, int, int]) -> None:
    assert TABLE.why_not("allreduce", 4, 12) == ""
    assert TABLE.why_not(*kind) == "not measured to be 3% faster than NCCL's here"


@pytest.mark.parametrize(("nccl", "given", "kernels", "why"), [
    ("2.28.9", {"NCCL_NVLS_ENABLE": "0"}, "k", ""),
    ("", {"NCCL_NVLS_ENABLE": "0"}, "k", ""),
    ("2.29.1", {"NCCL_NVLS_ENABLE": "0"}, "k", "it was measured with NCCL 2.28.9, this is 2.29.1"),
    ("2.28.9", {}, "k", "it was measured with another NCCL_NVLS_ENABLE"),
    ("2.28.9", {"NCCL_NVLS_ENABLE": "0"}, "other", "it was measured with other kernels of ours"),
])  # fmt: skip
def test_a_table_holds_for_what_it_was_measured_with(nccl: str, given: dict[str, str], kernels: str, why: str) -> None:
    assert TABLE.why_stale(nccl, given, kernels) == why


def test_what_was_measured_again_takes_the_place_of_what_was() -> None:
    newer = replace(TABLE, collectives=("reduce",), rows=(Faster("reduce", "float32", 1024, 1.2),))
    joined = TABLE.joined(newer)
    assert joined.rows == (TABLE.rows[0], newer.rows[0])
    assert joined.collectives == ("allreduce", "reduce")
    other = replace(newer, nccl="2.29.1")
    assert TABLE.joined(other) == other


def test_a_table_is_kept_in_a_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, TABLE.gpu, machine("hgx-h200"))
    assert path.name.startswith("beside-nccl-NVIDIA-H200-x8-")
    assert read(path) is None
    path.write_text(TABLE.to_json())
    assert read(path) == TABLE
    path.write_text("{}")
    with pytest.raises(FormatError):
        read(path)


def test_only_variables_that_may_change_times_count() -> None:
    given = {"NCCL_DEBUG": "INFO", "NCCL_MAX_CTAS": "8", "BLINKMPI_NCCL": "off"}
    assert variables(given) == {"NCCL_MAX_CTAS": "8"}


# ---------------------------------------------------------------- measuring, on GPUs that are none


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    return FakeDriver(str(tmp_path_factory.mktemp("driver")))


class FakeNccl:
    """NCCL whose calls count as so many launches, each of a microsecond; it has no alltoall."""

    def __init__(self, driver: FakeDriver, launches: int) -> None:
        self._driver, self._launches = driver, launches

    def lacks(self, name: str) -> bool:
        return name == "alltoall"

    def caller(self, kind: Kind, elements: int, send: int, recv: int, stream: int) -> Any:
        def enqueue() -> None:
            self._driver["launches"] += self._launches

        return enqueue


def test_all_collectives_are_measured_where_packets_carry_them(driver: FakeDriver) -> None:
    """Ours take a launch each, NCCL's here three."""
    context, said = fake_context(driver, 0, 2), list[str]()
    alike = Alike(0, 2)
    comm: Any = SimpleNamespace(
        context=SimpleNamespace(cuda=lambda: context), rank=0, size=2, plan=lambda *_: None, Barrier=alike.Barrier,
        allgather_bytes=alike.allgather_bytes,
    )  # fmt: skip
    nccl: Any = FakeNccl(driver, 3)
    names = ("allreduce", "broadcast", "alltoall")
    found = measure(comm, nccl, names, [4, 1024, 1 << 28], said.append)
    assert {(m.collective, m.dtype, m.nbytes) for m in found} == {
        (name, dtype, nbytes) for name in names[:2] for dtype in ("float32", "bfloat16") for nbytes in (4, 1024)
    }
    assert all(m.plain == m.graph == (pytest.approx(1e-6), pytest.approx(3e-6)) for m in found)
    assert all(m.gain == pytest.approx(3) for m in found)
    assert [text for text in said if "which the door cannot launch yet" in text]
    assert driver["captured"] == 0


def test_nccl_is_called_by_its_own_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    made = tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(STUB)], check=True, timeout=60)
    monkeypatch.setenv(LIBRARY, str(made))
    monkeypatch.setenv("STUB_FOLDER", str(tmp_path))
    nccl = Nccl(Alike(0, 1))
    assert nccl.version == "2.28.9"
    for kind, _, nbytes in kinds(("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall"), [64]):
        assert not nccl.lacks(kind.name)
        nccl.caller(kind, nbytes // 4, 0, 0, 0)()
        assert nccl.library.stub_last() == ord("N")
    with pytest.raises(DeviceError, match="ncclAllReduce: NCCL's error 4"):
        nccl.caller(Kind(0, 7, 0, -1, 6), 13, 0, 0, 0)()
    nccl.close()
