"""Plans for changes of drivers, and the reasons of refusals."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.pci import GRACE_DRIVER
from gpuvirt.hardware.access.tools import HostTools, ToolError
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.driverplanning import plan_return, plan_units
from gpuvirt.model.change.nativedrivers import alias_of
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.platform import Cpu, PlatformSpec
from gpuvirt_sim.files.tree import Link, constant
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec, load_host
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.binding.plannedhost import PlannedHost
from tests.agent.change.changes import NOBODY, change_drivers, driver_state, inputs

T4 = [PciAddress(f"0000:{bus}:00.0") for bus in ("3b", "5e", "86", "af")]


@pytest.fixture
def host_of(tmp_path: Path) -> Callable[[str], PlannedHost]:
    return lambda name: PlannedHost(build_host(load_host(name)), tmp_path / name)


@pytest.fixture
def t4(host_of: Callable[[str], PlannedHost]) -> PlannedHost:
    return host_of("4xT4")


def test_all_functions_are_unbound_before_the_first_probe(host_of: Callable[[str], PlannedHost]) -> None:
    host = host_of("4xRTX2060")
    (plan,) = host.plans(DesiredDriver.NATIVE, "0000:04:00.0")
    words = [step.text.split(": ")[1].split()[0] for step in plan.steps]
    assert words == ["driver_override"] * 4 + ["unbind"] * 4 + ["probe,"] * 4
    assert plan.leases == (27,)


def test_a_missing_vfio_module_is_loaded(t4: PlannedHost) -> None:
    t4.kernel.tree.remove(HostPath("/sys/bus/pci/drivers/vfio-pci"))
    assert t4.move(DesiredDriver.PASSTHROUGH, T4[2]) == ()
    assert t4.tools.loaded == ["vfio-pci"]
    assert t4.kernel.pci.functions[T4[2]].driver == "vfio-pci"


def test_a_gpu_keeps_its_driver_if_the_vfio_module_is_missing(t4: PlannedHost, tmp_path: Path) -> None:
    t4.kernel.tree.remove(HostPath("/sys/bus/pci/drivers/vfio-pci"))
    change_host = ChangeHost(
        t4.kernel, SimTools(t4.kernel, ()), tmp_path / "d.json", tmp_path / "l", tmp_path / "device-plugins"
    )
    unit = driver_state(change_host, NOBODY).inventory.gpus[T4[2]].unit
    (reason,) = change_drivers(change_host, unit, {T4[2]: DesiredDriver.PASSTHROUGH}, NOBODY, lambda _: None)
    assert reason.code is ReasonCode.STEP_FAILED
    assert "modprobe" in reason.text
    assert t4.kernel.pci.functions[T4[2]].driver == "nvidia"
    lock = HostPath(f"/proc/driver/nvidia/gpus/{T4[2]}/unbindLock")
    assert (lock, b"1") in t4.kernel.writes
    assert t4.kernel.read(lock) == b"0\n", "NVIDIA's driver accepts clients again"


def test_a_variant_driver_is_used_where_its_alias_matches_the_gpu(host_of: Callable[[str], PlannedHost]) -> None:
    host = host_of("2xGH200")
    release = HostPath("/proc/sys/kernel/osrelease")
    host.kernel.tree.place(release, constant("6.8.0"))
    aliases = "alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n"
    host.kernel.tree.place(HostPath("/lib/modules/6.8.0/modules.alias"), constant(aliases))
    gpu = next(iter(driver_state(host.change_host, NOBODY).inventory.gpus))
    seen = driver_state(host.change_host, NOBODY)
    assert seen.best_drivers == dict.fromkeys(seen.inventory.gpus, "nvgrace_gpu_vfio_pci")
    assert gpu in seen.best_drivers


GH200 = PciAddress("0009:01:00.0")


def grace_host(tmp_path: Path, driver: str, *modules: str) -> PlannedHost:
    slots = (SlotSpec(at=GH200, board="GH200", group=9, numa=0, driver=driver),)
    platform = PlatformSpec(cpu=Cpu.ARM, available=("vfio-pci", *modules))
    return PlannedHost(build_host(HostSpec(about="a GH200", slots=slots, platform=platform)), tmp_path)


def test_a_grace_gpu_is_not_bound_to_vfio_pci(tmp_path: Path) -> None:
    """A VM would get it without its memory."""
    host = grace_host(tmp_path, "native")
    assert host.refused(DesiredDriver.PASSTHROUGH, GH200) == {ReasonCode.GRACE_DRIVER_MISSING}
    (plan,) = host.plans(DesiredDriver.PASSTHROUGH, GH200, orders=replace(NOBODY, grace_without_driver=True))
    assert (plan.refusals, plan.steps[-1].text) == ((), f"{GH200}: probe, for vfio-pci")
    (plan,) = host.plans(DesiredDriver.PASSTHROUGH, GH200, orders=replace(NOBODY, forced=True))
    assert plan.refusals == ()


def test_a_grace_gpu_is_bound_to_the_driver_that_passes_its_memory(tmp_path: Path) -> None:
    host = grace_host(tmp_path, "native", GRACE_DRIVER)
    assert host.move(DesiredDriver.PASSTHROUGH, GH200) == ()
    assert host.tools.loaded == [GRACE_DRIVER]
    assert host.kernel.pci.functions[GH200].driver == GRACE_DRIVER


def test_a_grace_driver_that_is_built_into_the_kernel_needs_no_alias(tmp_path: Path) -> None:
    host = grace_host(tmp_path, "native")
    host.kernel.pci.add_driver(GRACE_DRIVER)
    assert host.move(DesiredDriver.PASSTHROUGH, GH200) == ()
    assert host.kernel.pci.functions[GH200].driver == GRACE_DRIVER


def test_a_grace_gpu_that_was_on_vfio_pci_gets_it_back_when_its_return_fails(tmp_path: Path) -> None:
    host = grace_host(tmp_path, "vfio-pci")
    state = driver_state(host.change_host)
    host.kernel.rebind(GH200, None)
    unit = state.inventory.gpus[GH200].unit
    assert plan_return(driver_state(host.change_host), unit, {GH200: True}).refusals == ()


def test_a_gpu_with_vgpus_is_not_unbound(t4: PlannedHost) -> None:
    assert t4.refused(DesiredDriver.PASSTHROUGH, T4[0]) == {ReasonCode.CARRIES_VGPUS}


def test_a_gpu_with_vfs_is_not_unbound(host_of: Callable[[str], PlannedHost]) -> None:
    host = host_of("8xH100")
    gpus = driver_state(host.change_host, NOBODY).inventory.gpus
    with_vfs = next(address for address, gpu in gpus.items() if gpu.function.virtfns)
    codes = {reason.code for plan in host.plans(DesiredDriver.PASSTHROUGH, with_vfs) for reason in plan.refusals}
    assert codes & {ReasonCode.VFS_ENABLED, ReasonCode.CARRIES_VGPUS}


def test_a_gpu_in_use_by_a_process_is_not_unbound(t4: PlannedHost) -> None:
    process = t4.kernel.start_process("python3", "/dev/nvidia2")
    (reason,) = t4.move(DesiredDriver.PASSTHROUGH, T4[2])
    assert reason.code is ReasonCode.IN_USE
    assert f"python3 (pid {process.pid})" in reason.message
    # NVIDIA's driver refuses the unbind even if the change is forced.
    forced = inputs(forced=True)
    assert {refusal.code for refusal in t4.move(DesiredDriver.PASSTHROUGH, T4[2], forced)} == {ReasonCode.DRIVER_LOCK}
    t4.kernel.end_vm(process)
    assert t4.move(DesiredDriver.PASSTHROUGH, T4[2]) == ()


def test_a_gpu_in_use_by_a_service_of_nvidia_is_not_unbound(t4: PlannedHost) -> None:
    service = t4.kernel.start_process("nvidia-persiste", "/dev/nvidia2")
    (reason,) = t4.move(DesiredDriver.PASSTHROUGH, T4[2])
    assert reason.code is ReasonCode.DRIVER_LOCK
    assert "nvidia-persiste" in reason.message
    assert t4.kernel.pci.functions[T4[2]].driver == "nvidia"
    t4.kernel.end_vm(service)
    assert t4.move(DesiredDriver.PASSTHROUGH, T4[2]) == ()


def test_a_gpu_of_a_pod_is_not_unbound(t4: PlannedHost) -> None:
    orders = inputs(pods={T4[2]: ("pod default/vm-a",)})
    assert t4.refused(DesiredDriver.PASSTHROUGH, T4[2], orders) == {ReasonCode.ALLOCATED_TO_POD}


def test_a_gpu_is_not_unbound_while_processes_are_not_visible(t4: PlannedHost) -> None:
    t4.kernel.faults.fail(HostPath("/proc"), errno.EACCES)
    assert t4.refused(DesiredDriver.PASSTHROUGH, T4[2]) == {ReasonCode.PROCESSES_NOT_VISIBLE}


def test_the_gpu_of_the_console_is_not_unbound(t4: PlannedHost) -> None:
    t4.kernel.tree.place(HostPath(f"{t4.kernel.pci.functions[T4[2]].folder}/boot_vga"), constant("1"))
    assert t4.plans(DesiredDriver.PASSTHROUGH, T4[2])[0].refusals == (), "a GPU without a framebuffer shows no console"
    framebuffer = Link("../../../devices/platform/efi-framebuffer.0")
    t4.kernel.tree.place(HostPath("/sys/class/graphics/fb0/device"), framebuffer)
    assert t4.refused(DesiredDriver.PASSTHROUGH, T4[2]) == {ReasonCode.USED_BY_HOST}


DISK, NIC = "0000:3c:00.0", "0000:3d:00.0"


@pytest.mark.parametrize(("board", "at"), [("disk", DISK), ("nic", NIC)])
def test_a_disk_or_network_card_in_use_is_not_unbound_with_its_group(tmp_path: Path, board: str, at: str) -> None:
    spec = neighbour(board, at)
    host = PlannedHost(build_host(spec), tmp_path)
    tree, folder = host.kernel.tree, host.kernel.pci.functions[PciAddress(at)].folder
    if board == "disk":
        partition = f"{folder}/nvme/nvme0/nvme0n1/nvme0n1p1"
        tree.place(HostPath(f"{partition}/dev"), constant("259:1"))
        tree.place(HostPath("/sys/class/block/nvme0n1p1"), Link(partition))
        tree.place(HostPath("/proc/1/mountinfo"), constant("22 1 259:1 / / rw - ext4 /dev/root rw"))
    else:
        tree.place(HostPath(f"{folder}/net/eth0/flags"), constant("0x1003"))
    gpu = "0000:3b:00.0"
    assert host.refused(DesiredDriver.PASSTHROUGH, gpu) == {ReasonCode.FOREIGN_ENDPOINT}
    listed = inputs(allowed=frozenset({PciAddress(at)}))
    assert host.refused(DesiredDriver.PASSTHROUGH, gpu, listed) == {ReasonCode.USED_BY_HOST}


def neighbour(board: str, at: str) -> HostSpec:
    functions = {
        "disk": FunctionSpec(id="144d:a808", class_code="010802", native_driver="nvme"),
        "nic": FunctionSpec(id="8086:1521", class_code="020000", native_driver="igb"),
    }
    return HostSpec(
        about="a GPU that shares its group",
        boards={board: CardSpec(functions=(functions[board],))},
        slots=(SlotSpec(at="0000:3b:00.0", board="T4", group=7), SlotSpec(at=at, board=board, group=7)),
    )


def test_the_probe_is_left_to_the_administrator_on_a_host_with_nvswitches(
    host_of: Callable[[str], PlannedHost],
) -> None:
    host = host_of("8xA100")
    address = host.without_vfs()
    assert host.move(DesiredDriver.PASSTHROUGH, address) == ()
    (plan,) = host.plans(DesiredDriver.NATIVE, address)
    assert not any(step.text.startswith(f"{address}: probe") for step in plan.steps)
    (left,) = plan.left_driverless
    assert host.move(DesiredDriver.NATIVE, address) == (left,), "the change says that the GPU has no driver"
    (reason,) = host.move(DesiredDriver.NATIVE, address)
    assert (left.code, left.fix) == (reason.code, reason.fix)
    assert (reason.code, reason.fix) == (
        ReasonCode.NO_DRIVER,
        f"when all GPUs are free: echo {address} > /sys/bus/pci/drivers_probe",
    )


def test_what_a_killed_change_left_is_removed_before_the_administrator_probes(
    host_of: Callable[[str], PlannedHost],
) -> None:
    """With the override, the administrator's probe would bind the GPU to vfio-pci."""
    host = host_of("8xA100")
    address = host.without_vfs()
    host.kernel.rebind(address, None)
    found = driver_state(host.change_host, NOBODY)
    journal = replace(found.journal, overrides={address: "vfio-pci"})
    (plan,) = plan_units(replace(found, journal=journal), {address: DesiredDriver.NATIVE})
    assert plan.refusals == ()
    assert [step.text for step in plan.steps] == [f"{address}: driver_override = none"]


@pytest.mark.parametrize(("name", "is_refused"), [("8xA100", False), ("2xA10", True)])
def test_a_gpu_that_the_administrator_probes_needs_no_module(
    host_of: Callable[[str], PlannedHost], name: str, is_refused: bool
) -> None:
    host = host_of(name)
    address = host.without_vfs()
    host.move(DesiredDriver.PASSTHROUGH, address)
    found = driver_state(host.change_host, NOBODY)
    missing = {"nvidia": "not found", alias_of(found.function(address)): "not found"}
    without = replace(found, drivers=frozenset(), native_modules={address: ("nvidia",)}, missing_modules=missing)
    (plan,) = plan_units(without, {address: DesiredDriver.NATIVE})
    assert bool(plan.refusals) is is_refused


def test_the_original_driver_stays_recorded(t4: PlannedHost) -> None:
    assert t4.move(DesiredDriver.PASSTHROUGH, T4[2]) == ()
    t4.kernel.rebind(T4[2], None)
    assert t4.move(DesiredDriver.PASSTHROUGH, T4[2]) == ()
    assert hostfiles.journal(t4.change_host.original_drivers).value.drivers == {T4[2]: "nvidia"}


def test_a_gpu_returns_to_its_native_driver_with_a_damaged_record(t4: PlannedHost) -> None:
    assert t4.move(DesiredDriver.PASSTHROUGH, T4[2]) == ()
    t4.change_host.original_drivers.write_bytes(b"\x00{")
    assert t4.move(DesiredDriver.NATIVE, T4[2]) == ()
    assert t4.kernel.pci.functions[T4[2]].driver == "nvidia"


def test_a_driver_that_does_not_bind_is_a_failure_and_the_change_is_rolled_back(t4: PlannedHost) -> None:
    # Without an IOMMU group vfio-pci fails to probe, and the write returns no error (drivers/base/dd.c).
    t4.kernel.pci.functions[T4[2]].group = None
    reasons = t4.move(DesiredDriver.PASSTHROUGH, T4[2])
    assert [reason.code for reason in reasons] == [ReasonCode.STEP_FAILED]
    assert "no driver; expected: driver" in str(reasons[0].seen)
    assert t4.kernel.pci.functions[T4[2]].driver == "nvidia"
    assert hostfiles.journal(t4.change_host.original_drivers).value.drivers == {}


def test_modprobe_of_a_real_host_reports_its_failure(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="modprobe -- vfio-pci"):
        HostTools(tmp_path).modprobe("vfio-pci")


def test_a_gpu_of_a_vm_is_not_unbound_even_if_forced(host_of: Callable[[str], PlannedHost]) -> None:
    host = host_of("2xA10")
    host.kernel.start_vm(IommuGroup(12))
    assert host.refused(DesiredDriver.NATIVE, "0000:65:00.0") == {ReasonCode.IN_USE}
    forced = inputs(forced=True)
    assert host.refused(DesiredDriver.NATIVE, "0000:65:00.0", forced) == {ReasonCode.IN_USE}
    assert host.kernel.vfio.requests == []


def test_a_gpu_whose_vf_a_vm_has_gets_no_native_driver(tmp_path: Path) -> None:
    """Its native driver may reset the VFs when it probes the GPU, which is on no driver."""
    gpu, vf = PciAddress("0000:25:00.0"), PciAddress("0000:25:00.4")
    slots = (SlotSpec(at=gpu, board="L40S", group=12, vfs=2),)
    host = PlannedHost(build_host(HostSpec(about="an L40S without a driver", slots=slots)), tmp_path)
    host.kernel.rebind(vf, "vfio-pci")
    host.kernel.rebind(gpu, None)
    assert host.kernel.pci.functions[gpu].virtfns, "the VFs stay when the GPU loses its driver"
    group = host.kernel.pci.functions[vf].group
    assert group is not None
    process = host.kernel.start_vm(group)
    (plan,) = host.plans(DesiredDriver.NATIVE, gpu)
    assert [(reason.code, reason.subject) for reason in plan.refusals] == [(ReasonCode.IN_USE, vf)], "a dry run says so"
    assert host.refused(DesiredDriver.NATIVE, gpu) == {ReasonCode.IN_USE}
    assert host.refused(DesiredDriver.NATIVE, gpu, inputs(forced=True)) == {ReasonCode.IN_USE}
    host.kernel.end_vm(process)
    assert host.move(DesiredDriver.NATIVE, gpu) == ()
    assert host.kernel.pci.functions[gpu].driver == "nvidia"


def test_a_gpu_with_a_vf_that_cannot_be_read_gets_no_native_driver(tmp_path: Path) -> None:
    """A VM may have the VF, and nothing shows its group."""
    gpu, vf = PciAddress("0000:25:00.0"), PciAddress("0000:25:00.4")
    slots = (SlotSpec(at=gpu, board="L40S", group=12, vfs=2),)
    host = PlannedHost(build_host(HostSpec(about="an L40S without a driver", slots=slots)), tmp_path)
    host.kernel.rebind(vf, "vfio-pci")
    host.kernel.rebind(gpu, None)
    host.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{vf}/vendor"), errno.EIO)
    (plan,) = host.plans(DesiredDriver.NATIVE, gpu)
    assert [(reason.code, reason.subject) for reason in plan.refusals] == [(ReasonCode.UNREAD, vf)]
    assert host.refused(DesiredDriver.NATIVE, gpu) == {ReasonCode.UNREAD}
    host.kernel.faults.heal()
    assert host.move(DesiredDriver.NATIVE, gpu) == ()


def test_a_gpu_with_vfs_gets_no_native_driver_while_their_users_are_unknown(tmp_path: Path) -> None:
    gpu, vf = PciAddress("0000:25:00.0"), PciAddress("0000:25:00.4")
    slots = (SlotSpec(at=gpu, board="L40S", group=12, vfs=2),)
    host = PlannedHost(build_host(HostSpec(about="an L40S without a driver", slots=slots)), tmp_path)
    host.kernel.rebind(vf, "vfio-pci")
    host.kernel.rebind(gpu, None)
    host.kernel.processes.hide()
    assert host.refused(DesiredDriver.NATIVE, gpu) == {ReasonCode.PROCESSES_NOT_VISIBLE}
    host.kernel.processes.hide(hidden=False)
    assert host.move(DesiredDriver.NATIVE, gpu) == ()
