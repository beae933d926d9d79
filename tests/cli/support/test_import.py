"""Archives become simulated hosts that show the same devices."""

import errno
import random
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.archives.hostcopy import copy_host
from gpuvirt.hardware.scan import scan
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.archived import ArchivedKernel
from gpuvirt_sim.archives.importing import Imported, import_host
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.vgpu import VgpuTypeSpec
from gpuvirt_sim.files.tree import Link, constant
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec, host_names, load_host
from gpuvirt_sim.kernel import SimKernel
from tests.cli.support.archives import opened
from tests.sim.simulated import Simulated
from tests.thoroughness import examples

GPU = PciAddress("0000:65:00.0")


def of_any_boot(facts: Facts) -> Facts:
    return replace(facts, platform=replace(facts.platform, boot_id=None))


def imported(kernel: Kernel) -> Imported:
    return import_host(ArchivedKernel(opened(kernel)), "a test")


def shown_by(made: Imported) -> Facts:
    return of_any_boot(scan(build_host(made.spec)))


def assert_round_trip(kernel: SimKernel) -> None:
    made = imported(kernel)
    assert [loss.text for loss in made.losses] == []
    assert shown_by(made) == of_any_boot(scan(kernel))


@pytest.mark.parametrize("name", host_names())
def test_every_simulated_host_survives_the_round_trip(simulated: Simulated, name: str) -> None:
    kernel = simulated(name)
    assert scan(ArchivedKernel(opened(kernel))) == scan(kernel)
    assert_round_trip(kernel)


@pytest.mark.parametrize("name", ["4xT4", "4xL40S", "2xGH200"])
def test_importing_an_imported_host_changes_nothing(simulated: Simulated, name: str) -> None:
    once = imported(simulated(name))
    assert imported(build_host(once.spec)).spec == once.spec


@pytest.mark.parametrize("name", ["4xT4", "4xL40S"])
def test_an_imported_host_updates_vgpu_capacity_as_a_kernel_does(simulated: Simulated, name: str) -> None:
    """The remaining capacity equals the host's, and changes as vGPUs are created and removed."""
    kernel = simulated(name)
    copy = build_host(imported(kernel).spec)
    host = next(host for host in scan(kernel).vgpu_hosts.values() if host.live)
    if host.framework is Framework.MDEV:
        remove = HostPath(f"/sys/bus/mdev/devices/{host.live[0].id}/remove")
        for host_kernel in (kernel, copy):
            host_kernel.write(remove, b"1")
    else:
        for host_kernel in (kernel, copy):
            host_kernel.write(HostPath(f"/sys/bus/pci/devices/{host.live[0].parent}/nvidia/current_vgpu_type"), b"0")
    assert of_any_boot(scan(copy)) == of_any_boot(scan(kernel))


@pytest.mark.parametrize("name", ["2xA10", "4xRTX2060", "8xH100"])
def test_an_imported_host_gives_functions_back_to_their_drivers(simulated: Simulated, name: str) -> None:
    kernel = simulated(name)
    copy = build_host(imported(kernel).spec)
    for host_kernel in (kernel, copy):
        for function in [*host_kernel.pci.functions.values()]:
            if function.driver == "vfio-pci":
                host_kernel.rebind(function.address, None)
                function.override = None
                host_kernel.pci.add_driver(function.native_driver or "")
                host_kernel.write(HostPath("/sys/bus/pci/drivers_probe"), function.address.encode())
    assert of_any_boot(scan(copy)) == of_any_boot(scan(kernel))


def test_bridges_are_imported_above_their_devices(simulated: Simulated) -> None:
    kernel = simulated("2xRTX4090-one-group")
    folders = {address: function.folder for address, function in kernel.pci.functions.items()}
    made = build_host(imported(kernel).spec)
    assert {address: function.folder for address, function in made.pci.functions.items()} == folders


# Realistic hosts.


def test_a_kernel_before_6_1_has_no_vfio_dev_folders(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    for address in (GPU, "0000:ca:00.0"):
        kernel.tree.remove(HostPath(f"/sys/bus/pci/devices/{address}/vfio-dev"))
    assert_round_trip(kernel)


def test_iommufd_without_vfio_device_nodes() -> None:
    assert_round_trip(
        build_host(HostSpec(
            about="CONFIG_VFIO_DEVICE_CDEV=n", iommufd=True, cdev_nodes=False,
            slots=(SlotSpec(at=GPU, board="A10", driver="vfio-pci", group=1),),
        ))
    )  # fmt: skip


def test_a_host_whose_modules_are_not_loaded() -> None:
    spec = HostSpec(about="no vfio", vfio_loaded=False, slots=(SlotSpec(at=GPU, board="A10", group=1),))
    assert_round_trip(build_host(spec))


def test_a_kernel_without_group_nodes() -> None:
    slot = SlotSpec(at=GPU, board="A10", driver="vfio-pci", group=1)
    assert_round_trip(build_host(HostSpec(about="x", iommufd=True, group_nodes=False, slots=(slot,))))


def test_missing_and_stray_group_nodes(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.delete_node(IommuGroup(12))
    kernel.vfio.show_node(IommuGroup(99))
    assert_round_trip(kernel)


def test_functions_of_one_slot_on_different_drivers(simulated: Simulated) -> None:
    kernel = simulated("4xRTX2060")
    kernel.rebind(PciAddress("0000:04:00.1"), "snd_hda_intel")
    kernel.rebind(PciAddress("0000:04:00.3"), None)
    assert_round_trip(kernel)


def test_a_card_that_fell_off_the_bus(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.fall_off_bus(GPU)
    assert_round_trip(kernel)


def test_an_intel_gpu_whose_mdev_types_have_no_names() -> None:
    board = CardSpec(
        functions=(FunctionSpec(id="8086:5912", class_code="030000", native_driver="i915"),), vgpus=Framework.MDEV
    )
    kernel = build_host(
        HostSpec(about="GVT-g", boards={"hd": board}, slots=(SlotSpec(at="0000:00:02.0", board="hd", group=1),))
    )
    folder = f"{kernel.pci.functions[PciAddress('0000:00:02.0')].folder}/mdev_supported_types/i915-GVTg_V5_4"
    kernel.tree.place(HostPath(f"{folder}/available_instances"), constant("1"))
    kernel.tree.place(HostPath(f"{folder}/description"), constant("low_gm_size: 64MB\nhigh_gm_size: 384MB"))
    kernel.tree.link(HostPath("/sys/class/mdev_bus/0000:00:02.0"), HostPath("/sys/devices/pci0000:00/0000:00:02.0"))
    assert_round_trip(kernel)


def test_mixed_sizes_keep_the_hosts_own_counts() -> None:
    """Newer drivers mix sizes on one GPU, which the simulator's rule does not: the host's numbers win."""
    kernel = build_host(load_host("4xT4"))
    gpu = PciAddress("0000:86:00.0")
    folder = f"/sys/class/mdev_bus/{gpu}/mdev_supported_types"
    for type_id, left in (("nvidia-230", "3"), ("nvidia-232", "2"), ("nvidia-234", "0")):
        kernel.faults.answer(HostPath(f"{folder}/{type_id}/available_instances"), f"{left}\n".encode())
    assert_round_trip(kernel)


def test_a_type_that_no_vf_lists_is_imported_without_a_name() -> None:
    slot = SlotSpec(at=GPU, board="L40S", group=1, vfs=2, vgpus={"NVIDIA L40S-48Q": 1})  # type: ignore[dict-item]
    kernel = build_host(HostSpec(about="full of vGPUs", slots=(slot,)))
    made = imported(kernel)
    assert [loss.text for loss in made.losses] == []
    assert build_inventory(shown_by(made)).vgpus.keys() == build_inventory(scan(kernel)).vgpus.keys()


# Losses are reported.


@pytest.mark.parametrize("attribute", ["driver", "iommu_group", "numa_node", "subsystem_vendor", "config", "revision"])
def test_an_unreadable_attribute_is_a_reported_loss_and_no_failure(simulated: Simulated, attribute: str) -> None:
    kernel = simulated("2xA10")
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{GPU}/{attribute}"), errno.EIO)
    made = imported(kernel)
    assert any(loss.where == GPU and "EIO" in loss.why for loss in made.losses)
    assert GPU in shown_by(made).functions


def test_malformed_entries_are_reported(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath("/sys/bus/pci/devices/0000:99:00.0"), Link("../../../devices/gone"))
    assert [loss.where for loss in imported(kernel).losses] == ["/sys/bus/pci/devices/0000:99:00.0"]


def test_a_vgpu_that_is_being_removed_is_reported(simulated: Simulated) -> None:
    kernel = simulated("4xT4")
    kernel.tree.remove(HostPath("/sys/class/mdev_bus/0000:3b:00.0"))
    assert any("the functions that carry them are not listed" in loss.text for loss in imported(kernel).losses)


def test_vfs_whose_groups_could_not_be_read_carry_nothing(simulated: Simulated) -> None:
    kernel = simulated("4xL40S")
    kernel.faults.fail(HostPath("/sys/bus/pci/devices/0000:25:00.4/iommu_group"), errno.EIO)
    made = imported(kernel)
    left_out = "0000:25:00.4: vGPUs: left out, because it has no IOMMU group to carry them"
    assert left_out in [loss.text for loss in made.losses]
    assert len(shown_by(made).vgpu_hosts[PciAddress("0000:25:00.0")].live) == 3


def test_a_vgpu_on_a_vf_that_is_not_listed_is_left_out(simulated: Simulated) -> None:
    kernel = simulated("8xA100")
    live = scan(kernel).vgpu_hosts[PciAddress("0000:07:00.0")].live[0]
    kernel.tree.remove(HostPath(f"/sys/class/mdev_bus/{live.parent}"))
    made = imported(kernel)
    assert any(loss.where == live.id and "which carries it, is not listed" in loss.why for loss in made.losses)
    assert len(shown_by(made).vgpu_hosts[PciAddress("0000:07:00.0")].live) == 3


# Any host.

CARDS = st.sampled_from(["A10", "T4", "RTX2060", "RTX4090", "A100-NVSwitch", "MI300X", "nvme", "root-port", "L40S"])


@st.composite
def hosts(draw: st.DrawFn) -> HostSpec:
    slots = []
    for bus in draw(st.lists(st.integers(1, 250), unique=True, max_size=6)):
        board = draw(CARDS)
        driver = draw(st.sampled_from(["native", "none", "vfio-pci"]))
        vgpus = board in {"T4", "L40S", "A10"} and driver == "native"
        at = f"{draw(st.sampled_from(['0000', '0001', '10000']))}:{bus:02x}:00.0"
        slots.append(
            SlotSpec(
                at=at,
                board=board,
                driver=driver,
                group=draw(st.integers(1, 6)),
                numa=draw(st.integers(-1, 3)),
                vfs=draw(st.integers(0, 3)) if vgpus and board != "T4" else 0,
            )
        )
    return HostSpec(about="drawn", slots=tuple(slots), iommufd=draw(st.booleans()), group_nodes=draw(st.booleans()))


def apply_vgpus(kernel: SimKernel, chance: random.Random) -> None:
    """Create vGPUs as an admin would."""
    for host in list(scan(kernel).vgpu_hosts.values()):
        for slot, counts in host.creatable.items():
            if counts and chance.random() < 0.5:
                name = chance.choice(sorted(counts))
                if host.framework is Framework.VENDOR_VFIO:
                    path = HostPath(f"/sys/bus/pci/devices/{slot}/nvidia/current_vgpu_type")
                    ids = {other: type_id for type_id, other in host.type_names.items()}
                    _try(kernel, path, ids[name])
                else:
                    folder = f"/sys/class/mdev_bus/{slot}/mdev_supported_types"
                    type_id = chance.choice(sorted(kernel.listdir(HostPath(folder))))
                    uuid = f"{chance.randrange(1 << 32):08x}-0000-4000-8000-000000000000"
                    _try(kernel, HostPath(f"{folder}/{type_id}/create"), uuid)


def _try(kernel: SimKernel, path: HostPath, text: str) -> None:
    try:
        kernel.write(path, text.encode())
    except OSError:
        return


def misfortune(kernel: SimKernel, chance: random.Random) -> None:
    """Let random faults happen on a host."""
    for address in list(kernel.pci.functions):
        fate = chance.randrange(8)
        if fate == 0:
            kernel.fall_off_bus(address)
        elif fate == 1 and kernel.pci.functions[address].physfn is None and not kernel.pci.functions[address].virtfns:
            kernel.rebind(address, chance.choice(["vfio-pci", "nvidia", None, "pci-stub"]))
    for group in [group.number for group in kernel.vfio.groups.values() if group.vfio_devices]:
        if kernel.vfio.group_nodes and chance.random() < 0.1:
            kernel.delete_node(group)


@given(hosts(), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=examples(40))
def test_any_host_survives_the_round_trip(spec: HostSpec, seed: int) -> None:
    kernel, chance = build_host(spec), random.Random(seed)  # noqa: S311
    apply_vgpus(kernel, chance)
    misfortune(kernel, chance)
    assert_round_trip(kernel)


@given(hosts(), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=examples(30), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_read_failures_are_reported_and_never_stop_an_import(spec: HostSpec, seed: int) -> None:
    kernel, chance = build_host(spec), random.Random(seed)  # noqa: S311
    apply_vgpus(kernel, chance)
    paths = [path for path in copy_host(kernel).members if "/devices/" in path]
    for path in chance.sample(paths, min(len(paths), 3)):
        kernel.faults.fail(path, chance.choice([errno.EIO, errno.EACCES, errno.ENODEV]))
        kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{'/'.join(path.split('/')[-2:])}"), errno.EIO)
    made = imported(kernel)
    then = of_any_boot(scan(ArchivedKernel(opened(kernel))))
    assert made.losses or shown_by(made) == then


def test_vgpu_types_of_an_imported_host_equal_those_of_the_host(simulated: Simulated, tmp_path: Path) -> None:
    made = imported(simulated("4xT4"))
    carries = made.spec.slots[0].carries
    assert carries is not None
    assert carries.types[0] == VgpuTypeSpec(id=230, name="GRID T4-1Q", size="1G", most=16)  # type: ignore[arg-type]
    assert carries.left == {}
    (tmp_path / "host.yaml").write_text(made.text)
    assert load_host(str(tmp_path / "host.yaml")) == made.spec
