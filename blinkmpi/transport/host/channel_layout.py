"""Where the channels of a program have their flags and slots in the shared window; the same on every rank of a node."""

from collections.abc import Collection

from ...errors import PlanError
from ...program.ir import Program
from ..control_pages import HEADS, LINE, TAILS
from .shared_window import SharedWindow


class ChannelLayout:
    """Flags (indices of words) and slots (offsets in bytes) of each channel.

    Args:
        itemsize, partial_itemsize: bytes of an element, of an element of a partial result.
        shift: bytes by which slots lie past a multiple of the line.
        exported: channels that have no slots, because their readers read the writer's buffer.

    Raises:
        PlanError: if a rank would need more flags or slots than it has.
    """

    def __init__(
        self,
        program: Program,
        window: SharedWindow,
        itemsize: int,
        partial_itemsize: int,
        shift: int,
        exported: Collection[int] = (),
    ) -> None:
        pages = window.pages
        n = pages.n
        written, read, used = [0] * n, [0] * n, [shift] * n
        self.heads: list[int] = []
        self.tails: list[dict[int, int]] = []
        self.slots: list[int] = []
        self.strides: list[int] = []
        for c, channel in enumerate(program.channels):
            w = channel.writer
            stride = (program.chunk * (partial_itemsize if channel.wide else itemsize) + LINE - 1) // LINE * LINE
            self.heads.append(pages.head(w, written[w]))
            self.slots.append(window.arena(w) + used[w])
            self.strides.append(stride)
            self.tails.append({r: pages.tail(r, read[r]) for r in channel.readers})
            written[w] += 1
            used[w] += 0 if c in exported else stride * program.depth
            for r in channel.readers:
                read[r] += 1
        if max(written, default=0) > HEADS or max(read, default=0) > TAILS:
            raise PlanError(f"a rank would write {max(written)} and read {max(read)} channels; at most {HEADS} fit: "
                            "use a scheme with fewer trees")  # fmt: skip
        if max(used, default=0) > window.arena_bytes:
            raise PlanError(f"slots need {max(used)} bytes of a rank, the arena has {window.arena_bytes}: "
                            "lower with a smaller budget_bytes")  # fmt: skip
