"""Numbers of the job's processes: those that come later get free ones, on every process the same."""

from mpi4py import MPI

from blinkmpi.transport.network import job_numbers
from blinkmpi.transport.network.job_numbers import next_numbers, numbers_of


def test_who_has_a_number_keeps_it_and_the_others_get_the_next_that_nobody_knows() -> None:
    assert next_numbers([(0, 1), (1, 1), (-1, -1), (-2, -1)]) == (0, 1, 2, 3)
    assert next_numbers([(0, 4), (2, 2), (-1, -1)]) == (0, 2, 5), "4 is that of one that has gone"
    assert next_numbers([(3, 3), (-1, -1), (1, 3)]) == (3, 4, 1)


def test_a_process_that_the_launcher_started_has_its_rank() -> None:
    assert numbers_of(MPI.COMM_SELF) == [MPI.COMM_WORLD.rank]
    assert job_numbers.own_number() == MPI.COMM_WORLD.rank
    assert job_numbers.highest() == MPI.COMM_WORLD.size - 1
