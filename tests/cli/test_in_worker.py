"""A command's change beside agents, and in a worker: what refuses it, and what its failures are reported as."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from gpuvirt.agent.change.gate.gatelock import UnitBusyError, UnitUnsettledError
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.kubelet.hostaccount import ListUnknownError
from gpuvirt.cli.changes import commandhost
from gpuvirt.cli.changes.commandhost import CommandHost, Host, beside, in_worker
from gpuvirt.cli.changes.vgpuchanges import removed
from gpuvirt.cli.output.changesrender import VgpuResult
from gpuvirt.facts.ids import DeviceId, PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_host_in
from tests.agent.vgpu.hostwithvgpus import VgpuHost

GPU, SECOND, T4 = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0"), PciAddress("0000:3b:00.0")
Lists = dict[Path, frozenset[DeviceId]]


@contextmanager
def plugin_that_lists(device: str | None, device_plugins: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a device plugin that reads no gates: it lists one device; None: it does not say what it lists."""

    def read_lists(folder: Path) -> Lists:
        if device is None:
            raise ListUnknownError(f"{folder}: does not answer")
        return {folder / "plugin.sock": frozenset({DeviceId(device)})}

    monkeypatch.setattr(commandhost, "read_lists", read_lists)
    device_plugins.mkdir(parents=True)
    fd = os.open(device_plugins, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("listed", "intent", "refused"),
    [
        (GPU, "unbind it", True),
        (None, "unbind it", True),
        (SECOND, "unbind it", False),
        ("a-share-of-another-plugin", "unbind it", False),
        (GPU, None, False),
    ],
)
def test_a_change_that_removes_waits_for_plugins_that_list_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, intent: str | None, *, refused: bool
) -> None:
    kernel = build_host(load_host("2xA10"))
    change_host, seen = change_host_in(tmp_path, kernel, SimTools(kernel)), build_inventory(scan(kernel))
    host, desired = CommandHost(change_host, NOBODY, tmp_path / "agent"), {GPU: DesiredGpu(DesiredDriver.NATIVE)}
    with (
        plugin_that_lists(listed, change_host.device_plugins, monkeypatch),
        beside(host, seen.gpus[GPU].unit, desired, seen, intent) as refusal,
    ):
        assert (refusal is not None) == refused


def removal(host: VgpuHost, folder: Path) -> VgpuResult:
    """Remove the first vGPU of a GPU, as `gpuvirt vgpu delete` does."""
    seen = observe(host.change_host, host.given, None)
    here = Host(host.change_host, host.given, {}, {}, {}, folder / "agent")
    return removed(here, seen, T4, min(host.types(T4)), quiet=True, dry_run=False)


def test_a_vgpu_is_deleted_once_no_plugin_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = VgpuHost("4xT4", tmp_path)
    with plugin_that_lists(None, host.change_host.device_plugins, monkeypatch):
        (reason,) = removal(host, tmp_path).reasons
    assert (reason.code, len(host.types(T4))) == (ReasonCode.AGENT_SILENT, 2)
    assert (removal(host, tmp_path).reasons, len(host.types(T4))) == ((), 1)


@pytest.mark.parametrize(("taken", "step"), [(["reset it"], "reset it"), ([], "the lease")])
def test_a_job_that_the_kernel_blocks_is_reported_with_its_last_step(
    monkeypatch: pytest.MonkeyPatch, taken: list[str], step: str
) -> None:
    monkeypatch.setattr(commandhost, "CHANGE_TIMEOUT_S", 0.01)
    unblocked = Event()
    found = in_worker(GPU, unblocked.wait, taken)
    unblocked.set()
    assert isinstance(found, Reason)
    assert (found.code, step in found.text) == (ReasonCode.WRITE_BLOCKED, True)


def failing(error: Exception, calls: list[str]) -> Callable[[], str]:
    """Return a job that fails at its first call."""

    def job() -> str:
        calls.append("call")
        if len(calls) == 1:
            raise error
        return "done"

    return job


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnitBusyError("busy"), ReasonCode.UNIT_BUSY),
        (UnitUnsettledError("unsettled"), ReasonCode.ADMISSION_UNSETTLED),
    ],
)
def test_a_unit_that_is_busy_refuses_a_command(error: UnitBusyError, code: ReasonCode) -> None:
    calls: list[str] = []
    found = in_worker(GPU, failing(error, calls), [])
    assert isinstance(found, Reason)
    assert (found.code, calls) == (code, ["call"])


def test_a_unit_that_settles_soon_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commandhost, "APART_S", 0.0)
    calls: list[str] = []
    assert in_worker(GPU, failing(UnitUnsettledError("unsettled", again_soon=True), calls), []) == "done"
    assert len(calls) == 2
