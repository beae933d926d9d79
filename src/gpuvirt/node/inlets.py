"""What was heard from the cluster, kept on disk: an agent that starts while nobody answers goes on as before.

Written behind, since the API server says it all again: a file that is lost costs no more than a wait until it does.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from gpuvirt.clock import Clock, Signal
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.heard import ConfigText, NodeRequest
from gpuvirt.model.reasons import Reason, nodeproblems
from gpuvirt.node.files import replace_file
from gpuvirt.node.lane import Lane
from gpuvirt.node.sealed import seal, unseal
from gpuvirt.tasks import backoff_s

log = logging.getLogger(__name__)

FILE = "wishes.json"
VERSION = 1
WRITE_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What the file holds."""

    node: NodeName | None
    """Whose wishes they are: a disk that was copied has another node's."""
    vgpu: NodeRequest = field(default_factory=NodeRequest)
    good_configs: ConfigText | None = None
    """The last configurations that could be used, whatever was heard since."""


class Inlets:
    """Takes what is heard, and keeps it."""

    def __init__(self, path: Path | None, node: NodeName | None, lane: Lane, clock: Clock) -> None:
        """`path` is None where nothing is kept."""
        self._path = path
        self._lane = lane
        self._clock = clock
        self._changed = Signal()
        self._trouble: Reason | None = None
        self._kept = Kept(node)
        self._written = self._kept

    @property
    def wish(self) -> NodeRequest:
        """What the cluster wants of the node's vGPUs, now or before."""
        return self._kept.vgpu

    @property
    def good_configs(self) -> ConfigText | None:
        """The last configurations that could be used; None where there were none yet."""
        return self._kept.good_configs

    def load(self) -> None:
        """Take what was kept; a file that can't be used is put aside, and is as if nothing had been heard."""
        if self._path is None:
            return
        try:
            kept = decode(self._path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._trouble = nodeproblems.desired_state_lost(self._path, f"can't be read: {error.strerror}")
            return
        except DamagedError as error:
            aside = self._path.with_name(f"{self._path.name}.damaged")
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            self._trouble = nodeproblems.desired_state_lost(
                self._path, f"is damaged: {error}; it was put aside as {aside.name}"
            )
            return
        if kept.node != self._kept.node:
            log.warning("%s is of node %s and not of this one; it is passed over", self._path, kept.node)
            return
        self._kept = self._written = kept

    def hear_wish(self, news: NodeRequest) -> bool:
        """Take what was heard; what `news` has not heard stays as it was. Return whether it is news."""
        return self._keep(replace(self._kept, vgpu=self._kept.vgpu.updated(news)))

    def hear_good_configs(self, configs: ConfigText) -> None:
        """Take that configurations could be used, from whoever has read them."""
        self._keep(replace(self._kept, good_configs=configs))

    def _keep(self, kept: Kept) -> bool:
        if kept == self._kept:
            return False
        self._kept = kept
        self._changed.set()
        return True

    async def run(self, tell: Callable[[Reason | None], None]) -> None:
        """Write what there is to write, for ever; `tell` hears what is wrong, and when it no longer is."""
        tell(self._trouble)
        while True:
            await self._changed.wait()
            if self._path is not None:
                await self._write_until_done(self._path, tell)

    async def flush(self) -> None:
        """Write now what is not written yet; a disk that does not take it keeps nobody from ending."""
        try:
            if self._path is not None and self._kept != self._written:
                await self._write(self._path, FLUSH_TIMEOUT_S)
        except (OSError, GpuvirtError) as error:
            log.warning("%s could not be written at the end: %s", self._path, error)

    async def _write_until_done(self, path: Path, tell: Callable[[Reason | None], None]) -> None:
        pauses = backoff_s()
        while self._kept != self._written:
            try:
                await self._write(path, WRITE_TIMEOUT_S)
            except (OSError, GpuvirtError) as error:
                tell(nodeproblems.desired_state_not_written(path, str(error)))
                await self._clock.sleep(next(pauses))
        tell(None)

    async def _write(self, path: Path, timeout_s: float) -> None:
        kept = self._kept
        content = encode(kept)
        await self._lane.run(lambda: replace_file(path, content), name=f"write {path}", timeout_s=timeout_s)
        self._written = kept


def encode(kept: Kept) -> bytes:
    """Return the content of the file."""
    return seal(msgspec.json.encode(kept), VERSION)


def decode(content: bytes) -> Kept:
    """Return what a file holds; raise DamagedError."""
    return from_json(unseal(content, VERSION), Kept)
