"""Whether KubeVirt handles mediated devices, and its fields and feature gates by the version in its status.

A KubeVirt that handles mediated devices deletes those that it did not create. virt-handler does so at each heartbeat,
even if a VM uses them. It spares the types that are permitted with `externalResourceProvider: true`. If an admin has
KubeVirt create mediated devices, that stays, and entries spare those of gpuvirt. Otherwise gpuvirt switches the
handling off. Source of versions: KubeVirt's releases.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.controller.kubevirt.changes import OurSwitch
from gpuvirt.controller.kubevirt.offered import Names, Offered
from gpuvirt.controller.kubevirt.subject import GATES, MEDIATED, PermittingObject
from gpuvirt.kube.jsonpatch import at
from gpuvirt.model.kubevirt.kubevirt import MDEV_GATE, Version
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, clusterproblems
from gpuvirt.model.reasons.clusterproblems import MOST_NAMES, shortened

GPU, HOST_DEVICES = "GPU", "HostDevices"

MDEV_FIELD: Version = (1, 8, 0, True)
"""The first version with `mediatedDevicesConfiguration.enabled`; some later versions also obey the gate."""
GPU_WITHOUT_GATE: Version = (1, 4, 0, True)
"""The first version in which VMs may use GPUs without the gate GPU."""
_MDEV_GATE: Version = (0, 59, 1, True)
_MDEV_GATE_BEFORE: Version = (0, 58, 2, True)


def has_mdev_field(version: Version | None) -> bool:
    """Return whether KubeVirt has the field `mediatedDevicesConfiguration.enabled`; an older one drops it."""
    return version is not None and version >= MDEV_FIELD


def has_mdev_gate(version: Version | None) -> bool:
    """Return whether KubeVirt obeys the gate DisableMDEVConfiguration."""
    return version is None or version >= _MDEV_GATE or _MDEV_GATE_BEFORE <= version < (0, 59, 0, False)


def needs_gpu_gate(version: Version | None) -> bool:
    """Return whether VMs may use GPUs only with the gate GPU."""
    return version is not None and version < GPU_WITHOUT_GATE


def gates_needed(subject: PermittingObject, version: Version | None, offered: Offered, names: Names) -> tuple[str, ...]:
    """Return the gates that the offered devices need; none for HCO, which always enables both.

    None is for Grace GPUs: by IOMMUFD each virt-launcher pod requests `devices.kubevirt.io/iommufd`, so that nodes
    without `/dev/iommu` run no VM.
    """
    if subject.is_hco:
        return ()
    gpu = (GPU,) if offered and needs_gpu_gate(version) else ()
    host_devices = (HOST_DEVICES,) if names.host_devices & offered.keys() else ()
    return (*gpu, *host_devices)


class Handling(msgspec.Struct, frozen=True):
    """Whether KubeVirt handles mediated devices, and how gpuvirt switches that off."""

    off: bool
    """Whether KubeVirt leaves mediated devices alone."""
    switch: OurSwitch | None = None
    """The field to set, so that KubeVirt leaves them alone."""
    gate: str | None = None
    """The feature gate to enable for that, if KubeVirt has no such field."""
    reasons: tuple[Reason, ...] = ()

    @property
    def will_be_off(self) -> bool:
        """Whether KubeVirt leaves mediated devices alone after the patch."""
        return self.off or self.switch is not None or self.gate is not None


def handling_of(subject: PermittingObject, version: Version | None) -> Handling:
    """Return whether KubeVirt handles mediated devices, and how to switch that off."""
    mediated = subject.mediated
    gated = subject.hco_leaves_mdevs is True if subject.is_hco else MDEV_GATE in subject.gates
    if mediated.enabled is False or (mediated.enabled is None and gated):
        return Handling(off=True)
    if mediated.makes_own:
        return Handling(off=False)
    if not has_mdev_gate(version):
        return Handling(
            off=False,
            reasons=(
                Reason(
                    ReasonCode.KUBEVIRT_TOO_OLD,
                    subject.where,
                    "belongs to a KubeVirt that deletes mediated devices which it did not create, and has no setting"
                    " that prevents this",
                    fix="update KubeVirt to 0.58.2, 0.59.1 or later",
                ),
            ),
        )
    if mediated.enabled is None and subject.is_hco:
        pointer = f"{subject.root}{at(GATES, 'disableMDevConfiguration')}"
        return Handling(off=False, switch=OurSwitch(pointer, value=True, was=subject.hco_leaves_mdevs))
    # If the field is set, this KubeVirt knows it. The field takes precedence over the gate.
    if mediated.enabled is not None or has_mdev_field(version):
        pointer = f"{subject.root}{at(MEDIATED, 'enabled')}"
        return Handling(off=False, switch=OurSwitch(pointer, value=False, was=mediated.enabled))
    is_denied = MDEV_GATE in subject.disabled_gates
    denied = (clusterproblems.gate_disabled(subject.where, MDEV_GATE),) if is_denied else ()
    return Handling(off=False, gate=None if is_denied else MDEV_GATE, reasons=denied)


def second_owner(subject: PermittingObject, nodes: Mapping[str, Mapping[str, str]]) -> Reason | None:
    """Return the reason that KubeVirt creates mediated devices on nodes with gpuvirt's; `nodes` are their labels.

    KubeVirt fills GPUs that have no mediated device yet. gpuvirt can't know who created one, and offers it.
    """
    types = {name: found for name, labels in nodes.items() if (found := subject.mediated.types_on(labels))}
    if not types:
        return None
    every = sorted({name for found in types.values() for name in found})
    return Reason(
        ReasonCode.MDEVS_OF_KUBEVIRT,
        subject.where,
        f"creates mediated devices of the types {shortened(every)} on GPUs without any, also on"
        f" {shortened(sorted(types))}, where gpuvirt creates vGPUs; gpuvirt offers those of KubeVirt, too",
        (Seen(f"{subject.where} mediatedDevicesConfiguration", ", ".join(every[:MOST_NAMES])),),
        "let only one of them create vGPUs: set mediatedDevicesConfiguration.enabled to false, or remove the types, or"
        " name only other nodes in nodeMediatedDeviceTypes",
    )


def holds(subject: PermittingObject, switch: OurSwitch) -> bool:
    """Return whether a field still has the value that gpuvirt has set."""
    if switch.pointer == f"{subject.root}{at(MEDIATED, 'enabled')}":
        return subject.mediated.enabled is switch.value
    return subject.hco_leaves_mdevs is switch.value
