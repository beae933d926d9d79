"""Why a change or an allocation does not pass a gate: another process has it, its files fail, or a plugin lacks one."""

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode


def gate_failed(unit: str, path: str, problem: str, *, is_plugins: bool = False) -> Reason:
    """A file by which allocations and changes exclude each other can't be used; `is_plugins`: by a device plugin."""
    message = "can't be allocated or changed: the lock file that keeps allocations and changes apart can't be used"
    fix = (
        "EMFILE: restart the process that names this reason; ENOSPC: free space on that file system; EROFS or EACCES:"
        " mount the folder writable for the pod, or see `ausearch -m avc`"
    )
    if is_plugins:
        message = "can't lock its devices against changes, so commands refuse to change any device that it lists"
        fix += "; or stop the plugin before a command changes GPUs"
    return Reason(ReasonCode.GATE_FAILED, unit, message, (Seen(path, problem),), fix)


def agent_silent(unit: str, path: str, found: str, waited_s: float | None = None) -> Reason:
    """The kubelet could allocate devices that a command is about to change; `waited_s`: None without gates."""
    message = "is offered by a device plugin that commands can't ask to withdraw it: the plugin has no gates"
    fix = "stop the plugin, or upgrade it and let its pod create folders in the kubelet's device-plugins folder"
    if waited_s is not None:
        message = f"is offered by this node's agent, which has not withdrawn it from the kubelet within {waited_s:g} s"
        fix = (
            "see the agent's log (if the agent hangs, `gpuvirt devices` shows a state that is several seconds old), or"
            " stop the agent and try again"
        )
    return Reason(ReasonCode.AGENT_SILENT, unit, message, (Seen(path, found),), fix)
