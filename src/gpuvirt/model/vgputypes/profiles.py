"""The grammar of vGPU types' names in configs, and the host's types that such names stand for.

Source of the grammar: vgpu-device-manager, which accepts these names and no others. `A10-4Q` is time-sliced,
`A100-1-5CME` needs one MIG slice. A suffix (`ME`, `NOME`, `MEALL`, `GFX`) has the attributes of the GPU instance. Some
suffixes are part of the host's name (`A100-1-5CME`), others are not (the host's name of `DC-1-24QGFX` is `DC-1-24Q`).
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import VgpuType
from gpuvirt.facts.vgpu import is_vf_type


class Series(StrEnum):
    """The purpose that a type is licensed and tuned for."""

    A = "A"
    """Virtual applications."""
    B = "B"
    """Virtual PCs."""
    C = "C"
    """Compute."""
    Q = "Q"
    """Virtual workstations."""


class Suffix(StrEnum):
    """The attributes of a MIG-backed type's GPU instance, beside its size."""

    ME = "ME"
    """The media engines, which one instance of a GPU can have (`+me`)."""
    NOME = "NOME"
    """No media engine (`-me`)."""
    MEALL = "MEALL"
    """All media engines of the GPU (`+me.all`)."""
    GFX = "GFX"
    """Graphics (`+gfx`)."""


_NAME = re.compile(
    r"(?:(?P<gpu>[A-Z0-9]+(?:-[A-Za-z]+)*)|(?P<mig_gpu>[A-Z0-9]+)-(?P<slices>[1-9]))"
    r"-(?P<gb>0|[1-9][0-9]{0,3})(?P<series>[ABCQ])(?P<suffix>ME|NOME|MEALL|GFX)?"
)


class Profile(msgspec.Struct, frozen=True):
    """A vGPU type's name in its parts."""

    gpu: str
    """The card's name in types: `A10`, `RTX6000-Ada`."""
    slices: int | None
    """The compute slices of the MIG GPU instance; None for a time-sliced type."""
    gb: int
    """The framebuffer in GiB; 0 stands for 512 MiB."""
    series: Series
    suffix: Suffix | None = None

    @property
    def text(self) -> str:
        """The name: `A100-1-5CME`."""
        slices = "" if self.slices is None else f"{self.slices}-"
        return f"{self.gpu}-{slices}{self.gb}{self.series}{self.suffix or ''}"

    @property
    def framebuffer_mib(self) -> int:
        """The framebuffer by the name; a guest sees a little less."""
        return self.gb * 1024 or 512

    @property
    def is_mig(self) -> bool:
        """Whether the type is MIG-backed."""
        return self.slices is not None

    @property
    def bare(self) -> "Profile":
        """The type without its suffix."""
        return replace(self, suffix=None)

    @override
    def __str__(self) -> str:
        return self.text


def parse_profile(text: str) -> Profile:
    """Return the parts of a type's name, or raise InvalidIdError."""
    match = _NAME.fullmatch(text)
    if not match or (match["suffix"] and not match["slices"]):
        raise InvalidIdError(
            "a vGPU type",
            text,
            "CARD-GBs as in A10-4Q, or CARD-SLICES-GBs as in A100-1-5C, where GB has no leading zero, the series s is"
            " A, B, C or Q, and ME, NOME, MEALL or GFX may follow a MIG-backed type",
        )
    return Profile(
        gpu=match["gpu"] or match["mig_gpu"],
        slices=int(match["slices"]) if match["slices"] else None,
        gb=int(match["gb"]),
        series=Series(match["series"]),
        suffix=Suffix(match["suffix"]) if match["suffix"] else None,
    )


def profile_name(host_name: str) -> str:
    """Return the name in configs of a type of the host: the last word of the host's name.

    `GRID T4-1Q` is `T4-1Q`, `NVIDIA RTX Pro 6000 Blackwell DC-48C` is `DC-48C`. A set of VFs has its own name alone.
    """
    if is_vf_type(host_name):
        return host_name
    words = host_name.split()
    return words[-1] if words else ""


def host_type(desired: Profile, known: Iterable[VgpuType]) -> VgpuType | None:
    """Return the host's type for a desired one, None if the host has none.

    It is the type of exactly this name, else the type without the suffix. The reverse does not hold: `A100-1-5CME` does
    not stand for `A100-1-5C`, of which seven fit where one `A100-1-5CME` does. `known` must have both the creatable and
    the existing types, so that a vGPU counts as the type that it was created for.
    """
    named = {profile_name(vgpu_type): vgpu_type for vgpu_type in sorted(known, reverse=True)}
    return named.get(desired.text) or named.get(desired.bare.text)


def card_names(types: Iterable[VgpuType]) -> frozenset[str]:
    """Return the card's name in a host's types: `A16`; types of other grammars (`T4-2B4`, AMD's) have none."""
    return _card_names(frozenset(types))


@lru_cache(1024)
def _card_names(types: frozenset[VgpuType]) -> frozenset[str]:
    matches = (_NAME.fullmatch(profile_name(vgpu_type)) for vgpu_type in types)
    return frozenset(match["gpu"] or match["mig_gpu"] for match in matches if match)


def resolve_type(name: str, known: Iterable[VgpuType]) -> VgpuType | None:
    """Return the host's type of a name, which is the host's name of the type or its name in configs."""
    return _resolved(name, tuple(known))


@lru_cache(1024)
def _resolved(name: str, known: tuple[VgpuType, ...]) -> VgpuType | None:
    """Resolve a name once for all GPUs that know the same types."""
    if VgpuType(name) in known:
        return VgpuType(name)
    try:
        return host_type(parse_profile(name), known)
    except InvalidIdError:
        return None
