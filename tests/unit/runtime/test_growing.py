"""What is asked of ``grow``, as pure data."""

import sys

import pytest

from blinkmpi.errors import ArgumentError, FormatError
from blinkmpi.runtime.growing.wanted import Shared, command_of, encoded, number_of, options_of


def test_new_ranks_run_this_program_unless_another_is_named() -> None:
    assert command_of(None) == [sys.executable, *sys.orig_argv[1:]]
    assert command_of([sys.executable, "worker.py"]) == [sys.executable, "worker.py"]


@pytest.mark.parametrize("command", ["python", [], [1], ["no-such-program"]])
def test_what_is_no_command_line_is_refused(command: object) -> None:
    with pytest.raises(ArgumentError, match="command="):
        command_of(command)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1, 1.5, "one", None])
def test_what_is_no_number_of_ranks_is_refused(n: object) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        number_of(n)


def test_newcomers_take_over_the_arguments_that_hold_for_any_number_of_ranks() -> None:
    options = options_of(encoded(Shared(2.5, True, False, "numpy", "allreduce:mpi", 8, "current", "operand")))
    assert (options.timeout_s, options.strict, options.deterministic) == (2.5, True, False)
    assert (options.executor, options.algo, options.max_ctas) == ("numpy", "allreduce:mpi", 8)
    assert (options.stream, options.wire) == ("current", "operand")
    assert (options.topology, options.plan, options.algorithms) == (None, None, ())


def test_what_is_no_message_of_ours_is_told() -> None:
    with pytest.raises(FormatError, match="a rank of the communicator that grows"):
        options_of(b"something else")
