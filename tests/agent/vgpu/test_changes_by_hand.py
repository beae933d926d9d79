"""A command removes one vGPU: what keeps it from that after its plan was made."""

import errno
from pathlib import Path

import msgspec

from gpuvirt.agent.change import unitchange
from gpuvirt.agent.change.observation import observe
from gpuvirt.facts.ids import VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, shared_cards
from tests.agent.change.changes import NOBODY, ReportStep, say_nothing
from tests.agent.change.hostunit import L40S, T4, HostUnit
from tests.agent.vgpu.hostwithvgpus import VgpuHost, codes


class OneVgpu:
    """A host with one vGPU of which a command knows an earlier inventory."""

    def __init__(self, folder: Path) -> None:
        self.host = VgpuHost("4xT4", folder)
        self.host.apply_vgpus(T4, T4_8Q=1)
        (self.id,) = self.host.types(T4)
        self.first = observe(self.host.change_host, self.host.given, None).inventory

    def remove(self, report: ReportStep = say_nothing) -> list[ReasonCode]:
        return codes(
            unitchange.remove_vgpu(self.host.change_host, T4, VgpuId(self.id), self.host.given, report, self.first)
        )


def test_a_vgpu_that_a_vm_opens_after_the_plan_is_not_removed_by_hand(tmp_path: Path) -> None:
    vgpu = OneVgpu(tmp_path)

    def start(_: Step | RollBack) -> None:
        vgpu.host.kernel.start_vm(vgpu.host.group_of(vgpu.id))

    assert vgpu.remove(start) == [ReasonCode.VGPU_IN_USE]
    assert list(vgpu.host.types(T4)) == [vgpu.id]
    assert vgpu.host.kernel.vfio.requests == []


def test_a_failed_removal_by_hand_has_its_reason(tmp_path: Path) -> None:
    vgpu = OneVgpu(tmp_path)
    vgpu.host.kernel.faults.refuse(HostPath(f"/sys/bus/mdev/devices/{vgpu.id}/remove"), errno.EIO)
    assert vgpu.remove() == [ReasonCode.STEP_FAILED]
    assert list(vgpu.host.types(T4)) == [vgpu.id]


def test_a_vgpu_of_a_full_gpu_is_removed_by_hand(tmp_path: Path) -> None:
    """The host names no type that does not fit on any GPU any more, so nvidia-smi is asked for the name."""
    card = msgspec.structs.replace(shared_cards()["L40S"], total_vfs=4)
    host = HostSpec(about="an L40S", boards={"L40S": card}, slots=(SlotSpec(at=L40S, board="L40S", group=12, numa=0),))
    unit = HostUnit(host, L40S, tmp_path)
    unit.fill(L40S_24Q=2)
    first = observe(unit.change_host, NOBODY).inventory
    live = min(first.vgpus)
    assert isinstance(first.vgpus[live].live.type, Unread)
    assert str(observe(unit.change_host, NOBODY, None).inventory.vgpus[live].live.type).endswith("L40S-24Q")
    assert unitchange.remove_vgpu(unit.change_host, L40S, live, NOBODY, say_nothing, first) == ()
    assert unit.types == ["L40S-24Q"]


def test_a_gpu_that_is_unplugged_before_a_removal_by_hand_is_reported(tmp_path: Path) -> None:
    vgpu = OneVgpu(tmp_path)
    vgpu.host.kernel.unplug(T4)
    assert vgpu.remove() == [ReasonCode.NO_VGPU_HOST]
