"""Picture of an algorithm: which rank sends what in which step, for all chunks or for one.

matplotlib is imported inside the functions that draw, since it is an extra: ``pip install blinkmpi[plot]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ArgumentError
from ..util.figure import COLOURS, DARK, check_target, headed, new_figure, save
from ..util.text import plural
from .flow import Flow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MESSAGES = 4000


class DrawnMessage(NamedTuple):
    """A value on its way: from a rank at the end of one step to another rank in the next one."""

    step: int
    src: int
    dst: int
    chunk: int
    folds: bool


def messages_of(flow: Flow, chunk: int | None = None) -> list[DrawnMessage]:
    """What ranks send, each in the first step in which it can be sent.

    Args:
        chunk: of the input, to draw its way alone.
    """
    contributions, found = flow.contributions, list[DrawnMessage]()
    done: list[int] = []  # the step in which each value is there
    for node in flow.nodes:
        far = [o for o in node.operands if o >= 0 and flow.nodes[o].rank != node.rank]
        done.append(max((done[o] + (o in far) for o in node.operands if o >= 0), default=0))
        for o in far:
            number = min(i for _, i in contributions[o])
            if chunk in (None, number):
                found.append(DrawnMessage(done[o], flow.nodes[o].rank, node.rank, number, len(node.operands) > 1))
    return found


def draw_flow(name: str, flow: Flow, path: str, *, chunk: int | None = None) -> None:
    """Draw the messages of all steps, ranks one above another and time to the right, a colour for each chunk.

    Args:
        name: of the algorithm.
        chunk: of the input, to draw its way alone.

    Raises:
        ArgumentError: for a file that cannot be written, no such chunk, or more messages than anybody could see.
    """
    check_target(path)
    messages, goal = messages_of(flow, chunk), flow.goal
    if chunk is not None and not 0 <= chunk < max(goal.given):
        raise ArgumentError(f"{name} has no chunk {chunk}; it has {max(goal.given)}")
    if len(messages) > MOST_MESSAGES:
        raise ArgumentError(f"{name} has {len(messages)} messages; at most {MOST_MESSAGES} can be drawn: "
                            "draw one chunk")  # fmt: skip
    steps = 1 + max((m.step for m in messages), default=0)
    some = "" if chunk is None else f", chunk {chunk}"
    title = f"{name}: {goal.collective} of {plural(goal.n, 'rank')}{some}"
    facts = f"{plural(len(messages), 'message')}; filled: folded there, hollow: kept; a colour is a chunk"
    width, height = max(1.3 + 1.1 * steps, 0.8 + 0.13 * len(title)), 1.5 + 0.5 * goal.n
    figure = new_figure(width, height)
    above = headed(figure, title, facts, letters=14)
    axes = figure.add_axes((0.85 / width, 0.4 / height, 1 - 1.05 / width, 1 - (0.5 + above) / height))
    for m in messages:
        colour = COLOURS[m.chunk % len(COLOURS)]
        axes.annotate(
            "", xy=(m.step + 0.93, m.dst), xytext=(m.step + 0.07, m.src), zorder=2,
            arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.2, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
    _ends(axes, [m for m in messages if m.folds], filled=True)
    _ends(axes, [m for m in messages if not m.folds], filled=False)
    axes.set_xlim(-0.1, steps + 0.15)
    axes.set_ylim(goal.n - 0.5, -0.5)
    axes.set_yticks(range(goal.n), [f"rank {r}" for r in range(goal.n)], fontsize=9, color=DARK)
    axes.set_xticks(range(steps + 1), [str(step) for step in range(steps + 1)], fontsize=8, color=DARK)
    axes.grid(axis="y", color="#e8e8e8", zorder=0)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    save(figure, path)


def _ends(axes: Axes, messages: Sequence[DrawnMessage], *, filled: bool) -> None:
    """A dot where each message arrives."""
    colours = [COLOURS[m.chunk % len(COLOURS)] for m in messages]
    axes.scatter(
        [m.step + 1 for m in messages], [m.dst for m in messages], s=34, zorder=3, edgecolors=colours,
        facecolors=colours if filled else "white", linewidths=1.2,
    )  # fmt: skip
