"""The facts of a scan of a host, and the reports of malformed hosts."""

import errno

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId
from gpuvirt.facts.pci import FunctionKind, Unread
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.scan import scan, scan_some, with_device_ids, with_users
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import Mode, build_inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.offermaking import OfferInputs, make_offers
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import Link, constant
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, host_names
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import IDS
from tests.sim.simulated import Simulated

GPU, T4 = PciAddress("0000:65:00.0"), PciAddress("0000:3b:00.0")
FOLDER = f"/sys/bus/pci/devices/{GPU}"


def test_all_attributes_of_a_gpu_are_read(simulated: Simulated) -> None:
    facts = scan(simulated("2xA10"))
    function = facts.functions[GPU]
    assert function.id == PciId(0x10DE, 0x2236)
    assert function.subsystem == PciId(0x10DE, 0x1482)
    assert (function.class_code, function.revision, function.kind) == (0x030200, 0xA1, FunctionKind.GPU)
    assert (function.driver, function.iommu_group, function.numa_node) == ("vfio-pci", 12, 0)
    assert (function.sriov_total_vfs, function.virtfns, function.physfn) == (32, (), None)
    assert function.unread == ()
    assert facts.group_nodes == {12, 22}
    assert facts.platform.vfio_container
    assert not facts.platform.iommufd
    assert facts.malformed_entries == ()
    assert facts.unread == ()


def test_the_functions_of_a_card_are_siblings(simulated: Simulated) -> None:
    facts = scan(simulated("4xRTX2060"))
    inventory = build_inventory(facts)
    gpu = inventory.gpus[PciAddress("0000:04:00.0")]
    assert gpu.siblings == ("0000:04:00.1", "0000:04:00.2", "0000:04:00.3")
    kinds = [facts.functions[address].kind for address in gpu.siblings]
    assert kinds == [FunctionKind.AUDIO, FunctionKind.USB, FunctionKind.SERIAL]
    assert len(inventory.units) == 4


def test_vfs_and_mdevs_belong_to_their_gpu(simulated: Simulated) -> None:
    facts = scan(simulated("8xA100"))
    host = facts.vgpu_hosts[PciAddress("0000:07:00.0")]
    assert host.framework is Framework.MDEV
    assert (len(host.creatable), len(host.live)) == (20, 4)
    assert facts.functions[host.live[0].parent].physfn == "0000:07:00.0"
    mig = facts.vgpu_hosts[PciAddress("0000:bd:00.0")]
    assert [live.type for live in mig.live] == ["NVIDIA A100DX-1-10C"] * 2
    inventory = build_inventory(facts)
    assert [gpu.mode for gpu in inventory.gpus.values()].count(Mode.PASSTHROUGH) == 3
    assert len(inventory.gpus) == 8, "VFs don't count as GPUs"
    assert sum(function.kind is FunctionKind.NVSWITCH for function in facts.functions.values()) == 6


def test_vgpus_on_vfs_are_found_with_their_types(simulated: Simulated) -> None:
    facts = scan(simulated("8xH100"))
    host = facts.vgpu_hosts[PciAddress("0000:9d:00.0")]
    assert host.framework is Framework.VENDOR_VFIO
    assert [(live.id, live.type, live.type_id) for live in host.live] == [
        ("0000:9d:00.4", "NVIDIA H100XM-40C", "1136"),
        ("0000:9d:00.5", "NVIDIA H100XM-40C", "1136"),
    ]
    assert facts.platform.iommufd
    assert "vfio0" in facts.cdev_nodes


def test_a_vm_that_uses_a_gpu_is_found_by_device_number(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    process = kernel.start_vm(IommuGroup(12))
    kernel.tree.place(HostPath(f"/proc/{process.pid}/fd/23"), Link("/dev/vfio/in-a-container/12"))
    kernel.tree.place(HostPath("/dev/vfio/in-a-container/12"), kernel.tree.find(HostPath("/dev/vfio/12")))
    facts = with_users(kernel, scan(kernel))
    assert facts.users is not None
    assert [(user.pid, user.command) for user in facts.users[IommuGroup(12)]] == [(process.pid, "qemu-system-x86")]


def test_users_are_unknown_where_processes_are_not_visible(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.faults.fail(HostPath("/proc"), errno.EACCES)
    assert with_users(kernel, scan(kernel)).users is None


@pytest.mark.parametrize("name", host_names())
@pytest.mark.parametrize("brief", [False, True])
def test_a_scan_never_reads_attributes_that_may_block(simulated: Simulated, name: str, brief: bool) -> None:
    kernel = simulated(name)
    scan(kernel, scan(kernel), brief=brief)
    with_users(kernel, scan(kernel))
    assert not [path for path in kernel.reads if path.endswith(("/driver_override", "/uevent", "/reset"))]
    assert kernel.writes == []


# Malformed hosts: the scan reports the malformed entry, and reads the others.


def test_a_device_that_disappears_during_a_scan_is_reported(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.faults.before_read(HostPath(f"{FOLDER}/device"), lambda: kernel.unplug(GPU))
    facts = scan(kernel)
    assert GPU not in facts.functions
    assert len(facts.functions) == 6
    assert [malformed.path for malformed in facts.malformed_entries] == [FOLDER]


VGPU = PciAddress("0000:25:00.4")
CURRENT_TYPE = HostPath(f"/sys/bus/pci/devices/{VGPU}/nvidia/current_vgpu_type")


def without_a_vgpu(kernel: SimKernel) -> bytes:
    """Remove the vGPU of a VF; return the type id that creates it again."""
    type_id = kernel.read(CURRENT_TYPE)
    kernel.write(CURRENT_TYPE, b"0")
    return type_id


def test_a_vgpu_created_during_a_scan_has_its_node(simulated: Simulated) -> None:
    kernel = simulated("4xL40S")
    type_id = without_a_vgpu(kernel)
    kernel.faults.before_read(CURRENT_TYPE, lambda: kernel.write(CURRENT_TYPE, type_id))
    facts = scan(kernel)
    assert VGPU in [vgpu.parent for host in facts.vgpu_hosts.values() for vgpu in host.live]
    assert facts == scan(kernel)
    assert len(facts.functions[VGPU].cdevs) == 1
    assert facts.cdev_nodes >= {*facts.functions[VGPU].cdevs}


def test_a_function_bound_during_a_scan_has_its_node() -> None:
    slot = SlotSpec(at=GPU, board="A10", driver="nvidia", group=12)
    kernel = build_host(HostSpec(about="a GPU with a driver for containers", iommufd=True, slots=(slot,)))
    kernel.faults.before_read(HostPath(f"{FOLDER}/driver"), lambda: kernel.rebind(GPU, "vfio-pci"))
    function = scan(kernel).functions[GPU]
    assert (function.driver, function.cdevs) == ("vfio-pci", ("vfio0",))
    assert function == scan(kernel).functions[GPU]


def test_a_brief_scan_finds_the_node_of_a_new_vgpu(simulated: Simulated) -> None:
    kernel = simulated("4xL40S")
    type_id = without_a_vgpu(kernel)
    before = scan(kernel)
    kernel.write(CURRENT_TYPE, type_id)
    facts = scan(kernel, before, brief=True)
    assert facts.functions[VGPU] == scan(kernel).functions[VGPU]


def test_a_brief_scan_finds_that_a_vgpu_has_lost_its_node(simulated: Simulated) -> None:
    kernel = simulated("4xL40S")
    before = scan(kernel)
    assert before.functions[VGPU].cdevs
    without_a_vgpu(kernel)
    facts = scan(kernel, before, brief=True)
    assert facts.functions[VGPU] == scan(kernel).functions[VGPU]


def test_a_vgpu_with_an_unreadable_node_keeps_its_node_and_is_unread(simulated: Simulated) -> None:
    kernel = simulated("4xL40S")
    before = scan(kernel)
    folder = HostPath(f"/sys/bus/pci/devices/{VGPU}/vfio-dev")
    kernel.faults.fail(folder, errno.EIO)
    for brief in (False, True):
        function = scan(kernel, before, brief=brief).functions[VGPU]
        assert (function.cdevs, function.unread) == (before.functions[VGPU].cdevs, (Unread(folder, errno=errno.EIO),))


@pytest.mark.parametrize("entry", ["hello", "0000:65:00", "not a device", "0000:65:00.8"])
def test_an_entry_that_is_no_pci_address_is_reported(simulated: Simulated, entry: str) -> None:
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath(f"/sys/bus/pci/devices/{entry}"), constant("x"))
    facts = scan(kernel)
    assert len(facts.functions) == 7
    assert [malformed.path for malformed in facts.malformed_entries] == [f"/sys/bus/pci/devices/{entry}"]


def test_a_dangling_entry_is_reported(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath("/sys/bus/pci/devices/0000:99:00.0"), Link("../../../devices/gone"))
    facts = scan(kernel)
    assert len(facts.functions) == 7
    assert [malformed.path for malformed in facts.malformed_entries] == ["/sys/bus/pci/devices/0000:99:00.0"]


def test_a_five_digit_domain_is_read_and_not_offered() -> None:
    spec = HostSpec(
        about="a GPU behind VMD", slots=(SlotSpec(at="10000:01:00.0", board="A10", driver="vfio-pci", group=1),)
    )
    inventory = build_inventory(scan(build_host(spec)))
    assert PciAddress("10000:01:00.0") in inventory.gpus
    inputs = OfferInputs(Naming(IDS), Settings(), entries=(), resources=frozenset(), allocations_known=True, now_s=0.0)
    offers = make_offers(inventory, inputs, Offers())
    assert offers.by_resource == {}
    assert offers.withheld["10000:01:00.0"].code is ReasonCode.ADDRESS_NOT_ACCEPTED


@pytest.mark.parametrize("attribute", ["vendor", "device", "class"])
def test_a_function_with_invalid_content_is_a_malformed_entry(simulated: Simulated, attribute: str) -> None:
    kernel = simulated("2xA10")
    kernel.faults.answer(HostPath(f"{FOLDER}/{attribute}"), b"0x")
    facts = scan(kernel)
    assert GPU not in facts.functions
    assert [malformed.path for malformed in facts.malformed_entries] == [f"{FOLDER}/{attribute}"]


def test_an_unreadable_iommu_group_is_unread_and_not_absent(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.faults.fail(HostPath(f"{FOLDER}/iommu_group"), errno.EIO)
    function = scan(kernel).functions[GPU]
    assert function.iommu_group == Unread(HostPath(f"{FOLDER}/iommu_group"), errno=errno.EIO)
    assert function.iommu_group in function.unread


def test_a_malformed_iommu_group_link_is_unread(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath(f"{kernel.pci.functions[GPU].folder}/iommu_group"), Link("../../kernel/iommu_groups/x"))
    assert isinstance(scan(kernel).functions[GPU].iommu_group, Unread)


@pytest.mark.parametrize("content", [b"", b"\n", b"0000:65:00", b"hello world", b"\xff"])
def test_an_egm_region_with_invalid_content_is_left_out(simulated: Simulated, content: bytes) -> None:
    kernel = simulated("2xGH200")
    kernel.faults.answer(HostPath("/sys/class/egm/egm0/gpu_devices"), content)
    assert [region.node for region in scan(kernel).platform.egm] == ["/dev/egm1"]


def test_an_egm_region_without_a_node_is_left_out_and_reported(simulated: Simulated) -> None:
    kernel = simulated("2xGH200")
    kernel.tree.remove(HostPath("/dev/egm0"))
    facts = scan(kernel)
    assert [region.node for region in facts.platform.egm] == ["/dev/egm1"]
    assert [unread.path for unread in facts.unread] == ["/dev/egm0"]


def test_a_thousand_functions_are_scanned() -> None:
    slots = tuple(
        SlotSpec(at=f"{domain:04x}:{bus:02x}:00.0", board="A10", driver="vfio-pci", group=domain * 256 + bus)
        for domain in range(4)
        for bus in range(256)
    )
    facts = scan(build_host(HostSpec(about="1,024 GPUs", slots=slots)))
    assert len(facts.functions) == 1024
    assert len(build_inventory(facts).units) == 1024


def test_a_brief_scan_copies_other_functions_and_reads_gpus_and_new_functions(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    before = scan(kernel)
    kernel.reads.clear()
    kernel.unplug(PciAddress("0000:18:00.0"))
    kernel.rebind(GPU, "nvidia")
    after = scan(kernel, before, brief=True)
    assert PciAddress("0000:18:00.0") not in after.functions
    assert after.functions[GPU].driver == "nvidia"
    assert after.functions[PciAddress("0000:17:00.0")] is before.functions[PciAddress("0000:17:00.0")]
    assert HostPath("/sys/bus/pci/devices/0000:17:00.0/vendor") not in kernel.reads
    kernel.plug_in(PciAddress("0000:18:00.0"))
    assert PciAddress("0000:18:00.0") in scan(kernel, after, brief=True).functions


PF, OTHER_PF = PciAddress("0000:07:00.0"), PciAddress("0000:0f:00.0")


@pytest.mark.parametrize("name", ["8xA100", "8xH100", "4xT4", "2xFlex170"])
def test_a_scan_of_some_functions_equals_a_whole_scan(simulated: Simulated, name: str) -> None:
    kernel = simulated(name)
    before = scan(kernel)
    for members in build_inventory(before).units.values():
        assert scan_some(kernel, members, before) == before


def test_a_scan_of_some_functions_reads_only_these_and_new_functions(simulated: Simulated) -> None:
    kernel = simulated("8xA100")
    before = scan(kernel)
    vf, late, unread = (before.functions[PF].virtfns[number] for number in (0, 1, 2))
    others_vf = before.functions[OTHER_PF].virtfns[0]
    for address in (vf, others_vf):
        kernel.rebind(address, "vfio-pci")
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{unread}/vendor"), errno.EIO)
    seen_late = replace(
        before, functions={address: function for address, function in before.functions.items() if address != late}
    )
    kernel.reads.clear()
    unit = next(members for members in build_inventory(before).units.values() if PF in members)
    after = scan_some(kernel, unit, seen_late)
    assert after.functions[vf].driver == "vfio-pci"
    assert after.functions[late] == before.functions[late]
    assert unread not in after.functions, "an unreadable function is not copied from the last scan"
    assert after.functions[others_vf] == before.functions[others_vf]
    assert f"/sys/bus/pci/devices/{vf}/vendor" in kernel.reads
    assert f"/sys/bus/pci/devices/{others_vf}/vendor" not in kernel.reads


@pytest.mark.parametrize("name", ["virtfn\u00b2", "virtfn\u0663", "virtfn"])
def test_a_link_that_names_no_vf_is_ignored(simulated: Simulated, name: str) -> None:
    """The archive of a host is untrusted input: Python's `isdigit` accepts characters that `int` refuses."""
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath(f"{kernel.pci.functions[GPU].folder}/{name}"), Link("../0000:65:00.4"))
    assert scan(kernel).functions[GPU].virtfns == ()


@pytest.mark.parametrize("of_a_change", [False, True])
def test_a_scan_names_no_gpu_that_has_been_unplugged(simulated: Simulated, of_a_change: bool) -> None:
    """A brief scan reads no ids of drivers; those of the scan before may name a GPU that has left since."""
    kernel = simulated("4xT4")
    before = with_device_ids(kernel, scan(kernel))
    kernel.unplug(T4)
    after = scan_some(kernel, {T4}, before) if of_a_change else scan(kernel, before, brief=True)
    assert after.device_ids == with_device_ids(kernel, after).device_ids
    assert T4 in before.device_ids.information.keys() - after.device_ids.information.keys()
