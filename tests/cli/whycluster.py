"""The objects of a cluster that `gpuvirt why` reads: VMs with instance types, and pods that wait or do not start."""

from collections.abc import Mapping

from tests.kube.scriptedapi import NOT_FOUND, Call, Reply

UNITS = "nvidia.com/vgpu"


def _vm(name: str, kind: str) -> Mapping[str, object]:
    spec = {"runStrategy": "Always", "instancetype": {"name": "gpu", "kind": kind}, "template": {"spec": {}}}
    return {"metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"}, "spec": spec}


def _pod(name: str, node: str) -> Mapping[str, object]:
    main = {"name": "main", "resources": {"limits": {UNITS: "300"}}}
    annotations = {"gpuvirt.io/enforcement": "required"}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "annotations": annotations},
        "spec": {"nodeName": node, "containers": [main]},
        "status": {"phase": "Pending"},
    }


OURS = "passthrough.gpuvirt.io"
NOT_PREPARED = (
    "Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed for ResourceClaim"
    " starting: ClaimWaits: starting is not prepared yet; seen: claim team/running has 0000:65:00.0; fix: no action"
    " needed: the kubelet asks again"
)
NO_GPU = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 cannot allocate all claims.",
}


def _claim(name: str, gpu: str | None, pod: str | None, driver: str = "gpuvirt.io") -> Mapping[str, object]:
    """Return a claim that has a GPU, and that a pod may use."""
    device = {"request": "gpu", "driver": driver, "pool": f"node01/{driver}", "device": f"gpu-{gpu}-passthrough"}
    allocation = {"devices": {"results": [device]}}
    reserved = {"reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"}]}
    exactly = {"deviceClassName": OURS if driver == "gpuvirt.io" else driver}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        "status": {**({"allocation": allocation} if gpu else {}), **(reserved if pod else {})},
    }


def _claiming(name: str, node: str, phase: str, *conditions: object) -> Mapping[str, object]:
    """Return a pod of a claim that was made for it and has its name."""
    template = [{"name": "gpus", "resourceClaimTemplateName": "gpu"}]
    made = [{"name": "gpus", "resourceClaimName": name}]
    return {
        "metadata": {"name": f"pod-{name}", "namespace": "team", "uid": f"uid-pod-{name}"},
        "spec": {"nodeName": node, "containers": [{"name": "main"}], "resourceClaims": template},
        "status": {"phase": phase, "resourceClaimStatuses": made, "conditions": conditions},
    }


TEAM = "namespaces/team"
DRA = f"/apis/resource.k8s.io/v1/{TEAM}/resourceclaims"
PODS = f"/api/v1/{TEAM}/pods"
OBJECTS: Mapping[str, Mapping[str, object]] = {
    f"/apis/kubevirt.io/v1/{TEAM}/virtualmachines/vm-a": _vm("vm-a", "VirtualMachineClusterInstancetype"),
    f"/apis/kubevirt.io/v1/{TEAM}/virtualmachines/vm-b": _vm("vm-b", "VirtualMachineInstancetype"),
    f"/api/v1/{TEAM}/pods/waits": _pod("waits", ""),
    f"/api/v1/{TEAM}/pods/starts": _pod("starts", "node01"),
    f"{PODS}/pod-starting": _claiming("starting", "node01", "Pending"),
    f"{PODS}/pod-running": _claiming("running", "node01", "Running"),
    f"{PODS}/pod-pending": _claiming("pending", "", "Pending", NO_GPU),
    f"{DRA}/starting": _claim("starting", "0000-65-00-0", "pod-starting"),
    f"{DRA}/running": _claim("running", "0000-ca-00-0", "pod-running"),
    f"{DRA}/pending": _claim("pending", None, None),
    f"{DRA}/kept": _claim("kept", "0000-17-00-0", None),
    f"{DRA}/ending": _claim("ending", "0000-31-00-0", "gone"),
    f"{DRA}/other": _claim("other", "0", "pod-other", "gpu.nvidia.com"),
    f"/apis/resource.k8s.io/v1/deviceclasses/{OURS}": {
        "metadata": {"name": OURS},
        "spec": {"selectors": [{"cel": {"expression": 'device.driver == "gpuvirt.io"'}}]},
    },
    f"/api/v1/{TEAM}/events/one": {
        "metadata": {"name": "one", "namespace": "team"},
        "involvedObject": {"uid": "uid-pod-starting"},
        "reason": "FailedPrepareDynamicResources",
        "type": "Warning",
        "message": NOT_PREPARED,
        "lastTimestamp": "2026-01-01T00:00:00Z",
    },
    "/api/v1/nodes/node01": {"metadata": {"name": "node01", "uid": "n1"}, "status": {"allocatable": {UNITS: "1000"}}},
    "/apis/gpuvirt.io/v1alpha1/gpunodes/node01": {"metadata": {"name": "node01"}, "status": {}},
}
LISTS = frozenset(
    {"pods", "nodes", "gpunodes", "events", "kubevirts", "virtualmachines", "virtualmachineinstances", "vgpuschedules"}
    | {"runtimeclasses", "resourceclaims", "deviceclasses"}
)


def answer(call: Call) -> Reply:
    """Answer a request."""
    plural = call.path.rpartition("/")[2]
    if plural not in LISTS:
        return (200, OBJECTS[call.path]) if call.path in OBJECTS else NOT_FOUND
    items = [
        found
        for path, found in OBJECTS.items()
        if call.path in {path.rpartition("/")[0], path.rpartition("/")[0].replace(f"{TEAM}/", "")}
    ]
    return 200, {"metadata": {"resourceVersion": "1"}, "items": items}
