"""Doctor reads the KubeVirts of a real cluster."""

import json
import subprocess

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.labnamespace import GPUVIRT

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "kubevirts.kubevirt.io"},
    "spec": {
        "group": "kubevirt.io",
        "scope": "Namespaced",
        "names": {"plural": "kubevirts", "singular": "kubevirt", "kind": "KubeVirt", "listKind": "KubeVirtList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def found(node: LabNode) -> list[str]:
    """Return the codes of doctor's findings about KubeVirt."""
    command = [
        *GPUVIRT,
        "doctor",
        "--host-root",
        str(node.host),
        "--kubeconfig",
        str(node.cluster.kubeconfig),
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stderr
    results = json.loads(done.stdout)["results"]
    return [finding["code"] for result in results if result["area"] == "kubevirt" for finding in result["findings"]]


def test_doctor_reads_the_permitted_devices_of_the_cluster(node: LabNode) -> None:
    kubevirt = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": node.namespace},
        "spec": {"configuration": {"permittedHostDevices": {"pciHostDevices": []}}},
    }
    with node.simulated_host("2xA10"):
        assert "NotPermitted" not in found(node), "there is no KubeVirt"
        node.apply(CRD)
        node.until(lambda: node.cluster.kubectl("get", "kubevirts").returncode == 0, lambda: "the kind is not served")
        node.apply(kubevirt)
        assert "NotPermitted" in found(node)
        assert "IommufdMissing" not in found(node)
        gates = {"spec": {"configuration": {"developerConfiguration": {"featureGates": ["IOMMUFD"]}}}}
        node.kubectl("patch", "kubevirt", "kubevirt", "--type=merge", "-p", json.dumps(gates))
        node.kubectl("label", "node", NODE, "kubevirt.io/schedulable=true", "--overwrite")
        try:
            assert "IommufdMissing" in found(node)
        finally:
            node.kubectl("label", "node", NODE, "kubevirt.io/schedulable-")
