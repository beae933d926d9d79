"""A step on vGPUs is refused where the GPU has changed since the plan, and where its effect is missing."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.change.steps.changes import Change, Changes
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.change.steps.vgpusteps import Run, claims, take_all, verify_vfs_removable
from gpuvirt.errors import VgpuUnavailableError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.sysfs import device_path, mdev_path
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.access.tools import Ended
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.vgpu.mdev import read_type
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import RemoveVgpu, RollBack, Step
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import UNGATED, change_host_in, change_vgpus
from tests.agent.change.hostunit import WHOLE, HostUnit
from tests.agent.vgpu.hostwithvgpus import VgpuHost, codes
from tests.contract.proofs import remove

T4, L40S, FLEX = PciAddress("0000:3b:00.0"), PciAddress("0000:25:00.0"), PciAddress("0000:4d:00.0")
MIXED, SHARED = PciAddress("0000:4b:00.0"), PciAddress("0000:ca:00.0")
FOREIGN = VgpuId("b8f0fd4e-2a0d-4b3e-9a52-2f6a1c1d7a11")
MDEV = backend_of(Framework.MDEV)
EQUAL_SIZES, MIG_BACKED = DesiredVgpus({"A10-4Q": 6}, Sizes.EQUAL), DesiredVgpus({"A30-1-6C": 2})


def changed(host: VgpuHost, gpu: PciAddress, desired: DesiredVgpus, at: str, act: Callable[[], object]) -> list[Reason]:
    """Change a GPU, and act right before the first step whose text has `at`; return why the change failed."""
    happened: list[str] = []

    def report(step: Step | RollBack) -> None:
        host.steps.append(step.text)
        if at in step.text and not happened:
            happened.append(step.text)
            act()

    host.steps.clear()
    reasons = change_vgpus(host.change_host, gpu, desired, host.given, report)
    assert happened, "the moment has come"
    return list(reasons)


@pytest.mark.parametrize(
    ("simulated", "gpu", "desired", "switch", "created"),
    [
        ("2xA10-vgpu", MIXED, EQUAL_SIZES, "-shm", "NVIDIA A10-4Q"),
        ("2xA30", SHARED, MIG_BACKED, "-mig", "NVIDIA A30-12C"),
    ],
)
def test_no_mode_is_switched_under_a_vgpu_that_another_program_has_just_created(
    simulated: str, gpu: PciAddress, desired: DesiredVgpus, switch: str, created: str, tmp_path: Path
) -> None:
    host = VgpuHost(simulated, tmp_path)
    if gpu == SHARED:
        host.apply_types(SHARED, {"A30-12C": 2})

    def create() -> None:
        slot = max(host.kernel.vfs.carriers[gpu].vgpu_host.slots)
        MDEV.create(host.kernel, slot, VgpuType(created), FOREIGN)

    first, *_ = changed(host, gpu, desired, ": switch", create)
    assert first.code is ReasonCode.STEP_FAILED
    assert "other vGPUs have just been created" in first.text
    assert FOREIGN in host.types(gpu)
    assert not any(switch in command for command in host.tools.commands)


class Answers(SimTools):
    """The programs of a host whose nvidia-smi answers the query of modes otherwise once a mode was switched."""

    switched: bool = False

    def __init__(self, host: VgpuHost, answer: Callable[[Ended], Ended]) -> None:
        super().__init__(host.kernel)
        self._answer = answer
        host.tools, host.change_host = self, change_host_in(host.change_host.locks.parent, host.kernel, self)

    @override
    def run(self, program: str, arguments: Sequence[str]) -> Ended:
        ended = super().run(program, arguments)
        self.switched |= bool({"-shm", "-mig"} & set(arguments))
        return self._answer(ended) if self.switched and arguments[0] == "-q" else ended


SWITCHES = pytest.mark.parametrize(
    ("simulated", "gpu", "desired"), [("2xA10-vgpu", MIXED, EQUAL_SIZES), ("2xA30", SHARED, MIG_BACKED)]
)


@SWITCHES
def test_a_mode_that_nvidia_smi_has_not_switched_stops_the_change(
    simulated: str, gpu: PciAddress, desired: DesiredVgpus, tmp_path: Path
) -> None:
    """It exits with 0, and reports no switch that waits for a reset either."""
    host = VgpuHost(simulated, tmp_path)
    vgpu_host = host.kernel.vfs.carriers[gpu].vgpu_host
    mixed, mig = vgpu_host.mixed_sizes, vgpu_host.mig

    def as_before(command: Sequence[str]) -> None:
        if "-q" in command:
            vgpu_host.mixed_sizes, vgpu_host.mig, vgpu_host.mig_pending = mixed, mig, mig

    host.tools.before = as_before
    assert codes(host.desired_vgpus(gpu, desired))[0] is ReasonCode.STEP_FAILED
    begun = iter(host.steps)
    assert any(": switch" in step and "VFs" not in step for step in begun)
    assert next(begun).endswith(": roll back")


@SWITCHES
def test_a_mode_that_cannot_be_read_after_its_switch_stops_the_change(
    simulated: str, gpu: PciAddress, desired: DesiredVgpus, tmp_path: Path
) -> None:
    host = VgpuHost(simulated, tmp_path)
    Answers(host, lambda ended: replace(ended, stdout=ended.stdout.replace("abled", "")))
    first, *_ = host.desired_vgpus(gpu, desired)
    assert (first.code, ": En" in first.text or ": Dis" in first.text) == (ReasonCode.STEP_FAILED, True)


def test_a_vgpu_that_was_created_again_under_the_same_id_stays(tmp_path: Path) -> None:
    """Another program has replaced the vGPU of the plan by one of another type, which may be for another VM."""
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=1)
    (mine,) = host.types(T4)

    def create_again() -> None:
        (live,) = scan(host.kernel).vgpu_hosts[T4].live
        vgpu_host, group = host.kernel.vfs.carriers[T4].vgpu_host, host.group_of(mine)
        remove(MDEV, host.kernel, live)
        smaller = next(spec for spec in vgpu_host.types if spec.name == "GRID T4-4Q")
        host.kernel.mdev.add(vgpu_host, T4, smaller, mine, group)

    first, *_ = changed(host, T4, DesiredVgpus(), ": remove", create_again)
    assert (first.code, "may be another vGPU now" in first.text) == (ReasonCode.STEP_FAILED, True)
    assert host.types(T4) == {mine: "T4-4Q"}


def test_a_vgpu_whose_type_is_unread_stays(tmp_path: Path) -> None:
    """It may be another one under the same id."""
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=1)
    (mine,) = host.types(T4)
    link = mdev_path(mine, "mdev_type")
    first, *_ = changed(host, T4, DesiredVgpus(), ": remove", lambda: host.kernel.faults.fail(link, errno.EIO))
    assert (first.code, "may be another vGPU now" in first.text) == (ReasonCode.STEP_FAILED, True)
    assert host.types(T4) == {mine: "T4-8Q"}


def test_a_type_that_is_not_offered_any_more_is_not_created(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    with pytest.raises(VgpuUnavailableError, match=r"offer the vGPU type GRID T4-9Q now; .* has GRID T4-1Q"):
        MDEV.create(host.kernel, T4, VgpuType("GRID T4-9Q"), FOREIGN)


def test_a_vgpu_whose_type_has_no_name_has_the_types_id(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=1)
    (mine,) = host.types(T4)
    host.kernel.faults.fail(mdev_path(mine, "mdev_type/name"), errno.ENOENT)
    assert read_type(host.kernel, mine) == "nvidia-233"


def lacking(host: VgpuHost, function: PciAddress) -> Inventory:
    """Return the inventory of a host that could not read one of its functions."""
    facts = scan(host.kernel)
    functions = {address: found for address, found in facts.functions.items() if address != function}
    whole = build_inventory(facts)
    return replace(whole, facts=replace(facts, functions=functions))


def test_vfs_of_which_one_is_unknown_stay(tmp_path: Path) -> None:
    host = VgpuHost("4xL40S", tmp_path)
    assert host.apply_vgpus(L40S) == ()
    last = host.kernel.pci.functions[L40S].virtfns[-1]
    verify_vfs_removable(host.kernel, build_inventory(scan(host.kernel)), L40S)
    with pytest.raises(RefusedError) as refused:
        verify_vfs_removable(host.kernel, lacking(host, last), L40S)
    assert refused.value.reason.code is ReasonCode.VFS_ENABLED


def test_vfs_of_which_one_is_unknown_are_not_removed_together(tmp_path: Path) -> None:
    host = VgpuHost("2xFlex170", tmp_path)
    assert host.apply_types(FLEX, {"16 VFs": 1}) == ()
    last = host.kernel.pci.functions[FLEX].virtfns[-1]
    state = observe(host.change_host, host.given).gpu_state(FLEX)
    assert state is not None
    (live,) = state.host.live
    assert list(claims(host.kernel, build_inventory(scan(host.kernel)), state.host, live)) == []
    with pytest.raises(RefusedError) as refused:
        list(claims(host.kernel, lacking(host, last), state.host, live))
    assert refused.value.reason.code is ReasonCode.UNREAD


def test_no_vgpu_is_removed_while_a_process_keeps_the_vfs(tmp_path: Path) -> None:
    """The VFs are switched off after the last vGPU was removed, and a process that uses the GPU prevents that."""
    unit = HostUnit("4xL40S", L40S, tmp_path)
    unit.fill(L40S_8Q=2)
    process = unit.kernel.open_native(L40S)
    outcome = unit.apply(WHOLE)
    assert [reason.code for reason in outcome.vgpus[L40S]] == [ReasonCode.IN_USE]
    assert (unit.taken, unit.types) == ([], ["L40S-8Q"] * 2)
    unit.kernel.end_vm(process)
    assert unit.apply(WHOLE).reasons == ()


def test_no_vgpu_is_removed_without_the_program_that_switches_vfs_off(tmp_path: Path) -> None:
    unit = HostUnit("4xL40S", L40S, tmp_path)
    unit.fill(L40S_8Q=2)
    unit.change_host = change_host_in(tmp_path, unit.kernel, SimTools(unit.kernel, programs=()))
    assert [reason.code for reason in unit.apply(WHOLE).reasons] == [ReasonCode.PREREQUISITE_MISSING]
    assert (unit.taken, unit.types) == ([], ["L40S-8Q"] * 2)


def test_no_vgpu_is_removed_while_the_host_keeps_the_driver(tmp_path: Path) -> None:
    """The GPU would carry no vGPU then, and could not be used whole either."""
    unit = HostUnit("4xT4", T4, tmp_path)
    unit.fill(T4_8Q=2)
    unit.kernel.faults.fail(HostPath(device_path(T4, "boot_vga")), errno.EIO)
    assert ReasonCode.USED_BY_HOST in {reason.code for reason in unit.apply(WHOLE).reasons}
    assert (unit.taken, unit.types) == ([], ["T4-8Q"] * 2)
    unit.kernel.faults.heal()
    assert unit.apply(WHOLE).reasons == ()


def test_a_change_closes_all_its_vgpus_before_its_first_step(tmp_path: Path) -> None:
    """A pod that got the second vGPU while the first one is removed would make the change fail half-way."""
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    inventory = build_inventory(scan(host.kernel))
    first, second = sorted(host.types(T4))
    changes, given = Changes(lambda: ()), list[str]()
    change = Change(changes, "x", lambda: True, None)

    def allocate(_: Step | RollBack) -> None:
        for vgpu in (first, second):
            target = Target(T4, vgpu=vgpu)
            with pytest.raises(RefusedError) as refused:
                changes.allocate([(vgpu, target)], lambda: given.append("allocated"))
            assert refused.value.reason.code is ReasonCode.UNIT_BUSY
        host.steps.append("asked")

    host.steps.clear()
    plan = VgpuPlan(T4, tuple(RemoveVgpu(vgpu, VgpuType("GRID T4-8Q"), T4) for vgpu in (first, second)))
    with change.under_way(UNGATED):
        take_all(host.change_host, inventory, None, plan, Run(allocate, change))
    assert (given, host.steps) == ([], ["asked", "asked"])


# --- rollbacks


def refuse_creation(host: VgpuHost, *types: str) -> None:
    for name in types:
        path = HostPath(f"/sys/class/mdev_bus/{T4}/mdev_supported_types/{name}/create")
        host.kernel.faults.refuse(path, errno.ENOSPC)


def test_the_failure_of_a_rollback_is_reported_with_that_of_the_change(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    folder = HostPath(f"/sys/class/mdev_bus/{T4}/mdev_supported_types")
    refuse_creation(host, *host.kernel.listdir(folder))
    reasons = host.apply_vgpus(T4, T4_4Q=4)
    assert codes(reasons) == [ReasonCode.STEP_FAILED] * 2
    assert ["T4-4Q" in reason.text for reason in reasons] == [True, False]


def test_a_gpu_that_is_gone_is_not_rolled_back(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)
    reasons = changed(host, T4, DesiredVgpus({"T4-4Q": 4}), ": create", lambda: host.kernel.unplug(T4))
    assert [reason.code for reason in reasons] == [ReasonCode.NO_VGPU_HOST]


def test_a_rollback_that_cannot_be_planned_is_reported(tmp_path: Path) -> None:
    host = VgpuHost("4xT4", tmp_path)
    host.apply_vgpus(T4, T4_8Q=2)

    def fail() -> None:
        folder = HostPath(f"/sys/class/mdev_bus/{T4}/mdev_supported_types")
        refuse_creation(host, *host.kernel.listdir(folder))
        host.kernel.faults.fail(folder, errno.EIO)

    reasons = changed(host, T4, DesiredVgpus({"T4-4Q": 4}), ": create", fail)
    assert [reason.code for reason in reasons] == [ReasonCode.STEP_FAILED, ReasonCode.NO_SUCH_TYPE]
