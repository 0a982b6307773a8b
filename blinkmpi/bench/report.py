"""The lines of a benchmark: nccl-tests' rows with our columns to their right, and OMB's rows."""

from __future__ import annotations

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
    predicted_s: float | None
    bound_s: float | None
    emulated: bool
    finished: str = field(default_factory=lambda: time.strftime(TIME_FORMAT))

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

    def header(self) -> list[str]:
        """nccl-tests' three header lines, with ours to the right."""
        label = "cputime" if self.cpu_time else "time"
        blank = _cells((12, 12, 8, 6, 6), "", "", "", "", "")
        groups = "#" + blank[1:] + "           out-of-place                       in-place          "
        names = "#" + _cells((12, 12, 8, 6, 6), "size", "count", "type", "redop", "root")[1:]
        units = "#" + _cells((12, 12, 8, 6, 6), "(B)", "(elements)", "", "", "")[1:]
        for _ in PLACES:
            names += "  " + _cells((7, 6, 6, 6), label, "algbw", "busbw", "#wrong")
            units += "  " + _cells((7, 6, 6, 6), "(us)", "(GB/s)", "(GB/s)", "")
        for peer in self.peers:
            groups += f"{'out-of-place':>18}{'in-place':>18}"
            for _ in PLACES:
                names += "  " + _cells((8, 6), peer, "ratio")
                units += "  " + _cells((8, 6), "(us)", "")
        if self.predict:
            names += "  " + _cells((8, 8), "pred", "bound")
            units += "  " + _cells((8, 8), "(us)", "(us)")
        if self.executor:
            names += f"  {'executor':>8}"
        if self.protocol:
            names += "  " + _cells((8, 4), "protocol", "ctas")
            units += "  " + _cells((8, 4), "", "")
        if self.emulated:
            names += "  emulated"
        if self.timestamps:
            names += f"{'timestamp':>21}"
        return ["#", groups, names, units]

    def row(self, row: Row) -> str:
        """One line."""
        call = row.call
        text = f"{call.nbytes:12d}  {call.counts[0]:12d}  {type_name(call.dtype):>8}  {call.op or 'none':>6}"
        text += f"  {call.root:6d}"
        for place, ours in enumerate(row.ours):
            algorithm, bus = row.bandwidth(place)
            wrong = "   N/A" if ours.wrong is None else f"{ours.wrong:6g}"
            text += f"  {number(ours.time_us, 7)}  {number(algorithm, 6)}  {number(bus, 6)}  {wrong}"
        for peer in self.peers:
            measured = row.peers[peer]
            for place, ours in enumerate(row.ours):
                if measured is None:
                    text += f"  {'N/A':>8}  {'N/A':>6}"
                else:
                    theirs = measured[place].time_us
                    text += f"  {number(theirs, 8)}  {number(theirs / max(ours.time_us, 1e-9), 6)}"
        if self.predict:
            for seconds in (row.predicted_s, row.bound_s):
                text += "  " + ("     N/A" if seconds is None else number(seconds * 1e6, 8))
        if self.executor:
            text += f"  {row.how.get('executor') or '-':>8}"
        if self.protocol:
            text += "  " + _cells((8, 4), *(str(row.how.get(key) or "-") for key in ("protocol", "ctas")))
        if self.emulated:
            text += "  emulated"
        if self.timestamps:
            text += f"{row.finished:>21}"
        return text


def _cells(widths: Sequence[int], *texts: str) -> str:
    return "  ".join(f"{text:>{width}}" for width, text in zip(widths, texts, strict=True))


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
