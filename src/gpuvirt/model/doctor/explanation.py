"""The way of one device, from the bus to a virtual machine: each stage in order, and the one that blocks it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuvirt.model.doctor.findings import Finding
from gpuvirt.model.reasons import ReasonCode

VERSION = 1
NOT_REACHED = "not reached"


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
    """How it is with a stage."""

    OK = "ok"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    """It was not looked at: something before it blocks, or nobody has shown what it needs."""


STEPS: Mapping[ReasonCode, Step] = {
    ReasonCode.FELL_OFF_BUS: Step.BUS,
    ReasonCode.DEVICE_GONE: Step.BUS,
    ReasonCode.MALFORMED_SYSFS_ENTRY: Step.BUS,
    ReasonCode.UNREAD: Step.BUS,
    ReasonCode.NO_IOMMU_GROUP: Step.IOMMU_GROUP,
    ReasonCode.GROUP_NOT_VIABLE: Step.WHOLE_GROUP,
    ReasonCode.GROUP_HELD: Step.WHOLE_GROUP,
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
"""The stage that each reason against a device blocks; any other keeps it from being offered."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage."""

    step: Step
    standing: Standing
    message: str


@dataclass(frozen=True, slots=True)
class Way:
    """The whole; its JSON is a contract (docs/reference.md)."""

    target: str
    """What was asked for."""
    device: str | None
    """The device whose way it is; of a resource, the one that gets furthest."""
    resource: str | None
    stages: tuple[Stage, ...]
    blocker: Finding | None
    """The one thing that is in the way; None where the device can be given to a machine now."""
    invalid: tuple[Finding, ...] = ()
    """What is invalid of the node's desired state: the device may stand as it does because of it."""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage says, and what blocks it."""

    step: Step
    message: str
    blocker: Finding | None = None
    skipped: bool = False


def assemble(target: str, device: str | None, resource: str | None, found: Iterable[Found]) -> Way:
    """Return a way of what its stages say; after the first that blocks, the others are not looked at."""
    stages: list[Stage] = []
    blocker: Finding | None = None
    for one in found:
        if blocker is not None:
            break
        blocker = one.blocker
        standing = Standing.BLOCKED if blocker is not None else Standing.SKIPPED if one.skipped else Standing.OK
        stages.append(Stage(one.step, standing, one.message))
    reached = {stage.step for stage in stages}
    stages += [Stage(step, Standing.SKIPPED, NOT_REACHED) for step in Step if step not in reached]
    return Way(target, device, resource, tuple(stages), blocker)


def progress(way: Way) -> int:
    """Return how many stages a device gets through."""
    blocked = (at for at, stage in enumerate(way.stages) if stage.standing is Standing.BLOCKED)
    return next(blocked, len(way.stages))
