"""NVIDIA's driver manager pauses a label before it unloads a driver: real controllers then end the MPS daemon's pod."""

import json
from pathlib import Path

import pytest
from lab.cluster.settings import NODE
from msgspec.structs import replace

from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.operands.rendering import render
from gpuvirt.kube.kinds.workloads import DaemonSet, encoded
from gpuvirt.kube.labels import CLIENT, ENFORCEMENT_LABEL, NODE_LABEL, PAUSED_FOR_DRIVER, deploy_label
from tests.cluster.apilab import ApiLab, until
from tests.cluster.labnamespace import LabNamespace
from tests.controller.operands.policies import ALL_KINDS, policy_of

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

SHARES = {"sandboxDevicePlugin": {"shares": {"mps": {"enabled": True}}}, "sandboxWorkloads": {"enabled": True}}
LABEL = deploy_label(CLIENT)
PODS = ("get", "pods", "-l", f"app={OperandName.MPS.value}", "-o", "json")


class SharingNode:
    """A node that shares its GPUs by MPS."""

    def __init__(self, api: ApiLab, namespace: str) -> None:
        self._api, self._namespace = api, namespace

    def label(self, **labels: str) -> None:
        pairs = (f"{key}={value}" for key, value in labels.items())
        self._api.kubectl("label", "node", NODE, "--overwrite", *pairs)

    @property
    def state(self) -> str:
        """The description of the DaemonSet and of its pods by kubectl."""
        return self._api.kubectl("describe", "daemonsets,pods", "-n", self._namespace)

    @property
    def pods(self) -> list[tuple[str, bool]]:
        """The pods of the MPS daemon there, each with whether it is to end."""
        items = json.loads(self._api.kubectl(*PODS, "-n", self._namespace))["items"]
        named = [(pod["metadata"], pod["spec"].get("nodeName")) for pod in items]
        return [(pod["name"], "deletionTimestamp" in pod) for pod, node in named if node == NODE]


async def test_the_mps_daemon_is_stopped_while_the_label_of_gpu_clients_is_paused(
    node: LabNamespace, tmp_path: Path
) -> None:
    api, namespace = ApiLab(node.cluster, tmp_path), node.namespace
    inputs = replace(ALL_KINDS, settings=replace(ALL_KINDS.settings, namespace=namespace))
    rendered = render(policy_of(SHARES), inputs).manifests
    (daemon,) = (
        found for found in rendered if isinstance(found, DaemonSet) and found.metadata.name == OperandName.MPS.value
    )
    api.kubectl("create", "serviceaccount", "gpuvirt-node", "-n", namespace)
    api.kubectl("apply", "--server-side", "-f", "-", given=encoded(daemon).decode())
    sharing = SharingNode(api, namespace)
    sharing.label(**{NODE_LABEL: "true", "kubernetes.io/os": "linux", ENFORCEMENT_LABEL: "mps", LABEL: "true"})
    await until(lambda: [ends for _, ends in sharing.pods] == [False], lambda: sharing.state)
    sharing.label(**{LABEL: PAUSED_FOR_DRIVER})
    await until(lambda: all(ends for _, ends in sharing.pods), lambda: sharing.state)
    # A kubelet would remove the pod once the daemon has ended, which is after its last client.
    for name, _ in sharing.pods:
        api.kubectl("delete", "pod", name, "-n", namespace, "--force", "--ignore-not-found")
    await until(lambda: not sharing.pods, lambda: sharing.state)
    sharing.label(**{LABEL: "true"})
    await until(lambda: [ends for _, ends in sharing.pods] == [False], lambda: sharing.state)
