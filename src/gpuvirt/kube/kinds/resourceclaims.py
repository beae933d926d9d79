"""ResourceClaims and ResourceSlices (`resource.k8s.io/v1`), with the fields that gpuvirt reads."""

import msgspec

from gpuvirt.kube.resources import Collection, Metadata, Resource
from gpuvirt.nulls import decode
from gpuvirt.plain import Plain

GROUP = "resource.k8s.io"
OF_POD = "resource.kubernetes.io/pod-claim-name"
"""The annotation of a claim that was made from a template: its name in the spec of its pod."""
SLICES = Resource("resourceslices", GROUP)


def resource_claims(namespace: str) -> Resource:
    """Return the claims of a namespace."""
    return Resource("resourceclaims", GROUP, namespace=namespace)


class Result(msgspec.Struct, frozen=True, rename="camel"):
    """A device that a scheduler has given to a request."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class Opaque(msgspec.Struct, frozen=True):
    """Settings that only their driver understands."""

    driver: str = ""


class ClaimConfig(msgspec.Struct, frozen=True):
    """The settings of requests, from a claim or its DeviceClass."""

    opaque: Opaque | None = None


class Devices(msgspec.Struct, frozen=True):
    """The devices of a claim."""

    results: tuple[Result, ...] = ()
    config: tuple[ClaimConfig, ...] = ()


class ClaimAllocation(msgspec.Struct, frozen=True):
    """The devices that a scheduler has given to a claim."""

    devices: Devices = msgspec.field(default_factory=Devices)


class Reservation(msgspec.Struct, frozen=True):
    """A pod that may use a claim."""

    uid: str = ""


class ClaimStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The state of a claim."""

    allocation: ClaimAllocation | None = None
    reserved_for: tuple[Reservation, ...] = ()


class ResourceClaim(msgspec.Struct, frozen=True):
    """A claim of pods to devices."""

    metadata: Metadata
    status: ClaimStatus = msgspec.field(default_factory=ClaimStatus)


class ClassOfRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The DeviceClass of a request, or of one of its alternatives."""

    device_class_name: str = ""


class DeviceRequest(msgspec.Struct, frozen=True, rename="camel"):
    """A request of a claim: devices of one class, or of the first of several that a scheduler finds."""

    exactly: ClassOfRequest | None = None
    first_available: tuple[ClassOfRequest, ...] = ()


class DeviceRequests(msgspec.Struct, frozen=True):
    """The devices that a claim asks for."""

    requests: tuple[DeviceRequest, ...] = ()


class ClaimSpec(msgspec.Struct, frozen=True):
    """The desired state of a claim."""

    devices: DeviceRequests = msgspec.field(default_factory=DeviceRequests)


class WholeClaim(ResourceClaim, frozen=True):
    """A claim with what it asks for, as users are shown it."""

    spec: ClaimSpec = msgspec.field(default_factory=ClaimSpec)


class CelSelector(msgspec.Struct, frozen=True):
    """A condition on devices."""

    expression: str = ""


class DeviceSelector(msgspec.Struct, frozen=True):
    """A condition on devices, in one of the languages for them."""

    cel: CelSelector | None = None


class DeviceClassSpec(msgspec.Struct, frozen=True):
    """The devices of a class."""

    selectors: tuple[DeviceSelector, ...] = ()


class DeviceClass(msgspec.Struct, frozen=True):
    """A class of devices, for claims."""

    metadata: Metadata
    spec: DeviceClassSpec = msgspec.field(default_factory=DeviceClassSpec)

    def selects(self, driver: str) -> bool:
        """Return whether its selectors name a driver, or an attribute of its devices."""
        return any(found.cel is not None and driver in found.cel.expression for found in self.spec.selectors)


DEVICE_CLASSES = Collection(Resource("deviceclasses", GROUP), DeviceClass)
ALL_CLAIMS = Collection(Resource("resourceclaims", GROUP), ResourceClaim)


class Attribute(msgspec.Struct, frozen=True):
    """A value of a device; other types than texts are not read."""

    string: str | None = None


class PublishedDevice(msgspec.Struct, frozen=True):
    """A device of a slice."""

    name: str
    attributes: dict[str, Attribute] = {}


class _SliceSpec(msgspec.Struct, frozen=True):
    driver: str = ""
    devices: tuple[PublishedDevice, ...] = ()


class ResourceSlice(msgspec.Struct, frozen=True):
    """A part of a driver's pool of devices."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def content(self) -> dict[str, Plain]:
        """All fields of the spec, to be compared with those that are to be written."""
        found: dict[str, Plain] | None = msgspec.json.decode(self.spec)
        return found or {}

    @property
    def driver(self) -> str:
        """The name of the driver."""
        return self._spec.driver

    @property
    def devices(self) -> tuple[PublishedDevice, ...]:
        """The devices with their attributes."""
        return self._spec.devices

    @property
    def _spec(self) -> _SliceSpec:
        return decode(self.spec, _SliceSpec) if bytes(self.spec) != b"null" else _SliceSpec()


def slices_on(node: str) -> Collection[ResourceSlice]:
    """Return the slices of a node, of all drivers."""
    return Collection(SLICES, ResourceSlice, on_node=node)
