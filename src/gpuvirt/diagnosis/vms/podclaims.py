"""The claims (DRA) of pods as the API server has them: what each asks for, what it was given, and how far it is."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from gpuvirt.kube.kinds.core import ENDED, WholePod, condition
from gpuvirt.kube.kinds.resourceclaims import Result, WholeClaim
from gpuvirt.model.allocation.claims import DRIVER, named_gpu


class ClaimState(StrEnum):
    """How far a claim is."""

    PENDING = "Pending"
    """No scheduler has given it devices."""
    ALLOCATED = "Allocated"
    """It has devices, and no pod may use it now."""
    PREPARING = "Preparing"
    """Its pod waits for its devices on the node."""
    IN_USE = "InUse"
    ENDING = "Ending"
    """Its pod has ended, and the node has not given its devices back yet."""


class ClaimedDevice(msgspec.Struct, frozen=True):
    """A device of a claim."""

    request: str
    driver: str
    pool: str
    device: str
    gpu: str | None = None
    """The address; None for a device of another driver."""
    shape: str | None = None

    @property
    def text(self) -> str:
        """The device in words: `0000:65:00.0 (passthrough)`."""
        return f"{self.gpu} ({self.shape})" if self.gpu is not None else f"{self.device} of {self.driver}"


class ClaimSeen(msgspec.Struct, frozen=True):
    """A claim."""

    namespace: str
    name: str
    state: ClaimState
    classes: tuple[str, ...]
    """The DeviceClasses of its requests, with those of alternatives."""
    devices: tuple[ClaimedDevice, ...] = ()
    pods: tuple[str, ...] = ()
    """The pods that may use it, else those that name it."""
    reason: str = ""
    """Why it is pending, or not prepared."""

    @property
    def text(self) -> str:
        """The claim in words: `a10 (passthrough.gpuvirt.io)`."""
        return f"{self.name} ({', '.join(self.classes)})" if self.classes else self.name

    @property
    def node(self) -> str | None:
        """The node of its GPUs; None without one."""
        pools = (device.pool for device in self.devices if device.driver == DRIVER)
        return next((pool.rpartition("/")[0] for pool in pools), None)

    def is_ours(self, classes: frozenset[str]) -> bool:
        """Return whether it has, or may get, devices of gpuvirt's; `classes` are the DeviceClasses of such devices."""
        if self.devices:
            return any(device.driver == DRIVER for device in self.devices)
        return not classes.isdisjoint(self.classes)


Claimers = Mapping[tuple[str, str], Sequence[WholePod]]
"""The pods that name each claim, by the claim's namespace and name."""


def claimers(pods: Iterable[WholePod]) -> Claimers:
    """Return the pods that name each claim."""
    found = defaultdict[tuple[str, str], list[WholePod]](list)
    for pod in pods:
        for name in filter(None, pod.claims.values()):
            found[pod.metadata.namespace, name].append(pod)
    return found


def claim_seen(claim: WholeClaim, by_claim: Claimers, failures: Mapping[str, str]) -> ClaimSeen:
    """Return the evidence about a claim; `failures` are the kubelet's newest errors at its devices, by pods' uids."""
    metadata, status = claim.metadata, claim.status
    users = by_claim.get((metadata.namespace, metadata.name), ())
    reserved = {reservation.uid for reservation in status.reserved_for}
    users = [pod for pod in users if pod.metadata.uid in reserved] or list(users)
    state = _state(claim, [pod for pod in users if pod.metadata.uid in reserved])
    reasons = {
        ClaimState.PENDING: (_not_scheduled(pod) for pod in users),
        ClaimState.PREPARING: (failures.get(pod.metadata.uid, "") for pod in users),
    }.get(state, iter(()))
    results = status.allocation.devices.results if status.allocation is not None else ()
    return ClaimSeen(
        metadata.namespace,
        metadata.name,
        state,
        tuple(dict.fromkeys(_classes(claim))),
        tuple(map(_device, results)),
        tuple(pod.metadata.name for pod in users),
        next(filter(None, reasons), ""),
    )


def _classes(claim: WholeClaim) -> Iterator[str]:
    for request in claim.spec.devices.requests:
        if request.exactly is not None:
            yield request.exactly.device_class_name
        yield from (alternative.device_class_name for alternative in request.first_available)


def _device(result: Result) -> ClaimedDevice:
    named = named_gpu(result.device) if result.driver == DRIVER else None
    gpu, shape = named if named is not None else (None, None)
    return ClaimedDevice(result.request, result.driver, result.pool, result.device, gpu, shape)


def _state(claim: WholeClaim, reserved: Iterable[WholePod]) -> ClaimState:
    if claim.status.allocation is None:
        return ClaimState.PENDING
    phases = {pod.status.phase for pod in reserved}
    if not claim.status.reserved_for and not claim.metadata.deletion_timestamp:
        return ClaimState.ALLOCATED
    if "Running" in phases:
        return ClaimState.IN_USE
    return ClaimState.PREPARING if phases - ENDED else ClaimState.ENDING


def _not_scheduled(pod: WholePod) -> str:
    scheduled = condition(pod.status.conditions, "PodScheduled")
    return scheduled.text if scheduled is not None and scheduled.status == "False" else ""
