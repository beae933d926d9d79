"""Pods whose on-demand vGPUs have other device nodes after a reboot than the kubelet's record has."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.nodes import unread_node
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.desired.settings import Compat
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import running_node
from tests.agent.ondemand.pods import ON_DEMAND, Pods, one_p100, settled, vgpus
from tests.sim.simulated import Simulated

V4Q, V8Q = "tencent.com/vgpu-85", "tencent.com/vgpu-86"


def rebooted(times: int = 1) -> SimKernel:
    """Return the host with one P100 after reboots, without vGPUs."""
    kernel = one_p100()
    for _ in range(times):
        kernel.reboot_id()
    return kernel


async def test_a_container_does_not_start_with_the_node_that_its_vgpu_had_before_a_reboot(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        first, pod = Pods(node).start("a", V8Q), Pods(node).start("b", V8Q)
        assert [started.answer.device_nodes[-1] for started in (first, pod)] == ["/dev/vfio/200", "/dev/vfio/201"]
        Pods(node).end(first)
        await settled(node)
        recorded, held = node.recorded.containers, node.held
    async with running_node(rebooted(), tmp_path, ON_DEMAND) as node:
        node.recorded.containers, node.held = recorded, held
        await settled(node)
        assert vgpus(node) == pod.vgpus
        other = Pods(node).start("c", V8Q)
        assert other.answer.device_nodes[-1] == "/dev/vfio/201"
        with pytest.raises(AllocationRefusedError) as refused:
            Pods(node).pre_start(pod)
        reason = refused.value.reason
        assert reason.code is ReasonCode.NODES_CHANGED
        assert "/dev/vfio/201" in reason.text
        assert "delete the pod" in reason.text
        Pods(node).end(pod)
        await settled(node)
        assert vgpus(node) == other.vgpus
        again = Pods(node).start("b", V8Q)
        assert vgpus(node) == sorted([*other.vgpus, *again.vgpus])


async def test_a_container_starts_with_the_node_that_its_vgpu_has_again_after_a_reboot(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pod = Pods(node).start("a", V8Q)
        recorded, held = node.recorded.containers, node.held
    async with running_node(rebooted(), tmp_path, ON_DEMAND) as node:
        node.recorded.containers, node.held = recorded, held
        await settled(node)
        Pods(node).pre_start(pod)


async def test_vgpus_get_their_nodes_again_after_each_reboot(tmp_path: Path) -> None:
    """Their ids are random, and the kernel numbers groups in the order of creations."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = [Pods(node).start(name, V4Q) for name in "abcd"]
        recorded, held = node.recorded.containers, node.held
    for times in (1, 2):
        async with running_node(rebooted(times), tmp_path, ON_DEMAND) as node:
            node.recorded.containers, node.held = recorded, held
            await settled(node)
            for pod in pods:
                Pods(node).pre_start(pod)


async def test_the_answer_for_another_vgpu_keeps_no_container_from_its_start(tmp_path: Path) -> None:
    """The kubelet's record may still have a pod that has ended, and whose id the next pod has."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pod = Pods(node).admit("a", V8Q)
        gone = PluginAnswer(
            (unread_node(HostPath("/dev/vfio/77")),),
            (("MDEV_PCI_RESOURCE_X", "bbbbbbbb-0000-4000-8000-000000000001"),),
        )
        key, consumers = next((key, found) for key, found in node.recorded.containers.items() if found)
        others = {replace(consumer, pod_uid=PodUid("uid-of-an-ended-pod"), answer=gone) for consumer in consumers}
        node.recorded.containers[key] = consumers | others
        Pods(node).pre_start(pod)


async def test_a_container_that_has_the_whole_folder_starts_with_any_group(tmp_path: Path) -> None:
    """The setting gives the containers of mediated devices all groups."""
    whole = msgspec.structs.replace(ON_DEMAND, compat=Compat(whole_vfio_folder=True))
    async with running_node(one_p100(), tmp_path, whole) as node:
        await settled(node)
        pod = Pods(node).start("a", V8Q)
        assert pod.answer.device_nodes == ("/dev/vfio",)
        Pods(node).pre_start(pod)


async def test_a_vgpu_of_vendor_vfio_starts_only_with_its_own_nodes(simulated: Simulated, tmp_path: Path) -> None:
    """A VF gets its VFIO node with its vGPU, under the next free number."""
    async with running_node(simulated("4xL40S"), tmp_path, ON_DEMAND) as node:
        await settled(node)
        resource = next(view.name for view in node.view.resources if view.on_demand == "NVIDIA L40S-24Q")
        pod = Pods(node).start("a", resource)
        Pods(node).pre_start(pod)
        nodes = (unread_node(HostPath("/dev/vfio/devices/vfio77")),)
        key, consumers = next((key, found) for key, found in node.recorded.containers.items() if found)
        stale = PluginAnswer(nodes, tuple(pod.answer.env.items()))
        node.recorded.containers[key] = frozenset(replace(consumer, answer=stale) for consumer in consumers)
        with pytest.raises(AllocationRefusedError, match="/dev/vfio/devices/vfio77"):
            Pods(node).pre_start(pod)
