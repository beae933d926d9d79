"""Why a change or an allocation does not pass a gate: another process has it, its files fail, or a plugin lacks one."""

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode


def busy(unit: str, detail: str) -> Reason:
    """Another process has the gate of the unit."""
    message = "is being changed by another process"
    return Reason(ReasonCode.UNIT_BUSY, unit, message, (Seen("", detail),), "wait until the change ends")


def allocating(unit: str, path: str) -> Reason:
    """An allocation shares the lock of the unit's slot; it may create a vGPU."""
    message = "can't be changed yet: a device of its PCI slot is being allocated now"
    fix = (
        "try the command again; the agent tries again by itself. If this persists, the kernel blocks the creation of a"
        " vGPU: stop the process that uses the GPU"
    )
    return Reason(ReasonCode.UNIT_BUSY, unit, message, (Seen(path, "shared by an allocation"),), fix)


def gate_failed(unit: str, path: str, problem: str) -> Reason:
    """A file by which allocations and changes exclude each other can't be used."""
    message = "can't be allocated or changed: the lock file that keeps allocations and changes apart can't be used"
    fix = (
        "EMFILE: restart the process that names this reason; ENOSPC: free space on that file system; EROFS or EACCES:"
        " mount the folder writable, or see `ausearch -m avc`"
    )
    return Reason(ReasonCode.GATE_FAILED, unit, message, (Seen(path, problem),), fix)


def takes_no_part(path: str, problem: str) -> Reason:
    """A device plugin can't write the folder of its gates, so that commands can't ask it to drain devices."""
    message = "can't lock its devices against changes, so gpuvirt's commands refuse to change any device that it lists"
    fix = "let the pod create folders in the kubelet's device-plugins folder; or stop it before a command changes GPUs"
    return Reason(ReasonCode.GATE_FAILED, "the device plugin", message, (Seen(path, problem),), fix)


def agent_silent(unit: str, waited_s: float, where: str) -> Reason:
    """The kubelet could allocate devices that a command is about to change."""
    message = f"is offered by this node's agent, which has not withdrawn it from the kubelet within {waited_s:g} s"
    fix = (
        "see the agent's log (if the agent hangs, `gpuvirt devices` shows a state that is several seconds old), or"
        " stop the agent and try again"
    )
    return Reason(ReasonCode.AGENT_SILENT, unit, message, (Seen(where, "Draining, not acknowledged"),), fix)


def still_listed(unit: str, socket: str, device: str) -> Reason:
    """A device plugin that can't be asked to drain devices could allocate a device that a command is to change."""
    message = "is offered by a device plugin that commands can't ask to withdraw it: the plugin has no gates"
    fix = "stop the plugin, or upgrade it and let its pod create folders in the kubelet's device-plugins folder"
    return Reason(ReasonCode.AGENT_SILENT, unit, message, (Seen(socket, device),), fix)
