"""A schedule's hypervisor: KubeVirt of this cluster, or another by the credentials of the schedule's Secret.

It is connected again when the schedule or the Secret changes.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.controller.writer import logged
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError, NotFoundError
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.kube.kinds.workloads import Secret, secrets
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.workers.connection import KEYS, HypervisorCredentials, HypervisorKind, MayCallUntil, OpenHypervisor
from gpuvirt.model.workers.hypervisor import Abilities, Answer, Call, Hypervisor, Refused, VmKey, VmsReading, VmsUnknown
from gpuvirt_schedules.controller.kubevirt.connection import KubeVirtVms

FindSchedule = Callable[[], VgpuSchedule | None]
"""Returns the schedule as it was last observed; None if it does not exist."""


class Opener(msgspec.Struct, frozen=True):
    """Opens the connections of this process while it leads."""

    client: Client
    namespace: str
    """The namespace of the controller, of its schedules and of their Secrets."""
    clock: Clock
    open_hypervisor: OpenHypervisor
    may_call_until_s: MayCallUntil

    def connect(self, schedule: FindSchedule) -> Hypervisor:
        """Return the connection of a schedule, which opens with the first reading."""
        return SecretConnection(self, schedule)


class _SecretVersion(msgspec.Struct, frozen=True):
    kind: HypervisorKind
    name: str
    uid: str
    version: str


class _Opened(msgspec.Struct, frozen=True):
    source: _SecretVersion | str
    """A Secret, or the namespace of KubeVirt's VMs."""
    hypervisor: Hypervisor


class SecretConnection:
    """The connection to the hypervisor of one schedule. Each reading compares the Secret; no method raises."""

    def __init__(self, opener: Opener, schedule: FindSchedule) -> None:
        self._opener = opener
        self._schedule = schedule
        self._opened: _Opened | None = None

    async def read(self) -> VmsReading:
        """Return all VMs that the hypervisor shows to the user of the Secret."""
        found = await self._current()
        return found if isinstance(found, VmsUnknown) else await found.read()

    async def call(self, call: Call) -> Answer:
        """Make one call, by the connection of the last reading."""
        if self._opened is None:
            return Refused(ReasonCode.HYPERVISOR_UNKNOWN, "the VMs have not been read")
        return await self._opened.hypervisor.call(call)

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return what can be done with each of these VMs; changes nothing."""
        found = await self._current()
        return found if isinstance(found, VmsUnknown) else await found.check(vms)

    async def close(self) -> None:
        """Kill the child, so that a call that hangs is never delivered later."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.hypervisor.close()

    async def _current(self) -> Hypervisor | VmsUnknown:
        """Return the connection by the schedule as it is now."""
        stored = self._schedule()
        place = stored.spec.hypervisor.kube_virt if stored is not None else None
        if place is not None:
            if self._opened is None or self._opened.source != place.namespace:
                await self.close()
                self._opened = _Opened(place.namespace, KubeVirtVms(self._opener.client, place.namespace))
            return self._opened.hypervisor
        named = stored.spec.hypervisor.secret if stored is not None else None
        if named is None:
            await self.close()
            return VmsUnknown(ReasonCode.HYPERVISOR_UNKNOWN, "the schedule does not exist, or names no Secret")
        return await self._by_secret(*named)

    async def _by_secret(self, kind: HypervisorKind, name: str) -> Hypervisor | VmsUnknown:
        """Return the connection by the Secret as it is now.

        A Secret that could not be read is no other Secret: the connection that there is goes on.
        """
        opened = self._opened
        try:
            secret = await self._opener.client.get(secrets(self._opener.namespace), name, Secret)
        except NotFoundError:
            await self.close()
            return _unknown(
                Reason(
                    ReasonCode.CREDENTIALS_INCOMPLETE,
                    f"the Secret {name} of namespace {self._opener.namespace}",
                    "does not exist",
                    fix=f"create it in namespace {self._opener.namespace}, or correct spec.hypervisor of the schedule",
                )
            )
        except ApiError as error:
            last = opened.source if opened is not None else ""
            if opened is not None and isinstance(last, _SecretVersion) and (last.kind, last.name) == (kind, name):
                return opened.hypervisor
            await self.close()
            return VmsUnknown(ReasonCode.HYPERVISOR_UNKNOWN, logged(str(error)))
        source = _SecretVersion(kind, name, secret.metadata.uid, secret.metadata.resource_version)
        if opened is not None and opened.source == source:
            return opened.hypervisor
        await self.close()
        return await self._open(source, secret)

    async def _open(self, source: _SecretVersion, secret: Secret) -> Hypervisor | VmsUnknown:
        credentials = HypervisorCredentials.of(source.kind, secret.data)
        if not isinstance(credentials, HypervisorCredentials):
            return _unknown(
                Reason(
                    ReasonCode.CREDENTIALS_INCOMPLETE,
                    f"the Secret {source.name}",
                    f"lacks {', '.join(credentials)}: expected the keys {', '.join(KEYS[source.kind])}",
                    fix=" ".join(
                        ("kubectl create secret generic NAME", *(f"--from-file={key}" for key in KEYS[source.kind]))
                    ),
                )
            )
        opener = self._opener
        hypervisor = await opener.open_hypervisor(source.kind, credentials, opener.clock, opener.may_call_until_s)
        self._opened = _Opened(source, hypervisor)
        return hypervisor


def _unknown(reason: Reason) -> VmsUnknown:
    return VmsUnknown(reason.code, reason.text)
