"""The order of memory in ``direct`` and in gates before it, executed: step by step, each store late at random.

Ranks take turns in random order. Only a fence orders the stores of a rank: it waits until all of them have arrived,
those of the stream before the kernel too. The rules of docs/gpu_internals.md are taken away one by one, and each time
some rank takes or leaves wrong data.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

CALLS = 12
RULES = frozenset({
    "fence before the announcement", "fence in the gate", "references have numbers", "fence before the end", "the end",
})  # fmt: skip
Address = tuple[object, ...]  # what it is; then whose word of it, or its place


class Wrong(Exception):
    """A rank has taken or left data of another call."""


@dataclass
class Machine:
    """The memory of some ranks, and the stores that are on their way: (who stores, where, what)."""

    n: int
    rng: np.random.Generator
    memory: list[dict[Address, int]] = field(default_factory=list)
    travelling: list[tuple[int, tuple[int, Address], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = [{} for _ in range(self.n)]

    def store(self, by: int, rank: int, address: Address, value: int) -> None:
        self.travelling.append((by, (rank, address), value))

    def load(self, rank: int, address: Address) -> int:
        return self.memory[rank].get(address, 0)

    def arrive(self) -> None:
        """One of the stores arrives; of those to one address the first."""
        _, where, _ = self.travelling[int(self.rng.integers(len(self.travelling)))]
        first = next(i for i, (_, to, _) in enumerate(self.travelling) if to == where)
        _, (rank, address), value = self.travelling.pop(first)
        self.memory[rank][address] = value

    def fence(self, by: int) -> Iterator[None]:
        """Wait until all that a rank has stored has arrived."""
        while any(who == by for who, *_ in self.travelling):
            yield


def rank_of(machine: Machine, me: int, rules: frozenset[str]) -> Iterator[None]:
    """All calls of one rank: everybody gets what all the others send, from and at places that change.

    Every third call has a gate, a kernel before its own, which announces the call, too, and waits for all ranks.
    """
    peers, numbered = [r for r in range(machine.n) if r != me], "references have numbers" in rules

    def announce(call: int, refs: tuple[int, int]) -> Iterator[None]:
        for peer in peers:
            machine.store(me, peer, ("announced", me), call)
            for name, ref in zip(("send", "recv"), refs, strict=True):
                machine.store(me, peer, (name, me), call * numbered << 8 | ref)
            yield

    for call in range(1, CALLS + 1):
        send, recv = call * (me + 2) % 3, call % 2  # registered buffers
        machine.store(me, me, ("buffer", send), call)  # by the stream, before the kernel
        yield
        if call % 3 == 0:
            if "fence in the gate" in rules:
                yield from machine.fence(me)
            yield from announce(call, (send, recv))
            for peer in peers:
                while machine.load(me, ("announced", peer)) < call:
                    yield
        if "fence before the announcement" in rules:
            yield from machine.fence(me)
        yield from announce(call, (send, recv))
        for peer in peers:
            while machine.load(me, ("announced", peer)) < call:
                yield
            refs = {}
            for name in ("send", "recv"):
                while (word := machine.load(me, (name, peer))) >> 8 != call * numbered:
                    yield
                refs[name] = word & 255
            yield
            if (got := machine.load(peer, ("buffer", refs["send"]))) != call:
                raise Wrong(f"rank {me} took what rank {peer} sent in call {got} in call {call}")
            machine.store(me, peer, ("result", refs["recv"], me), call)
        if "fence before the end" in rules:
            yield from machine.fence(me)
        for peer in peers:
            machine.store(me, peer, ("finished", me), call)
        yield
        for peer in peers if "the end" in rules else ():
            while machine.load(me, ("finished", peer)) < call:
                yield
        for peer in peers:
            if (got := machine.load(me, ("result", recv, peer))) != call:
                raise Wrong(f"rank {me} ended call {call} with what rank {peer} stored in call {got}")


def execute(machine: Machine, rules: frozenset[str]) -> str:
    """Run all ranks to their end; what went wrong, or nothing."""
    ranks = {r: rank_of(machine, r, rules) for r in range(machine.n)}
    idle = 0
    speed = machine.rng.dirichlet(np.full(machine.n + 1, 0.4))  # of the ranks and of the stores: some are far behind
    while ranks:
        who = int(machine.rng.choice(machine.n + 1, p=speed))
        if machine.rng.random() < 0.02:
            speed = machine.rng.dirichlet(np.full(machine.n + 1, 0.4))
        idle += 1
        if who in ranks:
            try:
                next(ranks[who])
            except StopIteration:
                del ranks[who]
                idle = 0
            except Wrong as wrong:
                return str(wrong)
        elif machine.travelling:
            machine.arrive()
            idle = 0
        if idle > 20_000:
            return f"ranks {sorted(ranks)} wait for ever"
    return ""


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_rank_takes_and_leaves_what_is_of_this_call(n: int, rng: np.random.Generator) -> None:
    for _ in range(24 // n):
        assert not execute(Machine(n, rng), RULES)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_a_rule_some_rank_does_not(rule: str, rng: np.random.Generator) -> None:
    assert any(execute(Machine(3, rng), RULES - {rule}) for _ in range(20))
