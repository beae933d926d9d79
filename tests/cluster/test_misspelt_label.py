"""A misspelt label on a real API server: all outlets report it, and no device changes."""

import json
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import NAMESPACE, PRESENT, WORKLOAD, ControlledNode, controlled
from tests.cluster.labnamespace import GPUVIRT

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

CONFIG, HALF = "nvidia.com/vgpu.config", "nvidia.com/GRID_T4-8Q"
GPU = "0000:3b:00.0"
REASON = r"jsonpath={.metadata.annotations.gpuvirt\.io/vgpu\.config\.reason}"
STATE = r"jsonpath={.metadata.labels.nvidia\.com/vgpu\.config\.state}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Place:
    """A node with its agent and its controller, and the outlets of both."""

    node: LabNode
    cluster: ControlledNode
    agent_port: int
    controller_port: int

    def kubectl(self, *arguments: str) -> str:
        return self.node.kubectl(*arguments)

    def page(self, port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return "".join(line for line in text.splitlines(keepends=True) if line.startswith("gpuvirt_desired_state_inv"))

    def log(self, name: str) -> str:
        lines = (self.node.cluster.folder / f"log/{name}.log").read_text().splitlines()
        return "".join(line for line in lines if "desired state: " in line)

    def command(self, *arguments: str) -> str:
        command = [*GPUVIRT, *arguments, "--host-root", str(self.node.host)]
        return self._ran(command)

    def status(self) -> str:
        asks = ("--kubeconfig", str(self.node.cluster.kubeconfig), "--namespace", NAMESPACE)
        return self._ran([*GPUVIRT, "status", *asks])

    def _ran(self, command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in {0, 1}, done.stderr
        return " ".join(done.stdout.split())


OUTLETS: Mapping[str, Callable[[Place], str]] = {
    "the state label": lambda place: place.kubectl("get", "node", NODE, "-o", STATE).replace("failed", "nonsense2"),
    "its annotation": lambda place: place.kubectl("get", "node", NODE, "-o", REASON),
    "the GpuNode": lambda place: place.kubectl("get", "gpunode", NODE, "-o", "jsonpath={.status.invalid}"),
    "the GpuNode's events": lambda place: place.kubectl("describe", "gpunode", NODE).partition("Events:")[2],
    "the Node's events": lambda place: place.kubectl("describe", "node", NODE).partition("Events:")[2],
    "the policy": lambda place: place.cluster.reported(),
    "the policy's condition": lambda place: place.kubectl(
        "get", "clusterpolicy", "cluster-policy", "-o",
        r'jsonpath={.status.conditions[?(@.type=="DesiredStateInvalid")].message}',
    ),
    "the policy's events": lambda place: place.kubectl("describe", "clusterpolicy", "cluster-policy").partition(
        "Events:"
    )[2],
    "the policy's count": lambda place: place.kubectl(
        "get", "clusterpolicy", "cluster-policy", "-o", "jsonpath={.status.nodes.invalid}"
    ).replace("1", "nonsense2"),
    "the agent's metric": lambda place: place.page(place.agent_port).replace('origin="label"', "nonsense2"),
    "the controller's metric": lambda place: place.page(place.controller_port).replace('origin="label"', "nonsense2"),
    "the agent's log": lambda place: place.log("agent"),
    "the controller's log": lambda place: place.log("controller"),
    "devices": lambda place: place.command("devices"),
    "devices -o json": lambda place: place.command("devices", "-o", "json"),
    "doctor": lambda place: place.command("doctor"),
    "why": lambda place: place.command("why", GPU),
    "status": lambda place: place.status(),
}  # fmt: skip


@contextmanager
def running(node: LabNode) -> Iterator[Place]:
    """Run a controller and an agent with metrics."""
    agent_port, controller_port = free_port(), free_port()
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig), "--listen", f"127.0.0.1:{agent_port}")
    with controlled(node) as cluster, node.simulated_host("4xT4"), node.nodes_kept():
        cluster.apply_policy({})
        cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
        with cluster.controller("--listen", f"127.0.0.1:{controller_port}"), node.agent("", asks):
            yield Place(node, cluster, agent_port, controller_port)


def column(place: Place) -> list[str]:
    return place.kubectl("get", "gpunode", NODE, "--no-headers").split()[5:7]


def test_a_misspelt_label_is_reported_by_all_outlets_and_changes_nothing(node: LabNode) -> None:
    with running(node) as place:
        node.until_allocatable(HALF, 8)
        place.cluster.until_reported("True Reconciled")
        place.cluster.label(f"{CONFIG}=nonsense2")

        def silent() -> dict[str, str]:
            reported = {name: outlet(place) for name, outlet in OUTLETS.items()}
            return {name: text for name, text in reported.items() if "nonsense2" not in text}

        node.until(lambda: silent() == {}, lambda: json.dumps(silent(), indent=1))
        assert column(place) == ["False", "ConfigInvalid"]
        near = OUTLETS["the policy's condition"](place)
        assert "of which the nearest are: " in near
        assert "default" in near
        assert node.allocatable(HALF) == 8
        place.cluster.label(f"{WORKLOAD}=vm-vgpus")
        place.cluster.until_reported("did you mean vm-vgpu?")
        node.until(lambda: "did you mean vm-vgpu?" in place.status(), place.status)
        assert node.allocatable(HALF) == 8
        place.cluster.label(f"{WORKLOAD}=vm-vgpu", f"{CONFIG}=T4-4Q")
        node.until_allocatable("nvidia.com/GRID_T4-4Q", 16)
        place.cluster.until_reported("True Reconciled")
        assert column(place) == ["True", "Reconciled"]
        still = {name for name in OUTLETS if "'s log" not in name and "events" not in name}
        node.until(
            lambda: {name for name in still if "nonsense2" in OUTLETS[name](place)} == set(),
            lambda: str({name for name in still if "nonsense2" in OUTLETS[name](place)}),
        )
