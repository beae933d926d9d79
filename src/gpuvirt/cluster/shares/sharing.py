"""How a cluster shares its GPUs: the resource, the units of a GPU, and the policy, which a pod may choose itself."""

import logging

import msgspec

from gpuvirt.cluster.shares.objects import SharingPod
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.shares.annotations import POLICY_ANNOTATION
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.placement import Policy
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE

log = logging.getLogger(__name__)


class Sharing(msgspec.Struct, frozen=True):
    """The settings of the extender."""

    resource: ResourceName = UNITS_RESOURCE
    whole: Units = WHOLE
    policy: Policy = Policy.BINPACK

    def policy_of(self, pod: SharingPod) -> Policy:
        """Return the policy of a pod: that of its annotation, else the cluster's."""
        text = pod.metadata.annotations.policy
        if not text:
            return self.policy
        try:
            return Policy(text)
        except ValueError:
            log.info(
                "%s: the annotation %s is %r; expected binpack or spread; using %s",
                pod.where,
                POLICY_ANNOTATION,
                text[:40],
                self.policy,
            )
            return self.policy
