"""A job in a partition of an AMD GPU is a user of that GPU, or of each, where the GPU is not known."""

import errno

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.usage.nativeusers import read_native_users
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import DeviceNode, constant
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel

FIRST, SECOND = PciAddress("0000:03:00.0"), PciAddress("0000:83:00.0")
AUDIO = PciAddress("0000:03:00.1")
MAJOR, MINOR = 226, 140


@pytest.fixture
def kernel() -> SimKernel:
    """Return a host with a partition of the first GPU, in which a job runs."""
    kernel = build_host(load_host("2xW7900"))
    kernel.tree.place(
        HostPath(f"/sys/devices/platform/amdgpu_xcp_1/drm/renderD{MINOR}/dev"), constant(f"{MAJOR}:{MINOR}")
    )
    kernel.tree.place(HostPath(f"/dev/dri/renderD{MINOR}"), DeviceNode(MAJOR << 8 | MINOR))
    kernel.start_process("python3", f"/dev/dri/renderD{MINOR}")
    return kernel


def topology(kernel: SimKernel, render_minor: int, location: int, domain: int = 0) -> None:
    """Describe a partition, between properties that are no numbers."""
    properties = f"name gfx942\n\nlocation_id {location}\ndomain {domain}\ndrm_render_minor {render_minor}"
    kernel.tree.place(HostPath("/sys/class/kfd/kfd/topology/nodes/2/properties"), constant(properties))


def users(kernel: SimKernel) -> list[PciAddress]:
    found = read_native_users(kernel, [FIRST, SECOND, AUDIO])
    assert not isinstance(found, Unread)
    return list(found)


def test_the_topology_names_the_gpu_of_a_partition(kernel: SimKernel) -> None:
    topology(kernel, MINOR, 0x1000_0300)
    assert users(kernel) == [FIRST]
    topology(kernel, MINOR, 0x8300)
    assert users(kernel) == [SECOND]
    topology(kernel, MINOR, 0x8300, domain=1)
    assert users(kernel) == [], "a GPU that was not asked for"


def test_each_gpu_of_the_driver_may_have_a_partition_that_the_topology_lacks(kernel: SimKernel) -> None:
    assert users(kernel) == [FIRST, SECOND]
    topology(kernel, MINOR + 1, 0x0300)
    assert users(kernel) == [FIRST, SECOND]
    kernel.rebind(SECOND, None)
    assert users(kernel) == [FIRST]


def test_a_node_of_a_partition_that_is_no_render_node_may_be_any_gpus(kernel: SimKernel) -> None:
    """A processor has a node in the topology, too, which has no minor."""
    kernel.tree.place(
        HostPath("/sys/class/kfd/kfd/topology/nodes/0/properties"), constant("cpu_cores_count 64\nlocation_id 0")
    )
    kernel.tree.place(HostPath("/sys/devices/platform/amdgpu_xcp_1/drm/card9/dev"), constant(f"{MAJOR}:9"))
    kernel.tree.place(HostPath("/dev/dri/card9"), DeviceNode(MAJOR << 8 | 9))
    topology(kernel, MINOR, 0x0300)
    assert users(kernel) == [FIRST]
    kernel.start_process("python3", "/dev/dri/card9")
    assert users(kernel) == [FIRST, SECOND]


def test_the_users_of_a_partition_are_unknown_while_the_driver_of_a_gpu_is_unread(kernel: SimKernel) -> None:
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{SECOND}/driver"), errno.EIO)
    assert isinstance(read_native_users(kernel, [FIRST, SECOND]), Unread)
