"""The desired vGPUs of a node's GPUs: those of the vGPU config that the node's label or the settings name.

A config's name is looked up in the reported configs first, and then in the built-in ones, so `A10-4Q` is a config on
every node. While the label or the configs have not been reported, no vGPUs are desired and none are removed.
"""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.vgpus import invalidvgpus
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.configchoice import ConfigGpu, GpuConfig, desired
from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source
from gpuvirt.model.desired.observed import ConfigText, NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.vgpuconfig import DEFAULT, ConfigEntry, Note, NoteCode, builtin_configs
from gpuvirt.model.desired.workload import VGPU_CONFIG_LABEL, mode_source, source_of_spec
from gpuvirt.model.inventory.inventory import Inventory

CLASSES = frozenset({0x030000, 0x030200})
"""The PCI classes of the GPUs that configs count, as vgpu-device-manager does."""

Configs = Mapping[str, tuple[ConfigEntry, ...]]


class ConfigSet(msgspec.Struct, frozen=True):
    """The vGPU configs of a node, beside the built-in ones."""

    configs: Configs = msgspec.field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    problem: InvalidDesired | None = None
    """Why the text that was reported last can't be used."""
    good: ConfigText | None = None
    """The text that has the configs; None if there are only the built-in ones."""


class DesiredTypes(msgspec.Struct, frozen=True):
    """The desired vGPUs of each GPU, or why they can't be derived."""

    name: str | None = None
    """The config; None if none is desired, or if it has not been reported."""
    desired_by_gpu: Mapping[PciAddress, DesiredVgpus] = msgspec.field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    problem: InvalidDesired | None = None
    """Why the name can't be resolved."""

    @property
    def undecided(self) -> tuple[Note, ...]:
        """The notes that the host has not shown yet which cards its GPUs are. The config is not invalid then."""
        return () if self.desired_by_gpu else tuple(note for note in self.notes if note.code is NoteCode.CARD_UNDECIDED)


class ConfigName(msgspec.Struct, frozen=True):
    """The name of the desired config, and the place that sets it."""

    name: str
    source: Source


def config_name(request: NodeRequest, settings: Settings, *, in_cluster: bool) -> ConfigName | None:
    """Return the desired config; None if there is none, or if it has not been reported yet.

    A node of a cluster that has no label gets the config of the settings. If these have none, it gets `default`, which
    mode vgpu then means.
    """
    own = settings.vgpu_config
    of_settings = ConfigName(own, Source(Origin.SETTINGS, "settings $.vgpu_config")) if own is not None else None
    if not in_cluster:
        return of_settings
    if request.spec is not None and request.spec.value is not None:
        spec = request.spec.value
        if spec.vgpu_config:
            return ConfigName(spec.vgpu_config, source_of_spec(spec.config_origin, "vgpuConfig"))
        return ConfigName(DEFAULT, mode_source(settings, request))
    if request.config is None:
        return None
    if request.config.value:
        return ConfigName(request.config.value, Source(Origin.LABEL, f"label {VGPU_CONFIG_LABEL}"))
    return of_settings if own else ConfigName(DEFAULT, mode_source(settings, request))


def read_config_set(text: ConfigText, before: ConfigSet) -> ConfigSet:
    """Return the configs of a text; if it can't be used, the previous configs with the problem."""
    if text.other_keys is not None:
        return ConfigSet(before.configs, before.notes, invalidvgpus.no_key(text, text.other_keys), before.good)
    try:
        found = vgpuconfig.parse(text.text, where=text.where)
    except ConfigError as error:
        return ConfigSet(before.configs, before.notes, invalidvgpus.unreadable(text, error), before.good)
    return ConfigSet(found.configs, found.notes, None, text)


def without_text(before: ConfigSet, base: ConfigSet, named: str | None = None) -> ConfigSet:
    """Return the configs once the text is reported as absent: the previous ones, if there were any.

    `base` has the configs of a node that never had a text. `named` is the ConfigMap that the settings name.
    """
    if before.good is not None and before.good != base.good:
        return ConfigSet(before.configs, before.notes, invalidvgpus.gone(before.good), before.good)
    return base if named is None else replace(base, problem=invalidvgpus.missing_map(named))


def config_gpus(inventory: Inventory, gpu_states: Mapping[PciAddress, GpuState]) -> list[ConfigGpu]:
    """Return the GPUs of a host in the form in which configs select them."""
    ours = [
        gpu.function
        for _, gpu in sorted(inventory.gpus.items())
        if gpu.function.id.vendor == NVIDIA and gpu.function.class_code in CLASSES
    ]
    return [
        ConfigGpu(
            function.address,
            function.id,
            function.subsystem,
            index,
            frozenset(gpu_states[function.address].known_types if function.address in gpu_states else ()),
        )
        for index, function in enumerate(ours)
    ]


def resolve(config: ConfigName | None, config_set: ConfigSet, gpus: list[ConfigGpu]) -> DesiredTypes:
    """Return the vGPUs that a config desires of each GPU; GPUs that it does not select are left out."""
    if config is None:
        return DesiredTypes()
    name, source = config.name, config.source
    entries = config_set.configs.get(name) or builtin_configs().get(name)
    if entries is None:
        return DesiredTypes(
            name, problem=invalidvgpus.no_config(source, name, config_set.configs, config_set.good, gpus)
        )
    found = desired(entries, gpus)
    desired_by_gpu = {gpu: desired_vgpus_of(config_gpu) for gpu, config_gpu in found.gpus.items()}
    resolved = DesiredTypes(name, desired_by_gpu, found.notes)
    if found.gpus or not gpus or resolved.undecided:
        return resolved
    return replace(resolved, problem=invalidvgpus.for_no_gpu(source, name, config_set.configs, found, gpus))


def desired_vgpus_of(config_gpu: GpuConfig) -> DesiredVgpus:
    """Return a config's choice for one GPU in the form that the planner takes."""
    return DesiredVgpus(
        {profile.text: count for profile, count in config_gpu.types.items()}, config_gpu.sizes, config_gpu.scheduler
    )
