"""torchrun on two hosts: MPICH's world of its ranks, what a rank's end does, and what cannot be."""

from collections.abc import Iterator

import pytest

from tests.conformance import COLLECTIVES
from tests.harness import PATIENCE_S, other_mpi
from tests.hosts.agents import PORT, Agents, Ended
from tests.hosts.world import World

pytest.importorskip("torch")
pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.mpi_skip]
TIMEOUT_S = 100.0
TWO = (2, 2)


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables with which mpi4py takes MPICH's wheel."""
    return other_mpi("mpich", tmp_path_factory.mktemp("mpich"))


@pytest.fixture
def world() -> Iterator[World]:
    """Two hosts."""
    with World(2) as world:
        yield world


def run(world: World, layout: tuple[int, ...], *program: str, **arguments: object) -> Ended:
    """Run a function of ``torch_program.py`` to its end, which leaves nothing on any host."""
    argv = ["-m", "tests.hosts.torch_program", str(TIMEOUT_S), *program]
    with Agents(world, layout, argv, **arguments) as job:  # type: ignore[arg-type]
        ended = job.wait(TIMEOUT_S)
        assert not job.left(), ended.output
    return ended


def lines(ended: Ended, beginning: str) -> list[str]:
    return sorted(line for line in ended.output.splitlines() if line.startswith(beginning))


def losses(ended: Ended) -> dict[str, float]:
    """The loss of each rank and step."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines(ended, "loss")}


@pytest.mark.parametrize("layout", [TWO, (3, 1)])
def test_ddp_has_the_losses_of_gloo(world: World, mpich: dict[str, str], layout: tuple[int, ...]) -> None:
    ours, theirs = (run(world, layout, "train", backend, env=mpich) for backend in ("blink", "gloo"))
    assert (ours.statuses, theirs.statuses) == ([0, 0], [0, 0]), ours.output + theirs.output
    assert len(losses(ours)) == 8 * 4
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)  # sums are made in another order


def test_groups_messages_and_a_second_default_group(world: World, mpich: dict[str, str]) -> None:
    ended = run(world, TWO, "groups", env=mpich)
    assert ended.statuses == [0, 0], ended.output
    assert len(lines(ended, "groups are right")) == 4, ended.output


def test_all_collectives_conform(world: World, mpich: dict[str, str]) -> None:
    ended = run(world, TWO, "conform", *COLLECTIVES, env=mpich)
    assert ended.statuses == [0, 0], ended.output
    assert len(lines(ended, "conforms")) == 4, ended.output


@pytest.mark.parametrize(("how", "victim", "why"), [
    ("killed", 3, "rank 3 on host1 ended before MPI_Finalize"),
    ("killed", 0, "rank 0 on host0 ended before MPI_Finalize"),
    ("exits", 1, "rank 1 on host0 ended before MPI_Finalize"),
    ("raises", 2, "rank 2 on host1 aborted the job, exit status 1"),
])  # fmt: skip
def test_a_rank_that_ends_ends_all_and_leaves_nothing(
    world: World, mpich: dict[str, str], how: str, victim: int, why: str
) -> None:
    ended = run(world, TWO, "ends", how, str(victim), env=mpich)
    began = float(lines(ended, "ends at")[0].removeprefix("ends at "))
    assert ended.at - began < PATIENCE_S, ended.output
    assert 0 not in ended.statuses, ended.output
    assert why in ended.output or how == "raises", ended.output
    assert "this rank has had enough" in ended.output or how != "raises", ended.output


def test_a_host_without_power_ends_the_ranks_of_the_other(world: World, mpich: dict[str, str]) -> None:
    """It closes no connection: the server asks for it."""
    argv = ["-m", "tests.hosts.torch_program", str(2 * TIMEOUT_S), "ends", "never", "-1"]
    with Agents(world, (1, 1), argv, env=mpich) as job:
        job.wait_for("ready", 2, TIMEOUT_S)
        world.kill("host1")
        ended = job.wait(TIMEOUT_S)
    assert "this rank ends, for its job does: rank 1 on host1 ended before MPI_Finalize" in ended.output


@pytest.mark.parametrize("victim", [0, 3])
def test_torchrun_starts_the_ranks_of_both_hosts_again(world: World, mpich: dict[str, str], victim: int) -> None:
    ended = run(world, TWO, "restarted", str(victim), env=mpich, options=["--max-restarts", "1"])
    assert ended.statuses == [0, 0], ended.output
    assert lines(ended, "came back") == [f"came back {rank}" for rank in range(4)], ended.output


def test_two_agents_on_one_machine_are_one_node(world: World) -> None:
    """By whatever MPI: it connects nobody there."""
    ended = run(world, TWO, "one_machine", hosts=["host0", "host0"])
    assert ended.statuses == [0, 0], ended.output
    assert lines(ended, "rank") == [
        f"rank {rank} of 4, {rank % 2} of 2 of its agent: StoreCommunicator" for rank in range(4)
    ]


def test_two_agents_on_one_machine_and_one_on_another(world: World, mpich: dict[str, str]) -> None:
    ended = run(world, (1, 1, 2), "one_machine", env=mpich, hosts=["host0", "host0", "host1"])
    assert ended.statuses == [0, 0, 0], ended.output
    assert len(lines(ended, "rank")) == 4
    assert all(line.endswith("Communicator") and "Store" not in line for line in lines(ended, "rank")), ended.output


REFUSED = [
    ("imports", True, "has imported mpi4py's MPI before init_process_group"),
    ("nothing", False, "and MPICH alone starts without a launcher of its own; pip install 'blinkmpi[mpich]'"),
]


@pytest.mark.parametrize(("first", "by_mpich", "why"), REFUSED)
def test_what_cannot_be_is_said_with_its_remedy(
    world: World, mpich: dict[str, str], first: str, by_mpich: bool, why: str
) -> None:
    ended = run(world, TWO, "refused", first, env=mpich if by_mpich else {})
    assert ended.statuses == [0, 0], ended.output
    said = lines(ended, "TopologyError: rank 2 on host1 shares no memory with rank 0 on host0")
    assert len(said) == 4, ended.output
    assert all(why in line and "start the job with mpirun or srun" in line for line in said)


def test_ranks_that_reach_the_store_and_not_the_server_say_so(world: World, mpich: dict[str, str]) -> None:
    for ports in (f"1024-{PORT - 1}", f"{PORT + 1}-65534"):
        world.do("host1", "ip", "rule", "add", "to", "10.77.0.1", "ipproto", "tcp", "dport", ports, "prohibit")
    ended = run(world, TWO, "refused", "ports", env=mpich, static=True)
    there = lines(ended, "TopologyError: rank")
    assert len(there) == 2, ended.output
    assert all("reaches the store, but not rank 0's host on port" in line for line in there)
    assert all("let the hosts of the job connect to each other on every port" in line for line in there)
    assert len(lines(ended, "RemoteError: rank 2 failed (so did ranks [3])")) == 2, ended.output
