"""The devices for which a kubelet could reject a running pod at its next start, unless they are healthy then.

A kubelet that starts admits the pods of its node again. It passes over containers that run. If a container has ended,
as an init container has, and its device is not healthy at that moment, it rejects the pod for good and kills the
containers that run (`devicesToAllocate` of its device manager; seen with 1.36.3).
"""

from collections import defaultdict
from collections.abc import Iterable

from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import Consumer, Entry, OfSeveral


def may_be_rejected(entry: Entry, of_several: OfSeveral | None) -> bool:
    """Return whether a kubelet could reject the pod of an allocated device at its next start.

    `of_several` are the devices of pods several of whose containers have devices: one of those may have ended. None if
    they are unknown. While the kubelet admits a pod, it has not named it yet.
    """
    return entry.consumer is None or of_several is None or (entry.resource, entry.device) in of_several


def devices_of_several(allocations: Iterable[tuple[tuple[ResourceName, DeviceId], Consumer]]) -> OfSeveral:
    """Return the devices of pods several of whose containers have devices; `allocations` name each container's."""
    by_pod = defaultdict[PodUid, dict[str | None, set[tuple[ResourceName, DeviceId]]]](dict)
    for key, consumer in allocations:
        if consumer.pod_uid is not None:
            by_pod[consumer.pod_uid].setdefault(consumer.container, set()).add(key)
    several = {pod: containers for pod, containers in by_pod.items() if len(containers) > 1}
    return {key: pod for pod, containers in several.items() for keys in containers.values() for key in keys}
