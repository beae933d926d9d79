"""On-demand vGPUs on a real kubelet: a GPU takes the shape of the pod that starts, and no pod gets an earlier vGPU."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from lab.cluster.settings import NODE

from gpuvirt.agent.ondemand.ondemandallocator import PAUSE_S
from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.labnamespace import PodStatus
from tests.thoroughness import sized

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
PODS = sized(52, 12)
WAVE = 4
"""So many pods run at once: more 12Q do not fit on two GPUs."""
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
        for number in range(sized(200, 6)):
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


def test_restarts_of_the_kubelet_keep_pods_and_their_vgpus(node: LabNode) -> None:
    """Tencent's pod has an init container with the vGPU, which has ended: the kubelet rejects such a pod, which runs,
    if it admits it again before the agent has registered."""
    with on_demand(node) as host:
        node.start("stays", PodRequest({A10_4Q: 1}, f"{SHOW}; sleep 10000", init={A10_4Q: 1}))
        vgpus = node.devices("stays")
        for _ in range(sized(50, 3)):
            node.cluster.stop("kubelet")
            node.cluster.start_kubelet()
            node.until_allocatable(A10_4Q, 7)
            node.until(lambda: node.status("stays").phase != "Pending", lambda: str(node.status("stays")))
            assert node.status("stays").phase == "Running", node.status("stays")
            assert set(live(host)) == vgpus
        node.until(lambda: node.status("stays").phase != "Pending", lambda: str(node.status("stays")))
        assert [container.restartCount for container in node.status("stays").containerStatuses] == [0]
        node.delete("stays")
        node.until(lambda: live(host) == [], lambda: str(live(host)))


class Programs:
    """The agent, the kubelet and the API server of a node, which are killed and started again."""

    def __init__(self, node: LabNode, agents: ExitStack) -> None:
        self._node = node
        self._agents = agents
        self._asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
        self._agent = agents.enter_context(node.agent("mode: on-demand", self._asks))

    def kill(self, turn: int) -> None:
        """Kill one of them, another one each turn."""
        (self._kill_agent, self._kill_kubelet, self._kill_api_server)[turn % 3]()

    def _kill_agent(self) -> None:
        self._agent.send_signal(signal.SIGKILL)
        self._agents.close()
        self._agent = self._agents.enter_context(self._node.agent("mode: on-demand", self._asks))

    def _kill_kubelet(self) -> None:
        self._kill("kubelet")
        self._node.cluster.start_kubelet()

    def _kill_api_server(self) -> None:
        self._kill("apiserver")
        time.sleep(3.0)  # noqa: TID251  pods that were bound before are admitted without it
        self._node.cluster.restart_after_outage()

    def _kill(self, program: str) -> None:
        os.kill(int((self._node.cluster.folder / "log" / f"{program}.pid").read_text()), signal.SIGKILL)
        self._node.cluster.stop(program)


def test_each_pod_has_its_vgpu_while_agent_kubelet_and_api_server_are_killed(node: LabNode) -> None:
    with node.simulated_host("2xA10-sriov") as host, node.nodes_kept(), ExitStack() as agents:
        programs, had = Programs(node, agents), set[str]()
        for resource, count in TWO_A10.items():
            node.until_allocatable(resource, count)
        for turn in range(PODS // WAVE):
            names, resource = [f"pod-{turn}-{number}" for number in range(WAVE)], (A10_4Q, A10_12Q)[turn % 2]
            node.start_all(dict.fromkeys(names, lasting(resource)))
            time.sleep(turn % 4 * 0.7)  # noqa: TID251  before, during or after the admission of the pods
            programs.kill(turn)
            running = {running_again(node, name, resource) for name in names}
            vgpus = {name: node.devices(name) for name in running}
            given = sorted(vgpu for of_pod in vgpus.values() for vgpu in of_pod)
            assert len(set(given)) == WAVE
            assert had.isdisjoint(given)
            had.update(given)
            node.until(lambda: live(host) == given, lambda: f"{live(host)} and {given}: {node.log}")  # noqa: B023
            assert {node.status(name).phase for name in running} == {"Running"}
            node.kubectl("delete", "pod", *running, "--grace-period=0", "--force", "--wait=true")
            node.until(lambda: live(host) == [], lambda: f"{live(host)}: {node.log}")
            node.until_allocatable(A10_12Q, TWO_A10[A10_12Q])
        assert len(had) == PODS


def lasting(resource: str) -> PodRequest:
    return PodRequest({resource: 1}, f"{SHOW}; sleep 1000")


def was_refused(status: PodStatus) -> bool:
    """Return whether the kubelet has refused a pod, or was killed while containerd started a container for it."""
    ends = [container.state.terminated for container in status.containerStatuses]
    is_cut_off = any(end is not None and "context canceled" in end.message for end in ends)
    return status.reason == "UnexpectedAdmissionError" or is_cut_off


def running_again(node: LabNode, name: str, resource: str) -> str:
    """Return the name of a pod that runs; create it again, as a Deployment does, if the kubelet has refused it."""
    for again in range(8):
        each = name if again == 0 else f"{name}-{again}"
        node.until(lambda: node.status(each).phase in {"Running", "Failed"}, lambda: f"{node.status(each)}: {node.log}")  # noqa: B023
        if node.status(each).phase == "Running":
            return each
        assert was_refused(node.status(each)), (node.status(each), node.log)
        node.delete(each)
        node.until(lambda: node.counted(resource) > 0, lambda: f"no {resource}: {node.log}")
        node.start(f"{name}-{again + 1}", lasting(resource))
    pytest.fail(f"{name} was refused each time: {node.log}")
