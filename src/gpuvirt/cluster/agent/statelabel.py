"""The node's label that says how far its vGPUs have come, and the annotation that says why.

Written by a merge patch of these two keys alone: it names no version, so others who write to the node at the same time
are no conflict. Where patching is not permitted (NVIDIA's roles permit updates alone), the node is read and written
back whole with its version, and again after a conflict. What is not written yet is tried for ever; only the latest
state counts.
"""

import logging
from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from gpuvirt.clock import Clock, Signal
from gpuvirt.cluster.agent.names import REASON_ANNOTATION, STATE_LABEL
from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.failures import ApiError, ConflictError, ForbiddenError
from gpuvirt.cluster.mirror import News, ObjectKey
from gpuvirt.cluster.resources import NODES, Metadata, Node
from gpuvirt.model.heard import VgpuState
from gpuvirt.node.cell import Cell
from gpuvirt.tasks import backoff_s

log = logging.getLogger(__name__)

MOST_REASON = 1000
"""Characters of a reason; all annotations of an object together have 256 KiB."""
MOST_CONFLICTS = 5
"""Updates in a row that others were faster with, before it is waited."""
MOST_PAUSE_S = 30.0

Fields = dict[str, msgspec.Raw]
"""An object of which most is not ours to understand, and all is written back."""


class Source(Protocol):
    """The agent, as far as its state is told."""

    @property
    def vgpu_states(self) -> Cell[VgpuState | None]:
        """What is to be told; None: nothing."""
        ...


class _Labels(msgspec.Struct, frozen=True):
    labels: dict[str, str | None]
    annotations: dict[str, str | None]


class _Patch(msgspec.Struct, frozen=True):
    metadata: _Labels


def patch_of(wanted: VgpuState | None, heard: Metadata | None) -> _Patch | None:
    """Return what a node lacks to say what it should; None where that is nothing, or not known yet."""
    if wanted is None or heard is None:
        return None
    reason = _reason(wanted)
    said = heard.labels.get(STATE_LABEL), heard.annotations.get(REASON_ANNOTATION)
    if said == (wanted.name, reason):
        return None
    return _Patch(_Labels({STATE_LABEL: wanted.name}, {REASON_ANNOTATION: reason}))


def patched(node: Fields, patch: _Patch) -> Fields:
    """Return a node with a patch in it, and everything else as it was."""
    metadata = msgspec.json.decode(node["metadata"], type=Fields)
    for field, changes in (("labels", patch.metadata.labels), ("annotations", patch.metadata.annotations)):
        before = msgspec.json.decode(metadata[field], type=dict[str, str]) if field in metadata else {}
        after = {key: value for key, value in (before | changes).items() if value is not None}
        metadata[field] = msgspec.Raw(msgspec.json.encode(after))
    return node | {"metadata": msgspec.Raw(msgspec.json.encode(metadata))}


def _reason(state: VgpuState) -> str | None:
    text = " ".join(state.reason.split())
    return (text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]}...") or None


class StateLabel:
    """Keeps one node's label as the agent's state is."""

    def __init__(self, client: Client, node: str, clock: Clock, random: Random) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._random = random
        self._heard: Metadata | None = None
        self._due = Signal()

    def hear(self, news: News[Node]) -> None:
        """Take what the node says now; nothing is written to a node that is not there."""
        node = news.objects.get(ObjectKey("", self._node))
        self._heard = node.metadata if node is not None else None
        self._due.set()

    async def run(self, source: Source, tell: Callable[[ApiError | None], None]) -> None:
        """Write for ever what differs; `tell` takes what is wrong, and None when nothing is any more."""
        with source.vgpu_states.telling(self._due):
            while True:
                pauses_s = backoff_s(most_s=MOST_PAUSE_S)
                while (patch := patch_of(source.vgpu_states.get(), self._heard)) is not None:
                    try:
                        self._heard = (await self._write(patch)).metadata
                    except ApiError as error:
                        tell(error)
                        pause_s = next(pauses_s) * (0.5 + 0.5 * self._random.random())
                        await self._clock.sleep(max(pause_s, error.retry_after_s))
                    else:
                        tell(None)
                await self._due.wait()

    async def _write(self, patch: _Patch) -> Node:
        try:
            return await self._client.patch(NODES, self._node, patch, PatchType.MERGE, Node)
        except ForbiddenError as forbidden:
            log.debug("patching nodes is not permitted; the node is updated")
            try:
                return await self._update_until_done(patch)
            except ForbiddenError:
                raise forbidden from None  # the lesser of the two to be permitted

    async def _update_until_done(self, patch: _Patch) -> Node:
        for _ in range(MOST_CONFLICTS):
            try:
                return await self._update(patch)
            except ConflictError:
                log.debug("the node has changed meanwhile; it is read again")
        return await self._update(patch)

    async def _update(self, patch: _Patch) -> Node:
        fields = await self._client.get(NODES, self._node, Fields)
        return await self._client.update(NODES, self._node, patched(fields, patch), Node)
