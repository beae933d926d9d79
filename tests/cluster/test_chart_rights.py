"""The chart's accounts use each of their rights, and request nothing else."""

import json
from collections.abc import Mapping

import pytest
import yaml
from lab.cluster.kubevirtkinds import SOURCES
from lab.cluster.settings import NODE

from gpuvirt.plain import Plain
from tests.cluster.chartlab import IMAGE, NAMESPACE, Install, on_simulated_host
from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import PRESENT, WORKLOAD
from tests.cluster.kubevirtkinds import install
from tests.cluster.rights import Asked, Right, asked_in, outside, rights_in, unused

BIG, SMALL = "nvidia.com/NVIDIA_A10-12Q", "nvidia.com/NVIDIA_A10-4Q"
TESTER = "gpuvirt-test"
NOT_HERE = {
    "nvidia-driver": "NVIDIA's k8s-driver-manager asks, whose image is NVIDIA's",
    "nvidia-gpu-feature-discovery": "NVIDIA's gpu-feature-discovery asks, whose image is NVIDIA's",
}
"""Accounts of programs that can't run here."""
CONTAINERS = {
    PRESENT: "true",
    WORKLOAD: "container",
    "feature.node.kubernetes.io/system-os_release.ID": "ubuntu",
    "feature.node.kubernetes.io/system-os_release.VERSION_ID": "22.04",
}
ROLES = """
- {apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: a},
   rules: [{apiGroups: [""], resources: [nodes, nodes/status], verbs: [list]}, {nonResourceURLs: [/x], verbs: [get]}]}
- {apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: a, namespace: n},
   rules: [{apiGroups: [g], resources: [r], resourceNames: [one, two], verbs: [create, patch]}]}
- {apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: a},
   roleRef: {kind: ClusterRole, name: a}, subjects: [{kind: ServiceAccount, name: x}, {kind: User, name: y}]}
- {apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: a, namespace: n},
   roleRef: {kind: Role, name: a}, subjects: [{kind: ServiceAccount, name: x}]}
- {apiVersion: v1, kind: Role, metadata: {}}
"""
LISTED = """{"user": {"username": "system:serviceaccount:n:x"}, "verb": "list", "responseStatus": {"code": 200},
 "objectRef": {"resource": "nodes"}}"""
MADE = """{"user": {"username": "system:serviceaccount:n:x"}, "verb": "patch", "responseStatus": {"code": 201},
 "objectRef": {"resource": "r", "apiGroup": "g", "namespace": "n", "name": "one"}}"""


def test_granted_rights_are_compared_with_requests() -> None:
    documents: list[Plain] = yaml.safe_load(ROLES)
    granted = rights_in(documents)
    assert {(right.resource, right.verb, right.name, right.namespace) for right in granted} == {
        ("nodes", "list", "", ""),
        ("nodes/status", "list", "", ""),
        *(("r", verb, name, "n") for verb in ("create", "patch") for name in ("one", "two")),
    }
    asked = asked_in([LISTED, MADE])
    assert outside(granted, asked) == []
    left = unused(granted, asked)
    assert [(right.resource, right.name) for right in left] == [("nodes/status", ""), ("r", "two"), ("r", "two")]
    more = [MADE.replace('"n"', '"m"'), LISTED.replace('"nodes"', '"pods"').replace("200", "403")]
    assert len(outside(granted, asked_in(more))) == 3
    assert outside(granted, asked_in([LISTED.replace("200", "403")])) == []
    assert outside(granted, asked_in([LISTED.replace('"resource": "nodes"', "")])) != []


class Walk:
    """Everything that the chart's programs do, once."""

    def __init__(self, user: Install, node: LabNode) -> None:
        self.user = user
        self.node = node
        log = user.cluster.audit_log
        self._begin = log.stat().st_size if log.exists() else 0
        self.granted: frozenset[Right] = frozenset()
        """All that roles have given so far, those too that the controller has made."""

    def until(self, *arguments: str, says: str) -> None:
        """Wait until kubectl prints something."""

        def reported() -> str:
            return self.user.cluster.kubectl(*arguments).stdout

        self.node.until(lambda: says in reported(), lambda: f"{reported()!r} has no {says!r}\n{self.user.pods()}")

    def gone(self, *arguments: str) -> None:
        """Wait until kubectl prints nothing."""

        def reported() -> str:
            return self.user.cluster.kubectl(
                "get", *arguments, "-n", NAMESPACE, "-o", "name", "--ignore-not-found"
            ).stdout

        self.node.until(lambda: reported() == "", reported)

    def install(self, *values: str) -> str:
        """Install the chart, and record the granted rights."""
        release = self.user.installed("sandboxWorkloads.enabled=true", *on_simulated_host(self.node), *values)
        for part in ("manifest", "hooks"):
            text = self.user.must("get", part, release, "-n", NAMESPACE)
            self.granted |= rights_in(yaml.safe_load_all(text))
        return release

    def take_down_made(self) -> None:
        """Record the rights that the controller grants."""
        found = json.loads(self.user.kubectl("get", "roles,rolebindings", "-n", NAMESPACE, "-o", "json"))
        self.granted |= rights_in(found["items"])

    def asked(self) -> frozenset[Asked]:
        """Return the requests of all accounts so far."""
        with self.user.cluster.audit_log.open() as file:
            file.seek(self._begin)
            return asked_in(line for line in file if line.endswith("\n"))

    def test(self, release: str) -> None:
        """Have `helm test` until its pod has asked for all that it may: dcgm's image is nowhere, so it can't pass."""
        own = [right for right in self.granted if right.account == TESTER]
        assert own
        with self.user.begun("test", release, "-n", NAMESPACE):
            self.node.until(lambda: unused(own, self.asked()) == [], lambda: str(unused(own, self.asked())))
        self.user.kubectl("delete", "pod", TESTER, "-n", NAMESPACE, "--now")

    def policy(self, patch: Mapping[str, object]) -> None:
        """Change the policy as an admin."""
        text = json.dumps({"spec": patch})
        self.user.kubectl("patch", "clusterpolicy", "cluster-policy", "--type=merge", "-p", text)

    def scale(self, replicas: int) -> None:
        deployment = "deployment/gpuvirt-controller"
        self.user.kubectl("scale", deployment, "-n", NAMESPACE, f"--replicas={replicas}")
        if replicas:
            self.user.kubectl("rollout", "status", deployment, "-n", NAMESPACE, "--timeout=60s")
        else:
            self.gone("pods", "-l", "app.kubernetes.io/component=controller")

    def permitted(self, kind: str, resource: str) -> None:
        """Wait until KubeVirt's configuration names a resource."""
        self.until("get", kind, "-n", self.node.namespace, "-o", "yaml", says=resource)


def install_kubevirt(node: LabNode) -> None:
    """Have KubeVirt's kinds, and a KubeVirt."""
    install(node, SOURCES[-1], all_kinds=True)
    spec: Mapping[str, object] = {"configuration": {"developerConfiguration": {}}}
    kind = {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt"}
    node.apply({**kind, "metadata": {"name": "kubevirt", "namespace": node.namespace}, "spec": spec})
    version = json.dumps({"status": {"observedKubeVirtVersion": "v1.8.0"}})
    node.kubectl("patch", "kubevirt", "kubevirt", "--subresource=status", "--type=merge", "-p", version)


def first_release(walk: Walk) -> None:
    """Operands are deployed, edited, upgraded, disabled and enabled; HCO owns KubeVirt; the release is removed."""
    user, node = walk.user, walk.node
    release = walk.install("psa.enabled=true", "dcgm.enabled=true", "dcgm.repository=registry.example/none")
    user.kubectl("label", "node", NODE, f"{PRESENT}=true", f"{WORKLOAD}=on-demand")
    walk.until("get", "node", NODE, "-o", r"jsonpath={.metadata.annotations.gpuvirt\.io/vgpu-types}", says="A10")
    user.kubectl("label", "node", NODE, f"{WORKLOAD}=vm-vgpu", "--overwrite")
    node.until_allocatable(BIG, 4)
    walk.permitted("kubevirt", BIG)
    hco = {"apiVersion": "hco.kubevirt.io/v1beta1", "kind": "HyperConverged", "spec": {}}
    node.apply({**hco, "metadata": {"name": "kubevirt-hyperconverged", "namespace": node.namespace}})
    node.kubectl("label", "kubevirt", "kubevirt", "app.kubernetes.io/managed-by=hco-operator")
    user.kubectl("label", "node", NODE, "nvidia.com/vgpu.config=A10-4Q")
    node.until_allocatable(SMALL, 12)
    walk.permitted("hyperconverged", SMALL)
    walk.test(release)
    with user.node_without_kubelet("elsewhere", CONTAINERS):
        operands_come_and_go(walk)
        agents_do_their_part(walk)
        with user.node_without_kubelet("leaves", CONTAINERS):
            walk.until("get", "gpunode", "leaves", "-o", "name", says="leaves")
        walk.gone("gpunode", "leaves")
        walk.take_down_made()
        user.uninstall(release)
    assert SMALL not in node.kubectl("get", "hyperconverged,kubevirt", "-o", "yaml")


def operands_come_and_go(walk: Walk) -> None:
    user, agents = walk.user, ("get", "daemonset", "gpuvirt-node", "-n", NAMESPACE, "-o", "yaml")
    walk.until("get", "services,runtimeclasses", "-n", NAMESPACE, "-o", "name", says="service/nvidia-dcgm")
    bad = '[{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "bad:1"}]'
    user.kubectl("patch", "daemonset", "gpuvirt-node", "-n", NAMESPACE, "--type=json", "-p", bad)
    walk.until(*agents, says=f"image: {IMAGE}")
    before = user.get("pods", ".items[?(@.metadata.labels.app=='gpuvirt-node')].metadata.name")
    assert before
    walk.policy({"sandboxDevicePlugin": {"resources": {"limits": {"memory": "1000Mi", "cpu": "1000m"}}}})
    walk.gone("pod", before)
    walk.policy({"sandboxDevicePlugin": {"enabled": False}, "dcgm": {"enabled": False}})
    user.kubectl("label", "node", "elsewhere", f"{WORKLOAD}=vm-passthrough", "--overwrite")
    walk.gone("daemonsets,services,roles,rolebindings,configmaps,runtimeclasses", "-l", "gpuvirt.io/operand")
    walk.policy({"sandboxDevicePlugin": {"enabled": True}, "dcgm": {"enabled": True}})
    user.kubectl("label", "node", "elsewhere", f"{WORKLOAD}=container", "--overwrite")
    walk.until("get", "services,runtimeclasses", "-n", NAMESPACE, "-o", "name", says="service/nvidia-dcgm")
    walk.until(*agents, says="numberReady: 1")


def agents_do_their_part(walk: Walk) -> None:
    """Requests of agents while the controller is stopped, and of a container node."""
    user = walk.user
    walk.scale(0)
    user.kubectl("delete", "gpunode", NODE)
    walk.until("get", "gpunode", NODE, "-o", "jsonpath={.status.totals.vgpus}", says="12")
    walk.scale(1)
    asks = {"name": "asks", "image": IMAGE, "imagePullPolicy": "Never"}
    command = ["validate", "plugin", f"--node-name={NODE}", "--validations-dir=/tmp"]
    spec = {"serviceAccountName": "nvidia-operator-validator", "restartPolicy": "Never"}
    metadata = {"name": "validator", "namespace": NAMESPACE}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    user.apply({**pod, "spec": {**spec, "containers": [{**asks, "args": command}]}})
    walk.until("get", "pod", "validator", "-n", NAMESPACE, "-o", "jsonpath={.status.phase}", says="Failed")
    assert "has no allocatable nvidia.com/gpu" in user.pods()
    user.kubectl("delete", "pod", "validator", "-n", NAMESPACE, "--wait=false")


def second_release(walk: Walk) -> None:
    """Install soon after an uninstall, and uninstall without a leader, with all kinds."""
    user, node = walk.user, walk.node
    node.kubectl("delete", "hyperconverged", "--all")
    node.kubectl("label", "kubevirt", "kubevirt", "app.kubernetes.io/managed-by-")
    release = walk.install("operator.cleanupCRD=true")
    walk.permitted("kubevirt", SMALL)
    walk.take_down_made()
    walk.scale(0)
    user.kubectl("delete", "lease", "gpuvirt-controller", "-n", NAMESPACE)
    user.uninstall(release)
    assert SMALL not in node.kubectl("get", "kubevirt", "-o", "yaml")
    assert user.cluster.kubectl("get", "crd", "gpunodes.gpuvirt.io").returncode != 0


@pytest.mark.ring("cluster")
@pytest.mark.ring("helm")
@pytest.mark.xdist_group("cluster")
def test_every_granted_right_is_used_and_no_other_right_is_needed(user: Install, node: LabNode) -> None:
    walk = Walk(user, node)
    install_kubevirt(node)
    with user.simulated_host(node, "2xA10-sriov"):
        first_release(walk)
        second_release(walk)
    asked = walk.asked()
    assert outside(walk.granted, asked) == []
    idle = unused(walk.granted, asked)
    assert [right for right in idle if right.account not in NOT_HERE] == []
    assert {right.account for right in idle} == NOT_HERE.keys(), (
        "an account of the exceptions uses all its rights: remove it from them"
    )
