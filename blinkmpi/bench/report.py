"""The lines of a benchmark: nccl-tests' rows with our columns to their right, and OMB's rows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..program.call import Call
from .nccl_tests import type_name
from .timing import METHODS, TimingResult

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
PLACES = ("out_of_place", "in_place")


@dataclass(frozen=True, slots=True)
class Row:
    """All that was measured of one call. ``peers`` is None in place of a peer that cannot run the call."""

    call: Call
    ours: tuple[TimingResult, TimingResult]  # out of place, in place
    peers: Mapping[str, tuple[TimingResult, TimingResult] | None]
    how: Mapping[str, Any]
    predicted_s: tuple[float | None, float | None]  # out of place, in place
    bound_s: tuple[float | None, float | None]
    emulated: bool
    finished: str = field(default_factory=lambda: time.strftime(TIME_FORMAT))

    def error(self, place: int) -> float | None:
        """By how much the predicted time exceeds the measured one, as a part of that."""
        predicted, measured = self.predicted_s[place], self.ours[place].time_us
        return None if predicted is None or not measured else predicted * 1e6 / measured - 1

    def bandwidth(self, place: int) -> tuple[float, float]:
        """Algorithm and bus bandwidth in GB/s."""
        algorithm = self.call.nbytes / max(self.ours[place].time_us, 1e-9) / 1e3
        return algorithm, algorithm * self.call.bus_factor


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns stand to the right of nccl-tests' own."""

    peers: tuple[str, ...] = ()
    executor: bool = False
    predict: bool = False
    protocol: bool = False
    emulated: bool = False
    timestamps: bool = False
    cpu_time: bool = False

    @property
    def columns(self) -> list[tuple[int, str, str]]:
        """Width, name and unit of every column."""
        found = [(12, "size", "(B)"), (12, "count", "(elements)"), (8, "type", ""), (6, "redop", ""), (6, "root", "")]
        time = "cputime" if self.cpu_time else "time"
        found += [(7, time, "(us)"), (6, "algbw", "(GB/s)"), (6, "busbw", "(GB/s)"), (6, "#wrong", "")] * len(PLACES)
        for peer in self.peers:
            found += [(8, peer, "(us)"), (6, "ratio", "")] * len(PLACES)
        found += (
            [*[(8, "pred", "(us)"), (6, "error", "(%)")] * len(PLACES), (8, "bound", "(us)")] if self.predict else []
        )
        found += [(8, "executor", "")] if self.executor else []
        found += [(8, "protocol", ""), (4, "ctas", "")] if self.protocol else []
        found += [(8, "emulated", "")] if self.emulated else []
        return found + ([(19, "timestamp", "")] if self.timestamps else [])

    def _line(self, cells: Sequence[str]) -> str:
        return "  ".join(f"{cell:>{width}}" for (width, _, _), cell in zip(self.columns, cells, strict=True))

    def header(self) -> list[str]:
        """nccl-tests' three header lines, with ours to the right."""
        groups = "#" + " " * 62 + "out-of-place                       in-place          "
        groups += f"{'out-of-place':>18}{'in-place':>18}" * (len(self.peers) + self.predict)
        names, units = (self._line(texts) for texts in list(zip(*self.columns, strict=True))[1:])
        return ["#", groups, f"#{names[1:]}", f"#{units[1:]}"]

    def row(self, row: Row) -> str:
        """One line."""
        call = row.call
        cells = [str(call.nbytes), str(call.counts[0]), type_name(call.dtype), call.op or "none", str(call.root)]
        for place, ours in enumerate(row.ours):
            algorithm, bus = row.bandwidth(place)
            wrong = "N/A" if ours.wrong is None else f"{ours.wrong:6g}"
            cells += [number(ours.time_us, 7), number(algorithm, 6), number(bus, 6), wrong]
        for peer in self.peers:
            measured = row.peers[peer]
            for place, ours in enumerate(row.ours):
                theirs = None if measured is None else measured[place].time_us
                ratio = None if theirs is None else theirs / max(ours.time_us, 1e-9)
                cells += [_or_not(theirs, 8), _or_not(ratio, 6)]
        if self.predict:
            for place, seconds in enumerate(row.predicted_s):
                error = row.error(place)
                cells += [_or_not(_us(seconds), 8), "N/A" if error is None else f"{100 * error:+.1f}"]
            cells.append(_or_not(_us(row.bound_s[0]), 8))
        cells += [row.how.get("executor") or "-"] if self.executor else []
        cells += [str(row.how.get(key) or "-") for key in ("protocol", "ctas")] if self.protocol else []
        cells += ["emulated"] if self.emulated else []
        return self._line([*cells, *([row.finished] if self.timestamps else [])])


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _or_not(value: float | None, width: int) -> str:
    return "N/A" if value is None else number(value, width)


def number(value: float, width: int) -> str:
    """``value`` in ``width`` characters, with as many decimals as fit, as nccl-tests writes it."""
    digits = 0 if value < 1 else len(str(int(value)))
    decimals = 2 if digits < width - 2 else 1 if digits < width - 1 else 0
    if digits <= width:
        return f"{value:{width}.{decimals}f}"
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def omb_header(collective: str, peers: Sequence[str]) -> list[str]:
    """OMB's title and column names."""
    extra = "".join(f"{peer + ' Latency(us)':>20}{'Ratio':>12}" for peer in peers)
    names = f"{'# Size':<10}{'Avg Latency(us)':>20}{'Min Latency(us)':>20}{'Max Latency(us)':>20}{'Iterations':>12}"
    return [
        f"# blinkmpi {METHODS[collective].removesuffix('_block')} Latency Test",
        f"{names}{'Validation':>20}{extra}",
    ]


def omb_row(row: Row, peers: Sequence[str]) -> str:
    """OMB's line: mean over the iterations out of place, then average, minimum, maximum over the ranks."""
    ours = row.ours[0]
    ranks = ours.by_rank_us
    text = f"{row.call.nbytes:<10d}{sum(ranks) / len(ranks):20.2f}{min(ranks):20.2f}{max(ranks):20.2f}"
    validation = "-" if ours.wrong is None else "Fail" if ours.wrong or row.ours[1].wrong else "Pass"
    text += f"{ours.iterations:12d}{validation:>20}"
    for peer in peers:
        measured = row.peers[peer]
        if measured is None:
            text += f"{'N/A':>20}{'N/A':>12}"
        else:
            theirs = measured[0]
            mean = sum(theirs.by_rank_us) / len(ranks)
            text += f"{mean:20.2f}{theirs.time_us / max(ours.time_us, 1e-9):12.2f}"
    return text
