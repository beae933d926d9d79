"""The ledger on disk, sealed.

It is written behind: the kubelet's own checkpoint is the durable account of which pod has what, so an answer to the
kubelet does not wait for our disk. Fields that this version does not know are kept as they are.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpuvirt.clock import Clock, Signal
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.model.ledger import Ledger
from gpuvirt.model.reasons import Reason, ReasonCode, nodeproblems
from gpuvirt.node.files import replace_file
from gpuvirt.node.lane import Lane
from gpuvirt.node.sealed import seal, unseal
from gpuvirt.tasks import backoff_s

log = logging.getLogger(__name__)

VERSION = 1
WRITE_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 5.0


class Journal:
    """Keeps one ledger in one file."""

    def __init__(self, path: Path, lane: Lane, clock: Clock) -> None:
        self.trouble: Reason | None = None
        """What is wrong with the file."""
        self._path = path
        self._lane = lane
        self._clock = clock
        self._changed = Signal()
        self._ledger = Ledger()
        self._written = Ledger()
        self._unknown: dict[str, msgspec.Raw] = {}

    def load(self) -> Ledger:
        """Return the ledger that was kept, an empty one where there is none.

        A damaged file is put aside as `ledger.json.damaged` and is a reason, not the end: what pods hold is heard from
        the kubelet again, and names are those of the PCI ID database.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return self._ledger
        except OSError as error:
            self.trouble = self._lost(f"can't be read: {error.strerror}")
            return self._ledger
        try:
            self._ledger, self._unknown = decode(content)
        except DamagedError as error:
            aside = self._path.with_name(self._path.name + ".damaged")
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            self.trouble = self._lost(f"is damaged: {error}; it was put aside as {aside.name}")
            log.warning("the ledger is damaged: %s", error, extra={"file": str(self._path)})
        self._written = self._ledger
        return self._ledger

    def save(self, ledger: Ledger) -> None:
        """Have `ledger` written soon."""
        if ledger != self._ledger:
            self._ledger = ledger
            self._changed.set()

    async def run(self, tell: Callable[[Reason | None], None]) -> None:
        """Write what there is to write, for ever; `tell` hears what is wrong, and when it no longer is."""
        tell(self.trouble)
        while True:
            await self._changed.wait()
            await self._write_until_done(tell)

    async def flush(self) -> None:
        """Write now what is not written yet; a disk that does not take it keeps nobody from ending."""
        try:
            if self._ledger != self._written:
                await self._write(FLUSH_TIMEOUT_S)
        except (OSError, GpuvirtError) as error:
            log.warning("the ledger could not be written at the end: %s", error, extra={"file": str(self._path)})

    async def _write_until_done(self, tell: Callable[[Reason | None], None]) -> None:
        pauses = backoff_s()
        while self._ledger != self._written:
            try:
                await self._write()
            except (OSError, GpuvirtError) as error:
                self.trouble = nodeproblems.ledger_not_written(self._path, str(error))
                tell(self.trouble)
                await self._clock.sleep(next(pauses))
        tell(self.trouble)

    async def _write(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        ledger = self._ledger
        content = encode(ledger, self._unknown)
        await self._lane.run(lambda: replace_file(self._path, content), name=f"write {self._path}", timeout_s=timeout_s)
        self._written = ledger
        if self.trouble is not None and self.trouble.code is ReasonCode.LEDGER_NOT_WRITTEN:
            self.trouble = None

    def _lost(self, what: str) -> Reason:
        return nodeproblems.ledger_lost(self._path, what)


_KNOWN = frozenset(field.name for field in dataclasses.fields(Ledger))


def encode(ledger: Ledger, unknown: dict[str, msgspec.Raw] | None = None) -> bytes:
    """Return the content of a ledger's file."""
    known = msgspec.json.decode(msgspec.json.encode(ledger), type=dict[str, msgspec.Raw])
    return seal(msgspec.json.encode((unknown or {}) | known), VERSION)


def decode(content: bytes) -> tuple[Ledger, dict[str, msgspec.Raw]]:
    """Return a ledger and the fields that this version does not know; raise DamagedError."""
    body = unseal(content, VERSION)
    fields = from_json(body, dict[str, msgspec.Raw])
    ledger = from_json(body, Ledger)
    return ledger, {name: raw for name, raw in fields.items() if name not in _KNOWN}
