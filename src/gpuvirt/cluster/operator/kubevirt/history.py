"""How often what we have written was taken back: by a GitOps tool that has another text, it would be for ever.

It is kept by the controller in an object of its own, and not in the object that is written: who writes that again may
take our annotations with it. What is taken back three times in a day is not written again until it stands there by
somebody else's hand; a restart changes nothing in that.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

import msgspec

from gpuvirt.cluster.resources import Metadata
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError

MOST_REVERTS = 3
WINDOW = timedelta(days=1)
"""Reverts that are longer ago are forgotten: an admin may change their mind."""


class Achieved(msgspec.Struct, frozen=True):
    """A state of the object in which nothing was lacking."""

    generation: int
    items: tuple[str, ...]
    """What was wanted then."""


class History(msgspec.Struct, frozen=True, omit_defaults=True):
    """What has become of what we wrote."""

    uid: str = ""
    """The object's: another one by the same name has no history."""
    achieved: Achieved | None = None
    reverts: tuple[datetime, ...] = ()
    stopped: bool = False

    def is_of_later(self, metadata: Metadata) -> bool:
        """Return whether this knows more than an object that was read before it was written."""
        known = self.achieved
        return known is not None and self.uid == metadata.uid and metadata.generation < known.generation


def step(
    history: History, metadata: Metadata, desired: Collection[str], lacking: Collection[str], at: datetime
) -> History:
    """Return the history after the object was seen, of which `lacking` is what it lacks of what is wanted."""
    if history.uid != metadata.uid:
        history = History(metadata.uid)
    known = history.achieved
    reverts = tuple(one for one in history.reverts if at - one < WINDOW)
    if not lacking:
        kept = () if history.stopped else reverts
        return History(metadata.uid, _achieved(metadata, desired), kept)
    undone = known is not None and metadata.generation > known.generation and not set(lacking).isdisjoint(known.items)
    reverts = (*reverts, at) if undone else reverts
    stopped = history.stopped or len(reverts) >= MOST_REVERTS
    return History(metadata.uid, None if undone else known, reverts, stopped)


def landed(history: History, metadata: Metadata, desired: Collection[str]) -> History:
    """Return the history after a patch was taken; `metadata` is that of the answer."""
    return msgspec.structs.replace(history, uid=metadata.uid, achieved=_achieved(metadata, desired))


def _achieved(metadata: Metadata, desired: Collection[str]) -> Achieved:
    return Achieved(metadata.generation, tuple(sorted(desired)))


def encode(history: History) -> str:
    """Return a history as a text."""
    return msgspec.json.encode(history).decode()


def decode(text: str) -> History:
    """Return what a text says; one that can't be read says nothing."""
    try:
        return from_json(text.encode(), History)
    except DamagedError:
        return History()
