"""The webhook's config: the resources of vGPUs, and the additions to the pods of each RuntimeClass.

The defaults of a class follow from its profile. `hot-plug` is the setup in which the node has the guest's driver as a
tree of files, and a vGPU is plugged into the running VM. With `cold-plug` the VM starts with its devices, and the guest
image has the driver unless `driver` says otherwise.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase

import msgspec
from msgspec.structs import replace

from gpuvirt import documents
from gpuvirt.documents import WrittenDocument
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import ResourceName, parse_object_name
from gpuvirt.model.shares.demand import is_quantity
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE
from gpuvirt.plain import Step

VERSION = "v1"
VGPU_RESOURCES = ("tencent.com/vgpu-[0-9]*", "nvidia.com/NVIDIA_*", "nvidia.com/GRID_*")
"""`tencent.com/vgpu-492` names the number of an mdev type; the others are NVIDIA's names of vGPU types."""
MDEV_RESOURCES = ("tencent.com/vgpu-[0-9]*",)
DRIVER_TREE = "/opt/guest-driver"
"""The folder into which deploy/kata/build-guest-driver puts the tree in its examples."""
BUSYBOX = "docker.io/library/busybox:1.37.0-glibc"
"""modprobe, and the C library that nvidia-modprobe needs."""
DEBIAN = "docker.io/library/debian:12-slim"
"""bash, and the C library that nvidia-gridd needs."""
LOAD = ("/bin/sh", "-c", "modprobe nvidia;modprobe nvidia-drm modeset=1;nvidia-modprobe -u -m")
LICENSE = ("/bin/bash", "-c", "nvidia-gridd; sleep infinity")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class InjectionProfile(StrEnum):
    """When Kata plugs the vGPU into the VM."""

    HOT_PLUG = "hot-plug"
    """With the container that has it. The init container has it first, so that the driver's modules find it."""
    COLD_PLUG = "cold-plug"
    """Before the VM starts."""


class MdevRule(StrEnum):
    """The rule for pods that request a mediated device."""

    ALLOW = "allow"
    WARN = "warn"
    REFUSE = "refuse"


class _Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    image: str | None = None
    image_pull_policy: str = ""
    command: tuple[str, ...] | None = None
    capabilities: tuple[str, ...] = ("ALL",)
    resources: _Resources = _Resources()


class _Containers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    dev: bool | None = None
    driver: bool | None = None
    path: str = ""
    library_path: bool = True


class _Class(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    profile: InjectionProfile
    driver: str | msgspec.UnsetType | None = msgspec.UNSET
    mdev: MdevRule | None = None
    nvidia: _Part = _Part()
    gridd: _Part = _Part()
    containers: _Containers = _Containers()
    licence_secret: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    version: str | None = None
    vgpu_resources: tuple[str, ...] = VGPU_RESOURCES
    mdev_resources: tuple[str, ...] = MDEV_RESOURCES
    units_resource: str = str(UNITS_RESOURCE)
    classes: dict[str, object] | None = None
    """Each a `_Class`."""


class AddedContainer(msgspec.Struct, frozen=True):
    """A container that is added to pods."""

    image: str
    image_pull_policy: str
    command: tuple[str, ...]
    capabilities: tuple[str, ...]
    requests: Mapping[str, str | int]
    limits: Mapping[str, str | int]

    def sharing(self) -> "AddedContainer":
        """Return the container for a pod with resources of its own: containers share them, and can't exceed them."""
        return replace(self, requests={}, limits={})


class UserContainers(msgspec.Struct, frozen=True):
    """The additions to the containers of a pod that request vGPUs."""

    dev: bool
    """Whether they have the guest's `/dev`."""
    driver: bool
    """Whether they have the driver's tree at `/usr/share/nvidia`, and its libraries in LD_LIBRARY_PATH."""
    path: str
    """The PATH of a container whose pod sets none, to which the driver's programs are appended; empty: its image's."""
    library_path: bool
    """Whether LD_LIBRARY_PATH has the driver's libraries."""


class ClassSettings(msgspec.Struct, frozen=True):
    """The settings of one RuntimeClass: the additions to its pods, and the rule for mediated devices."""

    profile: InjectionProfile
    driver: str | None
    """The driver's tree on the node; None: the guest image has the driver."""
    mdev: MdevRule
    nvidia: AddedContainer | None
    """The init container that loads the driver; None: the guest loads it."""
    gridd: AddedContainer | None
    """The sidecar that gets the licence; None: the guest gets it."""
    containers: UserContainers
    licence_secret: str
    """The Secret with the licence's token in the pods' namespaces; empty: the tree has it."""


class InjectionConfig(msgspec.Struct, frozen=True):
    """The config of a webhook."""

    classes: Mapping[str, ClassSettings]
    """By the names of RuntimeClasses."""
    vgpus: tuple[str, ...] = VGPU_RESOURCES
    mdevs: tuple[str, ...] = MDEV_RESOURCES
    units: ResourceName = UNITS_RESOURCE

    def is_vgpu(self, resource: str) -> bool:
        """Return whether a resource is a vGPU type."""
        return resource != self.units and _matches(resource, self.vgpus)

    def is_mdev(self, resource: str) -> bool:
        """Return whether a vGPU type is that of mediated devices."""
        return _matches(resource, self.mdevs)


def _matches(resource: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(resource, pattern) for pattern in patterns)


def parse(text: str, *, where: str) -> InjectionConfig:
    """Return the config in YAML; raise ConfigError, whose message has the place of the value. `where` is its origin."""
    written = documents.parse_written(text, _File, where=where)
    file = written.value
    if file.version != VERSION:
        raise written.fault(f"expected {VERSION}, found {file.version!r}; write `version: {VERSION}`", ["version"])
    for field, patterns in (("vgpuResources", file.vgpu_resources), ("mdevResources", file.mdev_resources)):
        _check_patterns(written, field, patterns)
    if file.classes is None:
        message = "has no RuntimeClass; add one, as in `kata-qemu-nvidia-gpu: {profile: cold-plug}`"
        raise written.fault(message, ["classes"])
    classes = {name: _class(written, name, content) for name, content in file.classes.items()}
    units = ResourceName(file.units_resource)
    return InjectionConfig(classes, file.vgpu_resources, file.mdev_resources, units)


def _check_patterns(written: WrittenDocument[_File], field: str, patterns: Sequence[str]) -> None:
    for index, pattern in enumerate(patterns):
        domain, _, name = pattern.partition("/")
        if not (domain and name) or any(sign in domain for sign in "*?["):
            message = f"expected DOMAIN/PATTERN, as in nvidia.com/NVIDIA_*, found {pattern!r}; write the domain in full"
            raise written.fault(message, [field, index])


def _class(written: WrittenDocument[_File], name: str, content: object) -> ClassSettings:
    steps: list[Step] = ["classes", name]
    of = written.part(content, steps, _Class)
    for kind, value, at in (
        ("a RuntimeClass", name, steps),
        *((("a Secret", of.licence_secret, [*steps, "licenceSecret"]),) if of.licence_secret else ()),
    ):
        try:
            parse_object_name(value)
        except InvalidIdError as error:
            raise written.fault(f"is not the name of {kind}: {error}", at) from error
    driver = _driver(written, steps, of)
    _check_quantities(written, steps, of)
    hot = of.profile is InjectionProfile.HOT_PLUG
    containers = of.containers
    return ClassSettings(
        profile=of.profile,
        driver=driver,
        # The runtime in Go would plug the whole GPU below a mediated device into a VM that is not started yet.
        mdev=of.mdev or (MdevRule.WARN if hot else MdevRule.REFUSE),
        nvidia=_part(of.nvidia, BUSYBOX, LOAD, _NVIDIA_RESOURCES, has_driver=driver is not None),
        gridd=_part(of.gridd, DEBIAN, LICENSE, _GRIDD_RESOURCES, has_driver=driver is not None),
        containers=UserContainers(
            dev=hot if containers.dev is None else containers.dev,
            driver=driver is not None and containers.driver is not False,
            path=containers.path,
            library_path=containers.library_path,
        ),
        licence_secret=of.licence_secret,
    )


def _driver(written: WrittenDocument[_File], steps: Sequence[Step], of: _Class) -> str | None:
    """Return the folder of the driver's tree on the node; None where the guest has the driver."""
    default = DRIVER_TREE if of.profile is InjectionProfile.HOT_PLUG else None
    tree = default if of.driver is msgspec.UNSET else of.driver
    if tree is None:
        if of.containers.driver:
            message = "expected false, found true: the guest has the driver; set `driver` to the tree's folder, too"
            raise written.fault(message, [*steps, "containers", "driver"])
        return None
    if not tree.startswith("/") or ".." in tree.split("/"):
        message = f"expected an absolute path on the node, as in {DRIVER_TREE}, or null; found {tree!r}"
        raise written.fault(message, [*steps, "driver"])
    return tree.rstrip("/") or "/"


def _check_quantities(written: WrittenDocument[_File], steps: Sequence[Step], of: _Class) -> None:
    """Refuse amounts that the API server could not decode: no pod of the class would be admitted."""
    for name, part in (("nvidia", of.nvidia), ("gridd", of.gridd)):
        for field in ("requests", "limits"):
            amounts: Mapping[str, str | int] | None = getattr(part.resources, field)
            for resource, amount in (amounts or {}).items():
                if not is_quantity(amount):
                    message = f"expected a quantity, as in 100m or 128Mi, found {amount!r}"
                    raise written.fault(message, [*steps, name, "resources", field, resource])


_NVIDIA_RESOURCES = {"cpu": "100m", "memory": "128Mi"}
_GRIDD_RESOURCES = {"cpu": "50m", "memory": "128Mi"}


def _part(
    part: _Part, image: str, command: tuple[str, ...], resources: Mapping[str, str], *, has_driver: bool
) -> AddedContainer | None:
    """Return an added container; without the driver's tree, its programs come from an image that the config names."""
    if part.image == "" or (part.image is None and not has_driver):
        return None
    needs = part.resources
    limits: Mapping[str, str | int] = resources if needs.limits is None else needs.limits
    # Equal requests and limits leave the pod its quality of service.
    requests: Mapping[str, str | int] = limits if needs.requests is None else needs.requests
    return AddedContainer(
        image=part.image or image,
        image_pull_policy=part.image_pull_policy,
        command=command if part.command is None else part.command,
        capabilities=part.capabilities,
        requests=requests,
        limits=limits,
    )
