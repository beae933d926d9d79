"""A day of a VgpuSchedule in virtual time: the controller's rounds on a model of a cluster and of its hypervisor."""

import asyncio
from datetime import datetime
from uuid import NAMESPACE_DNS, uuid5

from rich.console import Console

from gpuvirt.cli.output.fleetrender import print_shares
from gpuvirt.cli.output.tables import console, say
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.overview import PodShare, SharesOverview, overview
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.workers.away import AwayWorker, ScheduleSeen, away_workers
from gpuvirt.model.workers.hypervisor import Call, Power, VmKey
from gpuvirt.model.workers.spec import Phase, PhaseName, Schedule
from gpuvirt_schedules.commands import schedulerender
from gpuvirt_schedules.decide import reports
from gpuvirt_schedules.decide.forecast import forecast
from gpuvirt_schedules.decide.reports import ScheduleDetail
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_sim.schedules.cluster import ModelCluster, NodeObject
from gpuvirt_sim.schedules.day import SimDay
from gpuvirt_sim.schedules.hypervisor import Connection, ModelHypervisor, Vm

DAY, NIGHT = PhaseName("day"), PhaseName("night")
ZONE = "Europe/Berlin"
PROFILES = {DAY: "v100-4q-4GB", NIGHT: "v100-16q-16GB"}
"""The label vgpu.type of the workers of each phase."""
UNITS = {DAY: Units(250), NIGHT: Units(1000)}
"""The units of each worker's GPU, which is a part of the V100, or all of it."""
GIB = {DAY: 4, NIGHT: 16}
BEGIN = "2026-01-05T18:30:00+00:00"
"""A Monday, half past seven in the evening in Berlin."""
EVENING, MORNING = "2026-01-05T19:05:00+00:00", "2026-01-06T06:05:00+00:00"
SPEC = Schedule("gpus", ZONE, (Phase(DAY, "0 7 * * 1-5"), Phase(NIGHT, "0 20 * * 1-5")), generation=1)
WORKERS = {NodeName(f"worker-{number}"): DAY if number < 5 else NIGHT for number in range(1, 6)}


class ScheduleStory:
    """The story."""

    def __init__(self) -> None:
        self.out: Console = console()
        self._chapter = 0
        powers = {DAY: Power.ON, NIGHT: Power.SUSPENDED}
        vms = {
            _key(name): Vm(_key(name), name, _uuid(name), GIB[phase], powers[phase]) for name, phase in WORKERS.items()
        }
        nodes = {
            name: NodeObject(
                name,
                _key(name),
                frozenset({phase}),
                most_pods=1,
                renewed_s=0.0 if phase is DAY else -600.0,
                unschedulable=phase is NIGHT,
                cordoned_by=SPEC.name if phase is NIGHT else "",
            )
            for name, phase in WORKERS.items()
        }
        cluster = ModelCluster(nodes, vms, lambda: self._day.now_s)
        hypervisor = ModelHypervisor(vms, lambda: self._day.now_s, self._on_call, self._report)
        self._day = SimDay(datetime.fromisoformat(BEGIN), SPEC, cluster, hypervisor, self._report)
        for _ in range(4):
            cluster.add_pod(DAY, app="train")
        cluster.add_pod(NIGHT, app="render")

    def play(self) -> None:
        """Play the day."""
        asyncio.run(self._play())

    async def _play(self) -> None:
        day = self._day
        say(self.out, "Cluster, hypervisor and time are simulated; the controller's rounds are those of a real one.")
        say(self.out, "A V100 carries either four worker VMs with a V100-4Q each, or one with a V100-16Q.")
        await day.play_until(datetime.fromisoformat(BEGIN).replace(minute=40))
        self._head("By day, four workers have a quarter of the GPU each", "gpuvirt schedule show gpus")
        schedulerender.detail(self._detail())
        self._show_shares()
        self._show_pods()
        self._head("What the evening will bring", "gpuvirt schedule plan gpus")
        self._show_plan()
        self._head("20:00: the day's workers are drained and suspended, the night's worker is resumed")
        await day.play_until(datetime.fromisoformat(EVENING))
        self._show_pods()
        self._show_shares()
        self._head("07:00: the reverse")
        await day.play_until(datetime.fromisoformat(MORNING))
        self._show_pods()
        self._show_shares()

    def _head(self, title: str, command: str | None = None) -> None:
        self._chapter += 1
        self.out.print(f"\n{self._chapter}. {title}", style="bold green")
        if command is not None:
            self.out.print(f"$ {command}", style="dim")

    def _report(self, text: str) -> None:
        local = self._day.now().astimezone(timeline_of(SPEC).zone)
        say(self.out, text, head=f"{local:%H:%M:%S} ")

    def _on_call(self, call: Call, sender: Connection) -> None:
        del sender
        self._report(f"asks the hypervisor: {call.action} VM {self._day.hypervisor.vms[call.vm].name}")

    def _detail(self) -> ScheduleDetail:
        day = self._day
        selectors = {phase: f"vgpu.type={profile}" for phase, profile in PROFILES.items()}
        row = reports.row_of(SPEC, day.status, (), day.now())
        switches = reports.switch_rows(SPEC, day.now())
        phases = reports.phase_rows(SPEC, selectors, {}, switches)
        workers = reports.worker_rows(day.status)
        drain = SPEC.drain
        hypervisor = "a simulated hypervisor"
        return ScheduleDetail(
            row, SPEC.leave, SPEC.announce_s, drain.timeout_s, drain.on_timeout, hypervisor, phases, (), workers, ()
        )

    def _show_plan(self) -> None:
        day = self._day
        switch = timeline_of(SPEC).next_switch(day.now())
        if switch is not None:
            observed = day.observed()
            found = forecast(SPEC, day.status, observed, {}, switch.at)
            schedulerender.steps(self.out, found, ZONE, None)

    def _show_pods(self) -> None:
        self.out.print()
        away = self._away()
        for pod in self._day.cluster.pods:
            selector = f"nodeSelector vgpu.type: {PROFILES[pod.phase]}"
            if pod.node is not None:
                say(self.out, f"pod {pod.name}, {selector}: Running on {pod.node}")
                continue
            workers = [name for name, phase in WORKERS.items() if phase == pod.phase and name in away]
            why = f"; worker {workers[0]} {away[workers[0]].message}" if workers else ""
            say(self.out, f"pod {pod.name}, {selector}: Pending{why}")

    def _show_shares(self) -> None:
        self.out.print("\n$ gpuvirt shares", style="dim")
        print_shares(self.out, self._overview())

    def _overview(self) -> SharesOverview:
        usage = {name: NodeUsage().with_capacity({_gpu(name): UNITS[phase]}) for name, phase in WORKERS.items()}
        shares = dict[PodUid, PodShare]()
        for pod in self._day.cluster.pods:
            if pod.node is not None:
                uid, units = PodUid(str(pod.uid)), UNITS[pod.phase]
                shares[uid] = PodShare(f"default/{pod.name}", units)
                usage[pod.node] = usage[pod.node].with_pod(uid, {_gpu(pod.node): units}, units)
        return overview(usage, shares, self._away())

    def _away(self) -> dict[NodeName, AwayWorker]:
        day = self._day
        switch = timeline_of(SPEC).next_switch(day.now())
        following = (switch.phase, schedulerender.when(switch.at, ZONE)) if switch is not None else (None, None)
        transition = day.status.transition
        phase = transition.phase if transition is not None else day.status.phase
        seen = ScheduleSeen(SPEC.name, "gpuvirt", SPEC.leave, phase, day.status.workers, *following)
        cordoned = {name: node.cordoned_by for name, node in day.cluster.nodes.items() if node.cordoned_by}
        return dict(away_workers((seen,), cordoned))


def _key(name: NodeName) -> VmKey:
    return VmKey(f"vm-{name}")


def _uuid(name: NodeName) -> str:
    return str(uuid5(NAMESPACE_DNS, name))


def _gpu(name: NodeName) -> GpuId:
    return GpuId(f"GPU-{name}")
