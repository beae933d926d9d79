"""The events of a watch: decoded from the lines of an answer, and taken together to the list that they begin with."""

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from gpuvirt import nulls
from gpuvirt.kube.failures import (
    ApiError,
    ApiRefusedError,
    NotStreamedError,
    NotUnderstoodError,
    RbacRequest,
    Status,
    failure,
)
from gpuvirt.kube.resources import KubernetesObject, Metadata
from gpuvirt.kube.transport import Answer, Lines

T = TypeVar("T", bound=KubernetesObject)
D = TypeVar("D")

LISTED_WITHIN_S = 60.0
"""The longest time until all objects of a streaming list have come."""
COMPLETES_ANNOTATION = "k8s.io/initial-events-end"


class EventType(StrEnum):
    """The type of a watch event."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """No change: it reports the version that includes all previous events."""
    ERROR = "ERROR"


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """All objects of a collection, at a version."""

    items: tuple[T, ...]
    version: str


class Watched(msgspec.Struct, Generic[T], frozen=True):
    """One event of a watch; a bookmark has no object."""

    type: EventType
    version: str
    item: T | None
    completes: bool = False
    """Whether this bookmark says that all objects of a streaming list have come."""


Events = tuple[Watched[T], ...]
"""Events that have arrived together, in their order."""


class _Event(msgspec.Struct):
    type: EventType
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: Metadata


async def watched(asked: RbacRequest, answer: Answer, shape: type[T]) -> AsyncIterator[Events[T]]:
    """Yield the events of an answer as they arrive; raises ApiError, after the events that came before the error."""
    lines = Lines()
    async for part in answer.parts:
        together: list[Watched[T]] = []
        failed: ApiError | None = None
        try:
            for line in lines.feed(part):
                together.append(_event(asked, line, shape))  # noqa: PERF401  those before an error count
        except ApiError as error:
            failed = error
        if together:
            yield tuple(together)
        if failed is not None:
            raise failed


def _event(asked: RbacRequest, line: bytes, shape: type[T]) -> Watched[T]:
    event = decoded(asked, line, _Event)
    if event.type is EventType.ERROR:
        status = decoded(asked, event.object, Status)
        raise failure(asked, status.code, bytes(event.object))
    if event.type is EventType.BOOKMARK:
        metadata = decoded(asked, event.object, _Bookmark).metadata
        completes = metadata.annotations.get(COMPLETES_ANNOTATION) == "true"
        return Watched(event.type, metadata.resource_version, None, completes)
    item = decoded(asked, event.object, shape)
    return Watched(event.type, item.metadata.resource_version, item)


async def listed(asked: RbacRequest, events: AsyncIterator[Events[T]]) -> tuple[Listed[T], Events[T]]:
    """Return the objects of a streaming list, and the events that have come with the last of them.

    Raises NotStreamedError if the server can't complete it.

    A server whose etcd is older than 3.4.25 begins the answer, and then reports that it lacks RequestWatchProgress.
    """
    items: list[T] = []
    try:
        async with asyncio.timeout(LISTED_WITHIN_S):
            async for together in events:
                for number, event in enumerate(together, 1):
                    if event.completes:
                        return Listed(tuple(items), event.version), together[number:]
                    if event.item is not None:
                        items.append(event.item)
    except ApiRefusedError as error:
        raise NotStreamedError(str(error)) from error
    except TimeoutError as error:
        message = f"{asked.text}: the streaming list did not end in {LISTED_WITHIN_S:g} s"
        raise NotStreamedError(message) from error
    raise NotStreamedError(f"{asked.text}: the server ended the streaming list before all objects had come")


async def beginning(first: Events[T], events: AsyncIterator[Events[T]]) -> AsyncIterator[Events[T]]:
    """Yield some events before the others."""
    if first:
        yield first
    async for together in events:
        yield together


def decoded(asked: RbacRequest, content: bytes | msgspec.Raw, shape: type[D]) -> D:
    """Return the content of an answer in its type; raises NotUnderstoodError."""
    try:
        return nulls.decode(content, shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotUnderstoodError(f"{asked.text}: the answer has an unexpected form: {error}") from error
