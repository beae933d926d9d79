"""The stages of one device, from the PCI bus to a VM, in order, and the stage that blocks the device."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from gpuvirt.model.doctor.findings import Finding
from gpuvirt.model.reasons import ReasonCode

VERSION = 1
NOT_REACHED = "not reached"

StepT = TypeVar("StepT", bound=StrEnum)


class Step(StrEnum):
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


class Standing(StrEnum):
    """The result of a stage."""

    OK = "ok"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    """The stage was not checked: an earlier stage blocks, or its input is missing."""


STEPS: Mapping[ReasonCode, Step] = {
    ReasonCode.FELL_OFF_BUS: Step.BUS,
    ReasonCode.DEVICE_GONE: Step.BUS,
    ReasonCode.AWAITED_AFTER_REBOOT: Step.DRIVER,
    ReasonCode.MALFORMED_SYSFS_ENTRY: Step.BUS,
    ReasonCode.UNREAD: Step.BUS,
    ReasonCode.NO_IOMMU_GROUP: Step.IOMMU_GROUP,
    ReasonCode.GROUP_NOT_VIABLE: Step.WHOLE_GROUP,
    ReasonCode.GROUP_ALLOCATED: Step.WHOLE_GROUP,
    ReasonCode.ALLOCATIONS_UNKNOWN: Step.WHOLE_GROUP,
    ReasonCode.NATIVE_DRIVER: Step.DRIVER,
    ReasonCode.NO_DRIVER: Step.DRIVER,
    ReasonCode.UNBIND_PENDING: Step.DRIVER,
    ReasonCode.DRIVER_CHANGED: Step.DRIVER,
    ReasonCode.CARRIES_VGPUS: Step.DRIVER,
    ReasonCode.NO_VGPUS: Step.DRIVER,
    ReasonCode.VFS_ENABLED: Step.DRIVER,
    ReasonCode.VIRTUAL_FUNCTION: Step.DRIVER,
    ReasonCode.TYPE_CHANGED: Step.DRIVER,
    ReasonCode.NODE_MISSING: Step.NODE,
    ReasonCode.IN_USE_ELSEWHERE: Step.FREE,
}
"""The stage that each reason of a device blocks; a reason that is not listed blocks OFFERED."""


class Stage(msgspec.Struct, frozen=True):
    """One stage."""

    step: Step
    standing: Standing
    message: str


class DeviceExplanation(msgspec.Struct, frozen=True):
    """The explanation of a device or a resource; its JSON is a contract (docs/reference/json.md)."""

    target: str
    """The address, vGPU id or resource name that the user gave."""
    device: str | None
    """The explained device; for a resource, the device that passes the most stages."""
    resource: str | None
    stages: tuple[Stage, ...]
    blocker: Finding | None
    """The finding that blocks the device; None where a VM can get the device now."""
    invalid: tuple[Finding, ...] = ()
    """The invalid values of the node's desired state: they may be why the device is in this state."""
    version: int = VERSION


class StageResult(msgspec.Struct, Generic[StepT], frozen=True):
    """The message of one stage, and the finding that blocks it."""

    step: StepT
    message: str
    blocker: Finding | None = None
    skipped: bool = False

    @property
    def standing(self) -> Standing:
        """The result of the stage."""
        if self.blocker is not None:
            return Standing.BLOCKED
        return Standing.SKIPPED if self.skipped else Standing.OK


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
    target: str, device: str | None, resource: str | None, results: Iterable[StageResult[Step]]
) -> DeviceExplanation:
    """Return the explanation that the results of the stages give."""
    stages, blocker = until_blocked(results, Step)
    rows = tuple(Stage(stage.step, stage.standing, stage.message) for stage in stages)
    return DeviceExplanation(target, device, resource, rows, blocker)


def progress(explanation: DeviceExplanation) -> int:
    """Return how many stages a device passes."""
    blocked_at = (index for index, stage in enumerate(explanation.stages) if stage.standing is Standing.BLOCKED)
    return next(blocked_at, len(explanation.stages))
