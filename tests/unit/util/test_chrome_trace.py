"""Files of traces: whole JSON whoever writes when, also where a writer dies, the disk is full, or jobs share a name."""

import errno
import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.errors import TraceError
from blinkmpi.util import chrome_trace
from blinkmpi.util.chrome_trace import END, FIRST_ROW, add, arrow_text, create, job_of, names_texts, slice_text


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def some(process: int, count: int) -> list[str]:
    return [slice_text(f'a "name" {i}', process, 0, float(i), 0.5) for i in range(count)]


def _write(path: Path, process: int) -> None:
    for _ in range(5):
        add(path, "job", some(process, 50))


def test_every_event_is_json_of_the_format() -> None:
    texts = [*names_texts(3, "rank 3", {0: "calls", 2: "tree 0"}), slice_text("x", 3, 2, 1.5, 2.25, '{"tree": 0}'),
             arrow_text("s", "a.1", 3, 2, 3.0), arrow_text("f", "a.1", 4, 2, 4.0)]  # fmt: skip
    found = [json.loads(text) for text in texts]
    assert [e["ph"] for e in found] == ["M"] * 6 + ["X", "s", "f"]
    row = FIRST_ROW + 2
    assert found[6] == {"ph": "X", "name": "x", "pid": 3, "tid": row, "ts": 1.5, "dur": 2.25, "args": {"tree": 0}}
    assert {e["tid"] for e in found} == {FIRST_ROW, row}
    assert found[8]["bp"] == "e"
    assert found[7]["id"] == found[8]["id"] != json.loads(arrow_text("s", "a.2", 3, 2, 3.0))["id"]
    assert 0 < int(found[7]["id"], 16) < 1 << 64, "what Perfetto takes"


def test_processes_add_their_events_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    create(path, "job", "what it is")
    assert events_of(path) == []
    context = get_context("fork")
    writers = [context.Process(target=_write, args=(path, k)) for k in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert sorted({e["pid"] for e in events_of(path)}) == [0, 1, 2, 3]
    assert len(events_of(path)) == 4 * 5 * 50
    assert json.loads(path.read_text())["otherData"] == {"job": "job", "about": "what it is"}


@pytest.mark.parametrize("lost", [1, 2, len(END), len(END) + 7, 200])
def test_what_a_dead_writer_has_half_written_is_removed(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "t.json"
    create(path, "job")
    add(path, "job", some(0, 10))
    os.truncate(path, path.stat().st_size - lost)
    add(path, "job", some(1, 3))
    found = events_of(path)
    assert [e["pid"] for e in found][-3:] == [1, 1, 1]
    assert all(e["pid"] == 0 for e in found[:-3])
    assert len(found) >= 13 - 1 - lost // 60


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    create(path, "job")
    add(path, "job", some(0, 10))
    before, room = path.read_bytes(), [300]
    write = os.pwrite

    def full(file: int, text: bytes, at: int) -> int:
        if text != END and room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = text if text == END else text[: room[0]]  # which the file had before
        room[0] -= len(part)
        return write(file, part, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TraceError, match=r"t\.json'.*No space left.*has room"):
        add(path, "job", some(1, 100))
    assert path.read_bytes() == before
    monkeypatch.undo()
    add(path, "job", some(2, 1))
    assert len(events_of(path)) == 11


def test_another_jobs_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    create(path, "one")
    create(path, "two")  # the later job takes the name
    assert job_of(path) == "two"
    assert add(path, "two", some(2, 1)) == path
    own = add(path, "one", some(0, 2))
    assert own == tmp_path / "t.one.json"
    assert add(path, "one", some(1, 2)) == own
    assert [e["pid"] for e in events_of(own)] == [0, 0, 1, 1]
    assert [e["pid"] for e in events_of(path)] == [2]


def test_what_is_no_trace_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("something else")
    assert job_of(path) == job_of(tmp_path / "none") == ""
    assert add(path, "job", some(0, 1)) == tmp_path / "t.job.json"
    assert path.read_text() == "something else"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none/t\.json'.*No such file.*give a path in a folder that exists"):
        create(tmp_path / "none" / "t.json", "job")
    with pytest.raises(TraceError, match="No such file"):
        add(tmp_path / "none" / "t.json", "job", [])


def test_a_lock_that_is_held_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    path = tmp_path / "t.json"
    create(path, "job")
    monkeypatch.setattr(chrome_trace, "LOCK_SECONDS", 0.05)
    with path.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TraceError, match="another process has held its lock"):
            add(path, "job", some(0, 1))
    add(path, "job", some(0, 1))
    assert len(events_of(path)) == 1
