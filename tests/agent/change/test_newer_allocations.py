"""A step is refused if its devices were allocated since the plan, whichever of the accounts shows that."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuvirt.agent.change.steps.changes import Change, Changes, StalePlanError
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.desired import DesiredDriver, DesiredVgpus
from gpuvirt.model.change.plan import Scope, StepScope
from gpuvirt.model.change.steps import CreateVgpu, RollBack, Step
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.paths import HostPath
from tests.agent.change.changes import UNGATED, change_drivers, change_vgpus, inputs
from tests.agent.change.hostunit import A10, HostUnit
from tests.agent.node.allocatedgpus import FIRST, SECOND, entry_of
from tests.agent.vgpu.hostwithvgpus import VgpuHost, codes

T4 = PciAddress("0000:3b:00.0")
UNKNOWN = PodAllocations(unknown=refusals.allocations_unknown(T4))
Ask = Callable[[Inventory], PodAllocations]


def from_reading(number: int, newest: PodAllocations) -> Ask:
    """Return an account that shows other allocations from one of its readings on; the first one is for the plan."""
    before = iter([PodAllocations()] * number)
    return lambda _: next(before, newest)


@pytest.mark.parametrize("number", [1, 2], ids=["at the claim", "at the first step"])
def test_a_vgpu_that_a_pod_has_by_now_is_not_removed(number: int, tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=1)
    (vgpu,) = before = host.types(T4)
    host.given = inputs(ask=from_reading(number, PodAllocations(vgpus={vgpu: ("vms/a",)})))
    (reason,) = host.apply_vgpus(T4)
    assert (reason.code, f"{vgpu} is allocated to vms/a" in reason.text) == (ReasonCode.PLAN_OUTDATED, True)
    assert host.types(T4) == before


@pytest.mark.parametrize("number", [1, 2], ids=["at the claim", "at the first step"])
def test_no_step_is_taken_while_the_newest_account_is_unknown(number: int, tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=1)
    before = host.types(T4)
    host.given = inputs(ask=from_reading(number, UNKNOWN))
    assert codes(host.apply_vgpus(T4)) == [ReasonCode.ALLOCATIONS_UNKNOWN]
    assert host.types(T4) == before


def test_a_driver_is_not_changed_while_the_newest_account_is_unknown(tmp_path: Path) -> None:
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    known = inputs(ask=from_reading(1, UNKNOWN))
    (reason,) = change_drivers(unit.change_host, unit.id, {A10: DesiredDriver.PASSTHROUGH}, known)
    assert reason.code is ReasonCode.ALLOCATIONS_UNKNOWN
    assert unit.kernel.writes == []


def test_the_vgpus_that_a_change_has_created_are_rolled_back_while_the_account_is_unknown(tmp_path: Path) -> None:
    """They are not offered yet, so that no pod has one of them, and the former vGPUs need their place."""
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    before, created = host.types(T4), list[VgpuId]()
    rolled_back = list[RollBack]()

    def report(step: Step | RollBack) -> None:
        if isinstance(step, CreateVgpu) and not rolled_back:
            created.append(step.vgpu)
            if len(created) == 3:
                path = f"/sys/class/mdev_bus/{T4}/mdev_supported_types/nvidia-232/create"
                host.kernel.faults.refuse(HostPath(path), errno.ENOSPC)
        if isinstance(step, RollBack):
            rolled_back.append(step)

    known = inputs(ask=lambda _: UNKNOWN if rolled_back else PodAllocations())
    reasons = change_vgpus(host.change_host, T4, DesiredVgpus({"T4-4Q": 4}), known, report)
    assert codes(reasons) == [ReasonCode.STEP_FAILED]
    assert host.types(T4) == before


def entry_of_vgpu(vgpu: VgpuId, group: int | None) -> Entry:
    entry = entry_of(FIRST)
    found = Entry(ResourceName("nvidia.com/x"), DeviceId(vgpu), Target(FIRST, vgpu=vgpu), entry.group, "1", entry.since)
    return found if group is not None else Entry(found.resource, found.device, found.target, None, "1", entry.since)


def stale(scope: StepScope, *entries: Entry) -> Reason | None:
    """Return why a change does not take devices while the ledger has entries."""
    change = Change(Changes(lambda: entries), "x", lambda: True, None)
    with change.under_way(UNGATED):
        try:
            change.claim(scope)
        except StalePlanError as error:
            return error.reason
    return None


def test_the_ledger_stops_the_steps_on_its_devices_alone() -> None:
    """A step asks about a GPU that a pod has whole, and takes vGPUs; a pod's other vGPUs don't count."""
    vgpu, other = VgpuId("11111111-0000-4000-8000-000000000001"), VgpuId("11111111-0000-4000-8000-000000000002")
    of_vgpu = StepScope(frozenset({FIRST}), Scope(vgpus=frozenset({vgpu})))
    assert stale(of_vgpu, entry_of(FIRST)) is not None, "the GPU is allocated whole"
    assert stale(of_vgpu, entry_of(SECOND)) is None
    assert stale(of_vgpu, entry_of_vgpu(vgpu, 7)) is not None
    assert stale(of_vgpu, entry_of_vgpu(other, 7)) is None
    assert stale(StepScope.of([FIRST]), entry_of_vgpu(vgpu, 7)) is not None, "the step takes the whole GPU"
    assert stale(of_vgpu, entry_of_vgpu(vgpu, None)) is None, "of an earlier boot, and not seen since"


def test_a_change_stops_when_its_desired_state_changes(tmp_path: Path) -> None:
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    change = Change(Changes(lambda: ()), unit.id, lambda: False, None)
    (reason,) = change_drivers(unit.change_host, unit.id, {A10: DesiredDriver.PASSTHROUGH}, inputs(), change=change)
    assert (reason.code, "desired state has changed" in reason.text) == (ReasonCode.PLAN_OUTDATED, True)
    assert unit.kernel.writes == []
