"""On-demand vGPUs on a real kubelet: a GPU takes the shape of the pod that starts, and no pod gets an earlier vGPU."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.cluster.settings import NODE

from gpuvirt.node.ondemand.patience import PAUSE_S
from tests.cluster.clusterlab import LabNode, PodRequest

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

A10_4Q, A10_12Q, A10_24Q = (f"tencent.com/vgpu-{number}" for number in (593, 596, 597))
TWO_A10 = {A10_4Q: 2, A10_12Q: 2, A10_24Q: 2}
T4_16Q = "tencent.com/vgpu-234"
ONE_T4 = """
about: one T4 for vGPUs on demand
slots:
  - {at: "0000:3b:00.0", board: T4, group: 31}
"""
"""A host that is read in few requests: a mounted simulator answers them far more slowly than a kernel."""
SHOW = r"tr '\0' '\n' < /proc/1/environ | grep MDEV_PCI_RESOURCE"


@contextmanager
def on_demand(node: LabNode, name: str = "2xA10-sriov", counts: Mapping[str, int] = TWO_A10) -> Iterator[Path]:
    """Run an agent that creates vGPUs on demand; device nodes are made as they appear."""
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host(name) as host, node.agent("mode: on-demand", asks), node.nodes_kept():
        for resource, count in counts.items():
            node.until_allocatable(resource, count)
        yield host


def live(host: Path) -> list[str]:
    return sorted(path.name for path in (host / "sys/bus/mdev/devices").iterdir())


def test_a_gpu_takes_the_shape_of_the_pod_that_starts(node: LabNode) -> None:
    """An init container has the vGPU first, as in Tencent's document."""
    with on_demand(node) as host:
        request = PodRequest({A10_12Q: 1}, f"{SHOW}; sleep 1000", init={A10_12Q: 1})
        node.start("first", request)
        (vgpu,) = node.devices("first")
        assert live(host) == [vgpu]
        node.until_allocatable(A10_12Q, 3)  # one more beside it, and one on the idle GPU
        node.until_allocatable(A10_24Q, 1)
        node.delete("first")
        node.until(lambda: live(host) == [], lambda: str(live(host)))
        node.until_allocatable(A10_24Q, 2)
        node.start("second", PodRequest({A10_24Q: 1}, f"{SHOW}; sleep 1000"))
        (other,) = node.devices("second")
        assert other != vgpu
        node.delete("second")
        node.until(lambda: live(host) == [], lambda: str(live(host)))


def test_pods_one_after_another_get_vgpus_that_none_had(node: LabNode, tmp_path: Path) -> None:
    """The GPU is full: each pod is admitted a moment after the end of the last one, whose vGPU is removed meanwhile."""
    (tmp_path / "1xT4.yaml").write_text(ONE_T4)
    with on_demand(node, str(tmp_path / "1xT4.yaml"), {T4_16Q: 1}) as host:
        had: set[str] = set()
        for number in range(12):
            vgpus = run_job(node, host, f"job-{number}")
            assert len(vgpus) == 1
            assert not vgpus & had
            had |= vgpus
        node.until(lambda: live(host) == [], lambda: str(live(host)))


def run_job(node: LabNode, host: Path, job: str) -> set[str]:
    """Return the vGPUs of a job's pod; as a Job does, create it again where a busy computer removes too slowly.

    The kubelet itself refuses a pod that was bound just before the id of the last one was withdrawn.
    """
    for again in range(5):
        name = f"{job}-{again}"
        node.start(name, PodRequest({T4_16Q: 1}, SHOW))
        node.until(lambda: node.status(name).phase in {"Succeeded", "Failed"}, lambda: str(node.status(name)))  # noqa: B023
        if node.status(name).phase == "Succeeded":
            return node.devices(name)
        message = node.status(name).message
        assert "NoRoom" in message or "no healthy devices present" in message, (message, node.log)
        node.until(lambda: live(host) == [], lambda: str(live(host)))
        time.sleep(PAUSE_S)  # noqa: TID251  a refused pod ends the waits of the next ones for so long
    pytest.fail(f"{job} was refused each time: {node.log}")


def test_a_restart_of_kubelet_and_agent_keeps_the_vgpus_of_pods(node: LabNode) -> None:
    with on_demand(node) as host:
        node.start("stays", PodRequest({A10_4Q: 1}, f"{SHOW}; sleep 1000", init={A10_4Q: 1}))
        vgpus = node.devices("stays")
        node.cluster.stop("kubelet")
        node.cluster.start_kubelet()
        node.until_allocatable(A10_4Q, 7)
        assert node.status("stays").phase == "Running"
        assert set(live(host)) == vgpus
        node.delete("stays")
        node.until(lambda: live(host) == [], lambda: str(live(host)))
