"""Allocate gives a device only if nobody has it open: that its users can't be seen is no sign that it has none."""

import errno
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.facts.snapshot import FreshFacts
from gpuvirt.model.offers.allocationcheck import why_unseen
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, running_node

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")


def host(*, group_nodes: bool, hidden: bool) -> SimKernel:
    """Return a host with two GPUs; with `hidden`, as an agent without hostPID sees it."""
    slots = (
        SlotSpec(at=FIRST, board="A10", driver="vfio-pci", group=12),
        SlotSpec(at=SECOND, board="A10", driver="vfio-pci", group=22),
    )
    kernel = build_host(HostSpec(about="two A10", iommufd=True, group_nodes=group_nodes, slots=slots))
    kernel.processes.hide(hidden=hidden)
    return kernel


def deny_group(kernel: SimKernel, group: int = 12) -> None:
    """Deny the agent the group's node, as the device cgroup of an unprivileged container does."""
    kernel.faults.fail(HostPath(f"/dev/vfio/{group}"), errno.EPERM)


async def test_a_gpu_is_refused_without_group_nodes_where_processes_are_not_visible(tmp_path: Path) -> None:
    async with running_node(host(group_nodes=False, hidden=True), tmp_path) as node:
        node.kernel.open_devices(["vfio0"])
        assert node.refused(A10, [FIRST]) is ReasonCode.PROCESSES_NOT_VISIBLE
        await node.advance(90)
        with pytest.raises(AllocationRefusedError, match=r"/proc/1/ns/pid.*4026532298") as refusal:
            node.allocate(A10, [FIRST])
        assert "hostPID: true" in str(refusal.value.reason.fix)
        assert node.refused(A10, [SECOND]) is ReasonCode.PROCESSES_NOT_VISIBLE, "nobody has it, but who can know that?"
        assert node.kernel.vfio.requests == []


async def test_a_gpu_is_given_without_group_nodes_where_processes_are_visible(tmp_path: Path) -> None:
    async with running_node(host(group_nodes=False, hidden=False), tmp_path) as node:
        node.kernel.open_devices(["vfio0"])
        assert node.refused(A10, [FIRST]) is ReasonCode.IN_USE_ELSEWHERE
        assert node.allocate(A10, [SECOND])


async def test_a_group_that_opens_needs_no_visible_processes(tmp_path: Path) -> None:
    async with running_node(host(group_nodes=True, hidden=True), tmp_path) as node:
        node.kernel.start_vm(IommuGroup(12))
        assert node.refused(A10, [FIRST]) is ReasonCode.IN_USE_ELSEWHERE
        assert node.allocate(A10, [SECOND])


async def test_a_gpu_is_refused_where_neither_its_group_opens_nor_processes_are_visible(tmp_path: Path) -> None:
    async with running_node(host(group_nodes=True, hidden=True), tmp_path) as node:
        node.kernel.start_vm(IommuGroup(12))
        deny_group(node.kernel)
        with pytest.raises(AllocationRefusedError, match=r"ProcessesNotVisible.*/dev/vfio/12 can't be opened"):
            node.allocate(A10, [FIRST])
        assert node.allocate(A10, [SECOND])


async def test_a_walk_through_processes_replaces_a_group_that_does_not_open(tmp_path: Path) -> None:
    async with running_node(host(group_nodes=True, hidden=False), tmp_path) as node:
        deny_group(node.kernel)
        process = node.kernel.start_vm(IommuGroup(12))
        with pytest.raises(AllocationRefusedError, match=rf"in use by qemu-system-x86 \(pid {process.pid}\)"):
            node.allocate(A10, [FIRST])
        node.kernel.end_vm(process)
        assert node.allocate(A10, [FIRST])


async def test_a_walk_proves_nothing_for_a_group_without_a_device_number(tmp_path: Path) -> None:
    """Processes are found by the number of the node that they have open: the kernel's class of groups has it."""
    async with running_node(host(group_nodes=True, hidden=False), tmp_path) as node:
        deny_group(node.kernel)
        node.kernel.faults.fail(HostPath("/sys/class/vfio/12/dev"), errno.EIO)
        assert node.refused(A10, [FIRST]) is ReasonCode.PROCESSES_NOT_VISIBLE
        node.kernel.faults.fail(HostPath("/sys/class/vfio/12/dev"), errno.ENOENT)
        node.kernel.faults.fail(HostPath("/sys/class/vfio-dev/vfio0/dev"), errno.ENOENT)
        assert node.refused(A10, [FIRST]) is ReasonCode.PROCESSES_NOT_VISIBLE
        assert node.allocate(A10, [SECOND])


async def test_the_users_of_a_group_that_was_not_read_again_are_unknown(tmp_path: Path) -> None:
    async with running_node(host(group_nodes=True, hidden=False), tmp_path) as node:
        state = node.agent._state
        assert state.inventory is not None
        device = state.memory.offers.by_resource[ResourceName(A10)].devices[DeviceId(FIRST)].candidate
        read = FreshFacts(state.inventory.facts, {}, {IommuGroup(12): ()})
        assert why_unseen(read, device) is None
        reason = why_unseen(replace(read, users={IommuGroup(22): ()}), device)
        assert reason is not None
        assert reason.code is ReasonCode.PROCESSES_NOT_VISIBLE


async def restarted_pod(node: SimNode) -> None:
    """Give the first GPU to a pod whose VM may have started, so that its group may not be opened."""
    node.allocate(A10, [FIRST])
    node.hold(A10, FIRST)
    await node.report_account()


async def test_the_gpu_of_a_pod_that_may_run_is_not_given_again_unseen(tmp_path: Path) -> None:
    async with running_node(host(group_nodes=True, hidden=False), tmp_path) as node:
        await restarted_pod(node)
        assert node.allocate(A10, [FIRST]), "nobody has it open"
    async with running_node(host(group_nodes=True, hidden=True), tmp_path / "unseen") as node:
        await restarted_pod(node)
        assert node.refused(A10, [FIRST]) is ReasonCode.PROCESSES_NOT_VISIBLE


async def test_an_agent_with_plugin_only_gives_a_device_with_unknown_users_and_notes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no means to see users (docs/drop-in.md). It still refuses what the kernel says is in use."""
    async with running_node(host(group_nodes=True, hidden=True), tmp_path, plugin_only=True) as node:
        assert not node.view.problems
        deny_group(node.kernel, 12)
        deny_group(node.kernel, 22)
        with caplog.at_level(logging.WARNING):
            assert node.allocate(A10, [FIRST])
        await node.advance(1)
        (note,) = node.view.problems
        assert note.code is ReasonCode.PROCESSES_NOT_VISIBLE
        assert FIRST in note.subject
        assert [record for record in caplog.records if "ProcessesNotVisible" in record.getMessage()]
        node.kernel.faults.errors.clear()
        node.kernel.start_vm(IommuGroup(22))
        assert node.refused(A10, [SECOND]) is ReasonCode.IN_USE_ELSEWHERE
