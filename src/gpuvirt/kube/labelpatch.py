"""Desired labels and annotations of an object, and the merge patch that sets those that differ."""

from collections.abc import Sequence

import msgspec

from gpuvirt import nulls
from gpuvirt.kube.resources import Metadata

Fields = dict[str, msgspec.Raw]
"""An undecoded object that is written back whole."""


class DesiredLabels(msgspec.Struct, frozen=True, omit_defaults=True):
    """Desired labels and annotations by name; None deletes one."""

    labels: dict[str, str | None] = {}
    annotations: dict[str, str | None] = {}


class LabelPatch(msgspec.Struct, frozen=True):
    """A merge patch of an object's labels and annotations."""

    metadata: DesiredLabels


def patch_of(desired: Sequence[DesiredLabels], observed: Metadata) -> LabelPatch | None:
    """Return the patch for the keys that differ; None if none does."""
    labels = _differing([keys.labels for keys in desired], observed.labels)
    annotations = _differing([keys.annotations for keys in desired], observed.annotations)
    return LabelPatch(DesiredLabels(labels, annotations)) if labels or annotations else None


def _differing(desired: Sequence[dict[str, str | None]], observed: dict[str, str]) -> dict[str, str | None]:
    return {key: value for keys in desired for key, value in keys.items() if observed.get(key) != value}


def patched(whole: Fields, patch: LabelPatch) -> Fields:
    """Return an object with a patch applied and all other fields unchanged."""
    metadata = nulls.decode(whole["metadata"], Fields)
    for field, changes in (("labels", patch.metadata.labels), ("annotations", patch.metadata.annotations)):
        if not changes:
            continue
        has = field in metadata and not nulls.is_null(metadata[field])
        before = nulls.decode(metadata[field], dict[str, str]) if has else {}
        after = {key: value for key, value in (before | changes).items() if value is not None}
        metadata[field] = msgspec.Raw(msgspec.json.encode(after))
    return whole | {"metadata": msgspec.Raw(msgspec.json.encode(metadata))}
