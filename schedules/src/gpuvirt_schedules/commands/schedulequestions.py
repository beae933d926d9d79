"""The questions of `gpuvirt schedule` to the API server and the hypervisor, and the override that it writes."""

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from enum import Enum, auto
from functools import partial

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.controller.nodes.resolve import ManagedMetadata
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import Namespace, NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.kinds.vgpuschedule import READY, VALID, VgpuSchedule
from gpuvirt.kube.resources import Collection, Metadata
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.reasons import Reason, ReasonCode, schedules, without_code
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.reasons.nodeproblems import config_invalid
from gpuvirt.model.workers.connection import OpenHypervisor
from gpuvirt.model.workers.hypervisor import Abilities, VmKey, VmsReading, VmsUnknown
from gpuvirt.model.workers.observed import ScheduleObservation
from gpuvirt.model.workers.spec import Phase, PhaseName, Schedule
from gpuvirt.model.workers.status import ScheduleStatus
from gpuvirt.plans.knownconfigs import KnownConfigs, read_known_configs
from gpuvirt.plans.nodeplan import plan_node
from gpuvirt_schedules.controller import commandreading as reading
from gpuvirt_schedules.controller.configurednodes import not_followed
from gpuvirt_schedules.controller.objects import schedule_of, status_of, stored_state
from gpuvirt_schedules.controller.rounds import StoredSchedule
from gpuvirt_schedules.controller.scheduleapi import ScheduleObjects, selector_text
from gpuvirt_schedules.controller.secretconnection import Opener
from gpuvirt_schedules.decide import reports
from gpuvirt_schedules.decide.faults import faults
from gpuvirt_schedules.decide.forecast import Forecast, assumed_vms, forecast, with_configs
from gpuvirt_schedules.decide.reports import (
    GpuCheck,
    NodeCheck,
    NodeRow,
    ScheduleCheck,
    ScheduleDetail,
    ScheduleHistory,
    SchedulePlan,
    ScheduleRow,
    ScheduleState,
    SwitchResult,
    VmRow,
    worker_checks,
)
from gpuvirt_schedules.decide.times import has_passed, moment, switch_by_hand, timeline_of
from gpuvirt_schedules.decide.workers import members
from gpuvirt_schedules.hypervisors.connection import open_hypervisor


# The planned changes of nodes by the vGPU configs of a schedule's phases: from GpuNodes, as in `gpuvirt plan`.
class PlannedGpuNode(GpuNode, frozen=True, kw_only=True):
    """A GpuNode with all that its agent reports, and the owners of its fields."""

    metadata: ManagedMetadata


class NodeReports(msgspec.Struct, frozen=True):
    """The GpuNodes of a cluster."""

    gpu_nodes: Mapping[NodeName, PlannedGpuNode]
    unread: str | None = None
    """Why they are not known."""


async def read_reports(client: Client) -> NodeReports:
    """Return the GpuNodes; raises ApiError, except for objects that the user may not read."""
    try:
        found = (await client.list(Collection(GPU_NODES, PlannedGpuNode))).items
    except NotFoundError:
        return NodeReports({})
    except ForbiddenError as error:
        return NodeReports({}, str(error))
    return NodeReports({NodeName(gpu_node.metadata.name): gpu_node for gpu_node in found})


def node_checks(
    schedule: Schedule, nodes: Mapping[PhaseName, frozenset[NodeName]], reports: NodeReports, known: KnownConfigs
) -> Iterator[NodeCheck]:
    """Yield the changes that each phase would make on its nodes; `nodes` has the nodes of each phase."""
    for phase in schedule.phases:
        for node in sorted(nodes.get(phase.name, frozenset())):
            if phase.vgpu_config is not None:
                yield _check(node, phase, phase.vgpu_config, reports, known)


def _check(node: NodeName, phase: Phase, config: str, reports: NodeReports, known: KnownConfigs) -> NodeCheck:
    if reports.unread is not None:
        return NodeCheck(node, phase.name, config, None, unknown=(reports.unread,))
    gpu_node = reports.gpu_nodes.get(node)
    if gpu_node is None or gpu_node.spec is None:
        return NodeCheck(node, phase.name, config, reasons.no_gpu_node(node, config))
    refused = not_followed(node, config, gpu_node.metadata.owner_of("vgpuConfig"), gpu_node.spec)
    if refused is None and known.has(config) is False:
        refused = next(iter(known.faults((phase,))))
    if refused is not None:
        return NodeCheck(node, phase.name, config, refused)
    if known.has(config) is None:
        return NodeCheck(node, phase.name, config, None, unknown=(known.unread or "",))
    source = Source(Origin.GPU_NODE, f"vgpuConfig of phase {phase.name}")
    plan = plan_node(gpu_node, gpu_node.spec.mode, ConfigName(config, source), known.configs)
    if plan.problem is not None:
        refused = config_invalid(
            f"node {node}",
            f"would not get the vGPU config {config}: {without_code(str(ReasonCode.CONFIG_INVALID), plan.problem)}",
            None,
        )
    concerned = (gpu for gpu in plan.gpus if gpu.changes or gpu.in_the_way or gpu.reasons)
    gpus = tuple(
        GpuCheck(gpu.address, gpu.vgpus, gpu.vgpus_then, gpu.in_the_way, gpu.reasons, gpu.unknown) for gpu in concerned
    )
    return NodeCheck(node, phase.name, config, refused, gpus, plan.unknown, phase.vms)


class Asks(Enum):
    """Whether the hypervisor is asked for the possible actions on VMs."""

    NOTHING = auto()
    IF_POSSIBLE = auto()
    """Without an answer, the VMs that it shows count all the same."""
    ALWAYS = auto()


class _Known(msgspec.Struct, frozen=True):
    """One schedule as the API server has it."""

    stored: VgpuSchedule
    schedule: Schedule
    status: ScheduleStatus
    problems: tuple[Reason, ...]
    row: ScheduleRow
    config_nodes: Mapping[PhaseName, frozenset[NodeName]] = msgspec.field(default_factory=dict)
    """The nodes that phases have vGPU configs for, once read."""


class ScheduleQuestions(msgspec.Struct, frozen=True):
    """The questions of commands about the schedules of one namespace. All methods raise ApiError."""

    client: Client
    namespace: Namespace
    clock: Clock
    open_hypervisor: OpenHypervisor = open_hypervisor

    async def rows(self, selector: str = "", *, everywhere: bool = False) -> tuple[ScheduleRow, ...]:
        """Return the schedules with the labels of a selector, of the namespace or of all."""
        found = await reading.read_schedules(self.client, None if everywhere else self.namespace, selector)
        now = self._now()
        return tuple(_known(stored, now).row for stored in found)

    async def detail(self, name: str) -> ScheduleDetail:
        """Return one schedule."""
        known = await self._known(name)
        schedule, spec = known.schedule, known.stored.spec
        zone = None if known.problems else timeline_of(schedule).zone
        selectors, nodes = (
            {PhaseName(phase.name): selector_text(found) for phase, found in of_phases if found is not None}
            for of_phases in (
                [(phase, phase.workers) for phase in spec.phases],
                [(phase, phase.nodes) for phase in spec.phases],
            )
        )
        switches = () if zone is None else reports.switch_rows(schedule, self._now())
        place, configs = spec.hypervisor.kube_virt, stored_state(known.stored)
        return ScheduleDetail(
            known.row,
            schedule.leave,
            schedule.announce_s,
            schedule.drain.timeout_s,
            schedule.drain.on_timeout,
            f"KubeVirt {place.namespace}" if place is not None else " ".join(spec.hypervisor.secret or ()),
            reports.phase_rows(schedule, selectors, nodes, switches),
            tuple(
                reports.OverrideRow(override.phase, moment(override.begin, zone), moment(override.end, zone))
                for override in (schedule.overrides if zone is not None else ())
                if zone is not None
            ),
            reports.worker_rows(known.status),
            tuple(
                NodeRow(node.node, node.phase, node.vgpu_config, node.is_applied, node.reason)
                for node in known.status.nodes
            ),
            None if configs is None or configs[0] == "True" else configs[2],
            tuple(
                VmRow(vm.where, vm.node, vm.phase, vm.step, vm.since, vm.is_held, vm.is_forced, vm.reason)
                for vm in known.status.vms
            ),
        )

    async def history(self, name: str) -> ScheduleHistory:
        """Return the last switches of a schedule."""
        known = await self._known(name)
        return ScheduleHistory(known.row, known.status.history)

    async def plan_of(self, written: VgpuSchedule) -> SchedulePlan:
        """Return the plan of a schedule as a file has it, with the progress of the one in the cluster, if there is one.

        Raises ConfigError for a schedule of another namespace, for which nothing would be done.
        """
        name, namespace = written.metadata.name, written.metadata.namespace
        if namespace not in {"", self.namespace}:
            raise ConfigError(
                f"is {namespace}; expected {self.namespace}, or --namespace {namespace}, where the controller runs",
                where=f"VgpuSchedule {name}",
                path="$.metadata.namespace",
            )
        found = await reading.read_schedules(self.client, self.namespace)
        stored = next((schedule for schedule in found if schedule.metadata.name == name), VgpuSchedule(Metadata(name)))
        metadata = replace(stored.metadata, namespace=self.namespace, generation=stored.metadata.generation + 1)
        return await self._plan(_known(replace(stored, metadata=metadata, spec=written.spec), self._now()))

    async def plan(self, name: str) -> SchedulePlan:
        """Return the switches of two weeks, and the steps of the next worker."""
        return await self._plan(await self._known(name))

    async def _plan(self, known: _Known) -> SchedulePlan:
        now = self._now()
        if known.problems:
            return SchedulePlan(known.row, (), None, None)
        switches = reports.switch_rows(known.schedule, now)
        left_out = tuple(timeline_of(known.schedule).left_out(now, now + reports.AHEAD))
        if not switches:  # what is observed now says nothing of a switch in years
            return SchedulePlan(known.row, switches, None, None, left_out)
        known, observed = await self._observed(known)
        if known.problems:
            return SchedulePlan(known.row, (), None, None)
        steps, assumed = await self._forecast(known, known.schedule, observed, switches[0].at)
        return SchedulePlan(known.row, switches, steps, assumed, left_out)

    async def check(self, name: str) -> ScheduleCheck:
        """Return what the hypervisor says of each worker, and agents of each node; changes nothing."""
        known = await self._known(name)
        if known.problems:
            return ScheduleCheck(known.row, known.schedule.leave, None, ())
        known, observed = await self._observed(known)
        vms, abilities = await self._ask(known, observed, Asks.ALWAYS)
        observed = replace(observed, vms=vms)
        workers = tuple(worker_checks(known.schedule, known.status, observed, abilities))
        nodes: tuple[NodeCheck, ...] = ()
        if known.config_nodes:
            found, configs = await read_reports(self.client), await read_known_configs(self.client, self.namespace)
            nodes = tuple(node_checks(known.schedule, known.config_nodes, found, configs))
        return ScheduleCheck(known.row, known.schedule.leave, reports.unknown_reason(vms), workers, nodes)

    async def switch(
        self, name: str, phase: str, until: str, *, writes: bool, before: Callable[[SwitchResult], None]
    ) -> SwitchResult:
        """Switch a schedule to a phase by an override, if `writes`; `before` is called with the steps before that.

        Raises ConfigError for a phase or a time that can't be, and ConflictError if the schedule changes meanwhile.
        """
        known, now = await self._known(name), self._now()
        if not known.problems:
            known, observed = await self._observed(known)
        else:
            observed = _NOTHING
        if known.problems:
            return SwitchResult(known.row, PhaseName(phase), now, now, written=False, forecast=None, assumed=None)
        switch = switch_by_hand(known.schedule, phase, until, now)
        if switch is None:
            end = known.row.next_switch or now
            return SwitchResult(known.row, PhaseName(phase), now, end, written=False, forecast=None, assumed=None)
        steps, assumed = await self._forecast(known, switch.schedule, observed, now)
        result = SwitchResult(
            known.row, PhaseName(phase), switch.begin, switch.end, written=False, forecast=steps, assumed=assumed
        )
        before(result)
        if not writes:
            return result
        passed = partial(has_passed, known.schedule, now)
        await reading.add_override(self.client, self.namespace, known.stored, switch.override, passed)
        return replace(result, written=True)

    def _now(self) -> datetime:
        return self.clock.now().replace(microsecond=0)

    async def _known(self, name: str) -> _Known:
        return _known(await reading.read_schedule(self.client, self.namespace, name), self._now())

    async def _observed(self, known: _Known) -> tuple[_Known, ScheduleObservation]:
        """Return what a round reads at the API server, and the schedule with what is wrong with its workers."""
        api = ScheduleObjects(self.client, self.namespace, known.schedule.name, self.clock)
        api.use(known.stored)
        stored = StoredSchedule(known.schedule, known.status, known.stored.metadata.resource_version)
        found = await api.read(stored)
        observed = ScheduleObservation(found.nodes, found.pods, found.attachments, _NOT_ASKED, claims=found.claims)
        known_faults = (fault for fault in found.faults if fault.code is not ReasonCode.COVERAGE_UNKNOWN)
        problems = (*known.problems, *known_faults)  # the controller has rights that users of commands may lack
        row = reports.row_of(known.schedule, known.status, problems, self._now())
        row = replace(row, namespace=known.row.namespace)
        return replace(known, problems=problems, row=row, config_nodes=found.config_nodes), observed

    async def _forecast(
        self, known: _Known, schedule: Schedule, observed: ScheduleObservation, at: datetime
    ) -> tuple[Forecast, Reason | None]:
        budgets = await reading.read_budgets(self.client, observed.nodes)
        # A check by libvirt marks running VMs.
        asks = Asks.NOTHING if known.stored.spec.hypervisor.libvirt is not None else Asks.IF_POSSIBLE
        vms, abilities = await self._ask(known, observed, asks)
        assumed = reports.unknown_reason(vms)
        # unknown: the forecast decides nothing; it says that it assumes.
        shown = assumed_vms(known.status, observed.nodes, schedule.leave) if isinstance(vms, VmsUnknown) else vms
        found = forecast(schedule, known.status, replace(observed, vms=shown), budgets, at, abilities)
        return with_configs(found, schedule, known.status, known.config_nodes), assumed

    async def _ask(
        self, known: _Known, observed: ScheduleObservation, asks: Asks
    ) -> tuple[VmsReading, Mapping[VmKey, Abilities]]:
        """Return all VMs, and the possible actions on the workers' VMs."""
        if not known.schedule.has_workers:
            return {}, {}
        opener = Opener(self.client, self.namespace, self.clock, self.open_hypervisor, lambda: math.inf)
        hypervisor = opener.connect(lambda: known.stored)
        try:
            vms = await hypervisor.read()
            if isinstance(vms, VmsUnknown) or asks is Asks.NOTHING:
                return vms, {}
            workers = members(known.status.workers, replace(observed, vms=vms), known.schedule.name).workers
            abilities = await hypervisor.check([worker.vm for worker in workers if worker.vm])
            if isinstance(abilities, VmsUnknown):
                return (vms if asks is Asks.IF_POSSIBLE else abilities), {}
            return vms, abilities
        finally:
            await hypervisor.close()


HYPERVISOR = "the hypervisor"
_NOT_ASKED = VmsUnknown("", "not asked yet")
_NOTHING = ScheduleObservation({}, {}, {}, _NOT_ASKED)


def _of_controller(stored: VgpuSchedule) -> Reason | None:
    """Return what the controller alone knows: the user of a command may have its right, and may not read the Secret."""
    for found in stored.status.conditions:
        if (found.type, found.reason) == (VALID, ReasonCode.RIGHT_MISSING):
            return Reason(ReasonCode.RIGHT_MISSING, schedules.SCHEDULE, _message(found, schedules.SCHEDULE))
        if (found.type, found.reason) == (READY, ReasonCode.CREDENTIALS_INCOMPLETE):
            return Reason(ReasonCode.CREDENTIALS_INCOMPLETE, HYPERVISOR, _message(found, HYPERVISOR))
    return None


def _message(found: Condition, subject: str) -> str:
    return without_code(found.reason, found.message).removeprefix(f"{subject} ")


def _known(stored: VgpuSchedule, now: datetime) -> _Known:
    schedule, texts = schedule_of(stored)
    status = status_of(stored)
    problems = (*texts, *faults(schedule, now))
    row = replace(reports.row_of(schedule, status, problems, now), namespace=stored.metadata.namespace)
    reason = _of_controller(stored)
    if reason is not None and not problems and reason.code not in {other.code for other in row.reasons}:
        row = replace(row, state=ScheduleState.HELD, reasons=(reason, *row.reasons))
    return _Known(stored, schedule, status, problems, row)
