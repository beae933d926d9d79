"""Finds the name that a mistyped or shortened name stands for."""

import re
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher
from itertools import chain

from gpuvirt.errors import InvalidIdError
from gpuvirt.model.vgputypes.profiles import Profile, parse_profile

MOST_CHARACTERS = 200
"""The most characters that are compared."""
SIMILAR, SIMILAR_SHORT = 0.75, 0.6
"""The least similarity of a mistyped name; in a short name, a typing error is a larger part."""
SHORT = 6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar name, None if no name is similar enough.

    Case, punctuation and the domain before `/` are ignored. A name that lacks words in the middle is similar too, since
    older databases had fewer or more words: `TU104GL_T4` for `TU104GL_TESLA_T4`.
    """
    if len(name) > MOST_CHARACTERS:
        return None
    names = [candidate for candidate in known if len(candidate) <= MOST_CHARACTERS]
    enough = SIMILAR if len(_folded(name)) >= SHORT else SIMILAR_SHORT
    close = (candidate for similarity, candidate in _ranked(name, names) if similarity >= enough)
    longer_or_shorter = (other for other in sorted(names) if _abbreviates(name, other) or _abbreviates(other, name))
    return next(chain(close, longer_or_shorter), None)


def types_of_card(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known vGPU types of the card that a type's name begins with, of its series if there are any.

    A well-formed name of another size, `A10-5Q`, is no slip of which only one correction is likely.
    """
    if (wrong := _profile(name)) is None:
        return ()
    found = [profile for text in known if (profile := _profile(text)) is not None and profile.gpu == wrong.gpu]
    of_series = [profile for profile in found if profile.series is wrong.series]
    return tuple(dict.fromkeys(profile.text for profile in of_series or found))


def _profile(name: str) -> Profile | None:
    try:
        return parse_profile(name)
    except InvalidIdError:
        return None


def correction(name: str, known: Collection[str]) -> str | None:
    """Return the end of a sentence about a name that is not known; None where no known name is similar."""
    if types := types_of_card(name, known):
        return f"the types of {name.partition('-')[0]} are {', '.join(types)}"
    near = nearest(name, known)
    return f"did you mean {near}?" if near is not None else None


def nearest_names(name: str, known: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the most similar names, the most similar first; equally similar ones keep their order."""
    return tuple(candidate for _, candidate in _ranked(name, known)[:most])


def _ranked(name: str, known: Iterable[str]) -> list[tuple[float, str]]:
    """Return names with their similarity to `name`, from 0 to 1, the most similar first."""
    matcher = SequenceMatcher(b=_folded(name[:MOST_CHARACTERS]))
    found = []
    for candidate in known:
        matcher.set_seq1(_folded(candidate[:MOST_CHARACTERS]))
        found.append((matcher.ratio(), candidate))
    return sorted(found, key=lambda ranked: -ranked[0])


def _folded(name: str) -> str:
    return "".join(character for character in name.rpartition("/")[2].lower() if character.isalnum())


def _abbreviates(short: str, long: str) -> bool:
    """Return whether `short` has the first and last words of `long`, or is its last words."""
    words, others = _words(short), _words(long)
    if not words or len(words) >= len(others):
        return False
    return others[-len(words) :] == words or (len(words) > 1 and others[0] == words[0] and others[-1] == words[-1])


def _words(name: str) -> list[str]:
    return [word for word in re.split("[-_ ]", name.rpartition("/")[2].lower()) if word]
