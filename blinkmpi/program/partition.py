"""The part of a program that one node executes (Blink section 3.5): pure, and the same for all ranks of the node.

A channel that leads to another node becomes a channel of the rank that has its end here, which both writes and reads
it. The messages that carry the chunks to the other end take the place of the missing rank, so an executor sees
nothing but channels of its node.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..errors import PlanError
from .ir import Channel, Program
from .reduction import accumulator_of, dtype_of

LINE = 64  # bytes; slots begin at multiples of it


class RemoteEnd(NamedTuple):
    """The other end of a channel between nodes: its (first) rank, and the channel's number in the whole program."""

    rank: int
    channel: int
    readers: tuple[int, ...]  # all of the channel's, wherever they are
    comes: bool  # whether it is written there


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
        PlanError: if a channel with several readers leads to another node, but for calls in one shot, which
            bring a node all slots in one message.
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
            if len(ends) > 2 and not program.one_shot:
                raise PlanError(f"channel {c} leads from rank {ends[0]} to {ends[1:]} on several nodes; plan again")
            far[len(channels)] = RemoteEnd(
                next(r for r in ends if r not in name), c, channel.readers, comes=channel.writer not in name
            )
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


class ShotMessages(NamedTuple):
    """What each node sends to each other one in a call of one shot, all in the memory in which it lays out its slots.

    ``slots`` are the places of the channels that lead to other nodes, in the memory of their writer's node.
    ``messages`` are (first byte, bytes) by the nodes of sender and receiver; each begins with a line for its header.
    ``near`` is how many bytes the slots of a rank have at most that no other node reads.
    """

    slots: dict[int, int]
    messages: dict[tuple[int, int], tuple[int, int]]
    near: int

    @property
    def longest(self) -> int:
        """Bytes of the longest message."""
        return max(nbytes for _, nbytes in self.messages.values())

    def memory(self, node: int) -> int:
        """Bytes that a node lays out."""
        return max(first + nbytes for (source, _), (first, nbytes) in self.messages.items() if source == node)


def messages_of(program: Program, nodes: Sequence[int]) -> ShotMessages:
    """The messages of a program in one shot.

    Slots that go to the same nodes lie side by side, so a message holds little that its receiver does not read.

    Args:
        nodes: the node of each rank.
    """
    call = program.call
    widths = {False: dtype_of(call.dtype).itemsize, True: accumulator_of(call.dtype).itemsize}
    counts = {c: stage.count for stage in program.stages for c in stage.outs}
    slots: dict[int, int] = {}
    messages: dict[tuple[int, int], tuple[int, int]] = {}
    for node in dict.fromkeys(nodes):
        groups: dict[tuple[int, ...], list[int]] = {}
        for c, channel in enumerate(program.channels):
            away = tuple(sorted({nodes[r] for r in channel.readers} - {node}))
            if nodes[channel.writer] == node and away:
                groups.setdefault(away, []).append(c)
        first: dict[int, int] = {}
        at = LINE
        for away, channels in sorted(groups.items()):
            if at > LINE and not set(away) <= set(first):
                at += LINE
            first |= {other: at - LINE for other in away if other not in first}
            for c in channels:
                slots[c] = at
                at += -(-counts[c] * widths[program.channels[c].wide] // LINE) * LINE
            for other, start in first.items():  # a header that several get says how long the message is
                if start in {first[reader] for reader in away}:
                    messages[node, other] = start, at - start
        at = at if first else 0
        messages |= {(node, other): (at, LINE) for other in set(nodes) - {node} - set(first)}
    near: Counter[int] = Counter()
    for c, count in counts.items():
        if c not in slots:
            near[program.channels[c].writer] += -(-count * widths[program.channels[c].wide] // LINE) * LINE
    return ShotMessages(slots, messages, max(near.values(), default=0))
