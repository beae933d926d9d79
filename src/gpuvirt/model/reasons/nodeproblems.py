"""Problems of the agent itself, of its files, and of the kubelet and the API server as the agent observes them."""

import re
from pathlib import PurePath

from gpuvirt.model.reasons import refusals
from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

NAME_KUBELET_DIR = "start the kubelet, or name its folder with --kubelet-dir"
NO_LISTENER = "no process listens at it"
PROCESSES = "look for processes in state D (ps axo pid,stat,wchan:30,cmd), and see the kernel's log (dmesg)"
NOT_REVIEWED = Seen("GpuNode $.spec.reviewed and $.spec.withheld", "no such name")


def kubelet_away(subject: str, socket: object, *, is_left: bool = False) -> Reason:
    """No resource can be registered; `is_left`: the socket exists, of a kubelet that has ended."""
    problem = "has no listener" if is_left else "does not exist"
    seen = Seen(str(socket), NO_LISTENER) if is_left else Seen.absent(str(socket))
    message = f"can't be registered: the kubelet's socket {socket} {problem}"
    return Reason(ReasonCode.KUBELET_AWAY, subject, message, (seen,), NAME_KUBELET_DIR)


def not_registered(resource: str, error: str | None = None) -> Reason:
    """The kubelet does not know a resource yet."""
    seen = (Seen("", error),) if error is not None else ()
    message = "is not registered with the kubelet yet; the agent tries again"
    return Reason(ReasonCode.NOT_REGISTERED, resource, message, seen, "see the kubelet's log: journalctl -u kubelet")


def scan_blocked(subject: str, error: str, effect: str) -> Reason:
    """A read sleeps in the kernel."""
    return Reason(ReasonCode.SCAN_BLOCKED, subject, f"can't be read; {effect}", (Seen("", error),), PROCESSES)


def cdi_not_written(path: object, error: str, *, is_share: bool = False) -> Reason:
    """Kata finds devices by their CDI specs, and a container runtime finds a container's share of a GPU."""
    message, fix = "can't be written, so Kata finds no devices; KubeVirt is not affected", _writable(path)
    if is_share:
        message, fix = "can't be written, so its container can't start", _writable(_folder(path))
    else:
        fix += ", or set cdi: none"
    return Reason(ReasonCode.CDI_NOT_WRITTEN, str(path), message, (_failed(path, error),), fix)


def lost(code: ReasonCode, path: object, message: str, consequence: str, *seen: Seen) -> Reason:
    """A file with what the agent must remember could not be used."""
    return Reason(code, str(path), message, seen, f"no action needed: {consequence}")


def not_written(code: ReasonCode, path: object, error: str, consequence: str) -> Reason:
    """A restart of the agent would lose what the file has."""
    return Reason(
        code, str(path), f"can't be written; {consequence}", (_failed(path, error),), _writable(_folder(path))
    )


def journal_not_written(unit: str, path: object, error: str) -> Reason:
    """No change of a driver begins that the driver journal does not have."""
    return refusals.failed("write the driver journal", unit, _failed(path, error), fix=_writable(_folder(path)))


def _failed(path: object, error: str) -> Seen:
    """Return the error of a write as the kernel words it, at its file."""
    return Seen(str(path), re.sub(r"\[Errno \d+\] ", "", error.removeprefix(f"{path}: ")))


def _folder(path: object) -> PurePath:
    """Return the folder of a file, which itself may not exist yet."""
    return PurePath(str(path)).parent


def _writable(folder: object) -> str:
    """Return how files can be written into a folder again."""
    return f"free space on the file system of {folder} (df {folder}), or mount it writable"


def config_invalid(where: str, problem: str, fix: str | None, *seen: Seen) -> Reason:
    """A value of the desired state can't be used."""
    return Reason(ReasonCode.CONFIG_INVALID, where, problem, seen, fix)


def not_answered(subject: str, message: str, *seen: Seen) -> Reason:
    """Only the API server knows what the agent needs."""
    fix = "start the API server if it is down; else check the network between this node and the API server"
    return Reason(ReasonCode.API_SERVER_AWAY, subject, message, seen, fix)


def awaits_controller(name: str, most_s: float) -> Reason:
    """KubeVirt may offer the resource itself."""
    message = "is not registered yet: the controller has not reported whether KubeVirt offers it itself"
    fix = f"no action needed: the report takes a second, and after {most_s:.0f} s the agent registers without it"
    return Reason(ReasonCode.AWAITS_CONTROLLER, name, message, (NOT_REVIEWED,), fix)
