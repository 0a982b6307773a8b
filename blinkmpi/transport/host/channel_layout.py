"""Where the channels of a program have their flags and slots in the shared window; the same on every rank of a node."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from ...errors import PlanError
from ...program.ir import Program
from ..control_pages import HEADS, LINE, TAILS
from .shared_window import WindowLayout


class ChannelLayout:
    """Flags (indices of words) and slots (offsets in bytes) of each channel.

    Calls in one shot have the slots of even and of odd numbers in the halves of their part of the memory: whatever the
    programs, no call then writes where the one before it is still being read.

    Args:
        itemsize, partial_itemsize: bytes of an element, of an element of a partial result.
        shift: bytes by which slots lie past a multiple of the line.
        exported: channels that have no slots, because their readers read the writer's buffer.
        messages: slots that lie in messages between nodes: (offset in the window, bytes to that for odd calls).

    Raises:
        PlanError: if a rank would need more flags or slots than it has.
    """

    def __init__(
        self,
        program: Program,
        window: WindowLayout,
        itemsize: int,
        partial_itemsize: int,
        shift: int,
        exported: Collection[int] = (),
        messages: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        pages = window.pages
        n = pages.n
        counts = {c: stage.count for stage in program.stages for c in stage.outs} if program.one_shot else {}
        first, room = (
            (window.one_shot, window.one_shot_bytes // 2) if program.one_shot else (window.arena, window.arena_bytes)
        )
        written, read, used = [0] * n, [0] * n, [shift] * n
        self.heads: list[int] = []
        self.tails: list[dict[int, int]] = []
        self.slots: list[int] = []
        self.strides: list[int] = []
        for c, channel in enumerate(program.channels):
            w = channel.writer
            each = counts.get(c, program.chunk) * (partial_itemsize if channel.wide else itemsize)
            stride = -(-each // LINE) * LINE
            self.heads.append(pages.head(w, written[w]))
            at, apart = messages.get(c) or (first(w) + used[w], room if program.one_shot else stride)
            self.slots.append(at)
            self.strides.append(apart)
            self.tails.append({r: pages.tail(r, read[r]) for r in channel.readers})
            written[w] += 1
            used[w] += 0 if c in exported or c in messages else stride * (1 if program.one_shot else program.depth)
            for r in channel.readers:
                read[r] += 1
        self.written, self.read, self.used = written, read, used  # by each rank: flags, and bytes of slots
        if max(written, default=0) > HEADS or max(read, default=0) > TAILS:
            raise PlanError(f"a rank would write {max(written)} and read {max(read)} channels; at most {HEADS} fit: "
                            "use a scheme with fewer trees")  # fmt: skip
        if max(used, default=0) > room:
            raise PlanError(f"slots need {max(used)} bytes of a rank, the arena has {room}: "
                            "lower with a smaller budget_bytes")  # fmt: skip
