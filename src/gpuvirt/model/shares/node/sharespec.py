"""The CDI spec of one container's share: the device that the kubelet's answer names, with the edits of its GPUs.

The name of a device is a random number, which is never used twice: a runtime that still has an old spec in its cache
can't give a container the GPU of another. The spec also has the record of its pod, from which the records can be read
again if their own file is lost.
"""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node.limits import NO_PATHS, LimitPaths, variables, with_limit
from gpuvirt.model.shares.node.nvidiacdi import VISIBLE, Edits, Fields, later
from gpuvirt.model.shares.node.records import PodRecord, ShareRecords
from gpuvirt.plain import Plain

KIND = "gpuvirt.io/share"
PREFIX, SUFFIX = "gpuvirt.io-share-", ".json"
"""The prefix and suffix of the file names; other files in the folder belong to other programs."""
RECORD = "gpuvirt.io/record"
LOWEST = "0.6.0"
"""The lowest version with annotations; names that begin with a digit need 0.5."""
NO_GPUS = {VISIBLE: "void"}
"""Keeps NVIDIA's runtime from adding GPUs by itself: the environment of a pod, or of its image, may ask for all.

The kubelet lets the pod's own variables replace those of its answer, and a CDI spec replaces both, so it is in both.
"""
GPUS, UNITS = "GPUVIRT_GPUS", "GPUVIRT_UNITS"


class SpecOwner(msgspec.Struct, frozen=True):
    """The container of a spec, and the record of its pod."""

    uid: PodUid
    container: ContainerName
    pod: PodRecord


class _Device(msgspec.Struct, frozen=True):
    name: str
    annotations: dict[str, str] = {}


class _Spec(msgspec.Struct, frozen=True):
    devices: list[_Device]


def device_name(nonce: str) -> str:
    """Return the CDI device that the answer to the kubelet names."""
    return f"{KIND}={nonce}"


def nonce_of(device: str) -> str | None:
    """Return the random number in the name of a CDI device, None for a device of another kind."""
    kind, _, nonce = device.partition("=")
    return nonce if kind == KIND and nonce.isascii() and nonce.isalnum() else None


def file_name(nonce: str) -> str:
    """Return the name of a device's file."""
    return f"{PREFIX}{nonce}{SUFFIX}"


def nonce_in(name: str) -> str | None:
    """Return the random number in a file name, None for a file of another program."""
    if not (name.startswith(PREFIX) and name.endswith(SUFFIX)):
        return None
    return name.removeprefix(PREFIX).removesuffix(SUFFIX)


def spec(
    nonce: str, uid: PodUid, container: ContainerName, pod: PodRecord, edits: Edits, paths: LimitPaths = NO_PATHS
) -> bytes:
    """Return the content of a container's spec; `edits` are those of its GPUs, `paths` those of its limit."""
    share = pod.containers[container]
    own = {**NO_GPUS, GPUS: ",".join(sorted(share.gpus)), UNITS: str(share.units)}
    fields = edits.fields
    if share.limit is not None:
        (gpu,) = share.gpus
        own |= variables(share.limit, gpu)
        fields = with_limit(fields, share.limit, gpu, paths)
    device: Fields = {
        "name": nonce,
        "annotations": {RECORD: msgspec.json.encode(SpecOwner(uid, container, pod)).decode()},
        "containerEdits": {**fields, "env": _env(fields.get("env"), own)},
    }
    content: Fields = {"cdiVersion": later(edits.version, LOWEST), "kind": KIND, "devices": [device]}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def owners(content: bytes) -> Iterator[tuple[str, SpecOwner]]:
    """Yield the name of each device of a spec with its owner; raise DamagedError."""
    for device in from_json(content, _Spec).devices:
        yield device.name, from_json(device.annotations.get(RECORD, "").encode(), SpecOwner)


def with_owners(records: ShareRecords, content: bytes) -> ShareRecords:
    """Return the records with the pod of a spec; raise DamagedError."""
    for name, owner in owners(content):
        pod = records.pods.get(owner.uid, owner.pod)
        if owner.container not in pod.containers:
            raise DamagedError(f"the pod {pod.namespace}/{pod.name} has no container {owner.container}")
        records = records.with_pod(owner.uid, pod).with_device(owner.uid, owner.container, device_name(name))
    return records


def _env(theirs: Plain, own: Mapping[str, str]) -> list[Plain]:
    texts = [text for text in (theirs if isinstance(theirs, list) else ()) if isinstance(text, str)]
    kept = [text for text in texts if text.partition("=")[0] not in own]
    return [*kept, *(f"{name}={value}" for name, value in own.items())]
