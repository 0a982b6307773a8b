"""The JSON of a benchmark: nccl-tests' keys, and ours under ``blinkmpi``.

Scripts that read nccl-tests' files read these too. Two habits of theirs are
not kept: the file never holds the whole environment, and booleans are booleans.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ..util.text import parse_size
from . import environment as meta
from .nccl_tests import type_name
from .options import BenchOptions
from .report import PLACES, TIME_FORMAT, Row
from .timing import TimingResult

JSON_VERSION = 3  # of nccl-tests' keys
_RANKS = ("rank 0's", "the average rank's", "the fastest rank's", "the slowest rank's")
# The names that keys, protocols and flags had in files of older versions.
_KEYS = {"runner": "executor", "runners": "executors"}
_PROTOCOLS = {"oneshot": "ll16_one_shot", "twoshot": "ll16_two_shot", "oneshot128": "ll128_one_shot",
             "twoshot128": "ll128_two_shot", "halves": "rs_ag"}  # fmt: skip


def document(
    args: argparse.Namespace, options: BenchOptions, rows: Sequence[tuple[Row, str]], *,
    devices: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], versions: Mapping[str, Any],
    verdict: tuple[int, float, bool | None], started: datetime, peak_resident_bytes: int, setup: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The whole file.

    Args:
        rows: each with its experiment's name.
        verdict: wrong elements, average bus bandwidth, whether that is enough (None: not asked).
        setup: where the buffers are, and the facts of GPUs and peers.
    """
    sizes, timing = options.sizes, options.timing
    wrong, average, fast = verdict
    step = {"step_factor": args.stepfactor} if args.stepfactor > 1 else {"step_bytes": parse_size(args.stepbytes)}
    return {
        "version": JSON_VERSION,
        "start_time": started.strftime(TIME_FORMAT),
        "args": [meta.without_folders(word) for word in sys.argv],
        "env": meta.environment(),
        "nccl_version": setup.get("peers", {}).get("nccl", {}).get("version"),
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": sizes[0],
            "maximum_bytes": sizes[-1],
            **step,
            "warmup_iters": timing.warmup,
            "iterations": timing.iterations if setup["memory"] == "gpu" else timing.wanted,  # null: by size
            "aggregated_iterations": timing.aggregate,
            "validation": timing.checks,
            "graph": timing.replays,
            "blocking_collectives": bool(args.blocking),
            "parallel_init": False,
            "devices": list(devices),
        },
        "results": [row_json(row, name, options, every=bool(args.per_iter_timing)) for row, name in rows],
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": {"bandwidth": average, "okay": "unchecked" if fast is None else fast},
        "errors": [],
        "end_time": time.strftime(TIME_FORMAT),
        "blinkmpi": {
            **meta.commit(),
            "date": started.isoformat(timespec="seconds"),
            "collective": options.collective,
            "ranks": len(devices),
            "machine": dict(machine),
            "compare": list(options.peers),
            **setup,
            "executors": list(options.executors),
            "algo": args.algo,
            "statistic": statistic(timing.average, gpu=setup["memory"] == "gpu"),
            "hardware": meta.hardware(),
            "hostnames": sorted({str(device["hostname"]) for device in devices}),
            "versions": dict(versions),
            "peak_resident_bytes": peak_resident_bytes,
        },
    }


def statistic(average: int | None, *, gpu: bool = False) -> str:
    """What ``time`` is, in words."""
    over = "repeats of many calls each" if gpu else "iterations"
    if average is None:
        return f"median over {over} of the slowest rank's time"
    return f"{_RANKS[average]} mean over {over}"


def write_new(path: str, text: str) -> str:
    """Write ``text`` to ``path``, or where that exists to ``path.0``, ``path.1``, ...; give the name taken."""
    name, numbers = path, itertools.count()
    while True:
        try:
            with open(name, "x", encoding="utf-8") as file:
                file.write(text + "\n")
            return name
        except FileExistsError:
            name = f"{path}.{next(numbers)}"


def row_json(row: Row, name: str, options: BenchOptions, *, every: bool) -> dict[str, Any]:
    """nccl-tests' result object, ours under ``blinkmpi``.

    Args:
        every: whether every iteration's time is written, not only minimum, median, maximum.
    """
    call = row.call
    result: dict[str, Any] = {
        "size": call.nbytes,
        "count": call.counts[0],
        "type": type_name(call.dtype),
        "redop": call.op or "none",
        "root": call.root,
    }
    own: dict[str, Any] = {
        **{key: row.how.get(key) for key in ("scheme", "executor", "chunk_bytes", "reason")},
        **{key: row.how[key] for key in ("protocol", "ctas") if key in row.how},
        "emulated": row.emulated,
        "predicted_us": None if row.predicted_s[0] is None else row.predicted_s[0] * 1e6,
        "bound_us": None if row.bound_s[0] is None else row.bound_s[0] * 1e6,
    }
    for place, (key, ours) in enumerate(zip(PLACES, row.ours, strict=True)):
        algorithm, bus = row.bandwidth(place)
        clock = "cpu_time" if options.timing.cpu_time else "time"
        result[key] = {clock: ours.time_us, "alg_bw": algorithm, "bus_bw": bus, "nwrong": ours.wrong}
        compare: dict[str, Any] = dict.fromkeys(row.peers)
        for peer, measured in row.peers.items():
            if measured is not None:
                theirs = measured[place]
                ratio = theirs.time_us / max(ours.time_us, 1e-9)
                compare[peer] = {"time": theirs.time_us, "ratio": ratio, "nwrong": theirs.wrong}
                compare[peer] |= _times(theirs, every)
        own[key] = {"iterations": ours.iterations, **_times(ours, every), "compare": compare}
        predicted = row.predicted_s[place]
        if predicted is not None:
            bound = row.bound_s[place]
            own[key] |= {"predicted_us": predicted * 1e6, "error": row.error(place)}
            own[key]["bound_us"] = None if bound is None else bound * 1e6
    result |= {"actual_iterations": row.ours[0].iterations, "experiment_name": name, "blinkmpi": own}
    return result


def _times(measured: TimingResult, every: bool) -> dict[str, Any]:
    more: dict[str, Any] = {"iteration_times_us": list(measured.slowest_us)} if every else {}
    if measured.host_us is not None:
        more |= {"host_us": measured.host_us, "repeats": len(measured.slowest_us)}
    if measured.note is not None:
        more["variant"] = measured.note
    if measured.wrong_elements:
        more["wrong_elements"] = [asdict(element) for element in measured.wrong_elements]
    return {"times_us": dict(zip(("min", "median", "max"), measured.spread, strict=True)), **more}


def with_current_names(body: Any) -> Any:
    """A copy of a JSON document with today's names; the environment that it quotes stays as it was."""
    if isinstance(body, list):
        return [with_current_names(item) for item in body]
    if not isinstance(body, dict):
        return body
    found: dict[str, Any] = {_KEYS.get(str(key), str(key)): with_current_names(value) for key, value in body.items()}
    if isinstance(words := found.get("args"), list):
        found["args"] = ["--executor" if word == "--runner" else word for word in words]
    if isinstance(name := found.get("protocol"), str):
        found["protocol"] = _PROTOCOLS.get(name, name)
    if isinstance(name := found.get("executor"), str):
        found["executor"] = name.replace("C runner", "C executor")
    return found
