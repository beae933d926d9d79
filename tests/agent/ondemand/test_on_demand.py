"""Mode `on-demand` on a simulated host: what is offered, what a pod gets, and what is removed after its end."""

from functools import partial
from pathlib import Path

import pytest

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.cli.output import render
from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import IdleCount, OnDemandNames, OnDemandSettings, Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.vgpu import SimVgpuHost, VgpuTypeSpec
from tests.agent.node.simnode import running_node
from tests.agent.ondemand.pods import ON_DEMAND, P100, Pods, counts, one_p100, settled, vgpus
from tests.sim.simulated import Simulated

ALL_AT_ONE = {"vgpu-93": 1, "vgpu-83": 1, "vgpu-84": 1, "vgpu-85": 1, "vgpu-86": 1, "vgpu-87": 1}
V1Q, V8Q, V16Q = "tencent.com/vgpu-83", "tencent.com/vgpu-86", "tencent.com/vgpu-87"


async def test_the_first_vgpu_decides_what_the_gpu_offers_until_the_last_one_is_gone(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        assert counts(node) == ALL_AT_ONE
        assert {view.name: view.mdev_name_selectors for view in node.view.resources}[ResourceName(V8Q)] == (
            "GRID P100-8Q",
        )
        pods = Pods(node)
        first = pods.start("a", V1Q)
        assert vgpus(node) == first.vgpus
        # The other 1Q type has the same size, so that the driver and the equal-size rule allow it beside the first.
        assert counts(node) == dict.fromkeys(ALL_AT_ONE, 0) | {"vgpu-83": 16, "vgpu-93": 15}
        assert first.answer.device_nodes == ("/dev/vfio/vfio", f"/dev/vfio/{200}")
        await settled(node)
        assert counts(node)["vgpu-83"] == 16
        pods.end(first)
        await settled(node)
        assert vgpus(node) == []
        assert counts(node) == ALL_AT_ONE


async def test_a_gpu_carries_as_many_as_fit_and_no_more(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pods.start("a", V8Q)
        (spare,) = pods.free(V8Q)
        pods.start("b", V8Q)
        assert pods.free(V8Q) == []
        assert len(vgpus(node)) == 2
        text = await pods.refusal(V8Q, [spare.replace("-", "-9")])
        assert "UnknownDevice" in text  # an id that was never listed


async def test_a_full_gpu_refuses_with_what_takes_its_room(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        (other,) = pods.free(V16Q)
        pods.start("a", V8Q)
        text = await pods.refusal(V16Q, [other])
        assert text.startswith("NoRoom: tencent.com/vgpu-87 has no room for another GRID P100-16Q")
        assert f"{P100}: carries 1 GRID P100-8Q" in text
        assert len(vgpus(node)) == 1


async def test_an_id_of_a_pod_that_has_ended_gets_the_next_pod_a_new_vgpu(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        first = pods.start("a", V8Q)
        await settled(node)
        pods.end(first)
        second = pods.start("b", V8Q, *first.devices)  # while it is still listed
        assert set(second.vgpus).isdisjoint(first.vgpus)
        await settled(node)
        assert vgpus(node) == second.vgpus


async def test_an_init_containers_id_gets_the_pods_other_container_the_same_vgpu(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        init = pods.admit("a", V8Q)
        app = pods.start("a", V8Q, *init.devices)
        assert app.vgpus == init.vgpus == vgpus(node)


async def test_an_id_that_is_given_again_is_the_next_pods_from_then_on(tmp_path: Path) -> None:
    """The kubelet refuses a pod after Allocate, gives its id to the next one, and takes seconds to record that."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        refused = pods.admit("a", V8Q)
        node.hold(V8Q, *refused.devices, pod="a")
        await node.report_account()
        node.free(*refused.devices)
        await node.advance(15.0)
        (answer,) = node.allocate(V8Q, refused.devices)
        for _ in range(4):
            await node.report_account()
            await node.advance(1.0)
        assert vgpus(node) == refused.vgpus == list(answer.env.values())
        shown = [device for resource in node.view.resources for device in resource.devices if device.vgpu]
        assert [str(device.allocated_to)[:28] for device in shown] == ["a pod that is being admitted"]
        for _ in range(2):
            await node.report_account(settled=True)
        await settled(node)
        assert vgpus(node) == []


async def test_a_killed_agents_vgpu_is_given_to_the_pods_other_container(tmp_path: Path) -> None:
    """The agent was killed after its answer for the init container: its ledger has the intent alone."""
    kernel, ledger = one_p100(), tmp_path / "ledger.json"
    created, kept = kernel.mdev.create, list[bytes]()

    def create(vgpu_host: SimVgpuHost, slot: PciAddress, spec: VgpuTypeSpec, text: str) -> None:
        kept.append(ledger.read_bytes())
        created(vgpu_host, slot, spec, text)

    vars(kernel.mdev)["create"] = create
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        init = Pods(node).admit("a", V8Q)
    ledger.write_bytes(kept[0])
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        app = Pods(node).admit("a", V8Q, *init.devices)
        assert app.vgpus == init.vgpus == vgpus(node)


async def test_a_pod_that_never_started_leaves_nothing(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.admit("a", V8Q)
        node.free(*pod.devices)
        for _ in range(3):
            await node.advance(600.0)
            await node.report_account()
            assert vgpus(node) == list(pod.vgpus), "the kubelet may be admitting the pod"
        for _ in range(4):
            await node.report_account(settled=True)
            await node.advance(1.0)
        assert vgpus(node) == []
        assert counts(node) == ALL_AT_ONE


async def test_a_vgpu_that_a_process_has_open_stays_after_its_pods_end(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.start("a", V8Q)
        (vgpu,) = vgpus(node)
        vm = kernel.start_vm(kernel.mdev.devices[vgpu].group)
        pods.end(pod)
        await settled(node)
        assert vgpus(node) == [vgpu]
        assert kernel.vfio.requests == []
        kernel.end_vm(vm)
        await node.advance(20.0)
        await settled(node)
        assert vgpus(node) == []


async def test_a_container_starts_only_with_the_vgpu_of_the_kubelets_record(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.admit("a", V8Q)
        node.recorded.containers.clear()
        with pytest.raises(AllocationRefusedError, match="does not assign this vGPU to the container"):
            pods.pre_start(pod)
        node.recorded.unread = True
        with pytest.raises(AllocationRefusedError) as refused:
            pods.pre_start(pod)
        assert refused.value.reason.code is ReasonCode.UNKNOWN_DEVICE


async def test_vgpus_from_before_are_removed_and_those_in_use_stay(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    used = next(iter(kernel.mdev.devices.values()))
    kernel.start_vm(used.group)
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        assert vgpus(node) == [used.uuid]
        # Three GPUs are idle. The fourth has room for one more of its size.
        assert counts(node) == {"vgpu-230": 3, "vgpu-231": 3, "vgpu-232": 3, "vgpu-233": 4, "vgpu-234": 3}


async def test_vgpus_on_vfs_are_created_one_on_each(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10-sriov")
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        assert set(counts(node).values()) == {2}
        pods = Pods(node)
        resource = next(view.name for view in node.view.resources if view.on_demand == "NVIDIA A10-12Q")
        given = [pods.start(name, resource) for name in ("a", "b", "c")]
        assert len({kernel.mdev.devices[vgpu].slot for pod in given for vgpu in pod.vgpus}) == 3
        assert len({kernel.mdev.devices[vgpu].vgpu_host.slots[0] for pod in given for vgpu in pod.vgpus}) == 2


async def test_vfs_are_switched_on_when_the_mode_is_entered(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10-vgpu"), tmp_path, ON_DEMAND) as node:
        await settled(node)
        await settled(node)
        assert all(gpu.vfs for gpu in node.view.gpus)
        assert set(counts(node).values()) == {2}


async def test_vendor_vfio_vgpus_are_given_by_the_address_of_their_vf(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xL40S")
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        resource = next(view.name for view in node.view.resources if view.on_demand == "NVIDIA L40S-24Q")
        pod = pods.start("a", resource)
        (vf,) = pod.vgpus
        path = HostPath(f"/sys/bus/pci/devices/{vf}/nvidia/current_vgpu_type")
        assert kernel.read(path).strip() != b"0"
        # The kernel has made the vGPU's node together with it, and the host has iommufd.
        (cdev,) = kernel.listdir(HostPath(f"/sys/bus/pci/devices/{vf}/vfio-dev"))
        first, *_, last = pod.answer.device_nodes
        assert (first, last) == (f"/dev/vfio/devices/{cdev}", "/dev/iommu")
        pods.end(pod)
        await settled(node)
        assert kernel.read(path).strip() == b"0"


async def test_names_and_types_follow_the_settings(tmp_path: Path) -> None:
    chosen = OnDemandSettings(names=OnDemandNames.TYPE, types=("P100-8Q", "GRID P100-1Q"), idle_count=IdleCount.MAX)
    async with running_node(one_p100(), tmp_path, Settings(mode=DesiredMode.ON_DEMAND, on_demand=chosen)) as node:
        await settled(node)
        assert counts(node) == {"GRID_P100-8Q": 2, "GRID_P100-1Q": 16}


async def test_a_restart_changes_no_vgpu_and_no_count(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pod = Pods(node).start("a", V8Q)
        held, recorded = node.held, node.recorded.containers
        await settled(node)
        before = counts(node)
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        node.held, node.recorded.containers = held, recorded
        await settled(node)
        assert vgpus(node) == pod.vgpus
        assert counts(node) == before
        assert pod.devices[0] in [device.id for view in node.view.resources for device in view.devices]
        Pods(node).end(pod)
        await settled(node)
        assert vgpus(node) == []


async def test_a_lost_ledger_keeps_the_vgpus_of_the_kubelets_record(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pod = Pods(node).start("a", V8Q)
        held, recorded = node.held, node.recorded.containers
    (tmp_path / "ledger.json").unlink()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        node.held, node.recorded.containers = held, recorded
        await settled(node)
        assert vgpus(node) == pod.vgpus
        assert pod.devices[0] in [device.id for view in node.view.resources for device in view.devices]
        second = Pods(node).start("b", V8Q, *pod.devices)
        assert set(second.vgpus).isdisjoint(pod.vgpus)


async def test_a_gpu_that_is_to_be_used_whole_waits_for_its_last_pod(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pod = Pods(node).start("a", V8Q)
        held, recorded = node.held, node.recorded.containers
    async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.PASSTHROUGH)) as node:
        node.held, node.recorded.containers = held, recorded
        await settled(node)
        assert vgpus(node) == pod.vgpus
        assert counts(node) == {"vgpu-86": 1}
        listed = [device.id for view in node.view.resources for device in view.devices]
        assert listed == list(pod.devices)  # the kubelet restarts its container
        Pods(node).end(pod)
        await node.advance(20.0)
        await settled(node)
        assert node.gpu(P100).driver == "vfio-pci"


async def test_a_removed_vgpu_takes_no_room_from_the_end_of_the_change_on(tmp_path: Path) -> None:
    """A scan that has begun before the change ended still shows it; one that has begun later counts."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        state, pods = node.agent._state, Pods(node)
        assert state.inventory is not None
        idle = state.inventory.facts
        pods.start("a", V16Q)
        await settled(node)
        full = state.inventory.facts
        assert full.group_nodes > idle.group_nodes
        state.observe_vgpus([idle.vgpu_hosts[PciAddress(P100)]], 100.0)
        assert state.inventory.facts == idle
        state.observe_facts(full, since_s=99.0)
        assert state.inventory.facts == idle
        state.observe_facts(full, since_s=101.0)
        assert state.inventory.facts == full
        state.observe_vgpus([], 102.0)
        assert state.inventory.facts == full


async def test_a_vgpu_that_a_change_has_not_seen_yet_is_kept(tmp_path: Path) -> None:
    """Allocate creates it between the last reading of a change on its GPU and the end of that change."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        state, pods = node.agent._state, Pods(node)
        assert state.inventory is not None
        left = state.inventory.facts.vgpu_hosts[PciAddress(P100)]
        pod = pods.start("a", V8Q)
        made_s, seen = node.clock.monotonic_s(), state.inventory.facts
        await node.advance(0.01)
        state.observe_vgpus([left], node.clock.monotonic_s())
        assert list(state.inventory.vgpus) == pod.vgpus
        state.observe_facts(seen, since_s=made_s + 0.005)
        assert list(state.inventory.vgpus) == pod.vgpus
        state.record_allocation(())
        state.observe_vgpus([left], node.clock.monotonic_s())
        assert not state.inventory.vgpus


async def test_the_kubelet_is_asked_again_soon_once_a_pod_seems_to_have_ended(tmp_path: Path) -> None:
    """Only a second account without the pod ends its allocation; the next periodic one comes 15 s later."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        first = pods.start("a", V8Q)
        await settled(node)
        asked_at_once = partial(getattr, node.agent.observations.ask_kubelet, "_set")
        node.agent.observations.ask_kubelet._set = False
        await node.report_account()
        assert not asked_at_once()
        pods.end(first)
        await node.report_account()
        assert asked_at_once()
        assert vgpus(node) == first.vgpus


@pytest.mark.parametrize("settings", [ON_DEMAND, Settings(mode=DesiredMode.VGPU)])
async def test_the_table_of_resources_has_types_only_where_names_are_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: Settings
) -> None:
    async with running_node(one_p100(), tmp_path, settings) as node:
        await settled(node)
        render.devices(node.view, every=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    is_on_demand = settings is ON_DEMAND
    assert (["RESOURCE", "TYPE", "TOTAL", "HEALTHY", "ALLOCATED", "REGISTERED"] in lines) is is_on_demand
    assert any(line[:3] == [V8Q, "GRID", "P100-8Q"] for line in lines) is is_on_demand
