"""The kubelet's two sources of allocations: the same test for the real and the simulated kubelet."""

import asyncio
from pathlib import Path

import pytest
from lab.cluster.cluster import KUBELET_ROOT

from gpuvirt.agent.kubelet import checkpoint
from gpuvirt.agent.kubelet.podresources import PodResources
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.kubelet.checkpoint import checksum
from gpuvirt_sim.kubelet.containers import Container
from tests.agent.kubelet.kubeletnode import cluster_on, until, until_so
from tests.cluster.clusterlab import LabNode, PodRequest

A10 = ResourceName("nvidia.com/GA102GL_A10")
BOTH = [DeviceId("0000:65:00.0"), DeviceId("0000:ca:00.0")]


async def holds(paths: KubeletPaths, pod: str, uid: str) -> None:
    """Both sources when a pod has two devices, one on each NUMA node."""
    content = checkpoint.parse(paths.checkpoint.read_bytes())
    assert content.checksum == checksum(content.data)
    # The kubelet stores sets: the order of its devices differs each time.
    assert {name: sorted(ids or ()) for name, ids in (content.data.registered_devices or {}).items()} == {A10: BOTH}
    (entry,) = content.data.pod_device_entries or []
    assert (entry.pod_uid, entry.container_name, entry.resource_name) == (uid, "compute", A10)
    assert entry.device_ids == {"0": [BOTH[0]], "1": [BOTH[1]]}
    answer = pb.ContainerAllocateResponse.FromString(entry.alloc_resp or b"")
    assert list(answer.envs) == ["PCI_RESOURCE_NVIDIA_COM_GA102GL_A10"]
    asked = answer.envs["PCI_RESOURCE_NVIDIA_COM_GA102GL_A10"].split(",")
    assert sorted(asked) == BOTH
    groups = [{BOTH[0]: "/dev/vfio/12", BOTH[1]: "/dev/vfio/22"}[DeviceId(device)] for device in asked]
    assert [node.host_path for node in answer.devices] == ["/dev/vfio/vfio", *groups]
    api = PodResources(paths.pod_resources_socket, RealClock())
    reported, counted = await api.consumers(), await api.allocatable()
    await api.close()
    assert {key for key in counted if key[0] == A10} == {(A10, device) for device in BOTH}, "allocated or free"
    names = {key: (consumer.pod, consumer.container) for key, consumer in reported.items()}
    assert names == {(A10, device): (pod, "compute") for device in BOTH}


async def ended(paths: KubeletPaths, *, rewritten: bool = True) -> bool:
    """Both sources after the pod ended and a device list was sent again.

    A kubelet whose record is not `rewritten` has entries of pods without a folder, which have ended.
    """
    api = PodResources(paths.pod_resources_socket, RealClock())
    reported = await api.consumers()
    await api.close()
    entries = checkpoint.parse(paths.checkpoint.read_bytes()).data.pod_device_entries or []
    return not reported and not [entry for entry in entries if rewritten or (paths.pods / entry.pod_uid).exists()]


async def test_allocations_in_the_simulated_kubelets_checkpoint_and_pod_resources(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        await until(lambda: node.kubelet.allocatable() == {A10: 2})
        pod = await node.kubelet.run_pod("vm", Container("compute", {A10: 2}))
        await holds(node.kubelet.paths, "vm", pod.uid)
        node.kubelet.end_pod("vm")  # the pod's folder goes at once, so that the agent asks for no new record
        await until_so(lambda: ended(node.kubelet.paths, rewritten=False))


@pytest.mark.ring("cluster")
@pytest.mark.xdist_group("cluster")
def test_allocations_in_the_real_kubelets_checkpoint_and_pod_resources(node: LabNode) -> None:
    paths = KubeletPaths(KUBELET_ROOT)
    with node.simulated_host("2xA10"), node.agent():
        node.until_allocatable(A10, 2)
        node.start("vm", PodRequest({A10: 2}, "sleep 1000"))
        node.until(lambda: node.status("vm").phase == "Running", lambda: str(node.status("vm")))
        uid = node.kubectl("get", "pod", "vm", "-o", "jsonpath={.metadata.uid}")
        asyncio.run(holds(paths, "vm", uid))
        node.delete("vm")
        asyncio.run(until_so(lambda: ended(paths)))
