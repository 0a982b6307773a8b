"""The chunk size, found while a job runs (Blink section 4: multiplicative increase, additive decrease).

The chunk doubles while calls get faster by more than 3 %, then shrinks by a
fixed step while that does not make them slower; the fastest is kept. Every
rank feeds the same times, so every rank takes the same steps. Pure.
"""

BETTER = 0.97  # a new chunk must take less than this share of the best time
TRIALS = 3  # calls per chunk; the fastest counts


class ChunkSearch:
    """Search for the chunk of one kind of call.

    Args:
        lowest, highest: bytes; the search starts at the lowest.
        step: bytes of a decrease.
    """

    def __init__(self, lowest: int, highest: int, step: int) -> None:
        self.chunk = self.best = lowest
        self.done = lowest >= highest
        self._highest, self._lowest, self._step = highest, lowest, step
        self._best_s = self._now_s = float("inf")
        self._calls, self._down = 0, False

    def learn(self, seconds: float) -> None:
        """Take the time of a call with the present chunk (the slowest rank's)."""
        if self.done:
            return
        self._now_s = min(self._now_s, seconds)
        self._calls += 1
        if self._calls < TRIALS:
            return
        better = self._now_s < (BETTER if not self._down else 1.0) * self._best_s
        if better:
            self.best, self._best_s = self.chunk, self._now_s
        self._now_s, self._calls = float("inf"), 0
        self._next(better)

    def _next(self, better: bool) -> None:
        if not self._down and better and 2 * self.chunk <= self._highest:
            self.chunk *= 2
            return
        if self._down and not better:
            self._finish()
            return
        self._down = True
        self.chunk = self.best - self._step
        if self.chunk <= max(self._lowest, self.best // 2):  # smaller than that has been tried on the way up
            self._finish()

    def _finish(self) -> None:
        self.chunk, self.done = self.best, True
