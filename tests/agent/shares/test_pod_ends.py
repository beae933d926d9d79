"""A share ends when the API server, the kubelet's record and the processes of the host lack its pod, twice."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuvirt.agent.shares.nodeshares import stored_shares
from gpuvirt.agent.shares.shareallocator import Accounts, Dependencies, ShareAllocator, UnitAllocation
from gpuvirt.agent.shares.sharefiles import SpecFiles
from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.usage.podprocesses import read_running_pods
from gpuvirt.hardware.usage.processes import NAMESPACE
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.desired.settings import ShareSettings
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.node.records import KeptShare, ShareRecords, record_of
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.paths import HostPath, HostRoots
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.files.tree import Link, constant
from tests.agent.shares.opengpus import OpenGpus, decide
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

P, Q = PodUid("8a5c0001-0000-4000-8000-000000000001"), PodUid("8a5c0001-0000-4000-8000-000000000002")
MAIN = ContainerName("main")
DEMAND = Demand((ContainerDemand(MAIN, ContainerKind.APP, Units(300)),))
RECORDS = ShareRecords({uid: record_of("d", uid, DEMAND, {MAIN: {GpuId("GPU-a"): Units(300)}}) for uid in (P, Q)})
NOT_SEEN = Unread(HostPath("/proc"), seen="another namespace")


def on_node(uid: PodUid, *, ended: bool = False) -> PodOnNode:
    return PodOnNode(uid, "d", uid, DEMAND, ended=ended)


class Node:
    """The accounts of a node with two recorded pods, and a new agent."""

    def __init__(self, folder: Path) -> None:
        self.api: dict[PodUid, PodOnNode] | None = {Q: on_node(Q)}
        self.recorded: list[UnitAllocation] | Unknown = []
        self.running: frozenset[PodUid] | Unread = frozenset()
        self.accounts = Accounts(lambda: self.recorded, lambda _: self.running)
        worker, files = InlineWorker(), SpecFiles(folder, ())
        self.shares = stored_shares(folder / "shares.json", files, worker, ShareSettings())
        on = Dependencies(self.shares, SimClock(), worker, self.accounts, OpenGpus(), lambda: decide(self.shares))
        self.allocator = ShareAllocator(on)

    def read(self) -> frozenset[PodUid]:
        """Read the accounts once, and return the pods whose shares ended."""
        return asyncio.run(self._read())

    async def _read(self) -> frozenset[PodUid]:
        await self.shares.store.save(RECORDS)
        if self.api is not None:
            self.shares.pods.observe(self.api)
        await self.allocator.tidy()
        return frozenset(RECORDS.pods.keys() - self.shares.records.pods.keys())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node whose API server has one of the two pods."""
    return Node(tmp_path)


def test_the_second_reading_ends_a_share(node: Node) -> None:
    assert node.read() == frozenset()
    assert node.shares.state.get().lacking == {P}
    assert node.read() == {P}


def test_a_reading_between_two_others_that_has_the_pod_keeps_its_share(node: Node) -> None:
    node.read()
    node.running = frozenset({P})
    assert node.read() == frozenset()
    node.running = frozenset()
    assert node.read() == frozenset(), "one reading that lacks it after one that has it"
    assert node.read() == {P}


def test_a_reading_counts_once_however_often_the_agent_decides(node: Node) -> None:
    node.read()
    for _ in range(3):
        decide(node.shares)
    assert node.shares.state.get().lacking == {P}
    assert not node.shares.state.get().ended


@pytest.mark.parametrize("ended", [True, False])
def test_a_pod_of_the_api_server_keeps_its_share_until_it_has_ended(node: Node, ended: bool) -> None:
    node.api = {P: on_node(P, ended=ended), Q: on_node(Q)}
    node.read()
    assert node.read() == ({P} if ended else frozenset())


def test_no_share_ends_before_the_api_server_has_listed_the_pods(node: Node) -> None:
    node.api = None
    node.read()
    assert node.read() == frozenset()


@pytest.mark.parametrize(
    ("recorded", "running", "kept"),
    [
        ([UnitAllocation(P, MAIN, frozenset({DeviceId("u0")}), None)], frozenset(), KeptShare.RECORDED),
        (Unknown(), frozenset(), KeptShare.RECORD_UNKNOWN),
        ([], frozenset({P}), KeptShare.RUNNING),
        ([], NOT_SEEN, KeptShare.PROCESSES_UNKNOWN),
    ],
)
def test_each_account_alone_keeps_a_share(
    node: Node,
    recorded: list[UnitAllocation] | Unknown,
    running: frozenset[PodUid] | Unread,
    kept: KeptShare,
) -> None:
    node.recorded, node.running = recorded, running
    for _ in range(3):
        assert node.read() == frozenset()
    assert node.shares.state.get().kept == {P: kept}
    assert not node.shares.state.get().lacking


def test_the_kubelet_writes_its_record_again_only_where_it_is_the_last_that_has_a_pod(node: Node) -> None:
    node.recorded = [UnitAllocation(P, MAIN, frozenset({DeviceId("u0")}), None)]
    node.running = frozenset({P})
    node.read()
    assert not node.accounts.outdated._set
    node.running = frozenset()
    node.read()
    assert node.accounts.outdated._set


@pytest.mark.parametrize("group", ["0::/kubepods/burstable/pod{}/5ca1ab1e", "1:name=systemd:/kubepods/pod{}\n0::/\n"])
def test_the_control_groups_of_both_drivers_name_the_pod(simulated: Simulated, group: str) -> None:
    kernel = simulated("vm-2xV100")
    process = kernel.start_process("python3", pod=P)
    assert read_running_pods(kernel, [P, Q]) == frozenset({P})
    kernel.tree.place(HostPath(f"/proc/{process.pid}/cgroup"), constant(group.format(Q)))
    assert read_running_pods(kernel, [P, Q]) == frozenset({Q})
    kernel.end_vm(process)
    assert read_running_pods(kernel, [P, Q]) == frozenset()


def test_the_mounts_of_a_container_name_its_pod_where_control_groups_do_not(simulated: Simulated) -> None:
    kernel = simulated("vm-2xV100")
    other, container = kernel.start_process("ssh"), kernel.start_process("python3")
    folder = "/var/lib/kubelet/pods"
    volume = f"35 22 0:43 / {folder}/{Q}/volumes/secret/x rw - tmpfs tmpfs rw\n"
    subpath = f"36 22 254:1 {folder}/{Q}/volumes/empty-dir/x {folder}/{Q}/volume-subpaths/x rw - ext4 v rw\n"
    hosts = f"613 601 254:1 {folder}/{P}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/vda1 rw\n"
    for process, namespace, content in ((other, 1, volume + subpath), (container, 2, volume + hosts)):
        kernel.tree.place(HostPath(f"/proc/{process.pid}/ns/mnt"), Link(f"mnt:[{namespace}]"))
        kernel.tree.place(HostPath(f"/proc/{process.pid}/mountinfo"), constant(content))
    assert read_running_pods(kernel, [P, Q]) == frozenset({P})
    kernel.end_vm(container)
    assert read_running_pods(kernel, [P, Q]) == frozenset()


def test_processes_of_another_namespace_are_no_proof_unless_it_is_the_kubelets(simulated: Simulated) -> None:
    kernel = simulated("vm-2xV100")
    kernel.processes.hide()
    found = read_running_pods(kernel, [P])
    assert isinstance(found, Unread)
    assert found.path == NAMESPACE
    kernel.start_process("kubelet")
    assert read_running_pods(kernel, [P]) == frozenset()


def test_the_kubelets_process_is_enough_where_the_namespace_cannot_be_read(simulated: Simulated) -> None:
    kernel = simulated("vm-2xV100")
    kernel.faults.fail(NAMESPACE, errno.EACCES)
    assert isinstance(read_running_pods(kernel, [P]), Unread)
    kernel.start_process("kubelet")
    kernel.start_process("pause", pod=P)
    assert read_running_pods(kernel, [P, Q]) == frozenset({P})


def test_a_process_that_cannot_be_read_is_no_proof(simulated: Simulated) -> None:
    kernel = simulated("vm-2xV100")
    process = kernel.start_process("python3")
    kernel.faults.fail(HostPath(f"/proc/{process.pid}/cgroup"), errno.EACCES)
    assert isinstance(read_running_pods(kernel, [P]), Unread)


def test_a_process_that_has_ended_and_that_nobody_awaits_hides_no_pods(tmp_path: Path) -> None:
    kubelet = tmp_path / "kubelet"
    kubelet.symlink_to(sys.executable)
    sleeping = [str(kubelet), "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(sleeping, stdin=pipe, stdout=pipe) as proof,
        subprocess.Popen([sys.executable, "-c", ""]) as ended,
    ):
        assert proof.stdout is not None
        proof.stdout.readline()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(OSError, match="Invalid argument"):
            Path(f"/proc/{ended.pid}/mountinfo").read_text()
        assert read_running_pods(RealKernel(HostRoots.under(Path("/"))), [P]) == frozenset()


def test_a_thread_names_the_pod_of_a_process_whose_first_thread_has_ended(simulated: Simulated) -> None:
    kernel = simulated("vm-2xV100")
    process = kernel.start_process("python3")
    proc = f"/proc/{process.pid}"
    kernel.faults.fail(HostPath(f"{proc}/mountinfo"), errno.EINVAL)
    assert read_running_pods(kernel, [P, Q]) == frozenset()
    hosts = f"613 601 254:1 /var/lib/kubelet/pods/{P}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/vda1 rw\n"
    kernel.faults.fail(HostPath(f"{proc}/task/{process.pid}/mountinfo"), errno.EINVAL)
    kernel.tree.place(HostPath(f"{proc}/task/{process.pid + 1}/mountinfo"), constant(hosts))
    assert read_running_pods(kernel, [P, Q]) == frozenset({P})


@pytest.mark.parametrize("fails", ["mountinfo", "task/{}/mountinfo", "task"])
def test_mounts_that_cannot_be_read_are_no_proof(simulated: Simulated, fails: str) -> None:
    kernel = simulated("vm-2xV100")
    process = kernel.start_process("python3")
    proc = f"/proc/{process.pid}"
    kernel.tree.place(HostPath(f"{proc}/task/{process.pid}/comm"), constant("python3"))
    kernel.faults.fail(HostPath(f"{proc}/mountinfo"), errno.EINVAL)
    assert read_running_pods(kernel, [P]) == frozenset()
    kernel.faults.fail(HostPath(f"{proc}/{fails.format(process.pid)}"), errno.EACCES)
    found = read_running_pods(kernel, [P])
    assert isinstance(found, Unread)
    assert found.errno == errno.EACCES
