"""The spec of a node's GpuNode, from its workload, the ClusterPolicy, the node's labels and VgpuSchedules.

A field that an admin has set in the GpuNode takes precedence over all of these, and `spec.origins` says so. The API
server records the owner of each field in `managedFields`.

A schedule that can't be followed, or is suspended, changes no node: one that has its vGPU config keeps that. So does a
node that several schedules cover.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from gpuvirt.controller.nodes.placement import NodePlacement
from gpuvirt.kube.client import FIELD_MANAGER
from gpuvirt.kube.kinds.gpunode import API_VERSION, KIND, Origins, ReadGpuNode, Withheld
from gpuvirt.kube.labels import CONFIG_LABEL, WITH_VGPU_DRIVER, LabelSelector
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.vgpuconfig import DEFAULT
from gpuvirt.model.desired.workload import MODES, Workload


class ConfiguredPhase(msgspec.Struct, frozen=True):
    """The vGPU config of the current phase."""

    phase: str
    vgpu_config: str
    nodes: LabelSelector


class ScheduledConfig(msgspec.Struct, frozen=True):
    """One schedule with vGPU configs: the nodes that it covers, and the vGPU config of its current phase."""

    schedule: str
    covers: tuple[LabelSelector, ...]
    """The nodes of all its phases."""
    layout: ConfiguredPhase | None = None
    """None if the current phase has no vGPU config."""
    is_followed: bool = True
    """Whether it is followed: it has no faults, is not suspended, and a phase has begun."""


class NodeConfig(msgspec.Struct, frozen=True):
    """The vGPU config that a node gets by a schedule."""

    vgpu_config: str
    origin: str
    """`VgpuSchedule gpus phase night`."""


class KeptConfig(msgspec.Struct, frozen=True):
    """The node keeps the vGPU config that it has by one of these schedules."""

    schedules: tuple[str, ...]

    def keeps(self, origin: str) -> bool:
        """Return whether a vGPU config of this origin is one of these schedules'."""
        return any(origin.startswith(origin_of(schedule, "")) for schedule in self.schedules)


class ScheduledConfigs(msgspec.Struct, frozen=True):
    """The vGPU configs of all schedules at one moment."""

    configs: tuple[ScheduledConfig, ...] = ()
    next_switch: datetime | None = None
    """When another phase begins."""


def config_of(configs: Iterable[ScheduledConfig], labels: Mapping[str, str]) -> NodeConfig | KeptConfig | None:
    """Return what schedules say of a node with these labels; None: its label and the ClusterPolicy count."""
    covering = [config for config in configs if any(selector.matches(labels) for selector in config.covers)]
    if not covering:
        return None
    if len(covering) > 1 or not covering[0].is_followed:
        return KeptConfig(tuple(config.schedule for config in covering))
    config = covering[0]
    layout = config.layout
    if layout is None or not layout.nodes.matches(labels):
        return None
    return NodeConfig(layout.vgpu_config, origin_of(config.schedule, layout.phase))


def origin_of(schedule: str, phase: str) -> str:
    """Return the origin of a vGPU config: `VgpuSchedule gpus phase night`."""
    return f"VgpuSchedule {schedule} phase {phase}"


class _Field(msgspec.Struct, frozen=True, gc=False):
    """An owned field. A msgspec.Raw would keep the whole answer of the API server in memory."""


class _SpecFields(msgspec.Struct, frozen=True, gc=False):
    mode: _Field | None = msgspec.field(default=None, name="f:mode")
    vgpu_config: _Field | None = msgspec.field(default=None, name="f:vgpuConfig")
    gpus: _Field | None = msgspec.field(default=None, name="f:gpus")
    shares: _Field | None = msgspec.field(default=None, name="f:shares")


class _Fields(msgspec.Struct, frozen=True, gc=False):
    spec: _SpecFields = msgspec.field(default=_SpecFields(), name="f:spec")


class FieldsOf(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The fields of an object that one field manager owns."""

    manager: str = ""
    fields_v1: _Fields = msgspec.field(default=_Fields(), name="fieldsV1")

    @property
    def of_spec(self) -> frozenset[str]:
        """The fields of a GpuNode's spec that admins may set, of which this manager owns one."""
        found = self.fields_v1.spec
        return frozenset(
            name
            for name, owned in zip(SPEC_FIELDS, (found.mode, found.vgpu_config, found.gpus, found.shares), strict=True)
            if owned
        )


class ManagedMetadata(Metadata, frozen=True, rename="camel"):
    """An object's metadata with the owners of its fields."""

    managed_fields: tuple[FieldsOf, ...] = ()

    def owner_of(self, field: str) -> str | None:
        """Return the field manager that owns a field of the spec, other than gpuvirt; None if there is none."""
        owners = (owned.manager for owned in self.managed_fields if field in owned.of_spec)
        return next((owner or "an unnamed field manager" for owner in owners if owner != FIELD_MANAGER), None)


SPEC_FIELDS = ("mode", "vgpuConfig", "gpus", "shares")
"""The fields of a GpuNode's spec that admins may set."""


class OwnedGpuNode(ReadGpuNode, frozen=True, kw_only=True):
    """A GpuNode as the controller keeps it, with the owners of its fields."""

    metadata: ManagedMetadata

    @property
    def is_ours_alone(self) -> bool:
        """Whether the controller has set the spec, and no other writer owns a field of it."""
        is_ours = self.spec is not None and self.spec.origins is not None
        return is_ours and all(self.owner_of(field) is None for field in SPEC_FIELDS)

    def owner_of(self, field: str) -> str | None:
        """Return the field manager that owns a field of the spec, other than gpuvirt; None if there is none."""
        return self.metadata.owner_of(field)


class VgpuSwitch(msgspec.Struct, frozen=True):
    """The ClusterPolicy's settings for modes and vGPU configs."""

    binds: bool = True
    """Whether agents bind GPUs to VFIO drivers (`vfioManager.enabled`)."""
    makes_vgpus: bool = True
    """Whether agents create vGPUs (`vgpuDeviceManager.enabled`)."""
    default: str = DEFAULT
    origin: str = "ClusterPolicy"
    stopped_because: str | None = None
    """Why agents must not create or change vGPUs on any node."""
    withheld: tuple[Withheld, ...] | None = ()
    """The resources that no agent may offer; None if they are unknown."""


class AppliedSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The part of a GpuNode's spec that the controller applies."""

    mode: DesiredMode | None = None
    vgpu_config: str | None = None
    origins: Origins | None = None
    withheld: tuple[Withheld, ...] = ()
    reviewed: tuple[str, ...] | None = None


class _AppliedMetadata(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str] = {}


class AppliedGpuNode(msgspec.Struct, frozen=True, rename="camel"):
    """The GpuNode that the controller applies."""

    metadata: _AppliedMetadata
    spec: AppliedSpec
    api_version: str = API_VERSION
    kind: str = KIND


def spec_of(
    labels: Mapping[str, str],
    placement: NodePlacement,
    vgpu_switch: VgpuSwitch,
    observed: OwnedGpuNode | None,
    scheduled: NodeConfig | KeptConfig | None = None,
) -> AppliedSpec:
    """Return the spec of a node's GpuNode, without the fields that an admin has set there.

    Precedence of vgpuConfig: the admin's, then `scheduled`, the config from a VgpuSchedule, then the label.
    """
    mode, mode_origin = _mode(placement, vgpu_switch)
    config, config_origin = _config(labels, vgpu_switch, observed, scheduled)
    mode_owner, config_owner = (
        observed.owner_of(field) if observed is not None else None for field in ("mode", "vgpuConfig")
    )
    return AppliedSpec(
        mode=mode if mode_owner is None else None,
        vgpu_config=config if config_owner is None else None,
        origins=Origins(
            mode=mode_origin if mode_owner is None else f"set in this GpuNode by {mode_owner}",
            vgpu_config=config_origin if config_owner is None else f"set in this GpuNode by {config_owner}",
        ),
        withheld=_withheld(vgpu_switch.withheld, observed),
        reviewed=_reviewed(vgpu_switch.withheld, observed),
    )


def lacks(observed: OwnedGpuNode | None, desired: AppliedSpec) -> bool:
    """Return whether a GpuNode differs from the desired spec."""
    if observed is None or observed.spec is None:
        return True
    spec = observed.spec
    pairs: Sequence[tuple[object, object]] = (
        (desired.mode, spec.mode),
        (desired.vgpu_config, spec.vgpu_config),
        (desired.origins, spec.origins),
        (desired.reviewed, spec.reviewed),
    )
    if any(value is not None and value != current for value, current in pairs):
        return True
    return {entry.resource: entry for entry in desired.withheld} != {entry.resource: entry for entry in spec.withheld}


def applied(node: str, desired: AppliedSpec) -> AppliedGpuNode:
    """Return the GpuNode to apply."""
    return AppliedGpuNode(_AppliedMetadata(node), desired)


def _withheld(entries: tuple[Withheld, ...] | None, observed: OwnedGpuNode | None) -> tuple[Withheld, ...]:
    """Return the entries for the node's own resources; if the entries are unknown, those that the spec has."""
    if observed is None:
        return ()
    if entries is None:
        return observed.spec.withheld if observed.spec is not None else ()
    resources = {resource.name for resource in observed.status.resources} if observed.status is not None else set[str]()
    return tuple(entry for entry in entries if entry.resource in resources)


def _reviewed(entries: tuple[Withheld, ...] | None, observed: OwnedGpuNode | None) -> tuple[str, ...] | None:
    """Return the node's resources that were compared with KubeVirt's entries; if these are unknown, those of the spec.

    A resource without selectors has no devices yet, and cannot be compared.
    """
    if entries is None:
        return observed.spec.reviewed if observed is not None and observed.spec is not None else None
    resources = observed.status.resources if observed is not None and observed.status is not None else ()
    compared = (resource for resource in resources if resource.pci_vendor_selectors or resource.mdev_name_selectors)
    return tuple(sorted(resource.name for resource in compared))


def _config(
    labels: Mapping[str, str],
    vgpu_switch: VgpuSwitch,
    observed: OwnedGpuNode | None,
    scheduled: NodeConfig | KeptConfig | None,
) -> tuple[str, str]:
    """Return the vGPU config with its origin. What a schedule has set stays while the schedule is not followed."""
    match scheduled:
        case NodeConfig(vgpu_config=config, origin=origin):
            return config, origin
        case KeptConfig():
            spec = observed.spec if observed is not None else None
            origin = spec.origins.vgpu_config if spec is not None and spec.origins is not None else ""
            if spec is not None and spec.vgpu_config is not None and scheduled.keeps(origin):
                return spec.vgpu_config, origin
        case None:
            pass
    config = labels.get(CONFIG_LABEL, "")
    if config:
        return config, f"label {CONFIG_LABEL}"
    return vgpu_switch.default, f"{vgpu_switch.origin} $.spec.vgpuDeviceManager.config.default"


def _mode(placement: NodePlacement, vgpu_switch: VgpuSwitch) -> tuple[DesiredMode, str]:
    workload = placement.workload or Workload.CONTAINER
    if workload is Workload.PASSTHROUGH and not vgpu_switch.binds:
        return DesiredMode.UNMANAGED, f"{vgpu_switch.origin} $.spec.vfioManager.enabled"
    if workload is Workload.VGPU and not vgpu_switch.makes_vgpus:
        return DesiredMode.UNMANAGED, f"{vgpu_switch.origin} $.spec.vgpuDeviceManager.enabled"
    if workload in WITH_VGPU_DRIVER and vgpu_switch.stopped_because is not None:
        return DesiredMode.UNMANAGED, f"no vGPUs are created: {vgpu_switch.stopped_because}"
    return MODES[workload], placement.origin
