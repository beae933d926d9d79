"""The vGPU configs that schedules of the controller's namespace have for nodes: a function of specs and the time."""

from collections.abc import Iterable
from datetime import datetime

from gpuvirt.clock import Signal
from gpuvirt.controller.nodes.resolve import ConfiguredPhase, ScheduledConfig, ScheduledConfigs
from gpuvirt.controller.store import AnyStore, Store
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.kinds.vgpuschedule import PhaseSpec, VgpuSchedule, vgpu_schedules
from gpuvirt.model.workers.spec import PhaseName, Schedule
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
        self._store = Store(collection, changed, reads=_read)
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
        layout = _layout(phase_of(stored, current.phase)) if current is not None else None
        found.append(ScheduledConfig(name, covers, layout, is_followed=current is not None))
    return ScheduledConfigs(tuple(sorted(found, key=lambda config: config.schedule)), min(switches, default=None))


def phase_of(stored: VgpuSchedule, name: PhaseName) -> PhaseSpec | None:
    """Return a phase by its name."""
    return next((phase for phase in stored.spec.phases if phase.name == name), None)


def phase_now(stored: VgpuSchedule, schedule: Schedule, now: datetime) -> PhaseSpec | None:
    """Return the phase of now of a schedule without faults; None if none has begun."""
    current = timeline_of(schedule).current(schedule_time(stored, now))
    return phase_of(stored, current.phase) if current is not None else None


def _layout(phase: PhaseSpec | None) -> ConfiguredPhase | None:
    if phase is None or phase.nodes is None or phase.vgpu_config is None:
        return None
    return ConfiguredPhase(phase.name, phase.vgpu_config, phase.nodes)


def _read(stored: VgpuSchedule) -> tuple[object, ...]:
    return stored.metadata.name, stored.metadata.generation, stored.spec
