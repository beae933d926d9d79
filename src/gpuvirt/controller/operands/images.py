"""The image of each operand: from the policy, or else from the controller's environment.

Contract: NVIDIA's operator. The policy sets repository, image and version, or image alone as the whole reference. A
version that is a digest is joined with `@`. An incomplete image is a fault; the controller's environment does not
complete it. The image of a driver is built for one operating system, and its tag ends with that of the system.
"""

from collections.abc import Mapping

from gpuvirt.kube.kinds.clusterpolicy import SpecFault
from gpuvirt.kube.kinds.operandparts import ImageParts

MAJOR_ALONE = {"ol", "rocky", "rhel"}
"""Operating systems whose images serve all minor versions."""
PULL_POLICIES = {"Always", "IfNotPresent", "Never"}
_DIGEST = "sha256:"
INCOMPLETE = (
    "an image needs all of repository, image and version (a tag, or sha256:...); set all three, or image alone with the"
    " whole reference, or none of them"
)
BARE = (
    "the vGPU manager is an image of your own (docs/vgpu-manager-image.md): set repository and version, too, or image"
    " to the whole reference"
)


def image_of(parts: ImageParts, path: str, images: Mapping[str, str], variable: str) -> str | SpecFault:
    """Return an operand's image; `path` is the operand's field in the policy: `$.spec.vgpuManager`."""
    named = {"repository": parts.repository, "image": parts.image, "version": parts.version}
    missing = [name for name, value in named.items() if not value]
    if missing == ["repository", "version"]:
        return parts.image
    if len(missing) == len(named):
        unset = f"no image is set: set repository, image and version, or {variable} in the controller's environment"
        return images.get(variable) or SpecFault(path, unset)
    if missing:
        given = " and ".join(f"{name} {value}" for name, value in named.items() if value)
        return SpecFault(f"{path}.{missing[0]}", f"is not set beside {given}: {INCOMPLETE}")
    joint = "@" if parts.version.startswith(_DIGEST) else ":"
    return f"{parts.repository}/{parts.image}{joint}{parts.version}"


def is_bare(parts: ImageParts) -> bool:
    """Return whether the policy sets only the name of an image, without a repository."""
    return bool(parts.image) and not (parts.repository or parts.version) and not {"/", "@"} & set(parts.image)


def with_os(image: str, os_tag: str) -> str:
    """Return the image for an operating system; an image with a digest is already specific."""
    return image if _DIGEST in image else f"{image}-{os_tag}"


def os_tag(identity: str, version: str) -> str:
    """Return the tag of an operating system, from ID and VERSION_ID of its os-release: `ubuntu22.04`, `rhel9`."""
    name = identity.lower()
    return f"{name}{version.partition('.')[0] if name in MAJOR_ALONE else version}"


def pull_policy(text: str) -> str:
    """Return the image pull policy; an unknown one counts as not set."""
    return text if text in PULL_POLICIES else "IfNotPresent"
