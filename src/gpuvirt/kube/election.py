"""Leader election by a Lease: the process that holds the lease leads, the other processes wait.

Source: coordination.k8s.io/v1, and the rules of client-go's leader election: a process measures by its own clock for
how long it has seen a lease unchanged, and does not use the holder's timestamps, since clocks differ. A leader that
cannot renew its lease for some time stops before another process may lead.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from datetime import datetime
from random import Random

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError, retried
from gpuvirt.kube.resources import Metadata, Resource

log = logging.getLogger(__name__)

DURATION_S = 15
"""The usual duration of a lease: it expires this long after its last renewal."""
RENEW_S = 2.0
RELEASE_S = 5.0
"""How long a process that ends tries to release its lease; on a busy node two requests can take seconds."""
CONTROLLER_LEASE = "gpuvirt-controller"
"""The lease of gpuvirt's own controllers."""
UNINSTALL = "uninstall-"
"""The prefix of the holder's identity in that lease by which an uninstall prevents controllers from leading."""


class Terms(msgspec.Struct, frozen=True):
    """The times of a lease."""

    duration_s: int = DURATION_S
    give_up_s: float = 10.0
    """The time after which a leader that cannot renew stops. It is shorter than the lease, so that two never lead."""
    renew_s: float = RENEW_S

    @property
    def within_s(self) -> float:
        """How long a write that was sent before `give_up_s` may be delivered: no longer than the lease lasts."""
        return self.duration_s - self.give_up_s


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The holder of a lease, and its times."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True, rename="camel"):
    """A Lease, as gpuvirt reads and writes it."""

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()
    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"


def new_identity(random: Random) -> str:
    """Return a name of this process as a candidate: its pod's host name, and a part that no earlier process had."""
    return f"{socket.gethostname()}_{random.getrandbits(48):012x}"


def leases(namespace: str) -> Resource:
    """Return the leases of a namespace."""
    return Resource("leases", "coordination.k8s.io", "v1", namespace)


def claimed(lease: Lease, me: str, now: datetime, *, quiet_s: float, duration_s: int = DURATION_S) -> Lease | None:
    """Return the lease to write so that `me` leads; None if another process holds the lease.

    `quiet_s` is the time since the last observed change of the lease.
    """
    spec, at = lease.spec, f"{now:%Y-%m-%dT%H:%M:%S.%fZ}"
    if spec.holder_identity == me:
        return replace(lease, spec=replace(spec, renew_time=at, lease_duration_seconds=duration_s))
    if spec.holder_identity and quiet_s <= (spec.lease_duration_seconds or duration_s):
        return None
    transitions = (spec.lease_transitions or 0) + (1 if spec.holder_identity is not None else 0)
    return replace(lease, spec=LeaseSpec(me, duration_s, at, at, transitions))


class Candidacy(msgspec.Struct, frozen=True):
    """The lease of an election, and the identity of this process."""

    namespace: str
    name: str
    me: str
    terms: Terms = Terms()


class Election:
    """The part of one process in an election."""

    def __init__(self, client: Client, candidacy: Candidacy, clock: Clock, random: Random) -> None:
        """The leader must write by the same client: when it loses the lease, its writes under way are reset."""
        self._client = client
        self._candidacy = candidacy
        self._clock = clock
        self._random = random
        self._seen = ""
        """The version of the lease that was observed last."""
        self._seen_at_s = 0.0
        """When that version was observed first."""
        self.leader: str | None = None
        """The identity of the leader; None while it is unknown."""
        self._until_s = 0.0
        """The end of this process's lease, for itself: it stops before the lease expires for others."""
        self._written: Lease | None = None
        """The lease as this process has just written it; None if it must be read first."""

    @property
    def may_write(self) -> bool:
        """Whether this process leads at this very moment, by the clock, even if it was stopped since its renewal."""
        return self._clock.monotonic_s() < self._until_s

    @property
    def may_write_until_s(self) -> float:
        """The monotonic second at which this process stops leading unless it renews the lease before; 0: it doesn't."""
        return self._until_s

    @property
    def leads(self) -> bool:
        """Whether this process leads."""
        return self.leader == self._candidacy.me

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait until this process leads, run `lead` until it loses the lease, and start over; until cancelled.

        Raises the exceptions of `lead`. When cancelled, it releases the lease, so that another can lead at once.
        """
        while True:
            await self._win()
            try:
                await self._hold(lead)
            finally:
                self.leader, self._until_s, self._written = None, 0.0, None

    async def _win(self) -> None:
        """Try to get the lease until this process leads."""
        try:
            while not await self._try_in_time():
                await self._clock.sleep(self._candidacy.terms.renew_s * (1.0 + 0.2 * self._random.random()))
        except asyncio.CancelledError:
            await self._release()  # the API server may have made a write whose answer has not come
            raise
        log.info("this process has become the leader", extra={"lease": self._candidacy.name})

    async def _try_in_time(self) -> bool:
        """Try to get the lease; a connection that is cut off must not delay the next try."""
        try:
            async with asyncio.timeout(self._candidacy.terms.give_up_s):
                return await self._try()
        except TimeoutError:
            self.leader = None
            log.warning("the lease could not be read or written: the API server did not answer in time")
            return False

    async def _hold(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Run `lead` until the lease is lost; raises the exceptions of `lead` after the release of the lease."""
        try:
            async with asyncio.TaskGroup() as group:
                leading = group.create_task(_forever(lead))
                await self._renew()
                log.warning("this process is no longer the leader: it could not renew the lease, or another holds it")
                self._client.reset_writes()
                leading.cancel()
        except BaseException:
            await self._release()
            raise

    async def _renew(self) -> None:
        """Renew the lease until that has failed for `give_up_s` or another process holds it."""
        terms = self._candidacy.terms
        while (left_s := self._until_s - self._clock.monotonic_s()) > 0:
            await self._clock.sleep(min(terms.renew_s, left_s))
            if (left_s := self._until_s - self._clock.monotonic_s()) <= 0:
                return  # this process was stopped meanwhile, and another may have led
            try:
                async with asyncio.timeout(left_s):
                    if not await self._try() and self.leader is not None:
                        return
            except TimeoutError:
                log.info("the API server did not answer the renewal of the lease in time")

    async def _try(self) -> bool:
        """Acquire or renew the lease, and return whether this process leads; sets `leader`, None if it is unknown.

        A leader writes its last value again. The API server refuses that if another process has written since, and then
        the lease is read.
        """
        candidacy, asked_at_s = self._candidacy, self._clock.monotonic_s()
        duration_s = candidacy.terms.duration_s
        last, self._written = self._written, None
        try:
            lease = last if last is not None else await self._read()
            self._observe(lease)
            quiet_s = self._clock.monotonic_s() - self._seen_at_s
            mine = claimed(lease, candidacy.me, self._clock.now(), quiet_s=quiet_s, duration_s=duration_s)
            if mine is None:
                self._until_s = 0.0
                self.leader = lease.spec.holder_identity
                return False
            written = await self._put(mine)
        except ConflictError:
            if last is not None:
                return await self._try()
            self.leader = None  # another process was faster; the next try reads its lease
            return False
        except ApiError as error:
            self.leader = None
            log.warning("the lease could not be read or written: %s", error)
            return False
        self._observe(written)
        self._written = written
        self.leader = candidacy.me
        self._until_s = asked_at_s + candidacy.terms.give_up_s
        return True

    async def _read(self) -> Lease:
        candidacy = self._candidacy
        try:
            return await self._client.get(leases(candidacy.namespace), candidacy.name, Lease)
        except NotFoundError:
            return Lease(Metadata(candidacy.name, candidacy.namespace))

    async def _put(self, lease: Lease) -> Lease:
        """Write the lease with the version that was read; raises ConflictError if it has changed since."""
        at, name = leases(self._candidacy.namespace), self._candidacy.name
        if lease.metadata.resource_version:
            return await self._client.update(at, name, lease, Lease)
        return await self._client.create(at, lease, Lease)

    def _observe(self, lease: Lease) -> None:
        if lease.metadata.resource_version != self._seen or not self._seen:
            self._seen, self._seen_at_s = lease.metadata.resource_version, self._clock.monotonic_s()

    async def usurp(self, for_s: int) -> None:
        """Take the lease from its holder, so that no process leads for `for_s` seconds; raises ApiError.

        The previous leader notices it at its next renewal and stops: after `RENEW_S` it writes nothing more.
        """

        async def take() -> None:
            lease, now = await self._read(), f"{self._clock.now():%Y-%m-%dT%H:%M:%S.%fZ}"
            mine = LeaseSpec(self._candidacy.me, for_s, now, now, (lease.spec.lease_transitions or 0) + 1)
            await self._put(replace(lease, spec=mine))

        await retried(take, self._clock)  # the leader may renew it at the same time

    async def _release(self) -> None:
        """Clear the holder of the lease if it is this process, which writes nothing more."""
        self._until_s = 0.0

        async def release() -> None:
            lease = await self._read()
            if lease.spec.holder_identity == self._candidacy.me:
                await self._put(replace(lease, spec=replace(lease.spec, holder_identity="")))

        try:
            async with asyncio.timeout(RELEASE_S):
                await retried(release, self._clock)
        except (ApiError, TimeoutError) as error:
            log.info("the lease could not be released, and expires by itself: %s", error)


async def _forever(lead: Callable[[], Awaitable[None]]) -> None:
    await lead()
