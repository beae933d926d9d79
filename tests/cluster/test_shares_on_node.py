"""Shares of GPUs on a real kubelet and containerd with CDI: containers see the GPUs of their annotations."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from lab.cluster.cluster import KUBELET_ROOT

from gpuvirt.agent.kubelet import checkpoint
from gpuvirt.agent.kubelet.podresources import PodResourcesUnknownError, ask_consumers
from gpuvirt.paths import KubeletPaths
from tests.cluster.clusterlab import POD_RESOURCES, LabNode
from tests.cluster.labnamespace import PATIENCE_S
from tests.cluster.sharednode import SHOW, SLEEP, VGPU, A, B, Shared, main, resume, shared_node, shim_of

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]


@pytest.fixture
def shared(node: LabNode, tmp_path: Path) -> Iterator[Shared]:
    """The node with two GPUs."""
    with shared_node(node, tmp_path) as shared:
        yield shared


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
        assert {shared.seen("all", container) for container in ("side", "first", "main", "other")} == {B}
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
