"""A night for which VMs on a node with GPUs of its own are stopped: rounds against an API server, and a real report."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.gpunode import GPU_NODES
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.model.workers.hypervisor import VmsUnknown
from gpuvirt.plans.knownconfigs import KnownConfigs
from gpuvirt_schedules.controller.configurednodes import ConfiguredNodes
from gpuvirt_schedules.controller.rounds import Rounds
from gpuvirt_schedules.controller.scheduleapi import ScheduleObjects
from gpuvirt_schedules.controller.vmcalls import VmCalls
from tests.agent.node.nodewithvgpus import give_first_vgpu, reported
from tests.agent.node.simnode import running_node
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.schedules.coverednode import NODE, POOL
from tests.schedules.scheduleday import SCHEDULE, Day
from tests.schedules.servedkubevirt import NAMESPACE, SAVED, Guest, ServedKubeVirt
from tests.schedules.servedschedule import FORBIDDEN, NODES, Object
from tests.sim.simulated import Simulated
from tests.web.certificates import Authority, Pair

GPU_NODE = f"{GPU_NODES.path}/{NODE}"
POD = f"/api/v1/namespaces/{NAMESPACE}/pods/virt-launcher-vm-a-x2x4c"
BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
VMI = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "controller": True}
NO_HYPERVISOR = VmsUnknown("", "the schedule has none")


class Night(Day):
    """A node with four T4, of which a VM has a T4-8Q, in the evening before a night of T4-4Q; its agent; KubeVirt."""

    def __init__(self, report: Object, strategy: str = "Always") -> None:
        super().__init__(())
        self.kubevirt, self.configured, self.report = ServedKubeVirt(), ConfiguredNodes(), report
        self.guest: Guest = self.kubevirt.add("vm-a", strategy)
        self.served.kinds |= {GPU_NODES.path, BUDGETS}
        self.served.put(f"{NODES}/{NODE}", {"metadata": {"labels": {"nvidia.com/pool": "vgpu"}}})
        self.put_schedule(vms="Stop")
        self.configured.observe_configs(KnownConfigs())
        self.observe()

    def put_schedule(self, generation: int = 1, drain: Object | None = None, **night: object) -> None:
        phases = [
            {"name": "day", "start": "0 7 * * *", "nodes": POOL, "vgpuConfig": "T4-8Q"},
            {"name": "night", "start": "0 20 * * *", "nodes": POOL, "vgpuConfig": "T4-4Q", **night},
        ]
        before = self.served.objects.get(SCHEDULE, {})
        spec: Object = {"timeZone": "Europe/Berlin", "phases": phases, "drain": drain or {}}
        self.served.put(SCHEDULE, {**before, "metadata": {"generation": generation}, "spec": spec})

    def put_budget(self, allowed: int, **metadata: object) -> None:
        spec = {"selector": {"matchLabels": {"app": "vm-a"}}}
        status = {"disruptionsAllowed": allowed}
        content: Object = {"metadata": {"namespace": NAMESPACE, **metadata}, "spec": spec, "status": status}
        self.served.put(f"{BUDGETS}/pdb", content)

    def answer(self, call: Call) -> Reply:
        if "kubevirt.io" in call.path and call.path not in self.served.forbidden:
            return self.kubevirt.answer(call)
        return FORBIDDEN if "kubevirt.io" in call.path else self.served.answer(call)

    def observe(self) -> None:
        """Let virt-controller's pod, the controller's loop of nodes and the agent follow what there is."""
        if self.guest.has_gpu:
            owner = {**VMI, "uid": self.guest.vmi["uid"] if self.guest.vmi is not None else ""}
            metadata: Object = {"namespace": NAMESPACE, "labels": {"app": "vm-a"}, "ownerReferences": [owner]}
            self.served.put(POD, {"metadata": metadata, "spec": {"nodeName": NODE}})
        else:
            self.served.objects.pop(POD, None)
        is_night = not 6 <= self.now().hour < 19  # in UTC
        name, config = ("night", "T4-4Q") if is_night else ("day", "T4-8Q")
        waits = is_night and self.guest.has_gpu
        at = "2026-01-05T00:00:00Z"
        code = "VgpuInUse" if waits else "Reconciled"
        condition = {"type": "Ready", "status": str(not waits), "reason": code, "lastTransitionTime": at}
        found = self.report["gpus"]
        assert isinstance(found, list)
        gpus = [{**gpu, "vgpuConfig": config} for gpu in found]
        status = {**self.report, "observedGeneration": 1, "conditions": [condition], "gpus": gpus}
        origins = {"vgpuConfig": f"VgpuSchedule gpus phase {name}"}
        spec: Object = {"mode": "vgpu", "vgpuConfig": config, "origins": origins}
        self.served.put(GPU_NODE, {"metadata": {"generation": 1}, "spec": spec, "status": status})
        key = ObjectKey("", NODE)
        node = msgspec.convert(self.served.objects[f"{NODES}/{NODE}"], ReadNode)
        self.configured.observe_nodes(Delta({key: node}))
        self.configured.observe_gpu_nodes(Delta({key: msgspec.convert(self.served.objects[GPU_NODE], OwnedGpuNode)}))

    @override
    async def sleep(self, seconds: float, /) -> None:
        await super().sleep(seconds)
        self.kubevirt.pass_time(self.now_s)
        self.observe()

    def vms(self) -> list[tuple[object, ...]]:
        """Return the VMs of the status: name, step, whether it was forced, and the code."""
        vms = self.status().get("vms", ())
        assert isinstance(vms, list)
        return [(vm["name"], vm["step"], vm["forced"], vm["code"]) for vm in vms]


@pytest.fixture
async def report(simulated: Simulated, tmp_path: Path) -> Object:
    """Return what an agent reports of four T4, of which the first carries two T4-8Q; a VM has one of them."""
    async with running_node(simulated("4xT4"), tmp_path) as node:
        await give_first_vgpu(node)
        found = reported(node)
    text = msgspec.json.encode(found).replace(b"default/", f"{NAMESPACE}/".encode())
    content: Object = json.loads(text)["status"]
    return content


@asynccontextmanager
async def playing(night: Night, server: Pair, ca: Path) -> AsyncIterator[Rounds]:
    async with scripted(night.answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        objects = ScheduleObjects(client, "gpuvirt", "gpus", night, night.configured)

        async def connect() -> VmsUnknown:
            return NO_HYPERVISOR

        yield Rounds(objects, VmCalls(connect, night, lambda: True, 0.0), night)
        client.close()


async def go_on(rounds: Rounds, night: Night, seconds: float) -> None:
    """Make rounds for some time, also where the keeper would begin them again."""
    end_s = night.now_s + seconds
    while night.now_s < end_s:
        pause_s = await rounds.round()
        await night.sleep(5.0 if pause_s is None else max(pause_s, 0.5))


async def to_morning(rounds: Rounds, night: Night) -> None:
    night.now_s += 11 * 3600.0  # past 7
    await night.sleep(1.0)
    await go_on(rounds, night, 120.0)


@pytest.mark.parametrize("strategy", ["Always", "running", "Manual", "RerunOnFailure", "Once"])
async def test_a_vm_is_stopped_for_a_night_and_comes_back(
    authority: Authority, server: Pair, report: Object, strategy: str
) -> None:
    night = Night(report, strategy)
    spec = json.dumps(night.guest.spec)
    async with playing(night, server, authority.certificate) as rounds:
        await go_on(rounds, night, 60.0)
        assert night.vms() == [("vm-a", "Stopped", False, "")]
        assert (night.guest.phase, night.guest.power_cuts) == ("", 0)
        assert night.conditions()["Ready"] == ("True", "PhaseReached")
        assert await rounds.round() is None, "nothing is under way"
        await to_morning(rounds, night)
    assert night.vms() == []
    assert (night.guest.phase, night.guest.boots, night.guest.annotations) == ("Running", 2, {})
    assert json.dumps(night.guest.spec) == spec
    reasons = [reason for _, reason in night.events()]
    assert [reason for reason in reasons if str(reason).startswith("Vm")] == ["VmStopping", "VmStopped", "VmStarting"]


async def test_a_phase_waits_for_vms_unless_it_says_otherwise(
    authority: Authority, server: Pair, report: Object
) -> None:
    night = Night(report)
    night.put_schedule()
    async with playing(night, server, authority.certificate) as rounds:
        await go_on(rounds, night, 60.0)
    assert (night.kubevirt.writes, night.vms(), night.guest.phase) == ([], [], "Running")
    assert night.conditions()["Ready"] == ("False", "VgpuInUse")


def _control(night: Night) -> None:
    night.guest.owners = [{"apiVersion": "pool.kubevirt.io/v1", "kind": "VirtualMachinePool", "controller": True}]


def _forbid_vms(night: Night) -> None:
    night.served.forbidden.add(f"/apis/kubevirt.io/v1/namespaces/{NAMESPACE}/virtualmachines")


def _forbid_budgets(night: Night) -> None:
    night.served.forbidden.add(BUDGETS)


def _cover(night: Night) -> None:
    night.put_budget(0)


def _take_power_at_once(night: Night) -> None:
    night.guest.spec["template"]["spec"]["terminationGracePeriodSeconds"] = 0  # type: ignore[index]
    night.guest.grace_s = 0.0


def _have_workers(night: Night) -> None:
    place = {"kubeVirt": {"namespace": NAMESPACE}}
    spec: Object = {"phases": [], "hypervisor": place}
    night.served.put(f"{SCHEDULE.rpartition('/')[0]}/other", {"metadata": {"generation": 1}, "spec": spec})


def _be_alone(night: Night) -> None:
    night.guest.is_orphan = True


def _wait_as_receiver(night: Night) -> None:
    night.guest.spec["runStrategy"] = night.guest.followed = "WaitAsReceiver"


REFUSED = [
    (_control, "a VirtualMachinePool controls it"),
    (_forbid_budgets, "PodDisruptionBudgets may not be listed"),
    (_cover, f"PodDisruptionBudget {NAMESPACE}/pdb allows no further"),
    (_take_power_at_once, "terminationGracePeriodSeconds is 0"),
    (_have_workers, "has the workers of a schedule"),
    (_wait_as_receiver, "WaitAsReceiver"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
async def test_a_vm_that_must_not_be_stopped_is_waited_for_with_the_reason(
    authority: Authority, server: Pair, report: Object, change: object, words: str
) -> None:
    night = Night(report)
    assert callable(change)
    change(night)
    async with playing(night, server, authority.certificate) as rounds:
        await go_on(rounds, night, 60.0)
    assert (night.vms(), night.kubevirt.writes) == ([("vm-a", "Wait", False, "VmNotStopped")], [])
    assert night.conditions()["Ready"] == ("False", "VgpuInUse")
    assert words in json.dumps(night.status()["vms"])
    assert ("Warning", "VmNotStopped") in night.events()


@pytest.mark.parametrize("change", [_forbid_vms, _be_alone])
async def test_what_is_not_certainly_a_vm_is_not_stopped(
    authority: Authority, server: Pair, report: Object, change: object
) -> None:
    night = Night(report)
    assert callable(change)
    change(night)
    async with playing(night, server, authority.certificate) as rounds:
        await go_on(rounds, night, 60.0)
    assert (night.vms(), night.kubevirt.writes) == ([], [])
    assert night.conditions()["Ready"] == ("False", "VgpuInUse")


async def test_a_budget_of_kubevirt_itself_keeps_no_vm(authority: Authority, server: Pair, report: Object) -> None:
    """It has KubeVirt migrate the VM of a node that is drained, and allows no eviction as long as the VM runs."""
    night = Night(report)
    night.put_budget(0, ownerReferences=[{**VMI, "uid": "vmi"}])
    async with playing(night, server, authority.certificate) as rounds:
        await go_on(rounds, night, 60.0)
    assert night.vms() == [("vm-a", "Stopped", False, "")]


async def test_force_stops_a_vm_against_its_budget_after_the_timeout(
    authority: Authority, server: Pair, report: Object
) -> None:
    night = Night(report)
    night.put_budget(0)
    night.put_schedule(drain={"timeout": "60s", "onTimeout": "Force"}, vms="Stop")
    async with playing(night, server, authority.certificate) as rounds:
        await go_on(rounds, night, 55.0)
        assert night.vms() == [("vm-a", "Wait", False, "VmNotStopped")]
        await go_on(rounds, night, 60.0)
    assert night.vms() == [("vm-a", "Stopped", True, "")]
    assert ("Warning", "DrainForced") in night.events()


async def test_another_controller_goes_on_where_one_has_died(
    authority: Authority, server: Pair, report: Object
) -> None:
    night = Night(report)
    async with playing(night, server, authority.certificate) as rounds:
        while not night.kubevirt.writes:
            await go_on(rounds, night, 0.1)
    async with playing(night, server, authority.certificate) as rounds:
        await go_on(rounds, night, 60.0)
        assert night.vms() == [("vm-a", "Stopped", False, "")]
    assert night.guest.annotations == {SAVED: "Always"}
    async with playing(night, server, authority.certificate) as rounds:
        await to_morning(rounds, night)
    assert (night.guest.phase, night.vms()) == ("Running", [])


async def test_a_report_of_an_older_spec_stops_nothing(authority: Authority, server: Pair, report: Object) -> None:
    """The node may have another vGPU config by then, which keeps the vGPU."""
    night = Night(report)
    async with playing(night, server, authority.certificate) as rounds:
        for change in ({"metadata": {"generation": 2}}, {"spec": {"mode": "vgpu", "vgpuConfig": "T4-8Q"}}):
            night.observe()
            night.served.put(GPU_NODE, {**night.served.objects[GPU_NODE], **change})
            for _ in range(3):
                await rounds.round()
    assert (night.vms(), night.kubevirt.writes) == ([], [])
