"""Named vGPU configs: the desired vGPUs of GPUs, in the grammar of NVIDIA's vgpu-device-manager (v1).

A file that vgpu-device-manager rejects is an error here. A part that it accepts, but that never matches or can't be
created, is a note with its place: a file that works there works here too, unless it has aliases of YAML. `scheduler`
and `sizes` are gpuvirt's own.

The built-in configs need no file: `default`, and one for each type of the catalog. Each is made when it is looked up:
the catalog has a thousand types, and a node needs one config.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
from typing_extensions import override

from gpuvirt import documents, plain
from gpuvirt.documents import WrittenDocument
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciId
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card, CardType
from gpuvirt.model.vgputypes.profiles import Profile, Series, parse_profile
from gpuvirt.plain import Plain, Step

# Source of device filters (`0x223610DE`, `0x25B610DE:0x157E10DE`): vgpu-device-manager. Each half is a number of 32
# bits, the device above the vendor, in Go's syntax for integers; without the second half, every subsystem matches.
_INTEGER = re.compile(
    r"(?:0[xX](?P<hex>(?:_?[0-9a-fA-F])+)|0[bB](?P<bin>(?:_?[01])+)|0[oO]?(?P<oct>(?:_?[0-7])+)"
    r"|(?P<dec>0|[1-9](?:_?[0-9])*))"
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_MOST_CHARACTERS = 48


class DeviceFilter(msgspec.Struct, frozen=True):
    """A filter by the PCI ids that a GPU must have."""

    device: PciId
    subsystem: PciId | None = None

    @property
    def text(self) -> str:
        """The filter in the syntax of configs."""
        return ":".join(f"0x{ids.device:04X}{ids.vendor:04X}" for ids in (self.device, self.subsystem) if ids)

    def matches(self, device: PciId, subsystem: PciId | None) -> bool:
        """Return whether a GPU has these ids; an unreadable subsystem (None) matches no filter with a subsystem."""
        return self.device == device and self.subsystem in {None, subsystem}


def parse_filter(text: str) -> DeviceFilter:
    """Return a filter, or raise InvalidIdError."""
    halves = [_id(half) for half in text.split(":")]
    device, subsystem = halves[0], halves[1] if len(halves) > 1 else None
    if device is None or len(halves) > 2 or (len(halves) == 2 and subsystem is None):
        raise InvalidIdError(
            "a device filter",
            text,
            "0xDDDDVVVV or 0xDDDDVVVV:0xSSSSVVVV, device id and vendor id in one number, as in 0x223610DE",
        )
    return DeviceFilter(device, subsystem)


def _id(text: str) -> PciId | None:
    match = _INTEGER.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
    if not match or match.lastgroup is None:
        return None
    number = int(match[match.lastgroup].replace("_", ""), _BASES[match.lastgroup])
    return PciId(number & 0xFFFF, number >> 16) if number < 1 << 32 else None


class Sizes(StrEnum):
    """Whether a GPU may carry vGPUs of several framebuffer sizes at the same time."""

    EQUAL = "equal"
    MIXED = "mixed"


class NoteCode(StrEnum):
    """The kinds of notes on a valid config."""

    BAD_FILTER = "BadFilter"
    BAD_INDEX = "BadIndex"
    UNKNOWN_TYPE = "UnknownType"
    TOO_MANY = "TooMany"
    SIZES_DIFFER = "SizesDiffer"
    NO_SUCH_GPU = "NoSuchGpu"
    NOTHING_MATCHES = "NothingMatches"
    OTHER_BOARD = "OtherBoard"
    OTHER_CARD = "OtherCard"
    CARD_UNDECIDED = "CardUndecided"
    NEVER_MIXED = "NeverMixed"


class Note(msgspec.Struct, frozen=True):
    """A part of a config that may not do what its author expects."""

    code: NoteCode
    place: str
    """Where it is written: `config.yaml:7: $.vgpu-configs.mine[0]`."""
    message: str

    @property
    def text(self) -> str:
        """The note with its place."""
        return f"{self.place}: {self.message}"


class ConfigEntry(msgspec.Struct, frozen=True):
    """An entry of a named config."""

    types: Mapping[Profile, int]
    """How many vGPUs of each type are desired on each GPU; where it is empty, no vGPUs are desired."""
    indices: frozenset[int] | None = None
    """The GPUs by their index in order of PCI addresses; None for all."""
    filters: frozenset[DeviceFilter] | None = None
    """Filters, one of which must match; None matches all GPUs, an empty set (all were malformed) matches none."""
    scheduler: Scheduler | None = None
    """None keeps the GPU's scheduler."""
    sizes: Sizes | None = None
    """None keeps the GPU's mode of sizes."""
    place: str = ""
    """Where the entry is written."""

    @property
    def is_for_all(self) -> bool:
        """Return whether it selects all GPUs."""
        return self.indices is None and self.filters is None

    def picks_as(self, other: "ConfigEntry") -> bool:
        """Return whether it has the same `devices` and `device-filter` as another entry."""
        return (self.indices, self.filters) == (other.indices, other.filters)


VERSION = "v1"
CONFIGS = "vgpu-configs"


class TypeNote(msgspec.Struct, frozen=True):
    """A note on a type, or on all types of an entry."""

    code: NoteCode
    message: str
    type: Profile | None = None


def review(types: Mapping[Profile, int], sizes: Sizes | None) -> Iterator[TypeNote]:
    """Yield notes on the types; none is an error, since a host's driver may be newer than the catalog."""
    for profile, count in types.items():
        yield from _review_type(profile, count, sizes)
    gbs = sorted({profile.gb for profile in types if not profile.is_mig})
    if len(gbs) > 1 and sizes is not Sizes.MIXED:
        listed = ", ".join(f"{gb} GB" if gb else "512 MiB" for gb in gbs)
        yield TypeNote(
            NoteCode.SIZES_DIFFER,
            f"a GPU carries time-sliced vGPUs of one size at a time, but these have {listed}; use one size, or write"
            " `sizes: mixed` where the card supports it",
        )


def _review_type(profile: Profile, count: int, sizes: Sizes | None) -> Iterator[TypeNote]:
    cards = catalog.cards_called(profile.gpu)
    found = [kind for card in cards if (kind := card.find(profile))]
    if not found:
        missing = f"type {profile}" if cards else f"card {profile.gpu}"
        message = f"gpuvirt's catalog has no {missing}; {_alternatives(profile, cards)}"
        yield TypeNote(NoteCode.UNKNOWN_TYPE, message, profile)
        return
    mixed = [kind.most_mixed for kind in found if sizes is Sizes.MIXED and kind.most_mixed is not None]
    most = max(mixed) if len(mixed) == len(found) else max(kind.most for kind in found)
    if count > most:
        mode = " of mixed sizes" if mixed else ""
        message = (
            f"sets {count} on each GPU, but {most}{mode} fit on one ({cards[0].product_name}); write {most} or less"
        )
        yield TypeNote(NoteCode.TOO_MANY, message, profile)


def _alternatives(profile: Profile, cards: Iterable[Card]) -> str:
    """Return existing types in place of an unknown one, as the end of a sentence."""
    profiles = [kind.profile for card in cards for kind in card.types()]
    of_series = [known for known in profiles if known.series is profile.series]
    similar = [known for known in of_series if known.slices == profile.slices] or of_series
    if similar:
        return f"there are {', '.join(dict.fromkeys(known.text for known in similar))}"
    names = [known.text for known in profiles] or sorted({card.gpu for card in catalog.cards()})
    near = nearest(profile.text if profiles else profile.gpu, names)
    return f"did you mean {near}?" if near else "a driver newer than gpuvirt may have it"


class VgpuConfigs(msgspec.Struct, frozen=True):
    """The configs of a file by name, and notes on them."""

    configs: Mapping[str, tuple[ConfigEntry, ...]] = msgspec.field(default_factory=dict)
    notes: tuple[Note, ...] = ()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    devices: str | tuple[int, ...]
    vgpu_devices: dict[str, object] | None
    """Numbers of vGPUs by the names of their types."""
    device_filter: str | tuple[str, ...] | None = None
    scheduler: SchedulerPolicy | Scheduler | None = None
    sizes: Sizes | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    version: str | None = None
    vgpu_configs: dict[str, object] | msgspec.UnsetType | None = msgspec.UNSET
    """Tuples of `_Entry`."""


def load(path: Path) -> VgpuConfigs:
    """Return the configs in the file `path`, or raise ConfigError."""
    return parse(documents.text_of(path), where=str(path))


def parse(text: str, *, where: str) -> VgpuConfigs:
    """Return the configs in YAML or JSON, or raise ConfigError; `where` names their origin in messages."""
    written = documents.parse_written(text, _File, where=where)
    file = written.value
    if written.document.content and file.version != VERSION:
        raise written.fault(f"expected {VERSION!r}, found {file.version!r}; write `version: {VERSION}`", ["version"])
    if file.vgpu_configs is msgspec.UNSET:
        return VgpuConfigs()
    if not file.vgpu_configs:
        raise written.fault("has no config; add one, or remove the key", [CONFIGS])
    notes: list[Note] = []
    configs = {name: _entries(written, name, content, notes) for name, content in file.vgpu_configs.items()}
    return VgpuConfigs(configs, tuple(notes))


def _entries(written: WrittenDocument[_File], name: str, content: object, notes: list[Note]) -> tuple[ConfigEntry, ...]:
    entries = written.part(content, [CONFIGS, name], tuple[_Entry, ...])
    if not entries:
        raise written.fault("has no entry; expected at least one, as in `- devices: all`", [CONFIGS, name])
    readings = [_Reading(written, [CONFIGS, name, index], notes) for index in range(len(entries))]
    return tuple(reading.read(entry) for reading, entry in zip(readings, entries, strict=True))


class _Reading(msgspec.Struct, frozen=True):
    """The reading of one entry."""

    written: WrittenDocument[_File]
    steps: Sequence[Step]
    notes: list[Note]

    def read(self, entry: _Entry) -> ConfigEntry:
        """Return the entry with parsed types and filters, or raise ConfigError."""
        types = self._types(entry.vgpu_devices or {})
        scheduler = Scheduler(entry.scheduler) if isinstance(entry.scheduler, SchedulerPolicy) else entry.scheduler
        if scheduler is not None:
            message = next(_scheduler_faults(scheduler, types, entry.sizes), None)
            if message is not None:
                raise self.written.fault(message, [*self.steps, "scheduler"])
        for note in review(types, entry.sizes):
            self._note(note.code, ("vgpu-devices", *([note.type.text] if note.type else [])), note.message)
        return ConfigEntry(
            types=types,
            indices=self._indices(entry.devices),
            filters=self._filters(entry.device_filter),
            scheduler=scheduler,
            sizes=entry.sizes,
            place=self._place(()),
        )

    def _types(self, counts: Mapping[str, object]) -> Mapping[Profile, int]:
        types: dict[Profile, int] = {}
        for name, content in counts.items():
            steps = [*self.steps, "vgpu-devices", name]
            count = self.written.part(content, steps, int)
            try:
                types[parse_profile(name)] = count
            except InvalidIdError as error:
                raise self.written.fault(str(error), steps) from error
            if count < 1:
                message = f"expected at least 1, found {count}; remove the type, or write {{}} for no vGPUs"
                raise self.written.fault(message, steps)
        if len({profile.is_mig for profile in types}) > 1:
            message = "a GPU can't carry both time-sliced and MIG-backed types; make two entries for different GPUs"
            raise self.written.fault(message, [*self.steps, "vgpu-devices"])
        return types

    def _indices(self, devices: str | tuple[int, ...]) -> frozenset[int] | None:
        if isinstance(devices, str):
            if devices != "all":
                message = f"expected `all` or a list of numbers, as in [0, 1], found {devices!r}"
                raise self.written.fault(message, [*self.steps, "devices"])
            return None
        if not devices:
            self._note(NoteCode.BAD_INDEX, ("devices",), "names no GPU, so the entry has no effect")
        for place, index in enumerate(devices):
            if index < 0:
                self._note(NoteCode.BAD_INDEX, ("devices", place), f"there is no GPU {index}; GPUs are counted from 0")
        return frozenset(devices)

    def _filters(self, texts: str | tuple[str, ...] | None) -> frozenset[DeviceFilter] | None:
        if not texts:
            return None
        by_place: Iterable[tuple[tuple[Step, ...], str]] = (
            [((), texts)] if isinstance(texts, str) else [((place,), text) for place, text in enumerate(texts)]
        )
        filters = set()
        for steps, text in by_place:
            place = ("device-filter", *steps)
            try:
                device_filter = parse_filter(text)
            except InvalidIdError as error:
                self._note(NoteCode.BAD_FILTER, place, f"{error}; it matches nothing")
                continue
            filters.add(device_filter)
            if device_filter.device.vendor != NVIDIA:
                message = f"{text!r} matches no NVIDIA GPU; the vendor 10DE comes last, as in 0x223610DE"
                self._note(NoteCode.BAD_FILTER, place, message)
        return frozenset(filters)

    def _place(self, steps: Sequence[Step]) -> str:
        full = [*self.steps, *steps]
        return f"{self.written.place(full)}: {plain.one_line(plain.path_of(full))}"

    def _note(self, code: NoteCode, steps: Sequence[Step], message: str) -> None:
        self.notes.append(Note(code, self._place(steps), message))


def _scheduler_faults(scheduler: Scheduler, types: Iterable[Profile], sizes: Sizes | None) -> Iterator[str]:
    """Yield why a scheduler is impossible; source: NVIDIA's vGPU user guide, RmPVMRL and mixed-size mode."""
    if scheduler.timeslice_ms is not None and scheduler.policy is SchedulerPolicy.BEST_EFFORT:
        yield "best-effort has no timeslice; remove timeslice-ms, or use equal-share or fixed-share"
    elif scheduler.timeslice_ms is not None and not 1 <= scheduler.timeslice_ms <= 30:
        yield f"expected a timeslice-ms of 1 to 30, found {scheduler.timeslice_ms}"
    if scheduler.policy is SchedulerPolicy.FIXED_SHARE and sizes is Sizes.MIXED:
        yield "fixed-share needs vGPUs of one size; use equal-share, or remove `sizes: mixed`"
    if any(profile.is_mig for profile in types):
        yield "MIG-backed vGPUs do not share slices, so they have no scheduler; remove it"


def written(configs: Mapping[str, Sequence[ConfigEntry]]) -> str:
    """Return configs as YAML of this grammar."""
    content: dict[str, Plain] = {name: [_plain(entry) for entry in entries] for name, entries in configs.items()}
    return plain.write({"version": VERSION, CONFIGS: content})


def _plain(entry: ConfigEntry) -> Plain:
    content: dict[str, Plain] = {}
    indices: Iterable[int] | None = entry.indices
    if entry.filters:
        texts: list[Plain] = [*sorted(device_filter.text for device_filter in entry.filters)]
        content["device-filter"] = texts[0] if len(texts) == 1 else texts
    elif entry.filters is not None:
        # The entry matches nothing; written without a filter, it would match everything.
        indices = ()
    content["devices"] = "all" if indices is None else [*sorted(indices)]
    content["vgpu-devices"] = {profile.text: count for profile, count in entry.types.items()}
    if entry.scheduler is not None:
        policy = entry.scheduler.policy.value
        slice_ms = entry.scheduler.timeslice_ms
        content["scheduler"] = policy if slice_ms is None else {"policy": policy, "timeslice-ms": slice_ms}
    if entry.sizes is not None:
        content["sizes"] = entry.sizes.value
    return content


DEFAULT = "default"
"""Q-series vGPUs with half of the framebuffer; C-series where a card has no Q; one vGPU where none fits twice."""


class BuiltinConfigs(Mapping[str, tuple[ConfigEntry, ...]]):
    """The built-in configs by name."""

    @override
    def __getitem__(self, name: str) -> tuple[ConfigEntry, ...]:
        entries = _default() if name == DEFAULT else _of_type(name)
        if not entries:
            raise KeyError(name)
        return entries

    @override
    def __iter__(self) -> Iterator[str]:
        yield DEFAULT
        yield from dict.fromkeys(
            profile.text
            for card in catalog.cards()
            for kind in card.types()
            for profile in (kind.profile, *kind.spelled)
        )

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def builtin_configs() -> BuiltinConfigs:
    """Return the built-in configs."""
    return BuiltinConfigs()


def _default() -> tuple[ConfigEntry, ...]:
    """Return two of the largest vGPUs that fit twice on each card, else the largest of all.

    Filters name the subsystem where two cards have one device id, so that each GPU has one entry.
    """
    return tuple(
        ConfigEntry(
            {half.profile: min(half.most, 2)}, filters=_filters(card), place=f"built-in {DEFAULT}: {card.product_name}"
        )
        for card in catalog.cards()
        for half in (_half_of(card),)
    )


def _half_of(card: Card) -> CardType:
    sliced = [kind for kind in card.types() if not kind.profile.is_mig]
    series = Series.Q if any(kind.profile.series is Series.Q for kind in sliced) else Series.C
    of_series = sorted((kind for kind in sliced if kind.profile.series is series), key=lambda kind: kind.profile.gb)
    return next((kind for kind in reversed(of_series) if kind.most > 1), of_series[-1])


def _of_type(name: str) -> tuple[ConfigEntry, ...]:
    """Return the entries that create as many vGPUs of a type as fit; none for an unknown name.

    The entries filter by id only where cards carry different numbers of a type of the same name (`DC-16Q`). Otherwise
    they have no filter, so that boards newer than the catalog match too.
    """
    try:
        profile = parse_profile(name)
    except InvalidIdError:
        return ()
    mosts = {card: found.most for card in catalog.cards_called(profile.gpu) if (found := _exact(card, profile))}
    if len(set(mosts.values())) == 1 and len(mosts) == len(catalog.cards_called(profile.gpu)):
        return (ConfigEntry({profile: next(iter(mosts.values()))}, place=f"built-in {name}"),)
    return tuple(
        ConfigEntry({profile: most}, filters=_filters(card), place=f"built-in {name}: {card.product_name}")
        for card, most in mosts.items()
    )


def _exact(card: Card, profile: Profile) -> CardType | None:
    """Return the type of exactly that name, or of a name that configs use for it."""
    found = card.find(profile)
    return found if found and profile in {found.profile, *found.spelled} else None


def _filters(card: Card) -> frozenset[DeviceFilter]:
    return frozenset(DeviceFilter(ids.device, ids.subsystem) for ids in card.ids)
