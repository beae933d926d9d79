"""Chooses the entry of a named vGPU config for each GPU of a node.

As in vgpu-device-manager, a later entry overrides an earlier one for the GPUs that both select. Unlike there, a GPU
that no entry selects keeps its vGPUs, and entries with the same selection are alternatives: each GPU gets the last one
whose types its card has. So one config can have two cards with the same device id, and an entry for `all` applies to
all cards that have its types, as NVIDIA's documentation describes it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuvirt.facts.ids import PciAddress, PciId, VgpuType
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, Note, NoteCode, Sizes
from gpuvirt.model.reasons import count_of
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import Profile, card_names


class ConfigGpu(msgspec.Struct, frozen=True):
    """A GPU that configs can select: NVIDIA's, of class 0x0300 or 0x0302, and no VF."""

    address: PciAddress
    device: PciId
    subsystem: PciId | None
    """None where it could not be read."""
    index: int
    """Its index among all such GPUs of the node, in order of addresses."""
    types: frozenset[VgpuType] = frozenset()
    """The vGPU types that its driver has listed so far; empty where it has listed none yet."""


class GpuConfig(msgspec.Struct, frozen=True):
    """The desired vGPUs, scheduler and sizes of a GPU."""

    types: Mapping[Profile, int]
    scheduler: Scheduler | None
    sizes: Sizes | None
    place: str
    """Where the chosen entry is written."""


class GpuConfigs(msgspec.Struct, frozen=True):
    """The result of a config for a node's GPUs; a GPU without a result keeps its vGPUs."""

    gpus: Mapping[PciAddress, GpuConfig] = msgspec.field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def desired(entries: Sequence[ConfigEntry], gpus: Collection[ConfigGpu]) -> GpuConfigs:
    """Return the chosen entries of a config for these GPUs."""
    notes = [*_unmatched(entries, gpus)]
    desired_by_gpu: dict[PciAddress, GpuConfig] = {}
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        chosen = _chosen(gpu, [entry for entry in entries if _is_for(entry, gpu)])
        if isinstance(chosen, Note):
            notes.append(chosen)
        elif chosen is not None:
            desired_by_gpu[gpu.address] = GpuConfig(chosen.types, chosen.scheduler, chosen.sizes, chosen.place)
            notes.extend(_sizes_not_mixed(chosen, gpu))
        else:
            notes.extend(_other_board(entries, gpu))
    return GpuConfigs(desired_by_gpu, tuple(notes))


def _is_for(entry: ConfigEntry, gpu: ConfigGpu) -> bool:
    selected = entry.indices is None or gpu.index in entry.indices
    return selected and (entry.filters is None or _matches(entry, gpu))


def _chosen(gpu: ConfigGpu, entries: Sequence[ConfigEntry]) -> ConfigEntry | Note | None:
    """Return the entry that a GPU gets among those that select it, or why it gets none."""
    if not entries:
        return None
    last = entries[-1]
    alternatives = [entry for entry in reversed(entries) if entry.picks_as(last)]
    by_entry = [(entry, _has_types(entry, gpu)) for entry in alternatives]
    certain = next((entry for entry, has_types in by_entry if has_types), None)
    possible = [entry for entry, has_types in by_entry if has_types is None]
    if certain is not None:
        return certain
    if possible:
        if len({card for entry in possible for card in _cards(entry)}) == 1:
            return possible[0]
        names = " or ".join(sorted({profile.text for entry in possible for profile in entry.types}))
        return Note(
            NoteCode.CARD_UNDECIDED,
            last.place,
            f"{gpu.address} ({gpu.device}) may be a card of {names}; gpuvirt does not change it until its driver"
            " lists its vGPU types",
        )
    if last.is_for_all:
        listed = ", ".join(profile.text for profile in last.types)
        message = f"{gpu.address} ({gpu.device}) is a card without {listed}, so gpuvirt does not change it"
        return Note(NoteCode.OTHER_CARD, last.place, message)
    return last


def _has_types(entry: ConfigEntry, gpu: ConfigGpu) -> bool | None:
    """Return whether a GPU's card has the types of an entry; None where that is unknown yet.

    The types that the driver lists take precedence over the catalog. Whether the GPU could create them now does not
    matter: the creatable types change with the GPU's vGPUs and its MIG mode.
    """
    desired = _cards(entry)
    if not desired:
        return True
    if named := card_names(gpu.types):
        return desired <= named
    answers = {desired == {card.gpu} for card in catalog.cards_of(gpu.device, gpu.subsystem)}
    return answers.pop() if len(answers) == 1 else None


def _cards(entry: ConfigEntry) -> frozenset[str]:
    return frozenset(profile.gpu for profile in entry.types)


def _unmatched(entries: Sequence[ConfigEntry], gpus: Collection[ConfigGpu]) -> Iterator[Note]:
    """Yield notes on indices without a GPU, and on filters that match neither a GPU of the node nor a known card."""
    present = {gpu.index for gpu in gpus}
    for entry in entries:
        missing = sorted(index for index in entry.indices or () if index >= 0 and index not in present)
        if missing:
            listed = ", ".join(str(index) for index in missing)
            message = f"this node has no GPU {listed}; it has {count_of(len(present), 'GPU')}, counted from 0"
            yield Note(NoteCode.NO_SUCH_GPU, entry.place, message)
    if gpus and not any(_is_for(entry, gpu) for entry in entries for gpu in gpus):
        here = ", ".join(sorted({str(gpu.device) for gpu in gpus}))
        place = entries[0].place if entries else ""
        yield Note(NoteCode.NOTHING_MATCHES, place, f"no entry selects any GPU of this node, which has {here}")
        return
    for entry in entries:
        if entry.filters and not any(_matches(entry, gpu) for gpu in gpus) and not _is_known(entry):
            texts = ", ".join(sorted(device_filter.text for device_filter in entry.filters))
            message = f"{texts} matches no GPU of this node, and no card of gpuvirt's catalog"
            yield Note(NoteCode.NOTHING_MATCHES, entry.place, message)


def _matches(entry: ConfigEntry, gpu: ConfigGpu) -> bool:
    filters = entry.filters or ()
    return any(device_filter.matches(gpu.device, gpu.subsystem) for device_filter in filters)


def _is_known(entry: ConfigEntry) -> bool:
    filters = entry.filters or ()
    return any(catalog.cards_of(device_filter.device, device_filter.subsystem) for device_filter in filters)


def _other_board(entries: Iterable[ConfigEntry], gpu: ConfigGpu) -> Iterator[Note]:
    """Yield why a GPU gets no entry, where entries have its device id but only other boards."""
    near = [
        entry
        for entry in entries
        if entry.indices is None or gpu.index in entry.indices
        if any(device_filter.device == gpu.device for device_filter in entry.filters or ())
    ]
    if near:
        own = gpu.subsystem or "which could not be read"
        message = (
            f"gpuvirt does not change {gpu.address} ({gpu.device}): the filters for its device id name other"
            f" subsystems than its own, {own}"
        )
        yield Note(NoteCode.OTHER_BOARD, near[-1].place, message)


def _sizes_not_mixed(entry: ConfigEntry, gpu: ConfigGpu) -> Iterator[Note]:
    cards = catalog.cards_of(gpu.device, gpu.subsystem)
    if entry.sizes is Sizes.MIXED and cards and all(card.mixed_sizes is False for card in cards):
        message = (
            f"{gpu.address} is a {cards[0].product_name}, which carries vGPUs of one size at a time; remove `sizes`"
        )
        yield Note(NoteCode.NEVER_MIXED, entry.place, message)
