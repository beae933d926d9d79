"""Whether a stored object still matches the manifest: by a digest in an annotation, and by comparing the fields.

The digest alone, which NVIDIA's operator uses, does not notice edits by hand. The comparison alone may always find a
difference, since the API server may write a value in another way (`1000m` and `1`). So a manifest whose digest matches
is applied once for each version of the object.
"""

from hashlib import sha256

import msgspec
from msgspec.structs import replace

from gpuvirt import nulls
from gpuvirt.kube.kinds.core import DaemonSetStatus
from gpuvirt.kube.kinds.workloads import Manifest, encoded
from gpuvirt.kube.resources import Metadata
from gpuvirt.plain import Plain

DIGEST_ANNOTATION = "gpuvirt.io/applied"
NULL = msgspec.Raw(b"null")


class StoredObject(msgspec.Struct, frozen=True, rename="camel"):
    """A stored object of any kind that operands consist of, with the parts that the controller applies."""

    metadata: Metadata
    spec: msgspec.Raw = NULL
    data: msgspec.Raw = NULL
    rules: msgspec.Raw = NULL
    role_ref: msgspec.Raw = NULL
    subjects: msgspec.Raw = NULL
    handler: msgspec.Raw = NULL
    status: DaemonSetStatus = DaemonSetStatus()

    @property
    def texts(self) -> dict[str, str] | None:
        """The data of a ConfigMap; None if it has none."""
        return None if nulls.is_null(self.data) else nulls.decode(self.data, dict[str, str])

    @property
    def version(self) -> str:
        """The generation, or else the resource version: it changes when any writer changes the applied fields."""
        return str(self.metadata.generation) if self.metadata.generation else self.metadata.resource_version


class Mark(msgspec.Struct, frozen=True):
    """The digest of the last applied manifest, and the version of the object that resulted."""

    digest: str
    version: str


def digest_of(manifest: Manifest) -> str:
    """Return a digest of a manifest's content."""
    return sha256(encoded(manifest)).hexdigest()[:16]


def signed(manifest: Manifest) -> Manifest:
    """Return a manifest with its digest as an annotation."""
    annotations = {**manifest.metadata.annotations, DIGEST_ANNOTATION: digest_of(manifest)}
    return replace(manifest, metadata=replace(manifest.metadata, annotations=annotations))


def is_due(manifest: Manifest, stored: StoredObject | None, mark: Mark | None) -> bool:
    """Return whether a manifest has to be applied; `mark` is the last apply of this controller."""
    digest = digest_of(manifest)
    if stored is None or stored.metadata.annotations.get(DIGEST_ANNOTATION) != digest:
        return True
    if mark == Mark(digest, stored.version):
        return False
    return not _matches(manifest, stored)


def _matches(manifest: Manifest, stored: StoredObject) -> bool:
    desired: dict[str, Plain] = msgspec.json.decode(encoded(manifest))
    observed: dict[str, Plain] = {
        "spec": msgspec.json.decode(stored.spec),
        "data": msgspec.json.decode(stored.data),
        "rules": msgspec.json.decode(stored.rules),
        "roleRef": msgspec.json.decode(stored.role_ref),
        "subjects": msgspec.json.decode(stored.subjects),
        "handler": msgspec.json.decode(stored.handler),
    }
    labels = stored.metadata.labels
    return all(labels.get(key) == value for key, value in manifest.metadata.labels.items()) and all(
        covers(value, observed[part]) for part, value in desired.items() if part in observed
    )


def covers(desired: Plain, observed: Plain) -> bool:
    """Return whether the observed value has all desired fields; the API server adds defaults."""
    if isinstance(desired, dict):
        return isinstance(observed, dict) and all(covers(value, observed.get(key)) for key, value in desired.items())
    if isinstance(desired, list):
        if not isinstance(observed, list) or len(desired) != len(observed):
            return False
        return all(covers(item, other) for item, other in zip(desired, observed, strict=True))
    return desired == observed
