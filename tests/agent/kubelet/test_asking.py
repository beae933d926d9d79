"""When the agent reads the kubelet's allocations: sooner after a withdrawal, unless the API lacks the counts."""

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest
from typing_extensions import override

from gpuvirt.agent.known.nokubelet import prove
from gpuvirt.agent.kubelet.accountwatch import AccountWatch
from gpuvirt.agent.kubelet.podresources import PodResources, PodResourcesUnknownError, ask_allocatable, ask_consumers
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock, RealClock, Signal
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running

ASKED = 6
T4 = ResourceName("nvidia.com/TU104GL_T4")


class ImpatientClock(RealClock):
    """A clock whose sleeps return at once; it records their durations."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    @override
    async def sleep(self, seconds: float, /) -> None:
        self.slept.append(seconds)
        await super().sleep(0)


class Pauses(Signal):
    """A signal whose waits end at once; it records their durations."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    @override
    async def wait_for(self, clock: Clock, timeout_s: float) -> bool:
        self.pauses.append(timeout_s)
        await clock.sleep(0)
        return False


class Listener:
    """A listener with a withdrawn device until it has so many accounts; `stirs` starts the next reading at once."""

    def __init__(
        self, withdrawing_for: int, *, stirs: bool = True, enough: int = ASKED + 1, hurries_for: int = 0
    ) -> None:
        self.ask_kubelet, self.hurried = Signal(), Pauses()
        self.observed: list[KubeletAccount | None] = []
        self.problems: list[Reason | None] = []
        self.enough = asyncio.Event()
        self._withdrawing_for = withdrawing_for
        self._hurries_for = hurries_for
        self._stirs = stirs
        self._enough = enough
        self.ask_kubelet.set()

    @property
    def unsettled(self) -> bool:
        return len(self.observed) < self._withdrawing_for

    @property
    def awaits_record(self) -> bool:
        return False

    @property
    def hurries(self) -> bool:
        return len(self.observed) < self._hurries_for

    def observe_account(self, consumers: KubeletAccount | None) -> None:
        self.observed.append(consumers)
        if self._stirs:
            self.ask_kubelet.set()
        if len(self.observed) == self._enough:
            self.enough.set()

    def report_problem(self, who: str, problem: Reason | None) -> None:
        self.problems.append(problem if who == "holders" else None)


def watch_of(
    kubelet: SimKubelet,
    clock: Clock,
    intervals: Intervals | None = None,
    resend: Callable[[], None] = lambda: None,
    kubelets: tuple[int, ...] = (812,),
) -> AccountWatch:
    recorded = RecordedAllocations(kubelet.paths)
    return AccountWatch(kubelet.paths, recorded, lambda: kubelets, clock, intervals or Intervals(), resend)


@pytest.mark.parametrize(
    ("withdrawing_for", "hurries_for", "reports", "pauses"),
    [
        (99, 0, True, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),
        (3, 0, True, [0.1, 0.2, 1.0, 1.0, 1.0, 1.0]),
        (0, 0, True, [1.0] * ASKED),
        (99, 0, False, [1.0] * ASKED),
        (0, 4, True, [0.1, 0.1, 0.1, 1.0, 1.0, 1.0]),
        (99, 99, False, [0.1] * ASKED),
    ],
)
async def test_the_pauses_between_readings_of_the_kubelet(
    short_path: Path, withdrawing_for: int, hurries_for: int, *, reports: bool, pauses: list[float]
) -> None:
    clock, listener = ImpatientClock(), Listener(withdrawing_for, hurries_for=hurries_for)
    async with running(short_path, RealClock()) as kubelet, asyncio.TaskGroup() as group:
        if not reports:
            kubelet.paths.pod_resources_socket.unlink()
        task = group.create_task(watch_of(kubelet, clock).run(listener))
        await listener.enough.wait()
        task.cancel()
    assert listener.hurried.pauses[:ASKED] == pauses


def checkpoint_with(*containers: tuple[str, str, str]) -> bytes:
    """Return a checkpoint with one device of each container: its pod, its name, the device."""
    entries = [
        {"PodUID": pod, "ContainerName": name, "ResourceName": T4, "DeviceIDs": {"0": [device]}}
        for pod, name, device in containers
    ]
    return json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": None}, "Checksum": 1}).encode()


@pytest.mark.parametrize(
    ("checkpoint", "devices"),
    [
        (checkpoint_with(("a", "init", "0"), ("a", "main", "0"), ("b", "main", "1")), {"0"}),
        (checkpoint_with(("a", "one", "0"), ("a", "two", "1"), ("b", "one", "2"), ("c", "two", "3")), {"0", "1"}),
        (checkpoint_with(("a", "main", "0"), ("a", "main", "1")), set()),
        (b"{", None),
    ],
    ids=["an init container", "two containers", "two devices of one container", "a damaged checkpoint"],
)
async def test_an_account_has_the_devices_of_pods_of_several_containers(
    short_path: Path, checkpoint: bytes, devices: set[str] | None
) -> None:
    listener = Listener(0)
    async with running(short_path, RealClock()) as kubelet:
        kubelet.paths.checkpoint.write_bytes(checkpoint)
        await watch_of(kubelet, RealClock()).ask(listener)
    (account,) = listener.observed
    assert account is not None
    found = account.of_several
    assert (None if found is None else {device for _, device in found}) == devices


async def test_the_kubelet_is_read_again_shortly_after_an_allocation(short_path: Path) -> None:
    """The kubelet lists a pod shortly after its allocation; a reading right after a withdrawal may be too early."""
    clock, listener = ImpatientClock(), Listener(2, stirs=False, enough=3)
    intervals = Intervals(allocations_s=1000.0, allocations_after_allocation_s=0.2)
    async with running(short_path, RealClock()) as kubelet, asyncio.TaskGroup() as group:
        task = group.create_task(watch_of(kubelet, clock, intervals).run(listener))
        await listener.enough.wait()
        task.cancel()
    assert listener.hurried.pauses == [0.1]


def checkpoint_of(*pods: str) -> bytes:
    """Return a checkpoint in which each of these pods has a GPU."""
    return checkpoint_with(*((pod, "compute", f"0000:{at:02x}:00.0") for at, pod in enumerate(pods)))


async def held(folder: Path) -> set[DeviceId]:
    """Return the devices of pods by one reading of a kubelet whose API lists no pod."""
    listener = Listener(0)
    async with running(folder, RealClock()) as kubelet:
        watch = watch_of(kubelet, RealClock())
        kubelet.paths.checkpoint.write_bytes(checkpoint_of("gone", "here", "..", "a/b", ""))
        await watch.ask(listener)
    (observed,) = listener.observed
    assert observed is not None
    return {device for _, device in observed.devices}


async def test_a_pod_has_ended_once_its_folder_was_seen_and_is_gone(short_path: Path) -> None:
    """The kubelet makes a pod's folder after its admission, so that one without may be waiting for another plugin."""
    listener = Listener(0)
    async with running(short_path, RealClock()) as kubelet:
        watch = watch_of(kubelet, RealClock())
        kubelet.paths.checkpoint.write_bytes(checkpoint_of("gone", "here", "..", "a/b", "", "unseen"))
        for pod in ("gone", "here"):
            (short_path / "pods" / pod).mkdir(parents=True)
        await watch.ask(listener)
        (short_path / "pods/gone").rmdir()
        await watch.ask(listener)
        kubelet.paths.checkpoint.write_bytes(checkpoint_of("other", "here"))
        await watch.ask(listener)
        kubelet.paths.checkpoint.write_bytes(checkpoint_of("gone", "here"))
        await watch.ask(listener)
    numbers = [{int(device[5:7]) for _, device in account.devices} for account in listener.observed if account]
    assert numbers == [{0, 1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}, {0, 1}, {0, 1}]
    admitting = [{int(device[5:7]) for _, device in account.admitting} for account in listener.observed if account]
    assert admitting == [{2, 3, 4, 5}, {2, 3, 4, 5}, {0}, {0}], "the kubelet has made the folder of the others"


@pytest.mark.parametrize("left", [(), ("of-an-earlier-kubelet",)])
async def test_a_stale_pods_folder_of_another_root_dir_ends_no_allocation(
    short_path: Path, left: tuple[str, ...]
) -> None:
    """The sockets of plugins are below /var/lib/kubelet for any `--root-dir`; the pods' folders are not."""
    (short_path / "pods").mkdir()
    for name in left:
        (short_path / "pods" / name).mkdir()
    assert await held(short_path) == {f"0000:{at:02x}:00.0" for at in range(5)}


async def test_pods_whose_folders_were_removed_after_the_checkpoint_was_written_have_ended(short_path: Path) -> None:
    """The last pod of a node has ended, and the kubelet has no reason to write its checkpoint again."""
    listener = Listener(0)
    async with running(short_path, RealClock()) as kubelet:
        (short_path / "pods/gone").mkdir(parents=True)
        kubelet.paths.checkpoint.write_bytes(checkpoint_of("gone"))
        os.utime(kubelet.paths.checkpoint, ns=(0, 1_000_000_000))
        watch = watch_of(kubelet, RealClock())
        await watch.ask(listener)
        (short_path / "pods/gone").rmdir()
        await watch.ask(listener)
    (_, observed) = listener.observed
    assert observed is not None
    assert observed.devices == {}


async def test_no_pod_counts_as_ended_where_pods_folders_are_not_visible(short_path: Path) -> None:
    assert await held(short_path) == {f"0000:{at:02x}:00.0" for at in range(5)}


async def test_a_checkpoint_with_an_ended_pod_is_written_again(short_path: Path) -> None:
    (short_path / "pods").mkdir()
    sent: list[None] = []
    async with running(short_path, RealClock()) as kubelet:
        watch = watch_of(kubelet, RealClock(), resend=lambda: sent.append(None))
        kubelet.paths.checkpoint.write_bytes(checkpoint_of("gone"))
        assert await watch.ask(Listener(0)), "the agent reads the allocations again soon"
    assert sent == [None]


@pytest.mark.parametrize(
    ("lacks", "kubelets", "whole", "recorded"),
    [
        ("nothing", (812,), True, True),
        ("api", (812,), False, True),
        ("api", (), True, True),
        ("record", (812,), False, False),
        ("record", (), False, False),
    ],
)
async def test_a_partial_account_is_reported_as_partial(
    short_path: Path, lacks: str, kubelets: tuple[int, ...], *, whole: bool, recorded: bool
) -> None:
    """A partial account counts; a stopped kubelet has left its checkpoint, so that only a running one may lack more."""
    listener = Listener(0)
    async with running(short_path, RealClock()) as kubelet:
        kubelet.paths.checkpoint.write_bytes(checkpoint_of("a"))
        if lacks == "api":
            kubelet.paths.pod_resources_socket.unlink()
        if lacks == "record":
            kubelet.paths.checkpoint.write_text("{")
        await watch_of(kubelet, RealClock(), kubelets=kubelets).ask(listener)
    (observed,) = listener.observed
    assert observed is not None
    assert ((observed.partial is None), observed.recorded) == (whole, recorded)
    assert {reason.code for reason in listener.problems if reason} == (
        set() if whole else {ReasonCode.ALLOCATIONS_UNKNOWN}
    )
    assert len(observed.devices) == (0 if lacks == "record" else 1)


@pytest.mark.parametrize(
    ("folder", "kubelets", "pod", "trace"),
    [
        ("", (), None, None),
        ("kubelet", (), None, None),
        ("kubelet/pods", (), None, "/kubelet has files"),
        ("", (812,), None, "a kubelet runs (pid 812)"),
        ("", (), "8a5c", "process 4001 (sleep) is in the control group /kubepods.slice/"),
    ],
)
async def test_a_host_without_a_kubelet_has_no_allocations(
    tmp_path: Path, *, folder: str, kubelets: tuple[int, ...], pod: str | None, trace: str | None
) -> None:
    """A used folder without a checkpoint, or a process without a folder, is a kubelet with unknown allocations."""
    kernel, known = build_host(load_host("2xA10")), trace is None
    kernel.start_process("sleep", pod=pod)
    paths, listener = KubeletPaths(tmp_path / "kubelet"), Listener(0)
    if folder:
        (tmp_path / folder).mkdir(parents=True)
    recorded = RecordedAllocations(paths, find_kubelet=partial(prove, kernel))
    watch = AccountWatch(paths, recorded, lambda: kubelets, RealClock(), Intervals(), lambda: None)
    await watch.ask(listener)
    (observed,) = listener.observed
    assert (observed is not None) is known
    assert observed is None or (observed.devices, observed.partial, observed.recorded) == ({}, None, True)
    assert (listener.problems[-1] is None) is known
    assert trace is None or trace in str(listener.problems[-1])


T4S = frozenset({(T4, DeviceId("0000:65:00.0"))})


@pytest.mark.parametrize(
    ("code", "kubelets", "counted"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (812,), None),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (), frozenset()),
        (grpc.StatusCode.UNIMPLEMENTED, (812,), T4S),
    ],
)
async def test_what_the_kubelet_counts_is_unread_while_a_running_kubelet_does_not_say_so(
    short_path: Path, code: grpc.StatusCode, kubelets: tuple[int, ...], counted: frozenset[object] | None
) -> None:
    """List answers, GetAllocatableResources does not; a kubelet before 1.23 has its count in the checkpoint."""
    listener = Listener(0)
    async with running(short_path, RealClock()) as kubelet:
        kubelet.allocatable_fails = code
        content = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": {T4: ["0000:65:00.0"]}}, "Checksum": 0}
        kubelet.paths.checkpoint.write_text(json.dumps(content))
        await watch_of(kubelet, RealClock(), kubelets=kubelets).ask(listener)
    (observed,) = listener.observed
    assert observed is not None
    assert observed.partial is None
    if counted is None:
        assert isinstance(observed.counted, Unread)
        assert "RESOURCE_EXHAUSTED" in observed.counted.detail
    else:
        assert observed.counted == counted


@pytest.mark.parametrize(("rejected", "answers"), [(49, True), (50, False)])
async def test_a_question_that_the_kubelet_rejects_for_those_of_others_is_asked_again(
    short_path: Path, rejected: int, answers: bool
) -> None:
    """The kubelet answers 100 calls a second: beside a client that asks without pauses, one call of ten."""
    clock = ImpatientClock()
    async with running(short_path, RealClock()) as kubelet:
        api = PodResources(kubelet.paths.pod_resources_socket, clock)
        kubelet.rejects_lists = rejected
        if answers:
            assert await api.consumers() == {}
        else:
            with pytest.raises(PodResourcesUnknownError, match="RESOURCE_EXHAUSTED: rejected by rate limit"):
                await api.consumers()
        await api.close()
    assert kubelet.rejects_lists == 0
    assert clock.slept == [pytest.approx(0.02)] * 49


@pytest.mark.parametrize("ask", [ask_allocatable, ask_consumers])
def test_a_kubelet_that_does_not_answer_a_command_is_unknown(short_path: Path, ask: Callable[[Path], object]) -> None:
    with pytest.raises(PodResourcesUnknownError, match="UNAVAILABLE"):
        ask(short_path / "kubelet.sock")


async def test_a_question_that_fails_for_another_reason_is_not_asked_again(short_path: Path) -> None:
    clock, path = ImpatientClock(), short_path / "kubelet.sock"
    path.touch()
    with pytest.raises(PodResourcesUnknownError, match="UNAVAILABLE"):
        await PodResources(path, clock).consumers()
    assert clock.slept == []
