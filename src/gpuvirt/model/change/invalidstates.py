"""The invalid parts of a node's desired state, from the modules that find them."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.desired.invalid import InvalidDesired, Source, unknown_addresses
from gpuvirt.model.reasons import Reason


class InvalidStates(msgspec.Struct, frozen=True):
    """The invalid desired state of one node."""

    modes: tuple[InvalidDesired, ...] = ()
    """The invalid modes of GPUs, and what limits their shares."""
    vgpus: tuple[InvalidDesired, ...] = ()
    """The invalid desired vGPUs."""

    @property
    def all(self) -> tuple[InvalidDesired, ...]:
        """All invalid desired state."""
        return (*self.modes, *self.vgpus)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The reasons of all invalid desired state."""
        return tuple(invalid.reason for invalid in self.all)


def invalid_states(
    workload: Iterable[InvalidDesired],
    configs: InvalidDesired | None,
    named: Mapping[str, Source],
    gpus: Collection[str] | None,
    vgpus: NodeVgpus,
) -> InvalidStates:
    """Return the invalid desired state of a node.

    `workload` has the invalid modes and shares of its labels or GpuNode, `configs` the reason why the vGPU configs
    can't be used. `gpus` are the addresses of the host's GPUs, None before its first observation.
    """
    addresses = unknown_addresses(named, gpus) if gpus is not None else ()
    found = (configs, vgpus.desired_types.problem)
    return InvalidStates(
        (*workload, *addresses),
        (*(invalid for invalid in found if invalid is not None), *vgpus.invalid),
    )
