"""One leader among equal processes, by a Lease: who holds it writes, the others wait.

Source: coordination.k8s.io/v1, and the rules of client-go's leader election: whether a lease has run out is judged by
this process's own clock since the lease was last seen to change, never by the holder's times, since clocks differ. A
leader that could not renew for some time stops before others may begin.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from random import Random

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.failures import ApiError, ConflictError, NotFoundError, retried
from gpuvirt.cluster.resources import Metadata, Resource

log = logging.getLogger(__name__)

DURATION_S = 15
"""For how long a lease that nobody renews is still its holder's."""
GIVE_UP_S = 10.0
"""How long a leader tries to renew before it stops leading; shorter than the lease, so that there are never two."""
RENEW_S = 2.0
CONTROLLER_LEASE = "gpuvirt-controller"
"""The lease of gpuvirt's own controllers."""


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Who leads."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True, rename="camel"):
    """A lease, as it is read and written."""

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()
    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"


def leases(namespace: str) -> Resource:
    """Return the leases of a namespace."""
    return Resource("leases", "coordination.k8s.io", "v1", namespace)


def claimed(lease: Lease, me: str, now: datetime, *, quiet_s: float) -> Lease | None:
    """Return the lease as it is to be written so that `me` leads; None where somebody else does.

    `quiet_s` is for how long the lease was not seen to change.
    """
    spec, at = lease.spec, f"{now:%Y-%m-%dT%H:%M:%S.%fZ}"
    if spec.holder_identity == me:
        return replace(lease, spec=replace(spec, renew_time=at, lease_duration_seconds=DURATION_S))
    if spec.holder_identity and quiet_s <= (spec.lease_duration_seconds or DURATION_S):
        return None
    transitions = (spec.lease_transitions or 0) + (1 if spec.holder_identity is not None else 0)
    return replace(lease, spec=LeaseSpec(me, DURATION_S, at, at, transitions))


@dataclass(frozen=True, slots=True)
class Candidacy:
    """Who wants to lead what."""

    namespace: str
    name: str
    me: str


class Election:
    """Takes part for one process."""

    def __init__(self, client: Client, candidacy: Candidacy, clock: Clock, random: Random) -> None:
        self._client = client
        self._candidacy = candidacy
        self._clock = clock
        self._random = random
        self._seen = ""
        """The version of the lease that was seen last, and since when."""
        self._seen_at_s = 0.0
        self.leader: str | None = None
        """Who leads, as far as is known."""

    @property
    def leads(self) -> bool:
        """Whether this process does."""
        return self.leader == self._candidacy.me

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait until this process is to lead, `lead` for as long as it does, and again; for ever.

        Raises what `lead` raises. Cancelled, it gives the lease back, so that another leads at once.
        """
        while True:
            await self._win()
            try:
                await self._hold(lead)
            finally:
                self.leader = None

    async def _win(self) -> None:
        """Return once this process leads."""
        while not await self._try():
            await self._clock.sleep(RENEW_S * (1.0 + 0.2 * self._random.random()))
        log.info("this process leads now", extra={"lease": self._candidacy.name})

    async def _hold(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Lead until the lease is lost; raises what leading raises, with the lease given back."""
        try:
            async with asyncio.TaskGroup() as group:
                leading = group.create_task(_forever(lead))
                await self._renew()
                log.warning("this process leads no longer: its lease could not be renewed, or is another's")
                leading.cancel()
        except BaseException:
            await self._give_back()
            raise

    async def _renew(self) -> None:
        """Renew for as long as that is possible."""
        renewed_at_s = self._clock.monotonic_s()
        while (left_s := renewed_at_s + GIVE_UP_S - self._clock.monotonic_s()) > 0:
            await self._clock.sleep(min(RENEW_S, left_s))
            asked_at_s = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(left_s):
                    if await self._try():
                        renewed_at_s = asked_at_s
                    elif self.leader is not None:
                        return
            except TimeoutError:
                log.info("the lease was not renewed in time")

    async def _try(self) -> bool:
        """Take or renew the lease; return whether this process leads. Who leads is None where that is not known."""
        candidacy = self._candidacy
        try:
            lease = await self._read()
            self._look_at(lease)
            quiet_s = self._clock.monotonic_s() - self._seen_at_s
            mine = claimed(lease, candidacy.me, self._clock.now(), quiet_s=quiet_s)
            if mine is None:
                self.leader = lease.spec.holder_identity
                return False
            written = await self._put(mine)
        except ConflictError:
            self.leader = None  # somebody was faster, and is seen at the next try
            return False
        except ApiError as error:
            self.leader = None
            log.warning("the lease can't be had: %s", error)
            return False
        self._look_at(written)
        self.leader = candidacy.me
        return True

    async def _read(self) -> Lease:
        candidacy = self._candidacy
        try:
            return await self._client.get(leases(candidacy.namespace), candidacy.name, Lease)
        except NotFoundError:
            return Lease(Metadata(candidacy.name, candidacy.namespace))

    async def _put(self, lease: Lease) -> Lease:
        """Write the lease, which has the version that was read; raises ConflictError where it has another by now."""
        at, name = leases(self._candidacy.namespace), self._candidacy.name
        if lease.metadata.resource_version:
            return await self._client.update(at, name, lease, Lease)
        return await self._client.create(at, lease, Lease)

    def _look_at(self, lease: Lease) -> None:
        if lease.metadata.resource_version != self._seen or not self._seen:
            self._seen, self._seen_at_s = lease.metadata.resource_version, self._clock.monotonic_s()

    async def usurp(self, for_s: int) -> None:
        """Take the lease from whoever has it, so that nobody leads for so long; raises ApiError.

        Who led before sees it when it renews next, and stops: `RENEW_S` later nothing more is written.
        """

        async def take() -> None:
            lease, now = await self._read(), f"{self._clock.now():%Y-%m-%dT%H:%M:%S.%fZ}"
            mine = LeaseSpec(self._candidacy.me, for_s, now, now, (lease.spec.lease_transitions or 0) + 1)
            await self._put(replace(lease, spec=mine))

        await retried(take, self._clock)  # a leader renews it at the same time

    async def _give_back(self) -> None:
        """Say that nobody leads, where this process did."""

        async def release() -> None:
            lease = await self._read()
            if lease.spec.holder_identity == self._candidacy.me:
                await self._put(replace(lease, spec=replace(lease.spec, holder_identity="")))

        try:
            async with asyncio.timeout(RENEW_S):
                await retried(release, self._clock)
        except (ApiError, TimeoutError) as error:
            log.info("the lease runs out by itself: %s", error)


async def _forever(lead: Callable[[], Awaitable[None]]) -> None:
    await lead()
