"""Which vGPUs are wanted on a node's GPUs: by the config that the node's label names, or its settings.

A config's name is looked for in the configs that were heard, and then in the built-in ones, so that `A10-4Q` means
something on every node. What was not heard is not taken for absent: nothing is wanted anew until it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.model import vgpuconfig
from gpuvirt.model.board import Board
from gpuvirt.model.carving import CarveWish
from gpuvirt.model.heard import ConfigText, NodeRequest
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.nearness import nearest
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.vgpudefaults import DEFAULT, builtin_configs
from gpuvirt.model.vgpuentries import Entry, Note
from gpuvirt.model.vgpuwish import ConfigGpu, VgpuWish, VgpuWishes, wanted

CLASSES = frozenset({0x030000, 0x030200})
"""Of the GPUs that configs count, as vgpu-device-manager does."""

Configs = Mapping[str, tuple[Entry, ...]]


@dataclass(frozen=True, slots=True)
class Book:
    """The configs that there are."""

    configs: Configs = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    trouble: Reason | None = None
    """Why what was heard last can't be used."""
    good: ConfigText | None = None
    """The text that the configs are of; None for the built-in ones alone."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted, or why that is not known."""

    name: str | None = None
    """The config; None where none is wanted, or it was not heard which."""
    wishes: Mapping[PciAddress, CarveWish] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    trouble: Reason | None = None
    """Why nothing follows from the name."""


def config_name(request: NodeRequest, fallback: str | None, *, in_cluster: bool) -> str | None:
    """Return which config is wanted, None for none, or where it was not heard yet.

    `fallback` is what the settings name; a node in a cluster whose label is not there gets `default` without it.
    """
    if not in_cluster:
        return fallback
    if request.spec is not None and request.spec.value is not None:
        return request.spec.value.vgpu_config or DEFAULT
    if request.config is None:
        return None
    return request.config.value or fallback or DEFAULT


def read_book(text: ConfigText, before: Book) -> Book:
    """Return the configs of a text; where it can't be used, those from before, with the reason."""
    try:
        found = vgpuconfig.parse(text.text, where=text.where)
    except ConfigError as error:
        reason = Reason(
            ReasonCode.CONFIG_INVALID,
            text.where,
            "can't be used, so the configs from before stand",
            seen=str(error),
            fix="mend it; it is read again as soon as it changes",
        )
        return Book(before.configs, before.notes, reason, before.good)
    return Book(found.configs, found.notes, None, text)


def without_text(before: Book, base: Book) -> Book:
    """Return the configs when it was heard that there is no text: those from before, where there were any.

    `base` are those of a node that never had one.
    """
    if before.good is None or before.good == base.good:
        return base
    reason = Reason(
        ReasonCode.CONFIG_INVALID,
        before.good.where,
        "is no longer there, so the configs from before stand",
        fix="make it again; to do without, restart the agent once its file wishes.json is removed",
    )
    return Book(before.configs, before.notes, reason, before.good)


def config_gpus(inventory: Inventory, boards: Mapping[PciAddress, Board]) -> list[ConfigGpu]:
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


def resolve(name: str | None, book: Book, gpus: list[ConfigGpu]) -> Wanted:
    """Return what a config wants of each GPU; one that it is not for is left alone."""
    if name is None:
        return Wanted()
    builtin = builtin_configs()
    entries = book.configs.get(name) or builtin.get(name)
    if entries is None:
        return Wanted(name, trouble=_no_config(name, book))
    found = wanted(entries, gpus)
    return Wanted(
        name, {gpu: carve_wish(wish) for gpu, wish in found.gpus.items()}, found.notes, _for_nobody(name, found, gpus)
    )


def carve_wish(wish: VgpuWish) -> CarveWish:
    """Return a config's wish as the carver takes it."""
    return CarveWish({profile.text: count for profile, count in wish.types.items()}, wish.sizes, wish.scheduler)


def _no_config(name: str, book: Book) -> Reason:
    meant = nearest(name, {**book.configs, **dict.fromkeys(builtin_configs())})
    where = book.good.where if book.good is not None else "no file or ConfigMap"
    return Reason(
        ReasonCode.CONFIG_INVALID,
        name,
        "is the name of no vGPU config, so vGPUs stay as they are",
        seen=f"{where}, and the built-in configs (gpuvirt vgpu default-config)",
        fix=f"did you mean {meant}?" if meant else "name one that there is, or add it",
    )


def _for_nobody(name: str, found: VgpuWishes, gpus: list[ConfigGpu]) -> Reason | None:
    if found.gpus or not gpus:
        return None
    return Reason(
        ReasonCode.CONFIG_INVALID,
        name,
        "is for no GPU of this node",
        seen="; ".join(note.text for note in found.notes) or None,
        fix="name a config for these cards: gpuvirt vgpu types",
    )
