"""Ranks agree from which call on a kind is ours: each call is decided alike on all, whatever turns they take."""

import ctypes
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.harness.patience import PATIENCE_S, wait_until

HERE = Path(__file__).parent
DOOR = ROOT / "blinkmpi" / "nccl" / "door"
NCCLS, OURS = 0, 4
KINDS = 5
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 60))]
pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("agreement") / "agreement.so"
    words = ["cc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread", f"-I{DOOR}"]
    subprocess.run([*words, "-o", str(made), str(HERE / "agreement.c")], check=True, timeout=60)
    library = ctypes.CDLL(str(made))
    library.new_world.restype = ctypes.c_void_p
    return library


class World:
    """Ranks, the calls that they made, and who was to make each."""

    def __init__(self, code: ctypes.CDLL, n: int) -> None:
        self.n, self._code, self._at = n, code, ctypes.c_void_p(code.new_world(n))
        self.able = [[1] * KINDS for _ in range(n)]
        self.made: list[list[int]] = [[] for _ in range(n)]

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self._code.free_world(self._at)

    def ask(self, name: str, *words: object) -> int:
        return int(getattr(self._code, name)(self._at, *words))

    def call(self, rank: int, kind: int, *, alone: bool = True) -> int:
        """Make a call, unless it would wait: 1 ours, 0 NCCL's; -2: it would."""
        if kind >= 0 and alone and self.ask("would_wait", rank, kind):
            return -2
        self.made[rank].append(self.ask("take_call", rank, kind, int(alone)))
        return self.made[rank][-1]

    def bind(self, rank: int) -> int:
        return self.ask("bind_next", rank, (ctypes.c_int * KINDS)(*self.able[rank]))

    def settle(self, ranks: Sequence[int]) -> None:
        """Let ranks do all that they can without more calls."""
        for _ in range(64):
            for rank in ranks:
                while self.bind(rank) >= 0:
                    pass
                self.ask("step_rank", rank)

    def state(self, kind: int) -> set[int]:
        return {self.ask("state_of", rank, kind) for rank in range(self.n)}


@pytest.fixture
def two(code: ctypes.CDLL) -> Iterator[World]:
    with World(code, 2) as world:
        yield world


def wanted(seed: int, calls: int) -> list[tuple[int, bool]]:
    """A program: the kind of each call, -1 for what is never ours, and whether it is alone in its group."""
    drawn = random.Random(seed)
    return [(drawn.choice([-1, *range(KINDS)]), drawn.random() < 0.9) for _ in range(calls)]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_call_is_decided_alike_whatever_turns_the_ranks_take(code: ctypes.CDLL, seed: int) -> None:
    drawn, program = random.Random(seed), wanted(seed, 400)
    n = drawn.randint(2, 4)
    cannot = drawn.randrange(-1, KINDS)
    with World(code, n) as world:
        if cannot >= 0:
            world.able[drawn.randrange(n)][cannot] = 0
        paces = [drawn.random() ** 2 + 0.01 for _ in range(n)]
        threads = 0.05 + 0.9 * drawn.random()
        turn = 0
        while any(len(made) < len(program) for made in world.made):
            turn += 1
            assert turn < 200_000, "somebody waits for ever"
            rank = drawn.choices(range(n), paces)[0]
            if drawn.random() < threads:
                drawn.choice([world.bind, lambda rank: world.ask("step_rank", rank)])(rank)
            elif len(world.made[rank]) < len(program):
                kind, alone = program[len(world.made[rank])]
                if (
                    world.call(rank, kind, alone=alone) == 0 and drawn.random() < 0.1
                ):  # NCCL refuses it, and it comes again
                    world.ask("refuse_call", rank)
                    world.made[rank].pop()
        assert all(made == world.made[0] for made in world.made)
        world.settle(range(n))
        for rank in range(n):  # behind the start that was agreed on last, which may lie ahead
            world.ask("make_calls", rank, 1 << 16)
        for kind in range(KINDS):
            made = {world.call(rank, kind) for rank in range(n)}
            assert made == ({0} if kind == cannot else {1})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["die", "leave_world"])
def test_a_rank_that_goes_at_any_moment_leaves_nobody_waiting(code: ctypes.CDLL, how: str, seed: int) -> None:
    drawn, program = random.Random(seed), wanted(seed, 200)
    n = drawn.randint(2, 4)
    lost, after = drawn.randrange(n), drawn.randrange(1500)
    with World(code, n) as world:
        turn = 0
        while any(len(world.made[r]) < len(program) for r in range(n) if r != lost or turn < after):
            turn += 1
            assert turn < 100_000, "somebody waits for ever"
            if turn == after:
                world.ask(how, lost)
            rank = drawn.randrange(n)
            if rank == lost and turn >= after:
                continue
            if drawn.random() < 0.5:
                drawn.choice([world.bind, lambda rank: world.ask("step_rank", rank)])(rank)
            elif len(world.made[rank]) < len(program):
                kind, alone = program[len(world.made[rank])]
                world.call(rank, kind, alone=alone)
        survivors = [made for rank, made in enumerate(world.made) if rank != lost]
        assert all(made == survivors[0] for made in survivors)
        assert world.made[lost] == survivors[0][: len(world.made[lost])]


def test_a_kind_is_nccls_until_all_can_make_it_and_none_has_come_to_the_start(two: World) -> None:
    """One proposal is enough where nobody is in a hurry."""
    assert [two.call(rank, 1) for rank in (0, 1)] == [0, 0]
    two.settle([0])
    assert (two.state(1), two.ask("proposals")) == ({1, 2}, 0), "rank 1 has not bound it"
    two.settle([0, 1])
    assert (two.state(1), two.ask("proposals")) == ({OURS}, 1)
    assert [[two.call(rank, 1) for _ in range(9)] for rank in (0, 1)] == [[0] * 7 + [1] * 2] * 2


def propose(world: World) -> None:
    """Both ranks have bound kind 1, and rank 0 has proposed and said yes."""
    for rank in (0, 1):
        world.call(rank, 1)
        world.bind(rank)
    for _ in range(3):
        world.ask("step_rank", 0)
    assert world.ask("proposals") == 1
    while world.call(0, 1) != -2:
        pass


@pytest.mark.parametrize("beyond", [1, 20])
def test_a_rank_that_has_come_to_the_start_says_no_and_the_next_one_lies_further_ahead(two: World, beyond: int) -> None:
    propose(two)
    while len(two.made[1]) < len(two.made[0]) + beyond:  # rank 0 waits before the start
        assert two.call(1, 1) == 0
    two.settle([0, 1])
    assert (two.state(1), two.ask("proposals")) == ({OURS}, 2)


@pytest.mark.parametrize("ends", ["step_rank", "die", "leave_world"])
def test_a_caller_waits_for_the_outcome_alone(two: World, ends: str) -> None:
    """Of a proposal that the peer answers, or that it can answer no more."""
    propose(two)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(two.ask("take_call", 0, 1, 1)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert not found
    two.ask(ends, 1)
    two.ask("step_rank", 0)
    thread.join(PATIENCE_S)
    assert found == [1 if ends == "step_rank" else 0]


def test_a_caller_that_waits_goes_on_when_its_own_communicator_is_aborted(two: World) -> None:
    propose(two)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(two.ask("take_call", 0, 1, 1)), daemon=True)
    thread.start()
    thread.join(0.05)
    two.ask("leave_world", 0)
    wait_until(lambda: found == [-1], "the caller is told that nobody makes its call")


def test_all_calls_behind_a_window_are_nccls(two: World) -> None:
    """One rank has two calls in a group that is open, which are numbered behind it."""
    for rank in (0, 1):
        two.call(rank, 1)
    two.settle([0, 1])
    two.ask("register_window", 0, 10)
    made = [[two.call(rank, 1) for _ in range(10)] for rank in (0, 1)]
    two.ask("register_window", 1, 0)
    assert made == [[0] * 7 + [1] * 3] * 2
    assert [two.call(rank, 1) for rank in (0, 1)] == [0, 0]


def test_a_rank_that_means_another_kind_makes_none(two: World) -> None:
    """A program that is wrong: its ranks make calls in different orders."""
    two.call(0, 1)
    two.call(1, 2)
    two.settle([0, 1])
    assert two.ask("state_of", 0, 1) == two.ask("state_of", 1, 2) == NCCLS
