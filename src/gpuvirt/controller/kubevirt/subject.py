"""The object that decides what KubeVirt permits, in one form: a KubeVirt, or the HyperConverged that owns it.

HCO overwrites the KubeVirt's lists with its own, so that it reverts changes of the KubeVirt at once.
"""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.controller.kubevirt.changes import DeviceList, OurEntry
from gpuvirt.kube.jsonpatch import at
from gpuvirt.kube.kinds.core import OwnedMetadata
from gpuvirt.kube.kinds.kubevirt import (
    HYPER_CONVERGEDS,
    KUBEVIRTS,
    HcoPermitted,
    HcoPermittedHostDevices,
    HcoSpec,
    HyperConverged,
    KubeVirt,
)
from gpuvirt.kube.resources import Resource
from gpuvirt.model.kubevirt.kubevirt import Configuration, DeveloperConfiguration, MediatedDevices, PermittedHostDevices

MANAGED_BY, HCO = "app.kubernetes.io/managed-by", "hco-operator"
"""The label of the objects that HCO writes. Not all versions of HCO set an owner reference."""
PERMITTED, MEDIATED, DEVELOPER, GATES = (
    "permittedHostDevices",
    "mediatedDevicesConfiguration",
    "developerConfiguration",
    "featureGates",
)


class PermittedEntry(msgspec.Struct, frozen=True):
    """One entry of a list of permitted devices."""

    part: DeviceList
    index: int
    selector: str
    resource: str
    external: bool
    disabled: bool = False
    """Whether HCO ignores the entry."""

    def as_ours(self) -> OurEntry:
        """Return the entry as the record of gpuvirt's changes would have it."""
        return OurEntry(self.part, self.selector, self.resource)


class PermittingObject(msgspec.Struct, frozen=True):
    """The object that decides what KubeVirt permits."""

    kind: str
    resource: Resource
    """The object's collection in its namespace."""
    metadata: OwnedMetadata
    root: str
    """The JSON pointer to the configuration."""
    pci_key: str
    """The name of the field with the selector of a PCI device."""
    containers: frozenset[str]
    """The JSON pointers of the existing containers (objects and lists) that a patch may need."""
    entries: tuple[PermittedEntry, ...] | None
    """The entries of all lists; None if there is no list, so that KubeVirt permits every device."""
    mediated: MediatedDevices
    gates: tuple[str, ...]
    """The enabled feature gates of KubeVirt."""
    disabled_gates: frozenset[str]
    hco_leaves_mdevs: bool | None = None
    """The value of HCO's own gate `disableMDevConfiguration`."""

    @property
    def is_hco(self) -> bool:
        """Whether the object is a HyperConverged."""
        return self.resource.group == HYPER_CONVERGEDS.group

    @property
    def where(self) -> str:
        """The object's name in messages: `KubeVirt kubevirt/kubevirt`."""
        return f"{self.kind} {self.metadata.namespace}/{self.metadata.name}"

    @property
    def permitted(self) -> str:
        """The JSON pointer to the lists of permitted devices."""
        return f"{self.root}{at(PERMITTED)}"

    @property
    def gates_pointer(self) -> str:
        """The JSON pointer to KubeVirt's feature gates."""
        return f"{self.root}{at(DEVELOPER, GATES)}"


def is_owned_by_hco(kubevirt: KubeVirt) -> bool:
    """Return whether HCO manages a KubeVirt."""
    owners = {owner.kind for owner in kubevirt.metadata.owner_references}
    return "HyperConverged" in owners or kubevirt.metadata.labels.get(MANAGED_BY) == HCO


def of_kubevirt(kubevirt: KubeVirt) -> PermittingObject:
    """Return a KubeVirt as the subject."""
    configuration = kubevirt.spec.configuration or Configuration()
    permitted, mediated = configuration.permitted_host_devices, configuration.mediated_devices_configuration
    developer = configuration.developer_configuration
    root = at("spec", "configuration")
    found = {
        at("spec"): True,
        root: kubevirt.spec.configuration is not None,
        f"{root}{at(PERMITTED)}": permitted is not None,
        f"{root}{at(MEDIATED)}": mediated is not None,
        f"{root}{at(DEVELOPER)}": developer is not None,
        f"{root}{at(DEVELOPER, GATES)}": developer is not None and developer.feature_gates is not None,
    }
    lists = permitted or PermittedHostDevices()
    found |= _lists(f"{root}{at(PERMITTED)}", lists.pci_host_devices, lists.mediated_devices)
    gates = developer or DeveloperConfiguration()
    return PermittingObject(
        kind="KubeVirt",
        resource=Resource(KUBEVIRTS.plural, KUBEVIRTS.group, KUBEVIRTS.version, kubevirt.metadata.namespace),
        metadata=kubevirt.metadata,
        root=root,
        pci_key="pciVendorSelector",
        containers=_containers(kubevirt.metadata, found),
        entries=entries_of(permitted) if permitted is not None else None,
        mediated=mediated or MediatedDevices(),
        gates=gates.feature_gates or (),
        disabled_gates=frozenset(gates.disabled_feature_gates or ()),
    )


def of_hyper_converged(hyper_converged: HyperConverged) -> PermittingObject:
    """Return a HyperConverged as the subject."""
    spec, metadata = hyper_converged.spec or HcoSpec(), hyper_converged.metadata
    permitted, gates, root = spec.permitted_host_devices, spec.feature_gates, at("spec")
    found = {
        root: hyper_converged.spec is not None,
        f"{root}{at(PERMITTED)}": permitted is not None,
        f"{root}{at(MEDIATED)}": spec.mediated_devices_configuration is not None,
        f"{root}{at(GATES)}": gates is not None,
    }
    lists = permitted or HcoPermittedHostDevices()
    found |= _lists(f"{root}{at(PERMITTED)}", lists.pci_host_devices, lists.mediated_devices)
    return PermittingObject(
        kind="HyperConverged",
        resource=Resource(
            HYPER_CONVERGEDS.plural, HYPER_CONVERGEDS.group, HYPER_CONVERGEDS.version, metadata.namespace
        ),
        metadata=metadata,
        root=root,
        pci_key="pciDeviceSelector",
        containers=_containers(metadata, found),
        entries=tuple(_hco_entries(permitted)) if permitted is not None else None,
        mediated=spec.mediated_devices_configuration or MediatedDevices(),
        gates=(),
        disabled_gates=frozenset(),
        hco_leaves_mdevs=gates.disable_mdev_configuration if gates is not None else None,
    )


def entries_of(permitted: PermittedHostDevices | None) -> tuple[PermittedEntry, ...]:
    """Return the entries of a KubeVirt's lists."""
    lists = permitted or PermittedHostDevices()
    return tuple(
        PermittedEntry(
            part,
            index,
            (device.mdev_name_selector if part is DeviceList.MDEV else device.pci_vendor_selector) or "",
            device.resource_name,
            device.external_resource_provider,
        )
        for part, entries in (
            (DeviceList.PCI, lists.pci_host_devices),
            (DeviceList.MDEV, lists.mediated_devices),
            (DeviceList.USB, lists.usb),
        )
        for index, device in enumerate(entries or ())
    )


def _hco_entries(permitted: HcoPermittedHostDevices) -> Iterator[PermittedEntry]:
    lists: tuple[tuple[DeviceList, tuple[HcoPermitted, ...] | None], ...] = (
        (DeviceList.PCI, permitted.pci_host_devices),
        (DeviceList.MDEV, permitted.mediated_devices),
        (DeviceList.USB, permitted.usb_host_devices),
    )
    for part, entries in lists:
        for index, device in enumerate(entries or ()):
            selector = device.mdev_name_selector if part is DeviceList.MDEV else device.pci_device_selector
            external, disabled = device.external_resource_provider, device.disabled
            yield PermittedEntry(part, index, selector or "", device.resource_name, external, disabled)


def _lists(permitted: str, pci: object, mediated: object) -> Mapping[str, bool]:
    return {
        f"{permitted}{at(DeviceList.PCI)}": pci is not None,
        f"{permitted}{at(DeviceList.MDEV)}": mediated is not None,
    }


def _containers(metadata: OwnedMetadata, found: Mapping[str, bool]) -> frozenset[str]:
    annotated = {at("metadata", "annotations")} if metadata.annotations else set[str]()
    return frozenset({at("metadata"), *annotated, *(pointer for pointer, exists in found.items() if exists)})
