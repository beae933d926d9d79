"""The plugin of units and a simulated kubelet: a container has the GPU of its annotation, and never too many units."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.choice import NodeSharing
from gpuvirt_sim.kubelet.kubelet import Pod
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.kubelet.starting import Started, StartError
from tests.agent.kubelet.kubeletnode import CLOCK, until
from tests.agent.shares.sharednode import (
    APP,
    BOTH,
    GPUS,
    INIT,
    MINORS,
    SIDECAR,
    VGPU,
    nvidia_spec,
    shared_node,
    spec_env,
)

A, B = GPUS


async def test_a_container_sees_the_gpu_of_the_annotation_and_no_other(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu="GPU-b")
        found = await node.start(pod, own={"NVIDIA_VISIBLE_DEVICES": "all"})
        assert found.env == {"NVIDIA_VISIBLE_DEVICES": "void", "GPUVIRT_GPUS": "GPU-b", "GPUVIRT_UNITS": "300"}
        assert found.device_nodes == ["/dev/nvidia1", "/dev/nvidiactl"]
        assert node.used(B) == 300
        assert pod.env("c0") == {"NVIDIA_VISIBLE_DEVICES": "void"}, "also where the runtime knows no CDI"


async def test_all_units_are_listed_with_short_ids_and_without_numa_nodes(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        resource = node.kubelet.manager.resources[VGPU]
        assert len(resource.healthy) == 2000
        assert max(map(len, resource.healthy)) <= 5
        assert set(resource.numa_nodes.values()) == {None}


async def test_two_equal_pods_at_once_have_the_gpus_of_their_annotations(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pods = [(await node.admit(f"p{number}", 400, gpu=GPUS[number % 2]), GPUS[number % 2]) for number in range(4)]
        started = await asyncio.gather(*(node.start(pod) for pod, _ in reversed(pods)))
        assert [found.env["GPUVIRT_GPUS"] for found in started] == [gpu for _, gpu in reversed(pods)]
        assert node.used(A) == node.used(B) == 800
        assert len(node.specs) == 4


async def test_a_pod_without_annotation_gets_the_fullest_gpu_with_room(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await node.run("p", 300, "GPU-b")
        assert await node.run("q", 700) == "GPU-b"
        assert await node.run("r", 700) == "GPU-a"


async def test_a_full_gpu_is_replaced_by_another_and_units_never_go_twice(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        assert await node.run("p", 800, "GPU-b") == "GPU-b"
        assert await node.run("q", 300, "GPU-b") == "GPU-a", "whatever the scheduler says"
        with pytest.raises(AdmissionError, match=r"NoRoom: nvidia\.com/vgpu requests 701 units"):
            await node.admit("r", 701)


async def test_pods_that_were_admitted_at_once_wait_for_room(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pods = [await node.admit(f"p{number}", 600, gpu="GPU-a") for number in range(3)]
        assert (await node.start(pods[0])).env["GPUVIRT_GPUS"] == "GPU-a"
        assert (await node.start(pods[1])).env["GPUVIRT_GPUS"] == "GPU-b"
        with pytest.raises(StartError, match="NoRoom: pod default/p2 requests 600 units, which no GPU"):
            await node.start(pods[2])
        node.end(pods[0])
        await until(lambda: node.used(A) == 0)
        assert (await node.start(pods[2])).env["GPUVIRT_GPUS"] == "GPU-a"


async def test_init_containers_and_apps_share_ids_and_take_turns(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit_all("p", [("first", INIT, 600), ("main", APP, 600), ("side", APP, 300)], "GPU-a")
        ids = [set(held.devices) for held in pod.held]
        assert ids[0] == ids[1], "the kubelet does not say which of both starts"
        for container, units in (("first", "600"), ("main", "600"), ("side", "300")):
            found = await node.start(pod, container)
            assert (found.env["GPUVIRT_GPUS"], found.env["GPUVIRT_UNITS"]) == ("GPU-a", units)
        assert node.used(A) == 900
        assert len(node.specs) == 3


async def test_a_sidecar_runs_beside_the_apps(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit_all("p", [("side", SIDECAR, 400), ("init", INIT, 500), ("main", APP, 600)], "GPU-a")
        for container in ("side", "init", "main"):
            assert (await node.start(pod, container)).env["GPUVIRT_GPUS"] == "GPU-a"
        assert node.used(A) == 1000


async def test_a_container_that_restarts_keeps_its_gpu(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu="GPU-b")
        before = await node.start(pod)
        for path in node.specs:
            path.unlink()  # /run is empty after a reboot
        node.share(replace(BOTH, capacity={A: Units(1000)}))
        assert await node.start(pod) == before
        assert node.used(B) == 300


async def test_after_restarts_of_agent_and_kubelet_the_usage_is_the_same(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu="GPU-b")
        before = await node.start(pod)
        usage = node.records
        await node.stop_agent()
        await node.start_agent(api_server=False)
        assert node.records == usage
        assert await node.start(pod) == before, "a container that has had a GPU starts without the API server"
        await node.kubelet.restart()
        await until(lambda: node.kubelet.allocatable().get(VGPU) == 2000)
        assert await node.start(pod) == before


async def test_without_the_api_server_no_new_container_starts(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, report=False)
        with pytest.raises(StartError, match="ApiServerAway: container c0 can't start"):
            await node.start(pod)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(node.start(pod))
            node.bind("p", pod.uid, [("c0", APP, 300)], "GPU-b")
        assert starting.result().env["GPUVIRT_GPUS"] == "GPU-b", "it waits for the pod"


async def test_a_kubelet_whose_record_is_unknown_gets_no_gpu(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu="GPU-b")
        node.kubelet.paths.checkpoint.write_bytes(b"{")
        with pytest.raises(StartError, match=r"UnknownDevice: nvidia\.com/vgpu can't be assigned"):
            await node.start(pod)
        assert node.specs == []


async def test_a_record_with_other_units_than_the_pod_requests_is_refused(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, report=False)
        node.bind("p", pod.uid, [("c0", APP, 200)], "GPU-b")
        with pytest.raises(StartError, match="has 300 units in the kubelet's record, but requests 200"):
            await node.start(pod)


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_pod_that_has_ended_leaves_nothing_behind(short_path: Path, deleted: bool) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 1000, gpu="GPU-b")
        await node.start(pod)
        node.end(pod, deleted=deleted)
        await until(lambda: not node.specs and not node.records.pods)
        assert await node.run("q", 1000, "GPU-b") == "GPU-b"


async def test_what_ended_while_the_agent_was_away_is_removed(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pods = [await node.admit(f"p{number}", 300) for number in range(2)]
        for pod in pods:
            await node.start(pod)
        (short_path / "cdi/.gpuvirt.io-share-1.json.new").write_text("half a file")
        await node.stop_agent()
        node.end(pods[0])
        await node.start_agent()
        await until(lambda: len(node.specs) == 1 and len(node.records.pods) == 1)
        assert list(node.records.pods) == [pods[1].uid]
        assert (short_path / "cdi/nvidia.yaml").exists()


async def test_damaged_records_are_read_again_from_the_specs(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit_all("p", [("first", INIT, 100), ("main", APP, 600)], "GPU-b")
        await node.start(pod, "first")
        await node.start(pod, "main")
        before = node.records
        await node.stop_agent()
        (short_path / "shares.json").write_bytes(b"damaged")
        await node.start_agent()
        assert node.records == before
        assert node.agent.store.problem is not None
        assert (short_path / "shares.json.damaged").read_bytes() == b"damaged"


async def test_an_unhealthy_gpu_takes_its_free_units_away(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pods = [await node.admit(f"p{number}", 400, gpu=gpu) for number, gpu in enumerate(GPUS)]
        for pod in pods:
            await node.start(pod)
        node.share(NodeSharing({A: Units(1000)}, minors=MINORS))
        await until(lambda: node.kubelet.allocatable()[VGPU] == 1400)
        held = {device for pod in pods for container in pod.held for device in container.devices}
        assert held <= node.kubelet.manager.resources[VGPU].healthy, "what containers have stays listed"
        with pytest.raises(AdmissionError, match="Requested: 601, Available: 600"):
            await node.admit("q", 601)
        node.end(pods[1])
        await until(lambda: node.kubelet.allocatable()[VGPU] == 1000)
        node.share(BOTH)
        await until(lambda: node.kubelet.allocatable()[VGPU] == 2000)


async def test_gpus_that_are_not_shared_any_more_offer_nothing(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300)
        await node.start(pod)
        node.share(NodeSharing({}))
        await until(lambda: node.kubelet.allocatable()[VGPU] == 300)
        node.end(pod)
        await until(lambda: node.kubelet.allocatable()[VGPU] == 0)


async def test_a_gpu_that_nvidias_specs_lack_is_not_offered(short_path: Path) -> None:
    async with shared_node(short_path, {A: 0}) as node:
        (reason,) = node.agent.shares.state.get().withheld
        assert reason.text.startswith("CdiSpecMissing: GPU-b has no CDI device of NVIDIA")
        assert "fix: nvidia-ctk cdi generate --output" in reason.text
        assert await node.run("p", 300, "GPU-b") == "GPU-a"
        (short_path / "etc-cdi").mkdir()
        (short_path / "etc-cdi/nvidia.json").write_text(nvidia_spec({B: 1}))
        await until(lambda: node.kubelet.allocatable()[VGPU] == 2000)
        found = await node.start(await node.admit("q", 300, gpu="GPU-b"))
        assert found.device_nodes == ["/dev/nvidia1", "/dev/nvidiactl"]


async def test_a_container_whose_gpu_has_no_cdi_device_any_more_waits_for_it(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu="GPU-b")
        before = await node.start(pod)
        (short_path / "cdi/nvidia.yaml").unlink()
        with pytest.raises(StartError, match="CdiSpecMissing: GPU-b"):
            await node.start(pod)
        (short_path / "cdi/nvidia.yaml").write_text(nvidia_spec(MINORS))
        assert await node.start(pod) == before


async def test_a_runtime_without_cdi_is_offered_nothing(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        node.agent.shares.observe_node("containerd://1.7.24")
        await until(lambda: node.kubelet.allocatable()[VGPU] == 0)
        (reason,) = node.agent.shares.state.get().withheld
        assert "enable_cdi" in reason.text


async def test_whole_gpus_and_requests_that_no_gpu_can_serve(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        with pytest.raises(AdmissionError, match="requests 1500 units, which are neither part of one GPU nor whole"):
            await node.admit("p", 1500)
        pod = await node.admit("q", 2000, report=False)
        node.bind("q", pod.uid, [("c0", APP, 2000)], None)
        found = await node.start(pod)
        assert (found.env["GPUVIRT_GPUS"], found.env["GPUVIRT_UNITS"]) == ("GPU-a,GPU-b", "2000")
        assert found.device_nodes == ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]


async def test_allocate_waits_a_moment_for_a_pod_that_has_just_ended(short_path: Path) -> None:
    """The kubelet frees units before the API server reports it; a pod that is refused fails for good."""
    async with shared_node(short_path) as node:
        pods = [await node.admit(f"p{number}", 1000) for number in range(2)]
        for pod in pods:
            await node.start(pod)
        node.end_processes(pods[0])
        node.kubelet.end_pod("p0")
        async with asyncio.TaskGroup() as group:
            admitting = group.create_task(node.admit("q", 1000, report=False))
            await CLOCK.sleep(0.02)
            del node.api[next(uid for uid in node.api if uid == pods[0].uid)]
            node.pods.observe(dict(node.api))
        assert admitting.result().held


async def test_every_allocation_has_its_own_device(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        names = [name for number in range(5) for name in devices(await node.admit(f"p{number}", 100))]
        assert len(set(names)) == 5
        assert all(name.startswith("gpuvirt.io/share=") for name in names)


async def test_the_same_units_in_two_pods_give_each_its_own_gpu(short_path: Path) -> None:
    """Kubelets may lose a reservation, and then give the same ids to two pods: usage is kept by pod and container."""
    async with shared_node(short_path) as node:
        first = await node.admit("p", 600, gpu="GPU-a")
        lost, node.kubelet.manager.held = node.kubelet.manager.held, []
        second = await node.admit("q", 600, gpu="GPU-a")
        assert set(first.held[0].devices) == set(second.held[0].devices)
        node.kubelet.manager.held = [*lost, *node.kubelet.manager.held]
        await node.admit("r", 1)  # the kubelet writes its checkpoint
        found: list[Started] = [await node.start(pod) for pod in (second, first)]
        assert sorted(response.env["GPUVIRT_GPUS"] for response in found) == ["GPU-a", "GPU-b"]
        assert node.used(A) == node.used(B) == 600


async def test_specs_say_the_units(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await node.run("p", 250)
        (path,) = node.specs
        assert spec_env(path) == ["NVIDIA_VISIBLE_DEVICES=void", "GPUVIRT_GPUS=GPU-a", "GPUVIRT_UNITS=250"]
        assert path.stat().st_mode & 0o777 == 0o644


def devices(pod: Pod) -> list[str]:
    return [device.name for device in pod.answer("c0").cdi_devices]
