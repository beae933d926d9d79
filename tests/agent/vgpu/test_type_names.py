"""The names of vGPU types of full GPUs, whose VFs list no type: one question to nvidia-smi, for commands and agents."""

import json
import logging
import tarfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from typing_extensions import override

from gpuvirt import documents
from gpuvirt.agent.change import typenames
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.known.state import NodeState
from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.hardware.scan import scan
from gpuvirt.loops.serialworker import WorkerBlockedError
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.naming import TypeNames
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.hostspec import HostSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs import executables
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY
from tests.agent.change.hostunit import HostUnit
from tests.agent.node.simnode import IDS, SimNode, running_node
from tests.cli.commandline import called
from tests.inlineworker import InlineWorker

T = TypeVar("T")

GPU, VF = PciAddress("0000:25:00.0"), PciAddress("0000:25:00.4")
TYPE, RESOURCE = "NVIDIA L40S-24Q", "nvidia.com/NVIDIA_L40S-24Q"
CURRENT = HostPath(f"/sys/bus/pci/devices/{VF}/nvidia/current_vgpu_type")
VERSION = HostPath("/sys/module/nvidia/version")
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
QUESTION = ("nvidia-smi", "vgpu", "-i", GPU, "-s", "-v")


def without_the_type(table: str) -> str:
    """Return the output of nvidia-smi with another id for the type."""
    return table.replace("0x486", "0x999").replace(": 1158", ": 2457")


def host(vgpus: int = 2) -> HostSpec:
    """Return a host with one L40S, on which two L40S-24Q fit."""
    carries = f", vgpus: {{{TYPE}: {vgpus}}}" if vgpus else ""
    text = f"""
        about: one L40S with vGPUs that were set by hand
        iommufd: true
        slots:
          - {{at: "{GPU}", board: L40S, group: 11, numa: 0, vfs: 32{carries}}}
        """
    return documents.parse(text, HostSpec, where="test")


class ExportedHost:
    """A host as files in the folder `host`, with a program as its nvidia-smi."""

    def __init__(self, folder: Path, vgpus: int = 2) -> None:
        self.folder, self.kernel = folder, build_host(host(vgpus))
        self.calls = folder / "host/calls"
        export(self.kernel, folder / "host")
        executables.install(self.kernel, folder / "host", executables.VgpuManager.HOST, refusal="it is a copy")
        self.answer(SimTools(self.kernel).nvidia_smi(*QUESTION[1:]))

    def answer(self, text: str, code: int = 0) -> None:
        program = self.folder / "host/usr/bin/nvidia-smi"
        program.write_text(f"#!/bin/sh\necho \"$@\" >> ${{0%/*}}/../../calls\ncat <<'END'\n{text}\nEND\nexit {code}\n")

    @property
    def asked(self) -> list[str]:
        """The arguments of each call of nvidia-smi."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def run(self, *command: str) -> str:
        folders = "--host-root", "host", "--kubelet-dir", "host/var/lib/kubelet"
        return called(*command, *folders, cwd=self.folder).stdout.decode()


@pytest.fixture
def exported(tmp_path: Path) -> ExportedHost:
    return ExportedHost(tmp_path)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("devices",), f"2 x {TYPE}"),
        (("doctor", "--all"), "2 vGPUs offered"),
        (("why", GPU), f"AD102GL [L40S] at {GPU}, {TYPE} {VF}"),
        (("why", RESOURCE), f"{VF} as {RESOURCE}"),
        (("vgpu", "list"), TYPE),
    ],
)
def test_a_command_asks_once_for_the_name_of_a_full_gpus_type(
    command: tuple[str, ...], shown: str, exported: ExportedHost
) -> None:
    printed = exported.run(*command)
    assert shown in printed
    assert "Unread" not in printed
    assert exported.asked == [" ".join(QUESTION[1:])]


def test_a_support_archive_has_the_names_and_asks_once(exported: ExportedHost) -> None:
    exported.run("support", "-o", "archive.tar.gz")
    with tarfile.open(exported.folder / "archive.tar.gz") as archive:
        names = {name.rpartition("/")[2]: name for name in archive.getnames()}
        devices, doctor = (archive.extractfile(names[name]) for name in ("devices.json", "doctor.json"))
        assert devices is not None
        assert doctor is not None
        assert [resource["name"] for resource in json.load(devices)["resources"]] == [RESOURCE]
        assert b"Unread" not in doctor.read()
    assert len(exported.asked) == 1


def test_no_command_asks_while_a_vf_lists_the_type(tmp_path: Path) -> None:
    exported = ExportedHost(tmp_path, vgpus=1)
    assert f"1 x {TYPE}" in exported.run("devices")
    assert "Unread" not in exported.run("doctor")
    assert exported.asked == []


def test_a_change_asks_only_about_its_own_gpus() -> None:
    kernel = build_host(host())
    tools, facts = SimTools(kernel), scan(kernel)
    typenames.learn_names(tools, facts, TypeNames(), ())
    assert QUESTION not in tools.commands
    typenames.learn_names(tools, facts, TypeNames(), (GPU,))
    assert QUESTION in tools.commands


def test_a_failing_nvidia_smi_is_the_reason_and_has_a_fix(exported: ExportedHost) -> None:
    exported.answer(MISMATCH, code=18)
    for command in ("devices", "doctor"):
        printed = " ".join(exported.run(command).split())
        assert "carries vGPU type 1158, which no VF lists and nvidia-smi has not named" in printed
        assert f"ended with 18: {MISMATCH}" in printed
        assert "fix: make nvidia-smi vgpu -s -v list the type on the host" in printed
        assert "dmesg" not in printed
    assert len(exported.asked) == 2


# --- without the command line


def learned(kernel: SimKernel, tools: SimTools) -> NodeView:
    learn = partial(typenames.learn_names_in_time, tools)
    return snapshot.take(kernel, Settings(), IDS, SimClock(), learn=learn)


def reason_of(view: NodeView) -> Reason:
    """Return the reason against the first vGPU."""
    return view.gpus[0].vgpus[0].reasons[0]


def test_a_missing_nvidia_smi_is_the_reason() -> None:
    kernel = build_host(host())
    reason = reason_of(learned(kernel, SimTools(kernel, programs=())))
    assert reason.code is ReasonCode.UNREAD
    assert reason.seen is not None
    assert "no nvidia-smi in /; install NVIDIA's vGPU manager" in reason.seen


def test_a_command_does_not_wait_for_an_nvidia_smi_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, goes_on = build_host(host()), threading.Event()
    tools = SimTools(kernel)
    tools.before = lambda _: assert_goes_on(goes_on)
    monkeypatch.setattr(typenames, "WITHIN_S", 0.05)
    view = learned(kernel, tools)
    goes_on.set()
    seen = reason_of(view).seen
    assert seen is not None
    assert "nvidia-smi vgpu -s -v: has not ended within 0.05 s" in seen
    assert view.resources == ()


def assert_goes_on(event: threading.Event) -> None:
    assert event.wait(60)


def test_an_id_that_nvidia_smi_does_not_list_stays_unread(exported: ExportedHost) -> None:
    exported.answer(without_the_type(SimTools(exported.kernel).nvidia_smi(*QUESTION[1:])))
    printed = " ".join(exported.run("devices").split())
    assert "2 x unknown" in printed
    assert "nvidia-smi vgpu -s -v:" in printed
    assert "types, none with this id" in printed
    assert len(exported.asked) == 1


def test_a_vf_that_lists_the_type_again_names_it() -> None:
    kernel = build_host(host())
    without = SimTools(kernel, programs=())
    assert reason_of(learned(kernel, without)).code is ReasonCode.UNREAD
    kernel.write(CURRENT, b"0\n")
    assert [vgpu.type for vgpu in learned(kernel, without).gpus[0].vgpus] == [TYPE]


def test_a_change_that_fills_a_gpu_keeps_the_names_that_the_vfs_listed(tmp_path: Path) -> None:
    unit = HostUnit(host(vgpus=0), GPU, tmp_path)
    unit.fill(L40S_24Q=2)
    assert QUESTION not in unit.tools.commands
    seen = observe(unit.change_host, NOBODY, None)
    assert {str(vgpu.live.type) for vgpu in seen.inventory.vgpus.values()} == {TYPE}
    assert observe(unit.change_host, seen.inputs, None).inventory == seen.inventory
    assert unit.tools.commands.count(QUESTION) == 1


# --- the agent


def failing(command: object) -> None:
    raise OSError(5, "Input/output error", str(command))


class OldTools(SimTools):
    """The programs of a host whose nvidia-smi does not know the type's id."""

    @override
    def nvidia_smi(self, *arguments: str) -> str:
        return without_the_type(super().nvidia_smi(*arguments))


class BlockedWorker(InlineWorker):
    """A worker in which nvidia-smi sleeps in the kernel."""

    is_blocked = True

    @override
    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        if self.is_blocked:
            raise WorkerBlockedError("it sleeps in the kernel")
        return job()


def is_offered(node: SimNode) -> bool:
    return node.offered == {RESOURCE: dict.fromkeys((VF, VF.replace(".4", ".5")), True)}


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(mode=DesiredMode.VGPU, vgpu_config="L40S-24Q")], ids=["by hand", "config"]
)
async def test_an_agent_without_a_ledger_offers_a_full_gpus_vgpus(settings: Settings, tmp_path: Path) -> None:
    kernel = build_host(host())
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, settings, tools=tools) as node:
        await node.report_account()
        await node.advance(10)
        assert is_offered(node)
        await node.advance(4000)
        assert tools.commands.count(QUESTION) == 1
    tools.before = failing
    async with running_node(kernel, tmp_path, settings, tools=tools) as node:
        await node.report_account()
        await node.advance(10)
        assert is_offered(node), "the ledger has the name"
        assert tools.commands.count(QUESTION) == 1


async def test_a_plan_that_asks_for_the_types_names_them_for_all(tmp_path: Path) -> None:
    kernel = build_host(host())
    tools = SimTools(kernel)
    for vgpu in scan(kernel).vgpu_hosts[GPU].live:
        assert isinstance(vgpu.group, int)
        kernel.start_vm(vgpu.group)
    async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.ON_DEMAND), tools=tools) as node:
        await node.report_account()
        await node.advance(200)
        assert [vgpu.type for vgpu in node.view.gpus[0].vgpus] == [TYPE, TYPE]
    assert tools.commands.count(QUESTION) == 1


async def test_an_id_that_the_table_lacks_is_not_asked_for_again(tmp_path: Path) -> None:
    kernel = build_host(host())
    tools = OldTools(kernel)
    async with running_node(kernel, tmp_path, tools=tools) as node:
        await node.report_account()
        await node.advance(1000)
        assert "types, none with this id" in str(reason_of(node.view).seen)
    assert tools.commands == [QUESTION]


async def test_an_agent_does_not_ask_while_a_vf_lists_the_type(tmp_path: Path) -> None:
    kernel = build_host(host(vgpus=1))
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, tools=tools) as node:
        await node.report_account()
        await node.advance(100)
        assert list(node.offered) == [RESOURCE]
    assert QUESTION not in tools.commands


async def test_an_agent_reports_a_failing_nvidia_smi_and_asks_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = build_host(host())
    tools = SimTools(kernel)
    tools.before = failing
    async with running_node(kernel, tmp_path, tools=tools) as node:
        await node.report_account()
        await node.advance(50)
        assert node.reasons(VF) == [ReasonCode.UNREAD]
        assert "Input/output error" in str(reason_of(node.view).seen)
        assert tools.commands.count(QUESTION) == 1
        await node.advance(100)
        assert tools.commands.count(QUESTION) == 3
        tools.before = lambda _: None
        await node.advance(70)
        assert is_offered(node)
    (warning,) = (record for record in caplog.records if "nvidia-smi did not name the type" in record.message)
    assert warning.levelno == logging.WARNING


async def test_an_agent_whose_nvidia_smi_is_blocked_asks_again(tmp_path: Path) -> None:
    kernel, worker = build_host(host()), BlockedWorker()
    async with running_node(kernel, tmp_path, change_worker=lambda _: worker) as node:
        await node.report_account()
        await node.advance(50)
        assert "it sleeps in the kernel" in str(reason_of(node.view).seen)
        worker.is_blocked = False
        await node.advance(70)
        assert is_offered(node)


async def test_a_plugin_only_agent_says_that_nvidia_smi_was_not_asked(tmp_path: Path) -> None:
    async with running_node(build_host(host()), tmp_path, plugin_only=True) as node:
        await node.report_account()
        await node.advance(100)
        assert "nvidia-smi vgpu -s -v: not asked" in str(reason_of(node.view).seen)


async def test_names_of_another_version_of_the_driver_are_not_used(tmp_path: Path) -> None:
    """A new driver may give the type's id to another type."""
    kernel = build_host(host())
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, tools=tools) as node:
        await node.report_account()
        await node.advance(10)
        assert is_offered(node)
        tools.before = failing
        kernel.tree.place(VERSION, constant("595.45.04"))
        await node.advance(70)
        assert node.reasons(VF) == [ReasonCode.UNREAD]
    async with running_node(kernel, tmp_path, tools=tools) as node:
        await node.report_account()
        await node.advance(10)
        assert node.offered == {}
        assert node.reasons(VF) == [ReasonCode.UNREAD]


def test_a_scan_drops_the_names_that_an_earlier_driver_listed() -> None:
    kernel = build_host(host(vgpus=1))
    before = scan(kernel)
    kernel.write(HostPath(str(CURRENT).replace("25:00.4", "25:00.5")), b"1158\n")
    assert all(live.type == TYPE for live in scan(kernel, before, brief=True).vgpu_hosts[GPU].live)
    kernel.tree.place(VERSION, constant("595.45.04"))
    assert not any(live.type == TYPE for live in scan(kernel, before, brief=True).vgpu_hosts[GPU].live)


def test_an_answer_of_another_version_of_the_driver_is_not_used() -> None:
    """The driver was replaced while nvidia-smi ran."""
    kernel = build_host(host())
    state = NodeState(NodeTerms(Settings(), IDS), Ledger())
    state.observe_facts(scan(kernel))
    before, table = state.inventory, {"1158": VgpuType(TYPE)}
    state.observe_types(GPU, table, "595.45.04")
    assert state.inventory is before
    state.observe_types(GPU, table, "580.159.04")
    assert state.inventory is not None
    assert {vgpu.live.type for vgpu in state.inventory.vgpus.values()} == {TYPE}
