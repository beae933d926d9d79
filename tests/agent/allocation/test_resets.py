"""A passthrough GPU that can't be reset is allocated to only one pod per boot of the host."""

import errno
from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import ResetScope
from gpuvirt.hardware.scan import scan
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.resets import Reset, reset_of
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, host_names
from gpuvirt_sim.kernel import SimKernel
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
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated


async def test_a_gpu_without_a_reset_goes_to_one_pod_alone(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(without_reset(simulated("2xA10")), tmp_path) as node:
        assert node.offered == {A10: {FIRST: True, SECOND: True}}
        await allocate_and_end(node, A10, FIRST)
        await allocate_and_end(node, A10, SECOND)
        assert node.offered == {A10: {FIRST: False, SECOND: True}}
        (reason,) = node.gpu(FIRST).reasons
        assert reason.code is ReasonCode.NO_RESET
        assert "pod default/vm-a has used it since the host booted" in reason.message
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
        assert node.allocate(A10, [SECOND])


async def test_a_gpu_without_a_reset_stays_healthy_for_its_pod(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(without_reset(simulated("2xA10")), tmp_path) as node:
        node.allocate(A10, [FIRST])
        node.hold(A10, FIRST)
        await report_account(node)
        assert node.offered == {A10: {FIRST: True, SECOND: True}}


async def test_another_pod_is_refused_before_the_agent_has_observed_that_the_first_ended(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(without_reset(simulated("2xA10")), tmp_path) as node:
        node.allocate(A10, [FIRST])
        node.hold(A10, FIRST)
        await report_account(node)
        node.free(FIRST)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET


async def test_a_pods_init_container_and_its_other_container_are_one_pod(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(without_reset(simulated("2xA10")), tmp_path) as node:
        node.allocate(A10, [FIRST])
        node.write(A10, FIRST, uid="uid-of-vm-a", container="init")
        assert node.allocate(A10, [FIRST])


async def test_a_gpu_without_a_reset_stays_withheld_after_a_restart_of_the_agent_but_not_of_the_host(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        await allocate_and_end(node, A10, FIRST)
    async with running_node(kernel, tmp_path) as node:
        assert node.offered == {A10: {FIRST: False, SECOND: True}}
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET
    kernel.reboot_id()
    async with running_node(kernel, tmp_path) as node:
        assert node.offered == {A10: {FIRST: True, SECOND: True}}
        assert node.allocate(A10, [FIRST])


@pytest.mark.parametrize("named", [False, True])
async def test_a_pod_from_before_a_reboot_counts_if_the_kubelet_still_lists_it(
    simulated: Simulated, tmp_path: Path, named: bool
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path) as node:
        node.allocate(A10, [FIRST])
        node.hold(A10, FIRST)
        await report_account(node)
    kernel.reboot_id()
    async with running_node(kernel, tmp_path) as node:
        if named:
            node.hold(A10, FIRST)
            await report_account(node)
            node.free(FIRST)
        await report_account(node)
        assert node.offered == {A10: {FIRST: not named, SECOND: True}}


async def test_a_gpu_is_offered_again_when_its_reset_method_returns(simulated: Simulated, tmp_path: Path) -> None:
    kernel = without_reset(simulated("2xA10"))
    path = HostPath(f"{kernel.pci.functions[FIRST].folder}/reset_method")
    async with running_node(kernel, tmp_path) as node:
        await allocate_and_end(node, A10, FIRST)
        assert node.offered == {A10: {FIRST: False, SECOND: True}}
        kernel.tree.place(path, constant("flr\n"))
        await node.advance(SETTLED_S)
        assert node.offered == {A10: {FIRST: True, SECOND: True}}
        kernel.tree.remove(path)
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET


async def test_a_gpu_without_a_reset_is_allocated_if_the_settings_require_no_reset(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = without_reset(simulated("2xA10"))
    async with running_node(kernel, tmp_path, Settings(require_reset=False)) as node:
        await allocate_and_end(node, A10, FIRST)
        assert node.offered == {A10: {FIRST: True, SECOND: True}}
        await allocate_and_end(node, A10, FIRST, pod="vm-b")
    async with running_node(kernel, tmp_path) as node:
        (reason,) = node.gpu(FIRST).reasons
        assert "pod default/vm-b" in reason.message


@pytest.mark.parametrize("path", [methods_of(FIRST), HostPath(f"/sys/bus/pci/devices/{FIRST}/reset")])
async def test_a_gpu_whose_reset_method_cant_be_read_is_withheld_as_one_without(
    simulated: Simulated, tmp_path: Path, path: HostPath
) -> None:
    kernel = without_reset(simulated("2xA10"))
    kernel.faults.fail(path, errno.EIO)
    async with running_node(kernel, tmp_path) as node:
        await allocate_and_end(node, A10, FIRST)
        assert node.offered == {A10: {FIRST: False, SECOND: True}}
        (reason,) = node.gpu(FIRST).reasons
        assert reason.code is ReasonCode.NO_RESET
        assert "may have no reset method" in reason.message
        assert node.refused(A10, [FIRST]) is ReasonCode.NO_RESET


async def test_vgpus_are_allocated_again_without_a_reset_of_their_gpu(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xL40S")
    for address in list(kernel.pci.functions):
        without_reset(kernel, address)
    async with running_node(kernel, tmp_path) as node:
        name = "nvidia.com/NVIDIA_L40S-12Q"
        await allocate_and_end(node, name, "0000:25:00.4")
        assert node.offered[name]["0000:25:00.4"]
        assert node.allocate(name, ["0000:25:00.4"])


# Which functions the kernel can reset, and by which scope.

BRIDGE, GPU, AUDIO = map(PciAddress, ("0000:00:01.0", "0000:01:00.0", "0000:01:00.1"))


def behind_a_bridge(driver: str = "vfio-pci") -> SimKernel:
    slots = (
        SlotSpec(at=BRIDGE, board="pcie-pci-bridge", group=1),
        SlotSpec(at=GPU, board="RTX2060", driver=driver, group=2, behind=BRIDGE),
    )
    kernel = build_host(HostSpec(about="a GPU behind a bridge", slots=slots))
    for address in (address for address in list(kernel.pci.functions) if address != BRIDGE):
        without_reset(kernel, address)
    return kernel


def now_reset(kernel: SimKernel, address: PciAddress) -> Reset:
    return reset_of(scan(kernel).functions, address)


def test_a_gpu_is_reset_with_its_bus_if_vfio_drives_the_whole_bus() -> None:
    kernel = behind_a_bridge()
    assert scan(kernel).functions[GPU].reset is ResetScope.SHARED_BUS
    assert now_reset(kernel, GPU) is Reset.POSSIBLE
    kernel.rebind(AUDIO, "snd_hda_intel")
    assert now_reset(kernel, GPU) is Reset.IMPOSSIBLE


def test_a_gpu_alone_on_its_bus_is_reset_with_the_bus_only_if_its_own_methods_are_disabled(
    simulated: Simulated,
) -> None:
    """The kernel lists the method `bus` for such a function unless its bus can't be reset."""
    kernel = simulated("2xA10")
    path = HostPath(f"{kernel.pci.functions[FIRST].folder}/reset_method")
    kernel.tree.place(path, constant(""))
    assert now_reset(kernel, FIRST) is Reset.POSSIBLE
    without_reset(kernel)
    assert now_reset(kernel, FIRST) is Reset.IMPOSSIBLE


@pytest.mark.parametrize("disabled", [False, True])
def test_a_gpu_on_a_root_bus_has_no_bus_reset(disabled: bool) -> None:
    slot = SlotSpec(at=GPU, board="RTX2060", driver="vfio-pci", group=2)
    kernel = build_host(HostSpec(about="a GPU on a root bus", slots=(slot,)))
    without_reset(kernel, GPU)
    if disabled:
        kernel.tree.place(HostPath(f"{kernel.pci.functions[GPU].folder}/reset_method"), constant(""))
    assert scan(kernel).functions[GPU].reset is ResetScope.NONE
    assert now_reset(kernel, GPU) is Reset.IMPOSSIBLE


def test_the_reset_is_unknown_if_a_driver_on_the_bus_is_unknown() -> None:
    kernel = behind_a_bridge()
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{AUDIO}/driver"), errno.EIO)
    assert now_reset(kernel, GPU) is Reset.UNKNOWN


def test_a_kernel_without_reset_method_shows_a_reset_by_the_file_reset(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.tree.remove(HostPath(f"{kernel.pci.functions[FIRST].folder}/reset_method"))
    assert scan(kernel).functions[FIRST].reset is ResetScope.FUNCTION


@pytest.mark.parametrize("name", host_names())
def test_every_gpu_of_the_simulated_hosts_can_be_reset(simulated: Simulated, name: str) -> None:
    facts = scan(simulated(name))
    assert all(
        function.reset is ResetScope.FUNCTION
        for function in facts.functions.values()
        if function.kind == "gpu" and (function.on_vfio or (function.physfn is None and function.driver is not None))
    )


@pytest.mark.parametrize("reset", Reset)
def test_a_reset_is_no_truth_value(reset: Reset) -> None:
    with pytest.raises(TypeError, match="compare with a member"):
        bool(reset)
