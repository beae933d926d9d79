"""The lab's node whose GPUs are shared: the agent's part for shares as a process, its records, and pods with units."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from lab.cluster import settings

from gpuvirt.agent.shares import sharefiles
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, PodShares
from gpuvirt.model.shares.node.records import ShareRecords
from tests.cluster.clusterlab import LabNode
from tests.cluster.labnamespace import BOX, PATIENCE_S

VGPU = "nvidia.com/vgpu"
A, B = "GPU-8a5c0001-0000-4000-8000-000000000001", "GPU-8a5c0002-0000-4000-8000-000000000002"
SHOW = "env | grep -E '^(GPUVIRT|NVIDIA)_' | sort; ls /dev | grep nvidia"
SLEEP = f"{SHOW}; sleep 1000"


class Metadata(msgspec.Struct):
    """Fields of a pod's metadata."""

    uid: str
    annotations: dict[str, str] = {}


class Pod(msgspec.Struct):
    """A pod's metadata."""

    metadata: Metadata


class Shared:
    """The node, and the agent's part for shared GPUs as a process."""

    def __init__(self, node: LabNode, folder: Path, cdi: Path) -> None:
        self.node = node
        self.folder = folder
        self.cdi = cdi
        self.gpus = {A: 1000, B: 1000}

    @contextmanager
    def agent(self, limited_by: Path | str = "") -> Iterator["subprocess.Popen[bytes]"]:
        """Run the agent; with a library, or a driver's folder with an MPS daemon, shares are limits."""
        config, gpus = str(self.node.cluster.kubeconfig), json.dumps(self.gpus)
        arguments = [str(self.folder), str(self.cdi), config, gpus, str(limited_by)]
        log = self.node.cluster.folder / "log/shares.log"
        command = [sys.executable, "-m", "tests.cluster.shareagent", *arguments]
        with log.open("a") as output, subprocess.Popen(command, stderr=output) as agent:
            try:
                self.node.until_allocatable(VGPU, sum(self.gpus.values()))
                yield agent
            finally:
                agent.send_signal(signal.SIGTERM)
                agent.wait(PATIENCE_S)

    @property
    def records(self) -> ShareRecords:
        return sharefiles.FORMAT.decode((self.folder / sharefiles.FILE).read_bytes()).value

    @property
    def specs(self) -> Sequence[str]:
        return sorted(path.name for path in self.cdi.glob("*share-*"))

    def mount(self, library: Path) -> None:
        """Let NVIDIA's spec mount a library into each container."""
        spec = self.cdi / "nvidia.json"
        content = json.loads(spec.read_text())
        mounts = [{"hostPath": str(library), "containerPath": f"/usr/lib/{library.name}", "options": ["ro", "bind"]}]
        spec.write_text(json.dumps({**content, "containerEdits": {"mounts": mounts}}))

    def start(
        self, name: str, *containers: Mapping[str, object], gpu: str | None = None, policy: str = "Never"
    ) -> None:
        """Create a pod whose containers all have a GPU by its annotation; init containers have `init`."""
        self.node.apply(self.pod(name, *containers, gpu=gpu, policy=policy))

    def pod(
        self, name: str, *containers: Mapping[str, object], gpu: str | None, policy: str, grace_s: int = 0
    ) -> Mapping[str, object]:
        asked = {str(container["name"]): {gpu: container["units"]} for container in containers}
        annotations = {SHARES_ANNOTATION: json.dumps({"containers": asked})} if gpu is not None else {}
        spec = {
            "restartPolicy": policy,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace_s,
            "initContainers": [manifest(container) for container in containers if "init" in container],
            "containers": [manifest(container) for container in containers if "init" not in container],
        }
        metadata = {"name": name, "namespace": self.node.namespace, "annotations": annotations}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def metadata(self, name: str) -> Metadata:
        found = self.node.cluster.api.get(f"/api/v1/namespaces/{self.node.namespace}/pods/{name}")
        assert found is not None
        return msgspec.json.decode(found, type=Pod).metadata

    def annotated(self, name: str, container: str) -> str | None:
        """Return the GPU of a container by the pod's annotation."""
        text = self.metadata(name).annotations.get(SHARES_ANNOTATION)
        return next(iter(msgspec.json.decode(text, type=PodShares).containers[container])) if text else None

    def recorded(self, name: str, container: str) -> str | None:
        """Return the GPU of a container by the agent's records."""
        found = {str(uid): pod for uid, pod in self.records.pods.items()}.get(self.metadata(name).uid)
        shares = {str(container): share for container, share in found.containers.items()} if found is not None else {}
        return next(iter(shares[container].gpus)) if shares else None

    def seen(self, name: str, container: str = "main") -> str:
        """Return the GPU that a container sees; it equals annotation and records."""
        node = self.node
        node.until(lambda: len(node.output(name, container)) >= 4, lambda: f"{node.status(name)} {self.log}")
        printed = dict(line.split("=", 1) for line in node.output(name, container) if "=" in line)
        gpu = printed["GPUVIRT_GPUS"]
        assert printed["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert f"nvidia{[A, B].index(gpu)}" in node.output(name, container)
        assert self.recorded(name, container) == gpu
        node.until(lambda: self.annotated(name, container) == gpu, lambda: str(self.metadata(name)))
        return gpu

    @property
    def log(self) -> str:
        return (self.node.cluster.folder / "log/shares.log").read_text()[-2000:]

    def used(self) -> Mapping[str, int]:
        used = {A: 0, B: 0}
        for pod in self.records.pods.values():
            for gpu, units in pod.placement.used.items():
                used[gpu] += units
        return used


def manifest(one: Mapping[str, object]) -> Mapping[str, object]:
    sidecar = {"restartPolicy": "Always"} if one.get("init") == "sidecar" else {}
    return {
        "name": one["name"],
        "image": BOX,
        "imagePullPolicy": "Never",
        "args": [one.get("script", SHOW)],
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
        "resources": {"limits": {VGPU: str(one["units"])}},
        **sidecar,
    }


def main(units: int, script: str = SLEEP) -> Mapping[str, object]:
    return {"name": "main", "units": units, "script": script}


@contextmanager
def shared_node(node: LabNode, folder: Path) -> Iterator[Shared]:
    """Give the node NVIDIA's spec of two GPUs, and the agent a folder."""
    cdi = node.cluster.folder / settings.CDI
    cdi.mkdir(exist_ok=True)
    nodes = [{"path": f"/dev/nvidia{number}", "hostPath": "/dev/null"} for number in range(2)]
    devices = [
        {"name": gpu, "containerEdits": {"deviceNodes": [node]}} for gpu, node in zip((A, B), nodes, strict=True)
    ]
    (cdi / "nvidia.json").write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": {}})
    )
    yield Shared(node, folder, cdi)
    shutil.rmtree(cdi)


def shim_of(uid: str) -> int:
    """Return the pid of the shim that runs a pod's containers: the parent of their first processes."""
    parents: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):  # the process has ended meanwhile
            if f"/pods/{uid}/etc-hosts" in path.read_text():
                parents.add(int(path.with_name("stat").read_text().rpartition(")")[2].split()[1]))
    (shim,) = (pid for pid in parents if "containerd-shim" in Path(f"/proc/{pid}/cmdline").read_text())
    return shim


def resume(pid: int) -> None:
    """Let a stopped process continue, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
