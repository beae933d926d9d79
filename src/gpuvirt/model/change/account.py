"""The devices that are allocated to pods, as a change of GPUs takes them."""

import msgspec

from gpuvirt.facts.ids import VgpuId
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.vgpus.gpustate import Holding


class Account(msgspec.Struct, frozen=True):
    """The devices that are allocated to pods."""

    pods: Allocations | Unknown
    """The pods to which each GPU, or a part of it, is allocated."""
    allocations: PodAllocations = msgspec.field(default_factory=PodAllocations)
    """The allocations by device, from the kubelet's account."""
    holdings: tuple[Holding, ...] = ()
    """The allocated vGPUs."""
    offered: frozenset[VgpuId] = frozenset()
    """The vGPUs that the kubelet may allocate to a pod at any moment."""
