"""The vGPU configs of nodes in other phases of a schedule, and the resources that these bring for waiting pods."""

from collections.abc import Iterable, Iterator

import msgspec

from gpuvirt.model.vgputypes.profiles import profile_name
from gpuvirt.model.workers.spec import PhaseName


class PhaseConfig(msgspec.Struct, frozen=True):
    """The vGPU config that a phase of a schedule has for a node."""

    schedule: str
    namespace: str
    phase: PhaseName
    vgpu_config: str
    types: frozenset[str] | None = None
    """The vGPU types that it gives the node's GPUs, as configs name them; None if they are not known."""


class ScheduledNode(msgspec.Struct, frozen=True):
    """The phases of a schedule, and the state of one node in it, from the schedule's status."""

    phase: PhaseName | None
    """The phase that was reached last."""
    next_phase: PhaseName | None = None
    next_switch: str | None = None
    """When that phase begins, in words."""
    waits: str | None = None
    """Why the node does not have the vGPU config of the phase yet; None if it has."""


class NodePhase(msgspec.Struct, frozen=True):
    """A phase that has a vGPU config for a node, in words."""

    config: PhaseConfig
    message: str
    """The words that follow the node: `gets the vGPU config A10-24Q at 2026-01-05 20:00 CET by schedule gpus`."""
    is_current: bool
    """Whether the node has the vGPU config now."""

    @property
    def command(self) -> str:
        """The command that shows the schedule."""
        return f"gpuvirt schedule show {self.config.schedule} -n {self.config.namespace}"

    def brings(self, resource: str) -> bool:
        """Return whether the node offers a resource, named by its vGPU type, only once this phase has begun."""
        if self.is_current or self.config.types is None:
            return False
        return profile_name(resource.rpartition("/")[2].replace("_", " ")) in self.config.types


def node_phases(configs: Iterable[PhaseConfig], node: ScheduledNode) -> Iterator[NodePhase]:
    """Yield the phases of a schedule that have a vGPU config for a node, that of now first."""
    for config in sorted(configs, key=lambda config: (config.phase != node.phase, config.phase != node.next_phase)):
        by = f"by schedule {config.schedule}"
        if config.phase == node.phase:
            if node.waits is None:
                yield NodePhase(config, f"has the vGPU config {config.vgpu_config} {by}, phase {config.phase}", True)
            else:
                yield NodePhase(config, f"waits for the vGPU config {config.vgpu_config} {by}: {node.waits}", False)
        elif config.phase == node.next_phase and node.next_switch is not None:
            yield NodePhase(config, f"gets the vGPU config {config.vgpu_config} at {node.next_switch} {by}", False)
        else:
            text = f"gets the vGPU config {config.vgpu_config} {by} once phase {config.phase} begins"
            yield NodePhase(config, text, False)
