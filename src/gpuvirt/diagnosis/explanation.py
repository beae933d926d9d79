"""The stages of one device, from the PCI bus to a VM, in order, and the stage that blocks the device."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from gpuvirt.diagnosis.findings import Finding
from gpuvirt.model.reasons import ReasonCode

VERSION = 1
NOT_REACHED = "not reached"

StepT = TypeVar("StepT", bound=StrEnum)


class StageName(StrEnum):
    """The stages."""

    BUS = "bus"
    IOMMU_GROUP = "iommu-group"
    WHOLE_GROUP = "whole-group"
    DRIVER = "driver"
    NODE = "node"
    OFFERED = "offered"
    REGISTERED = "registered"
    COUNTED = "counted"
    FREE = "free"
    PERMITTED = "permitted"


class StageOutcome(StrEnum):
    """The result of a stage."""

    OK = "ok"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    """The stage was not checked: an earlier stage blocks, or its input is missing."""


STEPS: Mapping[ReasonCode, StageName] = {
    ReasonCode.FELL_OFF_BUS: StageName.BUS,
    ReasonCode.BAR_UNASSIGNED: StageName.BUS,
    ReasonCode.DEVICE_GONE: StageName.BUS,
    ReasonCode.AWAITED_AFTER_REBOOT: StageName.DRIVER,
    ReasonCode.MALFORMED_SYSFS_ENTRY: StageName.BUS,
    ReasonCode.UNREAD: StageName.BUS,
    ReasonCode.NO_IOMMU_GROUP: StageName.IOMMU_GROUP,
    ReasonCode.GROUP_NOT_VIABLE: StageName.WHOLE_GROUP,
    ReasonCode.GROUP_ALLOCATED: StageName.WHOLE_GROUP,
    ReasonCode.ALLOCATIONS_UNKNOWN: StageName.WHOLE_GROUP,
    ReasonCode.ADMISSION_UNSETTLED: StageName.WHOLE_GROUP,
    ReasonCode.NATIVE_DRIVER: StageName.DRIVER,
    ReasonCode.NO_DRIVER: StageName.DRIVER,
    ReasonCode.BOOT_CONSOLE: StageName.DRIVER,
    ReasonCode.GRACE_DRIVER_MISSING: StageName.DRIVER,
    ReasonCode.UNBIND_PENDING: StageName.DRIVER,
    ReasonCode.DRIVER_CHANGED: StageName.DRIVER,
    ReasonCode.CARRIES_VGPUS: StageName.DRIVER,
    ReasonCode.NO_VGPUS: StageName.DRIVER,
    ReasonCode.VFS_ENABLED: StageName.DRIVER,
    ReasonCode.VIRTUAL_FUNCTION: StageName.DRIVER,
    ReasonCode.TYPE_CHANGED: StageName.DRIVER,
    ReasonCode.NODE_MISSING: StageName.NODE,
    ReasonCode.IN_USE_ELSEWHERE: StageName.FREE,
}
"""The stage that each reason of a device blocks; a reason that is not listed blocks OFFERED."""


class DeviceStage(msgspec.Struct, frozen=True):
    """One stage."""

    step: StageName
    standing: StageOutcome
    message: str


class DeviceExplanation(msgspec.Struct, frozen=True):
    """The explanation of a device or a resource; its JSON is a contract (docs/reference/json.md)."""

    target: str
    """The address, vGPU id or resource name that the user gave."""
    device: str | None
    """The explained device; for a resource, the device that passes the most stages."""
    resource: str | None
    stages: tuple[DeviceStage, ...]
    blocker: Finding | None
    """The finding that blocks the device; None where a VM can get the device now."""
    invalid: tuple[Finding, ...] = ()
    """The invalid values of the node's desired state: they may be why the device is in this state."""
    resource_type: str | None = None
    """The vGPU type of an on-demand resource."""
    on_demand: bool = False
    """Whether a GPU in mode on-demand creates the vGPU when a pod starts."""
    version: int = VERSION


class StageResult(msgspec.Struct, Generic[StepT], frozen=True):
    """The message of one stage, and the finding that blocks it."""

    step: StepT
    message: str
    blocker: Finding | None = None
    skipped: bool = False

    @property
    def standing(self) -> StageOutcome:
        """The result of the stage."""
        if self.blocker is not None:
            return StageOutcome.BLOCKED
        return StageOutcome.SKIPPED if self.skipped else StageOutcome.OK


def blocked(step: StepT, blocker: Finding) -> StageResult[StepT]:
    """Return the result of a stage that a finding blocks."""
    return StageResult(step, f"{blocker.subject} {blocker.message}", blocker)


def until_blocked(
    results: Iterable[StageResult[StepT]], steps: type[StepT]
) -> tuple[Sequence[StageResult[StepT]], Finding | None]:
    """Return a result for each of `steps`, with the first blocker; stages after a blocked one are not evaluated."""
    reached: list[StageResult[StepT]] = []
    blocker: Finding | None = None
    for result in results:
        reached.append(result)
        blocker = result.blocker
        if blocker is not None:
            break
    done = {result.step for result in reached}
    later = [StageResult(step, NOT_REACHED, skipped=True) for step in steps if step not in done]
    return [*reached, *later], blocker


def assemble(
    target: str, device: str | None, resource: str | None, results: Iterable[StageResult[StageName]]
) -> DeviceExplanation:
    """Return the explanation that the results of the stages give."""
    stages, blocker = until_blocked(results, StageName)
    rows = tuple(DeviceStage(stage.step, stage.standing, stage.message) for stage in stages)
    return DeviceExplanation(target, device, resource, rows, blocker)


def progress(explanation: DeviceExplanation) -> int:
    """Return how many stages a device passes."""
    blocked_at = (index for index, stage in enumerate(explanation.stages) if stage.standing is StageOutcome.BLOCKED)
    return next(blocked_at, len(explanation.stages))
