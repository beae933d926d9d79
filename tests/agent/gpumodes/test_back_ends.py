"""Back ends that no available kernel can prove: VFs with vGPU types, and VFs that split a GPU."""

import errno

import pytest
from msgspec.structs import replace

from gpuvirt.errors import VgpuUnavailableError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost, host_of_vfs
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.vgpu.registry import BACKENDS, backend_of
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.contract.proofs import disable_vfs, enable_vfs, remove
from tests.sim.simulated import Simulated

L40S, VF, OTHER_VF = PciAddress("0000:da:00.0"), PciAddress("0000:da:00.4"), PciAddress("0000:da:00.5")
FLEX, SPLIT = PciAddress("0000:b3:00.0"), PciAddress("0000:4d:00.0")
TYPE, OTHER = VgpuType("NVIDIA L40S-12Q"), VgpuType("NVIDIA L40S-48Q")
VENDOR, SRIOV_VF = backend_of(Framework.VENDOR_VFIO), backend_of(Framework.SRIOV_VF)


def test_every_framework_has_a_back_end() -> None:
    assert {backend.framework for backend in BACKENDS} == set(Framework)


@pytest.fixture
def l40s(simulated: Simulated) -> SimKernel:
    return simulated("4xL40S")


def host(kernel: SimKernel, before: VgpuHost | None = None, *, brief: bool = False) -> VgpuHost:
    facts = scan(kernel)
    probe = VENDOR.probe(kernel, facts.functions, {L40S: before} if before else {}, brief=brief)
    return probe.hosts[L40S]  # type: ignore[union-attr]


def test_a_vgpu_is_created_on_a_vf_by_its_type_name_and_removed(l40s: SimKernel) -> None:
    VENDOR.create(l40s, VF, TYPE, VgpuId(VF))
    (live,) = host(l40s).live
    assert live == LiveVgpu(VgpuId(VF), TYPE, VF, scan(l40s).functions[VF].iommu_group, "1156")
    assert l40s.writes == [(HostPath(f"/sys/bus/pci/devices/{VF}/nvidia/current_vgpu_type"), b"1156")]
    remove(VENDOR, l40s, live)
    assert host(l40s).live == ()
    with pytest.raises(VgpuUnavailableError, match="contains 0; expected 1156"):
        remove(VENDOR, l40s, live)


def unavailable(kernel: SimKernel, parent: PciAddress, type_: VgpuType, vgpu: str) -> str:
    kernel.writes.clear()
    with pytest.raises(VgpuUnavailableError) as refused:
        VENDOR.create(kernel, parent, type_, VgpuId(vgpu))
    assert kernel.writes == [], "the back end writes no value that the driver would refuse"
    return str(refused.value)


def test_an_unavailable_vgpu_is_reported_with_the_available_types(l40s: SimKernel) -> None:
    VENDOR.create(l40s, VF, TYPE, VgpuId(VF))
    assert "da:00.4/nvidia/current_vgpu_type contains 1156" in unavailable(l40s, VF, TYPE, VF)
    assert "lists NVIDIA L40S-12Q" in unavailable(l40s, OTHER_VF, OTHER, OTHER_VF), "sizes don't mix"
    assert f"found {VF}" in unavailable(l40s, OTHER_VF, TYPE, VF)
    gpu = f"/sys/bus/pci/devices/{L40S}/nvidia/current_vgpu_type does not exist"
    assert gpu in unavailable(l40s, L40S, TYPE, L40S)
    l40s.faults.fail(HostPath(f"/sys/bus/pci/devices/{OTHER_VF}/nvidia/creatable_vgpu_types"), errno.EIO)
    assert "EIO" in unavailable(l40s, OTHER_VF, TYPE, OTHER_VF)
    l40s.faults.fail(HostPath(f"/sys/bus/pci/devices/{OTHER_VF}/nvidia/creatable_vgpu_types"), errno.ENOENT)
    assert "does not exist" in unavailable(l40s, OTHER_VF, TYPE, OTHER_VF)


def test_a_stale_vgpu_is_not_removed_from_a_vf_with_another_type(l40s: SimKernel) -> None:
    VENDOR.create(l40s, VF, TYPE, VgpuId(VF))
    (live,) = host(l40s).live
    remove(VENDOR, l40s, live)
    VENDOR.create(l40s, VF, OTHER, VgpuId(VF))
    with pytest.raises(VgpuUnavailableError, match="contains 1159; expected 1156"):
        remove(VENDOR, l40s, live)
    with pytest.raises(VgpuUnavailableError, match="contains 1159; expected a known type"):
        remove(VENDOR, l40s, replace(live, type_id=None))
    assert [vgpu.type_id for vgpu in host(l40s).live] == ["1159"]


def test_a_vgpu_in_use_is_not_removed(l40s: SimKernel) -> None:
    VENDOR.create(l40s, VF, TYPE, VgpuId(VF))
    (live,) = host(l40s).live
    assert isinstance(live.group, int)
    l40s.start_vm(live.group)
    with pytest.raises(OSError, match="busy") as refused:
        remove(VENDOR, l40s, live)
    assert refused.value.errno == errno.EBUSY
    assert l40s.vfio.requests == []


def test_a_vf_that_refuses_a_type_is_quarantined_until_it_accepts_a_type_or_is_removed(l40s: SimKernel) -> None:
    l40s.vendor_vfio.refusing.add(VF)
    with pytest.raises(OSError, match="Input/output") as refused:
        VENDOR.create(l40s, VF, TYPE, VgpuId(VF))
    seen = host(l40s)
    assert seen.creatable[VF], "a VF that refuses still offers types"
    seen = seen.with_refusal(VF, str(refused.value.strerror))
    for brief in (True, False):
        seen = host(l40s, seen, brief=brief)
        assert seen.quarantined == {VF: "Input/output error"}
        assert (seen.creatable[VF], bool(seen.creatable[OTHER_VF])) == ({}, True)
    l40s.vendor_vfio.refusing.clear()
    VENDOR.create(l40s, VF, TYPE, VgpuId(VF))
    assert host(l40s, seen).quarantined == {}


def test_vfs_accept_types_again_after_they_were_disabled_and_enabled(l40s: SimKernel) -> None:
    l40s.vendor_vfio.refusing.add(VF)
    tools = SimTools(l40s)
    disable_vfs(l40s, tools, L40S)
    assert scan(l40s).functions[L40S].virtfns == ()
    enable_vfs(l40s, tools, L40S)
    assert len(host(l40s).creatable) == 32
    VENDOR.create(l40s, VF, TYPE, VgpuId(VF))


# --- VFs that split a GPU


@pytest.fixture
def flex(simulated: Simulated) -> SimKernel:
    return simulated("2xFlex170")


def report(kernel: SimKernel, gpu: PciAddress) -> VgpuHost:
    found = host_of_vfs(scan(kernel).functions[gpu])
    assert found is not None
    return found


def test_a_gpu_is_split_into_vfs_and_restored(flex: SimKernel) -> None:
    offered = report(flex, FLEX).creatable[FLEX]
    assert (len(offered), min(offered), set(offered.values())) == (31, "1 VF", {1})
    SRIOV_VF.create(flex, FLEX, VgpuType("8 VFs"), VgpuId(FLEX))
    after = report(flex, FLEX)
    assert len(scan(flex).functions[FLEX].virtfns) == 8
    assert (after.creatable, after.live[0].type) == ({FLEX: {}}, "8 VFs")
    with pytest.raises(OSError, match="busy"):
        SRIOV_VF.create(flex, FLEX, VgpuType("4 VFs"), VgpuId(FLEX))
    remove(SRIOV_VF, flex, after.live[0])
    assert report(flex, FLEX).live == ()


def test_vfs_are_not_removed_if_their_number_has_changed(flex: SimKernel) -> None:
    (live,) = report(flex, SPLIT).live
    assert live.type == "4 VFs"
    stale = LiveVgpu(live.id, VgpuType("2 VFs"), live.parent, live.group)
    with pytest.raises(VgpuUnavailableError, match="has 4 VFs; expected 2 VFs"):
        remove(SRIOV_VF, flex, stale)
    gone = LiveVgpu(VgpuId(FLEX), VgpuType("1 VF"), FLEX, live.group)
    with pytest.raises(VgpuUnavailableError, match="has no VFs; expected 1 VF"):
        remove(SRIOV_VF, flex, gone)
    assert flex.writes == []


@pytest.mark.parametrize("type_", ["32 VFs", "0 VFs", "4", "NVIDIA L40S-12Q"])
def test_a_gpu_is_not_split_into_an_invalid_number_of_vfs(flex: SimKernel, type_: str) -> None:
    with pytest.raises(VgpuUnavailableError, match="expected 1 VF to 31 VFs"):
        SRIOV_VF.create(flex, FLEX, VgpuType(type_), VgpuId(FLEX))
    assert flex.writes == []


def test_a_set_of_vfs_needs_the_id_of_its_gpu_and_sriov(flex: SimKernel) -> None:
    with pytest.raises(VgpuUnavailableError, match=f"has its address as its id; found {SPLIT}"):
        SRIOV_VF.create(flex, FLEX, VgpuType("8 VFs"), VgpuId(SPLIT))
    vf = scan(flex).functions[SPLIT].virtfns[0]
    with pytest.raises(VgpuUnavailableError, match="has no SR-IOV: sriov_totalvfs: missing"):
        SRIOV_VF.create(flex, vf, VgpuType("8 VFs"), VgpuId(vf))
    assert flex.writes == []


def test_vfs_are_not_removed_while_their_number_is_unread(flex: SimKernel) -> None:
    (live,) = report(flex, SPLIT).live
    flex.faults.fail(HostPath(f"/sys/bus/pci/devices/{SPLIT}"), errno.EIO)
    with pytest.raises(VgpuUnavailableError, match="EIO"):
        remove(SRIOV_VF, flex, live)
    assert flex.writes == []


def test_a_scan_does_not_report_vfs_that_split_a_gpu_as_vgpus(flex: SimKernel, simulated: Simulated) -> None:
    facts = scan(flex)
    assert facts.vgpu_hosts == {}
    assert build_inventory(facts).vgpus == {}
    probe = SRIOV_VF.probe(flex, facts.functions, {}, brief=False)
    assert sorted(probe.hosts) == [SPLIT, FLEX]  # type: ignore[union-attr]
    nvidias = scan(simulated("4xL40S")).functions.values()
    assert not any(host_of_vfs(function) for function in nvidias)
    on_vfio = scan(simulated("8xMI300X")).functions.values()
    assert not any(host_of_vfs(function) for function in on_vfio), "a VM may have the GPU"
