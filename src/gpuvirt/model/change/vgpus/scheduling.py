"""Which vGPU scheduler a GPU takes, how it comes to have it, and as what the driver is told so for good (RmPVMRL)."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, GpuModes, Scheduler, SchedulerPolicy
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import SetScheduler
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.reasons import Reason, refusals, shortfalls

LEAST_SLICE_MS, MOST_SLICE_MS = 1, 30

WITH_DEFAULT_SLICE = {
    SchedulerPolicy.BEST_EFFORT: 0x00,
    SchedulerPolicy.EQUAL_SHARE: 0x01,
    SchedulerPolicy.FIXED_SHARE: 0x11,
}
WITH_SLICE = {SchedulerPolicy.EQUAL_SHARE: 0x0003, SchedulerPolicy.FIXED_SHARE: 0x0011}
"""To which the milliseconds are added from bit 16 on; NVIDIA's examples: 0x00030003, 0x00180011 (user guide, 7.3)."""


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What a GPU's scheduler stands on: the driver has its own again when it is loaded, and perhaps when VFs change."""

    driver: str
    framework: Framework
    virtfns: tuple[PciAddress, ...]


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """The scheduler of a GPU as nvidia-smi told it."""

    scheduler: Scheduler | Unread
    scheduler_context: SchedulerContext
    at_s: float


def scheduler_context_of(function: PciFunction, gpu_state: GpuState) -> SchedulerContext | None:
    """Return what a GPU's scheduler stands on, None where it shares its time between no vGPUs that NVIDIA's makes."""
    if function.id.vendor != NVIDIA or not isinstance(function.driver, str) or function.on_vfio:
        return None
    return (
        SchedulerContext(function.driver, gpu_state.host.framework, function.virtfns) if gpu_state.shares_time else None
    )


def refuse(modes: GpuModes, desired: Scheduler) -> tuple[Reason, ...]:
    """Return why a GPU does not take a scheduler as it stands; nothing where it may be set."""
    return tuple(_refusals(modes, desired))


def _refusals(modes: GpuModes, desired: Scheduler) -> Iterator[Reason]:
    fixed = desired.policy is SchedulerPolicy.FIXED_SHARE
    if isinstance(modes.mig, Unread):
        yield refusals.unread(modes.gpu, modes.mig)
    elif modes.mig:
        yield shortfalls.scheduler_unfit(
            modes.gpu,
            "is in MIG mode, where each vGPU has processors of its own and no time is shared",
            "MIG Mode / Current: Enabled",
            f"nvidia-smi -i {modes.gpu} -mig 0, when it carries nothing",
        )
    if fixed and isinstance(modes.mixed_sizes, Unread):
        yield refusals.unread(modes.gpu, modes.mixed_sizes)
    elif fixed and modes.mixed_sizes:
        yield shortfalls.scheduler_unfit(
            modes.gpu,
            "is in mixed-size mode, which knows no fixed share: the parts of vGPUs of several sizes don't add up",
            "vGPU Heterogeneous Mode: Enabled",
            f"equal-share; or nvidia-smi vgpu -i {modes.gpu} -shm 0, when it carries no vGPU",
        )
    yield from _bad_slice(modes.gpu, desired)


def _bad_slice(gpu: PciAddress, desired: Scheduler) -> Iterator[Reason]:
    timeslice_ms = desired.timeslice_ms
    if timeslice_ms is None:
        return
    if desired.policy is SchedulerPolicy.BEST_EFFORT:
        yield shortfalls.scheduler_unfit(
            gpu, "has no time slice to be set under best-effort", f"{timeslice_ms} ms", "leave the time slice out"
        )
    elif not LEAST_SLICE_MS <= timeslice_ms <= MOST_SLICE_MS:
        expected = f"a time slice from {LEAST_SLICE_MS} to {MOST_SLICE_MS} ms"
        yield shortfalls.scheduler_unfit(
            gpu, f"takes no time slice of {timeslice_ms} ms", f"{timeslice_ms} ms", expected
        )


def not_nvidias(gpu: PciAddress) -> Reason:
    """Return why a GPU of another vendor's gets no scheduler."""
    return shortfalls.scheduler_unfit(
        gpu, "has no vGPU scheduler: NVIDIA's vGPU manager alone has one", "another vendor's", "leave it out"
    )


def is_met(found: Scheduler, desired: Scheduler) -> bool:
    """Return whether a GPU's scheduler is as wanted; without a wished time slice any is."""
    return found.policy is desired.policy and desired.timeslice_ms in {None, found.timeslice_ms}


def plan(gpu_state: GpuState, desired: Scheduler) -> VgpuPlan:
    """Return how a GPU comes to have a scheduler that its mode takes; nothing to do where nobody asked what it has."""
    gpu, found = gpu_state.host.gpu, gpu_state.smi.scheduler if gpu_state.smi is not None else None
    if isinstance(found, Unread):
        return VgpuPlan(gpu, refusals=(refusals.unread(gpu, found),))
    if found is None or is_met(found, desired):
        return VgpuPlan(gpu)
    if gpu_state.running:
        users = sorted({user for one in gpu_state.running for user in gpu_state.users.get(one, ())})
        return VgpuPlan(gpu, pending=(shortfalls.scheduler_waits(gpu, users, desired.text),))
    return VgpuPlan(gpu, steps=(SetScheduler(gpu, desired),))


def registry_value(desired: Scheduler) -> int:
    """Return the value of RmPVMRL for a scheduler that `refuse` has nothing against."""
    if desired.timeslice_ms is None:
        return WITH_DEFAULT_SLICE[desired.policy]
    return desired.timeslice_ms << 16 | WITH_SLICE[desired.policy]


def registry_scheduler(value: int) -> Scheduler | None:
    """Return the scheduler that a value of RmPVMRL tells, None for one that `registry_value` never gives."""
    told = {number: Scheduler(policy) for policy, number in WITH_DEFAULT_SLICE.items()}
    for policy, low in WITH_SLICE.items():
        told |= {ms << 16 | low: Scheduler(policy, ms) for ms in range(LEAST_SLICE_MS, MOST_SLICE_MS + 1)}
    return told.get(value)
