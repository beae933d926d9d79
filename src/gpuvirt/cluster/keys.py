"""Labels and annotations of an object as somebody claims them: what it lacks, as a merge patch of these keys alone."""

from collections.abc import Sequence

import msgspec

from gpuvirt import nulls
from gpuvirt.cluster.resources import Metadata

Fields = dict[str, msgspec.Raw]
"""An object of which most is not ours to understand, and all is written back."""


class Keys(msgspec.Struct, frozen=True, omit_defaults=True):
    """Labels and annotations by name; None for one that is to go."""

    labels: dict[str, str | None] = {}
    annotations: dict[str, str | None] = {}


class Patch(msgspec.Struct, frozen=True):
    """What an object lacks to have them."""

    metadata: Keys


def patch_of(desired: Sequence[Keys], observed: Metadata) -> Patch | None:
    """Return what an object lacks; None where that is nothing."""
    labels = _missing([one.labels for one in desired], observed.labels)
    annotations = _missing([one.annotations for one in desired], observed.annotations)
    return Patch(Keys(labels, annotations)) if labels or annotations else None


def _missing(desired: Sequence[dict[str, str | None]], has: dict[str, str]) -> dict[str, str | None]:
    return {key: value for keys in desired for key, value in keys.items() if has.get(key) != value}


def patched(whole: Fields, patch: Patch) -> Fields:
    """Return an object with a patch in it, and everything else as it was."""
    metadata = nulls.decode(whole["metadata"], Fields)
    for field, changes in (("labels", patch.metadata.labels), ("annotations", patch.metadata.annotations)):
        if not changes:
            continue
        has = field in metadata and not nulls.is_null(metadata[field])
        before = nulls.decode(metadata[field], dict[str, str]) if has else {}
        after = {key: value for key, value in (before | changes).items() if value is not None}
        metadata[field] = msgspec.Raw(msgspec.json.encode(after))
    return whole | {"metadata": msgspec.Raw(msgspec.json.encode(metadata))}
