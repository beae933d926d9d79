"""Which of several names somebody meant: the nearest by edit distance, where it is near enough to be a slip."""

import re
from collections.abc import Iterable

MOST_CHARACTERS = 200
"""Of what is compared; a longer text is nobody's slip."""


def distance(one: str, other: str) -> int:
    """Return how many characters must be put in, taken out or changed to make one text the other (Levenshtein)."""
    row = list(range(len(other) + 1))
    for index, left in enumerate(one, 1):
        before, row[0] = row[0], index
        for place, right in enumerate(other, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (left != right))
    return row[-1]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, None where nothing is near.

    Case and punctuation count for nothing, as do the domain before `/` and what an older database had in the middle:
    people write `TU104GL_T4` for `TU104GL_TESLA_T4`.
    """
    if len(name) > MOST_CHARACTERS:
        return None
    folded = _folded(name)
    scored = sorted((distance(folded, _folded(one)), one) for one in known if len(one) <= MOST_CHARACTERS)
    for score, one in scored:
        if score <= max(1, len(folded) // 4) or _abbreviates(name, one) or _abbreviates(one, name):
            return one
    return None


def nearest_names(name: str, known: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the names that are nearest to one, the nearest first; equally near ones keep their order."""
    folded = _folded(name[:MOST_CHARACTERS])
    ranked = sorted((distance(folded, _folded(one[:MOST_CHARACTERS])), at, one) for at, one in enumerate(known))
    return tuple(one for _, _, one in ranked[:most])


def _folded(name: str) -> str:
    return "".join(one for one in name.rpartition("/")[2].lower() if one.isalnum())


def _abbreviates(short: str, long: str) -> bool:
    """Return whether one name has the first and last words of another, or is its last ones."""
    words, others = _words(short), _words(long)
    if not words or len(words) >= len(others):
        return False
    return others[-len(words) :] == words or (len(words) > 1 and others[0] == words[0] and others[-1] == words[-1])


def _words(name: str) -> list[str]:
    return [word for word in re.split("[-_ ]", name.rpartition("/")[2].lower()) if word]
