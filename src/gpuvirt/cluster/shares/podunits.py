"""The units that a pod counts for on its node, and the GPUs that they are on where its annotation tells."""

import logging
from collections.abc import Set as AbstractSet

from gpuvirt.cluster.shares.objects import SharingPod, demand_of_pod, requested
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.errors import GpuvirtError
from gpuvirt.model.shares.annotations import pod_shares
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.placement import GpuId, Shares
from gpuvirt.model.shares.quantities import InvalidQuantityError

log = logging.getLogger(__name__)

MOST_UNITS = Units(2**31)
"""The units that a pod counts for if its request cannot be read: its node's GPUs are full."""


def units_of_pod(pod: SharingPod, sharing: Sharing) -> Units:
    """Return the units that a pod counts for where its GPUs are not known."""
    try:
        return demand_of_pod(pod, sharing.resource, sharing.whole).total
    except InvalidQuantityError:
        return MOST_UNITS
    except GpuvirtError:
        return Units(sum(container.units for container in requested(pod, sharing.resource)))


def gpus_of_pod(pod: SharingPod, gpus: AbstractSet[GpuId], sharing: Sharing) -> Shares | None:
    """Return the units of a pod on each of its GPUs; None if they are not known, or not all among its node's `gpus`."""
    text = pod.metadata.annotations.shares
    if not text:
        return None
    try:
        used = pod_shares(text, demand_of_pod(pod, sharing.resource, sharing.whole), sharing.whole).used
    except GpuvirtError as error:
        log.warning("pod %s counts on each GPU of its node: %s", pod.where, error)
        return None
    if unknown := sorted(used.keys() - gpus):
        log.info("pod %s counts on each GPU of its node: its node has no %s", pod.where, unknown[0])
        return None
    return used
