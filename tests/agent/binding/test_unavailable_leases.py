"""A group that can't be leased: only a search that can find every user proves that nobody uses it."""

from contextlib import AbstractContextManager

import pytest

from gpuvirt.agent.change.steps.leasing import GroupClaim, InUseError, Prove, RefusedError, leased
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access.proof import ProofKind
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.usage.users import GROUP_CLASS, cdevs_of
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel

GPU, GROUP = PciAddress("0000:3b:00.0"), IommuGroup(12)


def host(*, group_nodes: bool = True, iommufd: bool = False) -> SimKernel:
    slots = (SlotSpec(at=GPU, board="T4", driver="vfio-pci", group=GROUP),)
    return build_host(HostSpec(about="a T4", iommufd=iommufd, group_nodes=group_nodes, slots=slots))


def without_node(*, iommufd: bool = False) -> SimKernel:
    """Return a host on which the group's node was deleted by hand."""
    kernel = host(iommufd=iommufd)
    kernel.delete_node(GROUP)
    return kernel


def lease(kernel: SimKernel, *cdevs: str) -> AbstractContextManager[Prove]:
    return leased(kernel, GroupClaim(GPU, GROUP, cdevs))


def cdevs(kernel: SimKernel) -> tuple[str, ...]:
    return tuple(cdevs_of([scan(kernel).functions[GPU]]))


def refusal(kernel: SimKernel, *names: str) -> ReasonCode:
    with pytest.raises(RefusedError) as refused, lease(kernel, *names):
        pytest.fail("the group counts as unused")
    return refused.value.reason.code


def test_a_group_without_a_lease_is_proved_unused_by_a_walk() -> None:
    with lease(without_node()) as prove:
        assert prove().kind is ProofKind.WALK
    with lease(host()) as prove:
        assert prove().kind is ProofKind.LEASE


def test_the_walk_is_made_again_for_each_proof() -> None:
    kernel = without_node()
    with lease(kernel) as prove:
        assert prove().is_valid
        kernel.restore_node(GROUP)
        kernel.start_vm(GROUP)
        with pytest.raises(InUseError, match="qemu"):
            prove()


def test_a_user_of_a_group_without_a_lease_refuses() -> None:
    kernel = host()
    kernel.start_vm(GROUP)
    kernel.delete_node(GROUP)
    assert refusal(kernel) is ReasonCode.IN_USE


def test_neither_a_lease_nor_a_walk_is_no_proof() -> None:
    kernel = without_node()
    kernel.processes.hide()
    assert refusal(kernel) is ReasonCode.PROCESSES_NOT_VISIBLE


def test_no_devices_are_no_lease() -> None:
    """The devices of the group have no nodes of their own, so there is nothing to hold instead of the group."""
    kernel = without_node(iommufd=True)
    kernel.processes.hide()
    assert refusal(kernel) is ReasonCode.PROCESSES_NOT_VISIBLE


def test_a_group_without_a_number_is_not_searched() -> None:
    """A kernel without group nodes, whose devices have no nodes of their own either: no user can be found."""
    kernel = host(group_nodes=False)
    assert refusal(kernel, *cdevs(kernel)) is ReasonCode.PROCESSES_NOT_VISIBLE


def test_a_leased_group_needs_no_number() -> None:
    kernel = host()
    kernel.tree.remove(HostPath(f"{GROUP_CLASS}/{GROUP}"))
    with lease(kernel) as prove:
        assert prove().kind is ProofKind.LEASE


def test_a_leased_group_needs_no_walk() -> None:
    kernel = host()
    kernel.processes.hide()
    with lease(kernel) as prove:
        assert prove().kind is ProofKind.LEASE


def test_a_leased_group_is_searched_for_a_vm_that_is_about_to_start() -> None:
    """It has a device open but not bound yet, which a lease of the group does not detect."""
    kernel = host(iommufd=True)
    names = cdevs(kernel)
    kernel.open_devices(names, bind=False)
    with pytest.raises(InUseError, match="qemu"), lease(kernel, *names):
        pytest.fail("the group counts as unused")


@pytest.mark.parametrize("opened_group", [True, False])
def test_a_group_that_another_process_has_open_is_not_walked(*, opened_group: bool) -> None:
    kernel = host(iommufd=True)
    if opened_group:
        kernel.start_vm(GROUP)
    else:
        kernel.open_devices(cdevs(kernel))
    kernel.processes.hide()
    with pytest.raises(InUseError), lease(kernel, *cdevs(kernel)):
        pytest.fail("the group counts as unused")
