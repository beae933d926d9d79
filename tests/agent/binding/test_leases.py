"""A lease or a lock can break the start of a VM: no device that is allocated or in use gets one."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.steps.leasing import GroupClaim, InUseError, leased
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.usage.users import cdevs_of
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, map_allocations
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in, driver_state, inputs
from tests.agent.node.simnode import running_node

GPU, OTHER = PciAddress("0000:3b:00.0"), PciAddress("0000:5e:00.0")
T4 = "nvidia.com/TU104GL_TESLA_T4"


def host(driver: str = "vfio-pci", *, group_nodes: bool = False) -> SimKernel:
    slots = tuple(SlotSpec(at=at, board="T4", driver=driver, group=group) for at, group in ((GPU, 12), (OTHER, 22)))
    return build_host(HostSpec(about="two T4", iommufd=True, group_nodes=group_nodes, slots=slots))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[SimKernel], Counter[str]]:
    """Count the leases of each device and group of a host."""

    def counted(kernel: SimKernel) -> Counter[str]:
        found: Counter[str] = Counter()
        lease, lease_devices = kernel.lease, kernel.lease_devices

        def by_group(group: IommuGroup, /) -> AbstractContextManager[None]:
            if group in scan(kernel).group_nodes:
                found[str(group)] += 1
            return lease(group)

        def by_nodes(names: Sequence[str], /) -> AbstractContextManager[None]:
            found.update(names)
            return lease_devices(names)

        monkeypatch.setattr(kernel, "lease", by_group)
        monkeypatch.setattr(kernel, "lease_devices", by_nodes)
        return found

    return counted


def cdevs(kernel: SimKernel, address: PciAddress) -> list[str]:
    return list(cdevs_of([scan(kernel).functions[address]]))


def change_host_of(kernel: SimKernel, folder: Path) -> ChangeHost:
    return change_host_in(folder, kernel, SimTools(kernel))


@pytest.mark.parametrize("bind", [True, False])
def test_a_device_that_a_vm_has_open_is_not_leased(
    count: Callable[[SimKernel], Counter[str]], tmp_path: Path, *, bind: bool
) -> None:
    """This includes a device that the VM has opened but not bound to its iommufd yet: the bind would fail."""
    kernel = host()
    leases, names = count(kernel), cdevs(kernel, GPU)
    kernel.open_devices(names, bind=bind)
    with pytest.raises(InUseError, match="qemu"), leased(kernel, GroupClaim(GPU, IommuGroup(12), tuple(names))):
        raise AssertionError("leased")
    reasons = change_drivers(
        change_host_of(kernel, tmp_path),
        driver_state(change_host_of(kernel, tmp_path), NOBODY).inventory.gpus[GPU].unit,
        {GPU: DesiredDriver.NATIVE},
        NOBODY,
        lambda _: None,
    )
    assert [reason.code for reason in reasons] == [ReasonCode.IN_USE]
    assert leases == Counter()


def test_the_leases_of_gpuvirts_own_processes_are_no_users(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = host()
    names = cdevs(kernel, GPU)
    user = kernel.open_devices(names, bind=False)
    monkeypatch.setattr(SimKernel, "pids", {user.pid})
    with leased(kernel, GroupClaim(GPU, IommuGroup(12), tuple(names))) as prove:
        assert prove().is_valid


def test_a_free_device_is_leased_once(count: Callable[[SimKernel], Counter[str]]) -> None:
    kernel = host()
    leases, names = count(kernel), cdevs(kernel, GPU)
    with leased(kernel, GroupClaim(GPU, IommuGroup(12), tuple(names))):
        assert leases == Counter(names)


def test_a_change_concerns_only_the_group_of_its_gpu(tmp_path: Path) -> None:
    kernel = host()
    kernel.open_devices(cdevs(kernel, OTHER))
    change_host = change_host_of(kernel, tmp_path)
    unit = driver_state(change_host, NOBODY).inventory.gpus[GPU].unit

    def ask(inventory: Inventory) -> PodAllocations:
        return map_allocations(inventory, [Allocation(ResourceName(T4), DeviceId(OTHER), "pod a/b")])

    assert change_drivers(change_host, unit, {GPU: DesiredDriver.NATIVE}, inputs({}, ask=ask)) == ()
    assert kernel.pci.functions[GPU].driver == "nvidia"


@pytest.mark.parametrize("group_nodes", [True, False])
async def test_allocate_leases_no_gpu_that_the_kubelet_has_allocated(
    count: Callable[[SimKernel], Counter[str]], tmp_path: Path, *, group_nodes: bool
) -> None:
    """The agent reads the kubelet's checkpoint before it leases a group; it never leases device nodes."""
    kernel = host(group_nodes=group_nodes)
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        leases = count(kernel)
        node.write(T4, GPU, uid="vm")
        node.allocate(T4, [GPU])
        assert leases == Counter()
        node.allocate(T4, [OTHER])
        assert leases == (Counter({"22": 1}) if group_nodes else Counter())


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci"])
def test_a_change_by_hand_neither_leases_nor_locks_a_newly_allocated_gpu(
    count: Callable[[SimKernel], Counter[str]], tmp_path: Path, driver: str
) -> None:
    kernel = host(driver, group_nodes=True)
    change_host, answers = change_host_of(kernel, tmp_path), iter(range(9))
    unit = driver_state(change_host, NOBODY).inventory.gpus[GPU].unit
    device = gpu_uuid(GPU) if driver == "nvidia" else GPU

    def ask(inventory: Inventory) -> PodAllocations:
        """Return the allocations: none at the first reading, the GPU after it."""
        given = [Allocation(ResourceName("nvidia.com/gpu"), DeviceId(device), "pod a/b")]
        return map_allocations(inventory, given if next(answers) else [])

    leases = count(kernel)
    kernel.writes.clear()
    desired_driver = DesiredDriver.PASSTHROUGH if driver == "nvidia" else DesiredDriver.NATIVE
    reasons = change_drivers(change_host, unit, {GPU: desired_driver}, inputs({}, ask=ask), lambda _: None)
    assert [reason.code for reason in reasons] == [ReasonCode.PLAN_OUTDATED]
    assert (leases, kernel.writes) == (Counter(), [])
