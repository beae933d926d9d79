"""The intervals of the agent's periodic work, and the limits of its waits."""

import msgspec

from gpuvirt.model.offers.notice import NoticeTimes


class Intervals(msgspec.Struct, frozen=True):
    """All intervals, in seconds. The periodic ones are multiples of the shortest, so that they coincide."""

    nodes_s: float = 1.5
    """Between listings of `/dev/vfio`: a deleted device node causes no uevent."""
    gates_s: float = 1.5
    """Between readings of the gates, for changes by other processes: a folder and its records."""
    brief_s: float = 9.0
    """Between observations of what can fail without a uevent: GPUs, IOMMU groups, vGPUs."""
    whole_s: float = 60.0
    """Between observations of all functions, in case a uevent was lost."""
    whole_without_uevents_s: float = 9.0
    """The same on hosts without uevents."""
    users_s: float = 60.0
    """Between searches for processes that have devices open: they read all of `/proc`, which is the most expensive."""
    suspicious_users_s: float = 5.0
    """The same while a process without a pod seems to use a device."""
    settle_s: float = 0.1
    """From a uevent to the observation, so that a burst causes one observation."""
    decide_s: float = 0.25
    """From an allocation until lists, files and metrics show it."""
    state_file_s: float = 30.0
    """Between writes of an unchanged state file, as a sign of life, and between checks of the CDI specs."""
    allocations_s: float = 15.0
    """Between questions to the kubelet about its allocations."""
    allocations_after_allocation_s: float = 1.0
    """From an allocation to the next question."""
    allocations_after_withdrawal_s: float = 0.1
    """From a withdrawal to the next question; it doubles while the kubelet still counts the device."""
    notice_s: float = 0.5
    """From when the scheduler no longer counts a device to its withdrawal: pods that are bound are admitted first."""
    notice_most_s: float = 3.0
    """The longest wait for the scheduler before a withdrawal."""
    growth_s: float = 10.0
    """How long the agent asks whether the kubelet counts new devices; after that the kubelet's own report is due."""
    kubelet_s: float = 1.5
    """Between checks of the kubelet's socket and the agent's own sockets."""
    kubelet_return_s: float = 0.03
    """The same while the kubelet has just ended, or the agent has just started, so that the kubelet may be starting: it
    rejects pods whose resources are not registered by the time it admits them again."""
    kubelet_return_most_s: float = 60.0
    """How long that counts as just now."""
    reconcile_s: float = 9.0
    """Between comparisons of desired and observed state without new conclusions; they read only memory."""
    driver_change_s: float = 60.0
    """The limit of a driver change; the kernel blocks it after that. It takes a second, with NVIDIA's at most 30 s."""
    vgpu_change_s: float = 180.0
    """The limit of a vGPU change: sriov-manage takes some seconds, and retries while a process has the GPU open."""
    operands_s: float = 120.0
    """The longest wait until another project's device plugin has stopped; NVIDIA's vgpu-device-manager waits so too."""
    config_file_s: float = 9.0
    """Between readings of a file of vGPU configs."""
    schedulers_s: float = 600.0
    """Between readings of a GPU's vGPU scheduler, which an admin may change; a reading opens the GPU."""
    type_names_s: float = 60.0
    """Between questions to nvidia-smi for the names of vGPU types in use that no VF lists, while it fails."""
    share_use_s: float = 15.0
    """Between readings of the memory that containers with limits use."""
    specs_s: float = 5.0
    """Between checks of NVIDIA's CDI specs while GPUs are shared; a spec that has not changed is not parsed."""
    streamless_s: float = 5.0
    """How long a resource may be without a ListAndWatch stream before it is registered again: a kubelet that sees an
    old stream of the resource end drops the newest plugin."""

    @property
    def of_notice(self) -> NoticeTimes:
        """The intervals of announced withdrawals."""
        return NoticeTimes(self.notice_s, self.notice_most_s, self.growth_s)
