"""KubeVirt beside the controller, an agent and an admin, on a real API server and kubelet."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from lab.cluster.kubevirtkinds import SOURCES
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import PRESENT, WORKLOAD, controlled
from tests.cluster.kubevirtadmin import Admin
from tests.cluster.kubevirtkinds import install

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

HALF, QUARTER = "nvidia.com/GRID_T4-8Q", "nvidia.com/GRID_T4-4Q"
GATE = (
    '[{"op": "add", "path": "/spec/configuration/developerConfiguration/featureGates/-",'
    ' "value": "DisableMDEVConfiguration"}]'
)


@contextmanager
def administered(node: LabNode, configuration: Mapping[str, object] | None = None) -> Iterator[Admin]:
    """Run a controller and an agent on a node with T4s for vGPUs, in a cluster with KubeVirt's kinds.

    A KubeVirt with this `configuration` has its version before the controller starts: as long as that is unknown, the
    controller handles KubeVirt as one of any version.
    """
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with controlled(node) as cluster, node.simulated_host("4xT4"), node.nodes_kept():
        install(node, next(iter(SOURCES)))
        admin = Admin(cluster)
        if configuration is not None:
            admin.make(configuration)
        with cluster.controller(), node.agent("", asks):
            cluster.apply_policy({})
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
            yield admin


def test_kubevirt_permits_the_offered_resources_despite_admin_changes(node: LabNode) -> None:
    with administered(node, {"developerConfiguration": {"featureGates": ["Sidecar"]}}) as admin:
        node.until_allocatable(HALF, 8)
        node.until(lambda: admin.permitted().get(HALF) == ("GRID T4-8Q", True), lambda: str(admin.permitted()))
        admin.until_reported("True Configured")
        configuration = admin.configuration()
        assert configuration.get("mediatedDevicesConfiguration") == {"enabled": False}, configuration
        for _ in range(2):
            node.kubectl("patch", "kubevirt", "kubevirt", "--type=json", "-p", GATE)
        admin.cluster.label("nvidia.com/vgpu.config=T4-4Q")
        node.until_allocatable(QUARTER, 16)
        node.until(lambda: QUARTER in admin.permitted(), lambda: str(admin.permitted()))
        gates = admin.configuration()["developerConfiguration"]
        assert gates == {"featureGates": ["Sidecar", *["DisableMDEVConfiguration"] * 2]}

        reported = admin.cluster.gpuvirt("uninstall")
        assert "kubevirts kubevirt: removed what gpuvirt had added" in reported
        assert admin.configuration() == {"developerConfiguration": gates}


def test_a_resource_that_kubevirt_provides_is_withheld(node: LabNode) -> None:
    with administered(node) as admin:
        admin.make(
            {"permittedHostDevices": {"mediatedDevices": [{"mdevNameSelector": "GRID T4-8Q", "resourceName": HALF}]}}
        )
        admin.until_reported("ForeignProvider")
        withheld = ("get", "gpunode", NODE, "-o", "jsonpath={.spec.withheld[*].resource}")
        node.until(lambda: node.kubectl(*withheld) == HALF, lambda: node.kubectl(*withheld))
        external = [
            {
                "op": "add",
                "path": "/spec/configuration/permittedHostDevices/mediatedDevices/0/externalResourceProvider",
                "value": True,
            }
        ]
        node.kubectl("patch", "kubevirt", "kubevirt", "--type=json", "-p", json.dumps(external))
        node.until(lambda: node.kubectl(*withheld) == "", lambda: node.kubectl(*withheld))
        node.until_allocatable(HALF, 8)


def test_a_request_for_an_unknown_resource_leaves_the_list_as_it_is(node: LabNode) -> None:
    """Without the list KubeVirt would permit every device, and any tenant can make such a request."""
    devices = {"gpus": [{"name": "gpu1", "deviceName": "example.com/unknown"}]}
    template = {"spec": {"domain": {"devices": devices, "resources": {}}}}
    metadata = {"name": "tenant", "namespace": node.namespace}
    kind = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": metadata}
    with administered(node) as admin:
        node.apply({**kind, "spec": {"runStrategy": "Halted", "template": template}})
        admin.make({})
        node.until(lambda: HALF in admin.permitted(), admin.reported)
        admin.until_reported("ResourceNotPermitted")
        assert "example.com/unknown" in admin.reported()
        assert HALF in admin.permitted()
        node.kubectl("delete", "virtualmachines.kubevirt.io", "tenant")
        admin.until_reported("True Configured")
        node.apply({**kind, "spec": {"runStrategy": "Halted", "template": template}})
        admin.until_reported("ResourceNotPermitted")
        assert HALF in admin.permitted()


def registered(node: LabNode, since: int) -> list[str]:
    """Return the resources that agents registered with the kubelet, from their log since an offset."""
    lines = (node.cluster.folder / "log/agent.log").read_text()[since:].splitlines()
    reported = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["resource"] for event in reported if event["message"] == "registered"]


def test_a_resource_that_kubevirt_provides_is_never_registered_even_after_a_restart(node: LabNode) -> None:
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig), "--await-controller")
    log = node.cluster.folder / "log/agent.log"
    since = len(log.read_text()) if log.exists() else 0
    with controlled(node) as cluster, node.simulated_host("4xT4"), node.nodes_kept():
        install(node, next(iter(SOURCES)))
        admin = Admin(cluster)
        admin.make(
            {"permittedHostDevices": {"mediatedDevices": [{"mdevNameSelector": "GRID T4-8Q", "resourceName": HALF}]}}
        )
        withheld = ("get", "gpunode", NODE, "-o", "jsonpath={.spec.withheld[*].resource}")
        with cluster.controller():
            cluster.apply_policy({})
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu", "nvidia.com/vgpu.config=T4-4Q")
            with node.agent("", asks):
                node.until_allocatable(QUARTER, 16)
                cluster.label("nvidia.com/vgpu.config=T4-8Q")
                admin.until_reported("ForeignProvider")
                node.until(lambda: node.kubectl(*withheld) == HALF, lambda: node.kubectl(*withheld))
                vgpus = ("get", "gpunode", NODE, "-o", "jsonpath={.status.totals.vgpus}")
                node.until(lambda: node.kubectl(*vgpus) == "8", lambda: node.kubectl(*vgpus))
        with node.agent("", asks):  # and no process answers
            node.until_allocatable(QUARTER, 0)
        found = registered(node, since)
        assert QUARTER in found
        assert HALF not in found
        assert HALF not in node.kubectl("get", "node", NODE, "-o", "jsonpath={.status.capacity}")


def test_after_three_reverts_the_patch_stops_and_no_vgpus_are_created(node: LabNode) -> None:
    with administered(node, {}) as admin:
        node.until_allocatable(HALF, 8)
        for _ in range(3):
            node.until(lambda: HALF in admin.permitted(), admin.reported)
            node.kubectl(
                "patch",
                "kubevirt",
                "kubevirt",
                "--type=json",
                "-p",
                '[{"op": "remove", "path": "/spec/configuration"}]',
            )
        admin.until_reported("ConfigReverted")
        mode = ("get", "gpunode", NODE, "-o", "jsonpath={.spec.mode} {.spec.origins.mode}")
        node.until(lambda: "unmanaged no vGPUs are created" in node.kubectl(*mode), lambda: node.kubectl(*mode))
        node.until_allocatable(HALF, 8)
