"""The errors of calls to the API server, and retries after conflicts.

After a conflict with another writer (409), the object is read again and the write is repeated.

Source of the codes and of `Status`: Kubernetes' API conventions, "HTTP Status codes" and "Response Status Kind".
"""

import logging
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import TypeVar

import msgspec

from gpuvirt import nulls, plain
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.kube.resources import Resource
from gpuvirt.tasks import backoff_s

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST_TRIES = 10
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0

MOST_MESSAGE = 300
"""The most characters of a server's message; a proxy may answer with a whole page."""


class ApiError(GpuvirtError):
    """Base of all errors of the API server and the connection to it."""

    retry_after_s: float = 0.0
    """The pause that the server asks for before the next request."""


class UnreachableError(ApiError):
    """The server gave no answer: no connection, a broken or slow one, an untrusted certificate, or no HTTP."""


class BrokenError(UnreachableError):
    """The connection broke before the answer: the server, or the kernel, has ended it."""


class NotSentError(UnreachableError):
    """The request was not sent: no connection, or the process may no longer write."""


class CredentialsError(ApiError):
    """The request was not sent, because there are no credentials for it."""


class NotUnderstoodError(ApiError):
    """The answer does not have the expected form."""


class UnauthorizedError(ApiError):
    """The server rejects the credentials (401): the token has expired, or belongs to another cluster."""


class ForbiddenError(ApiError):
    """The user lacks a permission (403); the text has the missing rule of the role."""


class NotFoundError(ApiError):
    """The object does not exist (404)."""


class ConflictError(ApiError):
    """The object has changed since it was read (409)."""


class GoneError(ApiError):
    """The server no longer keeps the version to watch from (410): the collection must be listed again."""


class NotStreamedError(ApiError):
    """The server has no streaming lists: the collection must be listed in pages."""


class ApiRefusedError(ApiError):
    """Any other error answer: too many requests, an invalid object, an internal server error."""


NOT_MADE = (NotSentError, NotFoundError, ForbiddenError, UnauthorizedError, CredentialsError)
"""Errors that say that a write was not made, as a conflict does if it was sent once alone."""
_BY_CODE = {404: NotFoundError, 409: ConflictError, 410: GoneError}


class RbacRequest(msgspec.Struct, frozen=True):
    """A request in the terms of RBAC: the verb, the collection, and the object if there is one."""

    verb: str
    resource: Resource
    name: str | None = None
    part: str = ""
    """A subresource: `status`."""
    is_path: bool = False
    """Whether the plural name is a path of the API server that belongs to no collection."""

    @property
    def text(self) -> str:
        """The request as kubectl writes it: `get nodes node01`."""
        within = f" in namespace {self.resource.namespace}" if self.resource.namespace is not None else ""
        return " ".join(filter(None, (self.verb, self._resources, self.name))) + within

    @property
    def rule(self) -> str:
        """The rule of a role that permits the request."""
        if self.is_path:
            return f"{{nonResourceURLs: [{self.resource.plural}], verbs: [{self.verb}]}}"
        return f'{{apiGroups: ["{self.resource.group}"], resources: [{self._resources}], verbs: [{self.verb}]}}'

    @property
    def _resources(self) -> str:
        return f"{self.resource.plural}/{self.part}" if self.part else self.resource.plural


class Status(msgspec.Struct, frozen=True):
    """The body of an error answer (metav1.Status)."""

    message: str = ""
    reason: str = ""
    code: int = 0


def failure(asked: RbacRequest, code: int, body: bytes, *, retry_after_s: float = 0.0) -> ApiError:
    """Return the error for an answer with status `code`."""
    text = f"{asked.text}: the API server answers {code}: {_message_of(body)}"
    if code == 401:
        return UnauthorizedError(f"{text}; expected a token of this cluster that has not expired")
    if code == 403:
        kind = "Role" if asked.resource.namespace is not None else "ClusterRole"
        return ForbiddenError(f"{text}; to permit it, add to the {kind}: {asked.rule}")
    if code in _BY_CODE:
        return _BY_CODE[code](text)
    refused = ApiRefusedError(text)
    refused.retry_after_s = retry_after_s
    return refused


def _message_of(body: bytes) -> str:
    try:
        message = nulls.decode(body, Status).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = ""
    return plain.one_line(message or body.decode(errors="replace"), MOST_MESSAGE)


async def retried(
    attempt: Callable[[], Awaitable[T]], clock: Clock, conflicts: tuple[type[ApiError], ...] = (ConflictError,)
) -> T:
    """Call `attempt`, which reads an object and writes it, and return its result; repeat it after a conflict.

    Raises the last conflict after MOST_TRIES attempts (5 s of pauses), and any other error at once.
    """
    for pause_s in islice(backoff_s(first_s=FIRST_PAUSE_S, most_s=MOST_PAUSE_S), MOST_TRIES - 1):
        try:
            return await attempt()
        except conflicts as error:
            log.debug("%s; reading the object again and retrying", error)
            await clock.sleep(pause_s)
    return await attempt()
