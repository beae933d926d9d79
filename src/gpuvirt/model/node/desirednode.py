"""The desired state of a node, from the cluster or the settings: modes of GPUs, vGPU configs, the chosen config."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.model.change.nodevgpus import DesiredConfig
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigSet, config_name, read_config_set, without_text
from gpuvirt.model.desired.enforcement import DesiredEnforcement, enforcement_of, of_settings
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.desired.invalid import InvalidDesired, Source
from gpuvirt.model.desired.observed import ConfigText, GpuNodeSpec, NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import addresses_of_settings, modes_of, named_addresses, overridden_label


class RequestTerms(msgspec.Struct, frozen=True):
    """Where the desired state of a node may come from."""

    in_cluster: bool = False
    follows_spec: bool = False
    """Whether the agent watches its GpuNode: labels and settings count only once it has no spec."""
    base: ConfigSet = msgspec.field(default_factory=ConfigSet)
    """The vGPU configs that apply without a ConfigMap."""


class DesiredNode(msgspec.Struct, frozen=True):
    """The desired state of a node. Invalid parts of a request change nothing."""

    modes: Modes = msgspec.field(default_factory=Modes)
    """The desired modes of GPUs."""
    follows_cluster: bool = False
    """Whether the node's label or its GpuNode sets the modes."""
    named: Mapping[str, Source] = msgspec.field(default_factory=dict)
    """The GPUs whose mode is set by address, with the source that names each."""
    config: DesiredConfig = msgspec.field(default_factory=DesiredConfig)
    spec: GpuNodeSpec | None = None
    """The spec of the node's GpuNode, also from before a restart; None if there is none or it was never observed."""
    invalid_modes: InvalidDesired | None = None
    """Why the mode in the node's label or GpuNode is invalid."""
    enforcement: DesiredEnforcement | None = None
    """The enforcement of new pods' shares; None while it is not known."""
    invalid_enforcement: InvalidDesired | None = None
    """Why the enforcement in the node's label or GpuNode is invalid."""
    configs: ConfigSet = msgspec.field(default_factory=ConfigSet)
    """The vGPU configs, and why the newest can't be used."""
    read: ConfigText | None = None
    """The text of configs that was parsed last, valid or not."""

    @property
    def invalid_workload(self) -> tuple[InvalidDesired, ...]:
        """The invalid modes and enforcement in the node's labels or GpuNode."""
        found = (self.invalid_modes, self.invalid_enforcement)
        return tuple(invalid for invalid in found if invalid is not None)

    @property
    def good_configs(self) -> ConfigText | None:
        """The text of configs to keep for a restart; None if the newest is invalid or absent."""
        return self.read if self.configs.problem is None else None


def nothing_desired(
    settings: Settings,
    terms: RequestTerms,
    good_configs: ConfigText | None = None,
    enforcement: DesiredEnforcement | None = None,
) -> DesiredNode:
    """Return the desired state before any request.

    `good_configs` are the last valid configs before a restart, `enforcement` is what limited new pods.
    """
    desired = DesiredNode(
        named=addresses_of_settings(settings),
        configs=terms.base,
        enforcement=enforcement if terms.in_cluster else of_settings(settings),
    )
    return desired if good_configs is None else _with_text(desired, good_configs)


def desire(before: DesiredNode, request: NodeRequest, settings: Settings, terms: RequestTerms) -> DesiredNode:
    """Return the desired state by a request, as last observed; `before` is the last desired state."""
    desired = _with_configs(before, request, settings, terms)
    desired = replace(desired, spec=request.spec.value if request.spec is not None else None)
    desired = _with_enforcement(desired, request, settings, terms)
    if terms.follows_spec and request.spec is None:
        return desired  # labels and settings count only without a GpuNode's spec, which is still unknown
    modes, problem = modes_of(settings, request, before.modes)
    desired = replace(
        desired,
        modes=modes,
        follows_cluster=settings.workload_label or request.has_spec,
        named=named_addresses(settings, request),
        invalid_modes=problem or overridden_label(request),
    )
    if problem is not None and request.has_spec:
        return desired
    name = config_name(request, settings, in_cluster=terms.in_cluster)
    return replace(desired, config=replace(desired.config, name=name))


def _with_enforcement(
    before: DesiredNode, request: NodeRequest, settings: Settings, terms: RequestTerms
) -> DesiredNode:
    """Return the desired state with what limits new pods. While that is not observed, or invalid, it stays."""
    if not terms.in_cluster:
        return before
    if terms.follows_spec and request.spec is None:
        return before
    found = enforcement_of(request, settings)
    if isinstance(found, InvalidDesired):
        return replace(before, invalid_enforcement=found)
    return replace(before, enforcement=found or before.enforcement, invalid_enforcement=None)


def _with_configs(before: DesiredNode, request: NodeRequest, settings: Settings, terms: RequestTerms) -> DesiredNode:
    """Return the desired state with the vGPU configs of a request; they are unknown until a text was observed."""
    desired = before
    if request.configs is not None and request.configs.value is not None:
        desired = _with_text(before, request.configs.value)
    elif request.configs is not None:
        absent = without_text(before.configs, terms.base, _named_map(settings))
        desired = replace(before, configs=absent, read=None)
    observed = not terms.in_cluster or request.configs is not None or desired.configs.good is not None
    config_set = desired.configs if observed else None
    return replace(desired, config=replace(desired.config, config_set=config_set))


def _with_text(before: DesiredNode, text: ConfigText) -> DesiredNode:
    """Return the desired state with the configs of a text, which is parsed once."""
    return before if text == before.read else replace(before, configs=read_config_set(text, before.configs), read=text)


def _named_map(settings: Settings) -> str | None:
    """Return the ConfigMap that the settings name; None for the default one, which need not exist."""
    named = settings.vgpu_config_map
    return named if named != Settings().vgpu_config_map else None
