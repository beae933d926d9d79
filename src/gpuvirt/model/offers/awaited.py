"""The devices of pods from before a reboot that are not there yet: they stay listed as healthy until they are.

After a reboot the kubelet admits pods again by its record. It refuses for good a pod whose device is unhealthy at that
moment (`devicesToAllocate` of its device manager), and starts a container only after PreStartContainer, which refuses
until the container's own devices are there.
"""

from msgspec import UNSET

from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.reasons import Reason, ReasonCode, unhealthy

_NOT_MADE_AGAIN = frozenset({ReasonCode.DEVICE_GONE, ReasonCode.TYPE_CHANGED})
_NOT_BOUND_AGAIN = frozenset({ReasonCode.DRIVER_CHANGED, ReasonCode.NO_DRIVER})


def awaited(entry: Entry, against: Reason) -> Reason:
    """Return that an allocated device is awaited after a reboot; `against`, the reason against it, where it is not.

    A vGPU is awaited until this boot has shown it. A whole GPU is awaited while it has another driver than a VM's,
    until the kubelet has reported its pod in this boot.
    """
    if entry.target.vgpu is not None:
        was_shown = entry.answered_group is UNSET or entry.group is not None
        return against if was_shown or against.code not in _NOT_MADE_AGAIN else unhealthy.awaited_vgpu(entry.device)
    if not entry.earlier_boot or against.code not in _NOT_BOUND_AGAIN:
        return against
    return unhealthy.awaited_gpu(entry.device, against.places)
