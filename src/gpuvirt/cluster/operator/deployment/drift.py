"""Whether an object is still what was applied: by a digest of what is wanted, and by what stands there.

A digest alone, as NVIDIA's operator has it, leaves what somebody edits by hand as it is. What stands there alone may
differ for ever in how the API server writes the same thing (`1000m` and `1`), so that it is applied once for each
version of the object.
"""

from dataclasses import dataclass
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from gpuvirt import nulls
from gpuvirt.cluster.kinds.core import DaemonSetStatus
from gpuvirt.cluster.kinds.workloads import Manifest, encoded
from gpuvirt.cluster.resources import Metadata
from gpuvirt.plain import Plain

DIGEST_ANNOTATION = "gpuvirt.io/applied"
NOTHING = msgspec.Raw(b"null")


class StoredObject(msgspec.Struct, frozen=True, rename="camel"):
    """An object of any kind that operands are made of, with the parts that are ever applied as they stand there."""

    metadata: Metadata
    spec: msgspec.Raw = NOTHING
    data: msgspec.Raw = NOTHING
    rules: msgspec.Raw = NOTHING
    role_ref: msgspec.Raw = NOTHING
    subjects: msgspec.Raw = NOTHING
    handler: msgspec.Raw = NOTHING
    status: DaemonSetStatus = DaemonSetStatus()

    @property
    def texts(self) -> dict[str, str] | None:
        """The data of a ConfigMap; None where it has none."""
        return None if nulls.is_null(self.data) else nulls.decode(self.data, dict[str, str])

    @property
    def version(self) -> str:
        """What changes whenever somebody changes what was applied."""
        return str(self.metadata.generation) if self.metadata.generation else self.metadata.resource_version


@dataclass(frozen=True, slots=True)
class Mark:
    """What was applied last, and which version of the object came of it."""

    digest: str
    version: str


def digest_of(manifest: Manifest) -> str:
    """Return what tells manifests apart."""
    return sha256(encoded(manifest)).hexdigest()[:16]


def signed(manifest: Manifest) -> Manifest:
    """Return a manifest that says its digest."""
    annotations = {**manifest.metadata.annotations, DIGEST_ANNOTATION: digest_of(manifest)}
    return replace(manifest, metadata=replace(manifest.metadata, annotations=annotations))


def is_due(manifest: Manifest, stored: StoredObject | None, mark: Mark | None) -> bool:
    """Return whether a manifest is to be applied; `mark` is what is known of the last time."""
    digest = digest_of(manifest)
    if stored is None or stored.metadata.annotations.get(DIGEST_ANNOTATION) != digest:
        return True
    if mark == Mark(digest, stored.version):
        return False
    return not _stands(manifest, stored)


def _stands(manifest: Manifest, stored: StoredObject) -> bool:
    daemon_set: dict[str, Plain] = msgspec.json.decode(encoded(manifest))
    there: dict[str, Plain] = {
        "spec": msgspec.json.decode(stored.spec),
        "data": msgspec.json.decode(stored.data),
        "rules": msgspec.json.decode(stored.rules),
        "roleRef": msgspec.json.decode(stored.role_ref),
        "subjects": msgspec.json.decode(stored.subjects),
        "handler": msgspec.json.decode(stored.handler),
    }
    labels = stored.metadata.labels
    return all(labels.get(key) == value for key, value in manifest.metadata.labels.items()) and all(
        covers(value, there[part]) for part, value in daemon_set.items() if part in there
    )


def covers(daemon_set: Plain, there: Plain) -> bool:
    """Return whether what stands there has all that is wanted; the API server adds its defaults."""
    if isinstance(daemon_set, dict):
        return isinstance(there, dict) and all(covers(value, there.get(key)) for key, value in daemon_set.items())
    if isinstance(daemon_set, list):
        if not isinstance(there, list) or len(daemon_set) != len(there):
            return False
        return all(covers(one, other) for one, other in zip(daemon_set, there, strict=True))
    return daemon_set == there
