"""A kubelet that admits one pod right after another: GPU and audio function of one group never go to two of them."""

from pathlib import Path

import pytest

from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.settings import Settings
from gpuvirt.sim.kubelet.kubelet import Container
from gpuvirt.sim.kubelet.manager import AdmissionError
from kubeletnode import cluster_on, until

GPU, AUDIO = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A", "nvidia.com/TU106_HIGH_DEFINITION_AUDIO_CONTROLLER"


async def test_pods_that_come_at_once(short_path: Path) -> None:
    settings = Settings(offer=(FunctionKind.GPU, FunctionKind.AUDIO))
    async with cluster_on("4xRTX2060", short_path, settings) as cluster:
        await until(lambda: dict(cluster.kubelet.allocatable()) == {GPU: 4, AUDIO: 4})
        first = await cluster.kubelet.run_pod("vm-a", Container("compute", {GPU: 1}))
        await until(lambda: cluster.kubelet.allocatable()[AUDIO] == 3)  # a list in mid-admission has the record written
        second = await cluster.kubelet.run_pod("vm-b", Container("compute", {AUDIO: 1, GPU: 1}))
        third = await cluster.kubelet.run_pod("vm-c", Container("compute", {AUDIO: 2}))
        groups = [set(pod.device_nodes()) - {"/dev/vfio/vfio"} for pod in (first, second, third)]
        assert [len(nodes) for nodes in groups] == [1, 1, 2], "a GPU and the audio of its card are one group"
        assert len(set().union(*groups)) == 4, "no group is in two pods"
        with pytest.raises(AdmissionError):
            await cluster.kubelet.run_pod("vm-d", Container("compute", {AUDIO: 1}))
        with pytest.raises(AdmissionError):
            await cluster.kubelet.run_pod("vm-e", Container("compute", {GPU: 1}))


async def test_two_containers_of_a_pod_are_two(short_path: Path) -> None:
    """A group opens once, so two containers have no use of it, and the kubelet tells their pods from no other's."""
    settings = Settings(offer=(FunctionKind.GPU, FunctionKind.AUDIO))
    async with cluster_on("4xRTX2060", short_path, settings) as cluster:
        await until(lambda: dict(cluster.kubelet.allocatable()) == {GPU: 4, AUDIO: 4})
        with pytest.raises(AdmissionError, match="GroupHeld"):
            await cluster.kubelet.run_pod("vm-a", Container("one", {GPU: 4}), Container("two", {AUDIO: 1}))
