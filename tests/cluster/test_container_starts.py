"""A real kubelet starts a container again only with the nodes of the container's own GPU."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import pytest

from tests.cluster.clusterlab import SHOW, LabNode, PodRequest

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

A10 = "nvidia.com/GA102GL_A10"
GROUPS: Mapping[str, str] = {"0000:65:00.0": "12", "0000:ca:00.0": "22"}


def with_groups_exchanged(folder: Path) -> str:
    """Return a host as the other one after a reboot that has given each GPU the other GPU's number of a group."""
    text = resources.files("gpuvirt_sim.hosts").joinpath("2xA10.yaml").read_text()
    lines = [
        line.replace("group: 12", "group: 22") if "group: 12" in line else line.replace("group: 22", "group: 12")
        for line in text.splitlines()
    ]
    (folder / "rebooted.yaml").write_text("\n".join(lines))
    return str(folder / "rebooted.yaml")


def restarts(node: LabNode, name: str) -> int:
    return sum(container.restartCount for container in node.status(name).containerStatuses)


def until_printed(node: LabNode, name: str, group: str) -> None:
    """Wait until the last container of a pod has printed its node: the kubelet reports it started before that."""
    node.until(lambda: group in node.output(name), lambda: f"{node.output(name)} {node.status(name)}")


def test_a_container_does_not_start_again_with_another_gpus_node(node: LabNode, tmp_path: Path) -> None:
    def events() -> str:
        return node.kubectl("get", "events", "-o", "jsonpath={.items[*].message}")

    with node.simulated_host("2xA10"), node.agent():
        node.until_allocatable(A10, 2)
        node.start("again", PodRequest({A10: 1}, f"{SHOW}; sleep 2", restarts=True))
        (gpu,) = node.devices("again")
        node.until(lambda: restarts(node, "again") >= 1, lambda: f"{node.status('again')} {events()}")
        until_printed(node, "again", GROUPS[gpu])
    with node.simulated_host(with_groups_exchanged(tmp_path)), node.agent():
        node.until(lambda: "NodesChanged" in events(), lambda: f"{node.status('again')} {events()}: {node.log}")
        before = restarts(node, "again")
        assert f"are not those of {gpu}" in events()
        assert f"/dev/vfio/{GROUPS[gpu]}" in events()
        node.until(lambda: node.log.count("request refused: NodesChanged") >= 2, lambda: node.log)
        assert restarts(node, "again") == before
        assert node.status("again").phase == "Running", "the pod waits, and has not failed"
        node.delete("again")
        node.until_allocatable(A10, 2)
        printed = node.run("both", PodRequest({A10: 2}))
        assert sorted(set(printed) & set(GROUPS.values())) == sorted(GROUPS.values())


@pytest.mark.parametrize("exchanged", [False, True])
def test_after_a_reboot_a_container_starts_only_with_its_own_gpus_node(
    node: LabNode, tmp_path: Path, *, exchanged: bool
) -> None:
    """The agent runs before the kubelet, as by systemd. The kubelet admits the pod again by its checkpoint, and its
    container, which ended while the kubelet was stopped, starts without a call of Allocate."""
    rebooted = with_groups_exchanged(tmp_path) if exchanged else "2xA10"
    for again in range(5):
        pod = f"again-{again}"
        if was_admitted_again(node, pod, rebooted, why="NodesChanged" if exchanged else ""):
            return
        node.delete(pod)  # the agent had not registered yet when the kubelet admitted the pod again
    pytest.fail(f"the kubelet has admitted no pod again: {node.log}")


def was_admitted_again(node: LabNode, pod: str, rebooted: str, *, why: str) -> bool:
    """Return whether the kubelet has admitted a pod again after a reboot; assert that its container starts then, or
    that it is refused with a reason."""
    log = node.cluster.folder / "log/agent.log"
    with node.simulated_host("2xA10"), node.agent():
        node.until_allocatable(A10, 2)
        node.start(pod, PodRequest({A10: 1}, f"{SHOW}; sleep 2", restarts=True))
        (gpu,) = node.devices(pod)
        node.cluster.stop("kubelet")
    with node.simulated_host(rebooted):
        before, logged = restarts(node, pod), log.stat().st_size
        with node.agent():
            node.until(
                lambda: "wrote the CDI spec" in log.read_text()[logged:], lambda: node.log
            )  # it has read the host
            node.cluster.start_kubelet()

            def is_settled() -> bool:
                refused = bool(why) and f"refused: {why}" in log.read_text()[logged:]
                return is_over(node, pod) or refused or (not why and restarts(node, pod) > before)

            node.until(is_settled, lambda: f"{node.status(pod)} {node.log}")
            if is_over(node, pod):
                return False
            assert '"message":"allocated"' not in log.read_text()[logged:]
            until_printed(node, pod, GROUPS[gpu])
            node.delete(pod)
    return True


def is_over(node: LabNode, pod: str) -> bool:
    """Return whether the kubelet did not admit a pod again, however its container has ended."""
    return node.status(pod).phase in {"Failed", "Succeeded"}
