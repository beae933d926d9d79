"""KubeVirt's fields and feature gates by the version in its status, and the gates that gpuvirt's devices need.

Source: KubeVirt's releases.
"""

from gpuvirt.controller.kubevirt.offered import Names, Offered
from gpuvirt.controller.kubevirt.subject import PermittingObject
from gpuvirt.model.kubevirt.version import Version

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
