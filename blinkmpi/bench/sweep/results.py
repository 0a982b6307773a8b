"""The results of a sweep: one JSON file, whole after every run, so that a sweep goes on where it stopped; its tables.

A run is known by all its parameters. One with a good result is not run again; one that failed is kept with the line
that says why, and is tried again by the next start.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ArgumentError
from ...util.files import read_json
from ...util.text import brief, quoted, size_text, time_text
from .. import environment as meta
from ..drawn_fields import why_not
from .file import Run
from .jobs import RunOutcome

FORMAT, VERSION = "blinkmpi.sweep", 2


class Results:
    """The file: what is in it, and what is added."""

    def __init__(self, path: str, *, source: str, scheduler: Mapping[str, str], library: str) -> None:
        self.path = Path(path)
        self.body: dict[str, Any] = {"format": FORMAT, "version": VERSION, "runs": []}
        if self.path.exists():
            self.body = read(path)
        elif not self.path.resolve().parent.is_dir():
            raise ArgumentError(f"--output_file {path}: folder {self.path.resolve().parent} does not exist; make it")
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        own = {
            "sweep": Path(source).name, "started": self.body.get("started", now), "date": now,
            "args": [meta.without_folders(word) for word in sys.argv], **meta.commit(), "hardware": meta.hardware(),
            "versions": meta.versions(library, None), "env": meta.environment(), "scheduler": dict(scheduler),
        }  # fmt: skip
        self.body = {**self.body, **own, "runs": self.body["runs"]}

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Every run so far."""
        return list(self.body["runs"])

    def find(self, run: Run) -> dict[str, Any] | None:
        """What is known of a run."""
        key = run.key
        return next((known for known in self.body["runs"] if known["key"] == key), None)

    def good(self, run: Run) -> bool:
        """Whether a run need not be run again."""
        known = self.find(run)
        return known is not None and known["status"] == "ok"

    def add(self, run: Run, ended: RunOutcome, argv: Sequence[str]) -> dict[str, Any]:
        """Keep how a run ended, in place of its last try, and write the file."""
        known = self.find(run)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        record: dict[str, Any] = {
            "key": run.key, "status": "ok" if ended.error is None else "failed", "error": ended.error,
            "tries": 1 + (known["tries"] if known else 0), "date": now, "seconds": round(ended.seconds, 3),
            "command": [meta.without_folders(word) for word in argv], "result": ended.document,
        }  # fmt: skip
        if known is None:
            self.body["runs"].append(record)
        else:
            self.body["runs"][self.body["runs"].index(known)] = record
        self.body["date"] = now
        self.write()
        return record

    def write(self) -> None:
        """Write all of it beside the file, then put it in the file's place."""
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(json.dumps(self.body, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ArgumentError(f"cannot write {str(self.path)!r}: {error.strerror}; give -J a path that can be "
                                "written; what was measured before is still in it") from error  # fmt: skip

    def commits(self, runs: Sequence[Run]) -> list[str]:
        """The commits of good results that are not this one's."""
        if self.body["commit"] is None:
            return []
        good = [known for run in runs if (known := self.find(run)) and known["status"] == "ok"]
        old = [known["result"]["blinkmpi"].get("commit") for known in good]
        return sorted({str(commit)[:12] for commit in old if commit and commit != self.body["commit"]})


def is_sweep(body: Any) -> bool:
    """Whether a JSON document is the results of a sweep."""
    return isinstance(body, dict) and body.get("format") == FORMAT


def read(path: str) -> dict[str, Any]:
    """Read a file of results.

    Raises:
        ArgumentError: for anything else.
    """
    try:
        body = read_json(path)
    except OSError as error:
        raise ArgumentError(f"cannot read {quoted(path)}: {error.strerror}; give results of bench --sweep") from error
    except ValueError as error:
        why = brief(str(error))
        raise ArgumentError(f"{quoted(path)} is no JSON ({why}); move it away, or name another file with -J") from error
    runs = body.get("runs") if is_sweep(body) else None
    if not isinstance(runs, list) or body.get("version") != VERSION or not all(_whole(run) for run in runs):
        raise ArgumentError(
            f"{quoted(path)} holds no results of a sweep (format {FORMAT!r}, version {VERSION}); "
            "name another file with -J"
        )
    return dict(body)


def _whole(run: Any) -> bool:
    ok = isinstance(run, dict) and isinstance(run.get("key"), dict) and {"status", "error", "tries"} <= run.keys()
    if not ok or not isinstance(run["tries"], int):
        return False
    try:
        key = msgspec.convert(run["key"], Run)
    except msgspec.ValidationError:
        return False
    return 1 <= key.nodes <= key.ranks and (run["status"] != "ok" or not why_not(run.get("result")))


def rows(runs: Sequence[Mapping[str, Any]], *, place: str = "out_of_place") -> Iterator[tuple[dict[str, Any], Any]]:
    """(key, row) of every row that was measured with a time."""
    for run in runs:
        if run["status"] == "ok":
            for row in run["result"]["results"]:
                if row["size"] > 0 and "time" in row[place]:
                    yield run["key"], row


def tables(runs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Tables for rich: one for each collective, type and operation; then what failed."""
    from rich.table import Table
    from rich.text import Text

    found: dict[str, Any] = {}
    groups: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for key, row in rows(runs):
        name = " ".join(filter(None, (key["collective"], row["type"], key["op"])))
        groups.setdefault(name, []).append((key, row))
    for name, some in groups.items():
        peers = list(dict.fromkeys(peer for key, _ in some for peer in key["compare"]))
        more = [part for part in ("scheme", "executor", "graph") if len({key[part] for key, _ in some}) > 1]
        table = found[name] = Table(title=f"{name}, out of place", title_justify="left", box=None, pad_edge=False)
        for column in (
            "nodes",
            "ranks",
            *more,
            "size",
            "runs as",
            "time",
            "busbw GB/s",
            *(f"{p} / ours" for p in peers),
        ):
            table.add_column(column, justify="left" if column in (*more, "runs as") else "right", no_wrap=True)
        last = None
        order = sorted(range(len(some)), key=lambda i: (some[i][0]["ranks"], some[i][0]["nodes"]))
        for key, row in (some[i] for i in order):
            compare = row["blinkmpi"]["out_of_place"]["compare"]
            cells = [str(key["virtual"] or key["nodes"]), str(key["ranks"]), *(str(key[part]) for part in more)]
            if last is not None and cells != last:
                table.add_row()
            table.add_row(*cells, size_text(row["size"]), str(row["blinkmpi"].get("scheme")),
                          time_text(row["out_of_place"]["time"] / 1e6), f"{row['out_of_place']['bus_bw']:.3g}",
                          *(f"{compare[p]['ratio']:.2f}" if compare.get(p) else "-" for p in peers))  # fmt: skip
            last = cells
    failed = [Text(f"failed: {_name(run['key'])}: {run['error']}") for run in runs if run["status"] != "ok"]
    return [*found.values(), *failed]


def _name(key: Mapping[str, Any]) -> str:
    where = f"nodes {key['virtual']}" if key["virtual"] else f"{key['nodes']} x {key['ranks'] // key['nodes']} ranks"
    return f"{key['collective']}, {where}, {key['scheme']}"
