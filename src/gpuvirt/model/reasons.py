"""Why something is not offered, unhealthy, refused or pending: one code everywhere, with what was seen and the fix."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ReasonCode(StrEnum):
    """The same word in the command line, in metrics and in the log."""

    # not offered
    NATIVE_DRIVER = "NativeDriver"
    NO_DRIVER = "NoDriver"
    NO_IOMMU_GROUP = "NoIommuGroup"
    ADDRESS_NOT_ACCEPTED = "AddressNotAccepted"
    NOT_ASKED_FOR = "NotAskedFor"
    VIRTUAL_FUNCTION = "VirtualFunction"
    VFS_ENABLED = "VfsEnabled"
    CARRIES_VGPUS = "CarriesVgpus"
    NO_VGPUS = "NoVgpus"
    GROUP_HELD = "GroupHeld"
    NAME_TAKEN = "NameTaken"
    HELD_UNDER_OTHER_NAME = "HeldUnderOtherName"
    ODD_ENTRY = "OddEntry"
    WITHDRAWN = "Withdrawn"

    # offered, unhealthy
    NODE_MISSING = "NodeMissing"
    GROUP_NOT_VIABLE = "GroupNotViable"
    FELL_OFF_BUS = "FellOffBus"
    UNBIND_PENDING = "UnbindPending"
    IN_USE_ELSEWHERE = "InUseElsewhere"
    DRIVER_CHANGED = "DriverChanged"
    DEVICE_GONE = "DeviceGone"
    TYPE_CHANGED = "TypeChanged"
    UNREAD = "Unread"
    NO_RESET = "NoReset"

    # refused at Allocate
    UNKNOWN_RESOURCE = "UnknownResource"
    UNKNOWN_DEVICE = "UnknownDevice"
    IDENTITY_CHANGED = "IdentityChanged"
    GROUP_CHANGED = "GroupChanged"

    # not moved to another driver
    IN_USE = "InUse"
    HELD_BY_POD = "HeldByPod"
    ALLOCATIONS_UNKNOWN = "AllocationsUnknown"
    ALLOCATION_UNMAPPED = "AllocationUnmapped"
    STILL_COUNTED = "StillCounted"
    USERS_UNSEEN = "UsersUnseen"
    HOST_NEEDS = "HostNeeds"
    FOREIGN_ENDPOINT = "ForeignEndpoint"
    DRIVER_LOCK = "DriverLock"
    DRIVER_PINNED = "DriverPinned"
    PREREQUISITE_MISSING = "PrerequisiteMissing"
    STEP_FAILED = "StepFailed"
    WRITE_BLOCKED = "WriteBlocked"
    UNIT_BUSY = "UnitBusy"
    PLAN_OUTDATED = "PlanOutdated"
    AGENT_SILENT = "AgentSilent"
    MANAGED = "ManagedByAgent"

    # not carved into the vGPUs that are wanted
    VGPU_IN_USE = "VgpuInUse"
    SIZES_DIFFER = "SizesDiffer"
    NO_ROOM = "NoRoom"
    NO_SUCH_TYPE = "NoSuchType"
    NO_VGPU_HOST = "NoVgpuHost"
    VF_REFUSES = "VfRefuses"
    CONFIG_INVALID = "ConfigInvalid"
    MODE_UNFIT = "ModeUnfit"
    MODE_PENDING = "ModePending"
    OPERANDS_THERE = "OperandsThere"

    # no vGPU scheduler set
    SCHEDULER_UNFIT = "SchedulerUnfit"
    OPTION_ELSEWHERE = "OptionElsewhere"

    # not done by the controller
    OTHER_OPERATOR = "OtherOperator"
    IMAGE_UNKNOWN = "ImageUnknown"
    COMPONENTS_OFF = "ComponentsOff"
    OS_UNKNOWN = "OsUnknown"
    POD_MISSING = "PodMissing"
    KATA_NOT_SUPPORTED = "KataNotSupported"

    # the agent itself
    NOT_REGISTERED = "NotRegistered"
    KUBELET_AWAY = "KubeletAway"
    SOCKET_TAKEN = "SocketTaken"
    SCAN_BLOCKED = "ScanBlocked"
    SCAN_FAILED = "ScanFailed"
    LEDGER_LOST = "LedgerLost"
    LEDGER_NOT_WRITTEN = "LedgerNotWritten"
    CDI_NOT_WRITTEN = "CdiNotWritten"
    HOLDERS_UNHEARD = "HoldersUnheard"
    WISHES_LOST = "WishesLost"
    WISHES_NOT_WRITTEN = "WishesNotWritten"
    API_SERVER_AWAY = "ApiServerAway"
    API_FORBIDDEN = "ApiForbidden"
    AWAITS_CONTROLLER = "AwaitsController"
    CONTROLLER_SILENT = "ControllerSilent"

    # KubeVirt's configuration
    FOREIGN_PROVIDER = "ForeignProvider"
    CONFIG_REVERTED = "ConfigReverted"
    KUBEVIRT_NOT_MANAGED = "KubeVirtNotManaged"
    KUBEVIRT_UNHEARD = "KubeVirtUnheard"
    KUBEVIRT_TOO_OLD = "KubeVirtTooOld"
    NAME_UNLISTED = "NameUnlisted"
    SELECTOR_TAKEN = "SelectorTaken"
    GATE_DISABLED = "GateDisabled"
    MDEVS_AT_RISK = "MdevsAtRisk"
    STILL_NAMED = "StillNamed"

    @property
    def passes(self) -> bool:
        """Whether a change that waits for it is pending: it passes when a user, a pod or another change ends."""
        return self in _PASSES


_PASSES = frozenset(
    {
        ReasonCode.CARRIES_VGPUS,
        ReasonCode.VFS_ENABLED,
        ReasonCode.VGPU_IN_USE,
        ReasonCode.IN_USE,
        ReasonCode.HELD_BY_POD,
        ReasonCode.ALLOCATION_UNMAPPED,
        ReasonCode.STILL_COUNTED,
        ReasonCode.HOLDERS_UNHEARD,
        ReasonCode.UNBIND_PENDING,
        ReasonCode.DRIVER_LOCK,
        ReasonCode.OPERANDS_THERE,
        ReasonCode.UNIT_BUSY,
        ReasonCode.PLAN_OUTDATED,
    }
)


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason."""

    code: ReasonCode
    subject: str
    """What it is about: a PCI address, an mdev, a resource, a file."""
    message: str
    """What is the matter, as a sentence that follows the subject: `is bound to nvidia`."""
    seen: str | None = None
    """Where it was seen and what stood there: `/sys/bus/pci/devices/0000:65:00.0/driver -> nvidia`."""
    fix: str | None = None
    """What to do about it."""

    @property
    def text(self) -> str:
        """The whole as one line."""
        parts = [f"{self.code}: {self.subject} {self.message}"]
        parts += [f"seen: {self.seen}"] if self.seen else []
        parts += [f"fix: {self.fix}"] if self.fix else []
        return "; ".join(parts)


def code_in(text: str) -> ReasonCode | None:
    """Return the code that a reason's text begins with, None where it begins with none."""
    code = text.partition(":")[0]
    return ReasonCode(code) if code in set(ReasonCode) else None


def in_words(reasons: Sequence[Reason]) -> str:
    """Return several reasons as one line."""
    return " | ".join(reason.text for reason in reasons)
