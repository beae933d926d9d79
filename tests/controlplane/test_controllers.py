"""Controllers and policies on a real API server, with an agent that reports nothing but what the test writes."""

import signal

import pytest
from lab.cluster.settings import NODE

from gpuvirt.kube.labels import DEPLOY, SETS, VGPU_DRIVER
from gpuvirt.model.desired.workload import Workload
from tests.cluster.controllerlab import NAMESPACE, PRESENT, WORKLOAD, controlled
from tests.cluster.labnamespace import LabNamespace

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

CONTAINER, PASSTHROUGH, VGPU = (
    set(SETS[workload]) for workload in (Workload.CONTAINER, Workload.PASSTHROUGH, Workload.VGPU)
)


def test_a_second_controller_takes_over_after_a_kill_and_after_an_outage(node: LabNamespace) -> None:
    with controlled(node) as cluster, cluster.controller() as first:
        cluster.apply_policy({})
        cluster.label(f"{PRESENT}=true")
        cluster.until_deployed(CONTAINER)
        with cluster.controller() as second:
            first.send_signal(signal.SIGKILL)
            cluster.label(f"{WORKLOAD}=vm-passthrough")
            cluster.until_deployed(PASSTHROUGH)
            with cluster.controller():
                second.send_signal(signal.SIGTERM)
                cluster.label(f"{WORKLOAD}=container")
                cluster.until_deployed(CONTAINER)
                node.cluster.stop("apiserver")
                node.cluster.restart_after_outage()
                cluster.label(f"{WORKLOAD}=vm-vgpu")
                cluster.until_deployed(VGPU)


def test_the_younger_of_two_policies_reports_that_it_is_ignored(node: LabNamespace) -> None:
    with controlled(node) as cluster, cluster.controller():
        cluster.apply_policy({})
        cluster.until_reported("NoGPUNodes")
        cluster.apply_policy({"sandboxWorkloads": {"enabled": False}}, "second")
        cluster.until_reported("ClusterPolicy cluster-policy is older", "second")
        column = node.kubectl("get", "clusterpolicies", "--no-headers")
        assert [line.split()[:2] for line in column.splitlines()] == [
            ["cluster-policy", "ready"],
            ["second", "ignored"],
        ]


def test_beside_nvidias_operator_only_vm_nodes_are_changed_and_only_with_coexist(node: LabNamespace) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "53822513.nvidia.com", "namespace": node.namespace},
        "spec": {"holderIdentity": "gpu-operator-x", "leaseDurationSeconds": 15},
    }
    with controlled(node) as cluster:
        node.apply(lease)
        cluster.label(f"{PRESENT}=true", "nvidia.com/gpu.deploy.driver=true", f"{WORKLOAD}=vm-vgpu")
        before = cluster.labels()
        with cluster.controller():
            cluster.apply_policy({})
            cluster.until_reported("OtherOperator: NVIDIA's GPU operator runs in this cluster")
            assert cluster.labels() == before
            assert node.kubectl("get", "gpunodes", "-o", "name") == ""
        with cluster.controller("--coexist"):
            node.until(lambda: cluster.labels().get("gpuvirt.io/node") == "true", lambda: str(cluster.labels()))
            assert cluster.labels()["nvidia.com/gpu.deploy.operands"] == "false"
            assert cluster.labels()["nvidia.com/gpu.deploy.driver"] == "true", (
                "NVIDIA's operator removes its own labels"
            )
            mode = ("get", "gpunode", NODE, "-o", "jsonpath={.spec.mode}")
            node.until(lambda: node.cluster.kubectl(*mode).stdout == "vgpu", lambda: node.cluster.kubectl(*mode).stderr)
            cluster.label(f"{WORKLOAD}=container")
            asked = node.cluster.kubectl
            node.until(lambda: asked(*mode).stdout == "container", lambda: asked(*mode).stderr)
            assert cluster.labels()["gpuvirt.io/node"] == "true", "no agent has reported that the node has no vGPUs"
            cluster.report(vfs=0, mode="container")
            node.until(lambda: "gpuvirt.io/node" not in cluster.labels(), lambda: str(cluster.labels()))
            assert "nvidia.com/gpu.deploy.operands" not in cluster.labels()


def test_the_vgpu_driver_label_is_removed_after_gpus_left_and_restored_by_a_rollback(node: LabNamespace) -> None:
    driver = f"{DEPLOY}{VGPU_DRIVER}"
    with controlled(node) as cluster, cluster.controller():
        cluster.apply_policy({})
        cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
        cluster.until_deployed(VGPU)
        cluster.label(f"{WORKLOAD}=vm-passthrough")
        cluster.until_reported("the agent has not reported yet whether they carry vGPUs")
        assert cluster.deployed() == VGPU
        cluster.report(vfs=32, mode="vgpu")
        cluster.until_reported("0000:65:00.0 (vgpu, 32 VFs on)")
        assert cluster.deployed() == VGPU
        cluster.report(vfs=0, mode="container")
        cluster.until_deployed(PASSTHROUGH)
        cluster.report(vfs=32, mode="vgpu")
        cluster.until_deployed(PASSTHROUGH | {VGPU_DRIVER})
        cluster.label(f"{driver}=false")
        cluster.until_deployed(PASSTHROUGH)
        cluster.report(vfs=0, mode="passthrough")
        node.until(lambda: driver not in cluster.labels(), lambda: str(cluster.labels()))


def test_a_policy_with_a_missing_config_map_reports_it(node: LabNamespace) -> None:
    with controlled(node) as cluster, cluster.controller():
        cluster.apply_policy({"vgpuDeviceManager": {"enabled": True, "config": {"name": "my-config"}}})
        cluster.until_reported("False ConfigInvalid")
        assert "names the ConfigMap 'my-config'" in cluster.reported()
        configs = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "my-config", "namespace": NAMESPACE}}
        node.apply({**configs, "data": {"config.yml": "version: v1"}})
        cluster.until_reported("has no key config.yaml (its keys: config.yml)")
        node.apply({**configs, "data": {"config.yaml": "version: v1"}})
        cluster.until_reported("True NoGPUNodes")
