"""`gpuvirt why vm/NAME` against a real API server, scheduler and kubelet, with an agent and KubeVirt's kinds."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from lab.cluster.kubevirtkinds import SOURCES
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.kubevirtkinds import install
from tests.cluster.labnamespace import BOX, GPUVIRT

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

ROOT = Path(__file__).parent.parent.parent
A10, MISSPELT = "nvidia.com/GA102GL_A10", "nvidia.com/GA102_A10"
STOPPED = {"runStrategy": "Halted"}
STARTED = {"runStrategy": "Always"}


class Admin:
    """An admin who runs `gpuvirt why`. There is no KubeVirt, so its objects are created by hand."""

    def __init__(self, node: LabNode) -> None:
        self.node = node

    def make_vm(self, name: str, device: str, spec: Mapping[str, object]) -> None:
        """Create a VM that requests a device."""
        domain = {"devices": {"gpus": [{"name": "gpu1", "deviceName": device}]}}
        template = {"spec": {"domain": domain}}
        self._make("VirtualMachine", name, {**spec, "template": template})

    def make_vmi(self, name: str, device: str) -> None:
        """Create its VMI."""
        self._make(
            "VirtualMachineInstance", name, {"domain": {"devices": {"gpus": [{"name": "a", "deviceName": device}]}}}
        )

    def report_phase(self, name: str, phase: str) -> None:
        """Set the phase in a VMI's status; KubeVirt's own manifest has no subresource for it."""
        # kubectl knows a short name of a new kind only after it has read all kinds again.
        patch = (
            "patch",
            "virtualmachineinstances.kubevirt.io",
            name,
            "--type=merge",
            "-p",
            f'{{"status": {{"phase": "{phase}"}}}}',
        )
        known = self.node.cluster.kubectl("-n", self.node.namespace, *patch, "--subresource=status")
        if known.returncode != 0:
            self.node.kubectl(*patch)

    def make_kubevirt(self, permitted: list[str]) -> None:
        """Create a KubeVirt that permits devices by name."""
        entries = [
            {"pciVendorSelector": "10DE:2236", "resourceName": name, "externalResourceProvider": True}
            for name in permitted
        ]
        self._make("KubeVirt", "kubevirt", {"configuration": {"permittedHostDevices": {"pciHostDevices": entries}}})

    def make_launcher(self, vm: str, device: str, count: int = 1, on_node: str = "") -> str:
        """Create the pod that KubeVirt creates for a VMI, and return its name; `on_node` bypasses the scheduler."""
        name = f"virt-launcher-{vm}-x7k2p"
        container = {
            "name": "compute",
            "image": BOX,
            "imagePullPolicy": "Never",
            "args": ["sleep 1000"],
            "resources": {"limits": {device: str(count)}},
        }
        spec = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            **({"nodeName": on_node} if on_node else {}),
        }
        labels = {"kubevirt.io": "virt-launcher", "vm.kubevirt.io/name": vm}
        metadata = {"name": name, "namespace": self.node.namespace, "labels": labels}
        self.node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return name

    def why(self, target: str, namespace: str = "") -> tuple[int, Mapping[str, object]]:
        """Return the exit code of `gpuvirt why`, and its JSON."""
        done = self.ask(target, "-o", "json", "-n", namespace or self.node.namespace)
        assert done.stdout, done.stderr
        found: Mapping[str, object] = json.loads(done.stdout)
        return done.returncode, found

    def ask(self, *arguments: str, kubeconfig: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run `gpuvirt why` as the cluster's admin, or with another kubeconfig."""
        asks = ("--kubeconfig", str(kubeconfig or self.node.cluster.kubeconfig))
        return subprocess.run([*GPUVIRT, "why", *arguments, *asks], capture_output=True, text=True, check=False)

    def tenant(self, folder: Path) -> Path:
        """Return the kubeconfig of an account that may read pods of the test's namespace, and nothing else."""
        self.node.kubectl("create", "serviceaccount", "tenant")
        self.node.kubectl("create", "role", "tenant", "--verb=get,list", "--resource=pods")
        account = f"--serviceaccount={self.node.namespace}:tenant"
        self.node.kubectl("create", "rolebinding", "tenant", "--role=tenant", account)
        config = yaml.safe_load(self.node.cluster.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": self.node.kubectl("create", "token", "tenant").strip()}
        config["contexts"][0]["context"]["namespace"] = self.node.namespace
        (folder / "tenant").write_text(yaml.safe_dump(config))
        return folder / "tenant"

    def code(self, target: str, namespace: str = "") -> str:
        """Return the code of the blocker, empty without a blocker."""
        _, found = self.why(target, namespace)
        blocker = found["blocker"]
        return str(blocker["code"]) if isinstance(blocker, dict) else ""

    def until(self, target: str, code: str) -> None:
        """Wait for a blocker of this code, or for none."""
        self.node.until(lambda: self.code(target) == code, lambda: self.ask(target, "-n", self.node.namespace).stdout)

    def _make(self, kind: str, name: str, spec: Mapping[str, object]) -> None:
        metadata = {"name": name, "namespace": self.node.namespace}
        self.node.apply({"apiVersion": "kubevirt.io/v1", "kind": kind, "metadata": metadata, "spec": spec})


@contextmanager
def reporting(node: LabNode) -> Iterator[Admin]:
    """Run an agent that reports two GPUs on vfio-pci."""
    node.kubectl("apply", "-f", str(ROOT / "deploy/gpunodes.yaml"))
    node.until(lambda: node.cluster.kubectl("get", "gpunodes").returncode == 0, lambda: "the kind is not served yet")
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host("2xA10"), node.agent("", asks):
        node.until_allocatable(A10, 2)
        yield Admin(node)


def test_why_explains_a_pod_without_kubevirt(node: LabNode, tmp_path: Path) -> None:
    with reporting(node) as admin:
        assert admin.code("vm/vm-a") == "KubeVirtNotInstalled"
        pod = admin.make_launcher("vm-a", A10)
        admin.until(f"pod/{pod}", "")
        _, found = admin.why(f"pod/{pod}")
        node.until(lambda: bool(admin.why(f"pod/{pod}")[1]["devices"]), lambda: str(admin.why(f"pod/{pod}")))
        other = admin.make_launcher("vm-b", A10, 2)
        admin.until(f"pod/{other}", "AllAllocated")
        assert admin.ask(f"pod/{other}x", "-n", node.namespace).stdout.count(f"did you mean {other}?") == 2
        assert found["version"] == 1

        tenant = admin.tenant(tmp_path)
        shown = admin.ask(f"pod/{other}", kubeconfig=tenant)
        assert (shown.returncode, shown.stderr) == (1, "")
        assert "Unschedulable: pod" in shown.stdout
        assert "could not be read: list nodes: the API server answers 403" in " ".join(shown.stdout.split())
        assert admin.ask("vm/vm-a", kubeconfig=tenant).returncode == 1


def test_why_finds_gpuvirts_refusal_in_the_kubelets_message(node: LabNode) -> None:
    with reporting(node) as admin:
        for address in ("0000:65:00.0", "0000:ca:00.0"):
            (node.host / "sys/bus/pci/drivers/vfio-pci/unbind").write_text(address)
        pod = admin.make_launcher("vm-a", A10, on_node=NODE)
        node.until(lambda: node.status(pod).phase == "Failed", lambda: str(node.status(pod)))
        reported = node.status(pod).message
        # If the agent was faster, the kubelet itself refuses.
        assert admin.code(f"pod/{pod}") == ("NoDriver" if "NoDriver: " in reported else "AdmissionRefused"), reported


def test_why_explains_a_vm_from_creation_to_its_devices(node: LabNode) -> None:
    with reporting(node) as admin:
        install(node, SOURCES[-1])
        admin.make_kubevirt([])
        admin.make_vm("vm-a", A10, STOPPED)
        code, found = admin.why("vm/vm-a")
        assert (code, admin.code("vm/vm-a"), admin.code("vm/vm-c")) == (1, "VmStopped", "NoSuchObject")
        assert found["requests"] == {A10: 1}
        assert admin.code("vm/vm-a", "default") == "NoSuchObject"
        shown = admin.ask("vm/vm-a", "-n", "default").stdout
        assert f"gpuvirt why vm/vm-a -n {node.namespace}" in shown

        admin.make_vm("vm-a", A10, STARTED)
        admin.until("vm/vm-a", "VmNotStarted")
        admin.make_vmi("vm-a", A10)
        admin.until("vm/vm-a", "NotPermitted")
        admin.make_kubevirt([A10])
        admin.until("vmi/vm-a", "PodMissing")

        node.cluster.kubectl("cordon", NODE)
        try:
            pod = admin.make_launcher("vm-a", A10)
            admin.until("vm/vm-a", "NodeCordoned")
            node.until(lambda: "Unschedulable" in str(admin.why("vm/vm-a")[1]["scheduler"]), lambda: "no word of it")
            table = admin.ask("vm/vm-a", "-n", node.namespace).stdout.splitlines()
            first = table[table.index("Blocked by:") + 1]
            assert "NodeCordoned" in first, "\n".join(table)
            assert "kubectl uncordon" in "\n".join(table)
            assert all(len(line) <= 80 or line.startswith(" " * 9) for line in table)
        finally:
            node.cluster.kubectl("uncordon", NODE)
        node.until(lambda: node.status(pod).phase == "Running", lambda: str(node.status(pod)))
        for phase, expected in (("Scheduled", "PodNotRunning"), ("Running", "")):
            admin.report_phase("vm-a", phase)
            admin.until("vm/vm-a", expected)
        node.until(lambda: bool(admin.why("vm/vm-a")[1]["devices"]), lambda: str(admin.why("vm/vm-a")))

        admin.make_vm("vm-b", MISSPELT, STARTED)
        pod = admin.make_launcher("vm-b", MISSPELT)
        admin.until("vm/vm-b", "NoSuchResource")
        assert f"did you mean {A10}?" in " ".join(admin.ask("vm/vm-b", "-n", node.namespace).stdout.split())
