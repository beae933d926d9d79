"""An agent offers units of the GPUs in mode shared, in worker VMs and on hosts, and says why it withholds others."""

import errno
from pathlib import Path

import msgspec
import pytest

from gpuvirt.agent.cluster.nodelabels import shared_claim
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed, Progress, StateName
from gpuvirt.model.desired.settings import Enforcement, Settings, ShareSettings
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.files.tree import Folder, constant
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, sharing_node
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

SHARED = Settings(mode=DesiredMode.SHARED)
VGPU = "0000:02:00.0"
FIRST, SECOND = "0000:02:00.0", "0000:02:01.0"
T4 = ("0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0", "0000:af:00.0")


def uuid(address: str) -> str:
    return gpu_uuid(PciAddress(address))


def information(address: str) -> HostPath:
    return HostPath(f"/proc/driver/nvidia/gpus/{address}/information")


def capacity(node: SimNode) -> dict[str, int]:
    return {str(gpu): int(units) for gpu, units in node.view.shared.capacity.items()}


def withheld(node: SimNode, address: str) -> Reason | None:
    return next(gpu.withheld for gpu in node.view.shared.gpus if gpu.address == address)


def code(node: SimNode, address: str) -> ReasonCode | None:
    reason = withheld(node, address)
    return reason.code if reason is not None else None


def claimed(view_of: SimNode, observed: Metadata | None = None) -> dict[str, str | None]:
    keys = shared_claim(view_of.agent.views).keys(observed or Metadata(name="node01"))
    return {**keys.labels, **keys.annotations}


async def test_a_worker_vm_with_half_a_card_offers_500_units(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("vm-V100-8Q")
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        assert capacity(node) == {uuid(VGPU): 500}
        found = node.view.shared.gpus[0]
        assert (found.address, found.vgpu_type, found.minor, found.withheld) == (VGPU, "V100-8Q", 0, None)
        assert (node.gpu(VGPU).mode, node.gpu(VGPU).units, node.gpu(VGPU).reasons) == (Mode.SHARED, 500, ())
        assert node.view.problems == ()
        assert kernel.writes == []


async def test_a_worker_vm_with_whole_cards_offers_all_units_of_each(simulated: Simulated, tmp_path: Path) -> None:
    async with sharing_node(simulated("vm-2xV100"), tmp_path, SHARED) as node:
        await node.report_account()
        assert capacity(node) == {uuid(FIRST): 1000, uuid(SECOND): 1000}
        assert {gpu.vgpu_type for gpu in node.view.shared.gpus} == {None}


async def test_the_units_of_a_card_are_a_setting(simulated: Simulated, tmp_path: Path) -> None:
    settings = Settings(mode=DesiredMode.SHARED, shares=ShareSettings(units=100, resource="nvidia.com/part"))
    async with sharing_node(simulated("vm-V100-8Q"), tmp_path, settings) as node:
        await node.report_account()
        assert capacity(node) == {uuid(VGPU): 50}
        assert (node.view.shared.resource, node.view.shared.whole) == ("nvidia.com/part", 100)


async def test_a_vgpu_of_less_than_one_unit_is_withheld(simulated: Simulated, tmp_path: Path) -> None:
    settings = Settings(mode=DesiredMode.SHARED, shares=ShareSettings(units=1))
    async with sharing_node(simulated("vm-V100-8Q"), tmp_path, settings) as node:
        await node.report_account()
        assert (capacity(node), code(node, VGPU)) == ({}, ReasonCode.MODE_UNSUPPORTED)


async def test_the_label_shares_the_gpus_of_a_host_after_they_served_vms(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with sharing_node(kernel, tmp_path, Settings(workload_label=True)) as node:
        for value in ("vm-passthrough", "shared"):
            node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed(value)))
            for _ in range(5):
                await node.advance(5)
                await node.report_account()
            await node.advance(5)
            state = node.agent.reports.workload.get()
            assert state is not None
            assert (state.name, state.reason) == (StateName.SUCCESS, "")
            if value == "vm-passthrough":
                assert (capacity(node), node.view.shared.gpus) == ({}, ())
        assert {kernel.pci.functions[PciAddress(gpu)].driver for gpu in T4} == {"nvidia"}
        assert capacity(node) == dict.fromkeys(map(uuid, T4), 1000)
        assert (
            claimed(node)[SHARED_GPUS_ANNOTATION] == msgspec.json.encode(dict(sorted(capacity(node).items()))).decode()
        )


async def test_pods_with_units_keep_the_gpus_on_their_driver(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with sharing_node(kernel, tmp_path, Settings(workload_label=True)) as node:
        for value in ("shared", "vm-passthrough"):
            node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed(value)))
            for _ in range(5):
                await node.advance(5)
                await node.report_account()
            node.hold("nvidia.com/vgpu", "0-1", pod="infer-1")
        await node.advance(60)
        assert {kernel.pci.functions[PciAddress(gpu)].driver for gpu in T4} == {"nvidia"}
        state = node.agent.reports.workload.get()
        assert state is not None
        assert state.name is StateName.PENDING
        assert "pod default/infer-1" in state.reason
        node.free("0-1")
        for _ in range(5):
            await node.report_account()
            await node.advance(20)
        assert {kernel.pci.functions[PciAddress(gpu)].driver for gpu in T4} == {"vfio-pci"}


async def test_a_gpu_with_a_share_is_not_said_to_give_vgpus_on_demand(simulated: Simulated, tmp_path: Path) -> None:
    async with sharing_node(simulated("4xL40S"), tmp_path, Settings(workload_label=True)) as node:

        async def state_of(workload: str) -> Progress | None:
            node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed(workload)))
            for _ in range(6):
                await node.advance(5)
                await node.report_account()
            return node.agent.reports.workload.get()

        await state_of("shared")
        gpu = node.view.gpus[0]
        node.hold("nvidia.com/gpu", uuid(gpu.address), pod="infer-1")
        waits = await state_of("on-demand")
        assert waits is not None
        assert (waits.name, "pod default/infer-1" in waits.reason) == (StateName.PENDING, True)
        (reason,) = node.view.gpus[0].reasons
        assert "its VFs are off" in reason.message
        node.free(uuid(gpu.address))
        assert await state_of("on-demand") == Progress(StateName.SUCCESS)


async def test_single_gpus_are_shared_beside_others_for_containers_and_vms(
    simulated: Simulated, tmp_path: Path
) -> None:
    modes = {T4[0]: DesiredMode.SHARED, T4[1]: DesiredMode.PASSTHROUGH}
    async with sharing_node(simulated("4xT4"), tmp_path, Settings(mode=DesiredMode.CONTAINER, modes=modes)) as node:
        for _ in range(5):
            await node.advance(30)
            await node.report_account()
        assert capacity(node) == {uuid(T4[0]): 1000}
        assert [gpu.units for gpu in node.view.gpus] == [1000, None, None, None]


async def test_a_gpu_that_still_serves_a_vm_is_shared_when_the_vm_has_ended(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    kernel.rebind(PciAddress(T4[2]), "vfio-pci")
    group = kernel.pci.functions[PciAddress(T4[2])].group
    assert group is not None
    guest = kernel.start_vm(group)
    async with sharing_node(kernel, tmp_path, Settings(modes={T4[2]: DesiredMode.SHARED})) as node:
        await node.report_account()
        await node.advance(30)
        await node.report_account()
        await node.advance(30)
        assert (capacity(node), code(node, T4[2])) == ({}, ReasonCode.WITHDRAWN)
        kernel.end_vm(guest)
        for _ in range(10):
            await node.advance(30)
            await node.report_account()
        assert capacity(node) == {uuid(T4[2]): 1000}


async def test_a_gpu_with_a_vgpu_that_a_vm_uses_gives_no_units(simulated: Simulated, tmp_path: Path) -> None:
    """Pods would have it beside the VM, and would keep the vGPU from being removed when the VM has ended."""
    kernel = simulated("4xT4")
    vgpu = next(device for device in kernel.mdev.devices.values() if device.vgpu_host.gpu == T4[0])
    guest = kernel.start_vm(vgpu.group)
    async with sharing_node(kernel, tmp_path, Settings(workload_label=True)) as node:
        await node.report_account()
        node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed("shared")))
        for _ in range(10):
            await node.advance(30)
            await node.report_account()
        assert vgpu.uuid in kernel.mdev.devices
        assert capacity(node) == dict.fromkeys(map(uuid, T4[1:]), 1000)
        assert code(node, T4[0]) is ReasonCode.WITHDRAWN
        kernel.end_vm(guest)
        for _ in range(10):
            await node.advance(30)
            await node.report_account()
        assert not kernel.mdev.devices
        assert capacity(node) == dict.fromkeys(map(uuid, T4), 1000)


async def test_a_gpu_with_vfs_gives_no_units_until_they_are_off(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10-sriov")
    async with sharing_node(kernel, tmp_path, Settings(workload_label=True)) as node:
        node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed("shared")))
        await node.advance(30)
        assert {gpu.withheld.code for gpu in node.view.shared.gpus if gpu.withheld} == {ReasonCode.WITHDRAWN}
        for _ in range(10):
            await node.report_account()
            await node.advance(30)
        assert not any(function.virtfns for function in kernel.pci.functions.values())
        assert sorted(capacity(node).values()) == [1000, 1000]


@pytest.mark.parametrize(
    ("resource", "device", "withholds"),
    [
        ("nvidia.com/gpu", uuid(FIRST), {FIRST}),
        ("nvidia.com/gpu", f"{uuid(SECOND)}::3", {SECOND}),
        ("nvidia.com/gpu.shared", uuid(FIRST).upper().replace("GPU-", "GPU-"), {FIRST}),
        ("nvidia.com/mig-1g.5gb", "MIG-8a5c1d93-75b0-5502-bafc-fef8d1839ded", {FIRST, SECOND}),
        ("nvidia.com/gpu", "GPU-00000000-0000-0000-0000-000000000000", {FIRST, SECOND}),
        ("hami.io/whatever", f"{uuid(FIRST)}-7", {FIRST}),
        ("nvidia.com/GV100GL_TESLA_V100_PCIE_16GB", FIRST, {FIRST}),
        ("amd.com/gpu", "0000:99:00.0", set()),
        ("nvidia.com/vgpu", "0-17", set()),
    ],
)
async def test_units_of_a_gpu_that_another_plugin_registers_are_withheld(
    simulated: Simulated, tmp_path: Path, resource: str, device: str, withholds: set[str]
) -> None:
    async with sharing_node(simulated("vm-2xV100"), tmp_path, SHARED) as node:
        await node.report_account()
        assert len(capacity(node)) == 2
        node.register(resource, device)
        await node.report_account()
        assert {gpu for gpu in (FIRST, SECOND) if withheld(node, gpu) is not None} == withholds
        for gpu in withholds:
            reason = withheld(node, gpu)
            assert reason is not None
            assert (reason.code, reason.subject) == (ReasonCode.REGISTERED_ELSEWHERE, gpu)
            assert f"{resource}: {device}" in reason.text
            assert "nvidia.com/gpu.deploy.device-plugin=false" in reason.text
        node.registered.clear()
        node.count(resource, device)
        await node.report_account()
        assert {gpu for gpu in (FIRST, SECOND) if withheld(node, gpu) is not None} == withholds
        node.count(resource)
        await node.report_account()
        assert len(capacity(node)) == 2


async def test_a_plugin_that_restarts_keeps_units_withheld(simulated: Simulated, tmp_path: Path) -> None:
    async with sharing_node(simulated("vm-V100-8Q"), tmp_path, SHARED) as node:
        node.register("nvidia.com/gpu")
        await node.report_account()
        assert code(node, VGPU) is ReasonCode.REGISTERED_ELSEWHERE
        node.registered = {}
        node.register("nvidia.com/vgpu")
        node.register("nvidia.com/TU104GL_TESLA_T4")
        await node.report_account()
        assert capacity(node) == {uuid(VGPU): 500}


async def test_units_of_a_gpu_that_a_pod_has_from_another_plugin_are_withheld(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with sharing_node(simulated("vm-2xV100"), tmp_path, SHARED) as node:
        node.hold("nvidia.com/gpu", uuid(FIRST), pod="train-1")
        node.hold("nvidia.com/vgpu", "0-1", "0-2", pod="infer-1")
        await node.report_account()
        assert capacity(node) == {uuid(SECOND): 1000}
        reason = withheld(node, FIRST)
        assert reason is not None
        assert "is allocated to pod default/train-1 as nvidia.com/gpu" in reason.message
        node.free(uuid(FIRST))
        await node.report_account()
        assert len(capacity(node)) == 2


async def test_no_units_are_offered_while_the_kubelets_accounts_are_unknown(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with sharing_node(simulated("vm-V100-8Q"), tmp_path, SHARED) as node:
        assert (capacity(node), code(node, VGPU)) == ({}, ReasonCode.ALLOCATIONS_UNKNOWN)
        assert SHARED_GPUS_ANNOTATION not in claimed(node), "the annotation of an earlier agent stays"
        now, now_s = node.clock.now(), node.clock.monotonic_s()
        half = refusals.allocations_unknown()
        for unknown in (
            None,
            KubeletAccount(now, now_s, {}, partial=half),
            KubeletAccount(now, now_s, {}, recorded=False),
        ):
            await node.report_account()
            assert capacity(node) == {uuid(VGPU): 500}
            node.agent.observations.observe_account(unknown)
            await node.settle()
            assert (capacity(node), code(node, VGPU)) == ({}, ReasonCode.ALLOCATIONS_UNKNOWN)
            assert SHARED_GPUS_ANNOTATION not in claimed(node)


@pytest.mark.parametrize(
    ("text", "expected", "says"),
    [
        ("Model: GRID V300-8Q\nGPU UUID: {uuid}\n", ReasonCode.VGPU_TYPE_UNKNOWN, "Model: GRID V300-8Q"),
        ("Model: GRID V100-8Q\nGPU UUID: GPU-????????\n", ReasonCode.GPU_NOT_INITIALIZED, "has no UUID"),
        ("Model: Unknown\nGPU UUID: {uuid}\n", ReasonCode.GPU_NOT_INITIALIZED, "has no product name"),
        ("", ReasonCode.GPU_NOT_INITIALIZED, "has no product name"),
    ],
)
async def test_a_gpu_whose_size_or_id_is_unknown_is_withheld(
    simulated: Simulated, tmp_path: Path, text: str, expected: ReasonCode, says: str
) -> None:
    kernel = simulated("vm-V100-8Q")
    kernel.tree.place(information(VGPU), constant(text.format(uuid=uuid(VGPU))))
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        reason = withheld(node, VGPU)
        assert reason is not None
        assert reason.code is expected
        assert says in reason.text
        assert str(information(VGPU)) in reason.text
        assert capacity(node) == {}


LIMITS = ShareSettings(enforcement=Enforcement.HAMI_CORE)


async def test_a_gpu_of_unknown_memory_is_withheld_where_shares_are_limits(
    simulated: Simulated, tmp_path: Path
) -> None:
    settings = Settings(mode=DesiredMode.SHARED, shares=LIMITS)
    async with sharing_node(simulated("4xRTX2060"), tmp_path, settings) as node:
        for _ in range(5):
            await node.advance(5)
            await node.report_account()
        assert capacity(node) == {}
        assert {gpu.withheld and gpu.withheld.code for gpu in node.view.shared.gpus} == {ReasonCode.LIMIT_NOT_POSSIBLE}


async def test_a_driver_that_cant_limit_memory_offers_no_units_until_another_means_or_driver_can(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("vm-2xV100")
    shares = ShareSettings(enforcement=Enforcement.DRIVER)
    async with sharing_node(kernel, tmp_path, Settings(mode=DesiredMode.SHARED, shares=shares)) as node:
        await node.report_account()
        assert capacity(node) == {}
        (reason,) = {gpu.withheld and gpu.withheld.message for gpu in node.view.shared.gpus}
        assert reason == "can't be limited by NVIDIA's driver, so no container with part of a GPU starts"
        assert node.view.shared.enforcement is Enforcement.DRIVER
        kernel.tree.place(HostPath("/sys/module/nvidia/version"), constant("615.71.09"))
        await node.advance(70)
        await node.report_account()
        assert len(capacity(node)) == 2


async def test_another_means_offers_the_units_of_a_driver_that_cant(simulated: Simulated, tmp_path: Path) -> None:
    shares = ShareSettings(enforcement=Enforcement.DRIVER, otherwise=Enforcement.MPS)
    settings = Settings(mode=DesiredMode.SHARED, shares=shares)
    async with sharing_node(simulated("vm-2xV100"), tmp_path, settings) as node:
        await node.report_account()
        assert len(capacity(node)) == 2
        assert node.view.shared.enforcement is Enforcement.MPS
        assert node.view.shared.enforced_by.startswith("settings $.shares.otherwise, since NVIDIA's driver ")


async def test_a_gpu_whose_information_cannot_be_read_is_withheld_until_it_can(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("vm-V100-8Q")
    kernel.faults.fail(information(VGPU), errno.EIO)
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        assert (capacity(node), code(node, VGPU)) == ({}, ReasonCode.UNREAD)
        assert node.view.vgpu_type is None, "an unread type removes no label"
        kernel.faults.heal()
        await node.advance(70)
        assert capacity(node) == {uuid(VGPU): 500}


async def test_a_gpu_whose_driver_cannot_be_read_is_withheld(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("vm-V100-8Q")
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{VGPU}/driver"), errno.EIO)
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        reason = withheld(node, VGPU)
        assert reason is not None
        assert (capacity(node), reason.code) == ({}, ReasonCode.UNREAD)
        assert "none of its units are offered" in reason.text


async def test_a_gpu_without_a_driver_is_withheld(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("vm-V100-8Q")
    kernel.rebind(PciAddress(VGPU), None)
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        assert (capacity(node), code(node, VGPU)) == ({}, ReasonCode.WITHDRAWN)


async def test_a_gpu_in_mig_mode_is_withheld(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("vm-2xV100")
    for minor, instances in ((0, ("gi1",)), (1, ())):
        folder = f"/proc/driver/nvidia/capabilities/gpu{minor}/mig"
        kernel.tree.place(HostPath(folder), Folder())
        for name in instances:
            kernel.tree.place(HostPath(f"{folder}/{name}/access"), constant("x"))
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        assert capacity(node) == {uuid(SECOND): 1000}
        assert code(node, FIRST) is ReasonCode.IN_MIG_MODE


async def test_a_gpu_whose_instances_cannot_be_read_is_withheld(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("vm-2xV100")
    folder = HostPath("/proc/driver/nvidia/capabilities/gpu1/mig")
    kernel.tree.place(folder, Folder())
    kernel.faults.fail(folder, errno.EIO)
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        assert (capacity(node), code(node, SECOND)) == ({uuid(FIRST): 1000}, ReasonCode.UNREAD)


async def test_gpus_of_other_vendors_are_withheld(simulated: Simulated, tmp_path: Path) -> None:
    async with sharing_node(simulated("8xMI300X"), tmp_path, SHARED) as node:
        await node.report_account()
        assert {gpu.withheld.code for gpu in node.view.shared.gpus if gpu.withheld} == {ReasonCode.MODE_UNSUPPORTED}
        assert capacity(node) == {}


async def test_an_unhealthy_gpu_is_withheld_and_offered_again(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("vm-2xV100")
    async with sharing_node(kernel, tmp_path, SHARED) as node:
        await node.report_account()
        kernel.fall_off_bus(PciAddress(FIRST), fallen=True)
        await node.advance(60)
        assert (capacity(node), code(node, FIRST)) == ({uuid(SECOND): 1000}, ReasonCode.FELL_OFF_BUS)
        kernel.fall_off_bus(PciAddress(FIRST), fallen=False)
        await node.advance(60)
        assert len(capacity(node)) == 2


async def test_the_state_file_has_the_shared_gpus(simulated: Simulated, tmp_path: Path) -> None:
    async with sharing_node(simulated("vm-V100-8Q"), tmp_path, SHARED) as node:
        await node.report_account()
        await node.advance(60)
        read = msgspec.json.decode((tmp_path / "node.json").read_bytes(), type=NodeView)
        assert read.shared == node.view.shared
        assert read.vgpu_type == node.view.vgpu_type


def test_the_simulated_vms_have_no_iommu(simulated: Simulated) -> None:
    for name in ("vm-V100-8Q", "vm-2xV100"):
        kernel: SimKernel = simulated(name)
        facts = scan(kernel)
        assert {function.iommu_group for function in facts.functions.values()} == {None}
        assert facts.unread == ()
        assert not facts.group_nodes
