"""vGPUs are created and removed in the same way on each host, and a VM never gets a VFIO request for its vGPU."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from lab.kernel.notools import NO_TOOLS
from msgspec.structs import replace

from gpuvirt.agent.change import unitchange
from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.agent.change.observation import observe
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import CreateVgpu, RemoveVgpu, RollBack, Step
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.paths import HostPath, HostRoots, KubeletPaths
from tests.agent.change.changes import NOBODY, change_host_in, change_vgpus, inputs
from tests.agent.kubelet.givingkubelet import kubelet_with_pod
from tests.contract.hosts import LONG_S, Answer, CdevHost, Host, Job, MemoryHost, Vm, exists, group_of, until_free

RTX = PciAddress("0000:02:00.0")
"""The catalog knows nothing of vGPUs on it, so only its driver knows how many fit: 24 T4-1B, 12 T4-2B."""
T4 = PciAddress("0000:07:01.0")
SMALL, LARGE = VgpuType("GRID T4-1B"), VgpuType("GRID T4-2B")


class VgpuHost:
    """Changes vGPUs of a host."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.change_host = change_host_in(folder, host.kernel, NO_TOOLS)
        self.given = NOBODY
        self.steps: list[Step | RollBack] = []

    def apply_vgpus(
        self,
        gpu: PciAddress,
        *,
        small: int = 0,
        large: int = 0,
        report: Callable[[Step | RollBack], None] | None = None,
    ) -> tuple[Reason, ...]:
        """Give a GPU these vGPUs; return the reasons of a failure."""
        self.steps.clear()
        desired_vgpus = DesiredVgpus({"T4-1B": small, "T4-2B": large})
        return change_vgpus(self.change_host, gpu, desired_vgpus, self.given, report or self.steps.append)

    def types(self, gpu: PciAddress) -> Mapping[VgpuId, object]:
        """The types of a GPU's vGPUs."""
        return {vgpu.id: vgpu.type for vgpu in scan(self.change_host.kernel).vgpu_hosts[gpu].live}

    def ids(self, gpu: PciAddress) -> list[VgpuId]:
        return sorted(self.types(gpu))


@pytest.fixture
def makes_vgpus(host: Host, tmp_path: Path) -> VgpuHost:
    return VgpuHost(host, tmp_path / "state")


def codes(reasons: tuple[Reason, ...]) -> list[ReasonCode]:
    return [reason.code for reason in reasons]


def failed_to_make(reasons: tuple[Reason, ...], type_id: str, number: int) -> bool:
    """Return whether the only reason is a failed write to this type, with this errno."""
    path = f"/sys/class/mdev_bus/{RTX}/mdev_supported_types/{type_id}/create"
    return [(reason.code, reason.places) for reason in reasons] == [
        (ReasonCode.STEP_FAILED, (Seen(path, os.strerror(number)),))
    ]


def left(host: Host, gpu: PciAddress) -> dict[str, int]:
    """Return the remaining capacity of each type, by a GPU's driver."""
    types = f"/sys/class/mdev_bus/{gpu}/mdev_supported_types"
    return {
        type_id: int(host.kernel.read(HostPath(f"{types}/{type_id}/available_instances")))
        for type_id in host.kernel.listdir(HostPath(types))
    }


def start_removal(host: Host, vgpu: VgpuId) -> Job:
    """Let another program remove a vGPU of a VM, and wait until the removal has started."""
    job = host.start_write(f"/sys/bus/mdev/devices/{vgpu}/remove", "1")
    assert job.answer(host.patience_s) is None
    assert not exists(host, f"/sys/bus/mdev/devices/{vgpu}")
    return job


def vm_on(host: Host, vgpu: VgpuId) -> Vm:
    return host.start_vm(group_of(host, vgpu))


@pytest.mark.parametrize("gpu", [RTX, T4])
def test_changing_the_size_and_back_restores_the_same_ids(host: Host, makes_vgpus: VgpuHost, gpu: PciAddress) -> None:
    before = left(host, gpu)
    assert makes_vgpus.apply_vgpus(gpu, large=2) == ()
    first = makes_vgpus.types(gpu)
    assert Counter(first.values()) == {LARGE: 2}
    assert makes_vgpus.apply_vgpus(gpu, large=2) == ()
    assert makes_vgpus.steps == [], "there is nothing to do"
    assert makes_vgpus.apply_vgpus(gpu, small=3) == ()
    assert Counter(makes_vgpus.types(gpu).values()) == {SMALL: 3}
    assert not first.keys() & makes_vgpus.types(gpu).keys()
    assert makes_vgpus.apply_vgpus(gpu, large=2) == ()
    assert makes_vgpus.types(gpu) == first
    assert makes_vgpus.apply_vgpus(gpu) == ()
    assert makes_vgpus.types(gpu) == {}
    assert host.kernel.listdir(HostPath("/sys/bus/mdev/devices")) == []
    assert left(host, gpu) == before


def test_a_changed_count_leaves_the_other_vgpus_alone(makes_vgpus: VgpuHost) -> None:
    makes_vgpus.apply_vgpus(RTX, large=3)
    had = makes_vgpus.types(RTX)
    assert makes_vgpus.apply_vgpus(RTX, large=2) == ()
    assert [type(step) for step in makes_vgpus.steps] == [RemoveVgpu]
    kept = makes_vgpus.types(RTX)
    assert makes_vgpus.apply_vgpus(RTX, large=3) == ()
    assert [type(step) for step in makes_vgpus.steps] == [CreateVgpu]
    assert kept.items() < makes_vgpus.types(RTX).items()
    assert makes_vgpus.types(RTX) == had


def test_a_vgpu_of_a_vm_stays_and_is_removed_after_the_vm_ends(host: Host, makes_vgpus: VgpuHost) -> None:
    makes_vgpus.apply_vgpus(RTX, large=3)
    _, mine, _ = makes_vgpus.ids(RTX)
    group = group_of(host, mine)
    vm = vm_on(host, mine)
    reasons = makes_vgpus.apply_vgpus(RTX, small=2)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert reasons[0].subject == mine
    assert makes_vgpus.ids(RTX) == [mine], "the free vGPUs were removed"
    assert codes(makes_vgpus.apply_vgpus(RTX)) == [ReasonCode.VGPU_IN_USE]
    assert not vm.asked_back(host.patience_s)
    vm.end()
    until_free(host, group)
    assert makes_vgpus.apply_vgpus(RTX, small=2) == ()
    assert Counter(makes_vgpus.types(RTX).values()) == {SMALL: 2}


def test_a_vgpu_whose_group_is_open_without_devices_stays_too(host: Host, makes_vgpus: VgpuHost) -> None:
    """A starting VM is in this state."""
    makes_vgpus.apply_vgpus(RTX, large=1)
    (mine,) = makes_vgpus.ids(RTX)
    group = group_of(host, mine)
    vm = host.start_vm(group, devices=False)
    assert codes(makes_vgpus.apply_vgpus(RTX)) == [ReasonCode.VGPU_IN_USE]
    assert makes_vgpus.ids(RTX) == [mine]
    vm.end()
    until_free(host, group)
    assert makes_vgpus.apply_vgpus(RTX) == ()


def test_the_lease_finds_a_vm_that_starts_after_the_snapshot(host: Host, makes_vgpus: VgpuHost) -> None:
    makes_vgpus.apply_vgpus(RTX, large=3)
    _, second, _ = makes_vgpus.ids(RTX)
    vms: list[Vm] = []

    def start(step: Step | RollBack) -> None:
        if isinstance(step, RemoveVgpu) and step.vgpu == second and not vms:
            vms.append(vm_on(host, second))

    reasons = makes_vgpus.apply_vgpus(RTX, small=1, report=start)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert reasons[0].subject == second
    assert makes_vgpus.ids(RTX) == [second], "as if the VM had started before the snapshot"
    (vm,) = vms
    assert not vm.asked_back(host.patience_s)
    vm.end()


def test_a_pods_vgpu_that_another_program_is_removing_is_waited_for(host: Host, makes_vgpus: VgpuHost) -> None:
    makes_vgpus.apply_vgpus(RTX, large=2)
    mine, other = makes_vgpus.ids(RTX)
    makes_vgpus.given = inputs(holdings=(Holding(RTX, mine, LARGE, "pod default/vm", seen_this_boot=True),))
    vm = vm_on(host, mine)
    job = start_removal(host, mine)
    reasons = makes_vgpus.apply_vgpus(RTX, large=2)
    assert codes(reasons) == [ReasonCode.UNBIND_PENDING]
    assert mine in reasons[0].message
    assert makes_vgpus.steps == [], "its capacity is still taken"
    assert makes_vgpus.ids(RTX) == [other]
    vm.end()
    assert job.answer(LONG_S) == Answer()
    makes_vgpus.given = NOBODY
    assert makes_vgpus.apply_vgpus(RTX, large=2) == ()
    assert makes_vgpus.ids(RTX) == [mine, other]


def test_a_vgpu_without_a_pod_that_another_program_is_removing_blocks_creation(
    host: Host, makes_vgpus: VgpuHost
) -> None:
    """The kernel only reports that another size does not fit."""
    makes_vgpus.apply_vgpus(RTX, large=2)
    mine, other = makes_vgpus.ids(RTX)
    vm = vm_on(host, mine)
    job = start_removal(host, mine)
    assert failed_to_make(makes_vgpus.apply_vgpus(RTX, small=1), "nvidia-222", errno.ENOSPC)
    assert makes_vgpus.types(RTX) == {other: LARGE}, "the vGPU was recreated with its id"
    vm.end()
    assert job.answer(LONG_S) == Answer()
    assert makes_vgpus.apply_vgpus(RTX, small=1) == ()
    assert Counter(makes_vgpus.types(RTX).values()) == {SMALL: 1}


def test_the_id_of_a_vgpu_that_another_program_is_removing_stays_taken(host: Host, makes_vgpus: VgpuHost) -> None:
    makes_vgpus.apply_vgpus(RTX, large=2)
    before = makes_vgpus.types(RTX)
    mine, other = makes_vgpus.ids(RTX)
    vm = vm_on(host, mine)
    job = start_removal(host, mine)
    assert failed_to_make(makes_vgpus.apply_vgpus(RTX, large=2), "nvidia-223", errno.EEXIST)
    assert makes_vgpus.ids(RTX) == [other]
    assert not exists(host, f"/sys/bus/mdev/devices/{mine}")
    vm.end()
    assert job.answer(LONG_S) == Answer()
    assert makes_vgpus.apply_vgpus(RTX, large=2) == ()
    assert makes_vgpus.types(RTX) == before


def test_more_vgpus_than_fit_roll_back_to_the_previous_vgpus(host: Host, makes_vgpus: VgpuHost) -> None:
    assert makes_vgpus.apply_vgpus(RTX, small=3) == ()
    before = makes_vgpus.types(RTX)
    assert failed_to_make(makes_vgpus.apply_vgpus(RTX, large=13), "nvidia-223", errno.ENOSPC)
    assert makes_vgpus.types(RTX) == before
    assert sum(isinstance(step, CreateVgpu) for step in makes_vgpus.steps) == 13 + 3
    assert left(host, RTX) == {"nvidia-222": 21, "nvidia-223": 0}


class Killed(Exception):  # noqa: N818
    """The process was killed."""


def test_the_next_change_completes_a_change_that_was_killed_before_any_step(host: Host, makes_vgpus: VgpuHost) -> None:
    makes_vgpus.apply_vgpus(RTX, small=2)
    desired = makes_vgpus.types(RTX)
    makes_vgpus.apply_vgpus(RTX, large=2)
    for lived in range(2 + 2) if isinstance(host, MemoryHost) else (2,):  # emulated, each takes a minute
        taken: list[Step | RollBack] = []

        def report(step: Step | RollBack, taken: list[Step | RollBack] = taken, lived: int = lived) -> None:
            if len(taken) == lived:
                raise Killed
            taken.append(step)

        with pytest.raises(Killed):
            makes_vgpus.apply_vgpus(RTX, small=2, report=report)
        assert len(makes_vgpus.ids(RTX)) == abs(2 - lived)
        assert makes_vgpus.apply_vgpus(RTX, small=2) == ()
        assert makes_vgpus.types(RTX) == desired
        assert makes_vgpus.apply_vgpus(RTX, large=2) == ()


def test_a_single_vgpu_is_removed_by_hand_unless_a_vm_uses_it(host: Host, makes_vgpus: VgpuHost) -> None:
    makes_vgpus.apply_vgpus(RTX, large=2)
    first, second = makes_vgpus.ids(RTX)
    vm = vm_on(host, first)
    before = observe(makes_vgpus.change_host, NOBODY, None).inventory

    def remove(vgpu: VgpuId) -> list[ReasonCode]:
        return codes(unitchange.remove_vgpu(makes_vgpus.change_host, RTX, vgpu, NOBODY, lambda _: None, before))

    assert remove(first) == [ReasonCode.VGPU_IN_USE]
    assert remove(second) == []
    assert makes_vgpus.ids(RTX) == [first]
    assert not vm.asked_back()
    vm.end()


def test_commands_do_not_remove_a_vgpu_allocated_to_a_pod(
    host: Host, makes_vgpus: VgpuHost, tmp_path: Path, short_path: Path
) -> None:
    """By the allocations that commands read: first a VM has the vGPU open, then only its pod exists."""
    assert makes_vgpus.apply_vgpus(RTX, large=2) == ()
    mine, other = makes_vgpus.ids(RTX)
    before = observe(makes_vgpus.change_host, NOBODY, None).inventory
    account = AllocationReader(host.kernel, HostRoots.under(tmp_path), KubeletPaths(short_path / "k"), ledgers=())
    vm = vm_on(host, mine)

    def remove(vgpu: VgpuId) -> tuple[Reason, ...]:
        return unitchange.remove_vgpu(
            makes_vgpus.change_host, RTX, vgpu, Inputs(account.account), makes_vgpus.steps.append, before
        )

    with kubelet_with_pod(short_path / "k", "nvidia.com/GRID_T4-2B", mine):
        makes_vgpus.steps.clear()
        assert any("pod default/cuda" in reason.message for reason in remove(mine))
        assert not vm.asked_back(host.patience_s)
        vm.end()
        until_free(host, group_of(host, mine))
        assert any("pod default/cuda" in reason.message for reason in remove(mine))
        assert makes_vgpus.steps == []
        makes_vgpus.given = Inputs(account.account)
        assert any("pod default/cuda" in reason.message for reason in makes_vgpus.apply_vgpus(RTX))
        assert makes_vgpus.ids(RTX) == [mine], "the free vGPU was removed"
    account = replace(account, kubelet=KubeletPaths(short_path / "other"))
    with kubelet_with_pod(short_path / "other", "nvidia.com/GRID_T4-2B", other):
        assert remove(mine) == ()
    assert mine not in makes_vgpus.types(RTX)


def test_a_passthrough_gpu_gets_no_vgpus(host: Host, makes_vgpus: VgpuHost) -> None:
    assert host.start_write(f"/sys/bus/pci/devices/{RTX}/driver/unbind", RTX).answer(LONG_S) == Answer()
    assert codes(makes_vgpus.apply_vgpus(RTX, large=1)) == [ReasonCode.NO_VGPU_HOST]


def test_without_group_nodes_vgpus_are_created_but_never_removed(cdevs: CdevHost, tmp_path: Path) -> None:
    """An mdev has no group there, and both users and leases are found by groups."""
    makes_vgpus = VgpuHost(cdevs, tmp_path / "state")
    assert makes_vgpus.apply_vgpus(RTX, large=2) == ()
    before = makes_vgpus.types(RTX)
    vm = cdevs.open_devices(makes_vgpus.ids(RTX)[1])
    reasons = makes_vgpus.apply_vgpus(RTX, small=1)
    assert codes(reasons) == [ReasonCode.NO_IOMMU_GROUP]
    assert makes_vgpus.types(RTX) == before
    assert not vm.asked_back(cdevs.patience_s)
    vm.end()
