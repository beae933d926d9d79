"""Allocate and health agree: a device is refused if and only if it is unhealthy, with the same reason code."""

import errno
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.agent.life.life import A10, AUDIO, HOST, LEFT, RIGHT, RTX, T4
from tests.agent.life.rigs import Conclusions

Fault = Callable[[SimKernel], None]

VF = PciAddress("0000:25:00.4")
L40S = PciAddress("0000:25:00.0")
GROUPS = {LEFT: 12, RIGHT: 12, RTX: 27, A10: 30}

ELSEWHERE: Mapping[ReasonCode, AbstractSet[ReasonCode | None]] = {
    ReasonCode.DRIVER_CHANGED: {ReasonCode.NATIVE_DRIVER, ReasonCode.CARRIES_VGPUS, ReasonCode.NO_VGPUS},
    ReasonCode.DEVICE_GONE: {None},
    ReasonCode.TYPE_CHANGED: {None},
    ReasonCode.IDENTITY_CHANGED: {None},
}
"""The health codes of a device that Allocate refused as changed; None: the device is another device, or absent."""


def attribute(address: PciAddress, name: str, number: int) -> Fault:
    """Return a fault of an attribute, by each of its paths: in the folder of the function, and below its group."""

    def fail(kernel: SimKernel) -> None:
        group = kernel.pci.functions[address].group
        for folder in ("/sys/bus/pci/devices", f"/sys/kernel/iommu_groups/{group}/devices"):
            kernel.faults.fail(HostPath(f"{folder}/{address}/{name}"), number)

    return fail


def unanswered(address: PciAddress, name: str, content: bytes | None = None) -> Fault:
    """Return a fault of an id or the class of a device that does not answer with it itself.

    Allocate does not read these attributes where the device answers with the same ids.
    """

    def fail(kernel: SimKernel) -> None:
        attribute(address, "config", errno.EIO)(kernel)
        if content is None:
            attribute(address, name, errno.EIO)(kernel)
        else:
            kernel.faults.answer(HostPath(f"/sys/bus/pci/devices/{address}/{name}"), content)

    return fail


def rebind(address: PciAddress, driver: str | None) -> Fault:
    return lambda kernel: kernel.rebind(address, driver)


def fall_off_bus(address: PciAddress) -> Fault:
    return lambda kernel: kernel.fall_off_bus(address)


def unplug(address: PciAddress) -> Fault:
    return lambda kernel: kernel.unplug(address)


def lose_node(group: int) -> Fault:
    return lambda kernel: kernel.delete_node(IommuGroup(group))


def start_by_hand(group: int) -> Fault:
    def start(kernel: SimKernel) -> None:
        kernel.start_vm(IommuGroup(group), "qemu-by-hand")

    return start


def lose_container(kernel: SimKernel) -> None:
    kernel.tree.remove(HostPath("/dev/vfio/vfio"))


def mdevs(kernel: SimKernel) -> list[str]:
    return sorted(kernel.tree.folder(HostPath("/sys/bus/mdev/devices")).entries)


def remove_mdev(kernel: SimKernel) -> None:
    kernel.write(HostPath(f"/sys/bus/mdev/devices/{mdevs(kernel)[0]}/remove"), b"1")


def hide_type(kernel: SimKernel) -> None:
    kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{mdevs(kernel)[0]}/mdev_type/name"), errno.EIO)


def take_type(kernel: SimKernel) -> None:
    kernel.write(HostPath(f"/sys/bus/pci/devices/{VF}/nvidia/current_vgpu_type"), b"0")


IDENTITY = ["vendor", "device", "class"]
ATTRIBUTES = ["driver", "iommu_group", "config", "numa_node"]
WHOLE = st.sampled_from([LEFT, RIGHT, RTX, A10])
FAULTS = st.one_of(
    st.builds(attribute, st.sampled_from([LEFT, RIGHT, RTX, A10, T4]), st.sampled_from(ATTRIBUTES), st.just(errno.EIO)),
    st.builds(unanswered, WHOLE, st.sampled_from(IDENTITY), st.sampled_from([None, b"", b"0x", b"\xff\xff"])),
    st.builds(rebind, st.sampled_from([LEFT, RTX, A10]), st.sampled_from(["nvidia", None])),
    st.builds(rebind, st.just(AUDIO), st.sampled_from(["snd_hda_intel", None])),
    st.builds(fall_off_bus, st.sampled_from([LEFT, RTX, A10, T4])),
    st.builds(unplug, WHOLE),
    st.builds(lose_node, st.sampled_from([12, 27, 30])),
    st.builds(start_by_hand, st.sampled_from([12, 27, 30])),
    st.sampled_from([lose_container, remove_mdev, hide_type]),
)
VF_FAULTS = st.one_of(
    st.builds(attribute, st.sampled_from([VF, L40S]), st.sampled_from(ATTRIBUTES), st.just(errno.EIO)),
    st.builds(unanswered, st.sampled_from([VF, L40S]), st.sampled_from(IDENTITY)),
    st.builds(fall_off_bus, st.sampled_from([VF, L40S])),
    st.just(take_type),
    st.just(attribute(VF, "nvidia/current_vgpu_type", errno.EIO)),
)


def check(kernel: SimKernel, fault: Fault, pick: int) -> None:
    """Break the host, allocate a device of the last snapshot, and compare the refusal with its health in the next."""
    rig = Conclusions(kernel)
    rig.report_account({})
    offered = [
        (resource.name, device.id) for resource in rig.view.resources for device in resource.devices if device.healthy
    ]
    resource, device = offered[pick % len(offered)]
    fault(kernel)
    refused: ReasonCode | None = None
    try:
        rig.allocate(resource, [device])
    except AllocationRefusedError as error:
        refused = error.reason.code
    for _ in range(3):
        rig.look()
        rig.pass_time(15)
    rig.look()
    compare(rig, resource, device, refused)


def compare(rig: Conclusions, resource: ResourceName, device: DeviceId, refused: ReasonCode | None) -> None:
    listed = {resource.name: {found.id: found for found in resource.devices} for resource in rig.view.resources}
    found = listed[resource].get(device)
    if found is not None:
        assert refused == (found.reasons[0].code if found.reasons else None)
        return
    why = {str(gpu.address): gpu.reasons for gpu in (*rig.view.gpus, *rig.view.functions)}
    why |= {str(vgpu.id): vgpu.reasons for gpu in rig.view.gpus for vgpu in gpu.vgpus}
    elsewhere = any(device in devices for devices in listed.values())
    codes: set[ReasonCode | None] = {reason.code for reason in why.get(device, ()) if not elsewhere}
    assert refused is not None
    assert refused in codes or (codes or {None}) & ELSEWHERE.get(refused, set())


@given(FAULTS, st.integers(0, 6))
@example(attribute(LEFT, "driver", errno.EIO), 4)
def test_allocate_refuses_a_device_if_and_only_if_it_is_unhealthy(fault: Fault, pick: int) -> None:
    check(build_host(HOST), fault, pick)


@given(VF_FAULTS)
def test_allocate_refuses_exactly_the_unhealthy_vgpus_on_vfs(fault: Fault) -> None:
    kernel = build_host(load_host("4xL40S"))
    names = Conclusions(kernel).view.resources
    devices = [device.id for name in names for device in name.devices]
    check(kernel, fault, devices.index(DeviceId(VF)))


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_allocate_refuses_a_faulty_device_without_debouncing(seconds: float) -> None:
    kernel = build_host(HOST)
    rig = Conclusions(kernel)
    rig.report_account({})
    kernel.fall_off_bus(A10)
    rig.pass_time(seconds)
    rig.look()
    resource = next(
        resource for resource in rig.view.resources if DeviceId(A10) in {device.id for device in resource.devices}
    )
    assert all(device.healthy for device in resource.devices), "a device under reset reads the same for a moment"
    with pytest.raises(AllocationRefusedError, match="FellOffBus"):
        rig.allocate(resource.name, [DeviceId(A10)])
