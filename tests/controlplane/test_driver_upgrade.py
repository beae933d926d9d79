"""NVIDIA's driver manager pauses a label before it unloads a driver: real controllers then end the MPS daemon's pod."""

import json
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster
from lab.cluster.settings import NODE
from msgspec.structs import replace

from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.operands.rendering import render
from gpuvirt.kube.kinds.workloads import DaemonSet, encoded
from gpuvirt.kube.labels import CLIENT, ENFORCEMENT_LABEL, NODE_LABEL, PAUSED_FOR_DRIVER, deploy_label
from tests.cluster.apilab import ApiLab, until
from tests.controller.operands.policies import ALL_KINDS, policy_of

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

SHARES = {"sandboxDevicePlugin": {"shares": {"mps": {"enabled": True}}}, "sandboxWorkloads": {"enabled": True}}
LABEL = deploy_label(CLIENT)
PODS = ("get", "pods", "-l", f"app={OperandName.MPS}", "-o", "json")


class Node:
    """A node that shares its GPUs by MPS."""

    def __init__(self, api: ApiLab) -> None:
        self._api = api

    def label(self, **labels: str) -> None:
        pairs = (f"{key}={value}" for key, value in labels.items())
        self._api.kubectl("label", "node", NODE, "--overwrite", *pairs)

    @property
    def pods(self) -> list[tuple[str, bool]]:
        """The pods of the MPS daemon there, each with whether it is to end."""
        items = json.loads(self._api.kubectl(*PODS))["items"]
        named = [(pod["metadata"], pod["spec"].get("nodeName")) for pod in items]
        return [(pod["name"], "deletionTimestamp" in pod) for pod, node in named if node == NODE]


async def test_the_mps_daemon_is_stopped_while_the_label_of_gpu_clients_is_paused(
    lab: PlayedCluster, tmp_path: Path
) -> None:
    api = ApiLab(lab, tmp_path)
    inputs = replace(ALL_KINDS, settings=replace(ALL_KINDS.settings, namespace="default"))
    rendered = render(policy_of(SHARES), inputs).manifests
    (daemon,) = (
        found for found in rendered if isinstance(found, DaemonSet) and found.metadata.name == OperandName.MPS.value
    )
    api.kubectl("create", "serviceaccount", "gpuvirt-node")
    api.kubectl("apply", "--server-side", "-f", "-", given=encoded(daemon).decode())
    node = Node(api)
    node.label(**{NODE_LABEL: "true", "kubernetes.io/os": "linux", ENFORCEMENT_LABEL: "mps", LABEL: "true"})
    await until(lambda: [ends for _, ends in node.pods] == [False], lambda: node.pods)
    node.label(**{LABEL: PAUSED_FOR_DRIVER})
    await until(lambda: [ends for _, ends in node.pods] == [True], lambda: node.pods)
    ((name, _),) = node.pods
    # A kubelet removes the pod once the daemon has ended, which is after its last client.
    api.kubectl("delete", "pod", name, "--force")
    await until(lambda: node.pods == [], lambda: node.pods)
    node.label(**{LABEL: "true"})
    await until(lambda: [ends for _, ends in node.pods] == [False], lambda: node.pods)
