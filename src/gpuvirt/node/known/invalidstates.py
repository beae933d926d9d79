"""The invalid parts of a node's desired state, collected from the modules that find them."""

from collections.abc import Collection, Mapping

from gpuvirt.model.desired.invalid import InvalidDesired, Source, unknown_addresses
from gpuvirt.model.reasons import Reason
from gpuvirt.node.known.vgpuplans import VgpuPlans


class InvalidStates:
    """The invalid desired state of one node."""

    def __init__(self, named: Mapping[str, Source]) -> None:
        self.named = named
        """The GPUs whose mode is set by address, with the source that names each."""
        self.workload: InvalidDesired | None = None
        """Why the mode in the node's label or GpuNode is invalid."""
        self.configs: InvalidDesired | None = None
        """Why the vGPU configs of the ConfigMap or the file can't be used."""
        self.modes: tuple[InvalidDesired, ...] = ()
        """The invalid modes of GPUs, as last concluded."""
        self.vgpus: tuple[InvalidDesired, ...] = ()
        """The invalid desired vGPUs, as last concluded."""

    def conclude(self, vgpu_plans: VgpuPlans, gpus: Collection[str] | None) -> None:
        """Collect the invalid state; `gpus` are the addresses of the host's GPUs, None before its first observation."""
        addresses = unknown_addresses(self.named, gpus) if gpus is not None else ()
        found = (self.configs, vgpu_plans.desired_types.problem)
        self.modes = (*((self.workload,) if self.workload is not None else ()), *addresses)
        self.vgpus = (*(invalid for invalid in found if invalid is not None), *vgpu_plans.invalid)

    @property
    def all(self) -> tuple[InvalidDesired, ...]:
        """All invalid desired state."""
        return (*self.modes, *self.vgpus)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The reasons of all invalid desired state."""
        return tuple(invalid.reason for invalid in self.all)
