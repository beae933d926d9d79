"""The conditions of a node's workload, and the marker files for other operands."""

import errno
from pathlib import Path

import pytest

from gpuvirt.agent.published import Markers
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.offers.validation import ValidatorCheck
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

FIRST = PciAddress("0000:65:00.0")


def unready(node: SimNode) -> dict[ValidatorCheck, ReasonCode]:
    return {
        condition.check: condition.reason.code for condition in node.view.conditions if condition.reason is not None
    }


@pytest.mark.parametrize(
    ("name", "workload", "files"),
    [
        ("2xA10", Workload.PASSTHROUGH, ["vfio-pci-ready", "workload-type"]),
        ("4xT4", Workload.VGPU, ["vgpu-devices-ready", "vgpu-manager-ready", "workload-type"]),
        ("4xL40S", Workload.VGPU, ["vgpu-devices-ready", "vgpu-manager-ready", "workload-type"]),
    ],
)
async def test_the_marker_files_of_each_workload(
    simulated: Simulated, tmp_path: Path, name: str, workload: Workload, files: list[str]
) -> None:
    folder = tmp_path / "validations"
    async with running_node(simulated(name), tmp_path) as node:
        assert node.view.workload is workload
        assert unready(node) == {}
        Markers(folder, tmp_path).write(node.view)
    assert sorted(path.name for path in folder.iterdir()) == files
    assert (folder / "workload-type").read_text() == f"{workload}\n"


async def test_markers_follow_the_host_and_leave_files_of_other_programs_alone(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel, folder = simulated("2xA10"), tmp_path / "validations"
    folder.mkdir()
    (folder / "driver-ready").touch()
    (folder / "vgpu-devices-ready").touch()  # from when the node was for vGPUs
    markers = Markers(folder, tmp_path)
    async with running_node(kernel, tmp_path) as node:
        markers.write(node.view)
        assert sorted(path.name for path in folder.iterdir()) == ["driver-ready", "vfio-pci-ready", "workload-type"]
        kernel.rebind(FIRST, "nvidia")
        await node.advance(2)
        assert unready(node) == {ValidatorCheck.VFIO_PCI: ReasonCode.NATIVE_DRIVER}
        markers.write(node.view)
        assert not (folder / "vfio-pci-ready").exists()
        kernel.rebind(FIRST, "vfio-pci")
        await node.advance(2)
        markers.write(node.view)
        assert (folder / "vfio-pci-ready").exists()


@pytest.mark.parametrize(
    ("host", "gpu", "driver", "code", "first"),
    [
        ("2xA10", FIRST, "nvidia", ReasonCode.NATIVE_DRIVER, "mode: passthrough"),
        ("2xA10", FIRST, None, ReasonCode.NO_DRIVER, "mode: passthrough"),
        ("vm-2xV100", PciAddress("0000:02:00.0"), "nvidia", ReasonCode.NATIVE_DRIVER, "gpuvirt doctor"),
        ("vm-2xV100", PciAddress("0000:02:00.0"), None, ReasonCode.NO_IOMMU_GROUP, "switch"),
    ],
)
async def test_a_node_in_a_vm_without_an_iommu_gets_no_advice_to_bind_gpus(
    simulated: Simulated, tmp_path: Path, host: str, gpu: PciAddress, driver: str | None, code: ReasonCode, first: str
) -> None:
    kernel = simulated(host)
    kernel.rebind(gpu, driver)
    async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.PASSTHROUGH)) as node:
        reason = next(
            condition.reason for condition in node.view.conditions if condition.check is ValidatorCheck.VFIO_PCI
        )
        assert reason is not None
        assert (reason.subject, reason.code) == (gpu, code)
        assert first in str(reason.fix)


async def test_gpus_for_containers_do_not_make_a_node_unready(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    kernel.rebind(FIRST, "nvidia")
    settings = Settings(mode=DesiredMode.PASSTHROUGH, modes={FIRST: DesiredMode.CONTAINER})
    async with running_node(kernel, tmp_path, settings) as node:
        assert unready(node) == {}


async def test_a_node_for_vgpus_without_vgpus_is_unready(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10"), tmp_path, Settings(mode=DesiredMode.VGPU)) as node:
        assert unready(node) == {
            ValidatorCheck.VGPU_MANAGER: ReasonCode.NO_VGPUS,
            ValidatorCheck.VGPU_DEVICES: ReasonCode.NO_VGPUS,
        }


async def test_a_vgpu_manager_on_the_host_has_its_own_marker(simulated: Simulated, tmp_path: Path) -> None:
    folder, system = tmp_path / "validations", tmp_path / "system"
    (system / "usr/bin").mkdir(parents=True)
    (system / "usr/bin/nvidia-smi").touch()
    async with running_node(simulated("4xT4"), tmp_path) as node:
        Markers(folder, system).write(node.view)
    assert (folder / "host-vgpu-manager-ready").exists()
    assert not (folder / "vgpu-manager-ready").exists()


async def test_a_folder_that_cannot_be_written_raises_no_error(simulated: Simulated, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with running_node(simulated("2xA10"), tmp_path) as node:
        Markers(tmp_path / "file/validations", tmp_path).write(node.view)


async def test_a_gpu_whose_driver_cannot_be_read_makes_a_node_unready(two_a10: SimNode) -> None:
    two_a10.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{FIRST}/driver"), errno.EIO)
    await two_a10.advance(15)
    assert unready(two_a10) == {ValidatorCheck.VFIO_PCI: ReasonCode.UNREAD}
