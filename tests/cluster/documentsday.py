"""The document's day on the lab's API server: five workers that kwok plays, a vCenter, their schedule, pods."""

import base64
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.controllerlab import NAMESPACE, ROOT
from tests.cluster.labnamespace import BOX, GPUVIRT, LabNamespace
from tests.cluster.workernodes import PLAYED, WorkerNodes
from tests.hypervisors.simulated import Center

DAY, NIGHT = {"worker0", "worker1", "worker2", "worker3"}, {"worker4"}
HOLDS = {"from": "2020-01-01T00:00", "until": "2099-01-01T00:00"}
SPEC = {
    "hypervisor": {"vsphere": {"secretRef": {"name": "vcenter"}}},
    "phases": [
        {"name": "day", "start": "0 7 * * *", "workers": {"matchLabels": {"vgpu.type": "v100-4q-4GB"}}},
        {"name": "night", "start": "0 20 * * *", "workers": {"matchLabels": {"vgpu.type": "v100-16q-16GB"}}},
    ],
    "overrides": [{"phase": "day", **HOLDS}],
}


class Day:
    """Five workers, their schedule, and what tests do and see of them. The controller is run by the test."""

    def __init__(self, node: LabNamespace, workers: WorkerNodes, vcenter: Center) -> None:
        self.node, self.workers, self.vcenter = node, workers, vcenter

    def create(self) -> None:
        """Create the Secret and the schedule."""
        credentials = self.vcenter.credentials
        values = {
            "server": credentials.server,
            "ca": credentials.ca,
            "user": credentials.user,
            "password": credentials.password,
        }
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        metadata = {"name": "vcenter", "namespace": NAMESPACE}
        self.node.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        kind = {"apiVersion": "gpuvirt.io/v1alpha1", "kind": "VgpuSchedule"}
        self.node.apply({**kind, "metadata": {"name": "gpus", "namespace": NAMESPACE}, "spec": SPEC})

    def status(self, path: str) -> str:
        path = f"jsonpath={{.status{path}}}"
        return self.node.cluster.kubectl("get", "vgpuschedule", "gpus", "-n", NAMESPACE, "-o", path).stdout

    def until_reached(self, phase: str) -> None:
        self.node.until(
            lambda: (self.status(".phase"), self.status(".transition")) == (phase, ""), lambda: self.status("")
        )

    def gpuvirt(self, *arguments: str) -> str:
        """Run a command as an admin of 80 columns, and return what it prints."""
        command = [*GPUVIRT, *arguments, "--kubeconfig", str(self.node.cluster.kubeconfig)]
        environment = os.environ | {"COLUMNS": "80"}  # noqa: TID251  a user's terminal
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def train(self, name: str, vgpu_type: str, replicas: int) -> None:
        """Create a deployment for workers of a vGPU type."""
        labels = {"app": name}
        spec = {
            "nodeSelector": {"vgpu.type": vgpu_type},
            "tolerations": [{"key": PLAYED["key"], "operator": "Exists"}],
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "compute", "image": BOX, "args": ["sleep 1000"]}],
        }
        template = {"metadata": {"labels": labels}, "spec": spec}
        deployment = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        metadata = {"name": name, "namespace": self.node.namespace}
        self.node.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": deployment})

    def budget(self, name: str, max_unavailable: int) -> None:
        """Create or change the PodDisruptionBudget of a deployment."""
        spec = {"maxUnavailable": max_unavailable, "selector": {"matchLabels": {"app": name}}}
        metadata = {"name": name, "namespace": self.node.namespace}
        self.node.apply({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec})

    def phases(self, name: str) -> list[str]:
        """Return the phases of a deployment's pods."""
        return self.node.kubectl("get", "pods", "-l", f"app={name}", "-o", "jsonpath={.items[*].status.phase}").split()

    def until_pods(self, name: str, phases: list[str]) -> None:
        self.node.until(lambda: self.phases(name) == phases, lambda: f"{name}: {self.phases(name)} {self.status('')}")


@contextmanager
def schedules_served(node: LabNamespace) -> Iterator[None]:
    """Install the kind of schedules; those of the test are deleted before the controller's namespace is cleared."""
    node.kubectl("apply", "-f", str(ROOT / "deploy/vgpuschedules.yaml"))
    node.until(
        lambda: node.cluster.kubectl("get", "vgpuschedules").returncode == 0, lambda: "VgpuSchedules are not served yet"
    )
    try:
        yield
    finally:
        node.cluster.kubectl("delete", "vgpuschedules", "--all", "--namespace", NAMESPACE, "--wait=false")
        node.cluster.kubectl("delete", "secret", "vcenter", "--namespace", NAMESPACE, "--ignore-not-found")
