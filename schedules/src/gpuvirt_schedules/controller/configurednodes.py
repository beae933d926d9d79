"""The vGPU configs that schedules have for nodes, by specs and the time, and whether nodes have those of the phase.

The latter is by the GpuNodes that the controller watches anyway.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

import msgspec

from gpuvirt.clock import Signal
from gpuvirt.controller.nodes.resolve import ConfiguredPhase, OwnedGpuNode, ScheduledConfig, ScheduledConfigs, origin_of
from gpuvirt.controller.store import AnyStore, Store
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.gpunode import READY, Spec
from gpuvirt.kube.kinds.vgpuschedule import PhaseSpec, VgpuSchedule, vgpu_schedules
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Collection
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.spec import PhaseName, Schedule
from gpuvirt.model.workers.status import ConfiguredNode
from gpuvirt.plans.knownconfigs import KnownConfigs
from gpuvirt_schedules.controller.objects import schedule_of, schedule_time
from gpuvirt_schedules.decide.faults import faults
from gpuvirt_schedules.decide.times import timeline_of


class StoredConfigs:
    """The schedules in one term as the leader, as the controller's decisions about nodes need them."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._store: Store[VgpuSchedule] | None = None

    def store(self, changed: Signal) -> AnyStore:
        """Return the store of the schedules; a change of a status does not set `changed`."""
        collection = Collection(vgpu_schedules(self._namespace), VgpuSchedule)
        self._store = Store(
            collection, changed, reads=lambda stored: (stored.metadata.name, stored.metadata.generation, stored.spec)
        )
        return self._store

    def at(self, now: datetime) -> ScheduledConfigs:
        """Return what the schedules say at a moment."""
        return configs_of(self._store.known.values() if self._store is not None else (), now)


def configs_of(schedules: Iterable[VgpuSchedule], clock_now: datetime) -> ScheduledConfigs:
    """Return what schedules say at a moment of the vGPU configs of nodes."""
    found, switches = list[ScheduledConfig](), list[datetime]()
    for stored in schedules:
        covers = tuple(phase.nodes for phase in stored.config_phases if phase.nodes is not None)
        if not covers:
            continue
        name = stored.metadata.name
        schedule, texts = schedule_of(stored)
        now = schedule_time(stored, clock_now)
        if texts or schedule.is_suspended or faults(schedule, now):
            found.append(ScheduledConfig(name, covers, is_followed=False))
            continue
        timeline = timeline_of(schedule)
        current, following = timeline.current(now), timeline.next_switch(now)
        if following is not None:
            switches.append(following.at)
        begun = phase_now(stored, schedule, clock_now)
        layout = (
            ConfiguredPhase(begun.name, begun.vgpu_config, begun.nodes)
            if begun is not None and begun.nodes is not None and begun.vgpu_config is not None
            else None
        )
        found.append(ScheduledConfig(name, covers, layout, is_followed=current is not None))
    return ScheduledConfigs(tuple(sorted(found, key=lambda config: config.schedule)), min(switches, default=None))


def phase_now(stored: VgpuSchedule, schedule: Schedule, now: datetime) -> PhaseSpec | None:
    """Return the current phase of a schedule without faults; None if none has begun."""
    current = timeline_of(schedule).current(schedule_time(stored, now))
    return next((phase for phase in stored.spec.phases if current is not None and phase.name == current.phase), None)


MOST_PROBLEM = 500
"""The most characters of an agent's message that a schedule's status repeats; there may be many nodes."""


class _Decided(msgspec.Struct):
    """The nodes of one phase of a schedule, and the names of those that have changed since."""

    phase: PhaseSpec
    outdated: set[str]
    nodes: tuple[ConfiguredNode, ...] = ()


class ConfiguredNodes:
    """The nodes, the GpuNodes and the vGPU configs as they were observed last."""

    def __init__(self) -> None:
        self._nodes: Mapping[ObjectKey, ReadNode] | None = None
        self._gpu_nodes: Mapping[ObjectKey, OwnedGpuNode] | None = None
        self._configs: KnownConfigs | None = None
        self._decided: dict[str, _Decided] = {}
        """The nodes that were returned last for each schedule, by its name."""

    def observe_nodes(self, delta: Delta[ReadNode]) -> None:
        """Record changes of nodes, of which heartbeats are most."""
        before, self._nodes = self._nodes, delta.objects
        names = delta.changed | delta.removed
        if before is None or not names:  # a delta that names no change may be any
            self._decided.clear()
            return
        moved = {key.name for key in names if _labels(before.get(key)) != _labels(delta.objects.get(key))}
        for decided in self._decided.values():
            decided.outdated |= moved

    def observe_gpu_nodes(self, delta: Delta[OwnedGpuNode]) -> None:
        """Record changes of GpuNodes."""
        self._gpu_nodes = delta.objects
        names = {key.name for key in delta.changed | delta.removed}
        if not names:
            self._decided.clear()
        for decided in self._decided.values():
            decided.outdated |= names

    def forget(self, name: str) -> None:
        """Forget what was decided of a schedule that does not exist any more."""
        self._decided.pop(name, None)

    def observe_configs(self, configs: KnownConfigs) -> bool:
        """Record the vGPU configs of the cluster; return whether they have changed."""
        before, self._configs = self._configs, configs
        return configs != before

    def faults(self, schedule: Schedule) -> tuple[Reason, ...] | None:
        """Return the phases whose vGPU config is missing or unknown; None until that is observed."""
        return self._configs.faults(schedule.phases) if self._configs is not None else None

    @property
    def configs(self) -> KnownConfigs:
        """The vGPU configs; until they are observed, which there are is unknown."""
        return self._configs if self._configs is not None else KnownConfigs(unread="not observed yet")

    def of(self, stored: VgpuSchedule, schedule: Schedule, now: datetime) -> tuple[ConfiguredNode, ...] | None:
        """Return the nodes of the current phase of a schedule without faults; None until all objects are observed."""
        if self._nodes is None or self._gpu_nodes is None:
            return None
        phase = phase_now(stored, schedule, now)
        if phase is None or phase.vgpu_config is None:
            return ()
        decided = self._decided.get(schedule.name)
        if decided is None or decided.phase != phase:
            decided = self._decided[schedule.name] = _Decided(phase, {key.name for key in self._nodes})
        if decided.outdated:
            self._decide(decided, schedule.name, phase.vgpu_config)
        return decided.nodes

    def _decide(self, decided: "_Decided", schedule: str, config: str) -> None:
        """Decide the nodes of a schedule that have changed."""
        phase, nodes, gpu_nodes = decided.phase, self._nodes or {}, self._gpu_nodes or {}
        found, origin = {node.node: node for node in decided.nodes}, origin_of(schedule, phase.name)
        for name in map(NodeName, decided.outdated):
            key = ObjectKey("", name)
            node = nodes.get(key)
            if node is None or not phase.configures(node.metadata.labels):
                found.pop(name, None)
            else:
                why = unapplied(name, config, origin, gpu_nodes.get(key))
                found[name] = ConfiguredNode(name, PhaseName(phase.name), config, why)
        decided.nodes = tuple(found[name] for name in sorted(found))
        decided.outdated.clear()


def _labels(node: ReadNode | None) -> Mapping[str, str] | None:
    return node.metadata.labels if node is not None else None


def unapplied(node: str, config: str, origin: str, gpu_node: OwnedGpuNode | None) -> Reason | None:
    """Return why a node does not have the vGPU config that a schedule has for it; None if its agent reports it."""
    if gpu_node is None or gpu_node.spec is None:
        return reasons.no_gpu_node(node, config)
    refused = not_followed(node, config, gpu_node.owner_of("vgpuConfig"), gpu_node.spec)
    return refused if refused is not None else next(_waits(node, config, origin, gpu_node, gpu_node.spec), None)


def not_followed(node: str, config: str, owner: str | None, spec: Spec) -> Reason | None:
    """Return why no schedule gives a node this vGPU config; `owner` is another writer of vgpuConfig in its GpuNode."""
    if owner is not None:
        return Reason(
            ReasonCode.VGPU_CONFIG_OVERRIDDEN,
            f"node {node}",
            f"does not get the vGPU config {config}: vgpuConfig is set in its GpuNode by {owner}",
            fix=f"remove spec.vgpuConfig from GpuNode {node}, or the node from the schedule",
        )
    if spec.mode is not DesiredMode.VGPU and all(gpu.mode is not DesiredMode.VGPU for gpu in spec.gpus):
        return Reason(
            ReasonCode.MODE_WITHOUT_VGPUS,
            f"node {node}",
            f"gets no vGPUs from the vGPU config {config}: the mode of the node is {spec.mode}",
            fix=f"kubectl label node {node} nvidia.com/gpu.workload.config=vm-vgpu",
        )
    return None


def _waits(node: str, config: str, origin: str, gpu_node: OwnedGpuNode, spec: Spec) -> Iterator[Reason]:
    """Yield what the vGPU config of a node in mode vgpu waits for, the first step first."""
    status = gpu_node.status
    found = spec.origins.vgpu_config if spec.origins is not None else ""
    if spec.vgpu_config != config or found != origin:
        yield reasons.vgpu_config_pending(node, config, "the controller has not written it to the GpuNode yet")
    if status is None or status.observed_generation < gpu_node.metadata.generation:
        yield reasons.vgpu_config_pending(
            node, config, "the node agent has not read the newest spec of the GpuNode yet"
        )
        return
    ready = next((condition for condition in status.conditions if condition.type == READY), None)
    if ready is None:
        yield reasons.vgpu_config_pending(node, config, "the node agent does not report whether the node is ready")
    elif ready.status != "True":
        yield reasons.vgpu_config_pending(node, config, (ready.message or ready.reason)[:MOST_PROBLEM], ready.reason)
    others = sorted({gpu.vgpu_config for gpu in status.gpus if gpu.vgpu_config is not None} - {config})
    if others:
        text = f"the node agent still applies {', '.join(others)}"
        yield reasons.vgpu_config_pending(node, config, text)
