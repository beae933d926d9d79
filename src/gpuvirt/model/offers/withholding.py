"""The resources that are withheld because KubeVirt offers the same devices itself.

Two plugins of one name are a danger in the kubelet (devicemanager of Kubernetes 1.36). It calls the plugin that
registered last, and takes the lists of both for the lists of that plugin. When the stream of either ends, it treats the
other as gone. So for a name that KubeVirt registers too, the agent sends no more lists and leaves its stream open.
Where KubeVirt has another name for the devices, the agent lists only the allocated ones.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import GpuNodeSpec, Withheld
from gpuvirt.model.reasons import Reason, ReasonCode


class Withholding(msgspec.Struct, frozen=True):
    """A withheld resource."""

    reason: Reason
    silent: bool
    """Whether KubeVirt registers the same name."""


def withholdings(spec: GpuNodeSpec | None) -> Mapping[ResourceName, Withholding]:
    """Return the withheld resources of a GpuNode's spec."""
    return {
        ResourceName(withheld.resource): Withholding(
            _reason(withheld), withheld.offered_as in {None, withheld.resource}
        )
        for withheld in (spec.withheld if spec is not None else ())
    }


def _reason(withheld: Withheld) -> Reason:
    """Return the controller's reason; a newer controller may have codes that this agent does not have."""
    return Reason(ReasonCode.named(withheld.code) or ReasonCode.FOREIGN_PROVIDER, withheld.resource, withheld.message)
