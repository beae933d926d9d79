"""The client of the API server: one method for each verb, which decodes the answer into a type that the caller names.

It raises the errors of `failures`, and repeats nothing but the reads of a client that is `rereading`.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from enum import StrEnum
from typing import TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.failures import ApiRefusedError, NotStreamedError, RbacRequest, UnreachableError, failure
from gpuvirt.kube.resources import Collection, KubernetesObject, Resource
from gpuvirt.kube.transport import Answer, Request, Transport
from gpuvirt.kube.watchevents import Events, Listed, beginning, decoded, listed, watched

GROUPS_PATH = "/apis"
VERSION_PATH = "/version"


class GroupVersion(msgspec.Struct, frozen=True):
    """A version of an API group that the server has; the core group, without a name, is not among them."""

    group: str
    version: str


class ServerVersion(msgspec.Struct, rename="camel"):
    """The answer for `/version`."""

    git_version: str


class ServedVersion(msgspec.Struct):
    """A version of a group, as the server lists it."""

    version: str


class ServedGroup(msgspec.Struct):
    """A group with its versions."""

    name: str
    versions: tuple[ServedVersion, ...] = ()


class Groups(msgspec.Struct):
    """The answer for `/apis`."""

    groups: tuple[ServedGroup, ...] = ()

    @property
    def all_versions(self) -> frozenset[GroupVersion]:
        """All groups in all their versions."""
        return frozenset(GroupVersion(group.name, of.version) for group in self.groups for of in group.versions)


T = TypeVar("T", bound=KubernetesObject)
D = TypeVar("D")

log = logging.getLogger(__name__)

MaySend = Callable[[], bool]
"""Whether a process may still write: asked when the connection is there, right before the request is sent."""
PAGE = 500
"""Objects on a page of a list."""
FIELD_MANAGER = "gpuvirt"
"""The owner of applied fields, as `kubectl get --show-managed-fields` prints it."""
_NOT_STREAMED = {400, 422}
"""The statuses of answers from servers without streaming lists, or with these switched off (ValidateListOptions)."""
REREAD_AFTER_S = 0.2
"""How long after a read that failed it is sent again: an API server that ends, or etcd's new leader, takes longer than
a connection, and a caller that reads hundreds of objects begins again after seconds."""
QUIET_S = 10.0
"""The time after the requested end of a watch after which a silent watch counts as broken."""


class PatchType(StrEnum):
    """The format of a patch."""

    MERGE = "application/merge-patch+json"
    """RFC 7386: null deletes a field, absent fields stay."""
    JSON = "application/json-patch+json"
    """RFC 6902: a list of operations. `test` makes the following ones conditional."""
    APPLY = "application/apply-patch+yaml"
    """Server-side apply: all fields that the writer owns. Owned fields that it no longer sends are deleted. The body is
    JSON, which is valid YAML."""


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    # `continue` is a keyword of Python.
    continues_at: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: tuple[msgspec.Raw, ...] = ()


class _Preconditions(msgspec.Struct, frozen=True):
    uid: str


class _DeleteOptions(msgspec.Struct, frozen=True):
    preconditions: _Preconditions


class _WriteLimits(msgspec.Struct, frozen=True):
    """When a client may write, and for how long the kernel may try to deliver a write."""

    may_write: MaySend
    within_s: float

    def applied_to(self, request: Request) -> Request:
        """Return a write with these limits besides its own."""
        own = request.may_send
        may_send = self.may_write if own is None else lambda: self.may_write() and own()
        return replace(request, may_send=may_send, within_s=min(request.within_s, self.within_s))


class Client:
    """A client of one API server with the credentials of one user."""

    def __init__(self, credentials: Credentials) -> None:
        self._transport = Transport(credentials)
        self._limits: _WriteLimits | None = None
        self._rereads: Clock | None = None

    def close(self) -> None:
        """Close the connections that wait for a request; those that wait at the end of the event loop close anyway."""
        self._transport.close()

    def reset_writes(self) -> None:
        """Have the kernel deliver none of the writes that are under way; they raise UnreachableError."""
        self._transport.reset_writes()

    def leading(self, may_write: MaySend, within_s: float) -> "Client":
        """Return a client on the same connections whose writes are sent only if `may_write` holds right before.

        The kernel tries to deliver each for `within_s` at most. What was not sent raises NotSentError.
        """
        leading = copy(self)
        leading.limit_writes(may_write, within_s)
        return leading

    def rereading(self, clock: Clock) -> "Client":
        """Return a client on the same connections that sends a read once more if it fails; never a write.

        It is for callers whose many reads count together. An answer that says what is wrong is not asked for again.
        """
        rereading = copy(self)
        rereading.reread(clock)
        return rereading

    def reread(self, clock: Clock) -> None:
        """Send a read once more if it fails."""
        self._rereads = clock

    def limit_writes(self, may_write: MaySend, within_s: float) -> None:
        """Send each write only if `may_write` holds right before, and deliver it within a time."""
        self._limits = _WriteLimits(may_write, within_s)

    async def get(self, resource: Resource, name: str, shape: type[D]) -> D:
        """Return one object; raises ApiError."""
        asked = RbacRequest("get", resource, name)
        return decoded(asked, await self._call(asked, Request("GET", resource.path_of(name))), shape)

    async def read(self, resource: Resource) -> str:
        """Return a whole collection as undecoded JSON, for small collections; raises ApiError."""
        asked = RbacRequest("list", resource)
        return (await self._call(asked, Request("GET", resource.path))).decode()

    async def group_versions(self) -> frozenset[GroupVersion]:
        """Return the API groups of the server in all their versions; raises ApiError."""
        asked = RbacRequest("get", Resource(GROUPS_PATH), is_path=True)
        return decoded(asked, await self._call(asked, Request("GET", GROUPS_PATH)), Groups).all_versions

    async def server_version(self) -> str:
        """Return the version of the API server, `v1.33.1`; raises ApiError."""
        asked = RbacRequest("get", Resource(VERSION_PATH), is_path=True)
        return decoded(asked, await self._call(asked, Request("GET", VERSION_PATH)), ServerVersion).git_version

    async def list(self, collection: Collection[T], *, page: int = PAGE) -> Listed[T]:
        """Return all objects of a collection at one version, read in pages of `page` objects; raises ApiError.

        Raises GoneError if the server no longer keeps the version before all pages are read.
        """
        items, version = list[T](), ""
        async for found in self.pages(collection, page=page):
            items += found.items
            version = found.version
        return Listed(tuple(items), version)

    async def pages(self, collection: Collection[T], *, page: int) -> AsyncIterator[Listed[T]]:
        """Yield the pages of `list`, of which only one is in memory; raises what `list` does."""
        asked, position = RbacRequest("list", collection.resource, collection.name), ""
        while True:
            query = collection.query(limit=str(page), **({"continue": position} if position else {}))
            body = await self._call(asked, Request("GET", f"{collection.resource.path}?{query}"))
            found = decoded(asked, body, _Page)
            items = tuple(decoded(asked, raw, collection.shape) for raw in found.items)
            yield Listed(items, found.metadata.resource_version)
            position = found.metadata.continues_at
            if not position:
                return

    @asynccontextmanager
    async def watch(
        self, collection: Collection[T], version: str, *, for_s: int, gather_s: float = 0.0
    ) -> AsyncIterator[AsyncIterator[Events[T]]]:
        """Yield an iterator over the events of a collection after `version`; the server ends the watch after `for_s`.

        It gives those events together that have arrived together. Events in a stream gather for `gather_s` first; one
        that comes after a longer silence does not. Raises ApiError, and GoneError if the server no longer keeps the
        version. The iterator ends when the server ends the watch, and raises UnreachableError if the connection
        breaks.
        """
        asked = RbacRequest("watch", collection.resource, collection.name)
        query = collection.query(
            watch="1", allowWatchBookmarks="true", resourceVersion=version, timeoutSeconds=str(for_s)
        )
        request = Request("GET", f"{collection.resource.path}?{query}", gather_s=gather_s)
        async with self._transport.ask(request, quiet_s=for_s + QUIET_S) as answer:
            if answer.status != 200:
                raise await _failed(asked, answer)
            yield watched(asked, answer, collection.shape)

    @asynccontextmanager
    async def stream(
        self, collection: Collection[T], *, for_s: int, gather_s: float = 0.0
    ) -> AsyncIterator[tuple[Listed[T], AsyncIterator[Events[T]]]]:
        """Yield all objects of a collection, and an iterator over the later events, by one request (KEP-3157).

        The server answers from its cache, with its state at the time of the request or later. Raises as `watch`, and
        NotStreamedError if the server has no streaming lists: it is older, or has them switched off.
        """
        asked = RbacRequest("watch", collection.resource, collection.name)
        query = collection.query(
            watch="1",
            allowWatchBookmarks="true",
            sendInitialEvents="true",
            resourceVersionMatch="NotOlderThan",
            timeoutSeconds=str(for_s),
        )
        request = Request("GET", f"{collection.resource.path}?{query}", gather_s=gather_s)
        async with self._transport.ask(request, quiet_s=for_s + QUIET_S) as answer:
            if answer.status in _NOT_STREAMED:
                raise NotStreamedError(str(await _failed(asked, answer)))
            if answer.status != 200:
                raise await _failed(asked, answer)
            events = watched(asked, answer, collection.shape)
            first, more = await listed(asked, events)
            yield first, beginning(more, events)

    async def patch(
        self, resource: Resource, name: str, patch: object, patch_type: PatchType, shape: type[D], *, part: str = ""
    ) -> D:
        """Patch one object and return the new object; `patch` is anything that msgspec encodes. Raises ApiError.

        `part` is a subresource: `status`.
        """
        asked = RbacRequest("patch", resource, name, part)
        path = f"{resource.path_of(name)}/{part}" if part else resource.path_of(name)
        request = Request("PATCH", path, {"Content-Type": patch_type}, msgspec.json.encode(patch))
        return decoded(asked, await self._call(asked, request), shape)

    async def apply(self, resource: Resource, name: str, content: object, shape: type[D]) -> D:
        """Apply `content` to one object by server-side apply and return the new object; raises ApiError.

        The object is created if it does not exist. Fields with conflicts change their owner to gpuvirt (force).
        """
        asked = RbacRequest("patch", resource, name)
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": "true"})
        headers = {"Content-Type": str(PatchType.APPLY)}
        request = Request("PATCH", f"{resource.path_of(name)}?{query}", headers, msgspec.json.encode(content))
        return decoded(asked, await self._call(asked, request), shape)

    async def delete(self, resource: Resource, name: str, uid: str = "") -> None:
        """Delete one object; with `uid`, only if the object of that name still has this uid. Raises ApiError."""
        asked = RbacRequest("delete", resource, name)
        body = msgspec.json.encode(_DeleteOptions(_Preconditions(uid))) if uid else b""
        headers = {"Content-Type": "application/json"} if uid else {}
        await self._call(asked, Request("DELETE", resource.path_of(name), headers, body))

    async def create(
        self, resource: Resource, content: object, shape: type[D], *, may_send: MaySend | None = None
    ) -> D:
        """Create an object and return it; raises ApiError, and ConflictError if the name exists.

        `may_send` is asked right before the request is sent; NotSentError says that it was not.
        """
        asked = RbacRequest("create", resource)
        headers = {"Content-Type": "application/json"}
        request = Request("POST", resource.path, headers, msgspec.json.encode(content), may_send)
        return decoded(asked, await self._call(asked, request), shape)

    async def create_part(
        self, resource: Resource, name: str, part: str, content: object, *, within_s: float, may_send: MaySend
    ) -> None:
        """Create a subresource of one object, such as a pod's `binding`; raises ApiError.

        `may_send` is asked right before the request is sent; NotSentError says that it was not. The API server gives
        the request up `within_s` seconds after its receipt (apiserver/pkg/endpoints/filters/request_deadline.go), and
        the kernel when it could not deliver it for as long.
        """
        asked = RbacRequest("create", resource, name, part)
        headers = {"Content-Type": "application/json"}
        path = f"{resource.path_of(name)}/{part}?timeout={within_s:.6f}s"
        await self._call(asked, Request("POST", path, headers, msgspec.json.encode(content), may_send, within_s))

    async def update_part(self, resource: Resource, name: str, part: str, content: object) -> None:
        """Replace a subresource of one object, such as KubeVirt's `stop` of a VM; raises ApiError."""
        asked = RbacRequest("update", resource, name, part)
        headers = {"Content-Type": "application/json"}
        path = f"{resource.path_of(name)}/{part}"
        await self._call(asked, Request("PUT", path, headers, msgspec.json.encode(content)))

    async def update(
        self, resource: Resource, name: str, content: object, shape: type[D], *, may_send: MaySend | None = None
    ) -> D:
        """Replace an object by `content` and return the new object; raises ApiError. `may_send` as in `create`.

        Raises ConflictError if the object no longer has the version of `content`.
        """
        asked = RbacRequest("update", resource, name)
        headers = {"Content-Type": "application/json"}
        request = Request("PUT", resource.path_of(name), headers, msgspec.json.encode(content), may_send)
        return decoded(asked, await self._call(asked, request), shape)

    async def _call(self, asked: RbacRequest, request: Request) -> bytes:
        if self._limits is not None and request.is_write:
            request = self._limits.applied_to(request)
        if self._rereads is not None and not request.is_write:
            try:
                return await self._sent(asked, request)
            except (UnreachableError, ApiRefusedError) as error:
                if error.retry_after_s:
                    raise
                log.info("%s; it is read once more", error)
                await self._rereads.sleep(REREAD_AFTER_S)
        return await self._sent(asked, request)

    async def _sent(self, asked: RbacRequest, request: Request) -> bytes:
        async with self._transport.ask(request) as answer:
            if answer.status not in {200, 201, 202}:
                raise await _failed(asked, answer)
            return await answer.body()


async def _failed(asked: RbacRequest, answer: Answer) -> Exception:
    body = await answer.body()
    return failure(asked, answer.status, body, retry_after_s=answer.retry_after_s)
