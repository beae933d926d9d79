"""The slices of a host: its shapes, their counters, and the limits of the API server."""

from pathlib import Path

import pytest

from gpuvirt.facts.ids import NodeName, PciAddress, VgpuType
from gpuvirt.model.allocation.claims import Shape
from gpuvirt.model.dra.pool import ShapedGpu, Size, pool_of
from gpuvirt.model.dra.slices import MOST_DEVICES, MOST_SETS, content_of, slices_of
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt_sim.archives.export import export
from tests.cli.commandline import ran
from tests.model.dra.shapedhosts import HOSTS, SIMULATED, devices, kernel_of, printed, slices

SHAPES = {
    "three native": {"container", "passthrough", "shared"},
    "two in a group": {"container", "passthrough", "shared"},
    "2xA10-sriov": {"passthrough", "vgpu"},
    "2xA30": {"passthrough", "vgpu"},
    "4xT4": {"passthrough", "vgpu"},
    "4xL40S": {"passthrough", "vgpu"},
    "vm-V100-8Q": {"container", "shared"},
    "2xA10": {"passthrough"},
    "2xRTX4090-one-group": {"passthrough"},
}


@pytest.mark.parametrize("name", [*HOSTS, *SIMULATED])
def test_the_loaded_driver_decides_on_the_shapes_of_each_gpu(name: str, tmp_path: Path) -> None:
    found = devices(slices(printed(name, tmp_path)))
    gpus = {device.gpu for device in found}
    assert {(device.gpu, device.text("type")) for device in found} == {(gpu, s) for gpu in gpus for s in SHAPES[name]}
    for device in found:
        assert {"productName", "uuid", "hostDriverVersion", "vgpuFramework"} <= device.attributes.keys()
        assert device.text("resource.kubernetes.io/pcieRoot").startswith("pci0000:")
        assert device.allow_multiple_allocations is (device.text("type") in {"vgpu", "shared"})


def test_sizes_are_those_of_the_card_by_the_names_of_the_host(tmp_path: Path) -> None:
    found = devices(slices(printed("2xA30", tmp_path)))
    sizes = {device.text("profile"): device.most("instances") for device in found if device.text("type") == "vgpu"}
    assert sizes == {
        "NVIDIA A30-4C": 6,
        "NVIDIA A30-6C": 4,
        "NVIDIA A30-8C": 3,
        "NVIDIA A30-12C": 2,
        "NVIDIA A30-24C": 1,
    }
    older = {device.text("profile") for device in devices(slices(printed("4xT4", tmp_path / "t4"))) if device.capacity}
    assert older == {f"GRID T4-{gb}Q" for gb in (1, 2, 4, 8, 16)}


def test_a_worker_vms_vgpu_has_the_units_of_its_part_of_a_card(tmp_path: Path) -> None:
    (shared,) = (device for device in devices(slices(printed("vm-V100-8Q", tmp_path))) if device.capacity)
    assert shared.most("units") == 500


def test_a_gpu_that_is_alone_in_one_shape_needs_no_counters(tmp_path: Path) -> None:
    (only,) = slices(printed("2xA10", tmp_path))
    assert only.spec.shared_counters == ()
    assert all(device.consumes_counters == () for device in only.spec.devices)


@pytest.mark.parametrize(("name", "why"), [("8xH100", "NVSwitches join"), ("2xA10-no-iommu", "NoIommuGroup")])
def test_a_shape_that_a_host_can_not_make_is_told_with_the_reason(name: str, why: str, tmp_path: Path) -> None:
    export(kernel_of(name), tmp_path)
    done = ran("slices", "--dry-run", environment={"GPUVIRT_HOST_ROOT": str(tmp_path), "COLUMNS": "80"})
    assert why in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_sizes_are_those_of_gpus_that_give_vgpus(tmp_path: Path) -> None:
    export(kernel_of("vm-2xV100"), tmp_path)
    done = ran("slices", "--dry-run", environment={"GPUVIRT_HOST_ROOT": str(tmp_path)})
    assert "container, shared" in done.stdout
    assert "vgpu, one of" not in done.stdout


def test_a_list_of_modules_that_can_not_be_read_is_no_host_without_a_driver(tmp_path: Path) -> None:
    export(kernel_of("2xA10"), tmp_path)
    modules = tmp_path / "sys/module"
    modules.rename(tmp_path / "modules")
    modules.symlink_to(modules)
    done = ran("slices", "--dry-run", environment={"GPUVIRT_HOST_ROOT": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert "it is not known which driver is loaded" in done.stderr


def test_without_dry_run_nothing_is_published(tmp_path: Path) -> None:
    done = ran("slices", environment={"GPUVIRT_HOST_ROOT": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected --dry-run: the agent publishes slices" in done.stderr


@pytest.mark.parametrize(("gpus", "sizes", "counters", "parts"), [(8, 0, 1, 1), (16, 8, 2, 3), (16, 20, 2, 6)])
def test_large_hosts_stay_within_the_limits_of_a_slice(gpus: int, sizes: int, counters: int, parts: int) -> None:
    types = tuple(Size(VgpuType(f"NVIDIA A10-{number}Q"), 1024, 1) for number in range(sizes))
    shapes = (Shape.PASSTHROUGH, Shape.VGPU) if sizes else (Shape.CONTAINER, Shape.PASSTHROUGH)
    addresses = [PciAddress(f"0000:{bus:02x}:00.0") for bus in range(gpus)]
    pool = pool_of([ShapedGpu(address, UnitId(address), shapes, types) for address in addresses])
    found = slices_of(content_of(pool), NodeName("node01"), 3)
    with_counters = [part for part in found if "sharedCounters" in str(part)]
    assert (len(with_counters), len(found) - len(with_counters)) == (counters, parts)
    assert found[: len(with_counters)] == with_counters, "devices that consume them come later"
    for part in found:
        assert str(part).count("'consumesCounters'") <= MOST_DEVICES
        assert str(part).count("'counters': {'gpu") - str(part).count("'counterSet'") <= MOST_SETS
