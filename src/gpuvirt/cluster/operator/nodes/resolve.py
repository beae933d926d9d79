"""What a node's GpuNode is to want: from what the node is for, the ClusterPolicy and the node's labels.

A field that an admin has set in the GpuNode itself is the admin's: whoever owns a field is written down by the API
server (`managedFields`). It goes before all that is concluded here, and the spec says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gpuvirt.cluster.client import FIELD_MANAGER
from gpuvirt.cluster.kinds.gpunode import API_VERSION, KIND, GpuNode, Origins, Withheld
from gpuvirt.cluster.labels import CONFIG_LABEL
from gpuvirt.cluster.operator.nodes.placement import Placement
from gpuvirt.cluster.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.vgpudefaults import DEFAULT
from gpuvirt.model.desired.workload import MODES, Workload


class _Fields(msgspec.Struct, frozen=True):
    spec: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict, name="f:spec")


class FieldsOf(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of an object that one writer owns."""

    manager: str = ""
    subresource: str = ""
    fields_v1: _Fields = msgspec.field(default_factory=_Fields, name="fieldsV1")


class OwnedMetadata(Metadata, frozen=True, rename="camel"):
    """An object's metadata, with who owns its fields."""

    managed_fields: tuple[FieldsOf, ...] = ()


SPEC_FIELDS = ("mode", "vgpuConfig", "gpus")
"""The fields of a spec in which somebody says what is to be."""


class OwnedGpuNode(GpuNode, frozen=True, kw_only=True):
    """A GpuNode, with who owns its fields."""

    metadata: OwnedMetadata

    @property
    def is_ours_alone(self) -> bool:
        """Whether we have said what is wanted there, and nobody else has."""
        is_ours = self.spec is not None and self.spec.origins is not None
        return is_ours and all(self.owner_of(one) is None for one in SPEC_FIELDS)

    def owner_of(self, field: str) -> str | None:
        """Return who else owns a field of the spec, by its name at the API server; None: nobody but us."""
        owners = (one.manager for one in self.metadata.managed_fields if f"f:{field}" in one.fields_v1.spec)
        return next((owner or "somebody" for owner in owners if owner != FIELD_MANAGER), None)


@dataclass(frozen=True, slots=True)
class VgpuSwitch:
    """What the ClusterPolicy says of modes and vGPU configs."""

    binds: bool = True
    """Whether GPUs are bound to VFIO drivers (`vfioManager.enabled`)."""
    makes_vgpus: bool = True
    """Whether vGPUs are made (`vgpuDeviceManager.enabled`)."""
    default: str = DEFAULT
    origin: str = "ClusterPolicy"
    stopped_because: str | None = None
    """Why no vGPUs are to be made or changed anywhere."""
    withheld: tuple[Withheld, ...] | None = ()
    """What is not to be offered, wherever it is; None where that is not known."""


class AppliedSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The part of a GpuNode's spec that is ours."""

    mode: DesiredMode | None = None
    vgpu_config: str | None = None
    origins: Origins | None = None
    withheld: tuple[Withheld, ...] = ()
    reviewed: tuple[str, ...] | None = None


class _AppliedMetadata(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str] = {}


class AppliedGpuNode(msgspec.Struct, frozen=True, rename="camel"):
    """What is applied of a GpuNode."""

    metadata: _AppliedMetadata
    spec: AppliedSpec
    api_version: str = API_VERSION
    kind: str = KIND


def spec_of(
    labels: Mapping[str, str], placement: Placement, vgpu_switch: VgpuSwitch, observed: OwnedGpuNode | None
) -> AppliedSpec:
    """Return the spec that follows for a node, without what an admin has set in its GpuNode."""
    mode, mode_origin = _mode(placement, vgpu_switch)
    config = labels.get(CONFIG_LABEL)
    config_origin = (
        f"label {CONFIG_LABEL}" if config else f"{vgpu_switch.origin} $.spec.vgpuDeviceManager.config.default"
    )
    mode_owner, config_owner = (
        observed.owner_of(one) if observed is not None else None for one in ("mode", "vgpuConfig")
    )
    return AppliedSpec(
        mode=mode if mode_owner is None else None,
        vgpu_config=(config or vgpu_switch.default) if config_owner is None else None,
        origins=Origins(
            mode=mode_origin if mode_owner is None else f"set in this GpuNode by {mode_owner}",
            vgpu_config=config_origin if config_owner is None else f"set in this GpuNode by {config_owner}",
        ),
        withheld=_withheld(vgpu_switch.withheld, observed),
        reviewed=_reviewed(vgpu_switch.withheld, observed),
    )


def lacks(observed: OwnedGpuNode | None, desired: AppliedSpec) -> bool:
    """Return whether a GpuNode is not what is wanted of it."""
    if observed is None or observed.spec is None:
        return True
    spec = observed.spec
    pairs: Sequence[tuple[object, object]] = (
        (desired.mode, spec.mode),
        (desired.vgpu_config, spec.vgpu_config),
        (desired.origins, spec.origins),
        (desired.reviewed, spec.reviewed),
    )
    if any(one is not None and one != other for one, other in pairs):
        return True
    return {one.resource: one for one in desired.withheld} != {one.resource: one for one in spec.withheld}


def applied(node: str, desired: AppliedSpec) -> AppliedGpuNode:
    """Return what is to be applied."""
    return AppliedGpuNode(_AppliedMetadata(node), desired)


def _withheld(entries: tuple[Withheld, ...] | None, observed: OwnedGpuNode | None) -> tuple[Withheld, ...]:
    """Return what a node is not to offer, of what it has; where that is not known, what it was."""
    if observed is None:
        return ()
    if entries is None:
        return observed.spec.withheld if observed.spec is not None else ()
    has = {one.name for one in observed.status.resources} if observed.status is not None else set[str]()
    return tuple(one for one in entries if one.resource in has)


def _reviewed(entries: tuple[Withheld, ...] | None, observed: OwnedGpuNode | None) -> tuple[str, ...] | None:
    """Return the node's resources that were compared with KubeVirt's entries; where those are not known, as before.

    A resource without selectors has no devices yet, and can't be compared.
    """
    if entries is None:
        return observed.spec.reviewed if observed is not None and observed.spec is not None else None
    resources = observed.status.resources if observed is not None and observed.status is not None else ()
    return tuple(sorted(one.name for one in resources if one.pci_vendor_selectors or one.mdev_name_selectors))


def _mode(placement: Placement, vgpu_switch: VgpuSwitch) -> tuple[DesiredMode, str]:
    workload = placement.workload or Workload.CONTAINER
    if workload is Workload.PASSTHROUGH and not vgpu_switch.binds:
        return DesiredMode.UNMANAGED, f"{vgpu_switch.origin} $.spec.vfioManager.enabled"
    if workload is Workload.VGPU and not vgpu_switch.makes_vgpus:
        return DesiredMode.UNMANAGED, f"{vgpu_switch.origin} $.spec.vgpuDeviceManager.enabled"
    if workload is Workload.VGPU and vgpu_switch.stopped_because is not None:
        return DesiredMode.UNMANAGED, f"no vGPUs are made: {vgpu_switch.stopped_because}"
    return MODES[workload], placement.origin
