"""The records of shares: the GPUs of each container of a node, by pod and container.

The agent keeps them on disk. They have each pod's requests, too, so that an agent that restarts while the API server is
unreachable knows which containers of a pod run at the same time.
"""

import re
from collections.abc import Collection, Container, Iterable, Mapping
from enum import Enum
from itertools import islice
from string import ascii_lowercase, digits

import msgspec

from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.allocations import Consumers, Unknown
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.shares.annotations import placement
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.placement import GpuId, Placement, Shares

# The kubelet needs an id for each unit, and chooses any of them. Units are fungible, so an id says nothing about a GPU,
# and has no NUMA node. The ids are short because the kubelet repeats them in its checkpoint and in pods' statuses. They
# are no numbers, since other device plugins use the numbers of IOMMU groups as ids.
MOST_UNITS = 100_000
"""A hundred whole GPUs; five characters are enough for sixteen times as many."""
_DIGITS = digits + ascii_lowercase
_ID = re.compile(r"u(?:0|[1-9a-z][0-9a-z]{0,3})")


def unit_ids(count: int, allocated: Collection[DeviceId]) -> tuple[DeviceId, ...]:
    """Return the ids to list: as many as there are units, with all those that containers have.

    Containers keep their units while GPUs become unhealthy, so the ids that are allocated stay, and free ids go first.
    """
    count = min(count, MOST_UNITS)
    ours = {device for device in allocated if is_unit_id(device)}
    free = (device for device in map(unit_id, range(MOST_UNITS + len(ours))) if device not in ours)
    return tuple(sorted((*ours, *islice(free, max(count - len(ours), 0))), key=lambda device: (len(device), device)))


def unit_id(number: int) -> DeviceId:
    """Return the id of a unit."""
    text = ""
    while number or not text:
        number, last = divmod(number, len(_DIGITS))
        text = _DIGITS[last] + text
    return DeviceId(f"u{text}")


def is_unit_id(device: DeviceId) -> bool:
    """Return whether an id is one of a unit; the kubelet's record may have others, of another plugin."""
    return _ID.fullmatch(device) is not None


class KeptShare(Enum):
    """The reason why a pod keeps its share although it has ended or was deleted."""

    RUNNING = "it has ended or was deleted by the API server, but processes of it still run"
    RECORDED = "it has ended or was deleted by the API server, but the kubelet's record has its units"
    RECORD_UNKNOWN = "it has ended or was deleted by the API server, but the kubelet's record can't be read"
    PROCESSES_UNKNOWN = "it has ended or was deleted by the API server, but the processes of pods can't be seen"

    @property
    def text(self) -> str:
        """The reason in words."""
        return self.value


def why_kept(
    gone: frozenset[PodUid], in_kubelet: frozenset[PodUid] | Unknown, running: frozenset[PodUid] | Unread
) -> Mapping[PodUid, KeptShare]:
    """Return the pods that keep their shares, of those that the API server lacks or calls ended.

    `in_kubelet` are the pods in the kubelet's record, `running` those of `gone` that have processes.
    """
    found: dict[PodUid, KeptShare] = {}
    for uid in gone:
        if isinstance(running, Unread):
            found[uid] = KeptShare.PROCESSES_UNKNOWN
        elif uid in running:
            found[uid] = KeptShare.RUNNING
        elif isinstance(in_kubelet, Unknown):
            found[uid] = KeptShare.RECORD_UNKNOWN
        elif uid in in_kubelet:
            found[uid] = KeptShare.RECORDED
    return found


class ShareLimit(msgspec.Struct, frozen=True):
    """The limit of a container on the one GPU that it has a part of."""

    memory_mib: int
    compute_percent: int
    by: Enforcement = Enforcement.HAMI_CORE
    """The enforcement of the limit; a record of a version before MPS does not have it."""
    is_soft: bool = False
    """Whether the container may use more memory while it is free."""


class ContainerRecord(msgspec.Struct, frozen=True):
    """The share of one container."""

    kind: ContainerKind
    units: Units
    gpus: dict[GpuId, Units]
    """The units of each GPU: one GPU for a share, several for whole GPUs."""
    device: str = ""
    """The name of the container's CDI device; empty until the kubelet first starts the container."""
    limit: ShareLimit | None = None
    """The limit of a part of a GPU, which the container keeps when it starts again; None: nothing limits it."""


class PodRecord(msgspec.Struct, frozen=True):
    """The shares of one pod."""

    namespace: str
    name: str
    containers: dict[ContainerName, ContainerRecord]
    """Init containers and sidecars in their order, then app containers; only those that request units."""

    @property
    def demand(self) -> Demand:
        """The pod's requests."""
        return Demand(
            tuple(ContainerDemand(name, container.kind, container.units) for name, container in self.containers.items())
        )

    @property
    def enforcement(self) -> Enforcement:
        """The enforcement for the pod's containers with a part of a GPU: either all of them have the same, or none."""
        limits = (container.limit for container in self.containers.values())
        return next((limit.by for limit in limits if limit is not None), Enforcement.NONE)

    @property
    def placement(self) -> Placement:
        """The GPUs of the pod's containers."""
        return placement(self.demand, {name: container.gpus for name, container in self.containers.items()})


class ShareRecords(msgspec.Struct, frozen=True):
    """The shares of all pods of a node."""

    pods: dict[PodUid, PodRecord] = {}

    def with_pod(self, uid: PodUid, pod: PodRecord) -> "ShareRecords":
        """Return the records with a pod added or replaced."""
        return msgspec.structs.replace(self, pods={**self.pods, uid: pod})

    def without(self, uids: Collection[PodUid]) -> "ShareRecords":
        """Return the records without pods that have ended."""
        return msgspec.structs.replace(self, pods={uid: pod for uid, pod in self.pods.items() if uid not in uids})

    def with_device(self, uid: PodUid, container: ContainerName, device: str) -> "ShareRecords":
        """Return the records with the CDI device of a container."""
        pod = self.pods[uid]
        named = msgspec.structs.replace(pod.containers[container], device=device)
        return self.with_pod(uid, msgspec.structs.replace(pod, containers={**pod.containers, container: named}))

    @property
    def devices(self) -> frozenset[str]:
        """The names of all containers' CDI devices."""
        return frozenset(
            container.device for pod in self.pods.values() for container in pod.containers.values() if container.device
        )

    @property
    def pods_by_gpu(self) -> Mapping[GpuId, tuple[str, ...]]:
        """The pods that have shares of each GPU, as texts in order: `pod default/a`."""
        texts: dict[GpuId, tuple[str, ...]] = {}
        for pod in self.pods.values():
            for gpu in pod.placement.used:
                texts[gpu] = (*texts.get(gpu, ()), f"pod {pod.namespace}/{pod.name}")
        return {gpu: tuple(sorted(pods)) for gpu, pods in texts.items()}

    def usage(self, capacity: Shares, but: Iterable[PodUid] = ()) -> NodeUsage:
        """Return the node's usage: the free units of the GPUs without these pods."""
        left_out = set(but)
        used = {uid: pod.placement.used for uid, pod in self.pods.items() if uid not in left_out}
        return NodeUsage(pods=used).with_capacity(capacity)

    def used_beside(self, capacity: Shares) -> Units:
        """Return the units that pods have of GPUs that are not shared any more: unhealthy or withheld ones."""
        gone = (units for pod in self.pods.values() for gpu, units in pod.placement.used.items() if gpu not in capacity)
        return Units(sum(gone))


def record_of(namespace: str, name: str, demand: Demand, chosen: Mapping[ContainerName, Shares]) -> PodRecord:
    """Return the record of a pod whose containers have these GPUs."""
    containers = {
        container.name: ContainerRecord(container.kind, container.units, dict(chosen[container.name]))
        for container in demand.containers
    }
    return PodRecord(namespace, name, containers)


def with_gpus(consumers: Consumers, resource: ResourceName, records: ShareRecords) -> Consumers:
    """Return the allocated devices of a node with the GPUs of shares in place of their units.

    A GPU with shares is used by their pods. The units of a pod that has not started are left in as one device, which
    can't be mapped: the pod may get any shared GPU.
    """
    found = {key: consumer for key, consumer in consumers.items() if key[0] != resource}
    for number, (uid, pod) in enumerate(sorted(records.pods.items())):
        for gpu in pod.placement.used:
            key = resource, DeviceId(f"{gpu}::{number}")
            found[key] = Consumer(pod_uid=uid, namespace=pod.namespace, pod=pod.name)
    started = {(pod.namespace, pod.name) for pod in records.pods.values()}
    waiting = {
        (consumer.pod_uid, consumer.namespace, consumer.pod): (key, consumer)
        for key, consumer in consumers.items()
        if key[0] == resource and not _has_started(consumer, records, started)
    }
    return found | dict(waiting.values())


def _has_started(consumer: Consumer, records: ShareRecords, started: Container[tuple[str | None, str | None]]) -> bool:
    if consumer.pod_uid is not None:  # a pod that is created again under its name has another UID
        return consumer.pod_uid in records.pods
    return (consumer.namespace, consumer.pod) in started
