"""What the sections of a support archive share: what is asked for, what could not be read, and how names are hidden."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from errno import ENOENT, ENOTDIR, errorcode
from pathlib import Path

import msgspec

from gpuvirt import archive
from gpuvirt.archive import Entry, LeftOut, NotRead
from gpuvirt.clock import Clock
from gpuvirt.errors import DamagedError
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.doctor.pseudonyms import Pseudonyms
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.offers.view import NodeView
from gpuvirt.paths import HostRoots, KubeletPaths
from gpuvirt.plain import Plain

TELLING = frozenset({"users", "allocated_to", "subject", "message", "seen", "places", "fix"})
"""The fields of a node's picture that may tell names."""
WITHOUT_PSEUDONYM = frozenset({"vms"})
"""Fields of names that follow from those of pods, and go where names are hidden."""

Collected = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be packed, and of what."""

    kernel: Kernel
    roots: HostRoots
    kubelet: KubeletPaths
    ledgers: tuple[Path, ...]
    """Where an agent keeps its ledger; the first that is there counts."""
    settings: Settings
    ids: PciIds
    clock: Clock
    nodes: tuple[str, ...]
    """What the node is called, in the cluster and by itself; none where that is not known."""
    config: Path | None = None
    logs: tuple[Path, ...] = ()
    hide_names: bool = False


@dataclass(slots=True)
class Packing:
    """An archive being packed: what the sections share."""

    asked: Asked
    at: datetime
    names: Pseudonyms | None
    ledger: Ledger
    view: NodeView
    unread: list[NotRead] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def content(self, path: Path, *, most: int = archive.MOST_FILE_BYTES) -> bytes | None:
        """Return a small file; None, and a word of it, where it can't be read or is too large."""
        try:
            with path.open("rb") as file:
                content = file.read(most + 1)
        except OSError as error:
            self.refused(path, error)
            return None
        if len(content) > most:
            self.left_out.append(LeftOut(str(path), f"it has more than {most >> 20} MiB"))
            return None
        return content

    def refused(self, path: Path, error: OSError) -> None:
        """Note that something could not be read."""
        why = meaning(error.errno) if error.errno is not None else str(error)
        self.unread.append(NotRead(str(path), error.errno, why))

    def understood(self, path: Path, place: str, content: bytes, fit: Callable[[bytes], bytes]) -> Collected:
        """Return what `fit` makes of a file; one that can't be understood may hold anything, and is left out."""
        try:
            return {place: fit(content)}
        except DamagedError as error:
            why = f"it can't be understood, so nobody knows what is in it: {error}"
            self.left_out.append(LeftOut(str(path), why))
            return {}

    def text(self, content: bytes, *, is_log: bool = False) -> bytes:
        """Return a text, without names where they are hidden."""
        if self.names is None:
            return content
        return self.names.text(content.decode(errors="surrogateescape"), is_log=is_log).encode(errors="surrogateescape")

    def nameless(self, text: str) -> str:
        """Return a word of our own, without names where they are hidden."""
        return text if self.names is None else self.names.text(text, is_log=True)

    def picture(self, view: NodeView) -> bytes:
        """Return a node's picture as `gpuvirt devices -o json` prints it."""
        value: Plain = msgspec.json.decode(msgspec.json.encode(view))
        if self.names is not None:
            value = self._nameless(value)
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"

    def _nameless(self, value: Plain, *, telling: bool = False) -> Plain:
        match value:
            case str():
                return self.names.text(value) if telling and self.names is not None else value
            case list():
                return [self._nameless(one, telling=telling) for one in value]
            case dict():
                kept = {key: one for key, one in value.items() if key not in WITHOUT_PSEUDONYM}
                return {key: self._nameless(one, telling=telling or key in TELLING) for key, one in kept.items()}
            case _:
                return value


def is_absent(path: Path) -> bool:
    """Return whether there is nothing at `path`; what may not be looked at is there."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in {ENOENT, ENOTDIR}
    return False


def meaning(number: int) -> str:
    """Return an errno in words."""
    return f"{errorcode.get(number, number)}: {os.strerror(number)}"
