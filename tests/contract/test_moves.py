"""GPUs move between drivers in the same way on each host, and no VM ever gets a VFIO request."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from lab.kernel.modules import VARIANT
from msgspec.structs import replace

from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.agent.change.gate.gate import UnitBusyError
from gpuvirt.agent.store import hostfiles
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.modules import driver_of
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostRoots, KubeletPaths
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in, driver_state, inputs
from tests.agent.kubelet.givingkubelet import kubelet_with_pod
from tests.contract.guesthost import GUESTS
from tests.contract.hosts import LONG_S, CdevHost, Host, MemoryHost, bind, group_of, write
from tests.contract.notools import NoTools
from tests.contract.seenfrom import ContainerKernel

GPU, AUDIO = PciAddress("0000:01:00.0"), PciAddress("0000:01:00.1")
H100 = PciAddress("0000:03:00.0")
SRIOV = PciAddress("0000:05:00.0")
IDLE = PciAddress("0000:04:00.0")
T4, OTHER_T4 = PciAddress("0000:07:01.0"), PciAddress("0000:07:02.0")
SHOWS_PROCESSES = pytest.mark.parametrize("host", ["memory", *GUESTS], indirect=True)
"""Outside the mounted host, the open files of its processes are files of another `/dev`."""
GROUP_NODES_ALONE = pytest.mark.parametrize("host", ["memory", *GUESTS[:1]], indirect=True)
"""Where devices have nodes of their own, these are leased in the place of the group's."""


class Mover:
    """Moves GPUs on a host."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        self.change_host = change_host_in(folder, kernel, NoTools())
        self.steps: list[str] = []

    def move(self, desired_driver: DesiredDriver, *gpus: PciAddress, orders: Inputs = NOBODY) -> Sequence[Reason]:
        seen = driver_state(self.change_host, orders)
        units = {seen.inventory.gpus[gpu].unit for gpu in gpus}
        desired_by_gpu = dict.fromkeys(gpus, desired_driver)
        return [
            driver
            for unit in sorted(units)
            for driver in change_drivers(self.change_host, unit, desired_by_gpu, orders, self._report)
        ]

    def drivers(self, *addresses: PciAddress) -> list[object]:
        return [driver_of(self.change_host.kernel, address) for address in addresses]

    def _report(self, step: Step | RollBack) -> None:
        self.steps.append(step.text)


@pytest.fixture
def mover(host: Host, tmp_path: Path) -> Mover:
    return Mover(host.kernel, tmp_path / "state")


def test_a_gpu_and_its_audio_function_move_to_vfio_and_back(mover: Mover) -> None:
    assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == []
    assert mover.drivers(GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    assert hostfiles.journal(mover.change_host.original_drivers).value.drivers == {
        GPU: "nvidia",
        AUDIO: "snd_hda_intel",
    }
    mover.steps.clear()
    assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == []
    assert mover.steps == []
    assert mover.move(DesiredDriver.NATIVE, GPU) == []
    assert mover.drivers(GPU, AUDIO) == ["nvidia", "snd_hda_intel"]
    assert hostfiles.journal(mover.change_host.original_drivers).value.drivers == {}


def test_a_gpu_without_a_native_driver_is_never_reported_as_returned(mover: Mover) -> None:
    """A host whose modules.alias names no module keeps it on VFIO; without that file gpuvirt must try."""
    assert mover.move(DesiredDriver.PASSTHROUGH, IDLE) == []
    assert mover.drivers(IDLE) == ["vfio-pci"]
    for _ in range(2):
        (reason,) = mover.move(DesiredDriver.NATIVE, IDLE)
        stays = reason.code is ReasonCode.PREREQUISITE_MISSING
        assert stays or reason.code is ReasonCode.STEP_FAILED
        assert mover.drivers(IDLE) == (["vfio-pci"] if stays else [None])
    assert mover.move(DesiredDriver.PASSTHROUGH, IDLE) == []
    assert mover.drivers(IDLE) == ["vfio-pci"]


def test_a_gpu_of_a_vm_is_not_unbound_and_the_vm_gets_no_vfio_request(host: Host, mover: Mover) -> None:
    mover.move(DesiredDriver.PASSTHROUGH, GPU)
    vm = host.start_vm(group_of(host, GPU))
    mover.steps.clear()
    (refused,) = {reason.code for reason in mover.move(DesiredDriver.NATIVE, GPU)}
    assert refused is ReasonCode.IN_USE
    assert mover.steps == []
    assert not vm.asked_back(host.patience_s)
    assert mover.drivers(GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    vm.end()


def test_force_does_not_unbind_a_gpu_of_a_vm(host: Host, mover: Mover) -> None:
    mover.move(DesiredDriver.PASSTHROUGH, GPU)
    vm = host.start_vm(group_of(host, GPU))
    forced = inputs(forced=True)
    assert {reason.code for reason in mover.move(DesiredDriver.NATIVE, GPU, orders=forced)} == {ReasonCode.IN_USE}
    assert not vm.asked_back(host.patience_s)
    vm.end()


def test_a_partly_bound_group_is_completed(host: Host, mover: Mover) -> None:
    bind(host, GPU, "vfio-pci")
    assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == []
    assert mover.drivers(GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    host.start_vm(group_of(host, GPU)).end()


def test_gpus_of_the_same_group_move_together_or_not_at_all(mover: Mover) -> None:
    (refused,) = mover.move(DesiredDriver.PASSTHROUGH, T4)
    assert refused.code is ReasonCode.FOREIGN_ENDPOINT
    assert OTHER_T4 in refused.message
    assert mover.steps == []
    assert mover.move(DesiredDriver.PASSTHROUGH, T4, OTHER_T4) == []
    assert mover.drivers(T4, OTHER_T4) == ["vfio-pci", "vfio-pci"]
    (torn, *_) = mover.move(DesiredDriver.NATIVE, T4)
    assert torn.code is ReasonCode.GROUP_NOT_VIABLE
    assert mover.move(DesiredDriver.NATIVE, T4, OTHER_T4) == []
    assert mover.drivers(T4, OTHER_T4) == ["nvidia", "nvidia"]


def test_a_listed_function_of_the_same_group_moves_along_and_back(mover: Mover) -> None:
    listed = inputs(allowed=frozenset({OTHER_T4}))
    assert mover.move(DesiredDriver.PASSTHROUGH, T4, orders=listed) == []
    assert mover.drivers(T4, OTHER_T4) == ["vfio-pci", "vfio-pci"]


def test_with_device_nodes_an_open_unbound_device_is_in_use(cdevs: CdevHost, tmp_path: Path) -> None:
    """A starting VM is in this state."""
    mover = Mover(cdevs.kernel, tmp_path / "state")
    assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == []
    process = cdevs.open_devices(GPU, bind=False)
    assert {reason.code for reason in mover.move(DesiredDriver.NATIVE, GPU)} == {ReasonCode.IN_USE}
    assert mover.drivers(GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    process.end()
    assert mover.move(DesiredDriver.NATIVE, GPU) == []
    assert mover.drivers(GPU, AUDIO) == ["nvidia", "snd_hda_intel"]


def test_with_device_nodes_a_device_of_a_vm_is_not_unbound(cdevs: CdevHost, tmp_path: Path) -> None:
    mover = Mover(cdevs.kernel, tmp_path / "state")
    assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == []
    vm = cdevs.open_devices(GPU, AUDIO)
    assert {reason.code for reason in mover.move(DesiredDriver.NATIVE, GPU)} == {ReasonCode.IN_USE}
    assert not vm.asked_back(cdevs.patience_s)
    vm.end()


def test_a_second_process_may_not_change_the_same_isolation_unit(mover: Mover, host: Host) -> None:
    seen = driver_state(mover.change_host, NOBODY)
    unit = seen.inventory.gpus[H100].unit

    def meanwhile(_: Step | RollBack) -> None:
        with pytest.raises(UnitBusyError, match="another process"):
            change_drivers(mover.change_host, unit, {H100: DesiredDriver.PASSTHROUGH}, NOBODY, lambda _: None)

    assert change_drivers(mover.change_host, unit, {H100: DesiredDriver.PASSTHROUGH}, NOBODY, meanwhile) == ()
    job = host.start_read(f"/sys/bus/pci/devices/{H100}/driver_override")
    answer = job.answer(LONG_S)
    assert answer is not None
    assert answer.data == b"vfio-pci\n"


@GROUP_NODES_ALONE
def test_a_vm_is_detected_without_its_group_node_in_the_agents_dev(host: Host, tmp_path: Path) -> None:
    """A container has its own `/dev`: no lease, but sysfs shows the node's number."""
    assert Mover(host.kernel, tmp_path / "state").move(DesiredDriver.PASSTHROUGH, GPU) == []
    vm = host.start_vm(group_of(host, GPU))
    blind = Mover(ContainerKernel(host.kernel, has_nodes=False), tmp_path / "state")
    assert {reason.code for reason in blind.move(DesiredDriver.NATIVE, GPU)} == {ReasonCode.IN_USE}
    assert blind.steps == []
    assert not vm.asked_back(host.patience_s)
    vm.end()
    assert blind.move(DesiredDriver.NATIVE, GPU) == []
    assert blind.drivers(GPU, AUDIO) == ["nvidia", "snd_hda_intel"]


@GROUP_NODES_ALONE
def test_nothing_is_unbound_if_neither_group_nodes_nor_processes_are_visible(host: Host, tmp_path: Path) -> None:
    assert Mover(host.kernel, tmp_path / "state").move(DesiredDriver.PASSTHROUGH, GPU) == []
    vm = host.start_vm(group_of(host, GPU))
    blind = Mover(ContainerKernel(host.kernel, has_nodes=False, sees_host=False), tmp_path / "state")
    assert {reason.code for reason in blind.move(DesiredDriver.NATIVE, GPU)} == {ReasonCode.PROCESSES_NOT_VISIBLE}
    assert not vm.asked_back(host.patience_s)
    vm.end()
    assert blind.drivers(GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    seeing = Mover(ContainerKernel(host.kernel, has_nodes=False), tmp_path / "state")
    assert seeing.move(DesiredDriver.NATIVE, GPU) == []


@SHOWS_PROCESSES
def test_a_gpu_is_not_unbound_from_its_native_driver_if_processes_are_not_visible(host: Host, tmp_path: Path) -> None:
    blind = Mover(ContainerKernel(host.kernel, sees_host=False), tmp_path / "state")
    assert {reason.code for reason in blind.move(DesiredDriver.PASSTHROUGH, GPU)} == {ReasonCode.PROCESSES_NOT_VISIBLE}
    assert blind.steps == []


def test_a_pf_on_vfio_is_not_unbound_while_it_has_vfs(host: Host, mover: Mover) -> None:
    """Unbinding the PF removes its VFs even if VMs use them: VFIO requests the devices back."""
    assert mover.move(DesiredDriver.PASSTHROUGH, SRIOV) == []
    assert write(host, "/sys/module/vfio_pci/parameters/enable_sriov", "Y") == 0
    assert write(host, f"/sys/bus/pci/devices/{SRIOV}/sriov_numvfs", "2") == 0
    vf, other = scan(host.kernel).functions[SRIOV].virtfns
    assert mover.drivers(vf, other) == ["vfio-pci", "vfio-pci"]
    vm = host.start_vm(group_of(host, vf), devices=False)
    mover.steps.clear()
    assert {reason.code for reason in mover.move(DesiredDriver.NATIVE, SRIOV)} >= {ReasonCode.VFS_ENABLED}
    forced = inputs(forced=True)
    assert {reason.code for reason in mover.move(DesiredDriver.NATIVE, SRIOV, orders=forced)} >= {
        ReasonCode.VFS_ENABLED
    }
    assert mover.steps == []
    assert scan(host.kernel).functions[SRIOV].virtfns == (vf, other)
    vm.end()
    assert write(host, f"/sys/bus/pci/devices/{SRIOV}/sriov_numvfs", "0") == 0
    assert mover.move(DesiredDriver.NATIVE, SRIOV) == []
    assert mover.drivers(SRIOV) == ["nvidia"]
    assert write(host, "/sys/module/vfio_pci/parameters/enable_sriov", "N") == 0


@pytest.mark.parametrize("iommufd", [True, False])
def test_a_variant_driver_is_recognized_by_its_vfio_device(tmp_path: Path, *, iommufd: bool) -> None:
    """A driver that no list contains: out of tree, or newer than gpuvirt."""
    host = MemoryHost(iommufd=iommufd)
    host.load_driver("acme_vfio_pci")
    check_variant(host, Mover(host.kernel, tmp_path / "state"), "acme_vfio_pci")


@GROUP_NODES_ALONE
def test_a_device_of_a_vm_on_an_unlisted_variant_driver_is_not_unbound(host: Host, mover: Mover) -> None:
    """In the guest it is the lab's own driver, on the kernel's vfio-pci-core."""
    if isinstance(host, MemoryHost):
        host.load_driver(VARIANT)
    check_variant(host, mover, VARIANT)


def check_variant(host: Host, mover: Mover, driver: str) -> None:
    assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == [], "so that its native driver is recorded"
    mover.steps.clear()
    bind(host, GPU, driver)
    bind(host, AUDIO, driver)
    assert mover.drivers(GPU, AUDIO) == [driver, driver]
    assert scan(host.kernel).functions[GPU].on_vfio
    for _ in range(3):
        assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == []
        assert mover.steps == [], "the GPU already has the desired driver"
    vm = host.start_vm(group_of(host, GPU))
    for desired_driver, codes in ((DesiredDriver.NATIVE, {ReasonCode.IN_USE}), (DesiredDriver.PASSTHROUGH, set())):
        assert {reason.code for reason in mover.move(desired_driver, GPU)} == codes
    assert mover.steps == []
    assert not vm.asked_back(host.patience_s)
    assert mover.drivers(GPU, AUDIO) == [driver, driver]
    vm.end()
    assert mover.move(DesiredDriver.NATIVE, GPU) == []
    assert mover.drivers(GPU, AUDIO) == ["nvidia", "snd_hda_intel"]


def test_commands_do_not_unbind_a_gpu_allocated_to_a_pod(host: Host, tmp_path: Path, short_path: Path) -> None:
    """By the allocations that commands read: first a VM has the GPU open, then only its pod exists."""
    account = AllocationReader(host.kernel, HostRoots.under(tmp_path), KubeletPaths(short_path / "k"), ledgers=())
    mover, asked = Mover(host.kernel, tmp_path / "state"), Inputs(account.account)
    assert mover.move(DesiredDriver.PASSTHROUGH, GPU) == []
    vm = host.start_vm(group_of(host, GPU))
    with kubelet_with_pod(short_path / "k", "nvidia.com/AD102_GEFORCE_RTX_4090", GPU):
        mover.steps.clear()
        assert ReasonCode.ALLOCATED_TO_POD in {
            reason.code for reason in mover.move(DesiredDriver.NATIVE, GPU, orders=asked)
        }
        assert not vm.asked_back(host.patience_s)
        vm.end()
        assert {reason.code for reason in mover.move(DesiredDriver.NATIVE, GPU, orders=asked)} == {
            ReasonCode.ALLOCATED_TO_POD
        }
        assert mover.steps == []
        assert mover.drivers(GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    other = replace(account, kubelet=KubeletPaths(short_path / "other"))
    with kubelet_with_pod(short_path / "other", "nvidia.com/GH100_H100", H100):
        orders = Inputs(other.account)
        assert mover.move(DesiredDriver.NATIVE, GPU, orders=orders) == []
        assert mover.drivers(GPU, AUDIO) == ["nvidia", "snd_hda_intel"]
