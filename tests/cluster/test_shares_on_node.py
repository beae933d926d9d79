"""Shares of GPUs on a real kubelet and containerd with CDI: containers see the GPUs of their annotations."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from lab.cluster import settings
from lab.cluster.cluster import KUBELET_ROOT

from gpuvirt.kubelet import checkpoint
from gpuvirt.kubelet.podresources import PodResourcesUnknownError, ask_consumers
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, PodShares
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.node.shares import recordstore
from gpuvirt.paths import KubeletPaths
from tests.cluster.clusterlab import BOX, PATIENCE_S, POD_RESOURCES, LabNode

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

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
    def agent(self) -> Iterator["subprocess.Popen[bytes]"]:
        arguments = [str(self.folder), str(self.cdi), str(self.node.cluster.kubeconfig), json.dumps(self.gpus)]
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
        return recordstore.FORMAT.decode((self.folder / recordstore.FILE).read_bytes()).value

    @property
    def specs(self) -> Sequence[str]:
        return sorted(path.name for path in self.cdi.glob("*share-*"))

    def start(
        self, name: str, *containers: Mapping[str, object], gpu: str | None = None, policy: str = "Never"
    ) -> None:
        """Create a pod whose containers all have a GPU by its annotation; init containers have `init`."""
        self.node.apply(self.pod(name, *containers, gpu=gpu, policy=policy))

    def pod(
        self, name: str, *containers: Mapping[str, object], gpu: str | None, policy: str, grace_s: int = 0
    ) -> Mapping[str, object]:
        asked = {str(one["name"]): {gpu: one["units"]} for one in containers}
        annotations = {SHARES_ANNOTATION: json.dumps({"containers": asked})} if gpu is not None else {}
        spec = {
            "restartPolicy": policy,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace_s,
            "initContainers": [manifest(one) for one in containers if "init" in one],
            "containers": [manifest(one) for one in containers if "init" not in one],
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
        shares = {str(one): share for one, share in found.containers.items()} if found is not None else {}
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


@pytest.fixture
def shared(node: LabNode, tmp_path: Path) -> Iterator[Shared]:
    """The node with NVIDIA's spec of two GPUs."""
    cdi = node.cluster.folder / settings.CDI
    cdi.mkdir(exist_ok=True)
    nodes = [{"path": f"/dev/nvidia{number}", "hostPath": "/dev/null"} for number in range(2)]
    devices = [{"name": gpu, "containerEdits": {"deviceNodes": [one]}} for gpu, one in zip((A, B), nodes, strict=True)]
    (cdi / "nvidia.json").write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": {}})
    )
    yield Shared(node, tmp_path, cdi)
    shutil.rmtree(cdi)


def test_two_equal_pods_at_once_see_the_gpus_of_their_annotations(shared: Shared) -> None:
    with shared.agent():
        names = {f"pod-{number}": (A, B)[number % 2] for number in range(6)}
        pods = [shared.pod(name, main(300), gpu=gpu, policy="Never") for name, gpu in names.items()]
        shared.node.apply({"apiVersion": "v1", "kind": "List", "items": pods})
        assert {name: shared.seen(name) for name in names} == names
        assert shared.used() == {A: 900, B: 900}
        shared.start("free", main(100))
        assert shared.seen("free") in {A, B}
        for name in (*names, "free"):
            shared.node.delete(name)
        shared.node.until(lambda: not shared.specs and not shared.records.pods, lambda: f"{shared.specs}")


def test_init_containers_sidecars_and_several_containers_have_their_shares(shared: Shared) -> None:
    with shared.agent():
        side = {"name": "side", "units": 100, "init": "sidecar", "script": SLEEP}
        first = {"name": "first", "units": 500, "init": "init"}
        other = {"name": "other", "units": 200, "script": SLEEP}
        shared.start("all", side, first, main(500), other, gpu=B)
        assert {shared.seen("all", one) for one in ("side", "first", "main", "other")} == {B}
        assert shared.used() == {A: 0, B: 800}
        shared.start("ends", main(1000, SHOW), gpu=A)
        assert shared.seen("ends") == A
        shared.node.until(lambda: shared.used()[A] == 0, lambda: str(shared.records))


def test_restarts_of_container_agent_and_kubelet_change_no_gpu(shared: Shared) -> None:
    with shared.agent() as agent:
        shared.start("again", main(300, f"{SHOW}; sleep 3; exit 1"), gpu=B, policy="Always")
        shared.start("keeps", main(400), gpu=A)
        assert (shared.seen("again"), shared.seen("keeps")) == (B, A)
        before = shared.records
        agent.send_signal(signal.SIGKILL)
        agent.wait(PATIENCE_S)
    node = shared.node

    def restarts() -> int:
        return node.status("again").containerStatuses[0].restartCount

    with shared.agent():
        assert shared.records == before
        count = restarts()
        node.until(lambda: restarts() > count, lambda: str(node.status("again")))
        node.cluster.stop("kubelet")
        node.cluster.start_kubelet()
        node.until_allocatable(VGPU, 2000)
        count = restarts()
        node.until(lambda: restarts() > count, lambda: str(node.status("again")))
        logs = Path("/var/log/pods").glob(f"{node.namespace}_again_*/main/*.log")
        assert all(B in log.read_text() for log in logs if log.stat().st_size)
        assert node.status("keeps").containerStatuses[0].restartCount == 0
        shared.start("new", main(700), gpu=A)
        assert shared.seen("new") == B, "600 are free on the GPU of its annotation, and 700 on the other"
        shared.start("waits", main(600), gpu=B)
        assert shared.seen("waits") == A


def test_a_pod_that_gets_no_gpu_has_an_event_with_the_reason(shared: Shared) -> None:
    node = shared.node
    with shared.agent():
        names = [f"pod-{number}" for number in range(3)]
        pods = [shared.pod(name, main(600), gpu=A, policy="Never") for name in names]
        node.apply({"apiVersion": "v1", "kind": "List", "items": pods})

        def running() -> list[str]:
            return [name for name in names if node.status(name).phase == "Running"]

        node.until(lambda: len(running()) == 2, lambda: f"{[node.status(name) for name in names]} {shared.log}")
        (waits,) = set(names) - set(running())

        def described() -> str:
            return node.kubectl("describe", "pod", waits)

        node.until(lambda: "gpuvirt.io/node" in described(), described)
        assert node.status(waits).phase == "Pending", "all three were admitted before the first had its GPU"
        assert "Warning  NoRoom" in described()
        node.delete(running()[0])
        node.until(lambda: node.status(waits).phase == "Running", described)
        assert len([line for line in described().splitlines() if "gpuvirt.io/node" in line]) == 1
        shared.start("never", main(700))
        node.until(lambda: node.status("never").phase == "Failed", lambda: node.kubectl("describe", "pod", "never"))
        assert "NoRoom: nvidia.com/vgpu requests 700 units" in node.kubectl("describe", "pod", "never")


def test_a_pod_that_is_deleted_by_force_keeps_its_gpu_until_its_container_has_ended(shared: Shared) -> None:
    """The kubelet frees the devices of such a pod at once, so its own record is no proof that they are free.

    It shortens the grace period of such a pod to a second. So the pod's shim is stopped, as one that hangs, and can't
    end the container.
    """
    node = shared.node
    with shared.agent(), ExitStack() as stack:
        stays = shared.pod("stays", main(1000), gpu=A, policy="Never", grace_s=300)
        node.apply(stays)
        shared.start("other", main(1000), gpu=B)
        assert (shared.seen("stays"), shared.seen("other")) == (A, B)
        specs, shim = shared.specs, shim_of(shared.metadata("stays").uid)
        os.kill(shim, signal.SIGSTOP)
        stack.callback(resume, shim)
        node.delete("stays")
        shared.start("second", main(1000), gpu=A)
        node.until(lambda: node.status("second").phase == "Failed", lambda: node.kubectl("describe", "pod", "second"))
        described = node.kubectl("describe", "pod", "second")
        assert "NoRoom: nvidia.com/vgpu requests 1000 units" in described
        assert f"pod {node.namespace}/stays: it has ended or was deleted" in described
        assert (shared.specs, shared.used()) == (specs, {A: 1000, B: 1000})
        listed = {consumer.pod for consumer in ask_consumers(POD_RESOURCES).values()}
        assert "other" in listed
        assert "stays" not in listed, "the kubelet has freed its units while its container runs"
        shared.start("third", main(1000), gpu=A)
        node.until(lambda: node.status("third").phase == "Failed", lambda: node.kubectl("describe", "pod", "third"))
        assert "NoRoom: nvidia.com/vgpu requests 1000 units" in node.kubectl("describe", "pod", "third")
        assert (shared.specs, shared.used()[A]) == (specs, 1000)
        resume(shim)
        node.until(lambda: shared.used()[A] == 0, lambda: shared.log)
        shared.start("fourth", main(1000), gpu=A)
        assert shared.seen("fourth") == A


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


def test_many_equal_pods_at_a_time_beside_a_client_that_lists_pod_resources(shared: Shared) -> None:
    shared.gpus = {A: 1000, B: 1000}
    over, listed, most = threading.Event(), 0, {A: 0, B: 0}

    def ask() -> None:
        nonlocal listed
        while not over.is_set():
            with suppress(PodResourcesUnknownError):
                ask_consumers(POD_RESOURCES)
                listed += 1

    with shared.agent():
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            ran = run_many(shared, most)
        finally:
            over.set()
            asking.join()
    assert ran == 200
    assert listed > 100
    assert max(most.values()) <= 1000, "no GPU ever had more than its units"
    content = checkpoint.parse(KubeletPaths(KUBELET_ROOT).checkpoint.read_bytes())
    assert VGPU in (content.data.registered_devices or {})


def run_many(shared: Shared, most: dict[str, int]) -> int:
    """Run 200 equal pods, eight at a time; return how many have seen the GPU of their annotation."""
    node, ran = shared.node, 0
    for batch in range(25):
        names = {f"pod-{batch}-{number}": (A, B)[number % 2] for number in range(8)}
        pods = [shared.pod(name, main(250, SHOW), gpu=gpu, policy="Never") for name, gpu in names.items()]
        node.apply({"apiVersion": "v1", "kind": "List", "items": pods})
        until_ended(shared, list(names))
        for gpu, units in shared.used().items():
            most[gpu] = max(most[gpu], units)
        for name, gpu in names.items():
            assert node.status(name).phase == "Succeeded", node.status(name)
            ran += gpu in "".join(node.output(name, "main"))
        node.kubectl("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false")
    return ran


def until_ended(shared: Shared, names: Sequence[str]) -> None:
    node = shared.node

    def ended() -> bool:
        return all(node.status(name).phase in {"Succeeded", "Failed"} for name in names)

    node.until(ended, lambda: f"{[node.status(name) for name in names]} {shared.log}")
