"""`gpuvirt status`: a row for each component of each node, from the reports of agents and from pods."""

from gpuvirt.controller.clusterstatus import rows
from gpuvirt.kube.kinds.core import ContainerState, ContainerStatus, Node, Pod, PodSpec, PodStatus, Waiting
from gpuvirt.kube.kinds.gpunode import Gpu, GpuNode, Offered, Status, Totals
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.labels import DEPLOY, SETS
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import Workload
from tests.controller.observedcluster import NFD

RESOURCE = "nvidia.com/NVIDIA_A10-4Q"


def node(workload: Workload, name: str = "node01") -> Node:
    deploy = {f"{DEPLOY}{label}": "true" for label in SETS[workload]}
    return Node(Metadata(name=name, labels={**NFD, **deploy, "nvidia.com/gpu.present": "true"}))


def condition(kind: str, reason: str = "", message: str = "") -> Condition:
    status = "False" if reason else "True"
    return Condition(type=kind, status=status, reason=reason or "Holds", message=message, last_transition_time="")


def reported(*conditions: Condition, registered: bool = True) -> dict[str, GpuNode]:
    offered = Offered(name=RESOURCE, healthy=12, allocated=1, registered=registered)
    gpus = tuple(Gpu(address=f"0000:{bus}:00.0", mode="vgpu", vgpu_config="A10-4Q") for bus in ("65", "ca"))
    totals = Totals(gpus=2, vgpus=12, modes="vgpu")
    status = Status(totals=totals, gpus=gpus, resources=(offered,), conditions=conditions)
    return {"node01": GpuNode(metadata=Metadata(name="node01"), status=status)}


def test_a_node_for_vgpus_has_the_components_of_nvidias_operator() -> None:
    found = rows([node(Workload.VGPU)], reported(condition("Ready"), condition("VgpuDevicesReady")), [])
    assert [(row.component, row.ready, row.state) for row in found] == [
        ("sandbox-device-plugin", True, "Running"),
        ("sandbox-validator", True, "Running"),
        ("vgpu-device-manager", True, "Running"),
    ]
    assert found[0].detail == f"12 {RESOURCE} (1 allocated)"
    assert found[2].detail == "12 vGPUs, config A10-4Q"


def test_a_resource_without_devices_is_not_listed_as_offered() -> None:
    offered = [
        Offered(name=name, healthy=healthy, allocated=0, registered=True) for name, healthy in ((RESOURCE, 0), ("x", 2))
    ]
    gpu_node = GpuNode(metadata=Metadata(name="node01"), status=Status(resources=tuple(offered)))
    assert rows([node(Workload.PASSTHROUGH)], {"node01": gpu_node}, [])[0].detail == "2 x"


def test_an_unready_component_shows_its_reason() -> None:
    ill = reported(
        condition("Ready", "VgpuInUse", "pod vm-a"), condition("VfioPciReady", "NoDriver", "has none"), registered=False
    )
    found = rows([node(Workload.PASSTHROUGH)], ill, [])
    assert [(row.component, row.state, row.detail) for row in found] == [
        ("sandbox-device-plugin", "NotRegistered", f"not registered with the kubelet: {RESOURCE}"),
        ("sandbox-validator", "NoDriver", "has none"),
        ("vfio-manager", "VgpuInUse", "pod vm-a"),
    ]
    silent = rows([node(Workload.PASSTHROUGH)], {}, [])
    assert {row.state for row in silent} == {"NotReported"}


def test_a_node_that_shares_its_gpus_has_the_plugin_and_the_gpus_mode() -> None:
    gpus = tuple(Gpu(address=f"0000:{bus}:00.0", mode="shared", units=units) for bus, units in (("65", 500), ("ca", 0)))
    status = Status(totals=Totals(gpus=2, modes="shared"), gpus=gpus, conditions=(condition("Ready"),))
    gpu_node = GpuNode(metadata=Metadata(name="node01"), status=status)
    found = rows([node(Workload.SHARED)], {"node01": gpu_node}, [])
    assert [(row.workload, row.component, row.ready, row.detail) for row in found] == [
        ("shared", "sandbox-device-plugin", True, "500 units of 2 GPUs"),
        ("shared", "shared-gpus", True, "2 GPUs, shared mode"),
    ]
    assert {row.component for row in rows([node(Workload.SHARED)], {}, [])} == {"sandbox-device-plugin", "shared-gpus"}


def test_a_node_on_demand_has_the_vgpus_of_pods() -> None:
    found = rows([node(Workload.ON_DEMAND)], reported(condition("Ready"), condition("VgpuManagerReady")), [])
    assert [(row.workload, row.component, row.ready, row.detail) for row in found] == [
        ("on-demand", "sandbox-device-plugin", True, f"12 {RESOURCE} (1 allocated)"),
        ("on-demand", "sandbox-validator", True, ""),
        ("on-demand", "on-demand-vgpus", True, "2 GPUs, 12 vGPUs of pods"),
    ]


def test_pods_of_operands_have_rows_and_the_agents_pod_has_none() -> None:
    waits = ContainerStatus(ContainerState(Waiting("ImagePullBackOff", "no such image")))
    pods = [
        Pod(
            Metadata(name=app, labels={"app": app}),
            PodSpec("node01"),
            PodStatus("Pending", container_statuses=(waits,)),
        )
        for app in ("nvidia-driver-daemonset", "gpuvirt-node", "mine")
    ]
    found = rows([node(Workload.CONTAINER)], {}, pods)
    assert [(row.workload, row.component, row.ready, row.state) for row in found] == [
        ("container", "driver", False, "Pending")
    ]
    assert found[0].detail == "ImagePullBackOff: no such image"


def test_a_node_without_gpus_has_no_row() -> None:
    assert rows([Node(Metadata(name="node01"))], reported(), []) == ()
