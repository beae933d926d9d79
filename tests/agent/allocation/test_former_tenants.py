"""The memory of a GPU that can't be reset reaches no other tenant, by whatever front end the tenants get the GPU."""

import errno
import fcntl
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import DeviceId, PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.tenancy import TenancyState, TenantKind, tenant
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.placement import GpuId
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.allocation.gpuresets import (
    A10,
    FIRST,
    SECOND,
    SETTLED_S,
    allocate_and_end,
    methods_of,
    report_account,
    without_reset,
)
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

CONTAINERS = "nvidia.com/gpu"
MODES = (DesiredMode.CONTAINER, DesiredMode.SHARED)


def driver(kernel: SimKernel, address: PciAddress = FIRST) -> str | None:
    return kernel.pci.functions[address].driver


def in_mode(mode: DesiredMode, *, require_reset: bool = True) -> Settings:
    return Settings(modes={FIRST: mode}, require_reset=require_reset)


def noted(node: SimNode) -> set[ReasonCode]:
    return {note.code for note in node.view.problems}


async def container_of_another_plugin(node: SimNode, kernel: SimKernel) -> None:
    """Let NVIDIA's plugin give the first GPU to a container, which ends."""
    device = gpu_uuid(FIRST)
    assert driver(kernel) == "nvidia"
    node.hold(CONTAINERS, device, pod="cuda")
    await report_account(node)
    node.free(device)
    await report_account(node)


# A VM, then another front end.


@pytest.mark.parametrize("mode", MODES)
async def test_a_gpu_that_a_vm_had_does_not_return_to_containers_without_a_reset(
    simulated: Simulated, tmp_path: Path, mode: DesiredMode
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        await allocate_and_end(node, A10, FIRST)
    async with running_node(kernel, tmp_path, in_mode(mode)) as node:
        await report_account(node)
        assert driver(kernel) == "vfio-pci"
        assert ReasonCode.NO_RESET in noted(node)
        assert any("pod default/vm-a has used it" in note.message for note in node.view.problems)
    kernel.reboot_id()
    async with running_node(kernel, tmp_path, in_mode(mode)) as node:
        await report_account(node)
        assert driver(kernel) == "nvidia"


@pytest.mark.parametrize("mode", MODES)
async def test_a_gpu_that_a_vm_had_returns_to_containers_if_vfio_has_reset_it(
    simulated: Simulated, tmp_path: Path, mode: DesiredMode
) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        await allocate_and_end(node, A10, FIRST)
    async with running_node(kernel, tmp_path, in_mode(mode)) as node:
        await report_account(node)
        assert driver(kernel) == "nvidia"
        assert ReasonCode.NO_RESET not in noted(node)
        without_reset(kernel)
        await report_account(node)
        assert node.reasons(FIRST) != [ReasonCode.NO_RESET], "it was reset before it left vfio-pci"


@pytest.mark.parametrize("mode", MODES)
async def test_the_setting_returns_a_gpu_to_containers_as_it_is(
    simulated: Simulated, tmp_path: Path, mode: DesiredMode
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        await allocate_and_end(node, A10, FIRST)
    async with running_node(kernel, tmp_path, in_mode(mode, require_reset=False)) as node:
        await report_account(node)
        assert driver(kernel) == "nvidia"


async def test_no_share_is_given_of_a_gpu_that_another_program_has_taken_from_vfio_without_a_reset(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        await allocate_and_end(node, A10, FIRST)
    kernel.rebind(FIRST, "nvidia")
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.SHARED)) as node:
        await report_account(node)
        (gpu,) = (gpu for gpu in node.view.shared.gpus if gpu.address == FIRST)
        assert gpu.withheld is not None
        assert gpu.withheld.code is ReasonCode.NO_RESET


async def test_no_vgpu_is_given_of_a_gpu_that_a_vm_had_whole_without_a_reset(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel, gpu, vgpu = simulated("4xL40S"), PciAddress("0000:25:00.0"), "0000:25:00.4"
    name = "nvidia.com/NVIDIA_L40S-12Q"
    without_reset(kernel, gpu)
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert node.offered[name][vgpu]
    file = hostfiles.tenancies(tmp_path / hostfiles.TENANCIES)
    file.update(lambda records: records.with_tenants({gpu: tenant(TenantKind.VM)}))
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert not node.offered[name][vgpu]
        assert node.refused(name, [vgpu]) is ReasonCode.NO_RESET
    async with running_node(kernel, tmp_path, Settings(require_reset=False)) as node:
        await report_account(node)
        assert node.allocate(name, [vgpu])


async def test_shares_are_claimed_only_of_gpus_without_the_memory_of_a_vm(simulated: Simulated, tmp_path: Path) -> None:
    gpu, unit = PciAddress("0000:02:00.0"), DeviceId("u7")
    kernel, uuid = without_reset(simulated("vm-2xV100"), gpu), GpuId(gpu_uuid(gpu))
    file = hostfiles.tenancies(tmp_path / hostfiles.TENANCIES)
    claimed: list[TenantKind | None] = []

    def record() -> None:
        claimed.append(file.value.of(gpu).kind)  # type: ignore[union-attr]

    async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.SHARED)) as node:
        await report_account(node)
        node.agent.gpu_claims.claim([uuid], unit, record)
        assert claimed == [TenantKind.NATIVE], "the tenant is on disk before the share is recorded"
        node.agent.gpu_claims.claim([uuid], unit, record)
        file.update(lambda records: records.with_tenants({gpu: tenant(TenantKind.VM)}))
        with pytest.raises(RefusedError) as refused:
            node.agent.gpu_claims.claim([uuid], unit, record)
        assert refused.value.reason.code is ReasonCode.NO_RESET
        assert len(claimed) == 2


def test_no_tenant_is_recorded_while_another_process_keeps_the_lock_of_the_file(tmp_path: Path) -> None:
    file = hostfiles.tenancies(tmp_path / hostfiles.TENANCIES)
    with (tmp_path / f".{hostfiles.TENANCIES}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            file.update(lambda records: records.with_tenants({FIRST: tenant(TenantKind.VM)}))
        assert not file.path.exists()


@pytest.mark.parametrize("plugin_only", [False, True])
def test_a_command_returns_no_gpu_to_the_host_with_the_memory_of_a_vm(
    simulated: Simulated, tmp_path: Path, plugin_only: bool
) -> None:
    kernel = without_reset(simulated("2xA10"))
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    folder = change_host.device_plugins / "gpuvirt" if plugin_only else tmp_path
    records = hostfiles.tenancies(folder / hostfiles.TENANCIES)
    boot_id = scan(kernel).platform.boot_id
    records.update(lambda records: records.of_boot(boot_id).with_tenants({FIRST: tenant(TenantKind.VM)}))
    unit = build_inventory(scan(kernel)).gpus[FIRST].unit
    (reason,) = change_drivers(change_host, unit, {FIRST: DesiredDriver.NATIVE})
    assert reason.code is ReasonCode.NO_RESET
    assert driver(kernel) == "vfio-pci"
    as_it_is = replace(NOBODY, require_reset=False)
    assert change_drivers(change_host, unit, {FIRST: DesiredDriver.NATIVE}, as_it_is) == ()
    assert driver(kernel) == "nvidia"


def test_a_command_records_that_vfio_has_reset_the_gpu_that_it_returns(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    change_host, boot_id = change_host_in(tmp_path, kernel, SimTools(kernel)), scan(kernel).platform.boot_id
    change_host.tenancies.update(lambda records: records.of_boot(boot_id).with_tenants({FIRST: tenant(TenantKind.VM)}))
    unit = build_inventory(scan(kernel)).gpus[FIRST].unit
    assert change_drivers(change_host, unit, {FIRST: DesiredDriver.NATIVE}) == ()
    last = change_host.tenancies.value.of(FIRST)
    assert last is not None
    assert last.state is TenancyState.CLEAN


# A container, then a VM.


async def test_a_gpu_that_a_container_of_another_plugin_had_goes_to_no_vm_without_a_reset(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    kernel.rebind(FIRST, "nvidia")
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.CONTAINER)) as node:
        await container_of_another_plugin(node, kernel)
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        assert driver(kernel) == "vfio-pci"
        assert node.offered[A10][FIRST] is False
        (reason,) = node.gpu(FIRST).reasons
        assert reason.code is ReasonCode.NO_RESET
        assert "pod default/cuda has used it" in reason.message
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
    kernel.reboot_id()
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        assert node.allocate(A10, [FIRST])


async def test_a_gpu_that_a_container_had_goes_to_a_vm_if_vfio_can_reset_it(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xA10")
    kernel.rebind(FIRST, "nvidia")
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.CONTAINER)) as node:
        await container_of_another_plugin(node, kernel)
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        assert node.allocate(A10, [FIRST])


async def test_a_gpu_on_its_native_driver_while_no_agent_ran_may_have_had_a_container(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    kernel.reboot_id()
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
    kernel.reboot_id()
    kernel.rebind(FIRST, "nvidia")
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.CONTAINER)) as node:
        await report_account(node)
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
        (reason,) = node.gpu(FIRST).reasons
        assert "the agent was not running" in reason.message


# What the agent can't read or has lost.


@pytest.mark.parametrize("path", [methods_of(FIRST), methods_of(FIRST).replace("reset_method", "reset")])
async def test_a_reset_that_cant_be_read_is_not_possible(simulated: Simulated, tmp_path: Path, path: str) -> None:
    kernel = without_reset(simulated("2xA10"))
    kernel.faults.fail(methods_of(FIRST) if path == methods_of(FIRST) else type(methods_of(FIRST))(path), errno.EIO)
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.PASSTHROUGH)) as node:
        await report_account(node)
        await allocate_and_end(node, A10, FIRST)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
    async with running_node(kernel, tmp_path, in_mode(DesiredMode.CONTAINER)) as node:
        await report_account(node)
        assert driver(kernel) == "vfio-pci"


@pytest.mark.parametrize("torn", [True, False])
async def test_the_tenant_outlives_the_ledger(simulated: Simulated, tmp_path: Path, torn: bool) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await allocate_and_end(node, A10, FIRST)
    ledger = tmp_path / "ledger.json"
    if torn:
        ledger.write_bytes(ledger.read_bytes()[:-20])
    else:
        ledger.unlink()
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
        assert node.allocate(A10, [SECOND])


@pytest.mark.parametrize("torn", [True, False])
async def test_a_lost_file_of_tenants_makes_all_tenants_of_the_boot_unknown(
    simulated: Simulated, tmp_path: Path, torn: bool
) -> None:
    kernel = without_reset(without_reset(simulated("2xA10")), SECOND)
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
    file = tmp_path / hostfiles.TENANCIES
    if torn:
        file.write_bytes(file.read_bytes()[:-20])
    else:
        file.unlink()
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert ReasonCode.TENANCIES_LOST in noted(node)
        assert node.offered == {A10: {FIRST: False, SECOND: False}}
        assert "unknown tenant" in node.gpu(SECOND).reasons[0].message
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
    kernel.reboot_id()
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert ReasonCode.TENANCIES_LOST not in noted(node)
        assert node.allocate(A10, [FIRST])


async def test_a_damaged_file_of_an_earlier_boot_is_no_loss(simulated: Simulated, tmp_path: Path) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await allocate_and_end(node, A10, FIRST)
    (tmp_path / hostfiles.TENANCIES).write_bytes(b"")
    kernel.reboot_id()
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert node.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_tenant_that_a_command_has_recorded_before_the_first_agent_of_a_boot_stays(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
    kernel.reboot_id()
    file, boot_id = hostfiles.tenancies(tmp_path / hostfiles.TENANCIES), scan(kernel).platform.boot_id
    file.update(lambda records: records.of_boot(boot_id).with_tenants({FIRST: tenant(TenantKind.VM)}))
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET


async def test_a_tenant_of_the_same_kind_is_not_written_again(simulated: Simulated, tmp_path: Path) -> None:
    file = hostfiles.tenancies(tmp_path / hostfiles.TENANCIES)
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await allocate_and_end(node, A10, FIRST)
        version = file.version()
        node.allocate(A10, [FIRST])
        assert file.version() == version


async def test_a_file_that_is_deleted_under_the_agent_is_written_again(simulated: Simulated, tmp_path: Path) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await allocate_and_end(node, A10, FIRST)
        (tmp_path / hostfiles.TENANCIES).unlink()
        await report_account(node)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
        assert (tmp_path / hostfiles.TENANCIES).exists()


async def test_the_tenant_is_on_disk_before_the_kubelet_has_its_answer(simulated: Simulated, tmp_path: Path) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        ledger = (tmp_path / "ledger.json").read_bytes()
        node.allocate(A10, [FIRST])
        tenancies = (tmp_path / hostfiles.TENANCIES).read_bytes()
    # The agent is killed right after the answer: nothing that it wrote later is there. The pod ends before it is back.
    (tmp_path / "ledger.json").write_bytes(ledger)
    (tmp_path / hostfiles.TENANCIES).write_bytes(tenancies)
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET


async def test_a_gpu_without_a_reset_is_not_given_while_its_tenant_cant_be_recorded(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        (tmp_path / f".{hostfiles.TENANCIES}.new").mkdir()
        assert node.refused(A10, [FIRST]) is ReasonCode.TENANCIES_NOT_WRITTEN
        assert node.allocate(A10, [SECOND]), "the kernel can reset it, so its tenant does not matter"
        await report_account(node)
        assert ReasonCode.TENANCIES_NOT_WRITTEN in noted(node)
        (tmp_path / f".{hostfiles.TENANCIES}.new").rmdir()
        await report_account(node)
        assert ReasonCode.TENANCIES_NOT_WRITTEN not in noted(node)
        assert node.allocate(A10, [FIRST])
    records = hostfiles.tenancies(tmp_path / hostfiles.TENANCIES).value
    assert records.of(SECOND).state is TenancyState.TENANT  # type: ignore[union-attr]


async def test_no_share_is_given_of_a_gpu_without_a_reset_while_its_tenant_cant_be_recorded(
    simulated: Simulated, tmp_path: Path
) -> None:
    first, second = PciAddress("0000:02:00.0"), PciAddress("0000:02:01.0")
    kernel, claimed = without_reset(simulated("vm-2xV100"), first), list[PciAddress]()
    async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.SHARED)) as node:
        await report_account(node)
        (tmp_path / f".{hostfiles.TENANCIES}.new").mkdir()
        claims = node.agent.gpu_claims
        with pytest.raises(RefusedError) as refused:
            claims.claim([GpuId(gpu_uuid(first))], DeviceId("u1"), lambda: claimed.append(first))
        assert refused.value.reason.code is ReasonCode.TENANCIES_NOT_WRITTEN
        claims.claim([GpuId(gpu_uuid(second))], DeviceId("u2"), lambda: claimed.append(second))
        assert claimed == [second], "the kernel can reset it, so its tenant does not matter"


# One pod, or two.


async def test_a_pod_that_ended_at_once_is_another_tenant(simulated: Simulated, tmp_path: Path) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        node.allocate(A10, [FIRST])
        node.hold(A10, FIRST, pod="vm-a")
        node.free(FIRST)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET


async def test_a_pod_that_was_refused_before_it_started_is_no_tenant(simulated: Simulated, tmp_path: Path) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await report_account(node)
        node.allocate(A10, [FIRST])
        await node.advance(SETTLED_S)
        assert node.allocate(A10, [FIRST])


async def test_an_init_container_is_another_tenant_where_starts_of_pods_cant_be_seen(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        node.recorded.started = None
        node.allocate(A10, [FIRST])
        node.write(A10, FIRST, uid="uid-of-vm-a", container="init")
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
