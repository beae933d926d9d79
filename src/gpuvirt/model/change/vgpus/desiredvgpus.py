"""Which vGPUs are wanted on a node's GPUs: by the config that the node's label names, or its settings.

A config's name is looked for in the configs that were heard, and then in the built-in ones, so that `A10-4Q` means
something on every node. What was not heard is not taken for absent: nothing is wanted again until it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
from gpuvirt.model.desired.vgpudefaults import DEFAULT, builtin_configs
from gpuvirt.model.desired.vgpuentries import Entry, Note, NoteCode
from gpuvirt.model.desired.workload import VGPU_CONFIG_LABEL, mode_source, source_of_spec
from gpuvirt.model.inventory.inventory import Inventory

CLASSES = frozenset({0x030000, 0x030200})
"""Of the GPUs that configs count, as vgpu-device-manager does."""

Configs = Mapping[str, tuple[Entry, ...]]


@dataclass(frozen=True, slots=True)
class Book:
    """The configs that there are."""

    configs: Configs = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    problem: InvalidDesired | None = None
    """Why what was heard last can't be used."""
    good: ConfigText | None = None
    """The text that the configs are of; None for the built-in ones alone."""


@dataclass(frozen=True, slots=True)
class DesiredTypes:
    """What is wanted, or why that is not known."""

    name: str | None = None
    """The config; None where none is wanted, or it was not heard which."""
    desired_by_gpu: Mapping[PciAddress, DesiredVgpus] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    problem: InvalidDesired | None = None
    """Why nothing follows from the name."""

    @property
    def undecided(self) -> tuple[Note, ...]:
        """Why nothing follows yet: hosts have not said which cards their GPUs are. That is not invalid."""
        return () if self.desired_by_gpu else tuple(note for note in self.notes if note.code is NoteCode.CARD_UNDECIDED)


@dataclass(frozen=True, slots=True)
class ConfigName:
    """The name of the config that is wanted, and where it is set."""

    name: str
    source: Source


def config_name(request: NodeRequest, settings: Settings, *, in_cluster: bool) -> ConfigName | None:
    """Return which config is wanted, None for none, or where it was not heard yet.

    A node in a cluster that has no label gets the config of the settings, else `default`, which whoever wants mode vgpu
    has asked for.
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


def read_book(text: ConfigText, before: Book) -> Book:
    """Return the configs of a text; where it can't be used, those from before, with the reason."""
    if text.other_keys is not None:
        return Book(before.configs, before.notes, invalidvgpus.no_key(text, text.other_keys), before.good)
    try:
        found = vgpuconfig.parse(text.text, where=text.where)
    except ConfigError as error:
        return Book(before.configs, before.notes, invalidvgpus.unreadable(text, error), before.good)
    return Book(found.configs, found.notes, None, text)


def without_text(before: Book, base: Book, named: str | None = None) -> Book:
    """Return the configs when it was heard that there is no text: those from before, where there were any.

    `base` are those of a node that never had one; `named` is the ConfigMap that somebody has asked for by its name.
    """
    if before.good is not None and before.good != base.good:
        return Book(before.configs, before.notes, invalidvgpus.gone(before.good), before.good)
    return base if named is None else replace(base, problem=invalidvgpus.missing_map(named))


def config_gpus(inventory: Inventory, boards: Mapping[PciAddress, GpuState]) -> list[ConfigGpu]:
    """Return the GPUs of a host as configs pick them."""
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
            frozenset(boards[function.address].known_types if function.address in boards else ()),
        )
        for index, function in enumerate(ours)
    ]


def resolve(config: ConfigName | None, book: Book, gpus: list[ConfigGpu]) -> DesiredTypes:
    """Return what a config wants of each GPU; one that it is not for is left alone."""
    if config is None:
        return DesiredTypes()
    name, source = config.name, config.source
    entries = book.configs.get(name) or builtin_configs().get(name)
    if entries is None:
        return DesiredTypes(name, problem=invalidvgpus.no_config(source, name, book.configs, book.good, gpus))
    found = desired(entries, gpus)
    desired_by_gpu = {gpu: desired_vgpus_of(config_gpu) for gpu, config_gpu in found.gpus.items()}
    resolved = DesiredTypes(name, desired_by_gpu, found.notes)
    if found.gpus or not gpus or resolved.undecided:
        return resolved
    return replace(resolved, problem=invalidvgpus.for_no_gpu(source, name, book.configs, found, gpus))


def desired_vgpus_of(config_gpu: GpuConfig) -> DesiredVgpus:
    """Return what a config desires of a GPU, as the planner takes it."""
    return DesiredVgpus(
        {profile.text: count for profile, count in config_gpu.types.items()}, config_gpu.sizes, config_gpu.scheduler
    )
