"""The discoverer on a real API server and by its manifest: labels are set, changed, restored and removed."""

import asyncio
import platform
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lab.cluster.cluster import Cluster
from lab.cluster.images import PREFIX
from lab.cluster.ourimage import NAME

from gpuvirt.apps.discover import DiscoverOptions, Discovery, label_once
from gpuvirt.clock import RealClock
from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.failures import ForbiddenError, NotFoundError, RefusedError
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.resources import NODES
from gpuvirt.facts.ids import NodeName, PciAddress
from gpuvirt.model.offers.discovery import OS_ID_LABEL, OS_VERSION_LABEL, PRESENT_LABEL
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.cluster.apilab import NAMESPACE, NODE, ROOT, ApiLab, until, until_guarded
from tests.cluster.clusterlab import PATIENCE_S, LabNode

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

ACCOUNT = "gpuvirt-discover"
LABELS = (PRESENT_LABEL, OS_ID_LABEL, OS_VERSION_LABEL)
OS_RELEASE = HostPath("/etc/os-release")
EVERY_S = 0.2
NONE = ("", "", "")


@pytest.fixture
def api(lab: Cluster, tmp_path: Path) -> ApiLab:
    api = ApiLab(lab, tmp_path)
    api.apply_roles("discover.yaml")
    account = ("get", "serviceaccount", ACCOUNT, "--namespace", NAMESPACE)
    while lab.kubectl(*account).returncode:
        time.sleep(0.1)  # noqa: TID251  the controller manager's time
    api.token.write_text(api.token_of(ACCOUNT))
    return api


def node_labels(api: ApiLab) -> tuple[str, ...]:
    """The values of the node's three labels."""
    return tuple(api.node_field(".metadata.labels." + label.replace(".", r"\.")) for label in LABELS)


@asynccontextmanager
async def discovering(api: ApiLab, kernel: SimKernel) -> AsyncIterator[Discovery]:
    """Run a discoverer on a simulated host for as long as the context lasts."""
    discovery = Discovery(DiscoverOptions(kernel, api.credentials, NODE, every_s=EVERY_S))
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
        await until(lambda: set(node_labels(api)) == ready and not discovery.missing(), discovery.missing)
        assert discovery.pages()["/readyz"]().status == 200
        api.label(f"{OS_ID_LABEL}=other", f"{PRESENT_LABEL}-")
        await until(lambda: set(node_labels(api)) == ready, discovery.missing)
        kernel.tree.remove(OS_RELEASE)
        kernel.tree.place(OS_RELEASE, constant("ID=rhcos\n"))
        await until(lambda: node_labels(api) == ("true", "rhcos", ""), discovery.missing)
        for address in ("0000:65:00.0", "0000:ca:00.0"):
            kernel.unplug(PciAddress(address))
        await until(lambda: node_labels(api) == ("", "rhcos", ""), discovery.missing)
        kernel.plug_in(PciAddress("0000:65:00.0"))
        await until(lambda: node_labels(api) == ("true", "rhcos", ""), discovery.missing)
    assert node_labels(api) == ("true", "rhcos", ""), "the labels stay while no discoverer runs"


async def test_the_one_shot_command_writes_labels_once(api: ApiLab) -> None:
    client = Client(api.credentials)
    await label_once(client, NODE, {PRESENT_LABEL: "true", OS_VERSION_LABEL: None}, RealClock())
    assert node_labels(api) == ("true", "", "")
    await label_once(client, NODE, {PRESENT_LABEL: None}, RealClock())
    assert node_labels(api) == NONE
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
        assert node_labels(api) == ("true", "ubuntu", "22.04")
        for name, refused in (
            ("other", own),
            (NODE, {"metadata": {"labels": {"a": "b"}}}),
            (NODE, {"metadata": {"labels": {"gpuvirt.io/gpu.workload.state": "success"}}}),
            (NODE, {"metadata": {"labels": {"kubernetes.io/hostname": None}}}),
            (NODE, {"metadata": {"annotations": {"a": "b"}}}),
            (NODE, {"metadata": {"finalizers": ["a.example/b"]}}),
            (NODE, {"spec": {"unschedulable": True}}),
        ):
            with pytest.raises(RefusedError, match="gpuvirt discover may change"):
                await patch(name, refused)
        with pytest.raises(ForbiddenError, match=r"get nodes node01.*verbs: \[get\]"):
            await client.get(NODES, NODE, Node)
        with pytest.raises(ForbiddenError):
            await client.patch(NODES, NODE, {"status": {}}, PatchType.MERGE, Node, part="status")
    finally:
        api.kubectl("delete", "node", "other")


def test_the_discoverer_pod_runs_with_the_rights_of_its_manifest(api: ApiLab, node: LabNode, image: None) -> None:  # noqa: ARG001
    text = (ROOT / "deploy/discover.yaml").read_text().replace("image: gpuvirt:0.1.0", f"image: {PREFIX}/{NAME}")
    manifest = text.replace("imagePullPolicy: IfNotPresent", "imagePullPolicy: Never")
    host = platform.freedesktop_os_release()
    daemon_set = ("--namespace", NAMESPACE, "daemonset", ACCOUNT)
    try:
        api.kubectl("apply", "-f", "-", given=manifest)
        rolled_out = ("rollout", "status", *daemon_set, f"--timeout={PATIENCE_S:g}s")
        assert node.cluster.kubectl(*rolled_out).returncode == 0, logs()
        present = "" if not any(map(is_nvidias, Path("/sys/bus/pci/devices").iterdir())) else "true"
        assert node_labels(api) == (present, host["ID"], host.get("VERSION_ID", "")), logs()
    finally:
        api.kubectl("delete", *daemon_set, "--cascade=foreground", "--wait=true")


def is_nvidias(function: Path) -> bool:
    codes = [int((function / name).read_text(), 16) for name in ("vendor", "class")]
    return codes[0] == 0x10DE and codes[1] >> 8 in {0x300, 0x302}


def logs() -> str:
    """The log of its pod."""
    files = Path("/var/log/pods").glob(f"{NAMESPACE}_{ACCOUNT}-*/discover/*.log")
    return "\n".join(file.read_text()[-3000:] for file in files)
