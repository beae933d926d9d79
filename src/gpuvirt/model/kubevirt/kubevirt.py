"""The part of KubeVirt's configuration that decides whether a VM may have gpuvirt's devices.

The input is what `kubectl get kubevirt -A -o yaml` prints. The fields are KubeVirt's v1 API; other fields are ignored.
"""

import re
from collections.abc import Container, Iterator, Mapping
from itertools import chain

import msgspec

from gpuvirt import documents
from gpuvirt.errors import ConfigError

Version = tuple[int, int, int, bool]
"""Major, minor, patch, and whether it is a release: a pre-release may lack what its release has."""

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-.*)?")


def version_of(text: str | None) -> Version | None:
    """Return the version from `v1.8.0`, `0.58.2` or `v1.9.0-rc.2`; None for any other text."""
    found = _VERSION.fullmatch(text or "")
    return (int(found[1]), int(found[2]), int(found[3]), found[4] is None) if found is not None else None


MDEV_GATE = "DisableMDEVConfiguration"


class Permitted(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One entry of a list of permitted devices; each list has its own selector field."""

    resource_name: str = ""
    pci_vendor_selector: str | None = None
    mdev_name_selector: str | None = None
    external_resource_provider: bool = False


class PermittedHostDevices(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The devices that VMs may have; where the field is set, all other devices are refused."""

    pci_host_devices: tuple[Permitted, ...] | None = None
    mediated_devices: tuple[Permitted, ...] | None = None
    usb: tuple[Permitted, ...] | None = None

    def entries(self) -> Iterator[tuple[str, Permitted]]:
        """Yield each entry with its path."""
        lists = {"pciHostDevices": self.pci_host_devices, "mediatedDevices": self.mediated_devices, "usb": self.usb}
        for name, entries in lists.items():
            for index, entry in enumerate(entries or ()):
                yield f"{name}[{index}]", entry


class NodeTypes(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The mdev types that KubeVirt creates on some nodes; by the field's new and old name."""

    node_selector: dict[str, str] | None = None
    mediated_device_types: tuple[str, ...] | None = None
    mediated_devices_types: tuple[str, ...] | None = None


class MediatedDevices(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Whether KubeVirt creates mediated devices of its own, and deletes others."""

    enabled: bool | None = None
    """Since v1.8; it takes precedence over the gate DisableMDEVConfiguration."""
    mediated_device_types: tuple[str, ...] | None = None
    mediated_devices_types: tuple[str, ...] | None = None
    """The old name of `mediatedDeviceTypes`."""
    node_mediated_device_types: tuple[NodeTypes, ...] | None = None

    @property
    def makes_own(self) -> bool:
        """Whether KubeVirt is configured to create mediated devices itself."""
        return bool(self.mediated_device_types or self.mediated_devices_types or self.node_mediated_device_types)

    def types_on(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Return the types that KubeVirt creates on a node with these labels (its GetDesiredMDEVTypes)."""
        selected = (
            found.mediated_device_types or found.mediated_devices_types or ()
            for found in self.node_mediated_device_types or ()
            if (found.node_selector or {}).items() <= labels.items()
        )
        own = tuple(dict.fromkeys(chain.from_iterable(selected)))
        return own or self.mediated_device_types or self.mediated_devices_types or ()


class DeveloperConfiguration(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The feature gates."""

    feature_gates: tuple[str, ...] | None = None
    disabled_feature_gates: tuple[str, ...] | None = None


class Configuration(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """`spec.configuration`."""

    permitted_host_devices: PermittedHostDevices | None = None
    mediated_devices_configuration: MediatedDevices | None = None
    developer_configuration: DeveloperConfiguration | None = None


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """`spec`."""

    configuration: Configuration | None = None


class Status(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """`status`."""

    observed_kube_virt_version: str | None = msgspec.field(name="observedKubeVirtVersion", default=None)


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """`metadata`."""

    name: str = "kubevirt"
    namespace: str = "kubevirt"


class KubeVirt(msgspec.Struct, frozen=True, kw_only=True):
    """An object of KubeVirt's kind `KubeVirt`."""

    kind: str
    metadata: Metadata = Metadata()
    spec: Spec = Spec()
    status: Status | None = None

    @property
    def configuration(self) -> Configuration:
        """`spec.configuration`, or an empty one."""
        return self.spec.configuration or Configuration()

    @property
    def gates(self) -> frozenset[str]:
        """The enabled feature gates; KubeVirt takes a gate that is also in `disabledFeatureGates` as enabled."""
        developer = self.configuration.developer_configuration or DeveloperConfiguration()
        return frozenset(developer.feature_gates or ())

    @property
    def version(self) -> str:
        """The version that KubeVirt reports in its status."""
        return (self.status.observed_kube_virt_version if self.status is not None else None) or "unknown"


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    kind: str


class _List(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[KubeVirt, ...]


def parse(text: str, *, where: str) -> tuple[KubeVirt, ...]:
    """Return the KubeVirt objects in kubectl's output, YAML or JSON; raise ConfigError."""
    kind = documents.parse(text, _Kind, where=where, null_is_absent=True).kind
    found = (
        documents.parse(text, _List, where=where, null_is_absent=True).items
        if kind in {"List", "KubeVirtList"}
        else (documents.parse(text, KubeVirt, where=where, null_is_absent=True),)
    )
    for kubevirt in found:
        if kubevirt.kind != "KubeVirt":
            raise ConfigError(
                f"is a {kubevirt.kind}; expected KubeVirt, as from kubectl get kubevirt -A -o yaml",
                where=where,
                path="$.kind",
            )
    return found


# Source: KubeVirt 1.9, `pkg/util/hardware/grace.go` and its webhook for VMs, which decides by `permittedHostDevices`:
# an entry with such an id makes it refuse VMs that request the entry's resource. Without an entry, and in older
# versions, such a GPU is a GPU like any other.
GRACE_IDS = frozenset({"10de:2342", "10de:2348", "10de:2941"})
IOMMUFD_GATE = "IOMMUFD"
GRACE_GATES = ("GraceIOVirtualization", "PCINUMAAwareTopology", IOMMUFD_GATE)
SINCE: Version = (1, 9, 0, False)
"""The first version with the gates; its pre-releases have them, too."""


def is_grace(selector: str) -> bool:
    """Return whether the id of PCI functions is that of a Grace GPU."""
    return selector.lower() in GRACE_IDS


def missing_gates(version: Version | None, gates: Container[str]) -> tuple[str, ...]:
    """Return the gates that KubeVirt lacks for Grace GPUs; an unknown version counts as a new one."""
    if version is not None and version < SINCE:
        return ()
    return tuple(gate for gate in GRACE_GATES if gate not in gates)
