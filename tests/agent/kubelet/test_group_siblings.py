"""A kubelet admits pods in quick succession: the GPU and the audio function of a group never go to two pods."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from tests.agent.kubelet.kubeletnode import CLOCK, FAST, agent_on, options_for, until

GPU, AUDIO = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A", "nvidia.com/TU106_HIGH_DEFINITION_AUDIO_CONTROLLER"


QUIET = replace(FAST, decide_s=600.0, allocations_s=600.0, allocations_after_allocation_s=600.0)
"""The agent sends no list during admissions: a list would make the kubelet write its checkpoint."""


@asynccontextmanager
async def quiet_kubelet(folder: Path) -> AsyncIterator[SimKubelet]:
    """Run a kubelet and an agent that offers GPUs and their audio functions."""
    settings = Settings(offer=(FunctionKind.GPU, FunctionKind.AUDIO))
    options = replace(options_for(build_host(load_host("4xRTX2060")), folder, settings), intervals=QUIET)
    async with running(folder, CLOCK) as kubelet, agent_on(options):
        await until(lambda: dict(kubelet.allocatable()) == {GPU: 4, AUDIO: 4})
        yield kubelet


async def test_pods_in_quick_succession_never_share_a_group(short_path: Path) -> None:
    async with quiet_kubelet(short_path) as kubelet:
        first = await kubelet.run_pod("vm-a", Container("compute", {GPU: 1}))
        second = await kubelet.run_pod("vm-b", Container("compute", {AUDIO: 1, GPU: 1}))
        third = await kubelet.run_pod("vm-c", Container("compute", {AUDIO: 2}))
        groups = [set(pod.device_nodes()) - {"/dev/vfio/vfio"} for pod in (first, second, third)]
        assert [len(nodes) for nodes in groups] == [1, 1, 2], "a GPU and the audio of its card are one group"
        assert len(set().union(*groups)) == 4, "no group is in two pods"
        with pytest.raises(AdmissionError):
            await kubelet.run_pod("vm-d", Container("compute", {AUDIO: 1}))
        with pytest.raises(AdmissionError):
            await kubelet.run_pod("vm-e", Container("compute", {GPU: 1}))


async def test_two_containers_of_a_pod_do_not_share_a_group(short_path: Path) -> None:
    """Only one process can open a group, and Allocate doesn't show whether two containers belong to the same pod."""
    async with quiet_kubelet(short_path) as kubelet:
        with pytest.raises(AdmissionError, match="GroupAllocated"):
            await kubelet.run_pod("vm-a", Container("one", {GPU: 4}), Container("two", {AUDIO: 1}))
