"""The real node as a worker whose VM is suspended: it stands still while the cluster's time goes on, and continues."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.sharednode import SLEEP, VGPU, A, B, Shared, main, shared_node, shim_of
from tests.cluster.workernodes import played_node

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

GRACE_S, TOLERATED_S = 10, 10
SILENT_S = 20
"""After how much silence a node is Unknown here, which is 50 s elsewhere; a kubelet renews its Lease each 10 s."""
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
READY = '{.status.conditions[?(@.type=="Ready")].status}'


class _Metadata(msgspec.Struct):
    uid: str
    deletionTimestamp: str | None = None  # noqa: N815  Kubernetes' spelling


class _Pod(msgspec.Struct):
    metadata: _Metadata


@pytest.fixture
def shared(node: LabNode, tmp_path: Path) -> Iterator[Shared]:
    """The node with two GPUs."""
    with shared_node(node, tmp_path) as shared:
        yield shared


def test_a_suspended_worker_ends_its_evicted_pods_and_keeps_all_other_records(shared: Shared) -> None:
    node = shared.node
    # Without a second node that is Ready, the control plane evicts nothing: it takes itself to be cut off.
    with impatient_controllers(node), played_node(node, "other", {}), shared.agent() as agent:
        start(shared, "leaves", A, {**UNREACHABLE, "tolerationSeconds": TOLERATED_S})
        start(shared, "stays", B, UNREACHABLE)
        assert (shared.seen("leaves"), shared.seen("stays")) == (A, B)
        before, specs = shared.records, shared.specs
        with standing_still(shared, agent, "leaves", "stays"):
            node.until(lambda: ready(node) == "Unknown", lambda: ready(node))
            node.until(lambda: is_deleted(node, "leaves"), lambda: str(node.status("leaves")))
            assert not is_deleted(node, "stays")
            assert (shared.records, shared.specs) == (before, specs)
        node.until(lambda: ready(node) == "True", lambda: ready(node))
        node.until(lambda: not exists(node, "leaves"), lambda: str(node.status("leaves")))
        node.until(lambda: shared.used() == {A: 0, B: 1000}, lambda: shared.log)
        (stays,) = shared.records.pods
        assert shared.records.pods[stays] == before.pods[stays]
        assert node.status("stays").containerStatuses[0].restartCount == 0
        node.until_allocatable(VGPU, 2000)
        shared.start("next", main(1000))
        assert shared.seen("next") == A


@contextmanager
def impatient_controllers(node: LabNode) -> Iterator[None]:
    """Have the controllers take a silent node for Unknown earlier."""
    cluster = node.cluster
    cluster.stop("controllers")
    cluster.start_controller_manager(f"--node-monitor-grace-period={SILENT_S}s")
    try:
        yield
    finally:
        cluster.stop("controllers")
        cluster.start_controller_manager()


def start(shared: Shared, name: str, gpu: str, toleration: Mapping[str, object]) -> None:
    """Start a pod that has a whole GPU and goes on after SIGTERM, as one that saves its work does."""
    script = f"trap : TERM; {SLEEP}"
    pod = shared.pod(name, main(1000, script), gpu=gpu, policy="Never", grace_s=GRACE_S)
    spec = pod["spec"]
    assert isinstance(spec, dict)
    shared.node.apply({**pod, "spec": {**spec, "tolerations": [toleration]}})


@contextmanager
def standing_still(shared: Shared, agent: "subprocess.Popen[bytes]", *pods: str) -> Iterator[None]:
    """Stop all of the node that is not the control plane: kubelet, containerd, the agent, shims and containers."""
    cluster = shared.node.cluster
    services = [int((cluster.folder / f"log/{name}.pid").read_text()) for name in ("kubelet", "containerd")]
    shims = [shim_of(shared.metadata(pod).uid) for pod in pods]
    stopped = [*services, agent.pid, *shims, *(child for shim in shims for child in children(shim))]
    with ExitStack() as stack:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        yield


def children(pid: int) -> list[int]:
    """Return the processes below a process, at any depth."""
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*found, *(below for child in found for below in children(child))]


def exists(node: LabNode, name: str) -> bool:
    return node.cluster.api.get(f"/api/v1/namespaces/{node.namespace}/pods/{name}") is not None


def is_deleted(node: LabNode, name: str) -> bool:
    """Return whether a pod has been told to end."""
    found = node.cluster.api.get(f"/api/v1/namespaces/{node.namespace}/pods/{name}")
    assert found is not None
    return msgspec.json.decode(found, type=_Pod).metadata.deletionTimestamp is not None


def ready(node: LabNode) -> str:
    return node.cluster.kubectl("get", "node", NODE, "-o", f"jsonpath={READY}").stdout
