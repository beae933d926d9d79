"""The state that the sections of a support archive share: the request, unreadable files, and pseudonyms."""

import os
from collections.abc import Callable, Mapping
from datetime import datetime
from errno import ENOENT, ENOTDIR, errorcode
from pathlib import Path

import msgspec

from gpuvirt import archive
from gpuvirt.archive import Entry, LeftOut, NotRead
from gpuvirt.cli.support.pseudonyms import Pseudonyms
from gpuvirt.clock import Clock
from gpuvirt.errors import DamagedError
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.inventory.typenames import TypeNames
from gpuvirt.model.offers.view import NodeView
from gpuvirt.paths import HostRoots, KubeletPaths
from gpuvirt.plain import Plain

WITH_NAMES = frozenset({"users", "allocated_to", "subject", "message", "seen", "places", "fix"})
"""The fields of a NodeView that may contain names."""
WITHOUT_PSEUDONYM = frozenset({"vms"})
"""Fields with names that are derived from names of pods; they are removed where names are hidden."""

Collected = Mapping[str, Entry]


class ArchiveRequest(msgspec.Struct, frozen=True):
    """The request for a support archive."""

    kernel: Kernel
    roots: HostRoots
    kubelet: KubeletPaths
    ledgers: tuple[Path, ...]
    """The paths of an agent's ledger; the first existing one is packed."""
    settings: Settings
    ids: PciIds
    clock: Clock
    nodes: tuple[str, ...]
    """The names of the node in the cluster and on the host; empty where they are unknown."""
    config: Path | None = None
    logs: tuple[Path, ...] = ()
    hide_names: bool = False


class Packing(msgspec.Struct):
    """An archive that is being packed: the state that its sections share."""

    asked: ArchiveRequest
    at: datetime
    names: Pseudonyms | None
    ledger: Ledger
    types: TypeNames
    """The names of the host's vGPU types."""
    view: NodeView
    unread: list[NotRead] = msgspec.field(default_factory=list)
    left_out: list[LeftOut] = msgspec.field(default_factory=list)

    def content(self, path: Path, *, most: int = archive.MOST_FILE_BYTES) -> bytes | None:
        """Return a small file; None, with a note, where it can't be read or is too large."""
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
        """Note that a file could not be read."""
        why = meaning(error.errno) if error.errno is not None else str(error)
        self.unread.append(NotRead(str(path), error.errno, why))

    def understood(self, path: Path, place: str, content: bytes, fit: Callable[[bytes], bytes]) -> Collected:
        """Return a file as `fit` converts it; one that can't be parsed may have names or secrets, and is left out."""
        try:
            return {place: fit(content)}
        except DamagedError as error:
            why = f"it can't be parsed, so it may have names or secrets: {error}"
            self.left_out.append(LeftOut(str(path), why))
            return {}

    def text(self, content: bytes, *, is_log: bool = False) -> bytes:
        """Return a text, with pseudonyms where names are hidden."""
        if self.names is None:
            return content
        return self.names.text(content.decode(errors="surrogateescape"), is_log=is_log).encode(errors="surrogateescape")

    def nameless(self, text: str) -> str:
        """Return a text of the manifest, with pseudonyms where names are hidden."""
        return text if self.names is None else self.names.text(text, is_log=True)

    def picture(self, view: NodeView) -> bytes:
        """Return a NodeView as `gpuvirt devices -o json` prints it."""
        value: Plain = msgspec.json.decode(msgspec.json.encode(view))
        if self.names is not None:
            value = self._without_names(value)
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"

    def _without_names(self, value: Plain, *, has_names: bool = False) -> Plain:
        match value:
            case str():
                return self.names.text(value) if has_names and self.names is not None else value
            case list():
                return [self._without_names(element, has_names=has_names) for element in value]
            case dict():
                kept = {key: element for key, element in value.items() if key not in WITHOUT_PSEUDONYM}
                return {
                    key: self._without_names(element, has_names=has_names or key in WITH_NAMES)
                    for key, element in kept.items()
                }
            case _:
                return value


def is_absent(path: Path) -> bool:
    """Return whether `path` does not exist; a path that may not be read counts as existing."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in {ENOENT, ENOTDIR}
    return False


def meaning(number: int) -> str:
    """Return the name and the meaning of an errno."""
    return f"{errorcode.get(number, number)}: {os.strerror(number)}"
