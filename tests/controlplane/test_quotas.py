"""Shares of GPUs on a real API server: tenants' quotas, and the scheduler's configuration."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.cluster.chartlab import NAMESPACE
from tests.cluster.controllerlab import ControlledNode, controlled
from tests.cluster.labnamespace import BOX, LabNamespace
from tests.web.certificates import Authority

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

ROOT = Path(__file__).parent.parent.parent
SHARES = "nvidia.com/vgpu"
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "gpuvirt-extender", "namespace": NAMESPACE},
    "spec": {"selector": {"app": "extender"}, "ports": [{"name": "http", "port": 8888}]},
}


def example(name: str) -> Mapping[str, object]:
    """Return a manifest of examples/."""
    manifest: Mapping[str, object] = yaml.safe_load((ROOT / "examples" / name).read_text())
    return manifest


def pod(name: str, *, containers: Mapping[str, int], init: Mapping[str, int] | None = None) -> Mapping[str, object]:
    """Return a pod that no scheduler places; the limits of its containers are units, 0 for none."""

    def listed(units: Mapping[str, int]) -> list[object]:
        return [
            {"name": unit, "image": BOX, "resources": {"limits": {SHARES: str(number)} if number else {}}}
            for unit, number in units.items()
        ]

    spec = {"schedulerName": "none", "containers": listed(containers), "initContainers": listed(init or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Tenant:
    """A namespace with a quota."""

    def __init__(self, node: LabNamespace) -> None:
        self._node = node
        self.apply(example("quota-of-gpu-shares.yaml"))
        node.until(lambda: self.quota("hard") == "1500", lambda: self.quota("hard"))

    def try_to_apply(self, manifest: Mapping[str, object]) -> "subprocess.CompletedProcess[str]":
        text = json.dumps(manifest)
        return self._node.cluster.kubectl("apply", "-n", self._node.namespace, "-f", "-", given=text)

    def apply(self, manifest: Mapping[str, object]) -> None:
        done = self.try_to_apply(manifest)
        assert done.returncode == 0, done.stderr

    def refusal(self, manifest: Mapping[str, object]) -> str:
        done = self.try_to_apply(manifest)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def quota(self, part: str) -> str:
        """Return the number of units in a part of the quota's status."""
        path = f"jsonpath={{.status.{part}.requests\\.nvidia\\.com/vgpu}}"
        return self._node.kubectl("get", "resourcequota", "gpu-shares", "-o", path)

    def until_used(self, units: int) -> None:
        self._node.until(lambda: self.quota("used") == str(units), lambda: self.quota("used"))


@pytest.fixture
def tenant(node: LabNamespace) -> Tenant:
    """A tenant with a quota of 1500 units."""
    return Tenant(node)


def test_a_pod_over_its_tenants_quota_is_refused_with_the_numbers(tenant: Tenant) -> None:
    tenant.apply(pod("first", containers={"main": 1000}))
    refused = tenant.refusal(pod("second", containers={"main": 300, "side": 300}))
    assert "exceeded quota: gpu-shares, requested: requests.nvidia.com/vgpu=600" in refused
    assert "used: requests.nvidia.com/vgpu=1k, limited: requests.nvidia.com/vgpu=1500" in refused
    tenant.apply(pod("third", containers={"main": 500}))
    tenant.until_used(1500)


def test_a_quota_counts_limits_as_requests_and_units_as_the_scheduler_does(tenant: Tenant) -> None:
    tenant.apply(pod("starts-big", containers={"main": 300, "side": 200}, init={"first": 700, "then": 600}))
    tenant.until_used(700)


def test_a_quota_counts_no_pod_without_units(tenant: Tenant) -> None:
    tenant.apply(pod("plain", containers={"main": 0}))
    tenant.until_used(0)


def test_a_deleted_pods_units_can_be_requested_again(node: LabNamespace, tenant: Tenant) -> None:
    tenant.apply(pod("first", containers={"main": 1500}))
    assert "exceeded quota" in tenant.refusal(pod("second", containers={"main": 1}))
    node.delete("first")
    tenant.until_used(0)
    tenant.apply(pod("second", containers={"main": 1}))


def test_whole_gpus_can_be_forbidden_to_a_tenant(tenant: Tenant) -> None:
    refused = tenant.refusal(example("pod-on-vgpu-type.yaml"))
    assert "exceeded quota: gpu-shares, requested: requests.nvidia.com/gpu=1" in refused
    tenant.apply(example("pod-with-gpu-share.yaml"))


def test_a_quota_on_limits_of_units_is_accepted_and_limits_nothing(node: LabNamespace, tenant: Tenant) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "limits"}}
    tenant.apply({**quota, "spec": {"hard": {f"limits.{SHARES}": "1", "pods": "1"}}})
    used = ("get", "resourcequota", "limits", "-o", "jsonpath={.status.used}")
    node.until(lambda: "pods" in node.kubectl(*used), lambda: node.kubectl(*used))
    tenant.apply(pod("first", containers={"main": 300}))
    assert "limited: pods=1" in tenant.refusal(pod("second", containers={"main": 300}))


@pytest.fixture
def controlled_node(node: LabNamespace) -> Iterator[ControlledNode]:
    """The controller's namespace, without a ClusterPolicy."""
    with controlled(node) as found:
        yield found
        node.cluster.kubectl("delete", "service", "gpuvirt-extender", "-n", NAMESPACE, "--ignore-not-found")


def test_the_real_kube_scheduler_accepts_the_controllers_configuration(
    controlled_node: ControlledNode, tmp_path: Path
) -> None:
    node = controlled_node.node

    def config() -> str:
        return controlled_node.get("configmap/gpuvirt-scheduler", ".data.config\\.yaml")

    node.apply(SERVICE)
    with controlled_node.controller(f"--shared-resource={SHARES}"):
        node.until(lambda: bool(config()), lambda: "no ConfigMap gpuvirt-scheduler")
        address = controlled_node.get("service/gpuvirt-extender", ".spec.clusterIP")
        assert f"urlPrefix: http://{address}:8888" in config()
        accepted = read_by_kube_scheduler(node, config(), tmp_path)
        (extender,) = accepted["extenders"]
        assert extender["managedResources"] == [{"name": SHARES}]
        assert (extender["bindVerb"], extender["nodeCacheCapable"], extender["weight"]) == ("bind", True, 5)
        own = controlled_node.get("configmap/gpuvirt-scheduler", ".data.extenders\\.yaml")
        head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
        assert read_by_kube_scheduler(node, head + own, tmp_path)["extenders"] == accepted["extenders"]

        port = '[{"op": "replace", "path": "/spec/ports/0/name", "value": "https"}]'
        node.kubectl("patch", "service", "gpuvirt-extender", "-n", NAMESPACE, "--type=json", "-p", port)
        node.until(lambda: f"urlPrefix: https://{address}:8888" in config(), config)
        # kube-scheduler reads the CA's file, too.
        ca = str(Authority(tmp_path).certificate)
        given = config().replace("/etc/gpuvirt-extender/ca.crt", ca)
        (extender,) = read_by_kube_scheduler(node, given, tmp_path)["extenders"]
        assert extender["enableHTTPS"] is True
        assert extender["tlsConfig"] == {"caFile": ca, "serverName": f"gpuvirt-extender.{NAMESPACE}.svc"}

        edited = '{"data": {"config.yaml": "{}"}}'
        node.kubectl("patch", "configmap", "gpuvirt-scheduler", "-n", NAMESPACE, "--type=merge", "-p", edited)
        node.until(lambda: address in config(), config)
    # Kubernetes deletes the ConfigMap after its owner.
    node.kubectl("delete", "service", "gpuvirt-extender", "-n", NAMESPACE)
    node.until(lambda: not config(), config)


def read_by_kube_scheduler(node: LabNamespace, text: str, folder: Path) -> "Mapping[str, list[Mapping[str, object]]]":
    """Return a configuration as kube-scheduler writes it after reading it."""
    given, written = folder / "given.yaml", folder / "written.yaml"
    given.write_text(text)
    written.unlink(missing_ok=True)
    options = (f"--config={given}", f"--write-config-to={written}", "--secure-port=0", "--master=http://127.0.0.1:1")
    command = [str(node.cluster.binaries / "kube-scheduler"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert written.exists(), done.stderr
    read: Mapping[str, list[Mapping[str, object]]] = yaml.safe_load(written.read_text())
    return read
