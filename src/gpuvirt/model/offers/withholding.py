"""Which resources are not to be offered here, since KubeVirt offers the same devices itself.

Two plugins of one name are a danger in the kubelet: it asks whoever has registered last, takes the lists of both for
that one's, and when either stream ends it takes the other for gone (devicemanager of Kubernetes 1.36). So of a name
that KubeVirt registers too, nothing more is said, and the stream is left open; where KubeVirt has another name for the
devices, the list is cut down to what pods have.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import NodeSpec, Withheld
from gpuvirt.model.reasons import Reason, ReasonCode


@dataclass(frozen=True, slots=True)
class Withholding:
    """One resource that is not to be offered."""

    reason: Reason
    silent: bool
    """KubeVirt registers it under the same name."""


def withholdings(spec: NodeSpec | None) -> Mapping[ResourceName, Withholding]:
    """Return what a spec wants withheld."""
    return {
        ResourceName(one.resource): Withholding(_reason(one), one.offered_as in {None, one.resource})
        for one in (spec.withheld if spec is not None else ())
    }


def _reason(withheld: Withheld) -> Reason:
    """Return a controller's reason; a later controller may have codes that this agent does not know."""
    return Reason(ReasonCode.named(withheld.code) or ReasonCode.FOREIGN_PROVIDER, withheld.resource, withheld.message)
