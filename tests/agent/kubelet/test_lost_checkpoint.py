"""The kubelet's checkpoint is deleted, the usual cure of a kubelet that does not start: pods keep their devices."""

import shutil
from asyncio import to_thread  # noqa: TID251  the kubelet answers in this event loop
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet.accountwatch import AccountWatch
from gpuvirt.agent.kubelet.hostaccount import AccountUnknownError, read_account
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.store.agentstate import HISTORY, HISTORY_FILE, read_history
from gpuvirt.clock import RealClock, Signal
from gpuvirt.facts.ids import BootId, DeviceId, PodUid, ResourceName
from gpuvirt.facts.nodes import unread_node
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.allocation.recordhistory import PodRequests, RecordHistory
from gpuvirt.model.reasons import Reason
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from tests.agent.kubelet.givingkubelet import give

GPU, ID = ResourceName("nvidia.com/gpu"), DeviceId("GPU-8e1b1a2e-0000-4000-8000-000000000001")
OTHER, OTHERS = ResourceName("example.com/nic"), DeviceId("nic0")
BOOT = BootId("0b1e0000-0000-4000-8000-000000000001")
RUNS, DOWN = (812,), ()


class Agent:
    """The part of an agent that takes the kubelet's account."""

    def __init__(self, kubelet: SimKubelet, disk: Path, boot: BootId = BOOT) -> None:
        self.ask_kubelet, self.unsettled, self.awaits_record = Signal(), False, False
        self.hurried, self.hurries = Signal(), False
        self.account: KubeletAccount | None = None
        self.problem: Reason | None = None
        history = HISTORY.decode(disk.read_bytes()).value if disk.exists() else RecordHistory()
        self.recorded = RecordedAllocations(
            kubelet.paths, unread_node, history, boot, lambda now: disk.write_bytes(HISTORY.encode(now))
        )
        self.kubelets: Sequence[int] = RUNS
        self._watch = AccountWatch(
            kubelet.paths, self.recorded, lambda: tuple(self.kubelets), RealClock(), Intervals(), lambda: None
        )

    def observe_account(self, account: KubeletAccount | None) -> None:
        self.account = account

    def report_problem(self, _: str, problem: Reason | None) -> None:
        self.problem = problem

    async def read(self) -> str | None:
        """Read the account once; return why it is not complete, and check that steps find the same."""
        await self._watch.ask(self)
        newest = self.recorded.read()
        partial = self.problem
        assert isinstance(newest, Unknown) is (partial is not None)
        if partial is None:
            assert self.account is not None
            assert self.account.partial is None
        return partial.seen if partial is not None else None

    async def ask_api_server(self, *pods: PodRequests) -> str | None:
        """Answer the question for the pods, which must have been asked, and read the account again."""
        inquiry = self.recorded.inquiry
        assert inquiry.asked._set
        inquiry.answer(inquiry.begin(), pods)
        return await self.read()


def cuda(kubelet: SimKubelet, *, ended: bool = False) -> PodRequests:
    return PodRequests(PodUid(kubelet.pods["cuda"].uid), "default/cuda", ended, frozenset({("main", GPU)}))


def proxy(kubelet: SimKubelet) -> PodRequests:
    return PodRequests(PodUid(kubelet.pods["proxy"].uid), "kube-system/proxy", has_ended=False)


async def test_a_kubelet_that_restarts_with_its_checkpoint_loses_nothing(short_path: Path) -> None:
    async with running(short_path / "k", RealClock()) as kubelet:
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        await give(kubelet, GPU, [ID])
        for _ in range(2):
            assert await agent.read() is None
            assert agent.account is not None
            assert list(agent.account.devices) == [(GPU, ID)]
            await kubelet.restart()


async def test_a_deleted_checkpoint_of_a_killed_kubelet_is_unknown(short_path: Path) -> None:
    """A killed kubelet leaves its socket, which proves nothing."""
    async with running(short_path / "k", RealClock()) as kubelet:
        await give(kubelet, GPU, [ID])
        await kubelet.stop()
        kubelet.paths.registration_socket.touch()
        kubelet.paths.checkpoint.unlink()
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        agent.kubelets = DOWN
        assert "kubelet_internal_checkpoint" in (await agent.read() or "")
        with pytest.raises(AccountUnknownError, match="kubelet_internal_checkpoint"):
            await to_thread(read_account, RecordedAllocations(kubelet.paths), DOWN)


async def test_a_checkpoint_that_the_kubelet_lost_before_the_agent_started_is_unknown(short_path: Path) -> None:
    async with running(short_path / "k", RealClock()) as kubelet:
        await give(kubelet, GPU, [ID])
        kubelet.paths.checkpoint.unlink()
        await kubelet.restart()
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        assert "does not exist yet" in (await agent.read() or "")
        with pytest.raises(AccountUnknownError, match="does not exist yet"):
            await to_thread(read_account, RecordedAllocations(kubelet.paths), RUNS)
        assert "pod default/cuda" in (await agent.ask_api_server(cuda(kubelet)) or "")
        await give_other(kubelet)
        assert "pod default/cuda" in (await agent.read() or ""), "the new checkpoint lacks the pod"
        kubelet.end_pod("cuda")
        assert await agent.read() is None


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_checkpoint_that_the_kubelet_lost_and_has_written_again_lacks_a_pod(
    short_path: Path, *, is_restarted: bool
) -> None:
    """The agent has read the record before, by its account watch alone: no Allocate and no step has."""
    async with running(short_path / "k", RealClock()) as kubelet:
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        await give(kubelet, GPU, [ID])
        assert await agent.read() is None
        kubelet.paths.checkpoint.unlink()
        await kubelet.restart()
        await give_other(kubelet)
        if is_restarted:
            agent = Agent(kubelet, short_path / HISTORY_FILE)
        assert "lacks pods" in (await agent.read() or "")
        assert agent.account is not None
        assert (GPU, ID) in agent.account.devices, "the pod keeps its device"
        boot = BOOT
        history = read_history((short_path / "ledger.json",), boot)
        with pytest.raises(AccountUnknownError, match="lacks pods") as caught:
            await to_thread(read_account, RecordedAllocations(kubelet.paths, history=history, boot_id=boot), RUNS)
        assert (GPU, ID) in caught.value.known
        assert await agent.ask_api_server(cuda(kubelet)) is None, "all devices are known: the lost one is the pod's"
        assert (GPU, ID) in agent.account.devices
        kubelet.end_pod("cuda")
        assert await agent.read() is None
        assert (GPU, ID) not in agent.account.devices


async def test_a_missing_checkpoint_is_unknown_until_the_same_kubelet_writes_it_again(short_path: Path) -> None:
    async with running(short_path / "k", RealClock()) as kubelet:
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        await give(kubelet, GPU, [ID])
        assert await agent.read() is None
        kubelet.paths.checkpoint.unlink()
        assert "is missing" in (await agent.read() or "")
        assert "is missing" in (await agent.ask_api_server(proxy_of_node()) or "x"), "no answer makes up for the record"
        restarted = Agent(kubelet, short_path / HISTORY_FILE)
        assert "is missing" in (await restarted.read() or "")
        kubelet._write_checkpoint()
        assert await restarted.read() is None
        assert await agent.read() is None


async def test_a_checkpoint_that_was_lost_before_it_was_read_with_a_pod_is_made_up_by_the_api(short_path: Path) -> None:
    """The kubelet forgets the pod at its next start, and would request the device for another one."""
    async with running(short_path / "k", RealClock()) as kubelet:
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        await give_other(kubelet)
        assert await agent.read() is None
        await give(kubelet, GPU, [ID])
        kubelet.paths.checkpoint.unlink()
        assert "is missing" in (await agent.read() or "")
        await kubelet.restart()
        await give_other(kubelet)
        for reader in (agent, Agent(kubelet, short_path / HISTORY_FILE)):
            assert await reader.read() is not None
            assert list(reader.recorded.lost()) == [(GPU, ID)]
            assert reader.account is not None
            assert (GPU, ID) in reader.account.devices
        kubelet.end_pod("cuda")
        assert await agent.read() is None
        assert agent.recorded.lost() == {}


async def test_a_missing_checkpoint_is_known_again_when_no_pod_of_before_has_devices(short_path: Path) -> None:
    """Nothing registers any more, so the kubelet does not write it again: the agent must not wait for that."""
    async with running(short_path / "k", RealClock()) as kubelet:
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        await kubelet.run_pod("proxy", Container("main", {}))
        await give(kubelet, GPU, [ID])
        assert await agent.read() is None
        await kubelet.stop()
        kubelet.paths.checkpoint.unlink()
        await kubelet.start()
        assert "is missing" in (await agent.read() or "")
        assert "default/cuda" in (await agent.ask_api_server(cuda(kubelet), proxy(kubelet)) or "")
        kubelet.end_pod("cuda")
        assert await agent.read() is not None
        assert await agent.ask_api_server(proxy(kubelet)) is None
        assert await agent.read() is None


def proxy_of_node() -> PodRequests:
    return PodRequests(PodUid("another"), "kube-system/proxy", has_ended=False)


async def test_a_new_node_waits_for_the_pods_of_the_api_server(short_path: Path) -> None:
    """The kubelet has never written a checkpoint, and pods without devices run."""
    async with running(short_path / "k", RealClock()) as kubelet:
        await kubelet.run_pod("proxy", Container("main", {}))
        kubelet.paths.checkpoint.unlink()
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        assert "does not exist yet" in (await agent.read() or "")
        assert agent.problem is not None
        assert "kubectl get pods" in (agent.problem.fix or "")
        assert await agent.ask_api_server(proxy(kubelet)) is None
        assert await agent.read() is None
        with pytest.raises(AccountUnknownError):
            await to_thread(read_account, RecordedAllocations(kubelet.paths), RUNS)
        history = read_history((short_path / "ledger.json",), BOOT)
        assert (
            await to_thread(read_account, RecordedAllocations(kubelet.paths, history=history, boot_id=BOOT), RUNS) == {}
        )


async def test_a_pod_that_was_deleted_by_force_is_unknown_to_the_api_server(short_path: Path) -> None:
    async with running(short_path / "k", RealClock()) as kubelet:
        await give(kubelet, GPU, [ID])
        kubelet.paths.checkpoint.unlink()
        await kubelet.restart()
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        await agent.read()
        assert kubelet.pods["cuda"].uid in (await agent.ask_api_server() or "")


async def test_a_new_node_without_pods_needs_no_api_server(short_path: Path) -> None:
    async with running(short_path / "k", RealClock()) as kubelet:
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        assert await agent.read() is None
        await kubelet.run_pod("proxy", Container("main", {}))
        kubelet.paths.checkpoint.unlink()
        assert await agent.read() is None, "a pod that came later would be in the record"


async def test_after_a_reboot_no_pod_of_before_runs(short_path: Path) -> None:
    async with running(short_path / "k", RealClock()) as kubelet:
        agent = Agent(kubelet, short_path / HISTORY_FILE)
        await give(kubelet, GPU, [ID])
        assert await agent.read() is None
        kubelet.paths.checkpoint.unlink()
        assert await agent.read() is not None
        shutil.rmtree(kubelet.paths.pods / kubelet.pods["cuda"].uid)
        agent = Agent(kubelet, short_path / HISTORY_FILE, BootId("0b1e0000-0000-4000-8000-000000000002"))
        assert await agent.read() is None


async def give_other(kubelet: SimKubelet) -> None:
    """Make another plugin register, at which the kubelet writes its checkpoint."""
    kubelet.manager.connected(OTHER)
    kubelet.manager.updated(OTHER, {OTHERS: None}, {})
    kubelet._write_checkpoint()
