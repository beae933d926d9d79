"""What a named vGPU config wants of each GPU of a node.

As with vgpu-device-manager, a later entry overrides an earlier one for the GPUs that both are for. Unlike there, a GPU
that no entry is for is left alone, and entries that pick the same GPUs in the same words are alternatives: each GPU
gets the last that is for its card. That way two cards with one device id can be in one config, and an entry for `all`
is for all cards of its types, as NVIDIA's documentation has it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress, PciId, VgpuType
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.desired.vgpuentries import Entry, Note, NoteCode, Sizes
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import Profile, card_names


@dataclass(frozen=True, slots=True)
class ConfigGpu:
    """A GPU as configs pick it: NVIDIA's, of class 0x0300 or 0x0302, and no VF."""

    address: PciAddress
    device: PciId
    subsystem: PciId | None
    """None where it could not be told."""
    index: int
    """Its place in the order of addresses, counting all such GPUs of the node."""
    types: frozenset[VgpuType] = frozenset()
    """The types that the host has named for it so far; none where it hasn't spoken yet."""


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """What is wanted of one GPU."""

    types: Mapping[Profile, int]
    scheduler: Scheduler | None
    sizes: Sizes | None
    place: str
    """The entry that wants it."""


@dataclass(frozen=True, slots=True)
class GpuConfigs:
    """What a config desires of a node's GPUs; a GPU that it does not name is left alone."""

    gpus: Mapping[PciAddress, GpuConfig] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def desired(entries: Sequence[Entry], gpus: Collection[ConfigGpu]) -> GpuConfigs:
    """Return what the entries of a config want of each of these GPUs."""
    notes = [*_unmatched(entries, gpus)]
    desired_by_gpu: dict[PciAddress, GpuConfig] = {}
    for gpu in sorted(gpus, key=lambda one: one.index):
        chosen = _chosen(gpu, [entry for entry in entries if _is_for(entry, gpu)])
        if isinstance(chosen, Note):
            notes.append(chosen)
        elif chosen is not None:
            desired_by_gpu[gpu.address] = GpuConfig(chosen.types, chosen.scheduler, chosen.sizes, chosen.place)
            notes.extend(_never_mixed(chosen, gpu))
        else:
            notes.extend(_other_card(entries, gpu))
    return GpuConfigs(desired_by_gpu, tuple(notes))


def _is_for(entry: Entry, gpu: ConfigGpu) -> bool:
    picked = entry.indices is None or gpu.index in entry.indices
    return picked and (entry.filters is None or any(one.matches(gpu.device, gpu.subsystem) for one in entry.filters))


def _chosen(gpu: ConfigGpu, entries: Sequence[Entry]) -> Entry | Note | None:
    """Return which of the entries for a GPU it gets, or why none."""
    if not entries:
        return None
    last = entries[-1]
    alternatives = [entry for entry in reversed(entries) if entry.picks_as(last)]
    suited = [(entry, _suits(entry, gpu)) for entry in alternatives]
    certain = next((entry for entry, suits in suited if suits), None)
    possible = [entry for entry, suits in suited if suits is None]
    if certain is not None:
        return certain
    if possible:
        if len({card for entry in possible for card in _cards(entry)}) == 1:
            return possible[0]
        names = " or ".join(sorted({profile.text for entry in possible for profile in entry.types}))
        return Note(
            NoteCode.CARD_UNDECIDED,
            last.place,
            f"{gpu.address} ({gpu.device}) may be a card of {names}, and its host has not named its types yet; it is"
            " left alone until then",
        )
    if last.is_for_all:
        message = f"{gpu.address} ({gpu.device}) is a card without {_listed(last)}, and is left alone"
        return Note(NoteCode.OTHER_CARD, last.place, message)
    return last


def _suits(entry: Entry, gpu: ConfigGpu) -> bool | None:
    """Return whether an entry's types are of a GPU's card; None where that can't be told yet.

    What the host calls its types is asked first. Whether it could make them now is no question here: types come and go
    with what exists on the GPU, and with MIG mode.
    """
    desired = _cards(entry)
    if not desired:
        return True
    if named := card_names(gpu.types):
        return desired <= named
    answers = {desired == {card.gpu} for card in catalog.cards_of(gpu.device, gpu.subsystem)}
    return answers.pop() if len(answers) == 1 else None


def _cards(entry: Entry) -> frozenset[str]:
    return frozenset(profile.gpu for profile in entry.types)


def _listed(entry: Entry) -> str:
    return ", ".join(profile.text for profile in entry.types)


def _unmatched(entries: Sequence[Entry], gpus: Collection[ConfigGpu]) -> Iterator[Note]:
    """Yield indices that no GPU has, and filters that match nothing here and no card that is known anywhere."""
    present = {gpu.index for gpu in gpus}
    for entry in entries:
        missing = sorted(index for index in entry.indices or () if index >= 0 and index not in present)
        if missing:
            listed = ", ".join(str(index) for index in missing)
            yield Note(NoteCode.NO_SUCH_GPU, entry.place, f"there is no GPU {listed} here; there are {len(present)}")
    if gpus and not any(_is_for(entry, gpu) for entry in entries for gpu in gpus):
        here = ", ".join(sorted({str(gpu.device) for gpu in gpus}))
        place = entries[0].place if entries else ""
        yield Note(NoteCode.NOTHING_MATCHES, place, f"no entry is for any GPU of this node, which are {here}")
        return
    for entry in entries:
        if entry.filters and not _matches_any(entry, gpus) and not _is_known(entry):
            texts = ", ".join(sorted(one.text for one in entry.filters))
            message = f"{texts} matches no GPU of this node, and no card that gpuvirt knows of"
            yield Note(NoteCode.NOTHING_MATCHES, entry.place, message)


def _matches_any(entry: Entry, gpus: Iterable[ConfigGpu]) -> bool:
    return any(one.matches(gpu.device, gpu.subsystem) for gpu in gpus for one in entry.filters or ())


def _is_known(entry: Entry) -> bool:
    return any(catalog.cards_of(one.device, one.subsystem) for one in entry.filters or ())


def _other_card(entries: Iterable[Entry], gpu: ConfigGpu) -> Iterator[Note]:
    """Yield why a GPU is left alone, where entries are for its device id and for other boards than its own."""
    near = [
        entry
        for entry in entries
        if entry.indices is None or gpu.index in entry.indices
        if any(one.device == gpu.device for one in entry.filters or ())
    ]
    if near:
        gpu_state = f"its subsystem {gpu.subsystem}" if gpu.subsystem else "its own, which could not be told"
        message = (
            f"{gpu.address} ({gpu.device}) is left alone: filters for its device id name other boards, not {gpu_state}"
        )
        yield Note(NoteCode.OTHER_BOARD, near[-1].place, message)


def _never_mixed(entry: Entry, gpu: ConfigGpu) -> Iterator[Note]:
    cards = catalog.cards_of(gpu.device, gpu.subsystem)
    if entry.sizes is Sizes.MIXED and cards and all(card.mixed_sizes is False for card in cards):
        message = f"{gpu.address} is a {cards[0].board}, which holds vGPUs of one size at a time; leave `sizes` out"
        yield Note(NoteCode.NEVER_MIXED, entry.place, message)
