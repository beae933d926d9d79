"""The agent with a real kubelet: devices of pods, counts of the node, and the state after pods end."""

import os
import signal
import subprocess

import pytest
from lab.cluster.cluster import KUBELET_ROOT
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest, devices_of
from tests.cluster.labnamespace import GPUVIRT, PodStatus

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

A10 = "nvidia.com/GA102GL_A10"
A10_ENV = "PCI_RESOURCE_NVIDIA_COM_GA102GL_A10"
RTX2060 = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A"
SLEEP = "env | grep PCI_RESOURCE; sleep 1000"


def test_pods_get_the_requested_number_of_gpus(node: LabNode) -> None:
    with node.simulated_host("2xA10"), node.agent():
        node.until_allocatable(A10, 2)
        one = node.run("one", PodRequest({A10: 1}))
        assert one[0] in {f"{A10_ENV}=0000:65:00.0", f"{A10_ENV}=0000:ca:00.0"}
        assert one[1:] in (["12", "vfio"], ["22", "vfio"])
        two = node.run("two", PodRequest({A10: 2}))
        assert devices_of(two) == {"0000:65:00.0", "0000:ca:00.0"}
        assert two[1:] == ["12", "22", "vfio"]


def test_cdi_devices_reach_the_container(node: LabNode) -> None:
    """Without the CDI spec the runtime refuses the container and names the missing device."""
    with node.simulated_host("2xA10"), node.cdi_folder() as specs, node.agent("cdi: answers"):
        node.until_allocatable(A10, 2)
        assert node.run("with", PodRequest({A10: 2}))[1:] == ["12", "22", "vfio"]
        read_only = ("/bin/mount", "-o", "remount,bind,ro", node.host / "run/cdi")
        subprocess.run(read_only, check=True)  # otherwise the agent writes the specs again
        for spec in specs.iterdir():
            spec.unlink()
        node.start("without", PodRequest({A10: 2}))

        def events() -> str:
            return node.kubectl("get", "events", "-o", "jsonpath={.items[*].message}")

        node.until(lambda: f"unresolvable CDI devices {A10}=0000:" in events(), events)


def test_a_pod_that_requests_an_unknown_resource_starts_without_devices(node: LabNode) -> None:
    """The scheduler trusts the node's status, which may outlive the kubelet's checkpoint."""
    reported = '{"status": {"capacity": {"example.com/none": "1"}, "allocatable": {"example.com/none": "1"}}}'
    node.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", reported)
    printed = node.run("without", PodRequest({"example.com/none": 1}, "env | grep PCI_RESOURCE || echo none"))
    assert printed == ["none"]


def test_allocatable_follows_health_and_hotplug(node: LabNode) -> None:
    with node.simulated_host("2xA10") as host, node.agent():
        node.until_allocatable(A10, 2)
        (host / "dev/vfio/12").unlink()
        node.until_allocatable(A10, 1)
        (host / "sys/bus/pci/devices/0000:ca:00.0/remove").write_text("1")
        node.until_allocatable(A10, 0)
        pci = host / "sys/bus/pci"
        (pci / "rescan").write_text("1")  # the GPU returns with its native driver
        (pci / "devices/0000:ca:00.0/driver_override").write_text("vfio-pci")
        (pci / "drivers/nvidia/unbind").write_text("0000:ca:00.0")
        (pci / "drivers_probe").write_text("0000:ca:00.0")
        node.until_allocatable(A10, 1)


def test_the_reason_of_a_refused_device_is_in_the_pods_status(node: LabNode) -> None:
    with node.simulated_host("2xA10") as host, node.agent():
        node.until_allocatable(A10, 2)
        for address in ("0000:65:00.0", "0000:ca:00.0"):
            (host / "sys/bus/pci/drivers/vfio-pci/unbind").write_text(address)
        node.start("late", PodRequest({A10: 2}))
        node.until(lambda: node.status("late").phase in {"Failed", "Pending"}, lambda: str(node.status("late")))
        found = node.status("late")
        if found.phase == "Failed" and "no healthy devices present" not in found.message:
            # Otherwise the scheduler or the kubelet already knows that the devices are unhealthy.
            assert "NoDriver: 0000:" in found.message


def test_after_a_kubelet_restart_resources_are_registered_again(node: LabNode) -> None:
    with node.simulated_host("2xA10"), node.agent():
        node.until_allocatable(A10, 2)
        node.start("keeps", PodRequest({A10: 1}, SLEEP))
        node.until(lambda: node.status("keeps").phase == "Running", lambda: str(node.status("keeps")))
        node.cluster.stop("kubelet")
        node.cluster.start_kubelet()
        node.until_allocatable(A10, 2)
        other = devices_of(node.run("other", PodRequest({A10: 1})))
        assert other.isdisjoint(node.devices("keeps"))
        assert node.status("keeps").containerStatuses[0].restartCount == 0


def test_an_agent_that_is_killed_and_upgraded_disturbs_no_pod(node: LabNode) -> None:
    with node.simulated_host("2xA10"):
        with node.agent() as first:
            node.until_allocatable(A10, 2)
            node.start("keeps", PodRequest({A10: 1}, SLEEP))
            node.until(lambda: node.status("keeps").phase == "Running", lambda: str(node.status("keeps")))
            first.send_signal(signal.SIGKILL)
        with node.agent():
            mine = node.devices("keeps")
            for number in range(5):  # pods are admitted while the kubelet registers the new plugin
                node.start(f"next-{number}", PodRequest({A10: 1}, "env | grep PCI_RESOURCE"))

            def ended() -> dict[str, PodStatus]:
                found = {name: node.status(name) for name in (f"next-{number}" for number in range(5))}
                return {name: status for name, status in found.items() if status.phase in {"Succeeded", "Failed"}}

            node.until(lambda: len(ended()) == 5, lambda: str(ended()))
            failed = {status.reason for status in ended().values() if status.phase == "Failed"}
            assert failed <= {"UnexpectedAdmissionError"}
            given = [name for name, status in ended().items() if status.phase == "Succeeded"]
            assert all(node.devices(name).isdisjoint(mine) for name in given)
            assert node.run("last", PodRequest({A10: 1}))
            assert node.status("keeps").phase == "Running"


def test_gpus_return_to_the_host_and_a_pods_gpu_stays_until_the_pod_ends(node: LabNode) -> None:
    def drivers() -> dict[str, str]:
        """The drivers of the GPUs; during a move a GPU has no driver."""
        links = {
            address: node.host / "sys/bus/pci/devices" / address / "driver"
            for address in ("0000:65:00.0", "0000:ca:00.0")
        }
        try:
            return {address: os.path.realpath(link).rpartition("/")[2] for address, link in links.items()}
        except FileNotFoundError:  # a link that ended while it was read
            return {}

    with node.simulated_host("2xA10"):
        with node.agent("mode: passthrough"):
            node.until_allocatable(A10, 2)
            node.start("keeps", PodRequest({A10: 1}, SLEEP))
            node.until(lambda: node.status("keeps").phase == "Running", lambda: str(node.status("keeps")))
            (mine,) = node.devices("keeps")
        with node.agent("mode: container"):
            (other,) = {"0000:65:00.0", "0000:ca:00.0"} - {mine}
            node.until(lambda: drivers() == {mine: "vfio-pci", other: "nvidia"}, lambda: str(drivers()))
            assert node.status("keeps").phase == "Running"
            node.delete("keeps")
            node.until(lambda: set(drivers().values()) == {"nvidia"}, lambda: str(drivers()))
            node.until_allocatable(A10, 0)
        with node.agent("mode: passthrough"):
            node.until_allocatable(A10, 2)
            assert set(drivers().values()) == {"vfio-pci"}


def test_pods_never_share_a_gpu_and_ended_pods_free_theirs(node: LabNode) -> None:
    with node.simulated_host("4xRTX2060"), node.agent():
        node.until_allocatable(RTX2060, 4)
        names = [f"vm-{number}" for number in range(6)]
        for name in names:
            node.start(name, PodRequest({RTX2060: 1}, SLEEP))

        def running() -> list[str]:
            return [name for name in names if node.status(name).phase == "Running"]

        node.until(lambda: len(running()) == 4, lambda: str(running()))
        had = [node.devices(name) for name in running()]
        assert len(set[str].union(*had)) == 4
        for name in running()[:2]:
            node.delete(name)
            names.remove(name)
        node.until(lambda: len(running()) == 4, lambda: str(running()))
        assert len(set[str].union(*(node.devices(name) for name in running()))) == 4


def test_an_init_container_and_the_app_container_get_the_same_device(node: LabNode) -> None:
    with node.simulated_host("2xA10"), node.agent():
        node.until_allocatable(A10, 2)
        app = node.run("both", PodRequest({A10: 1}, init={A10: 1}))
        assert app[0] == node.output("both", "first")[0]


def test_two_gpus_come_from_the_same_numa_node(node: LabNode) -> None:
    with node.simulated_host("4xRTX2060"), node.agent():
        node.until_allocatable(RTX2060, 4)
        assert devices_of(node.run("pair", PodRequest({RTX2060: 2}))) in (
            {"0000:04:00.0", "0000:3b:00.0"},
            {"0000:86:00.0", "0000:af:00.0"},
        )


def test_gpuvirt_devices_shows_the_pod_of_each_gpu(node: LabNode) -> None:
    with node.simulated_host("2xA10") as host, node.agent():
        node.until_allocatable(A10, 2)
        node.start("vm", PodRequest({A10: 1}, SLEEP))

        def shown() -> str:
            command = [*GPUVIRT, "devices", "--host-root", str(host)]
            return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout  # noqa: TID251

        node.until(lambda: f"pod {node.namespace}/vm" in shown(), shown)
        assert (KUBELET_ROOT / "device-plugins/kubevirt-GA102GL_A10.sock").is_socket()


def test_kubectl_reaches_the_containers_of_the_node(node: LabNode) -> None:
    """The API server connects to the kubelet by its address: no DNS has the node's name."""
    node.start("runs", PodRequest({}, "echo written; sleep 1000"))
    node.until(lambda: node.status("runs").phase == "Running", lambda: str(node.status("runs")))
    node.until(lambda: "written" in node.kubectl("logs", "runs"), lambda: node.kubectl("logs", "runs"))
    assert node.kubectl("exec", "runs", "--", "echo", "executed").strip() == "executed"
