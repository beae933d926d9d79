"""What of a node's desired state is invalid, put together from those who find it."""

from collections.abc import Collection, Mapping

from gpuvirt.model.desired.invalid import InvalidDesired, Source, unknown_addresses
from gpuvirt.model.reasons import Reason
from gpuvirt.node.known.vgpuplans import VgpuPlans


class InvalidStates:
    """One node's."""

    def __init__(self, named: Mapping[str, Source]) -> None:
        self.named = named
        """The GPUs that somebody wants in a mode one by one, by address, with where each is named."""
        self.workload: InvalidDesired | None = None
        """Why the node's label, or its GpuNode, does not say what is wanted of GPUs."""
        self.configs: InvalidDesired | None = None
        """Why the vGPU configs of the ConfigMap, or the file, can't be used."""
        self.modes: tuple[InvalidDesired, ...] = ()
        """What is invalid of the modes of GPUs, as last concluded."""
        self.vgpus: tuple[InvalidDesired, ...] = ()
        """What is invalid of the vGPUs that are wanted, as last concluded."""

    def conclude(self, vgpu_plans: VgpuPlans, gpus: Collection[str] | None) -> None:
        """Conclude what is invalid; `gpus` are the addresses of the host's GPUs, None before the first look."""
        addresses = unknown_addresses(self.named, gpus) if gpus is not None else ()
        found = (self.configs, vgpu_plans.desired_types.problem)
        self.modes = (*((self.workload,) if self.workload is not None else ()), *addresses)
        self.vgpus = (*(one for one in found if one is not None), *vgpu_plans.invalid)

    @property
    def all(self) -> tuple[InvalidDesired, ...]:
        """All of it."""
        return (*self.modes, *self.vgpus)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The same as reasons."""
        return tuple(one.reason for one in self.all)
