"""Obstacles of a change are met before its first step: a process that `/proc` hides, a missing program."""

import errno
from pathlib import Path

import pytest
import typer
from msgspec.structs import replace

from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.change.unitchange import unseen_users
from gpuvirt.cli.changes import vfio
from gpuvirt.cli.changes.commandhost import Host
from gpuvirt.cli.changes.vfio import Chosen
from gpuvirt.cli.changes.vgpuchanges import would
from gpuvirt.cli.formats import Output
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access.tools import Program
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredGpu, DesiredVgpus
from gpuvirt.model.change.vgpus.vgpuplanning import unknown_after_bind
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import inputs
from tests.agent.change.hostunit import A10, NATIVE, WHOLE, HostUnit

CARRYING, ON_VFIO = PciAddress("0000:4b:00.0"), PciAddress("0000:65:00.0")
GROUP_OF_12Q = IommuGroup(200)


@pytest.fixture
def carrying(tmp_path: Path) -> HostUnit:
    """A GPU with an A10-12Q, which a process has open, and an A10-4Q."""
    unit = HostUnit("2xA10-vgpu", CARRYING, tmp_path)
    unit.kernel.vfio.open(GROUP_OF_12Q, 4711)
    return unit


def dry(unit: HostUnit, sizes: Sizes | None = None, **types: int) -> tuple[Reason, ...]:
    vgpus = DesiredVgpus({name.replace("_", "-"): count for name, count in types.items()}, sizes)
    return would(observe(unit.change_host, inputs()), unit.gpu, DesiredGpu(vgpus=vgpus), opens=True).reasons


def test_only_vgpus_that_a_change_removes_are_opened(carrying: HostUnit) -> None:
    opened: list[str] = []
    carrying.kernel.faults.before_read(HostPath("/dev/vfio/200"), lambda: opened.append("200"))
    assert dry(carrying, A10_12Q=1) == ()
    assert opened == [], "a VM may be starting with it"
    (reason,) = dry(carrying, A10_4Q=1)
    assert reason.code is ReasonCode.VGPU_IN_USE
    carrying.kernel.vfio.close(GROUP_OF_12Q)
    assert dry(carrying, Sizes.EQUAL, A10_4Q=2) == (), "a plan with other steps than removals"


def test_a_gpu_whose_vgpu_is_held_is_not_emptied_for_a_bind(
    carrying: HostUnit, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    host = Host(carrying.change_host, inputs(), {}, {}, {}, tmp_path)
    before = carrying.types
    for dry_run in (True, False):
        with pytest.raises(typer.Exit):
            vfio.change(host, WHOLE, Chosen([CARRYING], every=False, nvswitches=False), Output.TABLE, dry_run=dry_run)
        printed = capsys.readouterr()
        assert "/dev/vfio/200 is open" in " ".join(printed.out.split())
        assert printed.err == "", "only an unbind of nouveau may hang"
    assert (carrying.types, carrying.kernel.writes) == (before, [])


def test_a_held_gpu_is_not_leased_for_an_unbind(tmp_path: Path) -> None:
    unit = HostUnit("2xA10", ON_VFIO, tmp_path)
    unit.kernel.vfio.open(IommuGroup(12), 4711)
    (reason,) = unseen_users(observe(unit.change_host, inputs()), unit.plan(NATIVE).drivers)
    assert (reason.code, "/dev/vfio/12 is open" in reason.text) == (ReasonCode.IN_USE, True)
    unit.kernel.vfio.close(IommuGroup(12))
    assert list(unseen_users(observe(unit.change_host, inputs()), unit.plan(NATIVE).drivers)) == []


def test_vfs_need_nvidias_program_on_nvidias_driver_alone(tmp_path: Path) -> None:
    unit = HostUnit("2xA10-vgpu", A10, tmp_path)
    unit.change_host = replace(unit.change_host, tools=SimTools(unit.kernel, programs={Program.NVIDIA_SMI}))
    (reason,) = unit.apply(DesiredGpu(vgpus=DesiredVgpus({"A10-24Q": 1}))).reasons
    assert (reason.code, "its VFs are off" in reason.text, unit.taken) == (ReasonCode.PREREQUISITE_MISSING, True, [])
    unit.gpu = CARRYING  # whose VFs are on
    assert unit.apply(DesiredGpu(vgpus=DesiredVgpus({"A10-4Q": 2}, Sizes.EQUAL))).reasons == ()


def test_a_driver_that_can_not_be_read_promises_nothing(tmp_path: Path) -> None:
    unit = HostUnit("2xA10", ON_VFIO, tmp_path)
    unit.kernel.faults.fail(HostPath("/sys/module/nvidia_vgpu_vfio"), errno.EACCES)
    reason = unknown_after_bind(scan(unit.kernel), ON_VFIO)
    assert reason is not None
    assert reason.code is ReasonCode.UNREAD
