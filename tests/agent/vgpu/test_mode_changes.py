"""GPUs change modes, GPU instances and scheduler for the desired vGPUs without harming vGPUs in use."""

import errno
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.observation import observe
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Framework, Scheduler, SchedulerPolicy
from gpuvirt.hardware.programs import vgpuscheduler
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.vgputypes.profiles import profile_name
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_vgpus
from tests.agent.vgpu.hostwithvgpus import VgpuHost, codes

CUT, SHARED = PciAddress("0000:17:00.0"), PciAddress("0000:ca:00.0")
"""An A30 in MIG mode with an A30-2-12C and an A30-1-6C on instances of 2g, 1g and 1g; one without VFs."""
MIXED, EQUAL = PciAddress("0000:4b:00.0"), PciAddress("0000:b1:00.0")
"""An A10 in mixed-size mode with an A10-12Q and an A10-4Q; one without VFs."""
T4 = PciAddress("0000:3b:00.0")
FOREIGN = VgpuId("b8f0fd4e-2a0d-4b3e-9a52-2f6a1c1d7a11")
EQUAL_SHARE = Scheduler(SchedulerPolicy.EQUAL_SHARE, 4)


def words(host: VgpuHost) -> list[str]:
    """Return the kinds of the steps: `remove`, `switch`..."""
    return [step.split(": ")[1].split()[0] for step in host.steps]


@pytest.fixture
def a30(tmp_path: Path) -> VgpuHost:
    return VgpuHost("2xA30", tmp_path)


@pytest.fixture
def a10(tmp_path: Path) -> VgpuHost:
    return VgpuHost("2xA10-vgpu", tmp_path)


@pytest.fixture
def t4(tmp_path: Path) -> VgpuHost:
    return VgpuHost("4xT4", tmp_path)


# --- sizes


def test_a_gpu_is_switched_to_mixed_sizes_and_back(a10: VgpuHost) -> None:
    several = DesiredVgpus({"A10-12Q": 1, "A10-4Q": 2, "A10-2Q": 1}, Sizes.MIXED)
    assert a10.desired_vgpus(EQUAL, several) == ()
    assert a10.steps[:2] == [f"{EQUAL}: switch its VFs on", f"{EQUAL}: switch mixed sizes on"]
    assert [step.split()[3] for step in a10.steps[2:]] == ["A10-12Q", "A10-4Q", "A10-4Q", "A10-2Q"], (
        "larger vGPUs are created first"
    )
    assert a10.carries(EQUAL) == several.types
    assert a10.desired_vgpus(EQUAL, several) == ()
    assert a10.steps == []
    assert a10.desired_vgpus(EQUAL, DesiredVgpus({"A10-4Q": 6}, Sizes.EQUAL)) == ()
    assert words(a10) == ["remove"] * 4 + ["switch"] + ["create"] * 6
    assert a10.modes(EQUAL).mixed_sizes is False


def test_without_a_desired_mode_the_gpu_accepts_the_sizes_of_its_current_mode(a10: VgpuHost) -> None:
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-12Q": 1, "A10-6Q": 2})) == ()
    assert a10.carries(MIXED) == {"A10-12Q": 1, "A10-6Q": 2}
    assert a10.desired_vgpus(EQUAL, DesiredVgpus({"A10-12Q": 2})) == ()
    assert codes(a10.desired_vgpus(EQUAL, DesiredVgpus({"A10-12Q": 1, "A10-6Q": 2}))) == [ReasonCode.SIZES_DIFFER]


def test_free_vgpus_make_room_for_a_larger_vgpu_and_are_created_again(a10: VgpuHost) -> None:
    """Their placements are unknown; here they lie across both placements of an A10-12Q."""
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-4Q": 4}, Sizes.MIXED)) == ()
    a10.desired_vgpus(MIXED, DesiredVgpus({"A10-4Q": 3}, Sizes.MIXED))
    before = a10.types(MIXED)
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-12Q": 1, "A10-4Q": 2}, Sizes.MIXED)) == ()
    assert a10.carries(MIXED) == {"A10-12Q": 1, "A10-4Q": 2}
    assert {vgpu for vgpu, name in a10.types(MIXED).items() if name == "A10-4Q"} < before.keys()
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-12Q": 1, "A10-4Q": 2, "A10-2Q": 1}, Sizes.MIXED)) == ()
    assert words(a10) == ["create"], "a smaller vGPU needs no removal"


@pytest.mark.parametrize("desired_counts", [{"A10-4Q": 5}, {"A10-12Q": 2, "A10-4Q": 1}, {"A10-8Q": 2, "A10-12Q": 1}])
def test_vgpus_without_placements_are_refused_before_any_removal(a10: VgpuHost, desired_counts: dict[str, int]) -> None:
    before = a10.types(MIXED)
    assert codes(a10.desired_vgpus(MIXED, DesiredVgpus(desired_counts, Sizes.MIXED))) == [ReasonCode.NO_ROOM]
    assert (a10.steps, a10.types(MIXED)) == ([], before)


def test_a_vgpu_that_finds_no_room_beside_others_asks_to_remove_one_of_these(a10: VgpuHost) -> None:
    (reason,) = a10.desired_vgpus(MIXED, DesiredVgpus({"A10-12Q": 2, "A10-4Q": 1}, added=1))
    assert reason.fix == "remove some of the 2 existing ones first: gpuvirt vgpu delete VGPU"


def test_a_vgpu_of_a_vm_keeps_the_size_mode_until_the_vm_ends(a10: VgpuHost) -> None:
    mine = next(vgpu for vgpu, name in a10.types(MIXED).items() if name == "A10-4Q")
    vm = a10.kernel.start_vm(a10.group_of(mine))
    desired_vgpus = DesiredVgpus({"A10-4Q": 6}, Sizes.EQUAL)
    reasons = a10.desired_vgpus(MIXED, desired_vgpus)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert f"(pid {vm.pid})" in reasons[0].text
    assert (words(a10), list(a10.types(MIXED))) == (["remove"], [mine])
    assert (a10.modes(MIXED).mixed_sizes, a10.kernel.vfio.requests) == (True, [])
    a10.kernel.end_vm(vm)
    assert a10.desired_vgpus(MIXED, desired_vgpus) == ()
    assert a10.carries(MIXED) == {"A10-4Q": 6}
    assert mine in a10.types(MIXED), "the vGPU was removed for the switch and recreated with its id"


def test_a_failure_after_a_mode_switch_rolls_back_vgpus_and_mode(a10: VgpuHost) -> None:
    before = a10.types(MIXED)
    steps: list[str] = []

    def another_user(step: Step | RollBack) -> None:
        steps.append(step.text)
        if step.text.endswith("mixed sizes off"):
            a10.tools.before = fail

    def fail(command: Sequence[str]) -> None:
        if "-shm" in command:
            a10.tools.before = lambda _: None
            raise OSError(errno.EIO, "Input/output error", "nvidia-smi")

    reasons = change_vgpus(a10.change_host, MIXED, DesiredVgpus({"A10-4Q": 6}, Sizes.EQUAL), a10.given, another_user)
    assert codes(reasons) == [ReasonCode.STEP_FAILED]
    assert a10.types(MIXED) == before
    assert a10.modes(MIXED).mixed_sizes is True


@pytest.mark.parametrize(("simulated", "gpu", "name"), [("4xT4", T4, "T4-8Q"), ("2xA30", SHARED, "A30-12C")])
def test_mixed_sizes_are_refused_on_a_card_without_support(
    simulated: str, gpu: PciAddress, name: str, tmp_path: Path
) -> None:
    host = VgpuHost(simulated, tmp_path)
    assert host.desired_vgpus(gpu, DesiredVgpus({name: 1})) == ()
    assert codes(host.desired_vgpus(gpu, DesiredVgpus({name: 2}, Sizes.MIXED))) == [ReasonCode.MODE_UNSUPPORTED]
    assert host.desired_vgpus(gpu, DesiredVgpus({name: 2}, Sizes.EQUAL)) == ()


# --- MIG


def test_a_gpu_changes_from_time_sliced_to_mig_backed_vgpus_and_back(a30: VgpuHost) -> None:
    assert a30.desired_vgpus(SHARED, DesiredVgpus({"A30-12C": 2})) == ()
    assert a30.desired_vgpus(SHARED, DesiredVgpus({"A30-1-6C": 2, "A30-2-12C": 1})) == ()
    assert words(a30) == ["remove"] * 2 + ["switch"] + ["create"] * 6
    made = [step.partition("a GPU instance ")[2] for step in a30.steps[3:6]]
    assert made == ["2g.12gb at slice 2", "1g.6gb at slice 1", "1g.6gb at slice 0"], (
        "larger GPU instances are created first"
    )
    assert a30.carries(SHARED) == {"A30-1-6C": 2, "A30-2-12C": 1}
    assert a30.desired_vgpus(SHARED, DesiredVgpus({"A30-1-6C": 2, "A30-2-12C": 1})) == ()
    assert a30.steps == []
    assert a30.desired_vgpus(SHARED, DesiredVgpus({"A30-4C": 6})) == ()
    assert words(a30) == ["remove"] * 3 + ["destroy"] * 3 + ["switch"] + ["create"] * 6
    assert a30.carries(SHARED) == {"A30-4C": 6}
    modes = a30.modes(SHARED)
    assert (modes.mig, modes.gpu_instances) == (False, ())


def test_unused_gpu_instances_are_destroyed_to_make_room(a30: VgpuHost) -> None:
    before = a30.types(CUT)
    kept = {vgpu: name for vgpu, name in before.items() if name == "A30-1-6C"}
    assert a30.apply_types(CUT, {"A30-1-6C": 4}) == ()
    assert words(a30) == ["remove", "destroy", "create", "create", "create", "create", "create"]
    assert a30.carries(CUT) == {"A30-1-6C": 4}
    assert kept.items() <= a30.types(CUT).items()


def test_all_vgpus_are_created_again_if_the_free_gpu_instance_is_unknown(a30: VgpuHost) -> None:
    a30.apply_types(CUT, {"A30-1-6C": 4})
    before = a30.types(CUT)
    assert a30.apply_types(CUT, {"A30-1-6C": 2, "A30-2-12C": 1}) == ()
    assert words(a30) == ["remove"] * 4 + ["destroy"] * 4 + ["create"] * 6
    assert a30.carries(CUT) == {"A30-1-6C": 2, "A30-2-12C": 1}
    after = {vgpu for vgpu, name in a30.types(CUT).items() if name == "A30-1-6C"}
    assert after < before.keys(), "the vGPUs were recreated with their ids"


def test_a_vgpu_in_use_keeps_all_gpu_instances_of_its_profile(a30: VgpuHost) -> None:
    a30.apply_types(CUT, {"A30-1-6C": 4})
    mine = min(a30.types(CUT))
    vm = a30.kernel.start_vm(a30.group_of(mine))
    desired_counts = {"A30-1-6C": 2, "A30-2-12C": 1}
    reasons = a30.apply_types(CUT, desired_counts)
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert f"(pid {vm.pid})" in reasons[0].text
    assert "1g.6gb" in reasons[0].text
    assert (words(a30), a30.carries(CUT)) == (["remove", "remove"], {"A30-1-6C": 2})
    assert a30.kernel.vfio.requests == []
    a30.kernel.end_vm(vm)
    assert a30.apply_types(CUT, desired_counts) == ()
    assert mine in a30.types(CUT)


def test_a_vm_keeps_mig_mode_until_it_ends(a30: VgpuHost) -> None:
    mine = next(vgpu for vgpu, name in a30.types(CUT).items() if name == "A30-2-12C")
    vm = a30.kernel.start_vm(a30.group_of(mine))
    reasons = a30.apply_types(CUT, {"A30-12C": 2})
    assert codes(reasons) == [ReasonCode.VGPU_IN_USE]
    assert list(a30.types(CUT)) == [mine]
    modes = a30.modes(CUT)
    assert (modes.mig, modes.mig_pending) == (True, True), "the mode is unchanged while the VM runs"
    a30.kernel.end_vm(vm)
    assert a30.apply_types(CUT, {"A30-12C": 2}) == ()


def test_more_instances_than_fit_are_refused_before_any_step(a30: VgpuHost) -> None:
    before = a30.types(CUT)
    for desired_counts in ({"A30-2-12C": 2, "A30-1-6C": 1}, {"A30-1-6C": 5}):
        assert codes(a30.apply_types(CUT, desired_counts)) == [ReasonCode.NO_ROOM]
    assert codes(a30.apply_types(CUT, {"A30-1-6C": 1, "A30-4C": 1})) == [ReasonCode.MODE_UNSUPPORTED]
    assert codes(a30.apply_types(CUT, {"A30-3-12C": 1})) == [ReasonCode.NO_SUCH_TYPE]
    assert a30.types(CUT) == before


def test_a_mig_mode_pending_a_reset_is_reported_and_the_vgpus_are_restored(a30: VgpuHost) -> None:
    """nvidia-smi exits with 0 while a process has the GPU open; here the process starts after the last snapshot."""
    a30.apply_types(SHARED, {"A30-12C": 2})
    before = a30.types(SHARED)

    def start(command: Sequence[str]) -> None:
        if "-mig" in command:
            a30.tools.before = lambda _: None
            a30.kernel.start_process("dcgm", "/dev/nvidia1")

    a30.tools.before = start
    reasons = a30.apply_types(SHARED, {"A30-1-6C": 2})
    assert codes(reasons) == [ReasonCode.MODE_PENDING]
    assert "gpu-reset" in reasons[0].text
    assert a30.types(SHARED) == before
    assert codes(a30.apply_types(SHARED, {"A30-1-6C": 2})) == [ReasonCode.MODE_PENDING]
    assert a30.steps == [], "no vGPU is removed before the reset"


def test_a_gpu_that_a_process_uses_keeps_its_mode(a30: VgpuHost) -> None:
    a30.apply_types(SHARED, {"A30-12C": 2})
    before = a30.types(SHARED)
    process = a30.kernel.start_process("python3", "/dev/nvidia1")
    reasons = a30.apply_types(SHARED, {"A30-1-6C": 2})
    assert codes(reasons) == [ReasonCode.IN_USE]
    assert f"(pid {process.pid})" in reasons[0].text
    assert a30.types(SHARED) == before
    assert (a30.steps, a30.modes(SHARED).mig_pending) == ([], False)


def test_a_gpu_that_a_process_uses_keeps_its_sizes(a10: VgpuHost) -> None:
    a10.apply_types(EQUAL, {"A10-12Q": 2})
    before = a10.types(EQUAL)
    a10.kernel.start_process("python3", "/dev/nvidia1")
    reasons = a10.desired_vgpus(EQUAL, DesiredVgpus({"A10-12Q": 1, "A10-4Q": 2}, Sizes.MIXED))
    assert (codes(reasons), a10.steps) == ([ReasonCode.IN_USE], []), "no vGPU is removed before the refusal"
    assert (a10.types(EQUAL), a10.modes(EQUAL).mixed_sizes) == (before, False)


def test_compute_instances_of_another_program_are_destroyed_with_their_gpu_instance(a30: VgpuHost) -> None:
    """As `nvidia-smi mig -cgi ... -C` creates them; the driver refuses to destroy one that a process uses."""
    vgpu_host = a30.kernel.vfs.carriers[CUT].vgpu_host
    vgpu_host.computing.update(instance.id for instance in vgpu_host.instances)
    assert a30.apply_types(CUT, {"A30-4-24C": 1}) == ()
    assert a30.carries(CUT) == {"A30-4-24C": 1}


def test_a_vgpu_that_another_program_creates_meanwhile_keeps_the_gpu_instances(a30: VgpuHost) -> None:
    """The new vGPU may use the instance that is about to be destroyed."""
    steps: list[str] = []

    def make(step: Step | RollBack) -> None:
        steps.append(step.text)
        if step.text.startswith(f"{CUT}: destroy"):
            slot = max(a30.kernel.vfs.carriers[CUT].vgpu_host.slots)
            backend_of(Framework.MDEV).create(a30.kernel, slot, VgpuType("NVIDIA A30-2-12C"), FOREIGN)

    reasons = change_vgpus(a30.change_host, CUT, DesiredVgpus({"A30-1-6C": 4}), a30.given, make)
    assert ReasonCode.STEP_FAILED in codes(reasons)
    assert "other vGPUs have just been created" in reasons[0].text
    assert FOREIGN in a30.types(CUT)
    assert not isinstance(found := a30.modes(CUT).gpu_instances, Unread)
    assert "2g.12gb" in {instance.profile for instance in found}


def test_mig_backed_vgpus_are_created_by_the_vendor_vfio_framework(tmp_path: Path) -> None:
    """This framework lists no types on a full GPU, not even the type of the GPU's own vGPUs."""
    host, gpu = VgpuHost("8xH100", tmp_path), PciAddress("0000:9d:00.0")
    for desired_vgpus in (
        DesiredVgpus({"H100XM-1-10C": 3, "H100XM-4-40C": 1}),
        DesiredVgpus({"H100XM-1-10C": 5, "H100XM-2-20C": 1}),
        DesiredVgpus({"H100XM-40C": 1, "H100XM-4C": 4}, Sizes.MIXED),
        DesiredVgpus({"H100XM-80C": 1}, Sizes.EQUAL),
        DesiredVgpus(),
    ):
        assert host.desired_vgpus(gpu, desired_vgpus) == ()
        board = observe(host.change_host, host.given, None).asked_state(gpu, DesiredVgpus())
        assert board is not None
        assert Counter(profile_name(str(vgpu.type)) for vgpu in board.host.live) == desired_vgpus.types
        assert host.desired_vgpus(gpu, desired_vgpus) == ()
        assert host.steps == []


# --- the scheduler


def test_the_scheduler_is_set_once_after_the_vgpus_are_created(t4: VgpuHost) -> None:
    desired_vgpus = DesiredVgpus({"T4-4Q": 4}, scheduler=EQUAL_SHARE)
    planned = [step.text for step in t4.planned(T4, desired_vgpus).steps]
    assert planned[-1] == f"{T4}: set the vGPU scheduler to equal-share, 4 ms"
    assert t4.desired_vgpus(T4, desired_vgpus) == ()
    assert t4.steps == planned
    assert vgpuscheduler.read_scheduler(t4.tools, T4) == EQUAL_SHARE
    assert t4.desired_vgpus(T4, desired_vgpus) == ()
    assert t4.steps == []
    assert t4.desired_vgpus(T4, DesiredVgpus({"T4-4Q": 4})) == ()
    assert vgpuscheduler.read_scheduler(t4.tools, T4) == EQUAL_SHARE, "the scheduler is unchanged"


def test_the_scheduler_change_waits_for_vms(t4: VgpuHost) -> None:
    t4.desired_vgpus(T4, DesiredVgpus({"T4-4Q": 2}))
    vm = t4.kernel.start_vm(t4.group_of(min(t4.types(T4))))
    desired_vgpus = DesiredVgpus({"T4-4Q": 4}, scheduler=EQUAL_SHARE)
    reasons = t4.desired_vgpus(T4, desired_vgpus)
    assert (codes(reasons), words(t4)) == ([ReasonCode.VGPU_IN_USE], ["create", "create"])
    assert f"(pid {vm.pid})" in reasons[0].text
    t4.kernel.end_vm(vm)
    assert t4.desired_vgpus(T4, desired_vgpus) == ()
    assert words(t4) == ["set"]


@pytest.mark.parametrize(
    ("at", "code"),
    [("-h", ReasonCode.IN_USE), ("-i", ReasonCode.STEP_FAILED)],
    ids=["the step's own walk", "the driver"],
)
def test_vgpus_stay_if_a_vm_opens_one_before_the_scheduler_is_set(t4: VgpuHost, at: str, code: ReasonCode) -> None:
    """The walk of the step finds the VM; one that starts after it is found by the driver alone."""
    sets: list[Sequence[str]] = []

    def start(command: Sequence[str]) -> None:
        sets.extend([command] if {"set-scheduler-state", "-i"} <= set(command) else [])
        if {"set-scheduler-state", at} <= set(command):
            t4.kernel.start_vm(t4.group_of(min(t4.types(T4))))

    t4.tools.before = start
    assert codes(t4.desired_vgpus(T4, DesiredVgpus({"T4-4Q": 4}, scheduler=EQUAL_SHARE))) == [code]
    assert len(sets) == (at == "-i"), "a VM that the walk finds is not put to the test by the driver"
    assert t4.carries(T4) == {"T4-4Q": 4}


def test_a_scheduler_that_can_not_be_set_is_tried_once(t4: VgpuHost) -> None:
    sets: list[Sequence[str]] = []

    def refuse(command: Sequence[str]) -> None:
        if {"set-scheduler-state", "-i"} <= set(command):
            sets.append(command)
            raise OSError(errno.EIO, "Input/output error")

    t4.tools.before = refuse
    assert codes(t4.desired_vgpus(T4, DesiredVgpus({"T4-4Q": 4}, scheduler=EQUAL_SHARE))) == [ReasonCode.STEP_FAILED]
    assert len(sets) == 1


@pytest.mark.parametrize(
    ("simulated", "gpu", "desired_vgpus"),
    [
        ("2xA30", CUT, DesiredVgpus({"A30-1-6C": 4}, scheduler=EQUAL_SHARE)),
        ("2xA10-vgpu", MIXED, DesiredVgpus({"A10-12Q": 2}, scheduler=Scheduler(SchedulerPolicy.FIXED_SHARE))),
        ("2xA10-vgpu", MIXED, DesiredVgpus({"A10-12Q": 2}, scheduler=Scheduler(SchedulerPolicy.EQUAL_SHARE, 31))),
    ],
)
def test_a_scheduler_that_the_mode_does_not_support_is_refused_before_any_step(
    simulated: str, gpu: PciAddress, desired_vgpus: DesiredVgpus, tmp_path: Path
) -> None:
    host = VgpuHost(simulated, tmp_path)
    before = host.types(gpu)
    assert codes(host.desired_vgpus(gpu, desired_vgpus)) == [ReasonCode.SCHEDULER_UNFIT]
    assert (host.steps, host.types(gpu)) == ([], before)


def test_a_scheduler_that_the_desired_mode_supports_is_accepted(a10: VgpuHost) -> None:
    fixed = Scheduler(SchedulerPolicy.FIXED_SHARE)
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-12Q": 2}, Sizes.EQUAL, fixed)) == ()
    found = vgpuscheduler.read_scheduler(a10.tools, MIXED)
    assert isinstance(found, Scheduler)
    assert found.policy is SchedulerPolicy.FIXED_SHARE


# --- calls of nvidia-smi


def remove_programs(host: VgpuHost) -> None:
    """Remove nvidia-smi and sriov-manage from a host."""
    host.tools, before = SimTools(host.kernel, programs=()), host.change_host
    host.change_host = ChangeHost(host.kernel, host.tools, before.original_drivers, before.locks, before.device_plugins)


def test_vgpus_of_one_size_that_do_not_fit_in_mixed_size_mode_are_refused_before_a_step(a10: VgpuHost) -> None:
    """Each vGPU takes one of its size's placements there, so that four A10-4Q fit, and six in equal-size mode."""
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-12Q": 2})) == ()
    before = a10.types(MIXED)
    six = DesiredVgpus({"A10-4Q": 6})
    planned, reasons = a10.planned(MIXED, six), a10.desired_vgpus(MIXED, six)
    assert (codes(reasons), planned.steps, a10.steps) == ([ReasonCode.NO_ROOM], (), [])
    assert (planned.refusals, a10.types(MIXED)) == (reasons, before)
    assert "at most 4 of that size fit in mixed-size mode" in reasons[0].text
    assert "`sizes: equal`: 6 fit" in (reasons[0].fix or "")
    one_more = a10.planned(MIXED, DesiredVgpus({"NVIDIA A10-4Q": 5}, added=1))
    assert one_more.refusals[0].message.endswith("4 exist and 4 fit in mixed-size mode")
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-4Q": 4})) == ()
    assert a10.desired_vgpus(MIXED, DesiredVgpus({"A10-4Q": 6}, Sizes.EQUAL)) == ()
    assert a10.carries(MIXED) == {"A10-4Q": 6}


def test_equal_size_mode_is_named_only_where_more_fit_in_it(a10: VgpuHost) -> None:
    (reason,) = a10.planned(MIXED, DesiredVgpus({"A10-4Q": 6})).refusals
    assert "name 4 or fewer in the vGPU config; or apply a vGPU config with `sizes: equal`: 6 fit" in (reason.fix or "")
    (reason,) = a10.planned(MIXED, DesiredVgpus({"A10-24Q": 2})).refusals
    assert (reason.code, "sizes: equal" in (reason.fix or "")) == (ReasonCode.NO_ROOM, False)


def test_vgpus_of_one_size_are_made_without_nvidia_smi_where_only_their_number_needs_it(a10: VgpuHost) -> None:
    assert a10.desired_vgpus(EQUAL, DesiredVgpus({"A10-12Q": 2})) == ()
    remove_programs(a10)
    assert a10.desired_vgpus(EQUAL, DesiredVgpus({"A10-4Q": 6})) == ()
    assert a10.carries(EQUAL) == {"A10-4Q": 6}


def test_nvidia_smi_runs_only_if_the_desired_state_needs_its_report(a10: VgpuHost, a30: VgpuHost, t4: VgpuHost) -> None:
    a10.desired_vgpus(EQUAL, DesiredVgpus({"A10-4Q": 4}))
    a10.desired_vgpus(EQUAL, DesiredVgpus())
    t4.desired_vgpus(T4, DesiredVgpus({"T4-4Q": 4}))
    a30.desired_vgpus(SHARED, DesiredVgpus({"A30-12C": 2}))
    assert (a10.asked(), t4.asked(), a30.asked()) == ([], [], [])
    a10.planned(EQUAL, DesiredVgpus({"A10-4Q": 6}))
    assert a10.asked() == [("-q", "-i", EQUAL)], "mixed-size mode has room for four"
    a30.planned(CUT, DesiredVgpus())
    assert a30.asked() == []
    a30.planned(CUT, DesiredVgpus({"A30-12C": 2}))
    assert a30.asked() == [("-q", "-i", CUT), ("mig", "-i", CUT, "-lgi"), ("vgpu", "-i", CUT, "-s", "-v")]


@pytest.mark.parametrize(
    "desired_vgpus",
    [
        DesiredVgpus({"A10-12Q": 1}, Sizes.MIXED),
        DesiredVgpus({"A10-12Q": 1, "A10-4Q": 3}),
        DesiredVgpus({"A10-12Q": 2}),
        DesiredVgpus({"A10-12Q": 1, "A10-4Q": 1}, scheduler=EQUAL_SHARE),
    ],
)
def test_nothing_changes_while_the_modes_are_unknown_without_nvidia_smi(
    a10: VgpuHost, desired_vgpus: DesiredVgpus
) -> None:
    before = a10.types(MIXED)
    remove_programs(a10)
    reasons = a10.desired_vgpus(MIXED, desired_vgpus)
    assert set(codes(reasons)) == {ReasonCode.UNREAD}
    assert "nvidia-smi" in reasons[0].text
    assert (a10.steps, a10.types(MIXED)) == ([], before)
