"""Predictions on GPUs beside the committed measurements, and the fit of their parameters."""

from functools import cache
from statistics import median

import pytest

from benchmarks import gpu_certainty as certainty
from blinkmpi.planning.gpus.kernel_times import H200


@cache
def rows() -> list[certainty.Measurement]:
    return [row for row in certainty.measurements() if row.call.nbytes >= certainty.FROM and not row.by_host]


def test_every_file_of_calls_between_gpus_is_read() -> None:
    files = {row.file for row in certainty.measurements()}
    there = {
        path.stem for path in certainty.RESULTS.glob("*-gpu-*.json") if path.name.startswith(certainty.COLLECTIVES)
    }
    assert files == there
    assert len(files) > 20


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
def test_long_vectors_that_were_not_fitted_are_hit(collective: str) -> None:
    """Nine of ten within a tenth, all within 15 %, on two GPUs and on four, of either type."""
    ours = [row for row in rows() if row.collective == collective and not certainty.calibration(row)]
    errors = [abs(certainty.error(row)) for row in ours]
    assert {(row.call.n, row.call.dtype) for row in ours} == {
        (n, dtype) for n in (2, 4) for dtype in ("float32", "bfloat16")
    }
    assert sum(error <= certainty.WITHIN for error in errors) >= 0.9 * len(errors)
    assert max(errors) < 0.15
    assert median(errors) < 0.06


def test_the_parameters_are_those_of_the_fit() -> None:
    found = certainty.fit()
    for name in ("launch_s", "hop_s", "line_s", "exchange", "exchange_long", "wire", "back", "cta_bytes_s",
                 "copy_bytes_s", "direct_hops", "slots_hops", "gap_s"):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(H200, name), rel=0.02), name
