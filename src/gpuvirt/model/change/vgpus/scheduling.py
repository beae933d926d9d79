"""The vGPU schedulers that a GPU can have, the plan that sets one, and its value of RmPVMRL, the driver's option."""

from collections.abc import Iterator

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, GpuModes, Scheduler, SchedulerPolicy
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import SetScheduler
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals, shortfalls

LEAST_SLICE_MS, MOST_SLICE_MS = 1, 30

WITH_DEFAULT_SLICE = {
    SchedulerPolicy.BEST_EFFORT: 0x00,
    SchedulerPolicy.EQUAL_SHARE: 0x01,
    SchedulerPolicy.FIXED_SHARE: 0x11,
}
WITH_SLICE = {SchedulerPolicy.EQUAL_SHARE: 0x0003, SchedulerPolicy.FIXED_SHARE: 0x0011}
"""The low bits; the milliseconds start at bit 16. NVIDIA's examples: 0x00030003, 0x00180011 (user guide, 7.3)."""


class SchedulerContext(msgspec.Struct, frozen=True):
    """The conditions that keep a scheduler: a load of the driver resets it, and a change of VFs may."""

    driver: str
    framework: Framework
    virtfns: tuple[PciAddress, ...]


class SchedulerReport(msgspec.Struct, frozen=True):
    """The scheduler of a GPU as nvidia-smi reported it."""

    scheduler: Scheduler | Unread
    scheduler_context: SchedulerContext
    at_s: float


def scheduler_context_of(function: PciFunction, gpu_state: GpuState) -> SchedulerContext | None:
    """Return the scheduler context of a GPU; None if NVIDIA's driver does not create time-sliced vGPUs on it."""
    if function.id.vendor != NVIDIA or not isinstance(function.driver, str) or function.on_vfio:
        return None
    return (
        SchedulerContext(function.driver, gpu_state.host.framework, function.virtfns) if gpu_state.shares_time else None
    )


def refuse(modes: GpuModes, desired: Scheduler) -> tuple[Reason, ...]:
    """Return why a GPU in its present modes can't have a scheduler; nothing if the scheduler may be set."""
    return tuple(_refusals(modes, desired))


def _refusals(modes: GpuModes, desired: Scheduler) -> Iterator[Reason]:
    if isinstance(modes.mig, Unread):
        yield refusals.unread(modes.gpu, modes.mig)
    elif modes.mig:
        yield _unfit(
            modes.gpu,
            "is in MIG mode, where each vGPU has its own processors and vGPUs do not share time",
            "MIG Mode / Current: Enabled",
            f"nvidia-smi -i {modes.gpu} -mig 0, when the GPU carries no vGPU",
        )
    mixed_sizes = modes.mixed_sizes if desired.policy is SchedulerPolicy.FIXED_SHARE else None
    if isinstance(mixed_sizes, Unread):
        yield refusals.unread(modes.gpu, mixed_sizes)
    elif mixed_sizes:
        yield _unfit(
            modes.gpu,
            "is in mixed-size mode, which has no fixed share: the shares of vGPUs of several sizes do not add up",
            "vGPU Heterogeneous Mode: Enabled",
            f"set equal-share; or nvidia-smi vgpu -i {modes.gpu} -shm 0, when the GPU carries no vGPU",
        )
    yield from _bad_slice(modes.gpu, desired)


def _bad_slice(gpu: PciAddress, desired: Scheduler) -> Iterator[Reason]:
    timeslice_ms = desired.timeslice_ms
    if timeslice_ms is None:
        return
    if desired.policy is SchedulerPolicy.BEST_EFFORT:
        yield _unfit(gpu, "has no time slice under best-effort", f"{timeslice_ms} ms", "leave the time slice out")
    elif not LEAST_SLICE_MS <= timeslice_ms <= MOST_SLICE_MS:
        fix = f"set a time slice from {LEAST_SLICE_MS} to {MOST_SLICE_MS} ms"
        yield _unfit(gpu, f"can't have a time slice of {timeslice_ms} ms", f"{timeslice_ms} ms", fix)


def not_nvidias(gpu: PciAddress) -> Reason:
    """Return why a GPU of another vendor has no scheduler."""
    return _unfit(
        gpu,
        "has no vGPU scheduler: only NVIDIA's vGPU manager has one",
        "a GPU of another vendor",
        "leave the scheduler out",
    )


def is_met(found: Scheduler, desired: Scheduler) -> bool:
    """Return whether a GPU has the desired scheduler; any time slice will do if none is desired."""
    return found.policy is desired.policy and desired.timeslice_ms in {None, found.timeslice_ms}


def plan(gpu_state: GpuState, desired: Scheduler) -> VgpuPlan:
    """Return the plan that sets a scheduler which the GPU's modes allow; it is empty if nvidia-smi has not reported."""
    gpu, found = gpu_state.host.gpu, gpu_state.smi.scheduler if gpu_state.smi is not None else None
    if isinstance(found, Unread):
        return VgpuPlan(gpu, refusals=(refusals.unread(gpu, found),))
    if found is None or is_met(found, desired):
        return VgpuPlan(gpu)
    if gpu_state.running:
        users = sorted({user for vgpu in gpu_state.running for user in gpu_state.users.get(vgpu, ())})
        return VgpuPlan(
            gpu,
            pending=(
                shortfalls.still_used(
                    gpu, f"gets its scheduler ({desired.text}) when no VM runs on it; now running: {', '.join(users)}"
                ),
            ),
        )
    return VgpuPlan(gpu, steps=(SetScheduler(gpu, desired),))


def registry_value(desired: Scheduler) -> int:
    """Return the value of RmPVMRL for a scheduler that `refuse` allows."""
    if desired.timeslice_ms is None:
        return WITH_DEFAULT_SLICE[desired.policy]
    return desired.timeslice_ms << 16 | WITH_SLICE[desired.policy]


def registry_scheduler(value: int) -> Scheduler | None:
    """Return the scheduler of a value of RmPVMRL, None for a value that `registry_value` never returns."""
    schedulers = {number: Scheduler(policy) for policy, number in WITH_DEFAULT_SLICE.items()}
    for policy, low in WITH_SLICE.items():
        schedulers |= {ms << 16 | low: Scheduler(policy, ms) for ms in range(LEAST_SLICE_MS, MOST_SLICE_MS + 1)}
    return schedulers.get(value)


def _unfit(gpu: PciAddress, message: str, seen: str, fix: str) -> Reason:
    """The GPU's mode, or the time slice, rules the scheduler out."""
    return Reason(ReasonCode.SCHEDULER_UNFIT, gpu, message, (Seen("", seen),), fix)
