"""What can go wrong between us and the API server: a class for each failure, and retries.

A write that another writer was faster with (409) is done again from a fresh read.

Source of the codes and of `Status`: Kubernetes' API conventions, "HTTP Status codes" and "Response Status Kind".
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import msgspec

from gpuvirt import nulls
from gpuvirt.clock import Clock
from gpuvirt.cluster.resources import Resource
from gpuvirt.errors import GpuvirtError
from gpuvirt.tasks import backoff_s

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST_TRIES = 10
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0

MOST_TOLD = 300
"""Characters of what a server says; a proxy may answer with a page."""


class ApiError(GpuvirtError):
    """Base of what the API server's side raises."""

    retry_after_s: float = 0.0
    """How long the server asks to be left alone."""


class UnreachableError(ApiError):
    """There was no answer: no connection, a broken or slow one, a certificate that can't be trusted, or no HTTP."""


class CredentialsError(ApiError):
    """Nothing was asked: there are no credentials to ask with."""


class NotUnderstoodError(ApiError):
    """The answer is not what this kind of request is answered with."""


class UnauthorizedError(ApiError):
    """The server does not know us (401): the token has expired, or is another cluster's."""


class ForbiddenError(ApiError):
    """The server knows us, and we may not (403); the text has the line that a role lacks."""


class NotFoundError(ApiError):
    """There is no such object (404)."""


class ConflictError(ApiError):
    """The object has changed since it was read (409)."""


class GoneError(ApiError):
    """The version to go on from is no longer kept (410): list again."""


class RefusedError(ApiError):
    """Any other refusal: too many requests, not valid, a server that fails."""


_BY_CODE = {404: NotFoundError, 409: ConflictError, 410: GoneError}


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for: RBAC's verb, the collection, and the object where there is one."""

    verb: str
    resource: Resource
    name: str | None = None
    part: str = ""
    """A subresource: `status`."""

    @property
    def text(self) -> str:
        """The request as people say it: `get nodes node01`."""
        within = f" in namespace {self.resource.namespace}" if self.resource.namespace is not None else ""
        return " ".join(filter(None, (self.verb, self._resources, self.name))) + within

    @property
    def rule(self) -> str:
        """The line that a role needs for it."""
        return f'{{apiGroups: ["{self.resource.group}"], resources: [{self._resources}], verbs: [{self.verb}]}}'

    @property
    def _resources(self) -> str:
        return f"{self.resource.plural}/{self.part}" if self.part else self.resource.plural


class Status(msgspec.Struct, frozen=True):
    """Kubernetes' answer to what it does not do."""

    message: str = ""
    reason: str = ""
    code: int = 0


def failure(asked: Asked, code: int, body: bytes, *, retry_after: str = "") -> ApiError:
    """Return what an answer with status `code` means; `retry_after` is the header of that name."""
    said = _said(body)
    text = f"{asked.text}: the API server answers {code}: {said}"
    if code == 401:
        return UnauthorizedError(f"{text}; expected a token of this cluster that has not expired")
    if code == 403:
        kind = "Role" if asked.resource.namespace is not None else "ClusterRole"
        return ForbiddenError(f"{text}; to permit it, add to the {kind}: {asked.rule}")
    if code in _BY_CODE:
        return _BY_CODE[code](text)
    refused = RefusedError(text)
    refused.retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
    return refused


def _said(body: bytes) -> str:
    try:
        said = nulls.decode(body, Status).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = ""
    line = " ".join((said or body.decode(errors="replace")).split())
    return line if len(line) <= MOST_TOLD else f"{line[:MOST_TOLD]}..."


async def retried(
    attempt: Callable[[], Awaitable[T]], clock: Clock, conflicts: tuple[type[ApiError], ...] = (ConflictError,)
) -> T:
    """Return what `attempt` returns, which reads the object and writes it; a conflict begins another attempt.

    Raises the last conflict after MOST_TRIES attempts (5 s of pauses), and any other error at once.
    """
    for pause_s in islice(backoff_s(first_s=FIRST_PAUSE_S, most_s=MOST_PAUSE_S), MOST_TRIES - 1):
        try:
            return await attempt()
        except conflicts as error:
            log.debug("%s; it is tried again from a fresh read", error)
            await clock.sleep(pause_s)
    return await attempt()
