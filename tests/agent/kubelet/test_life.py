"""The agent and a kubelet, over gRPC on real sockets."""

import stat
from pathlib import Path

import grpc.aio
import pytest
from msgspec.structs import replace

from gpuvirt.agent.process import run
from gpuvirt.errors import AlreadyRunningError
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.client import PluginClient
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import running
from gpuvirt_sim.kubelet.manager import AdmissionError
from tests.agent.kubelet.kubeletnode import CLOCK, Cluster, agent_on, cluster_on, options_for, until

A10 = "nvidia.com/GA102GL_A10"
RTX2060 = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A"
RTX4090 = "nvidia.com/AD102_GEFORCE_RTX_4090"
T4_8Q = "nvidia.com/GRID_T4-8Q"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")


async def test_vms_get_the_environment_of_the_published_article(short_path: Path) -> None:
    """Four cards, one socket, and the environment of a VM with one GPU and with two."""
    async with cluster_on("4xRTX2060", short_path) as node:
        assert node.kubelet.capacity() == node.kubelet.allocatable() == {RTX2060: 4}
        socket = short_path / "device-plugins/kubevirt-TU106_GEFORCE_RTX_2060_REV__A.sock"
        assert stat.S_ISSOCK(socket.stat().st_mode)
        assert stat.S_IMODE(socket.stat().st_mode) == 0o755
        name = "PCI_RESOURCE_NVIDIA_COM_TU106_GEFORCE_RTX_2060_REV__A"
        one = await node.kubelet.run_pod("vm-a", Container("compute", {RTX2060: 1}))
        assert list(one.env()) == [name]
        two = await node.kubelet.run_pod("vm-b", Container("compute", {RTX2060: 2}))
        assert two.env() == {name: "0000:86:00.0,0000:af:00.0"}, "both on one NUMA node"
        assert two.device_nodes() == ["/dev/vfio/vfio", "/dev/vfio/81", "/dev/vfio/94"]


async def test_no_device_goes_to_two_pods(short_path: Path) -> None:
    async with cluster_on("4xRTX2060", short_path) as node:
        given = [
            next(iter((await node.kubelet.run_pod(f"vm-{number}", Container("compute", {RTX2060: 1}))).env().values()))
            for number in range(4)
        ]
        assert len(set(given)) == 4
        with pytest.raises(AdmissionError, match="Requested: 1, Available: 0"):
            await node.kubelet.run_pod("vm-5", Container("compute", {RTX2060: 1}))
        node.kubelet.end_pod("vm-2")
        again = await node.kubelet.run_pod("vm-6", Container("compute", {RTX2060: 1}))
        assert next(iter(again.env().values())) == given[2]


async def test_a_pod_with_a_resource_unknown_to_the_kubelet_gets_no_device(short_path: Path) -> None:
    """A real kubelet does so: the scheduler's count may be older than the loss of the kubelet's checkpoint."""
    async with cluster_on("2xA10", short_path) as node:
        pod = await node.kubelet.run_pod("vm", Container("compute", {"example.com/none": 1}))
        assert pod.held == []


async def test_two_containers_of_a_pod_get_different_gpus(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        pod = await node.kubelet.run_pod("vm", Container("compute", {A10: 1}), Container("side", {A10: 1}))
        first, second = pod.env("compute"), pod.env("side")
        assert sorted([*first.values(), *second.values()]) == [FIRST, SECOND]


async def test_an_app_container_gets_the_gpus_of_its_init_container(short_path: Path) -> None:
    async with cluster_on("2xRTX4090-one-group", short_path) as node:
        await until(lambda: node.kubelet.capacity() == {RTX4090: 3})
        pod = await node.kubelet.run_pod(
            "vm", Container("prepare", {RTX4090: 2}, init=True), Container("compute", {RTX4090: 2})
        )
        assert pod.env("prepare") == pod.env("compute")


async def test_two_vms_do_not_share_a_group(short_path: Path) -> None:
    async with cluster_on("2xRTX4090-one-group", short_path) as node:
        await until(lambda: node.kubelet.capacity() == {RTX4090: 3})
        alone = await node.kubelet.run_pod("vm-a", Container("compute", {RTX4090: 1}))
        assert list(alone.env().values()) == ["0000:0c:00.0"], "the group of two is kept for a request for two"
        left = await node.kubelet.run_pod("vm-b", Container("compute", {RTX4090: 1}))
        assert left.device_nodes() == ["/dev/vfio/vfio", "/dev/vfio/12"]
        with pytest.raises(AdmissionError):
            await node.kubelet.run_pod("vm-c", Container("compute", {RTX4090: 1}))
        await until(lambda: node.kubelet.capacity() == {RTX4090: 2})
        node.kubelet.end_pod("vm-b")
        await until(lambda: node.kubelet.capacity() == {RTX4090: 3})


async def test_a_refusal_has_its_reason_in_the_pods_status(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        process = node.kernel.start_vm(IommuGroup(12))
        node.kernel.start_vm(IommuGroup(22))
        with pytest.raises(
            AdmissionError, match=rf"InUseElsewhere: .* in use by qemu-system-x86 \(pid {process.pid}\)"
        ):
            await node.kubelet.run_pod("vm", Container("compute", {A10: 1}))
        assert node.kubelet.manager.held == []


async def test_health_and_hotplug_reach_allocatable(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        node.kernel.delete_node(IommuGroup(12))
        await until(lambda: node.kubelet.allocatable() == {A10: 1})
        assert node.kubelet.capacity() == {A10: 2}
        node.kernel.restore_node(IommuGroup(12))
        await until(lambda: node.kubelet.allocatable() == {A10: 2})
        node.kernel.unplug(FIRST)
        await until(lambda: node.kubelet.capacity() == {A10: 1})
        node.kernel.unplug(SECOND)
        await until(lambda: node.kubelet.capacity() == {A10: 0})
        node.kernel.plug_in(FIRST)
        node.kernel.rebind(FIRST, "vfio-pci")
        await until(lambda: node.kubelet.allocatable() == {A10: 1})


async def test_known_numa_nodes_are_reported_and_unknown_nodes_are_not(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        assert node.kubelet.manager.resources[A10].numa_nodes == {FIRST: 0, SECOND: 1}
        node.kernel.pci.functions[FIRST].numa_node = -1
        await until(lambda: node.kubelet.manager.resources[A10].numa_nodes == {FIRST: None, SECOND: 1})


async def test_one_agent_serves_many_resources(short_path: Path) -> None:
    async with cluster_on("8xA100", short_path) as node:
        assert node.kubelet.capacity() == {
            "nvidia.com/GA100_A100_SXM4_80GB": 3,
            "nvidia.com/NVIDIA_A100DX-1-10C": 2,
            "nvidia.com/NVIDIA_A100DX-20C": 4,
            "nvidia.com/NVIDIA_A100DX-40C": 2,
        }
        pod = await node.kubelet.run_pod(
            "vm", Container("compute", {"nvidia.com/GA100_A100_SXM4_80GB": 1, "nvidia.com/NVIDIA_A100DX-20C": 2})
        )
        assert sorted(pod.env()) == [
            "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_A100DX-20C",
            "PCI_RESOURCE_NVIDIA_COM_GA100_A100_SXM4_80GB",
        ]


async def test_vgpus_are_spread_over_their_gpus(short_path: Path) -> None:
    async with cluster_on("4xT4", short_path) as node:
        devices = [
            (await node.kubelet.run_pod(f"vm-{number}", Container("compute", {T4_8Q: 1}))).held[0].devices[0]
            for number in range(2)
        ]
        gpus = {node.kernel.mdev.devices[device].slot for device in devices}
        assert gpus == {"0000:3b:00.0", "0000:af:00.0"}


async def test_the_view_names_the_pod_of_an_allocated_device(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        await node.kubelet.run_pod("virt-launcher-vm-a", Container("compute", {A10: 1}))

        def consumers() -> list[str | None]:
            return [device.allocated_to for resource in node.view.resources for device in resource.devices]

        await until(lambda: "pod default/virt-launcher-vm-a" in consumers())
        node.kubelet.end_pod("virt-launcher-vm-a")
        await until(lambda: consumers() == [None, None])


async def test_the_checkpoint_names_the_pod_without_the_pod_resources_api(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        node.kubelet.paths.pod_resources_socket.unlink()
        pod = await node.kubelet.run_pod("vm-a", Container("compute", {A10: 1}))
        await until(
            lambda: any(
                device.allocated_to == f"pod {pod.uid}"
                for resource in node.view.resources
                for device in resource.devices
            )
        )


async def test_a_second_agent_ends_and_registers_no_resource(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        before = node.kubelet.registrations.copy()
        with pytest.raises(AlreadyRunningError, match="another gpuvirt agent serves this node"):
            await run(options_for(node.kernel, short_path))
        assert node.kubelet.registrations == before
        assert (await node.kubelet.run_pod("vm", Container("compute", {A10: 1}))).env()


async def test_no_other_user_can_lock_the_agents_folder(short_path: Path) -> None:
    """Any user who can open the folder could lock it, and so keep the agent from starting."""
    own = short_path / "state"
    own.mkdir(mode=0o755)
    kernel = build_host(load_host("2xA10"))
    options = replace(options_for(kernel, short_path), ledger=own / "ledger.json")
    async with running(short_path, CLOCK), agent_on(options):
        assert stat.S_IMODE(own.stat().st_mode) == 0o700


async def test_an_agent_removes_its_sockets_when_it_ends(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    async with running(short_path, CLOCK) as kubelet:
        async with agent_on(options_for(kernel, short_path)):
            await until(lambda: kubelet.allocatable() == {A10: 2})
        folder = short_path / "device-plugins"
        assert [entry.name for entry in folder.iterdir() if stat.S_ISSOCK(entry.stat().st_mode)] == ["kubelet.sock"]
        await until(lambda: kubelet.allocatable() == {A10: 0})
        assert kubelet.capacity() == {A10: 2}, "the kubelet keeps the capacity for five minutes"
        async with agent_on(options_for(kernel, short_path)):
            await until(lambda: kubelet.allocatable() == {A10: 2})
    assert kernel.writes == []


@pytest.mark.parametrize(
    ("devices", "message"),
    [(["0000:99:00.0"], "UnknownDevice"), ([""], "UnknownDevice"), (["../" * 50], "UnknownDevice")],
)
async def test_an_invalid_request_is_refused_with_the_reason(
    short_path: Path, devices: list[str], message: str
) -> None:
    async with cluster_on("2xA10", short_path):
        client = PluginClient(short_path / "device-plugins/kubevirt-GA102GL_A10.sock")
        with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
            await client.allocate([devices])
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError, match="2 devices must be included in an allocation of 1"):
            await client.prefer([FIRST, SECOND], [FIRST, SECOND], 1)
        await client.close()


async def test_two_containers_of_one_request_get_only_their_own_devices(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path):
        client = PluginClient(short_path / "device-plugins/kubevirt-GA102GL_A10.sock")
        answer = await client.allocate([[FIRST], [SECOND]])
        assert [dict(response.envs) for response in answer.container_responses] == [
            {"PCI_RESOURCE_NVIDIA_COM_GA102GL_A10": FIRST},
            {"PCI_RESOURCE_NVIDIA_COM_GA102GL_A10": SECOND},
        ]
        assert [[device.host_path for device in response.devices] for response in answer.container_responses] == [
            ["/dev/vfio/vfio", "/dev/vfio/12"],
            ["/dev/vfio/vfio", "/dev/vfio/22"],
        ]
        assert all(
            device.permissions == "mrw" for response in answer.container_responses for device in response.devices
        )
        await client.close()


def held_by(node: Cluster) -> dict[str, str]:
    return {
        device.id: device.allocated_to
        for resource in node.view.resources
        for device in resource.devices
        if device.allocated_to
    }


async def test_a_restarted_kubelet_without_its_pods_ends_no_allocation(short_path: Path) -> None:
    async with cluster_on("2xRTX4090-one-group", short_path) as node:
        await until(lambda: node.kubelet.allocatable() == {RTX4090: 3})
        await node.kubelet.run_pod("vm-a", Container("compute", {RTX4090: 3}))
        await until(lambda: len(held_by(node)) == 3)
        node.kubelet.paths.pod_resources_socket.unlink()
        await node.kubelet.restart(api_server=False)
        await node.until_registered()
        readings = node.agent.telemetry.observations.total()
        await until(lambda: node.agent.telemetry.observations.total() > readings + 20)
        assert len(held_by(node)) == 3
        node.kubelet.has_pods = True
        node.kubelet.end_pod("vm-a")
        await until(lambda: held_by(node) == {})


async def test_a_gpu_of_an_init_container_is_allocated_until_the_pod_ends(short_path: Path) -> None:
    async with cluster_on("2xRTX4090-one-group", short_path) as node:
        await until(lambda: node.kubelet.allocatable() == {RTX4090: 3})
        pod = await node.kubelet.run_pod("burn-in", Container("test", {RTX4090: 1}, init=True), Container("app", {}))
        await until(lambda: held_by(node) == dict.fromkeys(pod.held[0].devices, f"pod {pod.uid}"))
        node.kubelet.end_pod("burn-in")
        await until(lambda: held_by(node) == {})


async def test_a_kubelet_without_a_checkpoint_has_no_allocations(short_path: Path) -> None:
    async with cluster_on("2xRTX4090-one-group", short_path) as node:
        node.kubelet.paths.pod_resources_socket.unlink()
        await until(lambda: node.kubelet.allocatable() == {RTX4090: 3})
