"""Which of several names somebody meant: one that differs by a slip, or that is written out in full."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import chain

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
    enough = SIMILAR if len(_folded(name)) >= SHORT else SIMILAR_SHORT
    close = (candidate for similarity, candidate in _ranked(name, names) if similarity >= enough)
    written_out = (full for full in sorted(names) if _abbreviates(name, full) or _abbreviates(full, name))
    return next(chain(close, written_out), None)


def nearest_names(name: str, known: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the names that are nearest to one, the nearest first; equally near ones keep their order."""
    return tuple(candidate for _, candidate in _ranked(name, known)[:most])


def _ranked(name: str, known: Iterable[str]) -> list[tuple[float, str]]:
    """Return names with how similar they are to one, from 0 to 1, the most similar first."""
    matcher = SequenceMatcher(b=_folded(name[:MOST_CHARACTERS]))
    found = []
    for candidate in known:
        matcher.set_seq1(_folded(candidate[:MOST_CHARACTERS]))
        found.append((matcher.ratio(), candidate))
    return sorted(found, key=lambda ranked: -ranked[0])


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
