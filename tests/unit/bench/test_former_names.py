"""Results of older versions are read by today's names."""

from __future__ import annotations

from blinkmpi.bench.document import with_current_names


def test_keys_executors_protocols_and_flags_are_mapped_and_nothing_else() -> None:
    old = {
        "args": ["blinkmpi", "bench", "--runner", "c"],
        "env": ["BLINKMPI_RUNNER=c"],
        "results": [{"size": 1024, "blinkmpi": {"runner": "c", "protocol": "oneshot128", "scheme": "onehop"}}],
        "blinkmpi": {"runners": ["c"], "versions": {"runner": "C runner, compiled by cc 12"}},
    }
    assert with_current_names(old) == {
        "args": ["blinkmpi", "bench", "--executor", "c"],
        "env": ["BLINKMPI_RUNNER=c"],
        "results": [{"size": 1024, "blinkmpi": {"executor": "c", "protocol": "ll128_one_shot", "scheme": "onehop"}}],
        "blinkmpi": {"executors": ["c"], "versions": {"executor": "C executor, compiled by cc 12"}},
    }
    assert "runner" in old["results"][0]["blinkmpi"], "the document itself stays as it is"  # type: ignore[index]


def test_names_of_today_stay() -> None:
    new = {"protocol": "direct", "executor": "numpy", "counts": [1, 2.5, None, True]}
    assert with_current_names(new) == new
