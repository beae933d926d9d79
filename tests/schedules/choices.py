"""The choices of one explored run: drawn by a seed, recorded, replayed and shrunk."""

from collections.abc import Callable, Sequence
from random import Random


class Choices:
    """Draws numbers; zero is the choice that does no harm, so that a run with more zeros is simpler."""

    def __init__(self, seed: int, replayed: Sequence[int] | None = None) -> None:
        self.made: list[int] = []
        self._random = Random(seed)
        self._replayed = replayed

    def pick(self, weights: Sequence[int]) -> int:
        """Return an index, by its weight."""
        if self._replayed is not None:
            position = len(self.made)
            chosen = self._replayed[position] if position < len(self._replayed) else 0
            chosen = min(chosen, len(weights) - 1)
        else:
            chosen = self._random.choices(range(len(weights)), weights)[0]
        self.made.append(chosen)
        return chosen


def shrunk(made: Sequence[int], fails: Callable[[Sequence[int]], bool], tries: int = 300) -> Sequence[int]:
    """Return choices with more zeros that still fail."""
    best, size = list(made), max(len(made) // 2, 1)
    while tries > 0 and size > 0:
        for at in range(0, len(best), size):
            zeroed = [*best[:at], *[0] * len(best[at : at + size]), *best[at + size :]]
            if zeroed == best:
                continue
            tries -= 1
            if fails(zeroed):
                best = zeroed
            if tries <= 0:
                break
        size //= 2
    while best and best[-1] == 0:
        best.pop()
    return best
