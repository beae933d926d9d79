"""An admission is over by evidence alone; until then no account that lacks the device ends its allocation."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.kubelet.accountwatch import AccountWatch, WrittenLists
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.clock import RealClock, Signal
from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import (
    Consumer,
    Entry,
    KubeletAccount,
    Ledger,
    SettledAt,
    settle,
    settle_admissions,
)
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.view import AgentView
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kubelet.kubelet import running
from tests.agent.node.simnode import IDS, SimNode, running_node
from tests.agent.ondemand.pods import ON_DEMAND, Pods, one_p100, settled, vgpus
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

T = TypeVar("T")

A10, T4 = ResourceName("nvidia.com/GA102GL_A10"), ResourceName("nvidia.com/TU104GL_T4")
FIRST, SECOND, THIRD = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0"), PciAddress("0000:cb:00.0")
NEW = Entry(A10, DeviceId(FIRST), Target(FIRST), None, "allocate:1", BEGINNING, allocated_s=10.0)
FORMER, NEXT = Consumer(pod_uid=PodUid("former")), Consumer(pod_uid=PodUid("next"))


def account(at_s: float, settled_s: float = -inf, consumer: Consumer | None = None) -> KubeletAccount:
    """Return an account of this time, in which a container has the device, or none has."""
    devices = {(A10, DeviceId(FIRST)): consumer} if consumer is not None else {}
    return KubeletAccount(BEGINNING, at_s, devices, settled_s=SettledAt(settled_s))


def after(entry: Entry, *accounts: KubeletAccount) -> Entry | None:
    """Return an entry after accounts, None once it has ended."""
    entries: Iterable[Entry] = [entry]
    for each in accounts:
        entries = settle(entries, each)
    return next(iter(entries), None)


@pytest.mark.parametrize(
    ("entry", "ends"),
    [
        (NEW, False),
        (replace(NEW, settled_s=SettledAt(20.0)), False),
        (replace(NEW, settled_s=SettledAt(11.0)), True),
        (replace(NEW, allocated_s=None), True),
        (replace(NEW, earlier_boot=True), True),
        (replace(NEW, consumer=NEXT), True),
        (replace(NEW, consumer=NEXT, allocated_s=20.0), False),
    ],
    ids=["new", "settled later", "settled before", "an older version's", "of an earlier boot", "named", "renewed"],
)
def test_only_accounts_that_must_have_a_device_end_its_allocation(entry: Entry, *, ends: bool) -> None:
    assert (after(entry, *[account(12.0)] * 3) is None) is ends
    assert after(entry, account(12.0)) is not None, "one account may lack it by chance"


def test_two_accounts_that_have_all_answers_up_to_a_time_end_the_allocations_from_before() -> None:
    assert after(NEW, *[account(99.0, 10.0)] * 3) == NEW
    assert after(NEW, *[account(99.0, 10.1)] * 2) is None


def test_the_record_of_the_pod_that_had_the_device_before_is_no_evidence() -> None:
    entry = replace(NEW, recorded_for=frozenset({FORMER.pod_uid or PodUid("")}))
    assert after(entry, account(99.0, consumer=FORMER)) == entry
    assert after(entry, account(99.0, consumer=NEXT)) == replace(entry, consumer=NEXT)
    assert after(entry, account(99.0, 99.0, FORMER)) == replace(entry, consumer=FORMER)
    assert after(NEW, account(99.0, consumer=FORMER)) == replace(NEW, consumer=FORMER)


@pytest.mark.parametrize(
    ("resource", "devices", "settles"),
    [
        (A10, None, True),
        (A10, frozenset({DeviceId(FIRST)}), True),
        (A10, frozenset({DeviceId(SECOND)}), False),
        (T4, None, False),
    ],
)
def test_evidence_settles_the_admissions_with_its_devices_once(
    resource: ResourceName, devices: frozenset[DeviceId] | None, *, settles: bool
) -> None:
    found = settle_admissions([NEW], SettledAt(11.0), resource, devices)
    assert found == ((replace(NEW, settled_s=SettledAt(11.0)),) if settles else (NEW,))
    assert settle_admissions(found, SettledAt(12.0), resource, devices) is found
    known = (replace(NEW, consumer=NEXT), replace(NEW, allocated_s=None), replace(NEW, earlier_boot=True))
    assert settle_admissions(known, SettledAt(11.0), resource, devices) is known


def test_answers_are_recorded_once_two_lists_that_were_sent_after_them_were_written() -> None:
    lists, versions = WrittenLists(), [(number, 0, 0) for number in range(4)]
    assert lists.send(1.0, versions[0])
    assert not lists.send(2.0, versions[0]), "the first one is not written yet"
    lists.observe(versions[0])
    lists.observe(None)
    assert not lists.send(3.0, None)
    lists.observe(versions[1])
    assert lists.settled_s == -inf
    lists.observe(versions[2])
    assert lists.settled_s == -inf, "no list was sent since"
    assert lists.send(4.0, versions[2])
    lists.observe(versions[3])
    assert lists.settled_s == 1.0


EMPTY = b'{"Data": {"PodDeviceEntries": null, "RegisteredDevices": null}, "Checksum": 0}'


class Listener:
    """The agent while an admission is open."""

    def __init__(self) -> None:
        self.ask_kubelet, self.hurried = Signal(), Signal()
        self.unsettled = self.hurries = False
        self.awaits_record = True
        self.accounts: list[KubeletAccount] = []

    def observe_account(self, account: KubeletAccount | None) -> None:
        if account is not None:
            self.accounts.append(account)

    def report_problem(self, who: str, problem: Reason | None) -> None: ...


def watch(folder: Path, kubelets: tuple[int, ...] = (812,), resend: Callable[[], None] = lambda: None) -> AccountWatch:
    paths = KubeletPaths(folder)
    return AccountWatch(paths, RecordedAllocations(paths), lambda: kubelets, RealClock(), Intervals(), resend)


async def test_an_account_has_the_answers_from_before_the_first_of_two_written_lists(short_path: Path) -> None:
    listener, sent = Listener(), list[int]()

    def write() -> None:
        sent.append(len(sent))
        checkpoint = KubeletPaths(short_path).checkpoint
        checkpoint.write_bytes(EMPTY)
        os.utime(checkpoint, ns=(len(sent), len(sent)))

    async with running(short_path, RealClock()):
        watching = watch(short_path, resend=write)
        for _ in range(4):
            await watching.ask(listener)
    first, second, third, fourth = listener.accounts
    assert first.settled_s == second.settled_s == -inf
    assert first.at_s < third.settled_s < second.at_s < fourth.settled_s < third.at_s
    assert len(sent) == 4, "each reading has the record written again, while it is awaited"


async def ask(watching: AccountWatch, listener: Listener) -> None:
    """Ask until there is an account: a client that was refused a moment ago tries again only after a pause."""
    before = len(listener.accounts)
    async with asyncio.timeout(60):
        while len(listener.accounts) == before:
            await watching.ask(listener)
            await RealClock().sleep(0.01)


async def test_another_kubelet_has_lost_the_answers_that_the_last_one_had_not_recorded(short_path: Path) -> None:
    """The agent may see no process at all; a kubelet that answers runs, also while its socket can't be examined."""
    listener, watching = Listener(), watch(short_path, kubelets=())
    async with running(short_path, RealClock()) as kubelet:
        await ask(watching, listener)
        await ask(watching, listener)
        kubelet.paths.registration_socket.unlink()
        await ask(watching, listener)
    async with running(short_path, RealClock()):
        await ask(watching, listener)
    (first, last, without, new) = listener.accounts
    assert first.settled_s == last.settled_s == without.settled_s == -inf
    assert new.settled_s == last.at_s, "answers after that reading may be the new kubelet's"


@pytest.mark.parametrize("kubelets", [(), (812,)])
async def test_a_kubelet_that_has_ended_has_lost_the_answers_that_it_had_not_recorded(
    short_path: Path, kubelets: tuple[int, ...]
) -> None:
    listener, watching = Listener(), watch(short_path, kubelets)
    async with running(short_path, RealClock()) as kubelet:
        kubelet.paths.checkpoint.write_bytes(EMPTY)
    for _ in range(2):
        await watching.ask(listener)
    first, second = listener.accounts
    assert first.settled_s == -inf, "this reading may be from before the end"
    assert (second.settled_s > first.at_s) is (not kubelets)


REASON = Reason(ReasonCode.ALLOCATIONS_UNKNOWN, "the kubelet", "its checkpoint is damaged")
INCOMPLETE: list[dict[str, object]] = [{"recorded": False}, {"partial": REASON}]


def test_only_complete_accounts_settle_an_allocation_by_another_process() -> None:
    state = NodeState(NodeTerms(Settings(), IDS, AgentView("test", 1, BEGINNING, plugin_only=False)), Ledger())
    accounts = PodAccount(state, dict)
    accounts.observe_account(account(99.0, 99.0))
    readings = accounts.inputs().readings()
    assert [reading.settled_s for reading in readings] == [99.0]
    assert accounts.awaits_record, "a change has read an account that may lack the allocation"
    for lacking in INCOMPLETE:
        accounts.observe_account(None)
        accounts.observe_account(replace(account(200.0, 200.0), **lacking))
        assert (accounts.awaits_record, accounts.inputs().readings()) == (True, readings)
    accounts.observe_account(account(200.0, 99.0))
    assert accounts.awaits_record, "this account may lack it, too"
    accounts.observe_account(account(201.0, 99.1))
    assert not accounts.awaits_record


def written_locks(folder: Path) -> list[Path]:
    """Return the locks of slots with lines of allocations."""
    return [path for path in folder.rglob("*.lock") if path.stat().st_size]


@pytest.mark.parametrize("lacking", [{}, *INCOMPLETE])
async def test_only_complete_accounts_remove_the_lines_of_allocations(
    simulated: Simulated, tmp_path: Path, lacking: dict[str, object]
) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        node.allocate(A10, [FIRST])
        (lock,) = written_locks(tmp_path)
        node.agent.observations.observe_account(replace(account(0.0, inf), **lacking))
        await node.advance(10)
        assert written_locks(tmp_path) == ([lock] if lacking else [])


async def allocate(node: SimNode, resource: ResourceName, device: str) -> None:
    node.allocate(resource, [device])


async def start(node: SimNode, resource: ResourceName, device: str) -> None:
    node.write(resource, device, uid="of-the-pod")
    await node.agent.allocators.pre_start(resource, [DeviceId(device)])


async def nothing(node: SimNode, resource: ResourceName, device: str) -> None:
    del node, resource, device


Evidence = Callable[[SimNode, ResourceName, str], Awaitable[None]]


@pytest.mark.parametrize(
    ("evidence", "resource", "device", "ends"),
    [
        (nothing, A10, FIRST, False),
        (allocate, A10, SECOND, True),
        (allocate, T4, THIRD, False),
        (start, A10, FIRST, True),
        (start, A10, SECOND, False),
    ],
)
async def test_an_agents_allocation_ends_only_after_evidence(
    tmp_path: Path, evidence: Evidence, resource: ResourceName, device: str, *, ends: bool
) -> None:
    boards = {FIRST: "A10", SECOND: "A10", THIRD: "T4"}
    slots = (SlotSpec(at=at, board=boards[at], group=12 + n, numa=0, driver="vfio-pci") for n, at in enumerate(boards))
    async with running_node(build_host(HostSpec(about="two types", slots=tuple(slots))), tmp_path) as node:
        await node.report_account()
        node.allocate(A10, [FIRST])
        await node.advance(1)
        with suppress(AllocationRefusedError):
            await evidence(node, resource, device)
        for _ in range(3):
            await node.report_account()
            await node.advance(1)
        assert (node.gpu(FIRST).users == ()) is ends


class Hanging(InlineWorker):
    """A worker whose creations of vGPUs end, but never return."""

    def __init__(self, name: str) -> None:
        self._hangs = name.startswith("create on")

    @override
    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        made = await super().run(job, name=name, timeout_s=timeout_s)
        if self._hangs:
            await asyncio.Event().wait()
        return made


async def test_a_cancelled_allocate_settles_its_admission(tmp_path: Path) -> None:
    async with (
        running_node(one_p100(), tmp_path, ON_DEMAND, change_worker=Hanging) as node,
        asyncio.TaskGroup() as group,
    ):
        await settled(node)
        resource = ResourceName("tencent.com/vgpu-86")
        request = AllocationRequest(resource, [[DeviceId(device) for device in Pods(node).free(resource)]])
        call = group.create_task(node.agent.allocators.allocate(request))
        await settled(node)
        assert len(vgpus(node)) == 1
        call.cancel()
        await settled(node)
        assert call.cancelled(), "the kubelet's call ends without an answer"
        assert vgpus(node) == []
