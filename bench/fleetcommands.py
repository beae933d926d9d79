"""Measures the commands that read a whole cluster, each as a process, and prints a table for docs/benchmarks.md.

The cluster is a simulated API server in this process, which answers with plain JSON: nodes with eight GPUs each, a VM's
pod on every GPU, and one pod that waits for a GPU. In a fifth of the nodes no GPU is healthy.

    .venv/bin/python -m bench.fleetcommands --nodes 500
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commandline import GPUVIRT, PATH
from tests.extender.podapi import serving
from tests.kube.scriptedapi import Call, Reply

GPUS = 8
RESOURCE = "nvidia.com/GA102GL_A10"
NAMESPACE = "gpu-operator"
COMMANDS = ("status", "why pod/train -n prod", "why node/node005", "devices --all-nodes", "shares")
RUNS = 5

Content = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The objects of a cluster of some number of nodes."""

    nodes: tuple[Content, ...]
    gpu_nodes: tuple[Content, ...]
    agents: tuple[Content, ...]
    pods: tuple[Content, ...]

    def answer(self, call: Call) -> Reply:
        """Return the API server's answer."""
        lists: Mapping[str, Sequence[Content]] = {
            "clusterpolicies": (_policy(),),
            "gpunodes": self.gpu_nodes,
            "nodes": self.nodes,
            f"{NAMESPACE}/pods": self.agents,
            "/v1/pods": self.pods,
        }
        for end, found in lists.items():
            if call.path.endswith(end):
                return _listed(found)
        *_, kind, name = call.path.split("/")
        kinds = {"nodes": self.nodes, "gpunodes": self.gpu_nodes, "pods": self.pods}
        one = next((item for item in kinds.get(kind, ()) if _name(item) == name), None)
        return (200, one) if one is not None else _listed(())


def fleet(count: int) -> Fleet:
    """Return a cluster of `count` nodes."""
    names = [f"node{number:03}" for number in range(count)]
    running = [_pod(f"virt-launcher-{number}", names[number % count]) for number in range(GPUS * count)]
    return Fleet(
        tuple(map(_node, names)),
        tuple(_gpu_node(name, healthy=number % 5 != 0) for number, name in enumerate(names)),
        tuple(_agent(name) for name in names),
        (*running, _pod("train", None)),
    )


def _listed(items: Iterable[Content]) -> Reply:
    return 200, {"metadata": {"resourceVersion": "1"}, "items": list(items)}


def _name(item: Content) -> object:
    metadata = item["metadata"]
    return metadata["name"] if isinstance(metadata, dict) else None


def _condition(kind: str, status: str, reason: str, message: str = "") -> Content:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def _policy() -> Content:
    ready = _condition("Ready", "True", "Reconciled")
    status = {"state": "ready", "namespace": NAMESPACE, "conditions": [ready]}
    return {"metadata": {"name": "cluster-policy"}, "spec": {}, "status": status}


def _node(name: str) -> Content:
    deployed = {f"nvidia.com/gpu.deploy.{part}": "true" for part in ("sandbox-device-plugin", "vfio-manager")}
    labels = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.workload.config": "vm-passthrough", **deployed}
    counts = {RESOURCE: str(GPUS), "cpu": "64"}
    conditions = [_condition("Ready", "True", "KubeletReady")]
    status = {"capacity": counts, "allocatable": counts, "conditions": conditions}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def _gpu_node(name: str, *, healthy: bool) -> Content:
    text = "GroupShared: 0000:41:00.0 shares its IOMMU group with two others"
    reasons = [] if healthy else [{"code": "GroupShared", "message": text}]
    gpus = [
        {
            "address": f"0000:{0x41 + number:02x}:00.0",
            "name": "GA102GL [A10]",
            "mode": "passthrough",
            "driver": "vfio-pci",
            "offeredAs": RESOURCE,
            "healthy": healthy,
            "reasons": reasons,
        }
        for number in range(GPUS)
    ]
    ready = _condition("Ready", "True", "Reconciled") if healthy else _condition("Ready", "False", "GroupShared", text)
    resource = {"name": RESOURCE, "healthy": GPUS, "allocated": GPUS, "registered": True}
    return {"metadata": {"name": name}, "status": {"gpus": gpus, "resources": [resource], "conditions": [ready]}}


def _agent(node: str) -> Content:
    metadata = {"name": f"gpuvirt-node-{node}", "namespace": NAMESPACE, "labels": {"app": "gpuvirt-node"}}
    conditions = [_condition("Ready", "True", "")]
    spec = {"nodeName": node, "containers": [{"name": "agent"}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running", "conditions": conditions}}


def _pod(name: str, node: str | None) -> Content:
    amount = {RESOURCE: "1"}
    container = {"name": "compute", "resources": {"requests": amount, "limits": amount}}
    spec = {"containers": [container], **({"nodeName": node} if node is not None else {})}
    condition = _condition("PodScheduled", "True" if node is not None else "False", "")
    status = {"phase": "Running" if node is not None else "Pending", "conditions": [condition]}
    return {"metadata": {"name": name, "namespace": "prod", "uid": f"uid-{name}"}, "spec": spec, "status": status}


async def measure(count: int) -> None:
    """Print how long each command takes, from its start to its end."""
    print(f"| {count} nodes | median, s | longest of {RUNS}, s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        async with serving(fleet(count).answer, Path(folder)) as server:
            environment = {"PATH": PATH, "KUBECONFIG": str(server.kubeconfig)}
            for command in COMMANDS:
                took_s = [await _once(command, environment) for _ in range(RUNS)]
                print(f"| `gpuvirt {command}` | {statistics.median(took_s):.2f} | {max(took_s):.2f} |")


async def _once(command: str, environment: Mapping[str, str]) -> float:
    start_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *GPUVIRT, *command.split(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    output, errors = await process.communicate()
    if not output or process.returncode not in {0, 1}:
        raise SystemExit(f"gpuvirt {command}: {errors.decode()}")
    return time.monotonic() - start_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500)
    asyncio.run(measure(parser.parse_args().nodes))
