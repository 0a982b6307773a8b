"""The command ``top``: a live view of this user's jobs on this machine."""

import argparse
import json
import time
from typing import Any

from ..errors import ArgumentError
from ..top.find import Window, windows
from ..top.look import Look, look
from ..util.screen import console
from ..util.text import quoted
from .output import show

LEAST_SECONDS, MOST_SECONDS = 0.1, 3600.0
NONE = "no job of this user has a communicator of blinkmpi open on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.description = "watch running jobs of this user: calls, bytes by link and tree, who waits for whom"
    parser.add_argument("--pid", metavar="PID", help="only communicators of this process")
    parser.add_argument("--seconds", metavar="S", default="1", help="between two frames (default 1)")
    parser.add_argument("--once", action="store_true", help="print one frame, with rates over --seconds")
    parser.add_argument("--json", action="store_true", help="print one look as JSON")


def run(args: argparse.Namespace) -> int:
    """Show frames until the jobs have ended, or one; 1 if there are no jobs."""
    seconds = _seconds(args.seconds)
    pid = None if args.pid is None else _pid(args.pid)
    found = windows(pid)
    if not found:
        where = NONE if pid is None else f"process {pid} has no communicator of blinkmpi open, or is another user's"
        print(json.dumps(_document([])) if args.json else where)
        return 1
    if args.json:
        print(json.dumps(_document([look(window) for window in found]), indent=1))
        return 0
    before = [look(window) for window in found]
    if args.once:
        from ..top.view import frame

        time.sleep(seconds)
        show(frame([look(window) for window in found], before))
        return 0
    _watch(pid, found, before, seconds)
    return 0


def _document(looks: list[Look]) -> dict[str, Any]:
    from ..top.view import document

    return document(looks)


def _watch(pid: int | None, found: list[Window], before: list[Look], seconds: float) -> None:
    """Frames until no job is left, or the user has seen enough (Ctrl-C)."""
    from rich.live import Live

    from ..top.view import frame

    past = dict(zip(map(_key, before), before, strict=True))
    try:
        with Live(frame(before, [None] * len(before)), console=console(), screen=True, auto_refresh=False) as live:
            while found:
                time.sleep(seconds)
                found = windows(pid)
                now = [look(window) for window in found]
                live.update(frame(now, [past.get(_key(each)) for each in now]), refresh=True)
                past = {_key(each): each for each in now}
    except KeyboardInterrupt:
        return
    print("the jobs have ended")


def _key(one: Look) -> tuple[int, int, int]:
    """What tells communicators apart from one frame to the next."""
    return one.window


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not LEAST_SECONDS <= value <= MOST_SECONDS:
        raise ArgumentError(
            f"--seconds {quoted(text)}: expected a number of seconds, {LEAST_SECONDS} to {MOST_SECONDS:.0f}; write 1"
        )
    return value


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ArgumentError(f"--pid {quoted(text)}: expected a process id; ps shows them")
    return int(text)
