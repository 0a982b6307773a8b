"""What a piece of work takes, as counts that are the same on every machine: functions of ours that are entered."""

import gc
import sys
from collections import Counter
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

from tests.harness import ROOT

OTHERS = tuple(str(ROOT / name) for name in ("tests", ".venv"))


class Effort:
    """Counts the Python functions that this thread enters inside ``with``, but those of what the collector frees.

    Args:
        most: calls of any function, Python's or C's, after which the work is given up; 0: no limit.
    """

    def __init__(self, most: int = 0) -> None:
        self.calls: Counter[CodeType] = Counter()
        self._left = most or sys.maxsize
        self._collects = False

    def __enter__(self) -> Self:
        self._collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _called(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1
        elif event != "c_call":
            return
        self._left -= 1
        if self._left < 0:
            raise AssertionError("it takes more calls than it may")

    @property
    def too_much(self) -> bool:
        """Whether it was given up; the work may have caught the error."""
        return self._left < 0

    @property
    def entered(self) -> int:
        """How often functions were entered, of anybody's."""
        return sum(times for code, times in self.calls.items() if code is not Effort.__exit__.__code__)

    @property
    def ours(self) -> int:
        """How often functions of this project were entered; those of libraries depend on their versions."""
        return sum(
            times
            for code, times in self.calls.items()
            if code.co_filename.startswith(str(ROOT)) and not code.co_filename.startswith(OTHERS)
        )

    def of(self, name: str) -> int:
        """How often functions of a name were entered."""
        return sum(times for code, times in self.calls.items() if code.co_name == name)
