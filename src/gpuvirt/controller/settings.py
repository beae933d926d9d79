"""The controller's settings: what its command line and environment say."""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.shares.demand import WHOLE, Units


class SharedResource(msgspec.Struct, frozen=True):
    """The resource that agents offer shared GPUs as, and by which kube-scheduler asks the extender."""

    name: ResourceName
    units: Units = WHOLE
    """The units of a whole GPU."""


class ControllerSettings(msgspec.Struct, frozen=True):
    """The controller's settings: its command line and environment."""

    namespace: str
    """The namespace of the controller and of all operands."""
    coexists: bool = False
    """Whether NVIDIA's operator manages the ClusterPolicy's status and all nodes that are not for VMs."""
    image: str | None = None
    """gpuvirt's image, which agents run. Without it the controller deploys nothing and changes no operand."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    images: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Images of operands whose image the policy does not name, by environment variable: `VGPU_MANAGER_IMAGE`."""
    manages_kubevirt: bool = True
    """Whether the controller patches KubeVirt; otherwise it only reports what KubeVirt's configuration lacks."""
    shared: SharedResource | None = None
    """The resource whose pods gpuvirt's extender places. None: no extender runs."""
    labels_vgpu_types: bool = False
    """Whether agents run on nodes for containers, to label them with the types of their vGPUs."""
    namespace_sets_uid: bool = False
    """Whether the namespace sets the UID of unprivileged pods, as on OpenShift."""
