"""Controllers on the lab's API server, as processes, and their policies."""

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml
from lab.cluster.settings import NODE

from gpuvirt.kube.kinds.clusterpolicy import REQUIRED
from tests.cluster.labnamespace import GPUVIRT, PATIENCE_S, LabNamespace
from tests.controller.operands.operandaccounts import access

ROOT = Path(__file__).parent.parent.parent
NAMESPACE = "gpu-operator"
PRESENT = "feature.node.kubernetes.io/pci-10de.present"
WORKLOAD = "nvidia.com/gpu.workload.config"
ALL_ON: Mapping[str, object] = {
    **{name: {} for name in REQUIRED},
    "sandboxWorkloads": {"enabled": True},
    "vfioManager": {"enabled": True},
    "vgpuDeviceManager": {"enabled": True},
    "sandboxDevicePlugin": {"enabled": True},
}
"""The fields that the kind requires, and all fields for VMs."""


def install_gpunodes(node: LabNamespace) -> None:
    """Install the GpuNode kind, and wait until it is served."""
    node.kubectl("apply", "-f", str(ROOT / "deploy/gpunodes.yaml"))
    node.until(lambda: node.cluster.kubectl("get", "gpunodes").returncode == 0, lambda: "the kind is not served yet")


class ControlledNode:
    """The cluster's node, from the view of its controller and an admin."""

    def __init__(self, node: LabNamespace) -> None:
        self.node = node
        self._applied: list[str] = []

    def apply_policy(self, fields: Mapping[str, object], name: str = "cluster-policy") -> None:
        """Apply a ClusterPolicy."""
        kind = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": name}}
        self.node.apply({**kind, "spec": {**ALL_ON, **fields}})

    @contextmanager
    def controller(self, *options: str) -> Iterator["subprocess.Popen[str]"]:
        """Run a controller as a process of the real host."""
        asks = ("--kubeconfig", str(self.node.cluster.kubeconfig), "--namespace", NAMESPACE, "--listen", "")
        log = self.node.cluster.folder / "log/controller.log"
        command = [*GPUVIRT, "controller", "--log-format", "json", *asks, *options]
        with log.open("a") as output, subprocess.Popen(command, stderr=output, text=True) as process:
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(PATIENCE_S)

    def label(self, *labels: str) -> None:
        """Change labels of the node: `key=value`, or `key-`."""
        self.node.kubectl("label", "node", NODE, "--overwrite", *labels)

    def labels(self) -> Mapping[str, str]:
        return self.node.node().metadata.labels

    def deployed(self) -> set[str]:
        """Return the operands for which the node is labelled."""
        prefix = "nvidia.com/gpu.deploy."
        return {
            key.removeprefix(prefix)
            for key, value in self.labels().items()
            if (key.startswith(prefix), value) == (True, "true")
        }

    def until_deployed(self, operands: set[str]) -> None:
        """Wait until the node is labelled for exactly these operands."""
        self.node.until(lambda: self.deployed() == operands, lambda: f"{self.deployed()}; {self.reported()}")

    def reported(self, policy: str = "cluster-policy") -> str:
        """Return the policy's `Ready` condition: its status, reason and message."""
        ready = '{range .status.conditions[?(@.type=="Ready")]}{.status} {.reason} {.message}{end}'
        done = self.node.cluster.kubectl("get", "clusterpolicy", policy, "-o", f"jsonpath={ready}")
        return done.stdout

    def until_reported(self, text: str, policy: str = "cluster-policy") -> None:
        """Wait until the policy's condition contains a text."""
        self.node.until(lambda: text in self.reported(policy), lambda: self.reported(policy))

    def apply_agent_access(self) -> None:
        """Create the agent's account and rights in the controller's namespace, as an install does."""
        kept = [
            document
            for document in yaml.safe_load_all((ROOT / "deploy/node.yaml").read_text())
            if document["kind"] not in {"DaemonSet", "ConfigMap", "Namespace"}
        ]
        text = yaml.safe_dump_all(kept).replace("namespace: gpuvirt", f"namespace: {NAMESPACE}")
        text = text.replace("serviceaccount:gpuvirt:", f"serviceaccount:{NAMESPACE}:")
        self._apply(text)

    def apply_operand_access(self) -> None:
        """Create the accounts and rights of NVIDIA's operands, as an install does."""
        self._apply(access(NAMESPACE))

    def _apply(self, text: str) -> None:
        done = self.node.cluster.kubectl("apply", "-f", "-", given=text)
        assert done.returncode == 0, done.stderr
        self._applied.append(text)

    def clear(self) -> None:
        """Delete the applied objects, which a chart would refuse to adopt, and the controllers' stored state."""
        for text in self._applied:
            self.node.cluster.kubectl("delete", "--ignore-not-found", "-f", "-", given=text)
        for kind in ("daemonsets", "configmaps", "leases"):
            self.node.cluster.kubectl("delete", kind, "--all", "--namespace", NAMESPACE)

    def get(self, what: str, path: str) -> str:
        """Return a field of an object in the controller's namespace, by its JSON path."""
        done = self.node.cluster.kubectl("--namespace", NAMESPACE, "get", what, "-o", f"jsonpath={{{path}}}")
        return done.stdout

    def gpuvirt(self, *arguments: str) -> str:
        """Run a command as the cluster's admin."""
        done = self._run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> str:
        """Return the output of `gpuvirt status`, whatever its exit code."""
        return self._run("status").stdout

    def components(self) -> list[list[str]]:
        """Return the JSON of `gpuvirt status`: each component, whether it is ready, and its state."""
        found = json.loads(self._run("status", "-o", "json").stdout)
        return [
            [component["component"], "yes" if component["ready"] else "no", component["state"]]
            for component in found["components"]
        ]

    def until_shown(self, *expected: list[str]) -> None:
        """Wait until `gpuvirt status` shows exactly these components, their readiness and their states."""
        self.node.until(lambda: self.components() == list(expected), self.status)

    def report(self, *, vfs: int, mode: str) -> None:
        """Write a GpuNode's status as an agent that observes such a GPU."""
        generation = self.node.kubectl("get", "gpunode", NODE, "-o", "jsonpath={.metadata.generation}")
        status = (
            f'{{"status": {{"observedGeneration": {generation},'
            f' "gpus": [{{"address": "0000:65:00.0", "mode": "{mode}", "vfs": {vfs}}}]}}}}'
        )
        self.node.kubectl("patch", "gpunode", NODE, "--subresource=status", "--type=merge", "-p", status)

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        asks = ("--kubeconfig", str(self.node.cluster.kubeconfig), "--namespace", NAMESPACE)
        return subprocess.run([*GPUVIRT, *arguments, *asks], capture_output=True, text=True, check=False)


def agents_parts(state: str) -> list[list[str]]:
    """Return the rows of `gpuvirt status` for the agent's components, none of which is ready."""
    parts = ("sandbox-device-plugin", "sandbox-validator", "vgpu-device-manager")
    return [[part, "no", state] for part in parts]


@contextmanager
def controlled(node: LabNamespace) -> Iterator[ControlledNode]:
    """Install gpuvirt's kinds and the controller's namespace."""
    kinds = ("deploy/gpunodes.yaml", "deploy/clusterpolicies.yaml")
    for file in kinds:
        node.kubectl("apply", "-f", str(ROOT / file))
    node.cluster.kubectl("create", "namespace", NAMESPACE)
    served = ("gpunodes", "clusterpolicies")
    node.until(
        lambda: all(node.cluster.kubectl("get", kind).returncode == 0 for kind in served),
        lambda: "the kinds are not served yet",
    )
    found = ControlledNode(node)
    try:
        yield found
    finally:
        found.clear()
