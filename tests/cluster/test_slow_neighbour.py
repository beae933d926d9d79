"""A real kubelet that waits for another device plugin, and one that is stopped: what it has given to pods stays.

The kubelet goes through the resources of a container in any order, so a pod is admitted again until gpuvirt was first.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from lab.cluster.cluster import KUBELET_ROOT
from lab.cluster.settings import NODE

from gpuvirt.agent.known import nokubelet
from gpuvirt.facts.ids import ResourceName
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.usage.processes import content, pids
from gpuvirt.paths import HostRoots
from tests.agent.kubelet.foreignplugin import GroupAllocator, kubevirt_offers_beside
from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.nodeworkload import is_for

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

A10, SLOW = ResourceName("nvidia.com/GA102GL_A10"), ResourceName("example.com/slow")
GPUS = ("0000:65:00.0", "0000:ca:00.0")
PATIENCE_S = 35.0
"""Long enough for an allocation to end that two accounts lack, if its age ended it after 10 s."""


def drivers(node: LabNode) -> list[str]:
    """Return the drivers of both GPUs, sorted; none while a GPU changes it."""
    found: list[str] = []
    for gpu in GPUS:
        with suppress(FileNotFoundError):
            found.append((node.host / f"sys/bus/pci/devices/{gpu}/driver").readlink().name)
    return sorted(found)


def is_given(node: LabNode) -> bool:
    """Return whether the gate of a GPU has the line of an allocation."""
    return any(path.stat().st_size for path in (node.host / "run/gpuvirt/gate").glob("*.lock"))


def begin_admission(node: LabNode, neighbour: GroupAllocator, *, init: bool) -> str:
    """Have the kubelet wait for the neighbour after it has got a GPU for a pod, and return the pod's name."""
    for number in itertools.count():
        name, none = f"vm-{number}", dict[str, int]()
        limits: dict[str, int] = {A10: 1, SLOW: 1}
        node.until(lambda: not is_given(node), lambda: node.log)
        neighbour.asked.clear()
        neighbour.answers.clear()
        node.start(name, PodRequest(none if init else limits, "sleep 3", limits if init else none))
        assert neighbour.asked.wait(60)
        time.sleep(1.0)  # noqa: TID251  the kubelet asks for both at once, or for the second after the first
        if is_given(node):
            return name
        neighbour.answers.set()
        node.delete(name)
    raise AssertionError


@contextmanager
def answering(neighbour: GroupAllocator) -> Iterator[None]:
    """Let the neighbour answer at the end, since the kubelet admits nothing else meanwhile."""
    try:
        yield
    finally:
        neighbour.answers.set()


@pytest.mark.parametrize("init", [True, False], ids=["an init container", "a container"])
def test_a_gpu_that_the_kubelet_is_giving_to_a_pod_stays(node: LabNode, *, init: bool) -> None:
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host("2xA10"), node.nodes_kept():
        is_for(node, "vm-passthrough")
        with (
            kubevirt_offers_beside(KUBELET_ROOT, SLOW) as neighbour,
            node.agent("workload_label: true", asks),
            answering(neighbour),
        ):
            node.until_allocatable(A10, 2)
            node.until_allocatable(SLOW, 2)
            pod = begin_admission(node, neighbour, init=init)
            is_for(node, "container")
            node.until(lambda: "nvidia" in drivers(node), lambda: node.log)
            until_s = time.monotonic() + PATIENCE_S  # noqa: TID251  nothing happens meanwhile that could be waited for
            node.until(
                lambda: drivers(node) != ["nvidia", "vfio-pci"] or time.monotonic() > until_s,  # noqa: TID251
                lambda: node.log,
            )
            assert drivers(node) == ["nvidia", "vfio-pci"]
            neighbour.answers.set()
            node.until(lambda: node.status(pod).phase == "Succeeded", lambda: str(node.status(pod)))
            node.until(lambda: drivers(node) == ["nvidia", "nvidia"], lambda: node.log)


def test_a_stopped_kubelet_leaves_the_processes_of_its_pods(node: LabNode) -> None:
    """Its folder is not at the path that a command sees."""
    kernel = RealKernel(HostRoots.under(Path("/")))
    node.start("idle", PodRequest({}, "sleep 1000"))
    node.until(lambda: node.status("idle").phase == "Running", lambda: str(node.status("idle")))
    node.cluster.stop("kubelet")
    try:
        found = [
            nokubelet.of_process(content(kernel, pid, "cgroup"), content(kernel, pid, "cmdline"), "")
            for pid in pids(kernel)
        ]
    finally:
        node.cluster.start_kubelet()
    assert any(trace is not None for trace in found)
