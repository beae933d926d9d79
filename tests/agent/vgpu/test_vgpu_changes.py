"""vGPU configs on simulated hosts: the desired vGPUs exist afterwards, and vGPUs in use are kept."""

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change import unitchange
from gpuvirt.agent.change.gate.gate import UnitBusyError, gate_at
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId, VgpuId, VgpuType
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredDriver, DesiredVgpus
from gpuvirt.model.change.state import StartedChange
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.inventory.isolation import slots_of
from gpuvirt.model.reasons import ReasonCode, refusals
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.function import SimFunction
from gpuvirt_sim.files.tree import DeviceNode, constant
from tests.agent.change.changes import change_drivers, change_vgpus, inputs
from tests.agent.vgpu.hostwithvgpus import VgpuHost, codes

T4 = PciAddress("0000:3b:00.0")
A10, ON_VFIO = PciAddress("0000:b1:00.0"), PciAddress("0000:65:00.0")
L40S = PciAddress("0000:25:00.0")
FLEX = PciAddress("0000:4d:00.0")


@pytest.mark.parametrize(
    ("simulated", "gpu", "card"), [("2xA10-vgpu", A10, "A10"), ("4xL40S", L40S, "L40S"), ("4xT4", T4, "T4")]
)
def test_several_configs_are_applied_in_turn(simulated: str, gpu: PciAddress, card: str, tmp_path: Path) -> None:
    host = VgpuHost(simulated, tmp_path)
    for name, count in ((f"{card}-4Q", 4), (f"{card}-8Q", 2), (f"{card}-4Q", 2), (f"{card}-4Q", 3)):
        assert host.apply_types(gpu, {name: count}) == ()
        assert host.carries(gpu) == {name: count}
        assert host.apply_types(gpu, {name: count}) == ()
        assert host.steps == []
    assert host.apply_vgpus(gpu) == ()
    assert host.carries(gpu) == {}


def test_a_config_creates_the_same_ids_after_a_reboot(tmp_path: Path) -> None:
    host = VgpuHost("2xA10-vgpu", tmp_path)
    host.apply_vgpus(A10, A10_4Q=6)
    before = host.types(A10)
    again = VgpuHost("2xA10-vgpu", tmp_path)
    again.apply_vgpus(A10, A10_4Q=6)
    assert again.types(A10) == before


def test_a_vgpu_of_a_vm_stays_and_vfio_sends_the_vm_no_request(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    mine, other = host.types(T4)
    vm = host.kernel.start_vm(host.group_of(mine))
    reasons = host.apply_vgpus(T4, T4_4Q=4)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert f"qemu-system-x86 (pid {vm.pid})" in reasons[0].text
    assert list(host.types(T4)) == [mine]
    assert host.kernel.vfio.requests == []
    host.kernel.end_vm(vm)
    assert host.apply_vgpus(T4, T4_4Q=4) == ()
    assert host.carries(T4) == {"T4-4Q": 4}
    assert other not in host.types(T4)


def test_a_vgpu_of_a_vm_that_starts_after_the_plan_is_not_touched(tmp_path: Path) -> None:
    """The VM starts after the snapshot of the plan; the lease detects it."""
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    first, second = sorted(host.types(T4))
    steps: list[str] = []

    def start(step: Step | RollBack) -> None:
        steps.append(step.text)
        if len(steps) == 1:
            host.kernel.start_vm(host.group_of(second))

    reasons = change_vgpus(host.change_host, T4, DesiredVgpus({"T4-4Q": 4}), host.given, start)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert "qemu-system-x86" in reasons[0].text
    assert host.kernel.vfio.requests == []
    assert host.types(T4) == {second: "T4-8Q"}, "as if the VM had started before the snapshot"
    assert first not in host.types(T4)


def test_a_vgpu_whose_device_node_is_unknown_is_not_removed(tmp_path: Path) -> None:
    """A VM may have it open by that node, and the agent cannot see the VM."""
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=1)
    (mine,) = before = host.types(T4)
    host.kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{mine}/vfio-dev"), errno.EIO)
    assert codes(host.apply_vgpus(T4)) == [ReasonCode.UNREAD]
    assert host.types(T4) == before
    host.kernel.faults.heal()
    assert host.apply_vgpus(T4) == ()


@pytest.mark.parametrize("users", [2, 8])
def test_the_lease_protects_vgpus_of_vms_that_no_snapshot_shows(tmp_path: Path, users: int) -> None:
    """An agent that cannot see the host's processes finds no user of a group; a lease does."""
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_2Q=8)
    existing = sorted(host.types(T4))
    for vgpu in existing[-users:]:
        host.kernel.start_vm(host.group_of(vgpu))
    host.kernel.faults.fail(HostPath("/proc"), errno.EACCES)
    for _ in range(2):
        reasons = host.apply_vgpus(T4, T4_4Q=4)
        assert codes(reasons) == [ReasonCode.VGPU_IN_USE] * users
        assert "/dev/vfio/" in reasons[0].text
        assert sorted(host.types(T4)) == existing[-users:]
    assert host.kernel.vfio.requests == []


def test_a_vgpu_of_a_pod_stays_before_its_vm_opens_the_vgpu(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    mine = min(host.types(T4))
    host.given = inputs(holdings=(Holding(T4, mine, VgpuType("GRID T4-8Q"), "pod default/vm-a", seen_this_boot=True),))
    reasons = host.apply_vgpus(T4)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert "pod default/vm-a" in reasons[0].text
    assert list(host.types(T4)) == [mine]


def test_a_failed_change_restores_the_vgpus(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    before = host.types(T4)
    assert set(before.values()) == {"T4-8Q"}
    host.kernel.faults.refuse(
        HostPath(f"/sys/class/mdev_bus/{T4}/mdev_supported_types/nvidia-232/create"), errno.ENOSPC
    )
    reasons = host.apply_vgpus(T4, T4_4Q=4)
    assert codes(reasons) == [ReasonCode.STEP_FAILED]
    assert "No space left on device" in reasons[0].text
    assert host.types(T4) == before


def test_more_vgpus_than_fit_are_refused_before_any_step(tmp_path: Path) -> None:
    host = VgpuHost("2xA10-vgpu", tmp_path)
    host.apply_vgpus(A10, A10_8Q=3)
    before = host.types(A10)
    assert codes(host.apply_vgpus(A10, A10_4Q=7)) == [ReasonCode.NO_ROOM]
    assert codes(host.apply_vgpus(A10, A10_5Q=1)) == [ReasonCode.NO_SUCH_TYPE]
    assert codes(host.apply_vgpus(A10, A10_4Q=1, A10_8Q=1)) == [ReasonCode.SIZES_DIFFER]
    assert (host.steps, host.types(A10)) == ([], before)


def test_vfs_are_enabled_for_vgpus_whose_parents_are_vfs(tmp_path: Path) -> None:
    host = VgpuHost("2xA10-vgpu", tmp_path)
    assert host.apply_vgpus(A10, A10_12Q=2) == ()
    assert host.carries(A10) == {"A10-12Q": 2}
    assert ("sriov-manage", "-e", A10) in host.tools.commands


def test_a_gpu_that_a_process_uses_gets_no_vfs(tmp_path: Path) -> None:
    """Enabling VFs detaches the GPU's driver for a moment."""
    host = VgpuHost("2xA10-vgpu", tmp_path)
    number = next(
        line.partition(":")[2].strip()
        for line in host.kernel.read(HostPath(f"/proc/driver/nvidia/gpus/{A10}/information")).decode().splitlines()
        if line.startswith("Device Minor")
    )
    process = host.kernel.start_process("python3", f"/dev/nvidia{number}")
    reasons = host.apply_vgpus(A10, A10_12Q=2)
    assert codes(reasons) == [ReasonCode.IN_USE]
    assert f"python3 (pid {process.pid})" in reasons[0].text
    assert host.tools.commands == []


def test_a_passthrough_gpu_gets_no_vgpus(tmp_path: Path) -> None:
    host = VgpuHost("2xA10", tmp_path)
    assert codes(host.apply_vgpus(ON_VFIO, A10_12Q=2)) == [ReasonCode.NO_VGPU_HOST]
    assert host.apply_vgpus(ON_VFIO) == (), "the GPU has no vGPUs, as desired"
    assert codes(host.apply_vgpus(PciAddress("0000:00:1f.0"))) == [ReasonCode.NO_VGPU_HOST]


def test_a_vf_that_rejects_a_type_is_skipped_and_reported(tmp_path: Path) -> None:
    host = VgpuHost("4xL40S", tmp_path)
    assert host.apply_vgpus(L40S) == ()
    slot = min(scan(host.kernel).vgpu_hosts[L40S].creatable)
    host.kernel.faults.refuse(HostPath(f"/sys/bus/pci/devices/{slot}/nvidia/current_vgpu_type"), errno.EIO)
    reasons = host.apply_vgpus(L40S, L40S_12Q=4)
    assert codes(reasons) == [ReasonCode.VF_REJECTED_TYPE]
    assert slot in reasons[0].text
    assert host.carries(L40S) == {"L40S-12Q": 4}
    assert VgpuId(slot) not in host.types(L40S)


def test_an_obstacle_stops_no_change_that_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps find the obstacle, and a failed step is rolled back."""
    host, answers = VgpuHost("4xL40S", tmp_path), iter([()])
    assert host.apply_vgpus(L40S) == ()
    slot = min(scan(host.kernel).vgpu_hosts[L40S].creatable)
    host.kernel.faults.refuse(HostPath(f"/sys/bus/pci/devices/{slot}/nvidia/current_vgpu_type"), errno.EIO)
    monkeypatch.setattr(unitchange, "obstacles", lambda *_: next(answers, (refusals.no_group(L40S),)))
    assert codes(host.apply_vgpus(L40S, L40S_12Q=4)) == [ReasonCode.VF_REJECTED_TYPE]
    assert host.carries(L40S) == {"L40S-12Q": 4}


def test_vfs_that_split_a_gpu_evenly_are_enabled_and_disabled_together(tmp_path: Path) -> None:
    host = VgpuHost("2xFlex170", tmp_path)
    assert host.apply_types(FLEX, {"16 VFs": 1}) == ()
    assert len(scan(host.kernel).functions[FLEX].virtfns) == 16
    assert host.apply_types(FLEX, {}) == ()
    assert scan(host.kernel).functions[FLEX].virtfns == ()


def test_a_vm_on_a_vf_keeps_all_vfs_of_the_gpu(tmp_path: Path) -> None:
    host = VgpuHost("2xFlex170", tmp_path)
    vf = scan(host.kernel).functions[FLEX].virtfns[0]
    host.kernel.rebind(vf, "vfio-pci")
    group = scan(host.kernel).functions[vf].iommu_group
    assert isinstance(group, int)
    host.kernel.start_vm(IommuGroup(group))
    assert codes(host.apply_types(FLEX, {"16 VFs": 1})) == [ReasonCode.VGPU_IN_USE]
    assert host.kernel.vfio.requests == []


def bind(host: VgpuHost, *vfs: PciAddress, to: DesiredDriver = DesiredDriver.PASSTHROUGH) -> list[ReasonCode]:
    inventory = observe(host.change_host, host.given, None).inventory
    unit = next(unit for unit, members in inventory.units.items() if vfs[0] in members)
    return codes(change_drivers(host.change_host, unit, dict.fromkeys(vfs, to), host.given, lambda _: None))


def test_vfs_are_bound_for_vms_apart_from_their_gpu_and_removed_when_they_are_free(tmp_path: Path) -> None:
    host = VgpuHost("2xFlex170", tmp_path)
    first, second, *others = scan(host.kernel).functions[FLEX].virtfns
    assert bind(host, first, second) == []
    found = scan(host.kernel).functions
    assert [found[vf].driver for vf in (first, second)] == ["vfio-pci", "vfio-pci"]
    assert {found[address].driver for address in (FLEX, *others)} == {"xe"}
    assert bind(host, first, to=DesiredDriver.NATIVE) == []
    assert scan(host.kernel).functions[first].driver == "xe"
    assert host.apply_types(FLEX, {}) == ()
    assert scan(host.kernel).functions[FLEX].virtfns == ()
    assert host.kernel.vfio.requests == []


def test_a_started_change_of_a_gpu_stays_recorded_while_its_vf_changes(tmp_path: Path) -> None:
    """The change of another process was killed; only a change of the GPU itself shows that it is done."""
    host = VgpuHost("2xFlex170", tmp_path)
    boot_id, path = scan(host.kernel).platform.boot_id, host.change_host.original_drivers
    started = {FLEX: StartedChange(True, "xe")}
    hostfiles.journal(path).update(lambda journal: replace(journal.of_boot(boot_id), changes=started))
    assert bind(host, scan(host.kernel).functions[FLEX].virtfns[0]) == []
    assert hostfiles.journal(path).value.changes == started


def test_a_vf_that_a_process_or_a_pod_uses_keeps_its_driver(tmp_path: Path) -> None:
    host = VgpuHost("2xFlex170", tmp_path)
    first, second, *_ = scan(host.kernel).functions[FLEX].virtfns
    function = host.kernel.pci.functions[first]
    host.kernel.tree.place(HostPath(f"{function.folder}/drm/renderD129/dev"), constant("226:129"))
    host.kernel.tree.place(HostPath("/dev/dri/renderD129"), DeviceNode(os.makedev(226, 129)))
    process = host.kernel.start_process("ffmpeg", "/dev/dri/renderD129")
    assert bind(host, first) == [ReasonCode.IN_USE]
    host.kernel.end_vm(process)
    assert bind(host, first, second) == []
    groups = [scan(host.kernel).functions[vf].iommu_group for vf in (first, second)]
    vm = host.kernel.start_vm(IommuGroup(int(str(groups[0]))))
    assert bind(host, first, to=DesiredDriver.NATIVE) == [ReasonCode.IN_USE]
    assert bind(host, second, to=DesiredDriver.NATIVE) == [], "another VF of the same GPU"
    host.kernel.end_vm(vm)
    host.given = inputs({first: ("pod default/a",)})
    assert bind(host, first, to=DesiredDriver.NATIVE) == [ReasonCode.ALLOCATED_TO_POD]
    held = Holding(first, VgpuId(first), None, "pod default/a", seen_this_boot=True)
    host.given = inputs({first: ("pod default/a",)}, holdings=(held,))
    assert codes(host.apply_types(FLEX, {})) == [ReasonCode.VGPU_IN_USE], "all VFs of a GPU are removed together"
    assert scan(host.kernel).functions[first].driver == "vfio-pci"
    assert host.kernel.vfio.requests == []


def test_a_second_process_may_not_change_the_vgpus_of_a_gpu(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    inventory = observe(host.change_host, host.given, None).inventory
    unit = inventory.gpus[T4].unit
    taken = gate_at(host.change_host.locks).change(
        unit, lambda: slots_of(inventory.facts.functions, inventory.units[unit])
    )
    with taken, pytest.raises(UnitBusyError, match="another process"):
        host.apply_vgpus(T4)


def test_a_single_vgpu_is_removed_by_hand(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_4Q=4)
    first, second, *_ = host.types(T4)
    host.kernel.start_vm(host.group_of(second))
    before = observe(host.change_host, host.given, None).inventory

    def remove(vgpu: VgpuId) -> list[ReasonCode]:
        return codes(unitchange.remove_vgpu(host.change_host, T4, vgpu, host.given, lambda _: None, before))

    assert remove(first) == []
    assert remove(second) == [ReasonCode.VGPU_IN_USE]
    assert remove(first) == [], "the vGPU is already removed"
    assert len(host.types(T4)) == 3


def test_an_earlier_inventory_selects_the_isolation_unit_only(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    first = observe(host.change_host, host.given, None).inventory
    mine = min(host.types(T4))
    host.kernel.start_vm(host.group_of(mine))
    reasons = change_vgpus(host.change_host, T4, DesiredVgpus({"T4-4Q": 4}), host.given, lambda _: None, first)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert mine in host.types(T4)
    assert host.kernel.vfio.requests == []


def test_a_gpu_unplugged_since_the_inventory_is_reported(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    first = observe(host.change_host, host.given, None).inventory
    host.kernel.unplug(T4)
    reasons = change_vgpus(host.change_host, T4, DesiredVgpus({"T4-4Q": 4}), host.given, lambda _: None, first)
    assert codes(reasons) == [ReasonCode.NO_VGPU_HOST]


def test_a_gpu_whose_isolation_unit_has_another_lock_by_now_is_not_changed(tmp_path: Path) -> None:
    """It shares its group with a function that appeared after its isolation unit was determined."""
    host = VgpuHost("4xT4", tmp_path)
    first = observe(host.change_host, host.given, None).inventory
    before = host.types(T4)
    group = host.kernel.pci.functions[T4].group
    folder = HostPath("/sys/devices/pci0000:00/0000:01:00.0")
    neighbour = SimFunction(PciAddress("0000:01:00.0"), PciId(0x10DE, 0x1EB8), 0x030200, folder, group=group)
    host.kernel.pci.add(neighbour)
    with pytest.raises(UnitBusyError, match="another isolation unit"):
        change_vgpus(host.change_host, T4, DesiredVgpus({"T4-4Q": 4}), host.given, lambda _: None, first)
    assert host.types(T4) == before


WHOLE = DesiredVgpus(whole=True)


def test_a_gpu_desired_for_passthrough_loses_its_vgpus_and_vfs(tmp_path: Path) -> None:
    host = VgpuHost("4xL40S", tmp_path)
    host.apply_vgpus(L40S, L40S_8Q=3)
    assert host.desired_vgpus(L40S, WHOLE) == ()
    assert host.kernel.pci.functions[L40S].virtfns == []
    assert host.steps[-1] == f"{L40S}: switch its VFs off"
    assert host.desired_vgpus(L40S, WHOLE) == ()
    assert host.steps == []


def test_vfs_stay_while_a_vf_is_or_may_be_in_use(tmp_path: Path) -> None:
    host = VgpuHost("4xL40S", tmp_path)
    assert host.apply_vgpus(L40S) == ()
    vfs = list(host.kernel.pci.functions[L40S].virtfns)
    host.kernel.rebind(vfs[1], "vfio-pci")
    assert codes(host.desired_vgpus(L40S, WHOLE)) == [ReasonCode.VFS_ENABLED]
    host.kernel.rebind(vfs[1], "nvidia")
    uses = host.kernel.start_process("nvidia-smi", "/dev/nvidia0")
    assert codes(host.desired_vgpus(L40S, WHOLE)) == [ReasonCode.IN_USE]
    host.kernel.end_vm(uses)
    typed: list[str] = []

    def make_one(step: Step | RollBack) -> None:
        typed.append(step.text)
        if len(typed) > 1:
            return
        vf = HostPath(f"/sys/bus/pci/devices/{vfs[0]}/nvidia")
        _, row, *_ = host.kernel.read(HostPath(f"{vf}/creatable_vgpu_types")).splitlines()
        host.kernel.write(HostPath(f"{vf}/current_vgpu_type"), row.split()[0].rstrip(b":"))

    reasons = change_vgpus(host.change_host, L40S, WHOLE, host.given, make_one)
    assert codes(reasons)[0] is ReasonCode.STEP_FAILED
    assert typed[0] == f"{L40S}: switch its VFs off"
    assert host.kernel.pci.functions[L40S].virtfns == vfs


@pytest.mark.parametrize("on_vf", [True, False])
def test_vfs_that_a_host_process_uses_stay(tmp_path: Path, *, on_vf: bool) -> None:
    """All VFs of a GPU are disabled together, and users of a native driver hold nothing that could be leased."""
    host = VgpuHost("2xFlex170", tmp_path)
    assert host.apply_types(FLEX, {"16 VFs": 1}) == ()
    vfs = scan(host.kernel).functions[FLEX].virtfns
    function = host.kernel.pci.functions[vfs[3] if on_vf else FLEX]
    host.kernel.tree.place(HostPath(f"{function.folder}/drm/renderD129/dev"), constant("226:129"))
    host.kernel.tree.place(HostPath("/dev/dri/renderD129"), DeviceNode(os.makedev(226, 129)))
    process = host.kernel.start_process("ffmpeg", "/dev/dri/renderD129")
    assert codes(host.apply_types(FLEX, {})) == [ReasonCode.IN_USE]
    assert scan(host.kernel).functions[FLEX].virtfns == vfs
    host.kernel.processes.hide()
    assert codes(host.apply_types(FLEX, {})) == [ReasonCode.PROCESSES_NOT_VISIBLE]
    assert scan(host.kernel).functions[FLEX].virtfns == vfs
    host.kernel.processes.hide(hidden=False)
    host.kernel.end_vm(process)
    assert host.apply_types(FLEX, {}) == ()
    assert scan(host.kernel).functions[FLEX].virtfns == ()
