"""A process is killed after each of its writes in turn, and a new agent binds every GPU to its desired driver."""

import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.hardware.access.tools import ToolError
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredDriver, DesiredVgpus
from gpuvirt.model.change.state import DriverJournal
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.binding.killedkernel import Countdown, KilledError, KilledKernel, KilledTools
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in, change_vgpus, driver_state
from tests.agent.node.simnode import SimNode, running_node
from tests.thoroughness import examples

HOSTS = {
    "4xT4": ["0000:86:00.0"],
    "2xA10": ["0000:65:00.0"],
    "4xRTX2060": ["0000:04:00.0"],
    "2xRTX4090-one-group": ["0000:0b:01.0", "0000:0b:02.0"],
}
"""Hosts, and the GPUs of one isolation unit of each whose drivers are changed."""
MODES = {DesiredDriver.PASSTHROUGH: DesiredMode.PASSTHROUGH, DesiredDriver.NATIVE: DesiredMode.CONTAINER}
MOST_WRITES = 24
FOLLOWS = Settings(workload_label=True)


class Host:
    """A simulated host, on which processes are killed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.kernel: SimKernel = build_host(load_host(name))
        self.folder = folder
        self.tools = SimTools(self.kernel, ("vfio-pci", "nvidia", "snd_hda_intel", "xhci_hcd", "nvidia-gpu"))
        self.change_host = change_host_in(folder, self.kernel, self.tools)
        only = HOSTS.get(name, [])
        gpus = [
            function
            for function in scan(self.kernel).functions.values()
            if function.kind is FunctionKind.GPU and not function.physfn
        ]
        self.gpus = [gpu.address for gpu in gpus if not only or gpu.address in only]

    def move(self, desired_driver: DesiredDriver, change_host: ChangeHost | None = None) -> None:
        change_host = change_host or self.change_host
        unit = driver_state(change_host, NOBODY).inventory.gpus[self.gpus[0]].unit
        change_drivers(change_host, unit, dict.fromkeys(self.gpus, desired_driver), NOBODY, lambda _: None)

    def killed_move(self, desired_driver: DesiredDriver, after: int) -> bool:
        """Bind the GPUs in a process that is killed after so many operations; return whether it was killed."""
        countdown = Countdown(after)
        change_host = ChangeHost(
            KilledKernel(self.kernel, countdown),
            KilledTools(self.tools, countdown),
            self.change_host.original_drivers,
            self.change_host.locks,
            self.change_host.device_plugins,
        )
        try:
            self.move(desired_driver, change_host)
        except KilledError:
            return True
        return False

    def functions(self) -> list[PciAddress]:
        slots = {gpu.rpartition(".")[0] for gpu in self.gpus}
        return [function for function in self.kernel.pci.functions if function.rpartition(".")[0] in slots]

    def drivers(self) -> set[tuple[str | None, str | None]]:
        """Return the driver and the driver_override of each function."""
        functions = [self.kernel.pci.functions[function] for function in self.functions()]
        return {
            (None if function.driver == function.native_driver else function.driver, function.override)
            for function in functions
        }

    def locked(self) -> list[PciAddress]:
        locks = {gpu: HostPath(f"/proc/driver/nvidia/gpus/{gpu}/unbindLock") for gpu in self.gpus}
        return [
            gpu for gpu, lock in locks.items() if self.kernel.tree.exists(lock) and self.kernel.read(lock) == b"1\n"
        ]

    def expect(self, desired_driver: DesiredDriver) -> None:
        """Assert the desired drivers, and no remains of the killed change."""
        if desired_driver is DesiredDriver.PASSTHROUGH:
            assert {driver for driver, _ in self.drivers()} == {"vfio-pci"}
        else:
            assert self.drivers() == {(None, None)}
            assert self.locked() == []
        journal = hostfiles.journal(self.change_host.original_drivers).value
        assert journal.changes == {}
        assert desired_driver is DesiredDriver.PASSTHROUGH or journal.overrides.keys().isdisjoint(self.functions())


async def settled(node: SimNode) -> None:
    for _ in range(4):
        await node.report_account()
        await node.advance(10)


@given(
    name=st.sampled_from(sorted(HOSTS)),
    begun=st.sampled_from(DesiredDriver),
    desired=st.sampled_from(DesiredDriver),
    after=st.integers(0, MOST_WRITES),
    again=st.integers(0, MOST_WRITES),
)
@settings(max_examples=examples(150), deadline=None)
def test_the_next_process_completes_any_number_of_killed_changes(
    name: str, begun: DesiredDriver, desired: DesiredDriver, after: int, again: int
) -> None:
    with TemporaryDirectory() as folder:
        host = Host(name, Path(folder))
        host.move(DesiredDriver.NATIVE if begun is DesiredDriver.PASSTHROUGH else DesiredDriver.PASSTHROUGH)
        host.killed_move(begun, after)
        host.killed_move(desired, again)
        host.move(desired)
        host.expect(desired)
        assert host.kernel.vfio.requests == []


@pytest.mark.parametrize("begun", DesiredDriver)
@pytest.mark.parametrize("desired", DesiredDriver)
@pytest.mark.parametrize("name", ["4xT4", "4xRTX2060"])
async def test_a_new_agent_binds_the_desired_drivers_after_a_kill_at_any_write(
    name: str, begun: DesiredDriver, desired: DesiredDriver, tmp_path: Path
) -> None:
    for after in range(MOST_WRITES):
        folder = tmp_path / str(after)
        host = Host(name, folder)
        host.move(DesiredDriver.NATIVE if begun is DesiredDriver.PASSTHROUGH else DesiredDriver.PASSTHROUGH)
        was_killed = host.killed_move(begun, after)
        modes: dict[str, DesiredMode] = dict.fromkeys(host.gpus, MODES[desired])
        async with running_node(host.kernel, folder, Settings(modes=modes), tools=host.tools) as node:
            await settled(node)
            assert [note.text for note in node.view.problems] == []
        host.expect(desired)
        if not was_killed:
            return
    raise AssertionError("a move has more writes than were tried")


@pytest.fixture
def t4(tmp_path: Path) -> Host:
    return Host("4xT4", tmp_path)


T4 = PciAddress("0000:86:00.0")
A10 = PciAddress("0000:65:00.0")
OVERRIDE = HostPath(f"/sys/bus/pci/devices/{T4}/driver_override")


def driver(host: Host, gpu: PciAddress) -> str | None:
    return host.kernel.pci.functions[gpu].driver


def moved(host: Host, desired_driver: DesiredDriver, *, tools: SimTools | None = None) -> list[ReasonCode]:
    """Bind the host's GPUs, and return the codes of a refusal or failure."""
    return [reason.code for reason in against(host, desired_driver, tools)]


def against(host: Host, desired_driver: DesiredDriver, tools: SimTools | None) -> Sequence[Reason]:
    """Bind the host's GPUs, and return the reasons of a refusal or failure."""
    change_host = ChangeHost(
        host.kernel,
        tools or host.tools,
        host.change_host.original_drivers,
        host.change_host.locks,
        host.change_host.device_plugins,
    )
    unit = driver_state(change_host, NOBODY).inventory.gpus[host.gpus[0]].unit
    return change_drivers(change_host, unit, dict.fromkeys(host.gpus, desired_driver), NOBODY, lambda _: None)


def with_aliases(host: Host, *modules: str) -> None:
    """Add aliases of modules for NVIDIA's GPUs to modules.alias."""
    release = host.kernel.read(HostPath("/proc/sys/kernel/osrelease")).decode().strip()
    lines = "".join(f"alias pci:v000010DEd*sv*sd*bc03sc02i00* {module}\n" for module in modules)
    host.kernel.tree.place(HostPath(f"/lib/modules/{release}/modules.alias"), constant(lines))


def test_a_gpu_with_a_dynamic_id_of_vfio_pci_returns_to_its_native_driver(tmp_path: Path) -> None:
    """With vfio-pci.ids= on the kernel's command line, a probe would bind the GPU to vfio-pci again."""
    host = Host("2xA10", tmp_path)
    with_aliases(host, "nouveau", "nvidia")
    gpu = host.kernel.pci.functions[A10]
    host.kernel.pci.dynamic_ids[gpu.id] = "vfio-pci"
    assert moved(host, DesiredDriver.NATIVE) == []
    assert gpu.driver == "nvidia"


def test_a_gpu_that_vfio_pci_binds_again_is_a_failure_with_a_fix(tmp_path: Path) -> None:
    host = Host("2xA10", tmp_path)
    host.kernel.pci.dynamic_ids[host.kernel.pci.functions[A10].id] = "vfio-pci"
    unit = driver_state(host.change_host, NOBODY).inventory.gpus[A10].unit
    (reason,) = change_drivers(host.change_host, unit, {A10: DesiredDriver.NATIVE}, NOBODY, lambda _: None)
    assert reason.code is ReasonCode.STEP_FAILED
    assert "vfio-pci.ids=" in str(reason.fix)


async def test_a_failed_probe_is_reported_and_tried_again(t4: Host, tmp_path: Path) -> None:
    t4.move(DesiredDriver.PASSTHROUGH)
    for attribute in ("drivers/nvidia/bind", "drivers_probe"):
        t4.kernel.faults.refuse(HostPath(f"/sys/bus/pci/{attribute}"), errno.EIO)
    async with running_node(t4.kernel, tmp_path, FOLLOWS, tools=t4.tools) as node:
        node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed("container")))
        await settled(node)
        assert driver(t4, T4) is None
        state = node.agent.reports.workload.get()
        assert state is not None
        assert state.name is StateName.FAILED
        assert f"StepFailed: {T4}" in state.reason
        t4.kernel.faults.heal()
        await node.advance(301)
        assert driver(t4, T4) == "nvidia"
        state = node.agent.reports.workload.get()
        assert state is not None
        assert state.name is StateName.SUCCESS


async def test_a_gpu_without_a_driver_and_without_a_record_gets_its_native_driver(t4: Host, tmp_path: Path) -> None:
    t4.kernel.rebind(T4, None)
    async with running_node(t4.kernel, tmp_path, Settings(modes={T4: DesiredMode.CONTAINER}), tools=t4.tools) as node:
        await settled(node)
        assert driver(t4, T4) == "nvidia"


async def test_without_a_desired_mode_only_gpus_of_a_killed_change_get_their_driver_back(
    t4: Host, tmp_path: Path
) -> None:
    t4.kernel.rebind(PciAddress("0000:af:00.0"), None)  # unbound by another program
    assert t4.killed_move(DesiredDriver.PASSTHROUGH, 3)
    assert driver(t4, T4) is None
    async with running_node(t4.kernel, tmp_path, Settings(), tools=t4.tools) as node:
        await settled(node)
        assert driver(t4, T4) == "nvidia"
        assert driver(t4, PciAddress("0000:af:00.0")) is None
    t4.expect(DesiredDriver.NATIVE)


def record(path: Path, address: PciAddress, driver: str) -> None:
    """Record a function's original driver, and gpuvirt's override."""
    journal = DriverJournal({address: driver}, {address: "vfio-pci"})
    hostfiles.journal(path).update(lambda _: journal)


@pytest.mark.parametrize("recorded", ["nouveau", "gone"])
def test_a_driver_that_cannot_be_loaded_stops_the_change_before_any_write(tmp_path: Path, recorded: str) -> None:
    host = Host("2xA10", tmp_path)
    record(host.change_host.original_drivers, A10, recorded)
    host.kernel.writes.clear()
    assert moved(host, DesiredDriver.NATIVE) == [ReasonCode.PREREQUISITE_MISSING]
    assert host.kernel.writes == []
    assert driver(host, A10) == "vfio-pci"


def test_another_driver_of_modules_alias_replaces_a_missing_recorded_driver(tmp_path: Path) -> None:
    host = Host("2xA10", tmp_path)
    record(host.change_host.original_drivers, A10, "nouveau")
    with_aliases(host, "nouveau", "nvidia")
    host.kernel.pci.forget_driver("nvidia")
    assert moved(host, DesiredDriver.NATIVE) == []
    assert driver(host, A10) == "nvidia"
    assert host.tools.loaded == ["nvidia"], "before the unbind, by modprobe with the GPU's modalias"
    assert hostfiles.journal(host.change_host.original_drivers).value.drivers == {}


def test_a_module_that_needs_a_free_gpu_is_loaded_again_after_the_unbind(t4: Host) -> None:
    """NVIDIA's module fails with ENODEV while VFIO drives all GPUs (No NVIDIA devices probed)."""
    t4.move(DesiredDriver.PASSTHROUGH)
    t4.kernel.pci.forget_driver("nvidia")

    class Tools(SimTools):
        @override
        def modprobe(self, module: str) -> None:
            if driver(t4, T4) is not None:
                output = f"modprobe: ERROR: could not insert '{module}': No such device"
                raise ToolError(output, exit_code=1, output=output)
            super().modprobe(module)

    assert moved(t4, DesiredDriver.NATIVE, tools=Tools(t4.kernel)) == []
    assert driver(t4, T4) == "nvidia"


@pytest.mark.parametrize("text", ["Key was rejected by service", "Required key not available", "Exec format error"])
def test_a_module_that_the_kernel_does_not_trust_is_to_be_signed(t4: Host, text: str) -> None:
    t4.move(DesiredDriver.PASSTHROUGH)
    t4.kernel.pci.forget_driver("nvidia")

    class Tools(SimTools):
        @override
        def modprobe(self, module: str) -> None:
            output = f"modprobe: ERROR: could not insert '{module}': {text}"
            raise ToolError(output, exit_code=1, output=output)

    (reason,) = against(t4, DesiredDriver.NATIVE, Tools(t4.kernel))
    assert (reason.code, "mokutil" in reason.text) == (ReasonCode.STEP_FAILED, "key" in text.lower())


@pytest.mark.parametrize("after", [1, 2])
def test_an_override_of_a_killed_change_is_cleared(t4: Host, after: int) -> None:
    assert t4.killed_move(DesiredDriver.PASSTHROUGH, after)
    assert driver(t4, T4) == "nvidia"
    assert moved(t4, DesiredDriver.NATIVE) == []
    assert t4.kernel.read(OVERRIDE) == b"(null)\n"
    t4.expect(DesiredDriver.NATIVE)


def test_an_override_that_another_program_has_written_stays(t4: Host) -> None:
    t4.kernel.write(OVERRIDE, b"vfio-pci")
    t4.kernel.writes.clear()
    assert moved(t4, DesiredDriver.NATIVE) == []
    t4.kernel.pci.unbind(t4.kernel.pci.functions[T4])
    assert moved(t4, DesiredDriver.NATIVE) == [ReasonCode.DRIVER_PINNED]
    assert t4.kernel.writes == []


@pytest.mark.parametrize("name", [f"pci-{A10}", A10])
def test_a_gpu_that_driverctl_pins_to_vfio_stays_there(tmp_path: Path, name: str) -> None:
    host = Host("2xA10", tmp_path)
    host.kernel.tree.place(HostPath(f"/etc/driverctl.d/{name}"), constant("vfio-pci\n"))
    host.kernel.writes.clear()
    assert moved(host, DesiredDriver.NATIVE) == [ReasonCode.DRIVER_PINNED]
    assert host.kernel.writes == []


def test_an_override_is_kept_if_the_record_is_of_another_boot(t4: Host) -> None:
    assert t4.killed_move(DesiredDriver.PASSTHROUGH, 2)
    t4.kernel.reboot_id()
    t4.kernel.write(OVERRIDE, b"vfio-pci")
    t4.kernel.writes.clear()
    assert moved(t4, DesiredDriver.NATIVE) == []
    assert t4.kernel.writes == []


@pytest.mark.parametrize("content", [b"", b"\x00{", b"[]", b'{"version": 1, "drivers": {"../x": "nvidia"}}', None])
def test_a_gpu_returns_to_its_native_driver_with_a_damaged_or_absent_record(t4: Host, content: bytes | None) -> None:
    t4.move(DesiredDriver.PASSTHROUGH)
    t4.change_host.original_drivers.unlink()
    if content is not None:
        t4.change_host.original_drivers.write_bytes(content)
    assert moved(t4, DesiredDriver.NATIVE) == []
    t4.expect(DesiredDriver.NATIVE)


STAGES = ("unbind", "bind to pci-pf-stub", "switch", "unbind from pci-pf-stub", "bind")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", [DesiredMode.VGPU, DesiredMode.UNMANAGED])
async def test_a_gpu_has_its_driver_back_after_a_kill_during_sriov_manage(
    tmp_path: Path, stage: str, mode: DesiredMode
) -> None:
    host, gpu = l40s(tmp_path)
    kill_in_sriov_manage(host, gpu, stage)
    async with running_node(host.kernel, tmp_path, Settings(modes={gpu: mode}), tools=host.tools) as node:
        await settled(node)
        assert driver(host, gpu) == "nvidia"
    assert hostfiles.journal(host.change_host.original_drivers).value.changes == {}


def l40s(folder: Path) -> tuple[Host, PciAddress]:
    """Return a host and a GPU of it without VFs."""
    host = Host("4xL40S", folder)
    gpu = PciAddress("0000:da:00.0")
    host.kernel.vfs.switch(host.kernel.pci.functions[gpu], 0)
    return host, gpu


def kill_in_sriov_manage(host: Host, gpu: PciAddress, stage: str) -> None:
    def during(now: str) -> None:
        if now == stage:
            raise KilledError

    host.tools.during = during
    with suppress(KilledError):
        change_vgpus(host.change_host, gpu, DesiredVgpus({"L40S-8Q": 1}), NOBODY, lambda _: None)
    host.tools.during = lambda _: None
    assert driver(host, gpu) != "nvidia" or stage == "unbind"


def test_the_named_fix_works_after_a_kill_during_sriov_manage(tmp_path: Path) -> None:
    host, gpu = l40s(tmp_path)
    kill_in_sriov_manage(host, gpu, "switch")
    (reason,) = change_vgpus(host.change_host, gpu, DesiredVgpus({"L40S-8Q": 1}), NOBODY, lambda _: None)
    assert reason.fix is not None
    assert reason.fix.startswith(f"bind it to its native driver: gpuvirt vfio unbind {gpu}, or ")
    unit = driver_state(host.change_host, NOBODY).inventory.gpus[gpu].unit
    assert change_drivers(host.change_host, unit, {gpu: DesiredDriver.NATIVE}, NOBODY, lambda _: None) == ()
    assert change_vgpus(host.change_host, gpu, DesiredVgpus({"L40S-8Q": 1}), NOBODY, lambda _: None) == ()
