"""How often the agent looks at what, when nothing tells it to look sooner."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Intervals:
    """All intervals, in seconds. Those that recur are multiples of the shortest, so that they fall together."""

    nodes_s: float = 1.5
    """Whether nodes under `/dev/vfio` came or went: a listing; no uevent tells of a node that somebody deletes."""
    gates_s: float = 1.5
    """Whether another process has begun or ended a change of a GPU: the time of a folder."""
    brief_s: float = 9.0
    """What can fall ill without a uevent: GPUs, their groups, vGPUs."""
    whole_s: float = 60.0
    """Everything, in case a uevent was lost."""
    whole_without_uevents_s: float = 9.0
    """Everything, on hosts that give no uevents."""
    users_s: float = 60.0
    """Who has devices open: a walk through all of `/proc`, the dearest look of all."""
    suspicious_users_s: float = 5.0
    """The same while a device is in use by somebody who is no pod."""
    settle_s: float = 0.1
    """After a uevent, so that a burst is one look."""
    conclude_s: float = 0.25
    """After an allocation, until lists, files and metrics show it."""
    state_file_s: float = 30.0
    """When nothing changes for so long, the state file is written as a sign of life, and CDI specs are looked at."""
    allocations_s: float = 15.0
    """Which pods have which devices, from the kubelet."""
    allocations_after_allocation_s: float = 1.0
    """The same, after the kubelet was given a device."""
    allocations_after_withdrawal_s: float = 0.1
    """The same, after a device was taken from what is offered; twice as long each time that it is still counted."""
    notice_s: float = 0.5
    """From when the scheduler no longer counts what is to be withdrawn until it is: bound pods are admitted first."""
    notice_most_s: float = 3.0
    """The same, where it can't be told."""
    growth_s: float = 10.0
    """How long the kubelet is asked whether it counts what is offered again: then its own report is due."""
    review_most_s: float = 30.0
    """How long a new resource waits for the controller: one that leads after another takes some 20 seconds to."""
    kubelet_s: float = 1.5
    """Whether the kubelet's socket is a new one, and ours are still there."""
    reconcile_s: float = 9.0
    """Whether GPUs are where they are wanted, when nothing new was concluded: a comparison, in memory."""
    move_s: float = 60.0
    """A move that takes longer sleeps in the kernel: it takes a second, with NVIDIA's driver at most half a minute."""
    vgpu_change_s: float = 180.0
    """The same for vGPUs: sriov-manage takes some seconds, and tries again while a process looks at the GPU."""
    operands_s: float = 120.0
    """How long another's device plugin is waited for to be gone before it is let back, as NVIDIA's does."""
    config_file_s: float = 9.0
    """Whether a file of vGPU configs has changed."""
    schedulers_s: float = 600.0
    """How vGPUs share the time of a GPU: somebody may set it by hand, and asking opens the GPU."""
    streamless_s: float = 5.0
    """A resource that no ListAndWatch stream has watched for so long is registered again."""
