"""The commands that a user of the demo's cluster types, in order, and the manifests that these commands name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from lab.cluster.images import PREFIX
from lab.cluster.settings import NODE

HOST = "2xA10-sriov"
"""The simulated host: its GPUs carry vGPUs, and NVIDIA's driver has them, so that pods can also share them."""
SCHEDULER = "gpuvirt-scheduler"
VGPU, UNITS = "nvidia.com/NVIDIA_A10-12Q", "nvidia.com/vgpu"
LABEL = f"kubectl label node {NODE} --overwrite nvidia.com/gpu.workload.config="


@dataclass(frozen=True, slots=True)
class Step:
    """Commands that belong together."""

    about: str
    commands: tuple[str, ...]


def pods() -> Mapping[str, Mapping[str, object]]:
    """Return the pods that the walk creates, by their names."""
    return {
        "one-vgpu": _pod("one-vgpu", {VGPU: "1"}),
        "five-vgpus": _pod("five-vgpus", {VGPU: "5"}),
        "share-1": _pod("share-1", {UNITS: "300"}, SCHEDULER),
        "share-2": _pod("share-2", {UNITS: "600"}, SCHEDULER),
    }


def write_pods(folder: Path) -> None:
    """Write the manifests."""
    folder.mkdir(exist_ok=True)
    for name, pod in pods().items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(pod))


def steps(manifests: Path) -> Iterator[Step]:
    """Yield the steps; `manifests` is the folder of the pods."""

    def create(*names: str) -> Iterator[str]:
        yield f"kubectl apply {' '.join(f'-f {manifests}/{name}.yaml' for name in names)}"
        yield f"kubectl wait --for=condition=Ready --timeout=120s {' '.join(f'pod/{name}' for name in names)}"

    yield Step(
        "A label makes vGPUs on the node, and KubeVirt permits them:",
        (
            f"{LABEL}vm-vgpu",
            _until(VGPU, "4"),
            "gpuvirt status --wait",
            "kubectl get gpunodes",
            f"gpuvirt devices --node {NODE}",
            "kubectl get kubevirt kubevirt -n kubevirt -o jsonpath='{.spec.configuration.permittedHostDevices}'; echo",
        ),
    )
    yield Step(
        "A pod gets a vGPU, as the pod of a VM does; another one requests more than there are:",
        (
            *create("one-vgpu"),
            "kubectl get gpunodes",
            f"kubectl apply -f {manifests}/five-vgpus.yaml",
            "gpuvirt why pod/five-vgpus",
            f"gpuvirt why node/{NODE}",
            "kubectl delete pod one-vgpu five-vgpus",
        ),
    )
    yield Step(
        "Another label has pods share the GPUs, by the thousandth:",
        (f"{LABEL}shared", _until(UNITS, "2k"), *create("share-1", "share-2"), "gpuvirt shares"),
    )


def text(exports: str, manifests: Path) -> str:
    """Return what to type, each command on a line of its own behind four blanks."""
    blocks = [("In a shell:", (exports,)), *((step.about, step.commands) for step in steps(manifests))]
    lines = (line for about, commands in blocks for line in (about, *(f"    {command}" for command in commands), ""))
    return "\n".join((*lines, "`make lab-down` ends the cluster and removes all that it has left."))


def _until(resource: str, count: str) -> str:
    name = resource.replace(".", r"\.")
    return f"kubectl wait --timeout=180s node/{NODE} --for=jsonpath='{{.status.allocatable.{name}}}'={count}"


def _pod(name: str, limits: Mapping[str, str], scheduler: str = "default-scheduler") -> Mapping[str, object]:
    container = {
        "name": "main",
        "image": f"{PREFIX}/box:1",
        "imagePullPolicy": "Never",
        "args": ["env; sleep 100000"],
        "resources": {"limits": dict(limits)},
    }
    spec = {
        "schedulerName": scheduler,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
