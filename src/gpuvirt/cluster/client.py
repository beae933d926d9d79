"""Calls to the API server, one a verb; answers in the shapes that callers declare.

What fails is told by `failures`, a class for each that somebody answers differently. Nothing is tried again here.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from gpuvirt import nulls
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.failures import Asked, NotUnderstoodError, Status, failure
from gpuvirt.cluster.resources import KubernetesObject, Metadata, Resource
from gpuvirt.cluster.transport import Answer, Lines, Request, Transport

T = TypeVar("T", bound=KubernetesObject)
D = TypeVar("D")

PAGE = 500
"""Objects a page of a list."""
FIELD_MANAGER = "gpuvirt"
"""Who owns the fields that are applied, as `kubectl get --show-managed-fields` has it."""
QUIET_S = 10.0
"""How much longer than its own end a watch may be silent before it is taken for dead."""


class PatchType(StrEnum):
    """How a patch is written."""

    MERGE = "application/merge-patch+json"
    """RFC 7386: what is null goes, what is not named stays."""
    JSON = "application/json-patch+json"
    """RFC 6902: operations, of which `test` makes the rest conditional."""
    APPLY = "application/apply-patch+yaml"
    """Server-side apply: all that the writer wants, and no more; what it no longer wants goes. JSON is YAML."""


class EventType(StrEnum):
    """What a watch says of an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """No news: the version that all news so far is part of."""
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Collection(Generic[T]):
    """The objects to be listed and watched, and the shape that they are decoded into."""

    resource: Resource
    shape: type[T]
    name: str | None = None
    """One object alone, by a field selector on its name: what RBAC's `resourceNames` permits to list and watch, too."""
    on_node: str | None = None
    """Pods of one node alone."""
    labelled: str = ""
    """A label selector: `app in (a,b)`."""

    def query(self, **more: str) -> str:
        """Return the query that selects them, with more parameters."""
        desired = {"metadata.name": self.name, "spec.nodeName": self.on_node}
        fields = ",".join(f"{field}={value}" for field, value in desired.items() if value is not None)
        selected = {"fieldSelector": fields, "labelSelector": self.labelled}
        return urlencode({key: value for key, value in selected.items() if value} | more)


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """All objects of a collection, at a version."""

    items: tuple[T, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Watched(Generic[T]):
    """One event of a watch; a bookmark has no object."""

    type: EventType
    version: str
    item: T | None


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    # `continue` is a word of Python's.
    continues_at: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: tuple[msgspec.Raw, ...] = ()


class _Event(msgspec.Struct):
    type: EventType
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: Metadata


class _Preconditions(msgspec.Struct, frozen=True):
    uid: str


class _DeleteOptions(msgspec.Struct, frozen=True):
    preconditions: _Preconditions


class Client:
    """One API server, as one user."""

    def __init__(self, credentials: Credentials) -> None:
        self._transport = Transport(credentials)

    async def get(self, resource: Resource, name: str, shape: type[D]) -> D:
        """Return one object; raises ApiError."""
        asked = Asked("get", resource, name)
        return _decoded(asked, await self._call(asked, Request("GET", resource.path_of(name))), shape)

    async def read(self, resource: Resource) -> str:
        """Return a whole collection as the server writes it, for a small one read elsewhere; raises ApiError."""
        asked = Asked("list", resource)
        return (await self._call(asked, Request("GET", resource.path))).decode()

    async def list(self, collection: Collection[T], *, page: int = PAGE) -> Listed[T]:
        """Return all objects of a collection, read in pages of so many at one version; raises ApiError.

        Raises GoneError where it took so long that the server no longer keeps that version.
        """
        asked, items, at = Asked("list", collection.resource, collection.name), list[T](), ""
        while True:
            query = collection.query(limit=str(page), **({"continue": at} if at else {}))
            body = await self._call(asked, Request("GET", f"{collection.resource.path}?{query}"))
            part = _decoded(asked, body, _Page)
            items += [_decoded(asked, raw, collection.shape) for raw in part.items]
            at = part.metadata.continues_at
            if not at:
                return Listed(tuple(items), part.metadata.resource_version)

    @asynccontextmanager
    async def watch(
        self, collection: Collection[T], version: str, *, for_s: int
    ) -> AsyncIterator[AsyncIterator[Watched[T]]]:
        """Give what happens to a collection after `version`, for as long as the server keeps on (`for_s`).

        Raises ApiError, GoneError where the server no longer keeps that version. What it gives ends where the server
        ends, and raises UnreachableError where the connection breaks.
        """
        asked = Asked("watch", collection.resource, collection.name)
        query = collection.query(
            watch="1", allowWatchBookmarks="true", resourceVersion=version, timeoutSeconds=str(for_s)
        )
        request = Request("GET", f"{collection.resource.path}?{query}")
        async with self._transport.ask(request, quiet_s=for_s + QUIET_S) as answer:
            if answer.status != 200:
                raise await _failed(asked, answer)
            yield _watched(asked, answer, collection.shape)

    async def patch(
        self, resource: Resource, name: str, patch: object, patch_type: PatchType, shape: type[D], *, part: str = ""
    ) -> D:
        """Change one object, and return what it is then; `patch` is anything that msgspec encodes. Raises ApiError.

        `part` names a subresource that is meant: `status`.
        """
        asked = Asked("patch", resource, name, part)
        path = f"{resource.path_of(name)}/{part}" if part else resource.path_of(name)
        request = Request("PATCH", path, {"Content-Type": patch_type}, msgspec.json.encode(patch))
        return _decoded(asked, await self._call(asked, request), shape)

    async def apply(self, resource: Resource, name: str, content: object, shape: type[D]) -> D:
        """Have one object, as far as `content` says, and return what it is then; raises ApiError.

        It is made where there is none. Fields that somebody else has set otherwise become ours.
        """
        asked = Asked("patch", resource, name)
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": "true"})
        headers = {"Content-Type": str(PatchType.APPLY)}
        request = Request("PATCH", f"{resource.path_of(name)}?{query}", headers, msgspec.json.encode(content))
        return _decoded(asked, await self._call(asked, request), shape)

    async def delete(self, resource: Resource, name: str, uid: str = "") -> None:
        """Delete one object; with `uid` that one alone, and none that has its name by now. Raises ApiError."""
        asked = Asked("delete", resource, name)
        body = msgspec.json.encode(_DeleteOptions(_Preconditions(uid))) if uid else b""
        headers = {"Content-Type": "application/json"} if uid else {}
        await self._call(asked, Request("DELETE", resource.path_of(name), headers, body))

    async def create(self, resource: Resource, content: object, shape: type[D]) -> D:
        """Make an object, and return it; raises ApiError, ConflictError where there is one of that name."""
        asked = Asked("create", resource)
        headers = {"Content-Type": "application/json"}
        request = Request("POST", resource.path, headers, msgspec.json.encode(content))
        return _decoded(asked, await self._call(asked, request), shape)

    async def update(self, resource: Resource, name: str, content: object, shape: type[D]) -> D:
        """Put `content` in an object's place, and return what it is then; raises ApiError.

        Raises ConflictError where the object has another version than `content` by now.
        """
        asked = Asked("update", resource, name)
        headers = {"Content-Type": "application/json"}
        request = Request("PUT", resource.path_of(name), headers, msgspec.json.encode(content))
        return _decoded(asked, await self._call(asked, request), shape)

    async def _call(self, asked: Asked, request: Request) -> bytes:
        async with self._transport.ask(request) as answer:
            if answer.status not in {200, 201, 202}:
                raise await _failed(asked, answer)
            return await answer.body()


async def _failed(asked: Asked, answer: Answer) -> Exception:
    body = await answer.body()
    return failure(asked, answer.status, body, retry_after=answer.headers.get("retry-after", ""))


async def _watched(asked: Asked, answer: Answer, shape: type[T]) -> AsyncIterator[Watched[T]]:
    lines = Lines()
    async for part in answer.parts:
        for line in lines.feed(part):
            event = _decoded(asked, line, _Event)
            if event.type is EventType.ERROR:
                status = _decoded(asked, event.object, Status)
                raise failure(asked, status.code, bytes(event.object))
            if event.type is EventType.BOOKMARK:
                version = _decoded(asked, event.object, _Bookmark).metadata.resource_version
                yield Watched(event.type, version, None)
            else:
                item = _decoded(asked, event.object, shape)
                yield Watched(event.type, item.metadata.resource_version, item)


def _decoded(asked: Asked, content: bytes | msgspec.Raw, shape: type[D]) -> D:
    try:
        return nulls.decode(content, shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotUnderstoodError(f"{asked.text}: the answer is not what was expected: {error}") from error
