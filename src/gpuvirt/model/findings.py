"""What a check finds: how grave it is, where it was seen, why it matters, and what mends it; and the report of all."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpuvirt.model.reasons import Reason, ReasonCode

VERSION = 1


class Level(StrEnum):
    """How grave a finding is, from the least to the gravest."""

    OK = "ok"
    UNKNOWN = "unknown"
    """It could not be told: not the same as absent, and not the same as well."""
    WARNING = "warning"
    ERROR = "error"
    """Something that this host is set up to do can't work."""


GRAVITY = tuple(Level)


class Area(StrEnum):
    """The parts of the way from firmware to virtual machine, in its order."""

    FIRMWARE = "firmware"
    IOMMU = "iommu"
    DRIVERS = "drivers"
    DEVICES = "devices"
    VGPU = "vgpu"
    KUBELET = "kubelet"
    RUNTIME = "runtime"
    KUBEVIRT = "kubevirt"


class FindingCode(StrEnum):
    """What is wrong with a host or a cluster; what is wrong with a device is a ReasonCode."""

    # firmware
    NO_VIRTUALIZATION = "NoVirtualization"
    HOST_IS_VM = "HostIsVm"
    KVM_MISSING = "KvmMissing"
    BAR_UNASSIGNED = "BarUnassigned"

    # iommu
    IOMMU_OFF = "IommuOff"
    KERNEL_ARGUMENT = "KernelArgument"
    INTERRUPTS_NOT_REMAPPED = "InterruptsNotRemapped"
    UNSAFE_INTERRUPTS = "UnsafeInterrupts"
    SHARED_GROUP = "SharedGroup"
    ACS_OVERRIDE = "AcsOverride"

    # drivers
    VFIO_MISSING = "VfioMissing"
    VFIO_BLOCKED = "VfioBlocked"
    IDS_NOT_BOUND = "IdsNotBound"
    DRIVERS_FIGHT = "DriversFight"
    BOOT_CONSOLE = "BootConsole"

    # vgpu
    NO_VGPU_TYPES = "NoVgpuTypes"
    VFS_OFF = "VfsOff"

    # kubelet
    KUBELET_NOT_LISTENING = "KubeletNotListening"
    AGENT_AWAY = "AgentAway"
    COUNTS_DIFFER = "CountsDiffer"
    NUMA_NOT_ALIGNED = "NumaNotAligned"
    CPUS_ON_OTHER_NODE = "CpusOnOtherNode"
    NOT_COUNTED = "NotCounted"

    # runtime
    CDI_OFF = "CdiOff"
    CDI_FOLDER_NOT_READ = "CdiFolderNotRead"

    # kubevirt
    NOT_PERMITTED = "NotPermitted"
    PERMITTED_NAME_UNKNOWN = "PermittedNameUnknown"
    SELECTOR_MISMATCH = "SelectorMismatch"
    NOT_EXTERNAL = "NotExternal"
    MDEVS_NOT_OURS = "MdevsNotOurs"
    FEATURE_GATE_MISSING = "FeatureGateMissing"

    # VMs and pods
    NO_SUCH_OBJECT = "NoSuchObject"
    KUBEVIRT_NOT_INSTALLED = "KubeVirtNotInstalled"
    NO_DEVICE_REQUESTED = "NoDeviceRequested"
    RESTART_REQUIRED = "RestartRequired"
    VM_STOPPED = "VmStopped"
    VM_NOT_STARTED = "VmNotStarted"
    POD_MISSING = "PodMissing"
    POD_NOT_RUNNING = "PodNotRunning"
    UNSCHEDULABLE = "Unschedulable"
    ADMISSION_REFUSED = "AdmissionRefused"

    # nodes for VMs and pods
    TOO_FEW_DEVICES = "TooFewDevices"
    ALL_ALLOCATED = "AllAllocated"
    NODE_NOT_READY = "NodeNotReady"
    NODE_CORDONED = "NodeCordoned"
    NODE_SELECTOR_MISMATCH = "NodeSelectorMismatch"
    TAINT_NOT_TOLERATED = "TaintNotTolerated"

    # any
    NO_SUCH_DEVICE = "NoSuchDevice"
    NO_SUCH_RESOURCE = "NoSuchResource"
    NOT_A_GPU = "NotAGpu"
    NOT_READ = "NotRead"


class Shown(Protocol):
    """Something that was looked at."""

    @property
    def path(self) -> str:
        """Where."""
        ...

    @property
    def shown(self) -> str:
        """What stood there, in words."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """Where something was read, and what stood there."""

    path: str
    value: str

    @property
    def shown(self) -> str:
        """What stood there."""
        return self.value


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say."""

    level: Level
    subject: str
    message: str
    """What is so, as words that follow the subject."""
    code: FindingCode | ReasonCode | None = None
    """What is wrong, in one word; None where nothing is."""
    seen: tuple[Seen, ...] = ()
    why: str | None = None
    """Why it matters."""
    fix: tuple[str, ...] = ()
    """What to do about it, in its order: words, commands to give, lines to write."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found."""

    area: Area
    check: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What all checks found; its JSON is a contract (docs/reference.md): fields are added to, and not renamed."""

    level: Level
    results: tuple[Result, ...]
    version: int = VERSION


def worst(findings: Iterable[Finding]) -> Level:
    """Return the gravest level among findings."""
    return max((finding.level for finding in findings), key=GRAVITY.index, default=Level.OK)


def seen(*things: Shown) -> tuple[Seen, ...]:
    """Return what was looked at."""
    return tuple(Seen(thing.path, thing.shown) for thing in things)


def fine(subject: str, message: str, *things: Shown) -> Finding:
    """Return that something is as it should be."""
    return Finding(Level.OK, subject, message, seen=seen(*things))


def unread(subject: str, message: str, *things: Shown) -> Finding:
    """Return that something could not be told."""
    return Finding(
        Level.UNKNOWN,
        subject,
        message,
        FindingCode.NOT_READ,
        seen(*things),
        why="what could not be read is not taken for absent, nor for well",
        fix=("run it as root, with the host's own /sys, /proc, /dev, /etc and /lib/modules below --host-root",),
    )


def listed(names: Iterable[str], *, most: int = 10) -> str:
    """Return names in a row, each whole: the first ones, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def of_reason(reason: Reason, level: Level) -> Finding:
    """Return a reason as a finding, with the same code and words."""
    return Finding(
        level,
        reason.subject,
        reason.message,
        reason.code,
        (_place(reason.seen),) if reason.seen else (),
        fix=(reason.fix,) if reason.fix else (),
    )


def _place(text: str) -> Seen:
    """Return in two parts what a reason has seen: `PATH: VALUE`, `PATH -> VALUE`, `PATH begins ffff`, `no PATH`."""
    if text.startswith("no /"):
        path, _, more = text.removeprefix("no ").partition(" ")
        return Seen(path.rstrip(","), f"not there{', ' if path.endswith(',') else ' '}{more}".rstrip())
    for separator in (": ", " -> ", " "):
        path, found, value = text.partition(separator)
        if found:
            return Seen(path, value)
    return Seen(text, "there")
