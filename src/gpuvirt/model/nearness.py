"""Which of several names somebody meant: one that differs by a slip, or that is written out in full."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

MOST_CHARACTERS = 200
"""Of what is compared; a longer text is not a slip."""
SIMILAR, SIMILAR_SHORT = 0.75, 0.6
"""How much two names have in common where one is a slip for the other; in a short one, a slip is a larger part."""
SHORT = 6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, None where nothing is near.

    Case and punctuation count for nothing, as do the domain before `/` and what an older database had in the middle:
    people write `TU104GL_T4` for `TU104GL_TESLA_T4`.
    """
    if len(name) > MOST_CHARACTERS:
        return None
    names = [candidate for candidate in known if len(candidate) <= MOST_CHARACTERS]
    close = _close(name, names, 1, SIMILAR if len(_folded(name)) >= SHORT else SIMILAR_SHORT)
    written_out = sorted(full for full in names if _abbreviates(name, full) or _abbreviates(full, name))
    return next(iter((*close, *written_out)), None)


def nearest_names(name: str, known: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the names that are nearest to one, the nearest first."""
    return _close(name[:MOST_CHARACTERS], known, most, 0)


def _close(name: str, known: Iterable[str], most: int, similarity: float) -> tuple[str, ...]:
    names: dict[str, str] = {}
    for candidate in known:
        names.setdefault(_folded(candidate[:MOST_CHARACTERS]), candidate)
    return tuple(names[match] for match in get_close_matches(_folded(name), names, most, similarity))


def _folded(name: str) -> str:
    return "".join(character for character in name.rpartition("/")[2].lower() if character.isalnum())


def _abbreviates(short: str, long: str) -> bool:
    """Return whether one name has the first and last words of another, or is its last ones."""
    words, others = _words(short), _words(long)
    if not words or len(words) >= len(others):
        return False
    return others[-len(words) :] == words or (len(words) > 1 and others[0] == words[0] and others[-1] == words[-1])


def _words(name: str) -> list[str]:
    return [word for word in re.split("[-_ ]", name.rpartition("/")[2].lower()) if word]
