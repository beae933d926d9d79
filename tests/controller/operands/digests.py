"""Digests of the objects that some policies render: what a change of the code renders otherwise shows in them."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.operands.rendering import render
from gpuvirt.controller.settings import SharedResource
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.workloads import Manifest, encoded
from tests.controller.operands.policies import (
    ALL_IMAGES,
    ALL_KINDS,
    EVERY_OPERAND,
    INPUTS,
    full,
    given,
    policy_of,
    sandbox,
)

FILE = Path(__file__).with_name("digests.json")
SHOWN = 16
"""Of the 64 digits of a digest."""
SHARED = SharedResource(ResourceName("gpuvirt.io/gpu"))

RENDERINGS: Mapping[str, tuple[ClusterPolicy, RenderInputs]] = {
    "VMs": (sandbox(), INPUTS),
    "containers": (policy_of({}), ALL_IMAGES),
    "containers on CRI-O": (policy_of({}), replace(ALL_IMAGES, runtime="crio")),
    "every operand": (sandbox(**EVERY_OPERAND), ALL_IMAGES),
    "every field": (full(), ALL_KINDS),
    "the guide's policy": (policy_of(given("guidepolicy.yaml")["spec"]), ALL_IMAGES),
    "shared GPUs": (sandbox(), replace(INPUTS, settings=replace(INPUTS.settings, shared=SHARED))),
    "OpenShift": (
        sandbox(**EVERY_OPERAND),
        replace(ALL_IMAGES, settings=replace(ALL_IMAGES.settings, namespace_sets_uid=True)),
    ),
}

Digests = dict[str, dict[str, str]]
"""By rendering and object."""


def digests() -> Digests:
    """Return the digests of all objects."""
    return {name: {key: _digest(manifest) for key, manifest in objects(name).items()} for name in RENDERINGS}


def recorded() -> Digests:
    """Return the digests in the file."""
    return msgspec.json.decode(FILE.read_bytes(), type=Digests)


def record() -> None:
    """Write the digests into the file."""
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(digests(), order="sorted"), indent=1) + b"\n")


def objects(rendering: str) -> Mapping[str, Manifest]:
    """Return the objects of a rendering by kind and name."""
    manifests = render(*RENDERINGS[rendering]).manifests
    found = {f"{type(manifest).__name__} {manifest.metadata.name}": manifest for manifest in manifests}
    assert len(found) == len(manifests), "each object has a key of its own"
    return found


def differences(before: Digests, after: Digests) -> Iterator[str]:
    """Yield a line for each object that is rendered otherwise."""
    for rendering in sorted(before.keys() | after.keys()):
        old, new = before.get(rendering, {}), after.get(rendering, {})
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                verb = "is new" if key not in old else "is gone" if key not in new else "differs"
                yield f"{rendering}: {key} {verb}"


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(encoded(manifest)).hexdigest()[:SHOWN]
