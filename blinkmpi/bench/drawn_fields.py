"""What pictures and tables read of the results of ``bench``, with its types; the files have more."""

from typing import Any

import msgspec

MOST = 1e18  # bytes, microseconds, GB/s


class TimeSpread(msgspec.Struct):
    """Microseconds of the fastest and the slowest iteration."""

    min: float
    max: float


class PeerTime(msgspec.Struct):
    """What another library needed."""

    time: float
    ratio: float
    times_us: TimeSpread


class OurTime(msgspec.Struct):
    """What stands beside our own time."""

    times_us: TimeSpread
    compare: dict[str, PeerTime | None]


class PlaceTime(msgspec.Struct):
    """nccl-tests' own numbers of a row; without a time where it was not measured."""

    bus_bw: float = 0.0
    time: float | msgspec.UnsetType = msgspec.UNSET


class RowFacts(msgspec.Struct):
    """Our part of a row."""

    out_of_place: OurTime | None = None
    in_place: OurTime | None = None


class ResultRow(msgspec.Struct):
    """A row."""

    size: int
    type: str
    redop: str
    root: int
    experiment_name: str
    out_of_place: PlaceTime
    in_place: PlaceTime
    blinkmpi: RowFacts


class JobFacts(msgspec.Struct):
    """Our part of a file."""

    ranks: int
    compare: list[str] | None = None
    date: str | None = None
    commit: str | None = None
    gpu: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None


class DrawnResult(msgspec.Struct):
    """A file."""

    results: list[ResultRow]
    blinkmpi: JobFacts
    config: dict[str, Any]


def why_not(document: Any) -> str:
    """Why a document is no result of ``bench`` that can be drawn; empty if it is one."""
    try:
        found = msgspec.convert(document, DrawnResult)
    except msgspec.ValidationError as error:
        return str(error)
    for i, row in enumerate(found.results):
        for name in ("out_of_place", "in_place"):
            place, ours = getattr(row, name), getattr(row.blinkmpi, name)
            if place.time is msgspec.UNSET or row.size <= 0:
                continue
            peers = [peer for peer in ours.compare.values() if peer] if ours else []
            numbers = [place.time, *(number for peer in peers for number in (peer.time, peer.ratio))]
            for spread in [ours.times_us, *(peer.times_us for peer in peers)] if ours else []:
                numbers += [spread.min, spread.max]
            good = all(0 < number < MOST for number in numbers) and 0 <= place.bus_bw < MOST
            if ours is None or not good or row.size > MOST:
                return f"a time, ratio or bandwidth of results[{i}].{name} is missing or no number above 0"
    return ""
