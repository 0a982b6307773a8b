"""The part of a program that one node executes (Blink section 3.5): pure, and the same for all ranks of the node.

A channel that leads to another node becomes a channel of the rank that has its end here, which both writes and reads
it. The messages that carry the chunks to the other end take the place of the missing rank, so an executor sees
nothing but channels of its node.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..errors import PlanError
from .ir import Channel, Program


class RemoteEnd(NamedTuple):
    """The other end of a channel between nodes: its rank, and the channel's number in the whole program."""

    rank: int
    channel: int


class NodePart(NamedTuple):
    """The stages and channels of one node.

    ``far`` are the channels, by their number here, that lead to other nodes; ``numbers`` are those of the whole.
    """

    program: Program
    far: dict[int, RemoteEnd]
    numbers: tuple[int, ...]


def part_of(program: Program, here: Sequence[int], names: Sequence[int] = ()) -> NodePart:
    """What the ranks ``here`` execute of a program.

    Args:
        names: what these ranks are called in the part; their own numbers, if not given.

    Raises:
        PlanError: if a channel with several readers leads to another node.
    """
    name = dict(zip(here, names or here, strict=True))
    channels: list[Channel] = []
    numbers: list[int] = []
    far: dict[int, RemoteEnd] = {}
    for c, channel in enumerate(program.channels):
        ends = (channel.writer, *channel.readers)
        near = [r for r in ends if r in name]
        if not near:
            continue
        if len(near) < len(ends):
            if len(ends) > 2:
                raise PlanError(f"channel {c} leads from rank {ends[0]} to {ends[1:]} on several nodes; plan again")
            far[len(channels)] = RemoteEnd(next(r for r in ends if r not in name), c)
        readers = tuple(name[r] for r in channel.readers if r in name) or (name[near[0]],)
        channels.append(replace(channel, writer=name.get(channel.writer, readers[0]), readers=readers))
        numbers.append(c)
    place = {c: i for i, c in enumerate(numbers)}
    stages = tuple(
        replace(s, rank=name[s.rank], ins=tuple(place[c] for c in s.ins), outs=tuple(place[c] for c in s.outs))
        for s in program.stages
        if s.rank in name
    )
    longest = program.longest or max((stage.count for stage in program.stages), default=0)
    return NodePart(replace(program, channels=tuple(channels), stages=stages, longest=longest), far, tuple(numbers))
