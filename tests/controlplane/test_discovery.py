"""The discoverer on a real API server: labels are set, changed, restored and removed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster

from gpuvirt.agent.discoverprocess import DiscoverOptions, DiscoverProcess, label_once
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import NodeName, PciAddress
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiRefusedError, ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from gpuvirt.model.offers.discovery import OS_ID_LABEL, OS_VERSION_LABEL, PRESENT_LABEL
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.cluster.apilab import NODE, ApiLab, discoverers_api, until, until_guarded

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

OS_RELEASE = HostPath("/etc/os-release")
EVERY_S = 0.2
NONE = ("", "", "")


@pytest.fixture
def api(lab: PlayedCluster, tmp_path: Path) -> ApiLab:
    return discoverers_api(lab, tmp_path)


@asynccontextmanager
async def discovering(api: ApiLab, kernel: SimKernel) -> AsyncIterator[DiscoverProcess]:
    """Run a discoverer on a simulated host for as long as the context lasts."""
    discovery = DiscoverProcess(DiscoverOptions(kernel, api.credentials, NODE, every_s=EVERY_S))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(discovery.run())
        try:
            yield discovery
        finally:
            running.cancel()
    # asyncio closes a TLS connection that is cancelled at its start only after the handshake.
    await RealClock().sleep(0.1)


async def test_discovery_labels_are_set_updated_restored_and_removed(api: ApiLab) -> None:
    kernel = build_host(load_host("2xA10"))
    kernel.tree.remove(OS_RELEASE)
    kernel.tree.place(OS_RELEASE, constant('ID=ubuntu\nVERSION_ID="22.04"\n'))
    ready = {"true", "ubuntu", "22.04"}
    async with discovering(api, kernel) as discovery:
        await until(lambda: set(api.discovered()) == ready and not discovery.missing(), discovery.missing)
        assert discovery.pages()["/readyz"]().status == 200
        api.label(f"{OS_ID_LABEL}=other", f"{PRESENT_LABEL}-")
        await until(lambda: set(api.discovered()) == ready, discovery.missing)
        kernel.tree.remove(OS_RELEASE)
        kernel.tree.place(OS_RELEASE, constant("ID=rhcos\n"))
        await until(lambda: api.discovered() == ("true", "rhcos", ""), discovery.missing)
        for address in ("0000:65:00.0", "0000:ca:00.0"):
            kernel.unplug(PciAddress(address))
        await until(lambda: api.discovered() == ("", "rhcos", ""), discovery.missing)
        kernel.plug_in(PciAddress("0000:65:00.0"))
        await until(lambda: api.discovered() == ("true", "rhcos", ""), discovery.missing)
    assert api.discovered() == ("true", "rhcos", ""), "the labels stay while no discoverer runs"


async def test_the_one_shot_command_writes_labels_once(api: ApiLab) -> None:
    client = Client(api.credentials)
    await label_once(client, NODE, {PRESENT_LABEL: "true", OS_VERSION_LABEL: None}, RealClock())
    assert api.discovered() == ("true", "", "")
    await label_once(client, NODE, {PRESENT_LABEL: None}, RealClock())
    assert api.discovered() == NONE
    with pytest.raises(NotFoundError, match="the API server has no node other"):
        await label_once(client, NodeName("other"), {PRESENT_LABEL: "true"}, RealClock())


async def test_a_discoverer_may_change_only_its_labels_on_its_own_node(api: ApiLab) -> None:
    client = Client(api.credentials)
    api.kubectl("create", "-f", "-", given='{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}}')

    async def patch(name: str, patch: object) -> Node:
        return await client.patch(NODES, name, patch, PatchType.MERGE, Node)

    own = {"metadata": {"labels": {PRESENT_LABEL: "true", OS_ID_LABEL: "ubuntu", OS_VERSION_LABEL: "22.04"}}}
    try:
        await until_guarded(client)
        await patch(NODE, own)
        assert api.discovered() == ("true", "ubuntu", "22.04")
        for name, refused in (
            ("other", own),
            (NODE, {"metadata": {"labels": {"a": "b"}}}),
            (NODE, {"metadata": {"labels": {"gpuvirt.io/gpu.workload.state": "success"}}}),
            (NODE, {"metadata": {"labels": {"kubernetes.io/hostname": None}}}),
            (NODE, {"metadata": {"annotations": {"a": "b"}}}),
            (NODE, {"metadata": {"finalizers": ["a.example/b"]}}),
            (NODE, {"spec": {"unschedulable": True}}),
        ):
            with pytest.raises(ApiRefusedError, match="gpuvirt discover may change"):
                await patch(name, refused)
        with pytest.raises(ForbiddenError, match=r"get nodes node01.*verbs: \[get\]"):
            await client.get(NODES, NODE, Node)
        with pytest.raises(ForbiddenError):
            await client.patch(NODES, NODE, {"status": {}}, PatchType.MERGE, Node, part="status")
    finally:
        api.kubectl("delete", "node", "other")
