"""The GPU Operator's KubeVirt guide, from the label to vGPUs, with our chart: each command in order, and its output."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from lab.cluster.kubevirtkinds import SOURCES
from lab.cluster.settings import NODE

from gpuvirt.kube.labels import SETS
from gpuvirt.model.desired.workload import Workload
from gpuvirt.plain import Plain
from tests.cli.commandline import gpuvirt
from tests.cluster.chartlab import CHART, NAMESPACE, ROOT, Install, import_vgpu_manager, no_log_left, on_simulated_host
from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import PRESENT, WORKLOAD
from tests.cluster.kubevirtkinds import install
from tests.controller.kubevirt.kubevirts import at, entry

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.ring("helm"), pytest.mark.xdist_group("cluster")]

A10_12Q, A10_8Q, A10_4Q = (f"nvidia.com/NVIDIA_A10-{size}Q" for size in (12, 8, 4))
PATCH = (
    "kubectl patch kubevirt -n kubevirt kubevirt --type=json"
    ' -p=[{"op":"add","path":"/spec/configuration/developerConfiguration/featureGates/-",'
    '"value":"DisableMDEVConfiguration"}]'
)
VERSION, SYSTEM = "510.73.06", "ubuntu20.04"
OS = {
    "feature.node.kubernetes.io/system-os_release.ID": "ubuntu",
    "feature.node.kubernetes.io/system-os_release.VERSION_ID": "20.04",
}
CUSTOM = "{version: v1, vgpu-configs: {mine: [{devices: all, vgpu-devices: {A10-8Q: 3}}]}}"
ON_CONTAINERS = (
    *("nvidia-driver-daemonset-ubuntu20.04", "nvidia-container-toolkit-daemonset", "nvidia-device-plugin-daemonset"),
    *("nvidia-dcgm", "nvidia-dcgm-exporter", "gpu-feature-discovery", "nvidia-operator-validator"),
)

NODES = (NODE, "node-a", "node-c")
AFFINITY = (
    *("spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    *("nodeSelectorTerms", 0),
)


class Admin:
    """An admin who follows the guide."""

    def __init__(self, user: Install, node: LabNode) -> None:
        self.user = user
        self.node = node

    def types(self, line: str) -> str:
        """Run a command of the guide; return its output without quotes."""
        return self.user.kubectl(*line.split()[1:]).strip()

    def allocatable(self) -> Plain:
        """Return the output of the guide's jq filter on `kubectl get node -o json`."""
        found: Plain = json.loads(self.types(f"kubectl get node {NODE} -o json"))
        counts = at(found, "status", "allocatable")
        assert isinstance(counts, dict)
        return {name: count for name, count in counts.items() if name.startswith("nvidia.com/") and count != "0"}

    def offers(self, resource: str, count: int) -> None:
        """Wait until the node offers this count of one resource, and no other resource of NVIDIA."""
        self.node.until(lambda: self.allocatable() == {resource: str(count)}, lambda: str(self.allocatable()))

    def configuration(self) -> Plain:
        found: Plain = json.loads(self.types("kubectl get kubevirt -n kubevirt kubevirt -o json"))
        return at(found, "spec", "configuration")

    def permits(self, *names: str) -> None:
        """Wait until KubeVirt permits these vGPU types with an external provider."""
        desired = [entry(f"NVIDIA {name}", f"nvidia.com/NVIDIA_{name}", key="mdevNameSelector") for name in names]

        def found() -> Plain:
            return at(self.configuration(), "permittedHostDevices", "mediatedDevices")

        self.node.until(lambda: found() == desired, lambda: str(found()))

    def status(self) -> list[list[str]]:
        """Return the counterpart of `kubectl get pods -n gpu-operator`: component, ready, state."""
        asks = ("--kubeconfig", str(self.user.cluster.kubeconfig), "-n", NAMESPACE)
        shown = gpuvirt("status", *asks).stdout.splitlines()
        return [line.split()[2:5] for line in shown if line.startswith(NODE)]

    def placed(self) -> dict[str, set[str]]:
        """Return the DaemonSets that created a pod for each node, whether or not it started."""
        found: dict[str, set[str]] = {}
        pods: Plain = json.loads(self.types(f"kubectl get pods -n {NAMESPACE} -o json"))
        items = at(pods, "items")
        assert isinstance(items, list)
        for pod in items:
            if at(pod, "metadata", "ownerReferences", 0, "kind") == "DaemonSet":
                node = at(pod, *AFFINITY, "matchFields", 0, "values", 0)
                found.setdefault(str(node), set()).add(str(at(pod, "metadata", "ownerReferences", 0, "name")))
        return found


@pytest.fixture
def admin(user: Install, node: LabNode) -> Iterator[Admin]:
    """An admin with a node of two A10s, and KubeVirt."""
    install(node, SOURCES[-1])
    admin = Admin(user, node)
    try:
        admin.types("kubectl create namespace kubevirt")
        spec: Mapping[str, object] = {"configuration": {"developerConfiguration": {"featureGates": []}}}
        metadata = {"name": "kubevirt", "namespace": "kubevirt"}
        user.apply({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": metadata, "spec": spec})
        reported = json.dumps({"status": {"observedKubeVirtVersion": "v0.59.1"}})
        user.kubectl(
            "patch", "kubevirt", "kubevirt", "-n", "kubevirt", "--subresource=status", "--type=merge", "-p", reported
        )
        user.kubectl("label", "node", NODE, f"{PRESENT}=true", *(f"{key}={value}" for key, value in OS.items()))
        with user.simulated_host(node, "2xA10-sriov"), no_log_left():
            yield admin
    finally:
        node.kubectl("delete", "namespace", "kubevirt", "--wait=true", "--ignore-not-found")


def test_the_gpu_operators_kubevirt_guide_works_from_install_to_uninstall(admin: Admin) -> None:
    before = admin.configuration()
    release = installs(admin)
    makes_vgpus(admin)
    names_its_own_config(admin, release)
    changes_vgpus_again(admin)
    vms_are_taken(admin)
    with nodes_beside(admin):
        each_node_has_what_it_is_for(admin)
        devices = len(list((admin.node.host / "sys/bus/mdev/devices").iterdir()))
        admin.user.uninstall(release)
        assert {
            key for node in NODES for key in admin.user.labels(node) if "deploy" in key or "gpuvirt" in key
        } == set()
    assert len(list((admin.node.host / "sys/bus/mdev/devices").iterdir())) == devices
    gates: Plain = ["DisableMDEVConfiguration"] * 4
    assert admin.configuration() == {"developerConfiguration": {"featureGates": gates}}
    assert before == {"developerConfiguration": {"featureGates": []}}


def installs(admin: Admin) -> str:
    """Follow the guide until helm exits; return the release's name."""
    assert admin.types(PATCH) == "kubevirt.kubevirt.io/kubevirt patched"
    assert admin.types(f"kubectl label node {NODE} --overwrite {WORKLOAD}=vm-vgpu") == f"node/{NODE} labeled"
    assert admin.types(f"kubectl create namespace {NAMESPACE}") == f"namespace/{NAMESPACE} created"
    secret = (
        "kubectl create secret docker-registry registry-secret --docker-server=registry.example --docker-username=me"
        f" --docker-password=secret --docker-email=me@example.com -n {NAMESPACE}"
    )
    assert admin.types(secret) == "secret/registry-secret created"
    repository = import_vgpu_manager(admin.user.cluster, f"{VERSION}-{SYSTEM}")
    return admin.user.installed(
        "sandboxWorkloads.enabled=true",
        "vgpuManager.enabled=true",
        f"vgpuManager.repository={repository}",
        "vgpuManager.image=vgpu-manager",
        f"vgpuManager.version={VERSION}",
        "vgpuManager.imagePullSecrets={registry-secret}",
        *on_simulated_host(admin.node),
    )


def makes_vgpus(admin: Admin) -> None:
    admin.offers(A10_12Q, 4)
    admin.permits("A10-12Q")
    gates = at(admin.configuration(), "developerConfiguration", "featureGates")
    assert gates == ["DisableMDEVConfiguration", "GPU"]
    assert at(admin.configuration(), "permittedHostDevices", "pciHostDevices") is None
    for _ in range(2):
        assert admin.types(PATCH) == "kubevirt.kubevirt.io/kubevirt patched"


def names_its_own_config(admin: Admin, release: str) -> None:
    file = admin.user.cluster.folder / "config.yaml"
    file.write_text(CUSTOM)
    made = f"kubectl create configmap custom-vgpu-config -n {NAMESPACE} --from-file=config.yaml={file}"
    assert admin.types(made) == "configmap/custom-vgpu-config created"
    named = ("--set=vgpuDeviceManager.config.name=custom-vgpu-config", "--reset-then-reuse-values")
    admin.user.must("upgrade", release, str(CHART), "-n", NAMESPACE, "--wait", "--timeout=120s", *named)
    assert admin.types(f"kubectl label node {NODE} --overwrite nvidia.com/vgpu.config=mine") == f"node/{NODE} labeled"
    admin.offers(A10_8Q, 6)


def changes_vgpus_again(admin: Admin) -> None:
    reported = admin.types(f"kubectl label node {NODE} --overwrite nvidia.com/vgpu.config=A10-4Q")
    assert reported == f"node/{NODE} labeled"
    admin.offers(A10_4Q, 12)
    assert admin.types(PATCH) == "kubevirt.kubevirt.io/kubevirt patched"
    admin.permits("A10-12Q", "A10-8Q", "A10-4Q")
    components = ("sandbox-device-plugin", "sandbox-validator", "vgpu-device-manager", "vgpu-manager")
    running = [[component, "yes", "Running"] for component in components]
    admin.node.until(lambda: admin.status() == running, lambda: f"{admin.status()}\n{admin.user.pods()}")
    # The status is written at most once a second, so the pods may be running before it says so.
    admin.node.until(
        lambda: admin.user.get("clusterpolicy/cluster-policy", ".status.state") == "ready",
        lambda: admin.user.get("clusterpolicy/cluster-policy", ".status"),
    )


def vms_are_taken(admin: Admin) -> None:
    """The API server accepts each VM of the guides and of our examples, except of a removed API version."""
    create = ("create", "--dry-run=server", "--validate=strict", "-f")
    texts = (Path(__file__).with_name("vms.yaml"), *sorted((ROOT / "examples").glob("vm-*.yaml")))
    manifests = (document for text in texts for document in yaml.load_all(text.read_text(), yaml.CSafeLoader))
    vms = [manifest for manifest in manifests if manifest["kind"].startswith("VirtualMachine")]
    assert {vm["apiVersion"].partition("/")[2] for vm in vms} == {"v1", "v1alpha3", "v1alpha1"}
    for vm in vms:
        done = admin.user.cluster.kubectl(*create, "-", given=yaml.safe_dump(vm))
        if vm["apiVersion"] == "kubevirt.io/v1alpha1":
            assert 'no matches for kind "VirtualMachineInstance" in version "kubevirt.io/v1alpha1"' in done.stderr
        else:
            assert "created (server dry run)" in done.stdout, done.stderr


@contextmanager
def nodes_beside(admin: Admin) -> Iterator[None]:
    """Create a container node and a passthrough node, both without a kubelet."""
    labels = {PRESENT: "true", "kubernetes.io/os": "linux", **OS}
    _, containers, whole = NODES
    with (
        admin.user.node_without_kubelet(containers, {**labels, WORKLOAD: "container"}),
        admin.user.node_without_kubelet(whole, {**labels, WORKLOAD: "vm-passthrough"}),
    ):
        yield


def each_node_has_what_it_is_for(admin: Admin) -> None:
    user, everywhere = admin.user, "gpuvirt-discover"
    desired = {
        "node-a": {everywhere, *ON_CONTAINERS},
        NODE: {everywhere, "gpuvirt-node", f"nvidia-vgpu-manager-daemonset-{SYSTEM}"},
        "node-c": {everywhere, "gpuvirt-node"},
    }
    admin.node.until(lambda: admin.placed() == desired, lambda: str(admin.placed()))
    workloads = {"node-a": Workload.CONTAINER, NODE: Workload.VGPU, "node-c": Workload.PASSTHROUGH}
    modes = {"node-a": "container", NODE: "vgpu", "node-c": "passthrough"}
    for name in NODES:
        prefix, labels = "nvidia.com/gpu.deploy.", user.labels(name)
        deployed = {key.removeprefix(prefix) for key in labels if key.startswith(prefix)}
        assert deployed == set(SETS[workloads[name]])
        assert (labels["nvidia.com/gpu.present"], labels["gpuvirt.io/os"]) == ("true", SYSTEM)

    def found_modes() -> dict[str, str]:
        spec = "jsonpath={range .items[*]}{.metadata.name}={.spec.mode} {end}"
        return dict(word.split("=") for word in user.kubectl("get", "gpunodes", "-o", spec).split())

    admin.node.until(lambda: found_modes() == modes, lambda: str(found_modes()))

    def counted() -> int:
        return sum(map(int, user.get("daemonsets", ".items[*].status.desiredNumberScheduled").split()))

    admin.node.until(lambda: counted() == sum(map(len, desired.values())), lambda: str(counted()))
