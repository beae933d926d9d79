"""Tells when a kind that the API server lacked may exist: asks for the API groups, once for all such kinds.

The list of groups never proves that a kind is absent: a server that has just started lists few groups, but answers 503
for their kinds. So only a list of the kind itself, answered by 404, does. A server that does not answer what groups it
has leads to a list of the kind, too. A watch of CustomResourceDefinitions would need a right on all of them.
"""

import asyncio
import logging

from gpuvirt.clock import Clock
from gpuvirt.kube.client import Client, GroupVersion
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.resources import Resource

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
"""The longest pause between two requests: a new kind is noticed within it."""


class ApiGroups:
    """The API groups of a server, for all reflectors whose kinds it lacks."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._served: frozenset[GroupVersion] | None = None
        """The groups by the last answer; None if there was none."""
        self._due_s: float | None = None
        """When to ask again; None if the server was never asked."""
        self._pause_s = FIRST_PAUSE_S
        self._asking = asyncio.Lock()

    async def until_possible(self, resource: Resource) -> None:
        """Return once the server has the group of a kind, or does not say which groups it has.

        The core kinds are in no group, and each server has them: a 404 for one comes from a proxy.
        """
        while resource.group:
            await self._refresh()
            if self._served is None or GroupVersion(resource.group, resource.version) in self._served:
                return
            await self._clock.sleep(self._left_s())

    def _left_s(self) -> float:
        return 0.0 if self._due_s is None else max(0.0, self._due_s - self._clock.monotonic_s())

    async def _refresh(self) -> None:
        """Ask for the groups if that is due. The pauses grow while the groups stay the same."""
        async with self._asking:
            if self._left_s():
                return
            try:
                served = await self._client.group_versions()
            except ApiError as error:
                log.debug("%s; the kinds are listed instead", error)
                served = None
            changed = self._due_s is None or served != self._served
            self._pause_s = FIRST_PAUSE_S if changed else min(self._pause_s * 2.0, MOST_PAUSE_S)
            self._served, self._due_s = served, self._clock.monotonic_s() + self._pause_s
