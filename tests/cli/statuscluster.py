"""The cluster of an installation, for commands."""

from gpuvirt.kube.labels import DEPLOY, SETS
from gpuvirt.model.desired.workload import Workload
from tests.kube.scriptedapi import FORBIDDEN, NOT_FOUND, Call, Reply

NAMESPACE = "gpu-operator"

POLICIES = "/apis/nvidia.com/v1/clusterpolicies"

NODE = {
    "metadata": {
        "name": "node01",
        "labels": {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.workload.config": "vm-passthrough"},
    }
}

READY = {"type": "Ready", "status": "True", "reason": "Reconciled", "lastTransitionTime": "2026-01-01T00:00:00Z"}

AGENT = {
    "metadata": {"name": "gpuvirt-node-a", "namespace": NAMESPACE, "labels": {"app": "gpuvirt-node"}},
    "spec": {"nodeName": "node01"},
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}
VGPU_MANAGER = {
    "metadata": {
        "name": "vgpu-manager-b",
        "namespace": NAMESPACE,
        "uid": "b",
        "labels": {"app": "nvidia-vgpu-manager-daemonset"},
    },
    "spec": {"nodeName": "node01"},
    "status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
}
PULLED = {
    "metadata": {"name": "vgpu-manager-b.2"},
    "involvedObject": {"uid": "b"},
    "type": "Normal",
    "reason": "Pulled",
    "message": "Successfully pulled image",
    "lastTimestamp": "2026-01-01T00:01:00Z",
}
NO_SECRET = {
    "metadata": {"name": "vgpu-manager-b.1"},
    "involvedObject": {"uid": "b"},
    "type": "Warning",
    "reason": "FailedMount",
    "message": 'secret "licence" not found',
    "lastTimestamp": "2026-01-01T00:00:00Z",
}
NO_DNS = {**NO_SECRET, "reason": "MissingClusterDNS", "lastTimestamp": "2026-01-01T00:02:00Z"}


GPU_NODES = "/apis/gpuvirt.io/v1alpha1/gpunodes"


def sharing_node(workload: str) -> object:
    """Return a node whose operands share its GPUs, with the workload of its label."""
    deploys = {f"{DEPLOY}{name}": "true" for name in SETS[Workload.SHARED]}
    labels = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.workload.config": workload, **deploys}
    return {"metadata": {"name": "node01", "labels": labels}}


def sharing_gpu_node(*users: str, units: int | None) -> object:
    """Return the GpuNode of a node with two shared GPUs; the first has users."""
    gpus = [
        {"address": f"0000:{bus}:00.0", "mode": "shared", "users": names, "units": units, "vfs": 0}
        for bus, names in (("65", list(users)), ("ca", []))
    ]
    status = {"observedGeneration": 0, "totals": {"gpus": 2, "modes": "shared"}, "gpus": gpus, "conditions": [READY]}
    return {"metadata": {"name": "node01"}, "status": status}


class Cluster:
    """The objects of a cluster whose release is in NAMESPACE."""

    def __init__(self, *pods: object) -> None:
        self.state = "ready"
        self.nodes: tuple[object, ...] = (NODE,)
        self.selected: tuple[object, ...] = ()
        """The nodes with the label `rack=b`."""
        self.gpu_nodes: tuple[object, ...] = ()
        self.pods = (AGENT, *pods)
        self.may_read_events = True
        self.events: tuple[object, ...] = (PULLED, NO_SECRET, NO_DNS)
        self.installed = True
        self.kubevirt: object | None = None
        """The condition about KubeVirt."""
        self.leader = "gpuvirt-controller-a"
        """The holder of the controllers' lease; empty if users may not read it."""
        self.asked = 0
        self.ready_after = 0
        """The number of requests for the ClusterPolicy after which it is ready."""

    def answer(self, call: Call) -> Reply:
        if call.path == POLICIES:
            self.asked += 1
            return self.policies() if self.installed else NOT_FOUND
        if call.path.startswith(f"/api/v1/namespaces/{NAMESPACE}/pods"):
            return items(*self.pods)
        if call.path == f"/api/v1/namespaces/{NAMESPACE}/events":
            return items(*self.events) if self.may_read_events else FORBIDDEN
        if call.path == GPU_NODES:
            return items(*self.gpu_nodes)
        if call.path.endswith("/leases/gpuvirt-controller"):
            return (200, {"metadata": {}, "spec": {"holderIdentity": self.leader}}) if self.leader else FORBIDDEN
        nodes = self.selected if "labelSelector=rack%3Db" in call.target else self.nodes
        return items(*nodes) if call.path == "/api/v1/nodes" else items()

    def policies(self) -> Reply:
        state = self.state if self.asked > self.ready_after else "notReady"
        reason = READY if state == "ready" else {**READY, "status": "False", "reason": "NodesNotReady", "message": "x"}
        status = {"state": state, "namespace": NAMESPACE, "conditions": list(filter(None, (reason, self.kubevirt)))}
        return items(
            {"metadata": {"name": "cluster-policy"}, "spec": {"sandboxWorkloads": {"enabled": True}}, "status": status}
        )


def items(*found: object) -> Reply:
    return 200, {"metadata": {"resourceVersion": "1"}, "items": list(found)}
