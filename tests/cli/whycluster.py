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


TEAM = "namespaces/team"
OBJECTS: Mapping[str, Mapping[str, object]] = {
    f"/apis/kubevirt.io/v1/{TEAM}/virtualmachines/vm-a": _vm("vm-a", "VirtualMachineClusterInstancetype"),
    f"/apis/kubevirt.io/v1/{TEAM}/virtualmachines/vm-b": _vm("vm-b", "VirtualMachineInstancetype"),
    f"/api/v1/{TEAM}/pods/waits": _pod("waits", ""),
    f"/api/v1/{TEAM}/pods/starts": _pod("starts", "node01"),
    "/api/v1/nodes/node01": {"metadata": {"name": "node01", "uid": "n1"}, "status": {"allocatable": {UNITS: "1000"}}},
    "/apis/gpuvirt.io/v1alpha1/gpunodes/node01": {"metadata": {"name": "node01"}, "status": {}},
}
LISTS = frozenset(
    {"pods", "nodes", "gpunodes", "events", "kubevirts", "virtualmachines", "virtualmachineinstances", "vgpuschedules"}
    | {"runtimeclasses"}
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
