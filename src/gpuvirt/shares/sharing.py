"""How a cluster shares its GPUs: the resource, the units of a GPU, and the policy; what each pod has by them."""

import logging
from collections.abc import Set as AbstractSet

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.shares.annotations import POLICY_ANNOTATION, SHARES_ANNOTATION, pod_shares
from gpuvirt.model.shares.demand import WHOLE, InvalidQuantityError, Units
from gpuvirt.model.shares.placement import GpuId, Policy, Shares
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE
from gpuvirt.shares.objects import SharingPod, demand_of_pod, requested

log = logging.getLogger(__name__)

MOST_UNITS = Units(2**31)
"""The units that a pod counts for if its request cannot be read: its node's GPUs are full."""


class Sharing(msgspec.Struct, frozen=True):
    """The settings of the extender."""

    resource: ResourceName = UNITS_RESOURCE
    whole: Units = WHOLE
    policy: Policy = Policy.BINPACK

    def policy_of(self, pod: SharingPod) -> Policy:
        """Return the policy of a pod: that of its annotation, else the cluster's, also where no node gets the pod."""
        text = pod.metadata.annotations.get(POLICY_ANNOTATION)
        return Policy(text) if text in set(Policy) else self.policy

    def units_of(self, pod: SharingPod) -> Units:
        """Return the units that a pod counts for where its GPUs are not known."""
        try:
            return demand_of_pod(pod, self.resource, self.whole).total
        except InvalidQuantityError:
            return MOST_UNITS
        except GpuvirtError:
            return Units(sum(container.units for container in requested(pod, self.resource)))

    def gpus_of(self, pod: SharingPod, gpus: AbstractSet[GpuId]) -> Shares | None:
        """Return the units of a pod on each of its GPUs, by its annotation.

        None if they are not known, or not all among its node's `gpus`.
        """
        text = pod.metadata.annotations.get(SHARES_ANNOTATION)
        if not text:
            return None
        try:
            used = pod_shares(text, demand_of_pod(pod, self.resource, self.whole), self.whole).used
        except GpuvirtError as error:
            log.warning("pod %s counts on each GPU of its node: %s", pod.where, error)
            return None
        if unknown := sorted(used.keys() - gpus):
            log.info("pod %s counts on each GPU of its node: its node has no %s", pod.where, unknown[0])
            return None
        return used
