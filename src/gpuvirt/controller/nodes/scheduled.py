"""The vGPU configs that the phases of VgpuSchedules have for nodes: what holds now, for a node's labels.

A schedule that can't be followed, or is suspended, changes no node: one that has its vGPU config keeps that. So does a
node that several schedules cover.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime

import msgspec

from gpuvirt.kube.labelselector import LabelSelector


class ConfiguredPhase(msgspec.Struct, frozen=True):
    """The vGPU config of the phase of now."""

    phase: str
    vgpu_config: str
    nodes: LabelSelector


class ScheduledConfig(msgspec.Struct, frozen=True):
    """One schedule with vGPU configs: the nodes that it covers, and the vGPU config of its phase of now."""

    schedule: str
    covers: tuple[LabelSelector, ...]
    """The nodes of all its phases."""
    layout: ConfiguredPhase | None = None
    """None if the phase of now has no vGPU config."""
    is_followed: bool = True
    """Whether it is followed: it has no faults, is not suspended, and a phase has begun."""


class NodeConfig(msgspec.Struct, frozen=True):
    """The vGPU config that a node gets by a schedule."""

    vgpu_config: str
    origin: str
    """`VgpuSchedule gpus phase night`."""


class KeptConfig(msgspec.Struct, frozen=True):
    """The node keeps the vGPU config that it has by one of these schedules."""

    schedules: tuple[str, ...]

    def keeps(self, origin: str) -> bool:
        """Return whether a vGPU config of this origin is one of these schedules'."""
        return any(origin.startswith(origin_of(schedule, "")) for schedule in self.schedules)


class ScheduledConfigs(msgspec.Struct, frozen=True):
    """The vGPU configs of all schedules at one moment."""

    configs: tuple[ScheduledConfig, ...] = ()
    next_switch: datetime | None = None
    """When another phase begins."""


def config_of(configs: Iterable[ScheduledConfig], labels: Mapping[str, str]) -> NodeConfig | KeptConfig | None:
    """Return what schedules say of a node with these labels; None: its label and the ClusterPolicy count."""
    covering = [config for config in configs if any(selector.matches(labels) for selector in config.covers)]
    if not covering:
        return None
    if len(covering) > 1 or not covering[0].is_followed:
        return KeptConfig(tuple(config.schedule for config in covering))
    config = covering[0]
    layout = config.layout
    if layout is None or not layout.nodes.matches(labels):
        return None
    return NodeConfig(layout.vgpu_config, origin_of(config.schedule, layout.phase))


def origin_of(schedule: str, phase: str) -> str:
    """Return the origin of a vGPU config: `VgpuSchedule gpus phase night`."""
    return f"VgpuSchedule {schedule} phase {phase}"
